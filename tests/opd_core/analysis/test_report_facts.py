"""What a report says in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd_core.analysis.report_facts import (
    attempts_said,
    duration,
    head_facts,
    held_out,
    time_shares,
    tracking_said,
)
from opd_core.analysis.run_data import RunData, Series
from opd_core.tracking.journal import JournalRecord
from opd_core.training.evaluation_records import EvaluationRecord, QuestionResult


def run(*metrics: dict[str, float], **fields: Any) -> RunData:
    records = [JournalRecord(step, 0.0, each) for step, each in enumerate(metrics, start=1)]
    series = Series.from_records(records)
    given = {"config": {}, "summary": {}, "evaluations": (), "provenance": {}, **fields}
    return RunData("r", Path("r"), series=series, fingerprints={}, **given)


def evaluation(step: int, **rewards: float) -> EvaluationRecord:
    questions = tuple(
        QuestionResult(key, 0, key[0], (reward, reward), (1, 1), (False, False))
        for key, reward in rewards.items()
    )
    return EvaluationRecord(step, 2, 1.0, 0, questions)


def test_a_run_that_says_nothing_has_no_facts() -> None:
    assert head_facts(run()) == []


def test_before_and_after_have_their_errors() -> None:
    accuracy = {"before": 0.4, "after": 0.8, "before_stderr": 0.02, "after_stderr": None}
    (fact,) = head_facts(run(summary={"accuracy": accuracy, "opd_reverse_kl": {"before": None}}))
    assert (fact.value, fact.note) == ("40.0 % → 80.0 %", "± 2.0 %")


def test_totals_come_from_the_last_step_and_money_has_its_currency() -> None:
    step = {"total/student_tokens": 1234567.0, "total/money": 3.14159}
    facts = {fact.name: fact.value for fact in head_facts(run(step, config={"cost": None}))}
    assert facts == {"Student tokens": "1,234,567", "Cost": "3.14"}
    config = {"cost": {"currency": "EUR"}}
    assert head_facts(run(step, config=config))[-1].value == "3.14 EUR"


def test_a_run_of_an_earlier_version_counts_its_tokens_itself() -> None:
    facts = head_facts(run({"response_tokens": 10.0}, {"response_tokens": 5.0}))
    assert [(fact.name, fact.value) for fact in facts] == [("Student tokens", "15")]


@pytest.mark.parametrize(
    ("seconds", "said"), [(9.25, "9.2 s"), (75, "1 min 15 s"), (15120, "4 h 12 min")]
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_shares_of_the_time_are_those_of_all_steps_together() -> None:
    one = {"time/step_s": 1.0, "time/sampling_s": 0.5, "time/training_s": 0.5}
    three = {"time/step_s": 3.0, "time/sampling_s": 0.5, "time/training_s": 2.0}
    shares = {part.name: part.share for part in time_shares(run(one, three))}
    assert shares == {"sampling": 0.25, "training": 0.625, "other": 0.125}
    assert time_shares(run()) == []


def test_questions_are_held_against_themselves() -> None:
    first = evaluation(0, a1=0.0, a2=1.0, a3=0.5, b1=1.0)
    last = evaluation(50, a1=1.0, a2=0.5, a3=0.5, b1=1.0)
    changes = held_out([first, evaluation(25, a1=0.0), last])
    assert [(c.data_source, c.questions, c.better, c.worse) for c in changes] == [
        ("a", 3, 1, 1),
        ("b", 1, 0, 0),
    ]
    assert changes[0].before == "50.0 % ± 28.9 %"
    assert changes[1].after == "100.0 %"
    assert held_out([]) == []


def test_small_data_sources_are_counted_together() -> None:
    names = [chr(97 + n) for n in range(22)]
    many = evaluation(0, **{f"{name}1": 1.0 for name in names}, **{f"{n}2": 0 for n in names[2:]})
    changes = held_out([many])
    assert [change.data_source for change in changes] == [*names[2:], "all others"]
    assert changes[-1].questions == 2


def test_what_tracking_cost_is_told_where_it_is_known() -> None:
    told = tracking_said(run({"time/tracking_share": 0.002}, {"time/tracking_share": 0.004}))
    assert "0.30 %" in told
    assert "0.40 %" in told
    assert tracking_said(run()) == ""


def test_attempts_leave_out_what_is_not_known() -> None:
    attempt = {"started_at": 0.0, "git_commit": "abc", "git_changes": "f00", "packages": {"a": "1"}}
    (said,) = attempts_said({"attempts": [attempt]})
    assert said == {
        "started": "1970-01-01 00:00:00 UTC",
        "code": "abc",
        "uncommitted changes": "yes, hash f00",
        "GPUs": "none",
        "packages": "a 1",
    }
    assert attempts_said({}) == []
