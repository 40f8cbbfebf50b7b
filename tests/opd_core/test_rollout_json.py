"""A rollout comes back from JSON as it was, to the last bit."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd_core.errors import DataError, TrainingError
from opd_core.rollout import Group, Prompt, RolloutState, Status
from opd_core.rollout_json import (
    from_json,
    from_plain,
    group_from_plain,
    group_to_plain,
    refused_as,
    rollout_from_json,
    rollout_to_json,
    to_json,
)

ODD = ["\ud83d\ude00", "\ud800", "\0", "\u2028", "😀"]  # the first is two halves, the last is one
TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(ODD)
NUMBERS = st.floats() | st.just(-0.0)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
PROMPTS = st.builds(
    Prompt,
    row=st.integers(0),
    data_source=TEXT,
    token_ids=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    text=TEXT,
    ground_truth=st.none() | TEXT,
    extra=st.dictionaries(TEXT, JSON, max_size=3),
)
LOGPROBS = st.lists(NUMBERS, max_size=4).map(tuple)
ROLLOUTS = st.builds(
    RolloutState,
    group_id=st.integers(0),
    index=st.integers(0),
    prompt=PROMPTS,
    status=st.sampled_from(Status),
    response_ids=st.lists(st.integers(0), max_size=4).map(tuple),
    rollout_logprobs=LOGPROBS,
    text=TEXT,
    finish_reason=TEXT,
    policy_versions=st.lists(st.integers(0), max_size=4).map(tuple),
    response_mask=st.lists(st.booleans(), max_size=4).map(tuple),
    teacher_logprobs=st.none() | LOGPROBS,
    teacher_latency_s=NUMBERS,
    teacher_queue_s=NUMBERS,
    teacher_attempts=st.integers(0),
    reward=st.none() | NUMBERS,
    cause=TEXT,
    error_msg=TEXT,
)


def bits(value: Any) -> Any:
    """The value with every float as its 8 bytes: NaN and -0.0 then compare as what they are."""
    if isinstance(value, float):
        return struct.pack("<d", math.nan if math.isnan(value) else value)
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    return value


def assert_same(came: RolloutState, was: RolloutState) -> None:
    for name in RolloutState.__slots__:
        value, expected = getattr(came, name), getattr(was, name)
        assert bits(value) == bits(expected)
        assert type(value) is type(expected)


@given(ROLLOUTS)
def test_every_field_comes_back_exactly(rollout: RolloutState) -> None:
    back = rollout_from_json(rollout_to_json(rollout))
    assert_same(back, rollout)
    assert back.prompt.extra == rollout.prompt.extra  # not part of Prompt's own comparison


def test_it_is_one_line_for_people_and_files(make_rollout: Any) -> None:
    line = rollout_to_json(make_rollout(text="two\nlines"))
    assert b"\n" not in line
    assert json.loads(line)["prompt"]["data_source"] == "sums"


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:-9],
        lambda line: b"",
        lambda line: b"[1, 2]",
        lambda line: b'{"prompt": 3}',
        lambda line: b"\xff\xfe",
        lambda line: line.replace(b'"index"', b'"indices"'),
        lambda line: line.replace(b'"text":"",', b"", 1),
        lambda line: line.replace(b'"row"', b'"line"'),
        lambda line: line.replace(b'"completed"', b'"finished"'),
        lambda line: line.replace(b"[6,7]", b'["6",7]'),
        lambda line: line.replace(b"[-0.5,", b"[null,"),
        lambda line: line.replace(b"[6,7]", b'"67"'),
        lambda line: line.replace(b"[6,7]", b"[6,true]"),
        lambda line: line.replace(b'"group_id":0', b'"group_id":"0"'),
        lambda line: line.replace(b'"group_id":0', b'"group_id":0.0'),
        lambda line: line.replace(b'"reward":null', b'"reward":"1"'),
        lambda line: line.replace(b'"extra":{}', b'"extra":[]'),
    ],
)
def test_anything_else_is_refused_with_its_first_bytes(damage: Any, make_rollout: Any) -> None:
    line = rollout_to_json(make_rollout())
    assert damage(line) != line
    with pytest.raises(DataError, match="expected a rollout as JSON, got b"):
        rollout_from_json(damage(line))


def test_what_json_cannot_hold_is_refused_on_writing(make_rollout: Any, make_prompt: Any) -> None:
    rollout = make_rollout(prompt=make_prompt(extra={"day": date(2024, 2, 29)}))
    with pytest.raises(TypeError, match="type date is not JSON"):
        rollout_to_json(rollout)


# ------------------------------------------------------------------------------------------- groups


@given(PROMPTS, st.lists(ROLLOUTS, max_size=3), st.sampled_from(Status), TEXT)
def test_a_group_comes_back_with_all_its_rollouts(
    prompt: Prompt, members: list[RolloutState], status: Status, cause: str
) -> None:
    rollouts = tuple(replace(rollout, prompt=prompt) for rollout in members)
    group = Group(7, prompt, rollouts, status, cause)
    back = group_from_plain(from_json(to_json(group_to_plain(group))))
    assert (back.group_id, back.prompt, back.status, back.cause) == (7, prompt, status, cause)
    assert isinstance(back.status, Status)
    assert len(back.rollouts) == len(rollouts)
    for came, was in zip(back.rollouts, rollouts, strict=True):
        assert_same(came, was)
        assert came.prompt is back.prompt


def test_what_only_judges_read_of_a_prompt_is_not_kept_with_its_group(
    make_group: Any, make_rollout: Any, make_prompt: Any
) -> None:
    group = make_group(make_rollout(prompt=make_prompt(extra={"day": date(2024, 2, 29)})))
    back = group_from_plain(from_json(to_json(group_to_plain(group))))
    assert back == group
    assert back.prompt.extra == {}


def test_a_group_of_several_prompts_is_refused_on_writing(
    make_group: Any, make_rollout: Any, make_prompt: Any
) -> None:
    group = make_group(make_rollout(0), make_rollout(1, make_prompt(1)))
    with pytest.raises(ValueError, match="rollouts of group 0 are not all of its prompt"):
        group_to_plain(group)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda plain: [], "expected a group with its rollouts, got"),
        (lambda plain: plain | {"rollouts": None}, "expected a group with its rollouts, got"),
        (lambda plain: plain | {"rollouts": [3]}, "expected RolloutState as an object, got 3"),
        (lambda plain: plain | {"prompt": None}, "expected Prompt as an object, got None"),
        (lambda plain: plain | {"more": 1}, r"Group that are missing or unknown: \['more'\]"),
        (lambda plain: plain | {"status": "done"}, "status: 'done' is not a valid Status"),
        (lambda plain: plain | {"group_id": "1"}, "group_id: expected int, got '1'"),
        (
            lambda plain: plain | {"prompt": plain["prompt"] | {"extra": {}}},
            r"Prompt that are missing or unknown: \['extra'\]",
        ),
    ],
)
def test_what_is_no_group_is_refused_with_what_is_wrong(
    make_group: Any, damage: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        group_from_plain(damage(group_to_plain(make_group())))


def test_a_field_deep_within_is_named_by_its_path(make_rollout: Any) -> None:
    plain = from_json(rollout_to_json(make_rollout()))
    plain["prompt"]["token_ids"] = [1, "2"]
    with pytest.raises(ValueError, match=r"^prompt: token_ids: expected int, got '2'$"):
        from_plain(RolloutState, plain)


@pytest.mark.parametrize("error", [ValueError("odd"), DataError("odd"), TrainingError("odd")])
def test_what_is_wrong_in_read_data_is_told_with_where_it_was(error: Exception) -> None:
    with pytest.raises(TrainingError, match=r"^here: odd$"), refused_as("here"):
        raise error
