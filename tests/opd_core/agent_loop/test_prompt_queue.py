"""The order in which prompts are asked: seeded epochs, lost prompts first."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.agent_loop.prompts import PromptQueue
from opd_core.errors import TrainingError
from opd_core.rollout import Prompt


@pytest.fixture(scope="session")
def make_queue(make_prompt: Callable[..., Prompt]) -> Callable[..., PromptQueue]:
    """``make_queue(count, seed=…, max_requeue=…)`` of rows 0, 1, …"""

    def make(count: int, seed: int = 0, max_requeue: int = 2) -> PromptQueue:
        return PromptQueue(
            [make_prompt(i) for i in range(count)], seed=seed, max_requeue=max_requeue
        )

    return make


def take_rows(queue: PromptQueue, count: int) -> list[int]:
    return [prompt.row for prompt, _ in queue.take(count)]


def test_each_epoch_asks_every_prompt_once(make_queue: Any) -> None:
    queue = make_queue(30)
    epochs = [take_rows(queue, 30) for _ in range(4)]
    assert all(sorted(rows) == list(range(30)) for rows in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert queue.epoch == 3


def test_the_order_is_fixed_by_the_seed_alone(make_queue: Any) -> None:
    def rows(seed: int, *, at_once: bool) -> list[int]:
        queue = make_queue(10, seed)
        return take_rows(queue, 25) if at_once else [take_rows(queue, 1)[0] for _ in range(25)]

    assert rows(1, at_once=True) == rows(1, at_once=True) == rows(1, at_once=False)
    assert rows(1, at_once=True) != rows(2, at_once=True)


def test_the_order_is_the_same_on_every_machine(make_queue: Any) -> None:
    assert take_rows(make_queue(8, seed=1234), 16) == [
        5,
        2,
        3,
        1,
        6,
        7,
        4,
        0,
        6,
        7,
        5,
        0,
        4,
        2,
        1,
        3,
    ]


def test_the_first_epoch_is_number_0(make_queue: Any) -> None:
    queue = make_queue(2)
    assert queue.epoch == 0
    queue.take(2)
    assert queue.epoch == 0
    queue.take(1)
    assert queue.epoch == 1


def test_a_lost_prompt_comes_back_before_the_others(make_queue: Any) -> None:
    queue = make_queue(10)
    (first, _), (second, _) = queue.take(2)
    assert queue.give_back(second)
    assert queue.give_back(first)
    assert take_rows(queue, 2) == [second.row, first.row]


def test_a_lost_prompt_comes_back_only_so_often(make_queue: Any) -> None:
    queue = make_queue(10, max_requeue=2)
    ((prompt, asked),) = queue.take(1)
    assert asked == 0
    for again in (1, 2):
        assert queue.give_back(prompt)
        assert queue.take(1) == [(prompt, again)]
    assert not queue.give_back(prompt)
    assert prompt.row not in take_rows(queue, 9)


def test_in_a_new_epoch_it_may_come_back_again(make_queue: Any) -> None:
    queue = make_queue(1, max_requeue=1)
    ((prompt, _),) = queue.take(1)
    assert queue.give_back(prompt)
    queue.take(1)
    assert not queue.give_back(prompt)
    queue.take(1)  # the next epoch
    assert queue.give_back(prompt)


def test_with_max_requeue_0_nothing_comes_back(make_queue: Any) -> None:
    queue = make_queue(3, max_requeue=0)
    ((prompt, _),) = queue.take(1)
    assert not queue.give_back(prompt)


def test_a_prompt_is_never_handed_out_twice_with_the_same_count(make_queue: Any) -> None:
    queue = make_queue(3)
    seen = set()
    for round_number in range(12):
        for prompt, asked in queue.take(5):
            assert (prompt.row, asked) not in seen
            seen.add((prompt.row, asked))
            if round_number % 2:
                queue.give_back(prompt)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_losses_never_cost_another_prompt_its_turn(make_queue: Any, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6), label="prompts")
    max_requeue = data.draw(st.integers(0, 3), label="max_requeue")
    queue = make_queue(count, max_requeue=max_requeue)
    asked: list[int] = []
    while queue.epoch == 0:
        ((prompt, _),) = queue.take(1)
        if queue.epoch == 0:
            asked.append(prompt.row)
            if data.draw(st.booleans(), label=f"lost {prompt.row}"):
                queue.give_back(prompt)
    times = {row: asked.count(row) for row in range(count)}
    assert all(1 <= n <= 1 + max_requeue for n in times.values())


def test_without_prompts_there_is_no_queue() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptQueue([], seed=0, max_requeue=2)


# -------------------------------------------------------------------------------------------- state


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_restored_queue_goes_on_as_if_nothing_had_happened(
    make_queue: Any, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 7), label="prompts")
    options = {
        "seed": data.draw(st.integers(0, 3), label="seed"),
        "max_requeue": data.draw(st.integers(0, 2), label="max_requeue"),
    }
    actions = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 8))), max_size=6)

    def live(queue: PromptQueue, steps: list[tuple[int, list[int]]]) -> list[Any]:
        """What is taken, and what of it may come back, in each step."""
        told: list[Any] = []
        for taking, lost in steps:
            taken = queue.take(taking)
            told.append((taken, [queue.give_back(taken[i][0]) for i in lost if i < taking]))
        return [*told, queue.epoch]

    never_stopped, stopped = make_queue(count, **options), make_queue(count, **options)
    before = data.draw(actions, label="before")
    live(never_stopped, before)
    live(stopped, before)
    later = make_queue(count, **options)
    later.restore(json.loads(json.dumps(stopped.state())))
    assert later.state() == never_stopped.state()
    after = data.draw(actions, label="after")
    assert live(later, after) == live(never_stopped, after)
    assert later.state() == never_stopped.state()


def test_a_state_is_a_copy(make_queue: Any) -> None:
    queue = make_queue(4)
    queue.give_back(queue.take(1)[0][0])
    state = queue.state()
    text = json.dumps(state)
    queue.take(3)
    assert json.dumps(state) == text


def test_returned_prompts_are_those_of_the_data(make_prompt: Any) -> None:
    """A state names them by their rows; what judges read of them is not in it."""
    prompts = [make_prompt(row, extra={"row": row}) for row in (3, 8)]
    queue = PromptQueue(prompts, seed=0, max_requeue=1)
    ((prompt, _),) = queue.take(1)
    queue.give_back(prompt)
    later = PromptQueue(prompts, seed=0, max_requeue=1)
    later.restore(queue.state())
    ((again, asked),) = later.take(1)
    assert (again.row, again.extra, asked) == (prompt.row, {"row": prompt.row}, 1)


def test_a_state_of_other_data_is_refused_with_what_to_do(
    make_queue: Any, make_prompt: Any
) -> None:
    queue = make_queue(5)
    queue.take(7)
    with pytest.raises(TrainingError, match=r"of 5 prompts, and the data gives 4.* rows .*\[4\]"):
        make_queue(4).restore(queue.state())
    with pytest.raises(TrainingError, match=r"of 5 prompts, and the data gives 6; go on with the"):
        make_queue(6).restore(queue.state())
    others = PromptQueue([make_prompt(row) for row in range(1, 6)], seed=0, max_requeue=2)
    told = (
        r"prompt queue.*rows that the data does not give: \[0\]; go on with the data file, data\."
    )
    with pytest.raises(TrainingError, match=told):
        others.restore(queue.state())


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": None},
        {"epoch": "1"},
        {"epoch": -2},
        {"taken": 6},
        {"taken": -1},
        {"taken": 2.0},
        {"returned": [0, "1"]},
        {"returned": [9]},
        {"requeued": {"x": 1}},
        {"requeued": {"9": 1}},
        {"asked": {"1": "2"}},
        {"asked": []},
        {"also": 1},
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(
    make_queue: Any, change: dict[str, Any]
) -> None:
    queue = make_queue(5)
    queue.take(3)
    before = queue.state()
    with pytest.raises(TrainingError, match=r"^state of the prompt queue: "):
        queue.restore(before | change)
    missing = {name: value for name, value in before.items() if name not in change}
    if missing != before:
        with pytest.raises(TrainingError, match="missing or unknown"):
            queue.restore(missing)
    assert queue.state() == before
