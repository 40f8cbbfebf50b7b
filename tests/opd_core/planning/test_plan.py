"""A plan says what a run really does: its commands, tokens, order and files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opd_core.config import ExperimentConfig
from opd_core.planning import Cards, Plan, make_plan
from opd_core.planning.items import GB
from opd_core.serving.child import server_child
from opd_core.serving.servers import student_servers, teacher_servers
from opd_core.training import files
from opd_core.training.head import PORT_FLAGS, head_command
from opd_core.training.jobs import StudentJob
from tasks.cards import PAIR_CHECK
from tests.opd_core.planning.planned_recipes import cards_of, recipe

DAPO = "dapo_math_qwen3_8b"
RECIPES = [DAPO, f"{DAPO}_80gb", f"{DAPO}_lmdeploy", f"{DAPO}_mixed", f"{DAPO}_two_nodes"]
PORT = 40404


def planned(config: ExperimentConfig) -> Plan:
    return make_plan(config, cards_of(141))


@pytest.mark.parametrize("name", [*RECIPES, "tiny", "tiny_sglang", "tiny_multi_teacher"])
def test_the_servers_commands_are_those_of_a_run(name: str) -> None:
    config = recipe(name)
    commands = {process.name: process for process in planned(config).processes}
    servers = (*teacher_servers(config.opd), *student_servers(config))
    assert servers
    for server in servers:
        port = server.port or PORT
        child = server_child(server, port=port, key=None, cwd=Path("/run"), log=Path("/log"))
        process = commands.pop(server.child)
        assert process.ports == ((server.port or 0),)
        argv = [str(port) if part == str(process.ports[0]) else part for part in process.argv]
        assert tuple(argv) == child.argv
        assert process.env == dict(child.env)
        assert process.devices == tuple(child.devices)
    assert set(commands) <= {"ray-head", "student (Ray job)"}


def test_the_rays_command_is_that_of_a_run() -> None:
    config = recipe(DAPO)
    head = planned(config).processes[0]
    ports = tuple(range(PORT, PORT + len(PORT_FLAGS)))
    real = head_command(config, ports, Path("/tmp/opd-ray-1"), Path("/tmp/opd-ray-1/token"))
    differ = [(a, b) for a, b in zip(head.argv, real.argv, strict=True) if a != b]
    assert differ == [
        *(("0", str(port)) for port in ports),
        ("TEMPORARY-FOLDER", "/tmp/opd-ray-1"),
    ]
    assert head.env["CUDA_VISIBLE_DEVICES"] == real.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_on_a_cluster_of_ones_own_no_head_is_started() -> None:
    names = [process.name for process in planned(recipe(f"{DAPO}_two_nodes")).processes]
    assert names == ["teacher-teacher", "teacher-teacher-1", "student (Ray job)"]


def test_the_jobs_command_is_the_one_that_is_submitted() -> None:
    class Jobs:
        entrypoint = ""

        def submit_job(self, *, entrypoint: str, submission_id: str) -> None:
            self.entrypoint = entrypoint

    jobs, plan = Jobs(), planned(recipe("tiny"))
    StudentJob(jobs, "tiny-1").submit(sys.executable, plan.directory)
    assert jobs.entrypoint == " ".join(plan.processes[-1].argv)


def test_a_key_is_no_part_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "planted")
    config = recipe(DAPO, "opd.teachers.0.api_key=env:THE_KEY")
    told = planned(config)
    assert "planted" not in repr(told)
    (teacher,) = (process for process in told.processes if process.name == "teacher-teacher")
    assert teacher.argv[1].endswith("keyed_launch.py")


def test_the_tokens_of_a_step_are_those_of_the_longest_rollouts() -> None:
    tokens = planned(recipe(DAPO)).tokens
    assert (tokens.rollouts, tokens.rollout) == (16 * 4, 2048 + 16384)
    assert (tokens.step, tokens.response) == (1_179_648, 1_048_576)
    assert tokens.run == 300 * 1_179_648
    assert tokens.micro_batches == 64 // 4
    (teacher,) = tokens.teachers
    assert (teacher.chunk, teacher.chunks) == (4096, 5)  # 18,432 / 4,096 is 4.5
    assert teacher.at_once == 2**20 // 18_432 == 56


def test_the_order_is_that_of_the_flow() -> None:
    steps = list(planned(recipe(DAPO)).order)
    found = [
        next(number for number, step in enumerate(steps) if word in step)
        for word in ("locked", "checks", "head", "start together", "proven", "job", "300")
    ]
    assert found == sorted(found)


def test_the_large_things_on_disk_are_told_with_their_size() -> None:
    sizes = {item.path: item.bytes for item in planned(recipe(DAPO)).files}
    student = 8_190_735_360
    assert sizes["checkpoints/"] == 3 * (12 + 4) * student
    assert sizes["weights/"] == 2 * 2 * student
    assert sizes["student/"] == 4 * student


def test_every_file_that_flow_and_job_speak_through_is_planned() -> None:
    named = {value for name, value in vars(files).items() if name.endswith(("_FILE", "_FOLDER"))}
    only_sometimes = {files.PARKED_FOLDER, files.ATTEMPTS_FOLDER}
    told = {item.path.rstrip("/") for item in planned(recipe(DAPO)).files}
    assert named - only_sometimes <= told
    assert {f"{PAIR_CHECK}.md", f"{PAIR_CHECK}.json", "supervisor.log", "tensorboard"} <= told


def test_files_of_what_a_run_does_without_are_not_planned() -> None:
    teachers = {"pair_check.md", "pair_check.json", files.TEACHERS_FILE, files.SCORING_FILE}
    reward_only = {item.path for item in planned(recipe("tiny_grpo")).files}
    assert not reward_only & {*teachers, files.SAMPLERS_FILE}
    plain = planned(recipe("tiny", "tracking.tensorboard=false")).files
    assert "tensorboard/" not in {item.path for item in plain}


def test_problems_name_their_device() -> None:
    plan = make_plan(recipe(f"{DAPO}_two_nodes"), Cards(otherwise=24 * GB))
    assert any(problem.startswith("GPU 0: teacher 'teacher': ") for problem in plan.problems)
    assert any(problem.startswith("GPU 7 of the cluster: ") for problem in plan.problems)


def test_planning_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, opd_core.planning, deployments.planning; "
        "heavy = {'torch', 'transformers', 'ray', 'prefect'}; "
        "sys.exit(str(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "set()"
