"""A run that died is continued as if it had not: no number, rollout or record differs."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd_core.config import ExperimentConfig
from opd_core.errors import ActorLost, TrainingError
from opd_core.training.files import TOKEN_KL_FOLDER
from tests.opd_core.training.recorded_trainer import continue_run
from tests.opd_core.training.whole_loop import config_of, journal, records_of, steps_of, train

KILLS = 12


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "student" / "model.safetensors")


def token_kl_of(run_dir: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run_dir / TOKEN_KL_FOLDER).iterdir()}


def assert_same_student(run_dir: Path, other: Path) -> None:
    found, wanted = weights_of(run_dir), weights_of(other)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Dying:
    """Passes everything on to a learner, and dies at the n-th call of one method."""

    def __init__(self, learner: Any, method: str, call: int, *, after: bool) -> None:
        self._learner, self._method, self._left, self._after = learner, method, call, after

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._learner, name)
        if name != self._method:
            return method  # type: ignore[no-any-return]

        async def counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise ActorLost("killed")
            result = await method(*arguments)
            if self._left == 0:
                raise ActorLost("killed")
            return result

        return counted


DEATHS = {
    "before the first update": ("update", 1, False),
    "after an update that the journal has not": ("update", 3, True),
    "at an epoch's end": ("update", 5, False),
    "before weights are synced": ("weights", 4, False),
    "while a checkpoint is begun": ("start_checkpoint", 2, False),
    "while a checkpoint is written": ("finish_checkpoint", 1, False),
    "at the end": ("save", 1, True),
}


@pytest.fixture(scope="module")
def whole(
    student_dir: Path, data_dir: Path, teacher_url: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ExperimentConfig, Path]:
    """A deterministic run that nothing interrupts: 9 rows, 4 a step, so that epochs end inside
    steps; with its configuration."""
    import asyncio

    config = config_of(
        student_dir,
        data_dir / "rows.jsonl",
        teacher_url,
        training={"steps": 6, "checkpoint_every": 2, "export_checkpoints": False},
    ).model_copy(update={"deterministic": True})
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    asyncio.run(train(config, run_dir))
    return config, run_dir


@pytest.mark.parametrize("death", DEATHS)
async def test_wherever_a_run_dies_it_ends_with_the_same_bits(
    whole: tuple[ExperimentConfig, Path], tmp_path: Path, death: str
) -> None:
    config, expected = whole
    method, call, after = DEATHS[death]
    run_dir = tmp_path / "run"
    with pytest.raises(ActorLost):
        await train(config, run_dir, around=lambda lr: Dying(lr, method, call, after=after))
    await train(config, run_dir)
    assert_same_student(run_dir, expected)
    assert [r["train_step"] for r in journal(run_dir)] == list(range(1, 7)), "each step once"
    names = ("opd_reverse_kl", "grad_norm", "data/epoch", "groups/completed", "learning_rate")
    totals = ("total/student_tokens", "total/teacher_tokens")
    for found, wanted in zip(steps_of(run_dir), steps_of(expected), strict=True):
        assert {n: found[n] for n in names + totals} == {n: wanted[n] for n in names + totals}
    assert token_kl_of(run_dir) == token_kl_of(expected)


async def test_no_rollout_is_trained_twice_or_lost(
    whole: tuple[ExperimentConfig, Path], tmp_path: Path
) -> None:
    config = whole[0].model_copy(
        update={"training": whole[0].training.model_copy(update={"checkpoint_every": 0})}
    )
    run_dir = tmp_path / "run"
    for call in (2, 3):
        with pytest.raises(ActorLost):
            await train(
                config, run_dir, around=lambda lr, n=call: Dying(lr, "update", n, after=True)
            )
    await train(config, run_dir)
    ids = [group.group_id for record in records_of(run_dir) for group in record.groups]
    assert ids == list(range(24)), "every group that was started, once"


async def test_recorded_batches_cost_no_sampling_and_no_teacher(
    whole: tuple[ExperimentConfig, Path], tmp_path: Path
) -> None:
    """They are trained again with a teacher whose endpoint answers nobody."""
    config, expected = whole
    run_dir = tmp_path / "run"
    with pytest.raises(ActorLost):
        await train(config, run_dir, around=lambda lr: Dying(lr, "update", 6, after=True))
    opd = config.opd
    assert opd is not None
    nowhere = opd.teachers[0].model_copy(update={"endpoint": "http://127.0.0.1:9"})
    away = config.model_copy(update={"opd": opd.model_copy(update={"teachers": (nowhere,)})})
    await train(away, run_dir)
    assert_same_student(run_dir, expected)


async def test_a_loss_that_is_not_finite_names_rollouts_and_keeps_the_batch(
    whole: tuple[ExperimentConfig, Path], tmp_path: Path
) -> None:
    config, _ = whole
    run_dir = tmp_path / "run"
    with pytest.raises(ActorLost):
        await train(config, run_dir, around=lambda lr: Dying(lr, "update", 1, after=False))
    path = run_dir / "batches" / "step-000001.json"
    record = json.loads(path.read_text())
    rollout = record["groups"][2]["rollouts"][0]
    rollout["teacher_logprobs"] = [1e39] * len(rollout["teacher_logprobs"])  # inf in float32
    path.write_text(json.dumps(record))
    with pytest.raises(TrainingError, match=r"train step 1: the gradient norm is (nan|inf)") as e:
        await train(config, run_dir)
    assert f"({rollout['group_id']}, 0)" in str(e.value)
    assert str(path) in str(e.value)
    assert path.is_file()


async def test_training_stops_at_its_target_and_says_so(
    whole: tuple[ExperimentConfig, Path], tmp_path: Path
) -> None:
    config, _ = whole
    stop = {"metric": "data/epoch", "at_least": 1}
    training = config.training.model_validate(config.training.model_dump() | {"stop_when": stop})
    stopping = config.model_copy(update={"training": training})
    outcome = await train(stopping, tmp_path / "run")
    assert outcome.stopped == "data/epoch 1 is at least 1"
    assert len(steps_of(tmp_path / "run")) == 3
    again = await train(stopping, tmp_path / "run")
    assert again.stopped == outcome.stopped
    assert len(steps_of(tmp_path / "run")) == 3, "a run that reached its target is at its end"


@pytest.mark.long
def test_a_trainer_killed_at_random_moments_ends_with_the_same_bits(
    student_dir: Path, data_dir: Path, teacher_url: str, tmp_path: Path
) -> None:
    """On the same recorded batches, by SIGKILL, until enough of them have hit."""
    import asyncio

    everything = config_of(
        student_dir,
        data_dir / "rows.jsonl",
        teacher_url,
        training={"steps": 12, "checkpoint_every": 0},
    )
    asyncio.run(train(everything, tmp_path / "whole"))
    config = everything.model_copy(
        update={"training": everything.training.model_copy(update={"checkpoint_every": 3})}
    )
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.opd_core.training.recorded_trainer"])
    draw = random.Random(20261130)
    kills = runs = 0
    while kills < KILLS:
        runs += 1
        run_dir = tmp_path / f"killed-{runs}"
        shutil.copytree(tmp_path / "whole" / "batches", run_dir / "batches")
        limit_s = 30.0
        while True:
            trainer = processes.Process(target=continue_run, args=(config.resolved(), run_dir))
            trainer.start()
            trainer.join(timeout=draw.uniform(0.05, limit_s / 10) if kills < KILLS else 120)
            if not trainer.is_alive():
                break
            trainer.kill()
            trainer.join()
            kills += 1
        assert trainer.exitcode == 0
        assert_same_student(run_dir, tmp_path / "whole")
        assert [r["train_step"] for r in journal(run_dir)] == list(range(1, 13))
