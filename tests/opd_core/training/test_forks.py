"""A fork takes the newest whole checkpoint and the records up to it, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd_core.errors import ConfigError
from opd_core.tracking.journal import Journal, JournalReader
from opd_core.training.checkpoint_folder import CheckpointFolder
from opd_core.training.forks import ForkPoint, fork_run, name_of, newest_checkpoint

LOOP = {
    "queue": {},
    "next_group_id": 3,
    "survivors": {},
    "buffer": [],
    "under_way": [{"group_id": 2, "row": 7, "tries": 0}],
}
"""The state of a collector."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Checkpoints of train steps 2 and 4, a half-written one of 6, and a journal of six steps."""
    run_dir = tmp_path / "run-1"
    folder = CheckpointFolder(run_dir / "checkpoints", keep=2, keep_every=0)
    for train_step in (2, 4, 6):
        checkpoint = folder.begin(train_step)
        checkpoint.state.mkdir()
        (checkpoint.state / "shard").write_bytes(b"numbers of %d" % train_step)
        if train_step < 6:
            folder.commit(checkpoint, {"loop": LOOP})
    with Journal(run_dir / "metrics.jsonl") as journal:
        for train_step in range(7):
            journal.append(train_step, {"x": train_step / 2})
    return run_dir


def test_the_newest_whole_checkpoint_is_taken_and_later_records_are_not(
    source: Path, tmp_path: Path
) -> None:
    with (source / "metrics.jsonl").open("a") as file:
        file.write('{"train_step": 1, "half a li')
    target = tmp_path / "run-2"
    target.mkdir()
    assert fork_run(source, target) == ForkPoint("run-1", 4)
    assert {path.name for path in target.iterdir()} == {"checkpoints", "metrics.jsonl"}
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["step-000004"]
    checkpoint = newest_checkpoint(target)
    assert checkpoint is not None
    assert (checkpoint.state / "shard").read_bytes() == b"numbers of 4"
    assert json.loads((checkpoint.path / "loop.json").read_text()) == {
        "loop": LOOP,
        "train_step": 4,
    }
    records = JournalReader(target / "metrics.jsonl").read()
    assert records == JournalReader(source / "metrics.jsonl").read()[:5]


def test_a_fork_costs_no_second_copy_and_outlives_its_source(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "run-2"
    target.mkdir()
    fork_run(source, target)
    shard = Path("checkpoints", "step-000004", "state", "shard")
    assert (target / shard).samefile(source / shard)
    (source / shard).unlink()
    assert (target / shard).read_bytes() == b"numbers of 4"


def test_evaluations_and_token_kl_up_to_the_checkpoint_come_along(
    source: Path, tmp_path: Path
) -> None:
    for folder in ("evaluations", "token_kl"):
        (source / folder).mkdir()
        for train_step in range(7):
            (source / folder / f"step-{train_step:06d}.json").write_text(f"{folder} {train_step}")
        (source / folder / "step-000001.json.tmp").touch()
    target = tmp_path / "run-2"
    target.mkdir()
    fork_run(source, target)
    for folder in ("evaluations", "token_kl"):
        names = [f"step-{train_step:06d}.json" for train_step in range(5)]
        assert sorted(path.name for path in (target / folder).iterdir()) == names
        assert (target / folder / names[4]).read_text() == f"{folder} 4"


def test_a_run_without_checkpoint_cannot_be_forked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no checkpoint .*opd run --resume"):
        fork_run(tmp_path, tmp_path / "run-2")


def test_a_run_is_called_by_its_id_where_that_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert name_of(tmp_path / "runs" / "run-1") == "run-1"
    assert name_of(tmp_path / "elsewhere" / "run-1") == str(tmp_path / "elsewhere" / "run-1")
