from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from opd_core.analysis.comparison import Comparison, Pair, Reference, Target, compare
from opd_core.analysis.run_data import RunData
from opd_core.analysis.statistics import paired_seeds_needed, paired_seeds_within
from opd_core.errors import ConfigError
from opd_core.tracking.journal import JournalRecord
from tests.opd_core.analysis.compared_runs import (
    evaluation,
    journal,
    make_arm,
    make_run,
    question,
    questions,
)

HARD = np.random.default_rng(1).uniform(0.2, 0.8, 256)
AT_STEPS = Target(axis="steps")


def only_pair(comparison: Comparison) -> Pair:
    (pair,) = comparison.pairs
    return pair


def planted(gap: float, *, seeds: Sequence[int] = (1, 2, 3, 4, 5)) -> list[RunData]:
    return [
        *make_arm("pure", HARD.tolist(), seeds=seeds),
        *make_arm("mixed", (HARD + gap).tolist(), seeds=seeds),
    ]


# --- verdicts -------------------------------------------------------------------------------------


def test_a_run_against_itself_is_exactly_no_difference() -> None:
    run = make_run("one")
    pair = only_pair(compare([run, run], Target()))
    assert (pair.verdict, pair.difference) == ("no difference", 0.0)
    assert pair.models is not None
    assert (pair.models.low, pair.models.high, pair.p) == (0.0, 0.0, 1.0)
    assert pair.training is None


def test_a_run_without_questions_against_itself_is_exactly_no_difference() -> None:
    run = make_run("one", records=journal(opd_reverse_kl=0.1, opd_reverse_kl_stderr=0.02))
    pair = only_pair(compare([run, run], Target("opd_reverse_kl", "steps")))
    assert (pair.verdict, pair.difference, pair.p) == ("no difference", 0.0, 1.0)
    assert "they are the same run" in pair.sentence


def test_a_run_of_which_no_error_is_known_is_still_the_same_run() -> None:
    run = make_run("one", records=journal(entropy=0.5))
    pair = only_pair(compare([run, run], Target("entropy", "steps")))
    assert (pair.verdict, pair.basis, pair.difference) == ("no difference", "", 0.0)


def test_a_planted_difference_is_found_with_its_sign_and_how_sure_it_is() -> None:
    comparison = compare(planted(0.12), Target())
    pair = only_pair(comparison)
    assert (pair.label, pair.baseline, pair.verdict) == ("mixed", "pure", "better")
    assert pair.difference == pytest.approx(0.12, abs=0.03)
    assert pair.training is not None
    assert pair.training.low <= 0.12 <= pair.training.high
    assert pair.models is not None
    assert pair.models.low <= 0.12 <= pair.models.high
    assert (pair.basis, pair.beyond_margin, pair.more_seeds) == ("training", True, None)
    assert pair.p is not None
    assert pair.p < 0.01
    turned = only_pair(compare(list(reversed(planted(0.12))), Target()))
    assert (turned.verdict, turned.difference) == ("worse", pytest.approx(-pair.difference))


def test_the_sentence_says_which_by_how_much_and_what_it_does_not_cover() -> None:
    sentence = only_pair(compare(planted(0.12), Target())).sentence
    assert sentence.startswith("mixed is better than pure in held-out accuracy (+1")
    assert "by more than the margin of 2.0 points" in sentence
    assert "new training runs on these questions, not about other questions" in sentence


def test_a_certain_difference_within_the_margin_is_told_as_too_small_to_matter() -> None:
    pair = only_pair(compare(planted(0.12), Target(margin=0.3)))
    assert (pair.verdict, pair.beyond_margin) == ("better", False)
    assert "by less than the margin of 30.0 points" in pair.sentence


def test_arms_that_are_alike_show_no_difference_where_the_margin_is_wide_enough() -> None:
    pair = only_pair(compare(planted(0.0), Target(margin=0.1)))
    assert (pair.verdict, pair.beyond_margin) == ("no difference", False)


