"""Build the tiny models and their data, all from fixed seeds.

    python -m deployments.recipes.assets.tiny.build [--out DIR] [--data-only] [--check]

The full build takes about six minutes of one core; `--data-only` about one second.
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
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from . import task
from .tokenizer import FILES, build_tokenizer, write_tokenizer

SHIPPED = Path(__file__).parent
SAMPLING_SEEDS = (1000, 1001, 1002, 1003)


@dataclass(frozen=True)
class Questions:
    """A data file: of each data source, so many distinct questions of each number of terms."""

    seed: int
    held_out: bool
    counts: Mapping[int, int]
    sources: tuple[str, ...]

    def drawn(self) -> list[tuple[str, str]]:
        """Pairs (data source, expression), the sources taking turns."""
        rng = random.Random(self.seed)
        drawn = []
        for source in self.sources:
            operators = task.OPERATORS_OF[source]
            expressions = task.distinct_expressions(
                rng, self.counts, held_out=self.held_out, operators=operators
            )
            drawn.append([(source, expression) for expression in expressions])
        return [pair for turn in zip(*drawn, strict=True) for pair in turn]


@dataclass(frozen=True)
class Kit:
    """What is built into one folder: models, and a training and a held-out file."""

    folder: str
    models: Mapping[str, task.SftRecipe]
    questions: Mapping[str, Questions]

    def data_files(self) -> tuple[str, ...]:
        """Names, relative to the assets, of what is made without training."""
        files = [f"{name}.jsonl" for name in self.questions]
        return self._named(files + [f"{model}/{name}" for model in self.models for name in FILES])

    def model_files(self) -> tuple[str, ...]:
        """Names, relative to the assets, of what training makes."""
        names = ("config.json", "generation_config.json", "model.safetensors")
        return self._named([f"{model}/{name}" for model in self.models for name in names])

    def _named(self, files: Sequence[str]) -> tuple[str, ...]:
        return tuple((Path(self.folder) / file).as_posix() for file in files)


def sft_recipe(seed: int, mistake_rate: float | Mapping[str, float], steps: int) -> task.SftRecipe:
    """The settings that all models share."""
    return task.SftRecipe(seed, mistake_rate, steps, batch_size=32, learning_rate=3e-3)


TEACHER = sft_recipe(seed=1, mistake_rate=0.0, steps=2000)
STUDENT = sft_recipe(seed=2, mistake_rate=0.3, steps=1500)
ADDER = sft_recipe(seed=3, mistake_rate={"+": 0.0, "-": 0.5}, steps=2000)
SUBTRACTOR = sft_recipe(seed=4, mistake_rate={"+": 0.5, "-": 0.0}, steps=2000)

PAIR = Kit(
    folder="",
    models={"teacher": TEACHER, "student": STUDENT},
    questions={
        "heldout": Questions(7, True, {2: 10, 3: 123, 4: 123}, ("chain_sum",)),
        "train": Questions(8, False, {2: 160, 3: 1920, 4: 1920}, ("chain_sum",)),
    },
)
MULTI = Kit(
    folder="multi",
    models={"adder": ADDER, "subtractor": SUBTRACTOR},
    questions={
        "heldout": Questions(9, True, {2: 8, 3: 60, 4: 60}, ("chain_add", "chain_sub")),
        "train": Questions(10, False, {2: 80, 3: 800, 4: 1120}, ("chain_add", "chain_sub")),
    },
)
KITS = (PAIR, MULTI)


def row(index: int, source: str, expression: str) -> dict[str, object]:
    """One line of a data file, in DAPO layout."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": task.prompt_of(expression)}],
        "reward_model": {"ground_truth": task.answer_of(expression)},
        "extra_info": {"index": index},
    }


def build_data(out: Path, kit: Kit) -> None:
    """Write the kit's data files under `out`: the data and, for each model, the same tokenizer."""
    for model in kit.models:
        (out / kit.folder / model).mkdir(parents=True, exist_ok=True)
        write_tokenizer(out / kit.folder / model)
    for name, questions in kit.questions.items():
        lines = [
            json.dumps(row(i, *drawn), separators=(",", ":")) + "\n"
            for i, drawn in enumerate(questions.drawn())
        ]
        path = out / kit.folder / f"{name}.jsonl"
        path.write_text("".join(lines), encoding="utf-8", newline="\n")


def train_models(out: Path, kit: Kit) -> None:
    """Train the kit's models and write its model files under `out`."""
    import torch  # here, so that --data-only does not wait for it

    from . import sft

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name, recipe in kit.models.items():
        sft.save(sft.train(build_tokenizer(), recipe, name=name), out / kit.folder / name)


def measure(out: Path, kit: Kit, teacher: str, source: str) -> dict[str, float]:
    """Figures of a teacher and of the student on the held-out questions of a data source."""
    from . import sft

    expressions = [e for s, e in kit.questions["heldout"].drawn() if s == source]
    models = sft.load(out / kit.folder / teacher), sft.load(out / "student")
    return sft.measure(build_tokenizer(), *models, expressions, SAMPLING_SEEDS)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(out: Path, kit: Kit, figures: Mapping[str, object]) -> None:
    """Write manifest.json: seeds and recipes, versions, figures, and each file's hash."""
    import torch

    folder = out / kit.folder
    libraries = ("torch", "transformers", "tokenizers", "safetensors")
    files = sorted((*kit.data_files(), *kit.model_files()))
    manifest = {
        "seeds": {name: questions.seed for name, questions in kit.questions.items()}
        | {"sampling": SAMPLING_SEEDS},
        "recipes": {name: asdict(recipe) for name, recipe in kit.models.items()},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in libraries},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "figures": dict(figures),
        "sha256": {
            (out / name).relative_to(folder).as_posix(): sha256_of(out / name) for name in files
        },
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8", newline="\n")


def build(out: Path, *, data_only: bool) -> tuple[str, ...]:
    """Build into `out` and return the names of the files written, relative to it."""
    for kit in KITS:
        build_data(out, kit)
    data_files = [name for kit in KITS for name in kit.data_files()]
    if data_only:
        return tuple(data_files)
    train_models(out, PAIR)
    write_manifest(out, PAIR, measure(out, PAIR, "teacher", "chain_sum"))
    train_models(out, MULTI)
    figures = {
        source: {teacher: measure(out, MULTI, teacher, source) for teacher in MULTI.models}
        for source in MULTI.questions["heldout"].sources
    }
    write_manifest(out, MULTI, figures)
    model_files = [name for kit in KITS for name in kit.model_files()]
    return (*data_files, *model_files, "manifest.json", "multi/manifest.json")


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
    parser = argparse.ArgumentParser(description="Build the tiny models and their data.")
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
