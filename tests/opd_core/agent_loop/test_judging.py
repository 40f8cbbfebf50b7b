"""Judges in a process of their own: whatever they do, the loop gets a number or a reason."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

from opd_core.agent_loop.judging import JudgeError, JudgeRunner

JUDGES = """
import os
import signal
import sys
import threading


def length(text, prompt):
    return len(text)


def give(value):
    return lambda text, prompt: value


none, nan, infinite, words, pair = map(give, (None, float("nan"), float("inf"), "1.0", (1.0,)))
true, false, whole = map(give, (True, False, 3))


def hangs_on_bad(text, prompt):
    if text == "bad":
        threading.Event().wait()
    return 1.0


def raises(text, prompt):
    raise KeyError("no such key")


def leaves(text, prompt):
    sys.exit("enough")


def dies_of_bad(text, prompt):
    if text == "bad":
        os._exit(3)
    return os.getpid()


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raises_what_cannot_travel(text, prompt):
    raise Stubborn("one", "two")


def gives_what_cannot_travel(text, prompt):
    return lambda: 1.0


def pid_in_the_main_thread(text, prompt):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # only the main thread may
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def by_index(rollouts):
    return [rollout.index for rollout in rollouts]


def too_few(rollouts):
    return [1.0]


def a_number(rollouts):
    return 1.0


def one_is_none(rollouts):
    return [1.0, None]
"""


@pytest.fixture(scope="module", autouse=True)
def _judges_are_importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("judges")
    (folder / "some_judges.py").write_text(JUDGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # spawned processes get the same path
        yield


@pytest.fixture(scope="module")
def one_process() -> Iterator[ProcessPoolExecutor]:
    """One judge's process for all tests that do not kill it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def one_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def test_a_judge_gives_a_reward(one_thread: Any, make_prompt: Any) -> None:
    runner = JudgeRunner("some_judges:length", make_executor=lambda: one_thread)
    assert await runner.judge("four", make_prompt()) == 4.0


@pytest.mark.parametrize(("name", "reward"), [("true", 1.0), ("false", 0.0), ("whole", 3.0)])
async def test_a_truth_value_or_an_integer_is_a_reward(
    name: str, reward: float, one_thread: Any, make_prompt: Any
) -> None:
    value = await JudgeRunner(f"some_judges:{name}", make_executor=lambda: one_thread).judge(
        "", make_prompt()
    )
    assert value == reward
    assert type(value) is float


@pytest.mark.parametrize("name", ["none", "nan", "infinite", "words", "pair"])
async def test_what_is_no_finite_number_is_an_error_and_not_0(
    name: str, one_thread: Any, make_prompt: Any
) -> None:
    runner = JudgeRunner(f"some_judges:{name}", make_executor=lambda: one_thread)
    with pytest.raises(JudgeError, match=f"some_judges:{name}: expected a finite number"):
        await runner.judge("", make_prompt())


async def test_a_judge_that_raises_is_quoted(one_thread: Any, make_prompt: Any) -> None:
    runner = JudgeRunner("some_judges:raises", make_executor=lambda: one_thread)
    with pytest.raises(JudgeError, match=r"^some_judges:raises: KeyError: 'no such key'$"):
        await runner.judge("", make_prompt())


async def test_a_batch_judge_gives_one_reward_each(one_thread: Any, make_rollout: Any) -> None:
    runner = JudgeRunner("some_judges:by_index", make_executor=lambda: one_thread)
    rewards = await runner.judge_batch([make_rollout(i) for i in range(3)])
    assert rewards == [0.0, 1.0, 2.0]
    assert {type(reward) for reward in rewards} == {float}


@pytest.mark.parametrize("name", ["too_few", "a_number", "one_is_none", "raises"])
async def test_a_batch_judge_that_fails_is_an_error(
    name: str, one_thread: Any, make_rollout: Any
) -> None:
    runner = JudgeRunner(f"some_judges:{name}", make_executor=lambda: one_thread)
    with pytest.raises(JudgeError, match=f"some_judges:{name}"):
        await runner.judge_batch([make_rollout(0), make_rollout(1)])


