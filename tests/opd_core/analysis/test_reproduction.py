from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from opd_core.analysis.comparison import Target, compare
from opd_core.analysis.reproduction import (
    NOT_REPRODUCED,
    REPRODUCED,
    Reproduction,
    judge_reruns,
    prediction_interval,
    same_seed,
)
from opd_core.analysis.reproduction_text import differences_in_words, reproduction_markdown
from opd_core.analysis.run_data import RunData
from opd_core.tracking.journal import JournalRecord
from tests.opd_core.analysis.compared_runs import (
    FINGERPRINTS,
    STEPS,
    evaluation,
    journal,
    make_run,
    questions,
)

KL = Target("opd_reverse_kl", "steps", margin=0.01)
CANNOT_TELL = "cannot tell"


def run_of(name: str, seed: int, value: float = 0.1, **fields: object) -> RunData:
    """A run whose reverse KL is ``value`` at every step."""
    records = journal(opd_reverse_kl=value)
    return make_run(name, seed, evaluations=[], records=records, **fields)  # type: ignore[arg-type]


def judged(
    original: RunData | None, reruns: Sequence[RunData], target: Target = KL
) -> Reproduction:
    runs = [*([original] if original else []), *reruns]
    return judge_reruns(original, reruns, compare(runs, target))


def reruns_of(*values: float, first_seed: int = 2) -> list[RunData]:
    return [run_of(f"r{n}", first_seed + n, value) for n, value in enumerate(values)]


# --- where a new run falls ------------------------------------------------------------------------


def test_the_prediction_interval_of_three_values_by_hand() -> None:
    bounds = prediction_interval(np.array([1.0, 2.0, 3.0]))
    half = 4.302652729911275 * math.sqrt(1 + 1 / 3)  # t of 2 degrees of freedom, sd 1
    assert (bounds.low, bounds.high) == pytest.approx((2 - half, 2 + half))
    assert bounds.p == 1


@pytest.mark.parametrize("runs", [2, 3, 5, 10])
@pytest.mark.parametrize("kind", ["normal", "share of 128 questions"])
def test_ninety_five_of_a_hundred_new_runs_fall_within(runs: int, kind: str) -> None:
    experiments, random = 2000, np.random.default_rng(runs)
    if kind == "normal":
        values = random.normal(0.6, 0.02, (runs + 1, experiments))
    else:  # seeds that scatter, and the noise of an evaluation's answers on top
        chances = random.normal(0.6, 0.02, (runs + 1, experiments))
        values = random.binomial(128, chances) / 128
    bounds = prediction_interval(values[:-1], values[-1])
    covered = (bounds.low <= values[-1]) & (values[-1] <= bounds.high)
    assert covered.mean() == pytest.approx(0.95, abs=0.015)  # three standard errors
    np.testing.assert_array_equal(np.asarray(bounds.p) >= 0.05, covered)


@pytest.mark.parametrize("runs", [3, 5])
def test_p_values_of_originals_that_are_such_runs_are_uniform(runs: int) -> None:
    values = np.random.default_rng(0).normal(size=(runs + 1, 2000))
    p = prediction_interval(values[:-1], values[-1]).p
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_a_run_that_is_far_off_falls_outside_nearly_always() -> None:
    values = np.random.default_rng(1).normal(size=(6, 2000))
    bounds = prediction_interval(values[:-1], values[-1] + 8)
    assert (np.asarray(bounds.p) < 0.05).mean() > 0.95


# --- verdicts -------------------------------------------------------------------------------------


def test_an_original_among_three_reruns_is_reproduced() -> None:
    found = judged(run_of("o", 1, 0.102), reruns_of(0.10, 0.11, 0.09))
    assert found.verdict == REPRODUCED
    assert found.new_run is not None
    assert found.new_run.low < 0.102 < found.new_run.high
    assert "is within [" in found.sentence
    assert "3 runs (mean 0.1, sd 0.01)" in found.sentence
    assert "off by less than 0.04968 would not be noticed" in found.sentence
    json.loads(found.to_json())