def test_few_noisy_seeds_cannot_tell_and_say_how_many_more_would() -> None:
    runs = [
        *make_arm("pure", HARD.tolist(), seeds=(1, 2, 3), spread=0.1),
        *make_arm("mixed", (HARD + 0.03).tolist(), seeds=(1, 2, 3), spread=0.1),
    ]
    pair = only_pair(compare(runs, Target()))
    assert pair.verdict == "cannot tell"
    assert pair.more_seeds is not None
    assert f"Roughly {pair.more_seeds} more seeds an arm would tell if" in pair.sentence
    assert "if seeds scatter as these 3 do" in pair.sentence


def test_the_seeds_asked_for_are_those_of_the_difference_or_of_the_margin() -> None:
    runs = [
        *make_arm("pure", HARD.tolist(), seeds=(1, 2, 3), spread=0.1),
        *make_arm("mixed", HARD.tolist(), seeds=(1, 2, 3), spread=0.1),
    ]
    pair = only_pair(compare(runs, Target(margin=0.02)))
    wide = only_pair(compare(runs, Target(margin=0.1)))
    accuracy = np.array([np.mean([q.mean for q in run.evaluations[-1].questions]) for run in runs])
    spread = float(np.std(accuracy[3:] - accuracy[:3], ddof=1))
    seen = abs(pair.difference)
    assert 0.02 < seen < 0.1
    needed = paired_seeds_needed(spread, seen)
    assert needed is not None
    assert (pair.verdict, pair.more_seeds) == ("cannot tell", needed - 3)
    assert f"as large as the {100 * seen:.1f} points seen (with a chance of 80 %)" in pair.sentence
    found, within = paired_seeds_needed(spread, 0.1), paired_seeds_within(spread, 0.1 - seen)
    assert found is not None
    assert within is not None
    assert (wide.verdict, wide.more_seeds) == ("cannot tell", max(found, within) - 3)
    assert "as large as the margin of 10.0 points (with a chance of 80 %), or" in wide.sentence


def test_two_runs_of_one_seed_count_as_one_seed() -> None:
    def run(run_id: str, seed: int, right: int, name: str) -> RunData:
        asked = [question(f"q{row}", [float(row < right)]) for row in range(100)]
        return make_run(run_id, seed, asked, recipe=[f"name={name}"])

    a = [run("a1", 1, 50, "a"), run("a2", 1, 60, "a")]
    b = [run("b1", 1, 70, "b"), run("b2", 2, 72, "b")]
    comparison = compare([*a, *b], Target())
    assert only_pair(comparison).training is None
    assert comparison.arms[0].value == pytest.approx(0.55)
    third = compare([*a, run("a3", 2, 75, "a"), *b], Target())
    assert third.arms[0].value == pytest.approx(0.65)  # the mean of 0.55 and 0.75
    paired = only_pair(third).training
    assert paired is not None
    assert (paired.units, paired.method) == (2, "t over seeds, paired by seed")


def test_seeds_that_came_out_the_same_are_no_evidence_of_their_spread() -> None:
    runs = [
        make_run(
            f"{name}-{seed}",
            seed,
            [question(f"q{row}", [float(row < right)]) for row in range(100)],
            recipe=[f"name={name}"],
        )
        for name, right in (("a", 50), ("b", 53))
        for seed in (1, 2)
    ]
    pair = only_pair(compare(runs, Target()))
    assert (pair.training, pair.basis, pair.verdict) == (None, "models", "cannot tell")
    assert pair.more_seeds is None


def test_one_run_an_arm_is_judged_as_these_models_and_says_so() -> None:
    pair = only_pair(compare(planted(0.15, seeds=(1,)), Target()))
    assert (pair.verdict, pair.basis, pair.training) == ("better", "models", None)
    assert "not about new training runs" in pair.sentence
    assert "Run more seeds" in pair.sentence


