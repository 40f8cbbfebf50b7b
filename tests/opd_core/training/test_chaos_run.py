"""Real rollouts, scored by a teacher that goes wrong on purpose: not one wrong number gets into the
replay buffer, and collecting ends completed, or stopped with the right cause.

What is asserted is asserted on the buffer: every score in it is held against the teacher's own
logits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd_core.agent_loop.collect import Collector
from opd_core.agent_loop.loop import AgentLoop, LoopSettings
from opd_core.agent_loop.parking import ParkingLot
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.agent_loop.survivors import Survivors
from opd_core.config import OPDConfig, OPDTeacherConfig
from opd_core.data import load_prompts
from opd_core.errors import TeacherAway
from opd_core.lifecycle.ports import reserve_ports
from opd_core.rollout import Group
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.routing import TeacherRouter
from opd_core.serving.readiness import prove_teacher, wait_until_healthy
from opd_core.training import models
from opd_core.training.local import LocalSampler

pytestmark = pytest.mark.slow

TINY = Path("deployments/recipes/assets/tiny")
VOCAB = 32
GROUPS, STEPS = 12, 3
CANARIES = [[6, 7, 12, 8, 13, 9, 14, 10, 5, 11], [4, 12, 4, 14, 9, 13, 5, 15, 3]]


class WatchedBuffer(ReplayBuffer):
    """A replay buffer that remembers everything it accepted."""

    def __init__(self) -> None:
        super().__init__(needs_scores=True, needs_rewards=False)
        self.accepted: list[Group] = []

    def put(self, group: Group) -> None:
        super().put(group)
        self.accepted.append(group)


class ChaosServer:
    """The chaos teacher in a process of its own, with a script that tests replace."""

    def __init__(self, folder: Path) -> None:
        with reserve_ports(1) as reserved:
            (port,) = reserved.ports
        self.endpoint = f"http://127.0.0.1:{port}"
        script, self._log = folder / "script.json", folder / "server.log"
        script.write_text('{"faults": []}')
        command = [sys.executable, "-m", "opd_core.serving.embedded", "--model-path"]
        command += [str(TINY / "teacher"), "--port", str(port), "--chaos", str(script)]
        with self._log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def still_alive(self) -> None:
        assert self.process.poll() is None, self._log.read_text()

    def play(self, *faults: dict[str, Any]) -> None:
        answer = httpx.put(
            f"{self.endpoint}/chaos", content=json.dumps({"faults": faults}), trust_env=False
        )
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosServer]:
    server = ChaosServer(tmp_path_factory.mktemp("chaos"))
    try:
        wait_until_healthy(server.endpoint, "embedded", limit_s=120, still_alive=server.still_alive)
        yield server
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


@pytest.fixture(scope="module")
def teacher(chaos: ChaosServer) -> OPDTeacherConfig:
    return OPDTeacherConfig(
        name="teacher",
        endpoint=chaos.endpoint,
        backend="embedded",
        request_timeout_s=2.0,
        away_limit_s=3.0,
    )


@pytest.fixture(scope="module")
def facts(teacher: OPDTeacherConfig) -> TeacherFacts:
    """With canaries, scored while the teacher is honest."""
    proof = prove_teacher(teacher, TeacherFacts(VOCAB, 96), None, CANARIES, "float32")
    return TeacherFacts(VOCAB, 96, canaries=proof.canaries, tolerance=proof.tolerance)


@pytest.fixture(scope="module")
def sampler() -> LocalSampler:
    tokenizer = models.load_tokenizer(str(TINY / "student"))
    model = models.load_model(str(TINY / "student"), "float32", torch.device("cpu"))
    ends, pad = models.end_ids(model, tokenizer), models.pad_id(tokenizer)
    return LocalSampler(TransformersEngine(model, end_ids=ends, pad_id=pad, max_rows=64))


Collect = Callable[[], Awaitable[tuple[WatchedBuffer, Survivors, str]]]


async def collect(
    sampler: LocalSampler, teacher: OPDTeacherConfig, facts: TeacherFacts, folder: Path
) -> tuple[WatchedBuffer, Survivors, str]:
    """``STEPS`` train steps' groups: the buffer, what became of all, and why it stopped."""
    opd = OPDConfig(teachers=[teacher], default_teacher="teacher")
    prompts = load_prompts(
        str(TINY / "train.jsonl"), models.load_tokenizer(str(TINY / "student")), 32, 200
    ).prompts
    buffer, survivors, stopped = WatchedBuffer(), Survivors(), ""
    parking = ParkingLot(folder / "parked")
    connect = TeacherRouter.connect(opd, {"teacher": facts}, {}, parking=parking)
    async with connect as router:
        loop = AgentLoop(
            LoopSettings(group_size=2, max_new_tokens=24, seed=1),
            sampler=sampler,
            decode=lambda ids: "",
            scorer=router,
        )
        collector = Collector(
            PromptQueue(prompts, seed=1, max_requeue=2),
            loop,
            buffer,
            groups_per_step=GROUPS,
            limit=8 * GROUPS,
            teachers=router,
            on_group=survivors.count,
        )
        try:
            for _ in range(STEPS):  # of one and the same student
                await collector.collect(train_step=1)
        except TeacherAway as error:
            stopped = str(error)
    return buffer, survivors, stopped


