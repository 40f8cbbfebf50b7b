"""What an experiment that promises the same bits may not leave to chance."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd_core.config import ExperimentConfig


def experiment(**opd: Any) -> ExperimentConfig:
    launch = {"model": "/models/teacher"}
    teacher = {"name": "t", "launch": launch, "hedge": opd.pop("hedge", False)}
    return ExperimentConfig.model_validate(
        {
            "name": "bits",
            "deterministic": True,
            "student": {"model": "/models/student"},
            "data": {"train": "/data/rows.jsonl"},
            "sampling": {"max_new_tokens": 8},
            "opd": {"teachers": [teacher], "default_teacher": "t", **opd},
            "training": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-3},
        }
    )


def test_nothing_is_refused_that_leaves_no_choice() -> None:
    assert experiment().deterministic


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"score_store": "/scores"}, "remove opd.score_store"),
        ({"hedge": True}, "write hedge: false for t"),
    ],
)
def test_scores_that_depend_on_chance_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        experiment(**settings)
