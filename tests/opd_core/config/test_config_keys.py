"""Keys: kept as references, never written, never repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from opd_core.config import ExperimentConfig, OPDTeacherConfig
from opd_core.errors import ConfigError
from opd_core.recipe import parse_config

SECRET = "sk-not-to-be-seen"


def teacher(**changes: Any) -> OPDTeacherConfig:
    return OPDTeacherConfig(**{"name": "teacher", "endpoint": "http://127.0.0.1:13141", **changes})


def experiment(one: OPDTeacherConfig) -> ExperimentConfig:
    return ExperimentConfig(
        name="test",
        student={"model": "/models/student"},
        data={"train": "/data/train.jsonl"},
        sampling={"max_new_tokens": 16},
        opd={"teachers": [one], "default_teacher": "teacher"},
        training={"steps": 1, "prompts_per_step": 4, "learning_rate": 1e-6},
    )


@pytest.mark.parametrize("reference", ["env:TEACHER_KEY", "block:teacher-key.v2", "block:2nd-key"])
def test_a_reference_to_a_key_is_kept(reference: str) -> None:
    one = teacher(api_key=reference)
    assert one.model_dump(mode="json")["api_key"] == reference
    config = experiment(one)
    assert parse_config(config.resolved(), source="here") == config


def test_a_plain_key_from_python_is_kept_and_written_nowhere() -> None:
    one = teacher(api_key=SECRET)
    config = experiment(one)
    assert one.api_key is not None
    assert one.api_key.get_secret_value() == SECRET
    for text in (
        repr(config),
        str(config),
        repr(config.model_dump()),
        config.model_dump_json(),
        json.dumps(config.resolved()),
    ):
        assert SECRET not in text
    assert one.model_dump()["api_key"] == "env:OPD_TEACHER_KEY_TEACHER"


def test_a_key_is_in_no_error() -> None:
    for wrong in ({"endpoint": None}, {"replicas": [{"endpoint": "http://h:1"}]}, {"nmae": "x"}):
        with pytest.raises(ValidationError) as caught:
            teacher(api_key=SECRET, **wrong)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("written", [SECRET, 123456789, ["sk-not-to-be-seen"]])
def test_a_plain_key_in_data_that_was_written_is_refused_and_not_repeated(written: object) -> None:
    data = experiment(teacher()).resolved()
    data["opd"]["teachers"][0]["api_key"] = written
    with pytest.raises(ConfigError, match=r"opd\.teachers\.0\.api_key: ") as caught:
        parse_config(data, source="config.json")
    assert SECRET not in str(caught.value)
    assert "123456789" not in str(caught.value)


def test_a_plain_key_in_data_is_answered_with_where_to_keep_it() -> None:
    data = experiment(teacher()).resolved()
    data["opd"]["teachers"][0]["api_key"] = SECRET
    with pytest.raises(ConfigError, match=r"'env:NAME' .* or 'block:NAME'"):
        parse_config(data, source="config.json", base_dir=Path("/recipes"))


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="api_key: null"):
        teacher(api_key="")


def test_a_key_travels_in_a_variable_named_after_its_teacher() -> None:
    assert teacher(name="math-32b.v1").key_variable == "OPD_TEACHER_KEY_MATH_32B_V1"
