from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from opd_core.analysis.statistics import (
    Array,
    Bounds,
    bootstrap_interval,
    holm,
    normal_interval,
    paired_seeds_needed,
    paired_seeds_within,
    t_interval,
    uniform_interval,
    welch_interval,
    welch_seeds_needed,
    welch_seeds_within,
    wilson_interval,
)

EXPERIMENTS = 2000
SAMPLES = 4
RESAMPLES = 2000
GAP = 0.35
"""Of two models in log-odds; about 6 points of accuracy."""


def share(hit: Array) -> float:
    return float(np.mean(hit))


def covered(bounds: Bounds, truth: float) -> float:
    return share((bounds.low <= truth) & (truth <= bounds.high))


def chance(logits: Array) -> Array:
    right: Array = 1 / (1 + np.exp(-logits))
    return right


def answered(random: np.random.Generator, right: Array) -> Array:
    """Mean of the samples of each question."""
    mean: Array = random.binomial(SAMPLES, right) / SAMPLES
    return mean


def two_models(
    random: np.random.Generator, shape: tuple[int, ...], gap: float, seeds: int = 1
) -> tuple[Array, Array]:
    """Chances [seeds, *shape] of two models to be right: questions are hard or easy for both, and
    each model has its own strengths."""
    hardness = random.normal(0, 1.5, shape)
    own = random.normal(0, 0.5, (2, seeds, *shape))
    return chance(hardness + gap + own[0]), chance(hardness + own[1])


@pytest.mark.parametrize("questions", [10, 60, 256])
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_bootstrap_covers_the_same_models_on_new_questions(questions: int, seeds: int) -> None:
    random = np.random.default_rng(questions)
    population = two_models(random, (400_000,), GAP)
    truth = float((population[0] - population[1]).mean())
    a, b = (
        answered(random, right).mean(axis=0)
        for right in two_models(random, (questions, EXPERIMENTS), GAP, seeds)
    )
    bounds = bootstrap_interval(a - b, resamples=RESAMPLES)
    assert 0.93 <= covered(bounds, truth) <= 0.97
    assert share(bounds.high < 0) < 0.01  # the sign is right where there is one


def test_equal_models_are_told_apart_in_one_of_twenty_experiments() -> None:
    random = np.random.default_rng(2)
    a, b = (answered(random, right)[0] for right in two_models(random, (256, EXPERIMENTS), 0.0))
    bounds = bootstrap_interval(a - b, resamples=RESAMPLES)
    assert 0.035 <= share((bounds.low > 0) | (bounds.high < 0)) <= 0.065
    assert 0.035 <= share(bounds.p < 0.05) <= 0.065


def test_pairing_questions_gives_a_narrower_interval_than_not_pairing_them() -> None:
    random = np.random.default_rng(3)
    a, b = (answered(random, right)[0] for right in two_models(random, (256, 200), GAP))
    paired = bootstrap_interval(a - b, resamples=RESAMPLES)
    unpaired = welch_interval(a, b)
    assert np.mean(paired.high - paired.low) < 0.75 * np.mean(unpaired.high - unpaired.low)


class Seeds:
    """Training runs on one fixed set of questions: a seed moves a model as a whole and on each
    question, and with ``shared`` also both arms alike."""

    def __init__(self, gap: float, *, shared: bool) -> None:
        self.random = np.random.default_rng(5)
        self.hardness = self.random.normal(0, 1.5, 64)
        self.gap, self.shared = gap, shared
        a, b = self.arms(1, 20_000)
        self.truth = float(a.mean() - b.mean())

    def arms(self, seeds: int, experiments: int = EXPERIMENTS) -> tuple[Array, Array]:
        """Accuracy [seeds, experiments] of both arms."""
        common = self.random.normal(0, 0.3 * self.shared, (seeds, experiments, 1))
        return self._means(common + self.gap), self._means(common)

    def _means(self, shift: Array) -> Array:
        own = self.random.normal(0, 0.3, shift.shape)
        of_question = self.random.normal(0, 0.3, (*shift.shape[:2], 64))
        right = chance(self.hardness + shift + own + of_question)
        means: Array = answered(self.random, right).mean(axis=2)
        return means


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_the_t_interval_covers_new_training_seeds(seeds: int) -> None:
    paired, apart = Seeds(GAP, shared=True), Seeds(GAP, shared=False)
    a, b = paired.arms(seeds)
    assert 0.93 <= covered(t_interval(a - b), paired.truth) <= 0.97
    a, b = apart.arms(seeds)
    assert 0.93 <= covered(welch_interval(a, b), apart.truth) <= 0.97