@pytest.mark.parametrize(("value", "where"), [(0.3, "above"), (-0.1, "below")])
def test_an_original_far_from_its_reruns_is_not_reproduced(value: float, where: str) -> None:
    found = judged(run_of("o", 1, value), reruns_of(0.10, 0.11, 0.09))
    assert found.verdict == NOT_REPRODUCED
    assert f"is {where} [" in found.sentence
    assert "one run in 20" in found.sentence
    assert "margin" not in found.sentence


def test_a_difference_below_the_margin_is_told_as_such() -> None:
    found = judged(run_of("o", 1, 0.105), reruns_of(0.1000, 0.1001, 0.0999))
    assert found.verdict == NOT_REPRODUCED
    assert "less than the margin of 0.01" in found.sentence


def test_two_reruns_may_refute_but_not_confirm() -> None:
    within = judged(run_of("o", 1, 0.1), reruns_of(0.10, 0.11))
    assert within.verdict == CANNOT_TELL
    assert "third seed" in within.sentence
    assert judged(run_of("o", 1, 0.9), reruns_of(0.10, 0.11)).verdict == NOT_REPRODUCED


def test_one_rerun_with_another_seed_tells_nothing_but_the_difference_of_two_models() -> None:
    asked = [questions([0.5] * 40, seed) for seed in (1, 2)]
    original, again = make_run("o", 1, asked[0]), make_run("r", 2, asked[1])
    found = judged(original, [again], Target(axis="steps"))
    assert found.verdict == CANNOT_TELL
    assert found.new_run is None
    assert "these two models on new questions: 95 % [" in found.sentence


def test_reruns_that_all_came_out_the_same_are_held_against_the_margin() -> None:
    same = reruns_of(0.1, 0.1, 0.1)
    assert judged(run_of("o", 1, 0.105), same).verdict == REPRODUCED
    far = judged(run_of("o", 1, 0.2), same)
    assert far.verdict == CANNOT_TELL
    assert "without any spread" in far.sentence


# --- the original's seed again --------------------------------------------------------------------


def test_the_same_numbers_at_every_step_are_a_reproduction() -> None:
    found = judged(run_of("o", 1, 0.1), [run_of("again", 1, 0.1)])
    assert found.verdict == REPRODUCED
    assert f"the same numbers at all {STEPS} steps" in found.sentence


def test_the_same_numbers_count_more_than_an_odd_place_among_other_seeds() -> None:
    found = judged(run_of("o", 1, 0.3), [run_of("again", 1, 0.3), *reruns_of(0.10, 0.11, 0.09)])
    assert found.verdict == REPRODUCED
    assert "is above [" in found.sentence
    assert found.new_run is not None
    assert found.new_run.units == 3, "the original's own seed is no evidence of the spread"


def test_a_single_bit_is_another_number() -> None:
    values = [0.1] * STEPS
    values[30] = math.nextafter(0.1, 1)
    one = run_of("o", 1)
    other = make_run("r", 1, evaluations=[], records=journal(opd_reverse_kl=values))
    found = same_seed(one, [other], "opd_reverse_kl")
    assert found is not None
    assert (found.throughout, found.parted) == (False, 31)


def test_a_step_that_one_run_lacks_is_a_difference_and_nothing_recorded_no_sameness() -> None:
    short = make_run("r", 1, evaluations=[], records=journal(steps=STEPS - 1, opd_reverse_kl=0.1))
    found = same_seed(run_of("o", 1), [short], "opd_reverse_kl")
    assert found is not None
    assert found.parted == STEPS
    silent = make_run("s", 1, evaluations=[], records=[JournalRecord(1, 0.0, {"time/step_s": 1.0})])
    assert same_seed(silent, [silent], "opd_reverse_kl") is None


def test_what_is_no_number_is_the_same_as_itself() -> None:
    found = same_seed(run_of("o", 1, math.nan), [run_of("r", 1, math.nan)], "opd_reverse_kl")
    assert found is not None
    assert found.throughout