def test_seeds_are_paired_only_where_both_arms_have_the_same() -> None:
    same = only_pair(compare(planted(0.1), Target())).training
    a = make_arm("pure", HARD.tolist(), seeds=(1, 2, 3))
    b = make_arm("mixed", (HARD + 0.1).tolist(), seeds=(3, 4, 5))
    other = only_pair(compare([*a, *b], Target())).training
    assert same is not None
    assert other is not None
    assert (same.method, other.method) == ("t over seeds, paired by seed", "Welch's t over seeds")


def test_a_smaller_kl_is_the_better_one() -> None:
    level = {"opd_reverse_kl_stderr": 0.005}
    a = make_run("high", records=journal(opd_reverse_kl=0.3, **level))
    b = make_run("low", recipe=["name=low"], records=journal(opd_reverse_kl=0.1, **level))
    comparison = compare([a, b], Target("opd_reverse_kl", "steps"))
    pair = only_pair(comparison)
    assert comparison.lower_is_better
    assert (pair.verdict, pair.difference) == ("better", pytest.approx(-0.2))
    # Five steps an arm: 0.005 / sqrt(5) each, and the two in quadrature.
    assert pair.models is not None
    half = 1.96 * math.hypot(0.005, 0.005) / math.sqrt(5)
    assert pair.models.high - pair.difference == pytest.approx(half, rel=1e-3)


def test_a_kl_is_that_of_the_last_five_steps_by_their_tokens() -> None:
    records = [
        JournalRecord(step, 0.0, {"opd_reverse_kl": step / 10, "response_tokens": 100.0 * step})
        for step in range(1, 11)
    ]
    arm = compare([make_run("run", records=records)], Target("opd_reverse_kl", "steps")).arms[0]
    last = np.arange(6, 11)
    assert arm.value == pytest.approx(float((last * last / 10).sum() / last.sum()))


def test_a_metric_without_errors_is_judged_over_seeds_or_not_at_all() -> None:
    def runs(name: str, level: float, seeds: Sequence[int]) -> list[RunData]:
        return [
            make_run(
                f"{name}-{seed}",
                seed,
                recipe=[f"name={name}"],
                records=journal(rollout__reward_mean=level + seed / 100),
            )
            for seed in seeds
        ]

    target = Target("rollout/reward_mean", "steps")
    one = only_pair(compare([*runs("a", 0.3, [1]), *runs("b", 0.6, [1])], target))
    assert (one.verdict, one.basis, one.p) == ("cannot tell", "", None)
    assert "Nothing was recorded" in one.sentence
    several = compare([*runs("a", 0.3, [1, 2, 3]), *runs("b", 0.6, [1, 3, 5])], target)
    assert only_pair(several).verdict == "better"


def test_an_arm_found_alone_is_not_found_among_many() -> None:
    def arm(name: str, more: Sequence[int]) -> list[RunData]:
        """One run a seed, right in 50 and so many more of 100 questions."""
        asked = [
            [question(f"q{row}", [float(row < 50 + extra)]) for row in range(100)] for extra in more
        ]
        return [
            make_run(f"{name}-{seed}", seed, kept, recipe=[f"name={name}"])
            for seed, kept in enumerate(asked)
        ]

    runs = [*arm("pure", (0, 0, 0, 0)), *arm("mixed", (2, 3, 5, 6))]
    alone = only_pair(compare(runs, Target()))
    crowd = [run for name in "abcde" for run in arm(name, (1, -1, 2, -2))]
    among = compare([*runs, *crowd], Target()).pairs[0]
    assert (alone.verdict, alone.holm_p) == ("better", alone.p)
    assert alone.p == pytest.approx(0.022, abs=0.001)
    assert among.p == alone.p
    assert among.holm_p == pytest.approx(6 * alone.p)
    assert among.verdict == "cannot tell"
    assert "among several arms it is not" in among.sentence


# --- alignment ------------------------------------------------------------------------------------


