"""Held-out accuracy: judged, repeatable, and without any teacher."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest

from opd_core.agent_loop.evaluation import evaluate, pass_at_k
from opd_core.agent_loop.loop import LoopSettings
from opd_core.errors import SamplingError, TrainingError

SETTINGS = LoopSettings(group_size=2, max_new_tokens=3, seed=7, temperature=0.6)


@pytest.fixture
def run(sampler: Any, judge: Any, decode: Any, make_prompt: Any) -> Any:
    """``await run(questions)``."""

    async def evaluation(questions: int = 3, **settings: Any) -> Any:
        prompts = [make_prompt(row) for row in range(questions)]
        given = {"settings": SETTINGS} | settings
        return await evaluate(prompts, sampler=sampler, judge=judge, decode=decode, **given)

    return evaluation


async def test_accuracy_is_the_mean_over_questions_and_samples(run: Any, judge: Any) -> None:
    # Question 0 is answered right twice, question 1 once, question 2 never.
    right = {"10 10 1", "10 11 1", "11 10 1"}
    judge.reward = lambda text, prompt: float(text in right)
    result = await run()
    assert (result.questions, result.samples) == (3, 6)
    assert result.accuracy == pytest.approx(0.5)
    # By hand: the questions' means are 1, 1/2 and 0, their variance 1/4, over three questions.
    assert result.accuracy_stderr == pytest.approx(math.sqrt(0.25 / 3))
    assert result.response_tokens_mean == 3
    assert result.truncated_fraction == 0.5
    rewards = [[rollout.reward for rollout in group.rollouts] for group in result.groups]
    assert [sum(of_one) for of_one in rewards] == [2, 1, 0], "question by question"


async def test_one_question_has_no_standard_error(run: Any) -> None:
    result = await run(questions=1)
    assert (result.accuracy, result.accuracy_stderr) == (1.0, 0.0)


async def test_each_of_several_data_sources_has_its_own_accuracy(
    sampler: Any, judge: Any, decode: Any, make_prompt: Any
) -> None:
    # Of "easy" (rows 0 and 1) all answers are right; of "hard" (row 2) one in two.
    judge.reward = lambda text, prompt: float(prompt.row < 2 or text == "12 10 1")
    sources = ("easy", "easy", "hard")
    prompts = [make_prompt(row, data_source=source) for row, source in enumerate(sources)]
    result = await evaluate(prompts, sampler=sampler, judge=judge, decode=decode, settings=SETTINGS)
    assert result.by_source == {"easy": (1.0, 0.0), "hard": (0.5, 0.0)}
    metrics = result.metrics()
    assert metrics["eval/accuracy"] == pytest.approx(2.5 / 3)
    assert metrics["eval/accuracy/easy"] == 1.0
    assert metrics["eval/accuracy/hard"] == 0.5
    assert metrics["eval/accuracy_stderr/hard"] == 0.0


async def test_the_standard_error_of_a_data_source_is_over_its_own_questions(
    sampler: Any, judge: Any, decode: Any, make_prompt: Any
) -> None:
    judge.reward = lambda text, prompt: float(prompt.row % 4 < 2)
    prompts = [make_prompt(row, data_source="ab"[row % 2]) for row in range(8)]
    result = await evaluate(prompts, sampler=sampler, judge=judge, decode=decode, settings=SETTINGS)
    # Each source: four questions of means 1, 0, 1, 0 with variance 1/3.
    assert result.by_source["a"] == pytest.approx((0.5, math.sqrt(1 / 12)))
    assert result.by_source["b"] == pytest.approx((0.5, math.sqrt(1 / 12)))


async def test_every_evaluation_draws_the_same_random_numbers(run: Any, sampler: Any) -> None:
    await run()
    await run()
    first, second = sampler.calls
    assert first == second
    assert len({request.seed for request in first}) == 6
    assert {request.temperature for request in first} == {0.6}


async def test_training_draws_other_numbers_than_evaluation(
    run: Any, sampler: Any, make_loop: Any, requests_for: Any
) -> None:
    await run()
    await make_loop().run(requests_for(3), train_step=1)
    evaluated, trained = ({r.seed for r in call} for call in sampler.calls)
    assert evaluated.isdisjoint(trained)


async def test_evaluation_asks_no_teacher(run: Any, scorer: Any, log: list[Any]) -> None:
    await run()
    assert scorer.scored == []
    assert {what for what, _ in log} == {"judge"}


async def test_an_answer_that_cannot_be_judged_ends_it(run: Any, judge: Any) -> None:
    def no_truth_for_row_1(text: str, prompt: Any) -> float:
        if prompt.row == 1:
            judge.error = "row 1 has no truth"
            return judge._give(text, prompt)
        return 1.0

    judge.reward = no_truth_for_row_1
    with pytest.raises(TrainingError, match="evaluation of row 1: row 1 has no truth"):
        await run(questions=2)


async def test_an_engine_that_is_lost_ends_it(run: Any, sampler: Any) -> None:
    sampler.omit.add((2, 0))
    sampler.error = SamplingError("no sampling actor is left")
    with pytest.raises(SamplingError, match="no sampling actor is left"):
        await run()


async def test_metrics_carry_the_evaluations_prefix(run: Any) -> None:
    assert (await run()).metrics() == {
        "eval/accuracy": 1.0,
        "eval/accuracy_stderr": 0.0,
        "eval/response_tokens_mean": 3.0,
        "eval/truncated_fraction": 0.5,
    }


# ------------------------------------------------------------------ pass@k


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_answer(samples: int) -> None:
    for right in range(samples + 1):
        answers = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            choices = [any(choice) for choice in combinations(answers, k)]
            expected = sum(choices) / len(choices)
            assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_stays_exact_with_many_samples() -> None:
    assert pass_at_k(10_000, 1, 5_000) == 0.5
    assert pass_at_k(10_000, 0, 5_000) == 0.0
    assert pass_at_k(10_000, 5_001, 5_000) == 1.0
    assert pass_at_k(10_000, 1, 1) == 1e-4


def test_more_choices_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples a question, got 2"):
        pass_at_k(2, 1, 3)


async def test_pass_at_k_is_the_mean_over_questions(run: Any, judge: Any) -> None:
    # Of four answers, question 0 has four right ones, question 1 has one, question 2 none.
    right = {"10 10 1", "10 11 1", "10 12 1", "10 13 1", "11 10 1"}
    judge.reward = lambda text, prompt: float(text in right)
    settings = LoopSettings(group_size=4, max_new_tokens=3, seed=7)
    result = await run(settings=settings, pass_at=(1, 2))
    # By hand: pass@1 of the questions is 1, 1/4, 0; pass@2 is 1, 1/2, 0.
    assert result.accuracy == pytest.approx(1.25 / 3)
    assert result.pass_at[1] == pytest.approx((1.25 / 3, math.sqrt((13 / 48) / 3)))
    assert result.pass_at[2] == pytest.approx((0.5, math.sqrt(0.25 / 3)))
    metrics = result.metrics()
    assert (metrics["eval/pass_at_1"], metrics["eval/pass_at_1_stderr"]) == result.pass_at[1]
    assert (metrics["eval/pass_at_2"], metrics["eval/pass_at_2_stderr"]) == result.pass_at[2]


async def test_only_a_full_reward_is_right(run: Any, judge: Any) -> None:
    judge.reward = lambda text, prompt: {"10 10 1": 1.0, "11 10 1": 1.5}.get(text, 0.99)
    result = await run(pass_at=(2,))
    assert result.pass_at[2][0] == pytest.approx(2 / 3)


async def test_the_answers_are_the_same_with_pass_at_k(run: Any, sampler: Any, scorer: Any) -> None:
    await run()
    await run(pass_at=(1, 2))
    first, second = sampler.calls
    assert first == second
    assert scorer.scored == []
