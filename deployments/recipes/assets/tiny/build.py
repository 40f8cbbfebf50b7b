"""Build the tiny pair: tokenizer, data, teacher and student, all from fixed seeds.

    python -m deployments.recipes.assets.tiny.build [--out DIR] [--data-only] [--check]

The full build takes about 150 seconds of one core; `--data-only` about one second.
`--check` builds into a temporary folder and names each file that differs from what is in DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from . import task
from .tokenizer import FILES, build_tokenizer, write_tokenizer

SHIPPED = Path(__file__).parent

TEACHER = task.SftRecipe(seed=1, mistake_rate=0.0, steps=2000, batch_size=32, learning_rate=3e-3)
STUDENT = task.SftRecipe(seed=2, mistake_rate=0.3, steps=1500, batch_size=32, learning_rate=3e-3)
HELD_OUT_SEED, HELD_OUT_COUNTS = 7, {2: 10, 3: 123, 4: 123}
TRAIN_SEED, TRAIN_COUNTS = 8, {2: 160, 3: 1920, 4: 1920}
SAMPLING_SEEDS = (1000, 1001, 1002, 1003)

DATA_FILES = (
    "train.jsonl",
    "heldout.jsonl",
    *(f"{model}/{name}" for model in ("teacher", "student") for name in FILES),
)
MODEL_FILES = tuple(
    f"{model}/{name}"
    for model in ("teacher", "student")
    for name in ("config.json", "generation_config.json", "model.safetensors")
)


def row(index: int, expression: str) -> dict[str, object]:
    """One line of a data file, in DAPO layout."""
    return {
        "data_source": task.DATA_SOURCE,
        "prompt": [{"role": "user", "content": task.prompt_of(expression)}],
        "reward_model": {"ground_truth": task.answer_of(expression)},
        "extra_info": {"index": index},
    }


def write_rows(path: Path, seed: int, counts: Mapping[int, int], *, held_out: bool) -> None:
    """Write one data file; the expressions depend on the arguments only."""
    expressions = task.distinct_expressions(random.Random(seed), counts, held_out=held_out)
    lines = [
        json.dumps(row(i, expression), separators=(",", ":")) + "\n"
        for i, expression in enumerate(expressions)
    ]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def build_data(out: Path) -> None:
    """Write `DATA_FILES` under `out`: the data and, for each model, the same tokenizer."""
    for model in ("teacher", "student"):
        (out / model).mkdir(parents=True, exist_ok=True)
        write_tokenizer(out / model)
    write_rows(out / "heldout.jsonl", HELD_OUT_SEED, HELD_OUT_COUNTS, held_out=True)
    write_rows(out / "train.jsonl", TRAIN_SEED, TRAIN_COUNTS, held_out=False)


def build_models(out: Path) -> dict[str, float]:
    """Train both models, write `MODEL_FILES` under `out`, and return the measured figures."""
    import torch  # here, so that --data-only does not wait for it

    from . import sft

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    teacher = sft.train(tokenizer, TEACHER, name="teacher")
    sft.save(teacher, out / "teacher")
    student = sft.train(tokenizer, STUDENT, name="student")
    sft.save(student, out / "student")
    held_out = task.distinct_expressions(
        random.Random(HELD_OUT_SEED), HELD_OUT_COUNTS, held_out=True
    )
    return sft.measure(tokenizer, teacher, student, held_out, SAMPLING_SEEDS)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(out: Path, figures: Mapping[str, float]) -> None:
    """Write manifest.json: seeds and recipes, versions, figures, and each file's hash."""
    import torch

    libraries = ("torch", "transformers", "tokenizers", "safetensors")
    manifest = {
        "seeds": {"heldout": HELD_OUT_SEED, "train": TRAIN_SEED, "sampling": SAMPLING_SEEDS},
        "recipes": {"teacher": asdict(TEACHER), "student": asdict(STUDENT)},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in libraries},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "figures": dict(figures),
        "sha256": {name: sha256_of(out / name) for name in sorted((*DATA_FILES, *MODEL_FILES))},
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (out / "manifest.json").write_text(text, encoding="utf-8", newline="\n")


def build(out: Path, *, data_only: bool) -> tuple[str, ...]:
    """Build into `out` and return the names of the files written, relative to it."""
    build_data(out)
    if data_only:
        return DATA_FILES
    write_manifest(out, build_models(out))
    return (*DATA_FILES, *MODEL_FILES, "manifest.json")


def differing_files(shipped: Path, rebuilt: Path, names: Sequence[str]) -> list[str]:
    """The names whose bytes are not the same in both folders; a missing file differs."""
    return [
        name
        for name in names
        if not (shipped / name).is_file()
        or (shipped / name).read_bytes() != (rebuilt / name).read_bytes()
    ]


def check(shipped: Path, *, data_only: bool) -> list[str]:
    """Rebuild into a temporary folder and return the names of the shipped files that differ."""
    with tempfile.TemporaryDirectory() as folder:
        names = build(Path(folder), data_only=data_only)
        return differing_files(shipped, Path(folder), names)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(description="Build the tiny teacher, student and data.")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder of the assets")
    parser.add_argument("--data-only", action="store_true", help="only data and tokenizer")
    parser.add_argument("--check", action="store_true", help="rebuild elsewhere and compare")
    options = parser.parse_args(arguments)
    if options.check:
        names = check(options.out, data_only=options.data_only)
        for name in names:
            print(f"differs: {name}")
        print("no file differs" if not names else f"{len(names)} files differ")
        return int(bool(names))
    written = build(options.out, data_only=options.data_only)
    print(f"wrote {len(written)} files to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
