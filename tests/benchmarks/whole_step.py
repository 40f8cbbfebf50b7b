"""A whole train step of ``opd run`` (Ray, HTTP, every process) against TRL and a bare loop.

All three sample, score and train the same tiny models on prompts of the same file, 128 a step, in
fp32 with one compute thread a process. Two settings: answers of like length, and mixed ones (one
prompt in eight is a chain of 20 terms, which this student answers at great length or without end).
The sides take turns, so that all see the same noise; the first step of each is left out.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deployments.prepare_servers import _lock, run_command
from deployments.recipes.assets.tiny.task import draw_expression, is_held_out, prompt_of
from opd_core.errors import PreflightError
from opd_core.recipe import cache_dir
from tests.benchmarks.run_cpu import TICKS, watch

ASSETS = Path("deployments/recipes/assets/tiny").absolute()
TRL_PACKAGES = ("torch==2.13.0", "transformers==5.19.0", "trl==1.16.0")
"""torch is named again: a plain TRL would bring whatever build of it the index has."""
ROUNDS, LONG_TERMS, LIMIT_S = 3, 20, 600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all three sides read. ``began`` is when the side's process was started."""

    name: str
    data: str
    max_new_tokens: int
    steps: int
    student: str = str(ASSETS / "student")
    teacher: str = str(ASSETS / "teacher")
    max_prompt_tokens: int = 48
    prompts_per_step: int = 128
    learning_rate: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.99)
    warmup_steps: int = 10
    seed: int = 1234
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One side's mean step in one round; ``longest`` is None where nobody knows it."""

    start_s: float
    wall_s: float
    cpu_s: float
    tokens: float
    longest: int | None
    cpu_by_role: dict[str, float]
    wall_by_part: dict[str, float]


def run() -> Iterator[str]:
    """Progress, and a table of medians for each setting."""
    python = trl_environment()
    sides: dict[str, Callable[[Setting, Path], Measured]] = {
        "opd run": ours,
        "TRL": lambda setting, folder: plain([python, "tests/benchmarks/trl_side.py"], setting),
        "bare loop": lambda setting, folder: plain(
            [sys.executable, "-m", "tests.benchmarks.bare_loop"], setting
        ),
    }
    yield machine()
    with tempfile.TemporaryDirectory() as scratch:
        for setting in settings(Path(scratch)):
            found: dict[str, list[Measured]] = {name: [] for name in sides}
            for number in range(ROUNDS):
                for name, side in sides.items():
                    folder = Path(scratch) / f"{setting.name}-{number}"
                    one = side(replace(setting, seed=setting.seed + number), folder)
                    found[name].append(one)
                    yield (
                        f"{setting.name}, round {number + 1}, {name}: {one.wall_s:.3f} s and "
                        f"{one.cpu_s:.3f} CPU s a step, {one.tokens / one.wall_s:,.0f} tokens/s"
                    )
            yield from table(setting, found)


def settings(folder: Path) -> Iterator[Setting]:
    """Both settings; their prompts are written to ``folder``, each occurs once in a run."""
    rows = (ASSETS / "train.jsonl").read_text(encoding="utf-8").splitlines()
    like = Setting("like lengths", str(folder / "like.jsonl"), max_new_tokens=48, steps=21)
    Path(like.data).write_text("\n".join(rows[: 22 * 128]) + "\n", encoding="utf-8")
    yield like
    mixed = Setting("mixed lengths", str(folder / "mixed.jsonl"), max_new_tokens=200, steps=8)
    rng = random.Random(0)
    lines = [
        row if number % 8 else _long_row(rng, row) for number, row in enumerate(rows[: 9 * 128])
    ]
    Path(mixed.data).write_text("\n".join(lines) + "\n", encoding="utf-8")
    yield mixed


def _long_row(rng: random.Random, row: str) -> str:
    """``row`` with a long chain in place of its own."""
    while is_held_out(chain := draw_expression(rng, LONG_TERMS)):
        continue
    return json.dumps(json.loads(row) | {"prompt": [{"role": "user", "content": prompt_of(chain)}]})


def trl_environment() -> str:
    """The interpreter of TRL's own environment, which is built if it is not there."""
    folder = cache_dir() / "trl-1.16"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = str(folder / "bin/python")
    with _lock(folder.with_name(folder.name + ".lock"), _silent):
        if not (folder / ".complete").exists():
            pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *TRL_PACKAGES]):
                done = run_command(command, _silent)
                if done.returncode:
                    raise PreflightError(f"TRL's environment in {folder}:\n{done.output[-1500:]}")
            (folder / ".complete").touch()
    return python


def _silent(line: str) -> None:
    """Nothing is told of this line."""


