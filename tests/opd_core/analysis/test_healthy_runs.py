"""Detectors keep silent on healthy runs, and whatever the numbers are."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.analysis.detectors import Detection, RunFacts
from opd_core.recipe import load_recipe
from tests.opd_core.analysis.sound_runs import MIXED, PURE, SOUND, TASK_ONLY, found

ROOT = Path(__file__).parents[3]
HEALTHY = Path(__file__).parent / "healthy"
RECIPE_OF = {"grpo": "tiny_grpo", "mixed": "tiny_mixed"}


def healthy_runs() -> list[Path]:
    return sorted(HEALTHY.glob("*.jsonl.gz"))


def read_healthy(path: Path) -> tuple[list[dict[str, Any]], RunFacts]:
    recipe = RECIPE_OF.get(path.name.split(".")[0], "tiny")
    config = load_recipe(ROOT / "deployments" / "recipes" / f"{recipe}.yaml")
    records = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    facts = RunFacts.of(config.resolved())
    return records, replace(facts, kl_clamp=None) if "unclamped" in path.name else facts


@pytest.mark.parametrize("path", healthy_runs(), ids=lambda path: path.name.split(".")[0])
def test_nothing_is_found_at_any_time_of_a_healthy_run(path: Path) -> None:
    """Journals of real runs of 50 train steps."""
    records, facts = read_healthy(path)
    detection = Detection(facts)
    for record in records:
        detection.add(record["train_step"], record["metrics"])
    assert detection.findings == ()
    last = records[-2]["metrics"]  # before the evaluation
    needed = {name for name in SOUND if name.split("/")[0] not in ("lost", "survivors")}
    if not facts.scored:
        needed = {n for n in needed if "opd" not in n and "teacher" not in n and "end_t" not in n}
    assert needed - {"grad_norm_teacher"} <= set(last)


def test_there_are_healthy_runs_of_three_seeds_and_of_other_kinds() -> None:
    names = {path.name.split(".")[0] for path in healthy_runs()}
    assert names == {"tiny-1234", "tiny-1", "tiny-2", "unclamped", "grpo", "mixed"}


@pytest.mark.parametrize("facts", [PURE, MIXED, TASK_ONLY])
def test_a_sound_run_has_no_finding(facts: RunFacts) -> None:
    assert found(facts) == {}


def test_facts_come_from_a_recipe_of_any_age() -> None:
    old = RunFacts.of({"opd": {"teachers": [{"name": "t"}]}})
    assert (old.scored, old.exact, old.judged, old.opd_adv_weight) == (True, False, False, 1.0)
    none = RunFacts.of({"opd": None, "task": {"judge": "a:b"}})
    assert (none.scored, none.judged, none.task_adv_weight) == (False, True, 1.0)
    tiny = load_recipe(ROOT / "deployments" / "recipes" / "tiny.yaml").resolved()
    assert RunFacts.of(tiny).exact
    assert RunFacts.of(tiny).kl_clamp == 5.0
    tiny["opd"]["teachers"][0]["launch"]["dtype"] = "bfloat16"
    assert not RunFacts.of(tiny).exact


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_number_breaks_a_detector(data: st.DataObject) -> None:
    numbers = st.floats() | st.sampled_from([0.0, -0.0, 1e300, -1e300, 1e-300])
    steps = data.draw(st.integers(1, 12))
    detection = Detection(data.draw(st.sampled_from([PURE, MIXED, TASK_ONLY])))
    for step in range(1, steps + 1):
        drawn = data.draw(st.dictionaries(st.sampled_from(sorted(SOUND)), numbers, max_size=8))
        detection.add(step, {**SOUND, **drawn})