@pytest.fixture
def collected(
    sampler: LocalSampler, teacher: OPDTeacherConfig, facts: TeacherFacts, tmp_path: Path
) -> Collect:
    """``await collected()``: :func:`collect` before the chaos teacher."""
    return partial(collect, sampler, teacher, facts, tmp_path)


def assert_nothing_wrong(buffer: WatchedBuffer) -> None:
    """Every score in the buffer is what the teacher's own logits say."""
    model = AutoModelForCausalLM.from_pretrained(TINY / "teacher").eval()
    for rollout in (rollout for group in buffer.accepted for rollout in group.rollouts):
        ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        true = logprobs.gather(-1, ids[0, 1:, None])[-len(rollout.response_ids) :, 0]
        assert rollout.teacher_logprobs is not None
        torch.testing.assert_close(torch.tensor(rollout.teacher_logprobs), true, atol=1e-3, rtol=0)


SPOILT = {
    "wrong_rows": ({"rows": -1}, "row_count", "rows of input_token_logprobs"),
    "shifted": ({}, "ids", "is of id"),
    "nulls": ({}, "null", "has logprob None"),
    "nan": ({}, "not_json", "not JSON"),
    "infinite": ({}, "not_json", "not JSON"),
    "positive": ({}, "value", "expected <= 0"),
    "other_ids": ({}, "ids", "is of id"),
    "raw_logits": ({}, "value", "expected <= 0"),
    "uniform": ({}, "uniform", "lost its weights"),
}
"""Answers that no attempt makes better: the rollout fails with this cause, and a run that is
stopped by them says so in these words."""
STALE = ({}, "teacher_changed", "a known sequence")
PASSING: dict[str, dict[str, Any]] = {
    "error_200": {},
    "status": {"status": 503, "retry_after": 1},
    "hang": {},
    "cut": {},
}
"""Failures after which another attempt is worth it."""


@pytest.mark.parametrize("fault", SPOILT)
async def test_an_answer_that_is_wrong_now_and_then_costs_its_rollouts_only(
    fault: str, chaos: ChaosServer, collected: Collect
) -> None:
    arguments, cause, _ = SPOILT[fault]
    chaos.play({"fault": fault, "every": 9, "first": 4, **arguments})
    buffer, survivors, stopped = await collected()
    assert stopped == ""
    assert len(buffer.accepted) == GROUPS * STEPS
    assert set(survivors.by_cause) <= {cause, "teacher_changed"}
    assert survivors.by_cause[cause] > 0
    assert_nothing_wrong(buffer)


@pytest.mark.parametrize("fault", [*SPOILT, "stale"])
async def test_a_teacher_that_only_answers_wrongly_stops_the_run_with_the_cause(
    fault: str, chaos: ChaosServer, collected: Collect
) -> None:
    arguments, _, words = SPOILT.get(fault, STALE)
    chaos.play({"fault": fault, "first": GROUPS * 2 + 8, **arguments})
    buffer, survivors, stopped = await collected()
    assert "nobody could be asked" in stopped
    assert words in stopped
    if fault == "stale":
        assert survivors.by_cause["teacher_changed"] > 0
    assert_nothing_wrong(buffer)


@pytest.mark.parametrize("fault", PASSING)
async def test_a_failure_that_passes_costs_nothing(
    fault: str, chaos: ChaosServer, collected: Collect
) -> None:
    chaos.play({"fault": fault, "every": 9, "first": 4, **PASSING[fault]})
    buffer, _, stopped = await collected()
    assert stopped == ""
    assert len(buffer.accepted) == GROUPS * STEPS
    assert_nothing_wrong(buffer)


@pytest.mark.parametrize("fault", PASSING)
async def test_a_teacher_that_always_fails_stops_the_run_and_its_rollouts_are_kept(
    fault: str, chaos: ChaosServer, collected: Collect, tmp_path: Path
) -> None:
    chaos.play({"fault": fault, "first": GROUPS * 2 + 8, **PASSING[fault]})
    buffer, _, stopped = await collected()
    assert "nobody could be asked" in stopped
    assert ParkingLot(tmp_path / "parked").load()
    assert_nothing_wrong(buffer)


async def test_a_slow_teacher_costs_time_only(chaos: ChaosServer, collected: Collect) -> None:
    chaos.play({"fault": "slow", "delay_s": 0.3})
    buffer, survivors, stopped = await collected()
    assert (stopped, survivors.by_cause.total()) == ("", 0)
    assert len(buffer.accepted) == GROUPS * STEPS
    assert_nothing_wrong(buffer)
