"""Where actors are placed, what they leave to others, and what is said when one is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from opd_core.config import ExperimentConfig
from opd_core.errors import ActorLost, TrainingError
from opd_core.training.actors import TrainingActor
from opd_core.training.handles import all_of
from opd_core.training.placement import bundles_of, not_ready
from tests.opd_core.training.engine import scored_batch
from tests.opd_core.training.whole_loop import config_of


def raised(cause: Exception) -> Exception:
    """What Ray raises where an actor's method raised ``cause``."""
    words = f"Traceback (most recent call last):\n{type(cause).__name__}: {cause}"
    error = RayTaskError("update", words, cause, proctitle="actor", pid=1, ip="127.0.0.1")
    return error.as_instanceof_cause()


def test_actors_that_are_not_ready_are_told_with_what_was_asked_and_what_there_is() -> None:
    said = not_ready(2, 3, (0.6, 0.4), 180.0, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0})
    assert "not ready after 180 s" in said
    assert "2 training actors (1 CPU and 0.6 GPUs each)" in said
    assert "3 sampling actors (1 CPU and 0.4 GPUs each)" in said
    assert "has 4 CPUs and 2 GPUs; free now: 1 and 0." in said


async def test_a_dead_rank_is_told_from_one_that_failed() -> None:
    async def ends(error: Exception, *, later: bool = False) -> None:
        for _ in range(20 * later):  # Ray tells of a death after the other ranks have missed it
            await asyncio.sleep(0)
        raise error

    with pytest.raises(ActorLost, match=r"^training: an actor died"):
        await all_of([ends(ActorDiedError())], "training")
    peer_lost = raised(RuntimeError("Connection reset by peer"))
    with pytest.raises(ActorLost, match="an actor died"):
        await all_of([ends(peer_lost), ends(ActorDiedError(), later=True)], "training")
    with pytest.raises(TrainingError, match=r"^no memory$") as failed:
        await all_of([ends(raised(TrainingError("no memory")))], "training")
    assert not isinstance(failed.value, ActorLost)


def test_actors_that_share_a_gpu_are_placed_together_and_others_apart() -> None:
    assert bundles_of(2, 1, (0.0, 0.0)) == [{"CPU": 1.0}] * 3
    assert bundles_of(2, 1, (1.0, 1.0)) == [{"CPU": 1.0, "GPU": 1.0}] * 3
    assert bundles_of(2, 0, (1.0, 1.0)) == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert bundles_of(1, 2, (0.6, 0.4)) == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]


@pytest.mark.parametrize(
    "servers_own", [{"server": {"memory_fraction": 0.4}}, {"devices": ["1"]}], ids=["shared", "own"]
)
def test_a_rank_leaves_the_memory_of_a_shared_gpu_to_the_servers(
    servers_own: dict[str, Any], student_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    tree = config_of(student_dir, tmp_path / "rows.jsonl", "http://127.0.0.1:1").resolved()
    tree["student"]["devices"] = ["0", "1"]
    tree["sampling"] |= {"engine": "sglang", **servers_own}
    config = ExperimentConfig.model_validate(tree)
    emptied: list[str] = []
    done = "nothing"
    actor = TrainingActor(config, lambda: emptied.append(done))
    actor.join("", 0, 1)
    batch = scored_batch(student_dir, teacher_dir)
    for done, call in {
        "update": lambda: actor.update(batch),
        "weights": actor.weights,
        "save_weights": lambda: actor.save_weights(str(tmp_path / "weights")),
        "hold_weights": actor.hold_weights,
        "lend_bucket": lambda: actor.lend_bucket(0, "sglang"),
        "give_back_bucket": actor.give_back_bucket,
    }.items():
        call()
        assert emptied == ([done] if config.shares_gpus else [])
        emptied.clear()