def test_without_a_place_all_runs_are_measured_where_the_shortest_was() -> None:
    whole = make_run("whole", recipe=["name=whole"])
    half = make_run(
        "half", evaluations=[evaluation(questions([0.5] * 40, 3), 25)], records=journal(30)
    )
    comparison = compare([whole, half], AT_STEPS)
    assert comparison.at == 25
    assert [run.train_step for arm in comparison.arms for run in arm.runs] == [25, 25]


def test_equal_tokens_are_not_equal_steps() -> None:
    long = make_run("long", recipe=["name=long"], records=journal(tokens=2000.0))
    short = make_run("short", records=journal(tokens=1000.0))
    comparison = compare([short, long], Target(axis="student_tokens"))
    assert comparison.at == 50_000
    taken = {run.run_id: run.train_step for arm in comparison.arms for run in arm.runs}
    assert taken == {"short": 50, "long": 25}


def test_a_few_tokens_more_than_the_other_run_do_not_cost_the_last_evaluation() -> None:
    longer = make_run("longer", recipe=["name=longer"], records=journal(tokens=1030.0))
    comparison = compare([make_run("run"), longer], Target(axis="student_tokens"))
    assert [run.train_step for arm in comparison.arms for run in arm.runs] == [50, 50]
    assert comparison.warnings == ()


def test_a_run_that_ended_a_little_before_the_place_was_there() -> None:
    comparison = compare([make_run("run")], Target(at=51_000))
    assert comparison.arms[0].runs[0].axis_value == 50_000
    assert comparison.warnings == ()


def test_a_run_that_never_got_there_is_left_out_and_said_so() -> None:
    short = make_run("short", recipe=["name=short"], records=journal(30))
    short = replace(short, evaluations=short.evaluations[:1])
    comparison = compare([make_run("run"), short], Target(axis="steps", at=50))
    assert [arm.label for arm in comparison.arms] == ["run"]
    (left_out,) = (each for each in comparison.warnings if "left out" in each)
    assert left_out.startswith("short (status: not recorded) is left out")
    assert "at 50 steps, only from 25 to 25" in left_out
    with pytest.raises(ConfigError, match=r"short .*, the baseline, has no eval/accuracy at 50"):
        compare([short, make_run("run")], Target(axis="steps", at=50))


def test_totals_of_the_journal_come_before_sums_of_its_steps() -> None:
    records = journal(total__student_tokens=np.arange(1, 51) * 10.0)
    assert compare([make_run("run", records=records)], Target()).at == 500
    assert compare([make_run("run")], Target()).at == 50_000
    # One device of the student, one of the teacher that it launches.
    assert compare([make_run("run")], Target(axis="device_seconds")).at == 200


def test_an_axis_that_a_run_does_not_have_is_absent_and_said_so() -> None:
    priced = make_run("priced", records=journal(total__money=np.arange(1, 51) / 100))
    free = make_run("free", recipe=["name=free"])
    comparison = compare([priced, free], Target())
    assert comparison.axes == ("steps", "student_tokens", "device_seconds")
    assert any("no alignment on money: free" in each for each in comparison.warnings)
    with pytest.raises(ConfigError, match="free recorded no money"):
        compare([priced, free], Target(axis="money"))


def test_curves_hold_the_mean_over_seeds_and_the_least_and_largest() -> None:
    runs = [
        make_run(f"r{seed}", seed, records=journal(entropy=float(seed), tokens=100.0 * seed))
        for seed in (1, 2)
    ] + make_arm("other", [0.5] * 40, records=journal(tokens=100.0))
    comparison = compare(runs, Target())
    curve = comparison.arms[0].curve("entropy", "student_tokens")
    assert curve is not None
    assert (curve.x[0], curve.x[-1]) == (150.0, 7500.0)
    assert (curve.y[0], curve.low[0], curve.high[0]) == (1.5, 1.0, 2.0)
    assert comparison.arms[0].curve("entropy", "money") is None


# --- questions ------------------------------------------------------------------------------------


