"""The words of a verdict: better only where there is a better, no difference only by a margin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from opd_core.analysis.comparison import Pair, Target, compare
from opd_core.analysis.measuring import is_share, lower_is_better, of_question
from opd_core.analysis.run_data import RunData
from tests.opd_core.analysis.compared_runs import journal, make_run, question


def runs(metric: str, levels: Sequence[Sequence[float]]) -> list[RunData]:
    """An arm for each row of levels, a run for each level."""
    return [
        make_run(
            f"{arm}-{seed}",
            seed,
            recipe=[f"name={arm}"],
            records=journal(**{metric.replace("/", "__"): level}),
        )
        for arm, row in zip("ab", levels, strict=True)
        for seed, level in enumerate(row)
    ]


def judged(metric: str, levels: Sequence[Sequence[float]], margin: float | None = None) -> Pair:
    (pair,) = compare(runs(metric, levels), Target(metric, "steps", margin=margin)).pairs
    return pair


UP = ((1.0, 1.1, 1.2), (2.0, 2.11, 2.2))
NEAR = ((1.0, 1.1, 1.2), (1.01, 1.1, 1.2))


@pytest.mark.parametrize(
    ("metric", "verdict"),
    [
        ("entropy", "higher"),
        ("rollout/response_tokens_mean", "higher"),
        ("reference_kl", "higher"),
        ("total/student_tokens", "higher"),
        ("rollout/reward_mean", "better"),
        ("opd_reverse_kl", "worse"),
        ("time/step_s", "worse"),
    ],
)
def test_better_and_worse_are_said_of_metrics_with_a_direction_only(
    metric: str, verdict: str
) -> None:
    pair = judged(metric, UP)
    assert pair.verdict == verdict
    assert f"b is {verdict} than a in" in pair.sentence
    turned = {"higher": "lower", "better": "worse", "worse": "better"}[verdict]
    assert judged(metric, UP[::-1]).verdict == turned


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("eval/accuracy", False),
        ("eval/accuracy/chain_sum", False),
        ("eval/pass_at_4", False),
        ("opd_abs_logprob_diff", True),
        ("cost/token", True),
        ("total/money", True),
        ("total/device_seconds", True),
        ("eval/accuracy_stderr", None),
        ("eval/truncated_fraction", None),
    ],
)
def test_a_direction_is_known_or_none(metric: str, lower: bool | None) -> None:
    assert lower_is_better(metric) is lower


def test_without_a_margin_no_difference_is_never_said() -> None:
    without = judged("entropy", NEAR)
    assert (without.verdict, without.beyond_margin) == ("cannot tell", None)
    assert 'To tell "no difference", name the smallest one that matters' in without.sentence
    assert "the margin" not in without.sentence
    within = judged("entropy", NEAR, margin=0.1)
    assert (within.verdict, within.more_seeds) == ("no difference", None)
    assert "margin" not in judged("entropy", UP).sentence


def test_two_points_are_the_margin_of_shares_only() -> None:
    def margin(metric: str) -> float | None:
        return compare(runs(metric, UP), Target(metric, "steps")).target.margin

    assert margin("ratio_clipped_fraction") == 0.02
    assert margin("entropy") is None
    assert [is_share(name) for name in ("eval/pass_at_4", "x_share", "opd_reverse_kl")] == [
        True,
        True,
        False,
    ]


def test_pass_at_0_is_no_metric() -> None:
    assert of_question("eval/pass_at_0") is None
    assert of_question("eval/pass_at_1") is not None


def test_five_seeds_are_enough_to_say_about_how_many() -> None:
    noisy = np.random.default_rng(3).normal(0, 1, (2, 5)).tolist()
    assert "About " in judged("entropy", noisy).sentence
    few = judged("entropy", [row[:4] for row in noisy])
    assert "Roughly " in few.sentence
    assert "if seeds scatter as these 4 do" in few.sentence


def test_a_share_of_right_answers_near_1_has_an_interval_beside_it_and_none_above() -> None:
    asked = [question(f"q{row}", [float(row > 4)]) for row in range(256)]
    arm = compare([make_run("run", 1, asked)], Target()).arms[0]
    assert arm.models is not None
    assert arm.models.method == "Wilson's interval"
    assert (arm.models.low, arm.models.high) == pytest.approx((0.9551, 0.9916), abs=1e-4)
    whole = [question(f"q{row}", [1.0]) for row in range(256)]
    certain = compare([make_run("run", 1, whole)], Target()).arms[0].models
    assert certain is not None
    assert (certain.low, certain.high) == pytest.approx((0.9852, 1.0), abs=1e-4)


def test_of_models_that_differ_it_is_told_where_new_runs_may_not() -> None:
    """Two seeds that disagree on how much, each better at every question."""
    made = [
        make_run(
            f"{arm}-{seed}",
            seed,
            [question(f"q{i}", [level + 0.001 * i]) for i in range(40)],
            recipe=[f"name={arm}"],
        )
        for arm, levels in (("a", (0.2, 0.3)), ("b", (0.3, 0.9)))
        for seed, level in enumerate(levels)
    ]
    (pair,) = compare(made, Target(axis="steps")).pairs
    assert (pair.verdict, pair.basis) == ("cannot tell", "training")
    assert "These very models do differ on new questions (95 % [" in pair.sentence
