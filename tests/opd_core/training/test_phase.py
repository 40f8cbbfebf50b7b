"""What the train loop tells of itself while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd_core.training.phase import PHASES, read_phase, tell_phase
from tests.opd_core.training.whole_loop import config_of, train


class Witness:
    """A learner that looks at the phase whenever it is asked for something."""

    def __init__(self, learner: Any, run_dir: Path, seen: dict[str, tuple[str, int]]) -> None:
        self._learner, self._run_dir, self._seen = learner, run_dir, seen

    def __getattr__(self, name: str) -> Any:
        if (state := read_phase(self._run_dir)) is not None:
            self._seen.setdefault(name, (state.phase, state.train_step))
        return getattr(self._learner, name)


async def test_the_phase_is_told_before_it_begins(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    seen: dict[str, tuple[str, int]] = {}
    task = {"judge": "opd_core.agent_loop.judges:arithmetic"}
    training = {"steps": 2, "checkpoint_every": 1, "export_checkpoints": False}
    told = {"evaluation": str(data)}
    config = config_of(student_dir, data, teacher_url, task=task, training=training, data=told)
    await train(config, run_dir, around=lambda learner: Witness(learner, run_dir, seen))
    assert seen["update"] == ("training", 1)
    assert seen["weights"] == ("weight sync", 1)
    assert seen["start_checkpoint"] == ("checkpoint", 1)
    assert seen["finish_checkpoint"] == ("sampling", 2)  # written beside it
    state = read_phase(run_dir)
    assert state is not None
    assert (state.phase, state.train_step) == ("checkpoint", 2)


def test_a_phase_that_cannot_be_told_costs_nothing(tmp_path: Path) -> None:
    assert read_phase(tmp_path) is None
    tell_phase(tmp_path / "gone", PHASES[0], 1)
    tell_phase(tmp_path, "evaluation", 4)
    state = read_phase(tmp_path)
    assert state is not None
    assert (state.phase, state.train_step) == ("evaluation", 4)