def test_questions_are_paired_by_key_whatever_their_order() -> None:
    asked = questions(HARD.tolist(), 3)
    turned = make_run("turned", 1, list(reversed(asked)), recipe=["name=turned"])
    pair = only_pair(compare([make_run("run", 1, asked), turned], Target()))
    assert pair.difference == 0.0
    assert (pair.questions, pair.left_out) == (256, 0)


def test_only_common_questions_count_and_the_rest_is_told() -> None:
    asked = questions(HARD.tolist(), 3)
    wrong = [question(f"x{row}", [0.0] * 4) for row in range(40)]
    odd = make_run("odd", 1, [*asked[:200], *wrong], recipe=["name=odd"])
    comparison = compare([make_run("run", 1, asked), odd], Target())
    pair = only_pair(comparison)
    assert (pair.difference, pair.questions, pair.left_out) == (0.0, 200, 96)
    assert all(arm.runs[0].value == pytest.approx(arm.value) for arm in comparison.arms)
    assert "96 questions that not all runs answered are left out" in comparison.warnings


def test_different_questions_are_refused_with_what_to_do() -> None:
    asked = questions([0.6] * 40, 1)
    for common in (0, 19):
        other = [*asked[:common], *(question(f"x{row}", [1.0]) for row in range(40 - common))]
        runs = [make_run("run", 1, asked), make_run("other", 1, other, recipe=["name=other"])]
        with pytest.raises(ConfigError, match=rf"{common} are common .*on the same file"):
            compare(runs, Target())


def test_a_question_that_occurs_twice_counts_once() -> None:
    asked = [question("twice", [1.0, 0.0]), question("twice", [0.0, 0.0]), question("once", [1.0])]
    assert compare([make_run("run", 1, asked)], Target()).arms[0].value == pytest.approx(0.625)


def test_one_question_gives_a_value_and_no_interval() -> None:
    runs = [
        make_run(name, 1, [question("q", [reward] * 4)], recipe=[f"name={name}"])
        for name, reward in (("a", 0.0), ("b", 1.0))
    ]
    pair = only_pair(compare(runs, Target()))
    assert (pair.difference, pair.models, pair.verdict) == (1.0, None, "cannot tell")


def test_rewards_that_are_all_equal_leave_room_for_other_questions() -> None:
    def run(name: str, count: int) -> RunData:
        asked = [question(f"q{row}", [1.0] * 4) for row in range(count)]
        return make_run(name, 1, asked, recipe=[f"name={name}"])

    few = only_pair(compare([run("a", 30), run("b", 30)], Target()))
    many = only_pair(compare([run("a", 256), run("b", 256)], Target()))
    assert (few.verdict, many.verdict) == ("cannot tell", "no difference")
    assert few.difference == many.difference == 0.0


def test_a_reward_that_is_no_number_is_left_out() -> None:
    asked = list(questions(HARD.tolist(), 3))
    broken = [
        question("q0", [math.nan] * 4),
        question("q1", [math.nan, *asked[1].rewards[1:]]),
        *asked[2:],
    ]
    comparison = compare(
        [make_run("run", 1, asked), make_run("nan", 1, broken, recipe=["name=nan"])], Target()
    )
    pair = only_pair(comparison)
    assert (pair.questions, pair.left_out) == (255, 1)
    assert math.isfinite(pair.difference)


def test_a_data_source_is_compared_by_its_own_questions() -> None:
    def run(name: str, easy: float) -> RunData:
        asked = [question(f"e{row}", [easy] * 4, "easy") for row in range(20)]
        asked += [question(f"h{row}", [0.0] * 4, "hard") for row in range(20)]
        return make_run(name, 1, asked, recipe=[f"name={name}"])

    pair = only_pair(compare([run("a", 0.0), run("b", 1.0)], Target("eval/accuracy/easy")))
    assert (pair.difference, pair.questions) == (1.0, 20)
    with pytest.raises(ConfigError, match="a has no eval/accuracy/missing"):
        compare([run("a", 0.0)], Target("eval/accuracy/missing"))


