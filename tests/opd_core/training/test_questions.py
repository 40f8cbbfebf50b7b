"""An evaluation question by question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd_core.agent_loop.evaluation import Evaluation
from opd_core.training.questions import evaluation_record, question_key
from tests.opd_core.training.whole_loop import config_of


def test_each_question_keeps_its_answers_rewards_and_lengths(
    make_prompt: Any, make_rollout: Any, make_group: Any
) -> None:
    prompt = make_prompt(4, text="1+1=", ground_truth="2")
    right = make_rollout(0, prompt, reward=1.0)
    wrong = make_rollout(1, prompt, reward=0.0, response_ids=(6,) * 8, finish_reason="length")
    evaluation = Evaluation(1, 2, 0.5, 0.0, 5.0, 0.5, groups=(make_group(right, wrong),))
    changes = {"evaluation": {"samples": 2, "temperature": 0.6}}
    config = config_of(Path("/nowhere"), Path("/nowhere"), "http://h:1", **changes)
    record = evaluation_record(evaluation, 50, config)
    assert (record.train_step, record.samples, record.temperature) == (50, 2, 0.6)
    assert record.seed == config.seed
    (question,) = record.questions
    assert (question.key, question.row) == (question_key(prompt), 4)
    assert question.rewards == (1.0, 0.0)
    assert question.response_tokens == (2, 8)
    assert question.truncated == (False, True)


def test_a_question_has_the_same_key_in_every_run(make_prompt: Any) -> None:
    prompt = make_prompt(4, text="1+1=", ground_truth="2")
    assert question_key(prompt) == question_key(make_prompt(9, text="1+1=", ground_truth="2"))
    assert question_key(prompt) == "1512a8d650f22894"  # of records that were written already


@pytest.mark.parametrize(
    "change", [{"text": "1+1"}, {"ground_truth": None}, {"data_source": "other"}]
)
def test_another_question_has_another_key(make_prompt: Any, change: dict[str, Any]) -> None:
    fields = {"text": "1+1=", "ground_truth": "2"}
    assert question_key(make_prompt(4, **fields)) != question_key(make_prompt(4, **fields | change))
