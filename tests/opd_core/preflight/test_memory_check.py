"""A run is refused before it starts where a device has too little memory, by the plan's numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from opd_core.planning import Cards, estimate
from opd_core.planning.shapes import KNOWN
from opd_core.preflight import PreflightReport
from opd_core.preflight.machine import check_devices
from opd_core.recipe import find_recipe, load_recipe

Tell = Callable[[int], None]


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """An `nvidia-smi` that tells of eight free GPUs of so many MiB."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(mib: int) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(
            "#!/bin/sh\nfor gpu in 0 1 2 3 4 5 6 7; do\n  case $1 in\n"
            f'    *memory.total*) echo "$gpu, GPU-a$gpu, {mib}, NVIDIA X" ;;\n'
            '    *) echo "$gpu, GPU-a$gpu, 4" ;;\n  esac\ndone\n'
        )
        program.chmod(0o755)

    return write


def problems(tmp_path: Path, name: str, *changes: str) -> list[str]:
    for model, config in KNOWN.items():
        folder = tmp_path / "models" / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    config = load_recipe(find_recipe(name), changes, {"OPD_CACHE": str(tmp_path)})
    report = PreflightReport()
    check_devices(config, report)
    return report.problems


def test_cards_that_are_too_small_refuse_the_run_as_the_plan_does(
    eight_gpus: Tell, tmp_path: Path
) -> None:
    eight_gpus(81559)  # an H100 of "80 GB"
    found = problems(tmp_path, "dapo_math_qwen3_8b")
    (teacher,) = (problem for problem in found if "teacher" in problem)
    assert teacher.startswith("GPU 7: teacher 'teacher': weights 65.5 GB")
    assert "more than the 51.3 GB of launch.memory_fraction 0.6 x 85.5 GB" in teacher
    config = load_recipe(find_recipe("dapo_math_qwen3_8b"), (), {"OPD_CACHE": str(tmp_path)})
    planned = estimate(config, Cards(otherwise=81559 * 2**20))
    assert len(found) == sum(len(device.problems) for device in planned)


def test_cards_that_suffice_are_no_problem(eight_gpus: Tell, tmp_path: Path) -> None:
    eight_gpus(143771)  # an H200
    assert problems(tmp_path, "dapo_math_qwen3_8b") == []
    eight_gpus(81559)
    assert problems(tmp_path, "dapo_math_qwen3_8b_80gb") == []


def test_a_device_is_found_by_its_uuid_too(eight_gpus: Tell, tmp_path: Path) -> None:
    eight_gpus(81559)
    (teacher,) = (
        problem
        for problem in problems(
            tmp_path, "dapo_math_qwen3_8b", "opd.teachers.0.launch.devices=[GPU-a7]"
        )
        if "teacher" in problem
    )
    assert teacher.startswith("GPU GPU-a7: ")


@pytest.mark.parametrize(
    "changes",
    [
        ["sampling.actors=2"],
        ["opd.teachers.0.backend=lmdeploy", "opd.teachers.0.launch.dtype=bfloat16"],
    ],
)
def test_two_lmdeploy_servers_fit_any_host(tmp_path: Path, changes: list[str]) -> None:
    plain = ["sampling.engine=lmdeploy", "student.dtype=bfloat16"]
    assert problems(tmp_path, "tiny", *plain, *changes) == []


def test_a_driver_that_does_not_say_how_large_its_cards_are_refuses_nothing(
    eight_gpus: Tell, tmp_path: Path
) -> None:
    eight_gpus(81559)
    program = tmp_path / "nvidia-smi"
    program.write_text(program.read_text().replace("81559", "[N/A]"))
    assert problems(tmp_path, "dapo_math_qwen3_8b") == []
