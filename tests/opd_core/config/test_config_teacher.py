"""Teachers, their replicas and their place in training: defaults, refusals, what these say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd_core.config import LaunchConfig, OPDConfig, OPDTeacherConfig

LAUNCH = {"model": "/models/teacher"}


def teacher(**changes: Any) -> OPDTeacherConfig:
    return OPDTeacherConfig(**{"name": "teacher", "endpoint": "http://127.0.0.1:13141", **changes})


def opd(**changes: Any) -> OPDConfig:
    return OPDConfig(**{"teachers": [teacher()], "default_teacher": "teacher", **changes})


def test_scores_of_a_server_whose_weights_nobody_knows_are_not_stored() -> None:
    with pytest.raises(ValidationError, match=r"score_store: teacher 'teacher' has a server"):
        opd(score_store="scores")
    launched = OPDTeacherConfig(name="teacher", backend="embedded", launch=LAUNCH)
    with pytest.raises(ValidationError, match="two right canaries"):
        opd(teachers=[launched.model_copy(update={"canary_every": 0})], score_store="scores")
    assert opd(teachers=[launched], score_store="scores").score_store == "scores"


# ------------------------------------------------------------------ the call of the contract


def test_the_contracts_call_is_accepted_as_it_stands() -> None:
    config = OPDConfig(
        mode="pg-opd", task_adv_weight=0.0, opd_adv_weight=1.0,
        teachers=[OPDTeacherConfig(name="teacher", endpoint="http://127.0.0.1:13141", api_key=None,
                                   request_timeout_s=1200.0, max_retry_per_sample=2, max_concurrency=128)],  # noqa: E501
        data_source_teacher_map={"math_dapo": "teacher"},
    )  # fmt: skip
    assert config.teacher_of("math_dapo") == "teacher"
    assert config.teacher_of("gsm8k") is None


def test_the_defaults_are_the_values_of_the_contracts_call() -> None:
    config = OPDConfig(teachers=[teacher()], data_source_teacher_map={"math_dapo": "teacher"})
    (one,) = config.teachers
    assert (config.mode, config.task_adv_weight, config.opd_adv_weight) == ("pg-opd", 0.0, 1.0)
    assert (one.backend, one.api_key, one.request_timeout_s) == ("sglang", None, 1200.0)
    assert (one.max_retry_per_sample, one.max_concurrency) == (2, 128)
    assert (config.kl_clamp, config.kl_baseline) == (None, False)


# ------------------------------------------------------------------ which teacher scores what


def test_no_teachers_are_refused() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        OPDConfig(teachers=[], default_teacher="teacher")


def test_the_default_teacher_scores_what_the_map_does_not_name() -> None:
    config = opd(
        teachers=[teacher(), teacher(name="other")], data_source_teacher_map={"math_dapo": "other"}
    )
    assert [config.teacher_of(source) for source in ("math_dapo", "x")] == ["other", "teacher"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "direct-kl"}, "pg-opd"),
        ({"task_adv_weight": 0, "opd_adv_weight": 0}, "nothing would be learned: raise one"),
        ({"task_adv_weight": -0.1}, "task_adv_weight\n.*greater than or equal to 0"),
        ({"opd_adv_weight": -1}, "opd_adv_weight\n.*greater than or equal to 0"),
        ({"opd_adv_weight": float("inf")}, "opd_adv_weight\n.*finite number"),
        ({"opd_adv_weight": float("nan")}, "opd_adv_weight\n.*finite number"),
        ({"default_teacher": None}, "data_source_teacher_map: {<data_source>: teacher}"),
        ({"default_teacher": "x"}, "no teacher is named 'x'; the teachers are: teacher"),
        ({"data_source_teacher_map": {"math": "x"}}, "no teacher is named 'x'"),
        ({"teachers": [teacher(), teacher()]}, "names must differ.*: teacher, teacher"),
        ({"teachers": [teacher(), teacher(name="idle")]}, "'idle' is used by no data_source: map"),
        ({"kl_clamp": 0}, "kl_clamp\n.*greater than 0"),
        ({"whitening": True}, "whitening\n.*not permitted"),
    ],
)
def test_opd_refuses(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        opd(**changes)


@pytest.mark.parametrize("names", [("math-a", "math_a"), ("Teacher", "teacher"), ("t.1", "t-1")])
def test_teachers_whose_keys_would_share_a_variable_are_refused(names: tuple[str, str]) -> None:
    mapped = {name: name for name in names}
    with pytest.raises(ValidationError, match="not in case or punctuation only"):
        OPDConfig(teachers=[teacher(name=n) for n in names], data_source_teacher_map=mapped)


# ------------------------------------------------------------------ a teacher and its servers


@pytest.mark.parametrize("field", ["name", "endpoint"])
def test_a_teacher_needs_a_name_and_a_place(field: str) -> None:
    given = {"name": "teacher", "endpoint": "http://127.0.0.1:1"}
    del given[field]
    with pytest.raises(ValidationError, match=field):
        OPDTeacherConfig.model_validate(given)


def test_a_launch_stands_in_for_an_endpoint() -> None:
    launched = OPDTeacherConfig(name="t", launch=LaunchConfig(model="/m"), backend="embedded")
    (replica,) = launched.all_replicas
    assert (replica.endpoint, replica.backend) == (None, "embedded")
    assert replica.launch == launched.launch


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_timeout_s", 0),
        ("request_timeout_s", float("inf")),
        ("max_retry_per_sample", -1),
        ("max_concurrency", 0),
        ("backend", "vllm"),
    ],
)
def test_a_teachers_limits_are_checked(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        teacher(**{field: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replicas": [{"endpoint": "http://h:1"}]}, "either 'replicas' or endpoint/launch"),
        (
            {"endpoint": None, "backend": "lmdeploy", "replicas": [{"endpoint": "http://h:1"}]},
            "backend is named at each replica",
        ),
        ({"endpoint": None, "replicas": [{}]}, "name an 'endpoint' .* or a 'launch'"),
        ({"launch": {**LAUNCH, "port": 5}}, "name the port once"),
        ({"endpoint": "http://127.0.0.1", "launch": LAUNCH}, "needs a port"),
        ({"endpoint": "http://10.0.0.5:80", "launch": LAUNCH}, "answers at http://127.0.0.1:PORT"),
        ({"endpoint": "https://127.0.0.1:80", "launch": LAUNCH}, "answers at http://127.0.0.1"),
        ({"endpoint": "http://127.0.0.1:80/v1", "launch": LAUNCH}, "answers at http://127.0.0.1"),
        ({"backend": "lmdeploy", "launch": {**LAUNCH, "dtype": "float32"}}, "has no float32"),
        ({"backend": "embedded", "launch": {**LAUNCH, "tp_size": 2}}, "neither tp_size"),
        ({"backend": "embedded", "launch": {**LAUNCH, "memory_fraction": 0.5}}, "neither tp_size"),
    ],
)
def test_a_contradictory_teacher_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        teacher(**changes)


def test_replicas_may_mix_backends() -> None:
    mixed = teacher(
        endpoint=None,
        replicas=[
            {"endpoint": "http://a:1"},
            {"endpoint": "http://b:1", "backend": "lmdeploy"},
            {"launch": LAUNCH, "backend": "embedded"},
        ],
    )
    assert [r.backend for r in mixed.all_replicas] == ["sglang", "lmdeploy", "embedded"]


def test_endpoints_are_filled_in_replica_by_replica() -> None:
    two = teacher(endpoint=None, replicas=[{"launch": LAUNCH}, {"endpoint": "http://h:1"}])
    placed = two.with_endpoints(["http://127.0.0.1:5", "http://h:1"])
    assert [r.endpoint for r in placed.all_replicas] == ["http://127.0.0.1:5", "http://h:1"]
    assert [r.launch is None for r in placed.all_replicas] == [False, True]
    with pytest.raises(ValueError, match="shorter"):
        two.with_endpoints(["http://127.0.0.1:5"])