def test_pass_at_k_is_taken_from_the_answers() -> None:
    asked = [question(f"q{row}", [1.0, 0.0, 0.0, 0.0]) for row in range(12)]
    arm = compare([make_run("run", 1, asked)], Target("eval/pass_at_2")).arms[0]
    assert arm.value == pytest.approx(0.5)


def test_runs_that_kept_no_questions_are_compared_by_their_recorded_errors() -> None:
    def old(name: str, accuracy: float) -> RunData:
        records = journal(eval__accuracy=accuracy, eval__accuracy_stderr=0.01)
        return make_run(name, recipe=[f"name={name}"], records=records, evaluations=())

    comparison = compare([old("a", 0.5), old("b", 0.6)], Target())
    pair = only_pair(comparison)
    assert (pair.verdict, pair.questions) == ("better", 0)
    assert pair.models is not None
    assert pair.models.high - pair.models.low == pytest.approx(2 * 1.96 * 0.01414, rel=1e-3)
    assert any("kept no questions" in warning for warning in comparison.warnings)


def test_one_run_without_questions_costs_the_other_arms_no_pairing() -> None:
    records = journal(eval__accuracy=0.5, eval__accuracy_stderr=0.01)
    old = make_run("old", recipe=["name=old"], records=records, evaluations=())
    alone = only_pair(compare(planted(0.1), Target()))
    paired, unpaired = compare([*planted(0.1), old], Target()).pairs
    assert (paired.models, paired.questions) == (alone.models, 256)
    assert (unpaired.label, unpaired.questions) == ("old", 0)
    assert unpaired.models is not None
    assert unpaired.models.method == "normal, from the recorded standard errors"
    # The recorded error, and that of 256 questions.
    half = (unpaired.models.high - unpaired.models.low) / 2
    assert 1.96 * 0.01 < half < 1.96 * 0.025


def test_a_run_that_was_never_evaluated_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="bare has no eval/accuracy"):
        compare([make_run("run"), make_run("bare", evaluations=())], Target())


# --- references and the whole ---------------------------------------------------------------------


def test_a_reference_is_a_line_on_the_common_questions() -> None:
    asked = questions(HARD.tolist(), 3)
    teacher = evaluation([question(each.key, [1.0, 1.0, 1.0, 0.0]) for each in asked[:200]], 0)
    comparison = compare([make_run("run", 1, asked)], Target(), [Reference("teacher", teacher)])
    (line,) = comparison.references
    assert (line.label, line.value, line.questions) == ("teacher", 0.75, 200)
    assert "teacher answered 200 of the 256 questions" in comparison.warnings
    with pytest.raises(ConfigError, match="reference teacher: it answered 40 of the 256"):
        compare(
            [make_run("run", 1, asked)],
            Target(),
            [Reference("teacher", replace(teacher, questions=teacher.questions[:40]))],
        )


def test_a_reference_at_another_temperature_is_told() -> None:
    asked = questions(HARD.tolist(), 3)
    greedy = evaluation(asked, 0, temperature=0.0)
    comparison = compare([make_run("run", 1, asked)], Target(), [Reference("greedy", greedy)])
    assert "greedy was sampled at another temperature than the runs" in comparison.warnings


def test_the_whole_comparison_is_json_without_surprises() -> None:
    data = json.loads(compare(planted(0.1), Target()).to_json())
    assert data["pairs"][0]["verdict"] == "better"
    assert data["arms"][0]["runs"][0]["seed"] == 1
    assert data["target"]["axis"] == "student_tokens"


def test_no_runs_and_an_unknown_axis_are_refused() -> None:
    with pytest.raises(ConfigError, match="got none"):
        compare([], Target())
    with pytest.raises(ConfigError, match="axis: expected one of steps"):
        Target(axis="hours")
    for odd in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="margin"):
            Target(margin=odd)
        with pytest.raises(ConfigError, match="at: expected"):
            Target(at=odd)