@pytest.mark.parametrize(
    ("chances", "margin", "verdict"),
    [
        ((0.5, 0.5), 0.3, REPRODUCED),
        ((0.5, 0.5), 0.001, CANNOT_TELL),
        ((0.9, 0.3), 0.02, NOT_REPRODUCED),
    ],
)
def test_other_numbers_of_the_same_seed_are_judged_by_the_two_models(
    chances: tuple[float, float], margin: float, verdict: str
) -> None:
    original, again = (
        make_run(
            name,
            evaluations=[evaluation(questions([chance] * 200, number))],
            records=journal(opd_reverse_kl=number),
            recipe=["deterministic=true"],
        )
        for number, (name, chance) in enumerate(zip(("o", "r"), chances, strict=True))
    )
    found = judged(original, [again], Target(axis="steps", margin=margin))
    assert found.verdict == verdict
    assert "other numbers from train step 1 on" in found.sentence
    assert "deterministic: they should be the same" in found.sentence


# --- no reproduction ------------------------------------------------------------------------------


def test_a_change_of_the_recipe_makes_it_a_comparison() -> None:
    changed = [
        run_of(f"r{seed}", seed, 0.2, recipe=["training.learning_rate=1e-5"]) for seed in (1, 2)
    ]
    found = judged(run_of("o", 1), changed)
    assert found.verdict == ""
    assert found.same_seed is None
    assert "tiny (training.learning_rate=1e-05)" in found.sentence
    assert "recipe (training.learning_rate)" in differences_in_words(found)


KEPT = ["opd.teachers.0.launch=null", "opd.teachers.0.endpoint=http://127.0.0.1:9"]
TEACHER = "teacher 'teacher'"


