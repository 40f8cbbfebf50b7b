"""1, 2 and 4 ranks, any cut into micro-batches, packed or padded: the same update."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.opd_core.training.engine import scored_batch, with_tools
from tests.opd_core.training.ranks import ADAPTED, CASES, HYBRID, run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def batches(student_dir: Path, teacher_dir: Path) -> list[Any]:
    """Three train steps: one with fewer samples than ranks, one with two optimizer steps, with
    stale tokens and a tool's. In all of them the teacher's own gradient is measured."""
    made = [
        scored_batch(student_dir, teacher_dir, samples=11, seed=1),
        scored_batch(student_dir, teacher_dir, samples=3, seed=2),
        with_tools(scored_batch(student_dir, teacher_dir, samples=7, mini_batches=2, seed=3)),
    ]
    return [replace(batch, measure_teacher=True) for batch in made]


@pytest.fixture(scope="module")
def expected(student_dir: Path, batches: list[Any]) -> dict[str, Any]:
    """Padded, in one piece, on one rank that has joined nobody."""
    return run(student_dir, batches, {"packing": False})


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))


def compare(told: dict[str, Any], expected: dict[str, Any]) -> None:
    pairs = zip(told["gradient"], expected["gradient"], strict=True)
    assert max(relative(found, wanted) for found, wanted in pairs) < 1e-5
    for name, weight in told["weights"].items():
        assert float((weight - expected["weights"][name]).abs().max()) < 1e-6, name
    assert told["curve"] == pytest.approx(expected["curve"], abs=1e-4, rel=1e-4)
    for found, wanted in zip(told["metrics"], expected["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_any_cut_gives_the_same_update_on_one_rank(
    student_dir: Path, batches: list[Any], expected: dict[str, Any], case: str
) -> None:
    compare(run(student_dir, batches, CASES[case]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_any_number_of_ranks_gives_the_update_of_one(
    student_dir: Path, batches: list[Any], expected: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    torch.save(batches, tmp_path / "batches.pt")
    command = [sys.executable, "-m", "tests.opd_core.training.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path), str(student_dir)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = [torch.load(tmp_path / f"told-{ranks}-{rank}.pt") for rank in range(ranks)]
    assert set(told[0]) == set(CASES | (HYBRID if ranks == 4 else ADAPTED))
    for case, of_rank_0 in told[0].items():
        alone = run(student_dir, batches, ADAPTED[case]) if case in ADAPTED else expected
        compare(of_rank_0, alone)
        # Metrics are those of all ranks, on each of them; only rank 0 hands weights out.
        assert all(other[case]["metrics"] == of_rank_0["metrics"] for other in told)
        assert all("grad_norm_teacher" in metrics for metrics in of_rank_0["metrics"])
        assert not any(other[case]["weights"] for other in told[1:])
        for name, weight in of_rank_0["unmeasured"].items():
            assert torch.equal(weight, of_rank_0["weights"][name]), name
