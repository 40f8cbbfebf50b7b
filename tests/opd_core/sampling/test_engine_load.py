"""Rows come and go; none of them is changed by it, and an interrupted one goes on as it would."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from opd_core.sampling.protocol import Completion, SampleRequest, rollout_seed
from opd_core.sampling.transformers_engine import TransformersEngine
from tests.opd_core.sampling.models import (
    VOCAB,
    assert_exact,
    engine_of,
    model_of,
    requests_of,
    run,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("qwen3", head_dim=16)


def groups_of(count: int, size: int = 4) -> list[SampleRequest]:
    """Groups one after another; limits from 1 to 40."""
    return [
        SampleRequest(
            (group, index),
            tuple(2 + (group * 7 + j * j) % (VOCAB - 2) for j in range(3 + group % 9)),
            rollout_seed(group, index),
            1 + (group * 11 + index * 17) % 40,
        )
        for group, index in itertools.product(range(count), range(size))
    ]


def one_by_one(model: Any, requests: Sequence[SampleRequest]) -> list[Completion]:
    engine = engine_of(model, max_rows=1)
    return [run(engine, [request])[0] for request in requests]


def finish(engine: TransformersEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while not engine.idle:
        done.update(engine.step())
    return done


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids == other.response_ids
        assert one.finish_reason == other.finish_reason
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=2e-5)


def test_rows_that_come_and_go_are_sampled_as_if_alone(model: Any) -> None:
    """Requests come in threes while others run, sooner than they are done."""
    requests = groups_of(12)
    engine, done = engine_of(model, max_rows=7), {}
    for first in range(0, len(requests), 3):
        engine.submit(list(enumerate(requests))[first : first + 3])
        done.update(engine.step())
        done.update(engine.step())
    done.update(finish(engine))
    assert_same([done[i] for i in range(len(requests))], one_by_one(model, requests))


def test_logprobs_under_load_are_the_models_own(model: Any) -> None:
    assert_exact(model, groups_of(12), max_rows=7)


def test_order_and_number_of_rows_change_nothing(model: Any) -> None:
    requests = requests_of(24)
    together = run(engine_of(model), requests)
    assert_same(run(engine_of(model, max_rows=5), requests), together)
    assert_same(run(engine_of(model), requests[::-1])[::-1], together)


def test_the_same_submits_give_the_same_bits(model: Any) -> None:
    assert run(engine_of(model, 6), groups_of(9)) == run(engine_of(model, 6), groups_of(9))


def test_at_most_max_rows_are_decoded_together_and_short_ones_leave_at_once(model: Any) -> None:
    engine, rows, limits = engine_of(model, max_rows=6), [], (2, 30)
    model_rows = model.lm_head.register_forward_hook(
        lambda _, args, output: rows.append(output.reshape(-1, VOCAB).shape[0])
    )
    requests = [replace(r, max_new_tokens=limits[i % 2]) for i, r in enumerate(requests_of(20))]
    engine.submit(list(enumerate(requests)))
    finished = [engine.step() for _ in range(2)]
    model_rows.remove()
    assert max(rows) == 6
    assert {0, 2, 4} <= {ticket for part in finished for ticket, _ in part}
    assert_same([finish(engine)[19]], [one_by_one(model, requests[19:])[0]])


def test_the_first_to_come_is_the_first_to_enter(model: Any) -> None:
    engine = engine_of(model, max_rows=2)
    engine.submit([(i, replace(r, max_new_tokens=1)) for i, r in enumerate(requests_of(6))])
    assert [[ticket for ticket, _ in engine.step()] for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_a_waiting_row_does_not_wait_for_more_to_leave_than_need_to(model: Any) -> None:
    """One row waits: it takes the first free slot, though more would be prefilled together."""
    engine = engine_of(model, max_rows=32)
    engine.submit(list(enumerate(groups_of(9)[:33])))
    while not engine.step():
        continue
    before = engine.prefilled_tokens
    engine.step()
    assert engine.prefilled_tokens > before


def test_rows_enter_together_while_many_wait(model: Any) -> None:
    engine, prefilled = engine_of(model, max_rows=32), []
    engine.submit(list(enumerate(requests_of(200))))
    while not engine.idle:
        before = engine.prefilled_tokens
        engine.step()
        prefilled.append(engine.prefilled_tokens > before)
    assert sum(prefilled) <= 200 / (32 / 8)


def test_a_prompt_is_computed_once_for_its_group(model: Any) -> None:
    requests = groups_of(5)
    engine = engine_of(model, max_rows=64)
    run(engine, requests)
    assert engine.prefilled_tokens == sum(len(r.token_ids) for r in requests[::4])


def test_a_prompt_that_a_row_holds_is_not_computed_again(model: Any) -> None:
    prompt = tuple(range(2, 12))
    requests = [SampleRequest((0, i), prompt, rollout_seed(5, i), 4 + 9 * i) for i in range(8)]
    engine = engine_of(model, max_rows=3)
    found = run(engine, requests)
    assert engine.prefilled_tokens == len(prompt)
    assert_same(found, one_by_one(model, requests))


def test_an_interrupted_row_goes_on_as_it_would_have(model: Any) -> None:
    requests = groups_of(6)
    whole = run(engine_of(model), requests)
    engine = engine_of(model, max_rows=8)
    engine.submit(list(enumerate(requests)))
    done = dict(itertools.chain(*(engine.step() for _ in range(11))))
    cut = dict(engine.interrupt())
    assert engine.idle
    assert {c.finish_reason for c in cut.values()} == {"abort"}
    assert {bool(c.response_ids) for c in cut.values()} == {True, False}
    assert sorted([*done, *cut]) == list(range(len(requests)))
    for ticket, part in cut.items():
        request, count = requests[ticket], len(part.response_ids)
        again = replace(
            request,
            token_ids=request.token_ids + part.response_ids,
            max_new_tokens=request.max_new_tokens - count,
            drawn=count,
        )
        engine.submit([(ticket, again)])
    for ticket, rest in finish(engine).items():
        part = cut[ticket]
        done[ticket] = replace(
            rest,
            response_ids=part.response_ids + rest.response_ids,
            rollout_logprobs=part.rollout_logprobs + rest.rollout_logprobs,
        )
    assert_same([done[i] for i in range(len(requests))], whole)


def test_an_idle_engine_has_nothing_to_step_or_interrupt(model: Any) -> None:
    engine = engine_of(model)
    assert engine.idle
    assert engine.step() == []
    assert engine.interrupt() == []


@pytest.mark.parametrize("how", ["finished", "interrupted"])
def test_an_engine_that_has_nothing_to_do_keeps_no_memory(model: Any, how: str) -> None:
    def held() -> int:
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
        return sum(tensor.nbytes for tensor in tensors)

    engine = engine_of(model)
    before = held()
    engine.submit(list(enumerate(requests_of(12))))
    engine.step()
    assert held() > before
    if how == "finished":
        finish(engine)
    else:
        engine.interrupt()
    assert held() == before