def changed_reruns(recipe: list[str], fingerprints: dict[str, str]) -> list[RunData]:
    return [
        run_of(f"r{seed}", seed, 0.1 + seed / 100, recipe=recipe, fingerprints=fingerprints)
        for seed in (2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("key", "fingerprint"),
    [
        ("student.model", "the student"),
        ("data.train", "data.train"),
        ("data.evaluation", "data.evaluation"),
        ("opd.teachers.0.launch.model", TEACHER),
    ],
)
def test_another_model_or_data_set_by_a_change_is_no_reproduction(
    key: str, fingerprint: str
) -> None:
    known = {**FINGERPRINTS, TEACHER: "tttt"}
    original = run_of("o", 1, fingerprints=known)
    found = judged(original, changed_reruns([f"{key}=/other"], {**known, fingerprint: "other"}))
    assert found.verdict == ""
    assert f"recipe ({key})" in differences_in_words(found)
    same = judged(original, changed_reruns([f"{key}=/moved"], known))
    assert same.verdict == REPRODUCED, "the same content at another path"
    drifted = judged(original, changed_reruns([], {**known, fingerprint: "other"}))
    assert drifted.verdict == REPRODUCED, "other content at the same path"
    unlike = "data.evaluation" if fingerprint != "data.evaluation" else "data.train"
    both = judged(original, changed_reruns([f"{key}=/moved"], {**known, unlike: "other"}))
    assert both.verdict == REPRODUCED, "moved, and something else has drifted"


def test_a_teacher_that_is_served_elsewhere_is_no_change_of_the_recipe() -> None:
    known = {**FINGERPRINTS, TEACHER: "tttt"}
    found = judged(run_of("o", 1, fingerprints=known), changed_reruns(KEPT, known))
    assert found.verdict == REPRODUCED
    assert "recipe" not in differences_in_words(found)
    assert "not known" not in found.sentence


def test_a_teacher_whose_weights_nobody_knows_is_told_beside_the_verdict() -> None:
    known = {**FINGERPRINTS, TEACHER: "tttt"}
    found = judged(run_of("o", 1, fingerprints=known), changed_reruns(KEPT, FINGERPRINTS))
    assert found.verdict == REPRODUCED
    assert "The weights of teacher 'teacher' are not known" in found.sentence
    assert "models (teacher 'teacher')" in differences_in_words(found)
    external = judged(run_of("o", 1, recipe=KEPT), changed_reruns(KEPT, FINGERPRINTS))
    assert "The weights of teacher 'teacher' are not known" in external.sentence


def test_a_teacher_of_other_weights_is_another_one_wherever_it_is_served() -> None:
    known = {**FINGERPRINTS, TEACHER: "tttt"}
    found = judged(
        run_of("o", 1, fingerprints=known), changed_reruns(KEPT, {**known, TEACHER: "uuuu"})
    )
    assert found.verdict == ""


def test_another_setting_of_a_teacher_that_is_launched_is_a_change() -> None:
    changed = ["opd.teachers.0.launch.dtype=bfloat16"]
    found = judged(run_of("o", 1), changed_reruns(changed, FINGERPRINTS))
    assert found.verdict == ""


def test_a_recipe_without_an_original_shows_its_spread() -> None:
    found = judged(None, reruns_of(0.10, 0.11, 0.09))
    assert found.verdict == ""
    assert "95 % of new runs fall within [0.0503, 0.15]" in found.sentence
    assert "More seeds" in judged(None, reruns_of(0.1)).sentence
    alike = judged(None, reruns_of(0.1, 0.1))
    assert alike.new_run is None
    assert alike.sentence.endswith("0.1, 0.1. They show no spread.")


def test_a_rerun_that_was_not_measured_is_left_out_and_named() -> None:
    early = make_run("early", 9, evaluations=[], records=journal(steps=10, opd_reverse_kl=0.1))
    target = Target("opd_reverse_kl", "steps", at=STEPS, margin=0.01)
    found = judged(run_of("o", 1), [*reruns_of(0.10, 0.11, 0.09), early], target)
    assert found.verdict == REPRODUCED
    assert found.left_out == ("early",)
    assert "left out: `early`" in reproduction_markdown(found)


# --- what differs ---------------------------------------------------------------------------------


def test_everything_in_which_original_and_reruns_differ_is_named() -> None:
    then = {"git_commit": "aaa", "git_changes": "", "packages": {"torch": "2.12.0", "ray": "2.60"}}
    now = {"git_commit": "bbb", "git_changes": "", "packages": {"torch": "2.13.0", "ray": "2.60"}}
    moved = {**FINGERPRINTS, "data.train": "dddd"}
    original = run_of("o", 1, attempts=[then])
    reruns = [run_of(f"r{s}", s, 0.1 * s, attempts=[now], fingerprints=moved) for s in (2, 3, 4)]
    found = judged(original, reruns)
    assert differences_in_words(found) == "data (data.train), code (commit), packages (torch)"
    text = reproduction_markdown(found, {"r2": "[r2](http://prefect/r2)"})
    assert "| packages | `torch` | `2.12.0` | `2.13.0` |" in text
    assert "| data | `data.train` | `bbbb` | `dddd` |" in text
    assert "| rerun | [r2](http://prefect/r2) | 2 | 0.2 |" in text


def test_reruns_that_are_not_at_one_are_told_one_by_one() -> None:
    commits = ["aaa", "aaa", "bbb"]
    reruns = [
        run_of(
            f"r{n}", n + 2, 0.1 + n / 100, attempts=[{"git_commit": commit, "packages": {"a": "1"}}]
        )
        for n, commit in enumerate(commits)
    ]
    original = run_of("o", 1, attempts=[{"git_commit": "aaa", "packages": {"a": "1"}}])
    text = reproduction_markdown(judged(original, reruns))
    assert "| code | `commit` | `aaa` | r0: `aaa`<br>r1: `aaa`<br>r2: `bbb` |" in text


def test_nothing_but_the_seed() -> None:
    assert "Nothing but the seed differs" in reproduction_markdown(
        judged(run_of("o", 1), reruns_of(0.1, 0.2, 0.3))
    )