def test_pairing_seeds_helps_where_a_seed_moves_both_arms() -> None:
    a, b = Seeds(GAP, shared=True).arms(8)
    paired, unpaired = t_interval(a - b), welch_interval(a, b)
    assert np.mean(paired.high - paired.low) < 0.9 * np.mean(unpaired.high - unpaired.low)


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_equal_recipes_are_told_apart_in_about_one_of_twenty_experiments(seeds: int) -> None:
    a, b = Seeds(0.0, shared=True).arms(seeds)
    paired = t_interval(a - b)
    assert 0.035 <= share((paired.low > 0) | (paired.high < 0)) <= 0.065
    a, b = Seeds(0.0, shared=False).arms(seeds)
    # Welch's degrees of freedom are estimated: with three seeds it is a little too careful.
    assert 0.025 <= share(welch_interval(a, b).p < 0.05) <= 0.065


def test_intervals_of_unequal_spreads_and_unequal_numbers_of_seeds_cover_the_truth() -> None:
    random = np.random.default_rng(7)
    a, b = random.normal(0.1, 0.05, (3, 20_000)), random.normal(0.0, 0.01, (8, 20_000))
    assert 0.93 <= covered(welch_interval(a, b), 0.1) <= 0.97


def test_seeds_needed_give_the_power_that_they_promise() -> None:
    random = np.random.default_rng(11)
    paired = paired_seeds_needed(0.03, 0.02)
    assert paired is not None
    found = t_interval(random.normal(0.02, 0.03, (paired, 20_000)))
    fewer = t_interval(random.normal(0.02, 0.03, (paired - 1, 20_000)))
    assert share(found.p < 0.05) == pytest.approx(0.8, abs=0.03)
    assert share(fewer.p < 0.05) < 0.8
    each = welch_seeds_needed(0.03, 0.01, 0.02)
    assert each is not None
    found = welch_interval(
        random.normal(0.02, 0.03, (each, 20_000)), random.normal(0, 0.01, (each, 20_000))
    )
    assert share(found.p < 0.05) == pytest.approx(0.8, abs=0.03)


def test_seeds_needed_agree_with_another_implementation_of_the_noncentral_t() -> None:
    for effect in (0.1, 0.5, 1.0, 3.0, 100.0):
        seeds = np.arange(2, 1001)
        limit = stats.t.ppf(0.975, seeds - 1)
        power = stats.nct.sf(limit, seeds - 1, effect * np.sqrt(seeds))
        assert paired_seeds_needed(1.0, effect) == seeds[np.argmax(power >= 0.8)]
        # Two arms of equal spread: Welch's degrees of freedom are then 2 (n - 1).
        limit, centre = stats.t.ppf(0.975, 2 * (seeds - 1)), effect * np.sqrt(seeds / 2)
        power = stats.nct.sf(limit, 2 * (seeds - 1), centre)
        needed = int(seeds[np.argmax(power >= 0.8)]) if (power >= 0.8).any() else None
        assert welch_seeds_needed(1.0, 1.0, effect) == needed


def test_a_difference_too_small_for_a_thousand_seeds_has_no_number() -> None:
    assert paired_seeds_needed(1.0, 0.05) is None
    assert welch_seeds_needed(1.0, 1.0, 0.0) is None


def test_a_difference_without_spread_needs_the_least_number_of_seeds() -> None:
    assert paired_seeds_needed(0.0, 0.02) == welch_seeds_needed(0.0, 0.0, 0.02) == 2


def test_the_expanded_percentile_interval_is_as_wide_as_that_of_t() -> None:
    values = np.random.default_rng(13).normal(size=20)
    ours, t = bootstrap_interval(values), t_interval(values)
    assert ours.high - ours.low == pytest.approx(t.high - t.low, rel=0.04)
    assert ours.p == pytest.approx(float(t.p), rel=0.1)


def test_the_bootstrap_is_the_same_every_time_and_for_every_chunk() -> None:
    values = np.random.default_rng(17).normal(size=(900, 2))
    both, one = bootstrap_interval(values), bootstrap_interval(values[:, 1])
    assert both.low[1] == pytest.approx(float(one.low))
    assert bootstrap_interval(values[:, 1]) == one