def plain(command: list[str], setting: Setting) -> Measured:
    """A side that is one process and prints what its steps took."""
    file = Path(setting.data).with_suffix(".json")
    file.write_text(json.dumps(asdict(replace(setting, began=time.time()))), encoding="utf-8")
    done = subprocess.run(
        [*command, str(file)],
        env=one_thread(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    steps = told["steps"][1:]
    assert len(steps) == setting.steps - 1
    return Measured(
        told["start_s"],
        *(statistics.fmean(step[key] for step in steps) for key in ("wall_s", "cpu_s", "tokens")),
        longest=max(step["longest"] for step in steps),
        cpu_by_role={},
        wall_by_part={},
    )


def one_thread() -> dict[str, str]:
    """The environment of every side."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def ours(setting: Setting, folder: Path) -> Measured:
    """A whole ``opd run``, without evaluation, checkpoints and trackers.

    It makes one step more than the others, so that all its processes still live when the last
    measured step has ended.
    """
    command = [sys.executable, "-m", "deployments.cli", "run", "tiny", *changes(setting, folder)]
    began, log = time.time(), folder.with_suffix(".log")
    with log.open("w") as output:
        flow = subprocess.Popen(command, env=one_thread(), stdout=output, stderr=output)
        try:
            seen = watch(flow, folder, setting.steps)
            flow.wait(LIMIT_S)
        finally:
            flow.terminate()
            flow.wait()
    if flow.returncode or seen is None:
        said = log.read_text(encoding="utf-8")[-2000:]
        raise RuntimeError(f"opd run failed ({flow.returncode}):\n{said}")
    first, steps = seen.records[0], seen.records[1:]
    count = len(steps)
    used = {r: (seen.after[r] - seen.before[r]) / TICKS / count for r in seen.after}
    cut = any(record.metrics["rollout/truncated_fraction"] for record in steps)
    return Measured(
        start_s=first.time_s - first.metrics["time/step_s"] - began,
        wall_s=(steps[-1].time_s - first.time_s) / count,
        cpu_s=sum(used.values()),
        tokens=statistics.fmean(record.metrics["response_tokens"] for record in steps),
        longest=setting.max_new_tokens if cut else None,
        cpu_by_role=used,
        wall_by_part={
            part: statistics.fmean(record.metrics[f"time/{part}_s"] for record in steps)
            for part in ("sampling", "scoring", "training", "weight_sync")
        },
    )


def changes(setting: Setting, folder: Path) -> list[str]:
    """What is different from the recipe ``tiny``."""
    changed = {
        "data.train": setting.data,
        "data.evaluation": "null",
        "data.max_prompt_tokens": setting.max_prompt_tokens,
        "task.judge": "null",
        "sampling.max_new_tokens": setting.max_new_tokens,
        "training.steps": setting.steps + 1,
        "training.prompts_per_step": setting.prompts_per_step,
        "training.learning_rate": setting.learning_rate,
        "training.warmup_steps": setting.warmup_steps,
        "training.checkpoint_every": 0,
        "tracking.mlflow": "false",
        "tracking.tensorboard": "false",
        "run.root": folder,
        "seed": setting.seed,
    }
    return [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]


def machine() -> str:
    """Where the figures come from."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.split(": ")[1] for line in lines if line.startswith("model name")}
    return (
        f"{', '.join(sorted(names)) or platform.machine()}, {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, {', '.join(TRL_PACKAGES)}"
    )


def table(setting: Setting, found: dict[str, list[Measured]]) -> Iterator[str]:
    """Medians over the rounds, lowest to highest in brackets, and our ratios to the others."""
    yield f"{setting.name}: at most {setting.max_new_tokens} new tokens"
    yield "| | s a step | CPU s a step | tokens/s | mean length | longest | start-up, s |"
    yield "|---|---|---|---|---|---|---|"
    for name, rounds in found.items():
        lengths = [one.tokens / setting.prompts_per_step for one in rounds]
        longest = [one.longest for one in rounds if one.longest is not None]
        cells = [
            spread([one.wall_s for one in rounds], ".3f"),
            spread([one.cpu_s for one in rounds], ".3f"),
            spread([one.tokens / one.wall_s for one in rounds], ",.0f"),
            f"{statistics.median(lengths):.1f}",
            f"{max(longest)}" if longest else "",
            f"{statistics.median(one.start_s for one in rounds):.0f}",
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    own, trl, bare = (summed(rounds) for rounds in found.values())
    yield (
        f"opd run / TRL: {own.wall_s / trl.wall_s:.2f} x the seconds, "
        f"{own.cpu_s / trl.cpu_s:.2f} x the CPU seconds, "
        f"{own.tokens / own.wall_s / (trl.tokens / trl.wall_s):.2f} x the tokens per second"
    )
    yield f"opd run / bare loop: {own.cpu_s / bare.cpu_s:.2f} x the CPU seconds"
    for title, parts in (("CPU", own.cpu_by_role), ("wall", own.wall_by_part)):
        ordered = sorted(parts.items(), key=lambda item: -item[1])
        yield f"{title} ms of our step: " + ", ".join(f"{k} {1e3 * v:.0f}" for k, v in ordered)


def summed(rounds: list[Measured]) -> Measured:
    """Medians over the rounds."""

    def middle(values: Iterable[float]) -> float:
        return statistics.median(values)

    return Measured(
        middle(one.start_s for one in rounds),
        middle(one.wall_s for one in rounds),
        middle(one.cpu_s for one in rounds),
        middle(one.tokens for one in rounds),
        None,
        {k: middle(one.cpu_by_role.get(k, 0.0) for one in rounds) for k in rounds[0].cpu_by_role},
        {k: middle(one.wall_by_part[k] for one in rounds) for k in rounds[0].wall_by_part},
    )


def spread(values: list[float], form: str) -> str:
    """The median, and the lowest and the highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
