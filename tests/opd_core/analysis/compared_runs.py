"""Runs as a comparison gets them, made in memory: real recipes, invented numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opd_core.analysis.run_data import RunData, Series
from opd_core.recipe import load_recipe
from opd_core.tracking.journal import JournalRecord
from opd_core.training.evaluation_records import EvaluationRecord, QuestionResult

RECIPE = Path(__file__).parents[3] / "deployments/recipes/tiny.yaml"
FINGERPRINTS = {"the student": "aaaa", "data.train": "bbbb", "data.evaluation": "cccc"}
STEPS, EVERY, TOKENS, STEP_S = 50, 25, 1000.0, 2.0


def questions(chances: Sequence[float], seed: int, samples: int = 4) -> tuple[QuestionResult, ...]:
    """Questions q0, q1, … answered rightly with these chances."""
    random = np.random.default_rng(seed)
    return tuple(
        question(f"q{row}", random.binomial(1, chance, samples).astype(float))
        for row, chance in enumerate(chances)
    )


def question(key: str, rewards: Iterable[float], source: str = "chain_sum") -> QuestionResult:
    """One question and the rewards of its answers."""
    kept = tuple(float(reward) for reward in rewards)
    return QuestionResult(key, 0, source, kept, (20,) * len(kept), (False,) * len(kept))


def evaluation(
    asked: Sequence[QuestionResult], train_step: int = STEPS, temperature: float = 1.0
) -> EvaluationRecord:
    """An evaluation of these questions."""
    return EvaluationRecord(train_step, 4, temperature, 0, tuple(asked))


def journal(
    steps: int = STEPS, tokens: float = TOKENS, **metrics: float | Sequence[float]
) -> list[JournalRecord]:
    """One record a train step; a metric is a number or one value a step."""
    return [
        JournalRecord(
            step,
            0.0,
            {"time/step_s": STEP_S, "response_tokens": tokens}
            | {
                name.replace("__", "/"): float(np.broadcast_to(value, steps)[step - 1])
                for name, value in metrics.items()
            },
        )
        for step in range(1, steps + 1)
    ]


def make_run(
    run_id: str,
    seed: int = 1,
    asked: Sequence[QuestionResult] | None = None,
    *,
    recipe: Sequence[str] = (),
    evaluations: Sequence[EvaluationRecord] | None = None,
    records: Sequence[JournalRecord] | None = None,
    attempts: Sequence[Mapping[str, Any]] = (),
    fingerprints: Mapping[str, str] = FINGERPRINTS,
) -> RunData:
    """A run of the tiny recipe with changes; by default 50 steps, evaluated after the 25th and the
    last."""
    if evaluations is None:
        kept = asked if asked is not None else questions([0.6] * 40, seed)
        evaluations = [evaluation(kept, step) for step in (EVERY, STEPS)]
    config = load_recipe(RECIPE, [*recipe, f"seed={seed}"]).resolved()
    return RunData(
        run_id=run_id,
        directory=Path(run_id),
        config=config,
        summary={},
        series=Series.from_records(journal() if records is None else records),
        evaluations=tuple(evaluations),
        provenance={"attempts": list(attempts)} if attempts else {},
        fingerprints=dict(fingerprints),
    )


def make_arm(
    label: str,
    chances: Sequence[float],
    *,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    spread: float = 0.02,
    **fields: Any,
) -> list[RunData]:
    """Runs of a recipe named ``label``; each seed moves all chances by a little."""
    runs = []
    for seed in seeds:
        number = seed + 1000 * sum(map(ord, label))
        moved = np.random.default_rng(number).normal(0, spread)
        asked = questions(np.clip(np.array(chances) + moved, 0, 1).tolist(), number)
        named = [f"name={label}", *fields.get("recipe", ())]
        rest = {key: value for key, value in fields.items() if key != "recipe"}
        runs.append(make_run(f"{label}-{seed}", seed, asked, recipe=named, **rest))
    return runs