def test_p_is_below_5_percent_exactly_where_the_interval_excludes_zero() -> None:
    values = np.random.default_rng(19).normal(0.1, 1, (30, 500))
    for bounds in (bootstrap_interval(values), t_interval(values)):
        excluded = (bounds.low > 0) | (bounds.high < 0)
        assert share(excluded == (bounds.p < 0.05)) > 0.99


def test_t_intervals_are_those_of_the_textbook() -> None:
    a, b = np.array([0.61, 0.58, 0.66, 0.63]), np.array([0.55, 0.57, 0.52])
    one, two = stats.ttest_1samp(a, 0.0), stats.ttest_ind(a, b, equal_var=False)
    assert t_interval(a).p == pytest.approx(one.pvalue)
    assert (t_interval(a).low, t_interval(a).high) == pytest.approx(one.confidence_interval(0.95))
    assert welch_interval(a, b).p == pytest.approx(two.pvalue)
    ours = welch_interval(a, b)
    assert (ours.low, ours.high) == pytest.approx(two.confidence_interval(0.95))


def test_values_without_spread_give_a_point_and_no_nan() -> None:
    same = np.full(5, 0.25)
    for bounds in (t_interval(same), bootstrap_interval(same), welch_interval(same, same - 0.25)):
        assert (bounds.low, bounds.high) == pytest.approx((0.25, 0.25))
        assert 0 <= bounds.p < 0.05
    zero = t_interval(np.zeros(3))
    assert (zero.low, zero.high, zero.p) == (0, 0, 1)
    assert normal_interval(0.0, 0.0).p == 1


def test_questions_that_all_agree_still_leave_room_for_others() -> None:
    bounds = uniform_interval(0.0, 60, 1.0)
    # Clopper-Pearson: none of 60 differs, so up to 1 - 0.025^(1/60) of all may.
    assert bounds.high == pytest.approx(stats.binomtest(0, 60).proportion_ci(0.95).high)
    assert (bounds.low, bounds.p) == (pytest.approx(-bounds.high), 1)
    edge = uniform_interval(float(bounds.high), 60, 1.0)
    assert (edge.low, edge.p) == (pytest.approx(0), pytest.approx(0.05))
    exact = uniform_interval(0.0, 60, 0.0)
    assert (exact.low, exact.high, exact.p) == (0, 0, 1)


def test_a_share_has_wilsons_interval_at_the_edges_too() -> None:
    for right in (0, 1, 251, 255, 256):
        bounds = wilson_interval(right, 256)
        known = stats.binomtest(right, 256).proportion_ci(0.95, method="wilson")
        assert (bounds.low, bounds.high) == pytest.approx((known.low, known.high), abs=1e-12)
        assert bounds.p == (right == 0)


def test_the_seeds_for_a_narrow_interval_are_the_fewest_that_make_it_so() -> None:
    def half(seeds: int, spread: float, freedom: int) -> float:
        return float(stats.t.ppf(0.975, freedom) * spread / np.sqrt(seeds))

    paired = paired_seeds_within(0.02, 0.01)
    assert paired is not None
    assert half(paired, 0.02, paired - 1) <= 0.01 < half(paired - 1, 0.02, paired - 2)
    welch = welch_seeds_within(0.02, 0.02, 0.01)
    assert welch is not None
    spread = 0.02 * np.sqrt(2)
    assert half(welch, spread, 2 * welch - 2) <= 0.01 < half(welch - 1, spread, 2 * welch - 4)
    assert (paired_seeds_within(1.0, 0.01), paired_seeds_within(0.0, 0.01)) == (None, 2)


@pytest.mark.parametrize("values", [[0.5], [0.5, float("nan")], [0.5, float("inf")]])
def test_too_few_or_unusable_values_are_refused(values: list[float]) -> None:
    for interval in (bootstrap_interval, t_interval):
        with pytest.raises(ValueError, match="two or more units with finite values"):
            interval(np.array(values))


def test_holm_corrects_step_by_step_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx((0.03, 0.06, 0.06))
    assert holm([0.9, 0.6]) == (1.0, 1.0)
    assert holm([]) == ()


def test_holm_keeps_the_chance_of_any_false_finding_at_5_percent() -> None:
    random = np.random.default_rng(23)
    arms = random.normal(size=(4, 5, EXPERIMENTS))  # three arms share their baseline
    p = np.stack([t_interval(arm - arms[0]).p for arm in arms[1:]])
    uncorrected = share((p < 0.05).any(axis=0))
    corrected = np.mean([min(holm(list(column))) < 0.05 for column in p.T])
    assert uncorrected > 0.09
    assert 0.03 <= corrected <= 0.06
