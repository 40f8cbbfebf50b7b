"""What a train step trains on is on disk before it trains, whole and exact."""

from __future__ import annotations

import json
import math
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opd_core.agent_loop.survivors import Survivors
from opd_core.errors import TrainingError
from opd_core.rollout import Group, Status
from opd_core.training.step_records import StepRecord, StepRecords

MakeRecord = Callable[..., StepRecord]


@pytest.fixture
def records(tmp_path: Path) -> StepRecords:
    return StepRecords(tmp_path / "batches")


@pytest.fixture
def make_record(make_group: Any, make_rollout: Any) -> MakeRecord:
    """``make_record(train_step)``: two groups that train and one that was lost; the numbers need
    all their digits."""

    def logprobs(draw: random.Random, count: int = 40) -> tuple[float, ...]:
        return tuple(-draw.expovariate(1) for _ in range(count))

    def make(train_step: int = 17) -> StepRecord:
        draw, survivors, groups = random.Random(train_step), Survivors(), list[Group]()
        for group_id in range(2):
            members = [
                make_rollout(
                    index,
                    group_id=group_id,
                    text="odd \ud800 \u2028 😀",
                    response_ids=tuple(draw.randrange(2**17) for _ in range(40)),
                    rollout_logprobs=logprobs(draw),
                    teacher_logprobs=(*logprobs(draw, 36), -0.0, -5e-324, -1e-7, -1e22),
                    reward=draw.choice([None, 0.1]),
                )
                for index in range(3)
            ]
            groups.append(make_group(*members))
            survivors.count(groups[-1])
        lost = make_rollout().failed("timeout", "teacher 'big' did not answer")
        survivors.count(make_group(lost, status=Status.FAILED, cause="timeout"))
        return StepRecord(train_step, tuple(groups), survivors, {"queue": {"asked": {"3": 1}}})

    return make


def test_a_record_comes_back_as_it_was(records: StepRecords, make_record: MakeRecord) -> None:
    record = make_record(17)
    records.write(record)
    back = records.read(17)
    assert back == record
    assert repr(back) == repr(record)  # -0.0 equals 0.0, and 1.0 equals 1
    assert records.path_of(17).name == "step-000017.json"


def test_a_record_is_plain_json(records: StepRecords, make_record: MakeRecord) -> None:
    records.write(make_record(3))
    text = records.path_of(3).read_bytes().decode("utf-8", "surrogatepass")
    content = json.loads(text, parse_constant=pytest.fail)
    assert content["train_step"] == 3
    assert [group["group_id"] for group in content["groups"]] == [0, 1]


def test_a_step_that_is_not_recorded_is_none(records: StepRecords, make_record: MakeRecord) -> None:
    assert (records.read(1), records.steps()) == (None, [])
    records.write(make_record(2))
    assert records.read(1) is None


def test_a_step_that_is_recorded_again_is_the_newer_one(
    records: StepRecords, make_record: MakeRecord
) -> None:
    records.write(make_record(2))
    changed = StepRecord(2, (), Survivors(), {"queue": {}})
    records.write(changed)
    assert records.read(2) == changed


def test_steps_are_told_in_their_order_and_other_files_are_left_alone(
    records: StepRecords, make_record: MakeRecord
) -> None:
    for step in (12, 2, 1_000_000, 1):
        records.write(make_record(step))
    others = ["step-000003.json.partial", "notes.txt", "step-3.json", "step-000004.json.bak"]
    for name in others:
        records.path_of(1).with_name(name).write_text("{")
    assert records.steps() == [1, 2, 12, 1_000_000]
    assert records.read(3) is None
    records.prune(through=2)
    assert records.steps() == [12, 1_000_000]
    records.prune(through=1_000_000)
    assert sorted(path.name for path in records.path_of(1).parent.iterdir()) == sorted(others)


def test_without_a_folder_nothing_is_removed(records: StepRecords) -> None:
    records.prune(5)


def test_a_record_that_cannot_be_removed(
    records: StepRecords, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    records.path_of(1).mkdir(parents=True)
    records.write(make_record(2))
    records.prune(1)
    assert "an old step record cannot be removed" in caplog.text
    assert records.steps() == [1, 2]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: c | {"train_step": 18}, "it is of train step 18"),
        (lambda c: c | {"train_step": "17"}, "train_step: expected"),
        (lambda c: c | {"more": 1}, r"missing or unknown: \['more'\]"),
        (lambda c: {k: v for k, v in c.items() if k != "state"}, r"unknown: \['state'\]"),
        (lambda c: c | {"state": None}, "state: expected"),
        (lambda c: c | {"groups": {}}, "groups: expected tuple"),
        (lambda c: c | {"groups": [{}]}, "expected a group with its rollouts"),
        (lambda c: c | {"survivors": {}}, "state of the survivors"),
        (lambda c: [c], "expected Content as an object"),
        (lambda c: c["groups"][1]["rollouts"][2].update(response_ids=["6"]) or c, "response_ids"),
    ],
)
def test_a_damaged_record_is_refused_with_its_file(
    records: StepRecords, make_record: MakeRecord, damage: Any, said: str
) -> None:
    records.write(make_record(17))
    path = records.path_of(17)
    content = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    path.write_text(json.dumps(damage(content)))
    with pytest.raises(TrainingError, match=f"{path} is not the record of train step 17.*{said}"):
        records.read(17)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"train_step": 17, "gro'])
def test_a_torn_record_is_refused_with_its_file(
    records: StepRecords, make_record: MakeRecord, content: bytes
) -> None:
    records.write(make_record(17))
    records.path_of(17).write_bytes(content)
    with pytest.raises(TrainingError, match=r"step-000017\.json is not the record of train"):
        records.read(17)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing beyond ``size`` bytes fails with an OSError, as on a full disk (Python ignores the
    signal that goes with it)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_and_leaves_what_was_there(
    records: StepRecords, make_record: MakeRecord
) -> None:
    records.write(make_record(16))
    told = r"step-000017\.json.* the disk is full: free space and resume"
    with file_size_limit(1000), pytest.raises(TrainingError, match=told):
        records.write(make_record(17))
    assert [path.name for path in records.path_of(1).parent.iterdir()] == ["step-000016.json"]
    assert records.read(16) == make_record(16)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, make_record: MakeRecord) -> None:
    (tmp_path / "batches").write_text("a file")
    with pytest.raises(TrainingError, match=r"cannot be recorded \(File exists\).*see to the fol"):
        StepRecords(tmp_path / "batches").write(make_record())


def test_a_number_that_must_not_train_is_not_hidden(
    records: StepRecords, make_group: Any, make_rollout: Any
) -> None:
    """The replay buffer lets none in; if one came all the same, a record would not make it null."""
    group = make_group(make_rollout(rollout_logprobs=(math.nan, -math.inf)))
    records.write(StepRecord(1, (group,), Survivors(), {}))
    back = records.read(1)
    assert back is not None
    assert repr(back.groups[0].rollouts[0].rollout_logprobs) == "(nan, -inf)"
