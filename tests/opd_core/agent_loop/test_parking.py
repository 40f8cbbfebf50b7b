"""Rollouts that wait for their teacher outlive the run."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from opd_core.agent_loop.parking import ParkingLot
from opd_core.errors import DataError, TeacherAway
from opd_core.rollout import RolloutState


@pytest.fixture
def lot(tmp_path: Path) -> ParkingLot:
    return ParkingLot(tmp_path / "parked")


def files(tmp_path: Path) -> list[str]:
    folder = tmp_path / "parked"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def park_until(end: BaseException, lot: ParkingLot, rollout: RolloutState) -> None:
    with lot.spot(rollout) as spot:
        spot.park()
        raise end


def test_a_rollout_is_on_disk_only_while_it_waits(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any
) -> None:
    with lot.spot(make_rollout(3, group_id=12)) as spot:
        assert (lot.parked, files(tmp_path)) == (0, [])
        spot.park()
        spot.park()
        assert (lot.parked, files(tmp_path)) == (1, ["00000012-0003.json"])
    assert (lot.parked, files(tmp_path)) == (0, [])


@pytest.mark.parametrize("end", [TeacherAway("gone"), asyncio.CancelledError(), SystemExit(1)])
def test_an_end_of_the_run_leaves_what_waits(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any, end: BaseException
) -> None:
    rollout = make_rollout(1, text="\ud800 odd", reward=0.1)
    with pytest.raises(type(end)):
        park_until(end, lot, rollout)
    assert lot.parked == 1
    later = ParkingLot(tmp_path / "parked")
    assert later.load() == [rollout]
    assert later.parked == 1


def test_a_rollout_that_never_waited_leaves_nothing_at_an_end(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any
) -> None:
    with pytest.raises(TeacherAway), lot.spot(make_rollout()):
        raise TeacherAway("gone")
    assert (lot.parked, files(tmp_path)) == (0, [])


def test_what_was_loaded_goes_when_it_is_scored_and_stays_until_then(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any
) -> None:
    for index in (0, 10, 2):
        lot.spot(make_rollout(index)).park()
    later = ParkingLot(tmp_path / "parked")
    first, second, third = later.load()
    assert [r.index for r in (first, second, third)] == [0, 2, 10]
    with later.spot(first):  # answered at once: never parked again
        pass
    with pytest.raises(TeacherAway), later.spot(second):
        raise TeacherAway("again")
    assert later.parked == 2
    assert ParkingLot(tmp_path / "parked").load() == [second, third]


def test_a_spot_takes_away_its_own_rollout_only(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any
) -> None:
    with lot.spot(make_rollout(0)) as one, lot.spot(make_rollout(1)) as other:
        one.park()
        other.park()
        with lot.spot(make_rollout(2)):
            pass
        assert files(tmp_path) == ["00000000-0000.json", "00000000-0001.json"]


def test_nothing_was_parked_where_there_is_no_folder(lot: ParkingLot) -> None:
    assert lot.load() == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("00000000-0001.json", '{"group_id": 0, "ind', "expected a rollout as JSON"),
        ("00000000-0001.json", "", "expected a rollout as JSON"),
        ("notes.txt", "hello", "expected <group_id>-<index>.json"),
        ("00000005-0001.json", None, "holds rollout 0 of group 0"),
    ],
)
def test_a_torn_or_foreign_file_is_named(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any, name: str, content: str | None, said: str
) -> None:
    lot.spot(make_rollout()).park()
    whole = (tmp_path / "parked" / "00000000-0000.json").read_text()
    (tmp_path / "parked" / name).write_text(whole if content is None else content)
    with pytest.raises(DataError, match=f"{name}: is not a parked rollout: {said}"):
        ParkingLot(tmp_path / "parked").load()


def test_an_id_that_is_no_number_is_named_too(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any
) -> None:
    lot.spot(make_rollout()).park()
    path = tmp_path / "parked" / "00000000-0000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"group_id": "0"}))
    with pytest.raises(DataError, match=r"00000000-0000\.json"):
        ParkingLot(tmp_path / "parked").load()


def test_a_file_that_was_still_being_written_was_never_parked(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any
) -> None:
    lot.spot(make_rollout()).park()
    (tmp_path / "parked" / "00000000-0001.json.partial").write_text('{"group')
    assert [r.index for r in ParkingLot(tmp_path / "parked").load()] == [0]


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


def test_a_full_disk_costs_the_file_and_not_the_rollout(
    lot: ParkingLot, tmp_path: Path, make_rollout: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with lot.spot(make_rollout(2, response_ids=tuple(range(5000)))) as spot:
        with file_size_limit(1000):
            spot.park()
        spot.park()
        assert lot.parked == 1
        assert files(tmp_path) == []
    assert lot.parked == 0
    (record,) = caplog.records
    assert "File too large" in record.getMessage()
    assert "rollout 2 of group 0 waits for its teacher in memory only" in record.getMessage()


def test_a_rollout_that_json_cannot_hold_waits_in_memory(
    lot: ParkingLot, make_rollout: Any, make_prompt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with lot.spot(make_rollout(prompt=make_prompt(extra={"day": date(2024, 2, 29)}))) as spot:
        spot.park()
        assert lot.parked == 1
    assert "in memory only" in caplog.text
