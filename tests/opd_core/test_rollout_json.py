"""A rollout comes back from JSON as it was, to the last bit."""

from __future__ import annotations

import json
import math
import struct
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd_core.errors import DataError
from opd_core.rollout import Prompt, RolloutState, Status
from opd_core.rollout_json import rollout_from_json, rollout_to_json

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
    policy_version=st.integers(0),
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


@given(ROLLOUTS)
def test_every_field_comes_back_exactly(rollout: RolloutState) -> None:
    back = rollout_from_json(rollout_to_json(rollout))
    for name in RolloutState.__slots__:
        was, came = getattr(rollout, name), getattr(back, name)
        assert bits(came) == bits(was)
        assert type(came) is type(was)
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
    ],
)
def test_anything_else_is_refused_with_its_first_bytes(damage: Any, make_rollout: Any) -> None:
    line = rollout_to_json(make_rollout())
    assert damage(line) != line
    with pytest.raises(DataError, match="expected a rollout as JSON, got b"):
        rollout_from_json(damage(line))


def test_what_json_cannot_hold_is_refused_on_writing(make_rollout: Any, make_prompt: Any) -> None:
    rollout = make_rollout(prompt=make_prompt(extra={"day": date(2024, 2, 29)}))
    with pytest.raises(TypeError, match="of type date has no form in JSON"):
        rollout_to_json(rollout)