async def test_a_judge_runs_in_the_main_thread_of_another_process(
    one_process: Any, make_prompt: Any
) -> None:
    runner = JudgeRunner("some_judges:pid_in_the_main_thread", make_executor=lambda: one_process)
    pid = await runner.judge("", make_prompt())
    assert pid not in (0, os.getpid())


async def test_the_math_judge_runs_there(one_process: Any, make_prompt: Any) -> None:
    runner = JudgeRunner("opd_core.agent_loop.judges:math", make_executor=lambda: one_process)
    prompt = make_prompt(ground_truth="1/2")
    assert await runner.judge(r"\boxed{0.5}", prompt) == 1.0
    assert await runner.judge(r"\boxed{2}", prompt) == 0.0
    with pytest.raises(JudgeError, match=r"judges:math: ValueError: row 0 has no reward_model"):
        await runner.judge(r"\boxed{2}", make_prompt(ground_truth=None))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leaves", "SystemExit: enough"),
        ("raises_what_cannot_travel", "Stubborn: one and two"),
        ("gives_what_cannot_travel", "pickle"),
    ],
)
async def test_nothing_that_a_judge_does_breaks_its_process_or_this_one(
    name: str, said: str, one_process: Any, make_prompt: Any
) -> None:
    with pytest.raises(JudgeError, match=f"some_judges:{name}.*{said}"):
        await JudgeRunner(f"some_judges:{name}", make_executor=lambda: one_process).judge(
            "", make_prompt()
        )
    assert (
        await JudgeRunner("some_judges:length", make_executor=lambda: one_process).judge(
            "ok", make_prompt()
        )
        == 2
    )


async def test_a_judges_process_that_dies_is_replaced(make_prompt: Any) -> None:
    before = multiprocessing.active_children()
    with JudgeRunner("some_judges:dies_of_bad") as runner:
        with pytest.raises(JudgeError, match="the judge's process died"):
            await runner.judge("bad", make_prompt())
        second = await runner.judge("good", make_prompt())
        assert second > 0
        assert await runner.judge("good", make_prompt()) == second
    assert multiprocessing.active_children() == before


async def test_siblings_of_a_dead_judgement_share_one_new_process(make_prompt: Any) -> None:
    made = []

    def make() -> ProcessPoolExecutor:
        made.append(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))
        return made[-1]

    async def again(text: str) -> float:
        try:
            return await runner.judge(text, make_prompt())
        except JudgeError:
            return await runner.judge("good", make_prompt())

    with JudgeRunner("some_judges:dies_of_bad", make_executor=make) as runner:
        pids = await asyncio.gather(*(again("bad") for _ in range(6)))
    assert len(set(pids)) == 1
    assert len(made) == 2


def test_a_runner_that_judged_nothing_starts_no_process() -> None:
    before = multiprocessing.active_children()
    with JudgeRunner("some_judges:length"):
        assert multiprocessing.active_children() == before


@pytest.mark.slow
async def test_a_judge_that_hangs_is_killed_and_the_next_judgement_works(make_prompt: Any) -> None:
    # Long enough for the process to start and import, on a busy machine too.
    with JudgeRunner("some_judges:hangs_on_bad", timeout_s=10.0) as judge:
        assert await judge.judge("good", make_prompt()) == 1.0
        with pytest.raises(JudgeError, match="gave no answer"):
            await judge.judge("bad", make_prompt())
        assert await judge.judge("good", make_prompt()) == 1.0


async def test_closing_does_not_wait_for_a_judge_that_hangs(make_prompt: Any) -> None:
    judge = JudgeRunner("some_judges:hangs_on_bad")
    assert await judge.judge("good", make_prompt()) == 1.0
    hanging = asyncio.create_task(judge.judge("bad", make_prompt()))
    await asyncio.sleep(0)  # let it be asked
    await asyncio.to_thread(judge.close)
    with pytest.raises(JudgeError):
        await hanging
