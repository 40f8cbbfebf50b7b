"""Held-out accuracy: judged, repeatable, and without any teacher."""

from __future__ import annotations

import math
from typing import Any

import pytest

from opd_core.agent_loop.evaluation import evaluate
from opd_core.agent_loop.loop import LoopSettings
from opd_core.errors import TrainingError

SETTINGS = LoopSettings(group_size=2, max_new_tokens=3, seed=7, temperature=0.6)


@pytest.fixture
def run(sampler: Any, judge: Any, decode: Any, make_prompt: Any) -> Any:
    """``await run(questions)``."""

    async def evaluation(questions: int = 3) -> Any:
        prompts = [make_prompt(row) for row in range(questions)]
        return await evaluate(
            prompts, sampler=sampler, judge=judge, decode=decode, settings=SETTINGS
        )

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


async def test_an_answer_that_never_came_ends_it(run: Any, sampler: Any) -> None:
    sampler.omit.add((2, 0))
    with pytest.raises(TrainingError, match="evaluation of row 2: the sampling engine"):
        await run()


async def test_metrics_carry_the_evaluations_prefix(run: Any) -> None:
    assert (await run()).metrics() == {
        "eval/accuracy": 1.0,
        "eval/accuracy_stderr": 0.0,
        "eval/response_tokens_mean": 3.0,
        "eval/truncated_fraction": 0.5,
    }
