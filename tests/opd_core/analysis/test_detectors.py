"""Each detector speaks where its fault begins, and not before."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from opd_core.analysis.detectors import DETECTORS, RunFacts, detect
from opd_core.analysis.run_data import Series
from tests.opd_core.analysis.sound_runs import (
    MIXED,
    PURE,
    SOUND,
    TASK_ONLY,
    Change,
    extreme,
    falling,
    found,
    series_of,
    soaring,
    then,
)


@pytest.mark.parametrize(
    ("exact", "same", "different"), [(False, 0.02, 0.021), (True, 2e-5, 2.1e-5)]
)
def test_a_teacher_is_the_student_if_only_rounding_is_between_them(
    exact: bool, same: float, different: float
) -> None:
    facts = replace(PURE, exact=exact)
    assert found(facts, 1, opd_abs_logprob_diff=different, advantage_opd_std=0.05) == {}
    finding = found(facts, 1, opd_abs_logprob_diff=same, advantage_opd_std=0.05)
    assert finding["teacher_equals_student"].train_step == 1
    assert f"{same:.2g} nats over 2500 tokens" in finding["teacher_equals_student"].evidence


def test_a_teacher_that_differs_at_a_few_tokens_is_another_model() -> None:
    assert found(PURE, 1, opd_abs_logprob_diff=0.005, advantage_opd_std=0.11) == {}
    same = found(PURE, 1, opd_abs_logprob_diff=0.005, advantage_opd_std=0.09)
    assert list(same) == ["teacher_equals_student"]
    twice = replace(PURE, opd_adv_weight=2.0)
    assert list(found(twice, 1, opd_abs_logprob_diff=0.005, advantage_opd_std=0.19)) == list(same)


def test_a_student_that_comes_to_resemble_its_teacher_is_no_fault() -> None:
    near: dict[str, Change] = {"opd_abs_logprob_diff": falling(0.4, 0.01, 3)}
    near["engine_logprob_gap"] = 1e-6
    assert "teacher_equals_student" not in found(PURE, **near)


def test_too_few_tokens_do_not_tell_whether_two_models_are_one() -> None:
    alike: dict[str, Change] = {"opd_abs_logprob_diff": 0.0, "advantage_opd_std": 0.0}
    assert found(PURE, 1, response_tokens=99, **alike) == {}
    assert list(found(PURE, 1, response_tokens=101, **alike)) == ["teacher_equals_student"]


def test_a_teacher_with_a_hundredth_of_the_gradient_has_an_effect() -> None:
    assert found(MIXED, grad_norm_teacher=0.005) == {}
    finding = found(MIXED, grad_norm_teacher=0.0049)["teacher_without_effect"]
    assert finding.train_step == 2
    assert "0.0049 of 0.5" in finding.evidence
    assert "raise opd.opd_adv_weight (now 1)" in finding.cure


def test_a_student_that_has_reached_its_teacher_feels_none_of_it() -> None:
    lost: dict[str, Change] = {"grad_norm_teacher": 0.004}
    near: dict[str, Change] = {"opd_abs_logprob_diff": 0.05, "engine_logprob_gap": 0.01}
    assert found(MIXED, **lost, **near, advantage_opd_std=0.2) == {}
    near["opd_abs_logprob_diff"] = 0.051
    assert list(found(MIXED, **lost, **near)) == ["teacher_without_effect"]


def test_one_measured_gradient_is_not_believed() -> None:
    once = falling(0.001, 0.5, 2)
    assert found(MIXED, grad_norm_teacher=once) == {}


def test_where_no_gradient_was_measured_the_advantage_tells() -> None:
    few = found(MIXED, grad_norm_teacher=None, advantage_opd_std=0.009)
    assert "advantage_opd_std is 0.009 of 1" in few["teacher_without_effect"].evidence
    assert few["teacher_without_effect"].train_step == 3
    assert found(MIXED, grad_norm_teacher=None, advantage_opd_std=0.011) == {}


def test_a_teacher_that_is_only_to_be_logged_is_meant_so() -> None:
    logged = replace(MIXED, opd_adv_weight=0.0)
    assert found(logged, grad_norm_teacher=0.0, advantage_opd_std=0.0) == {}


def test_a_clamp_may_cut_outliers_and_not_the_teacher() -> None:
    clamped = replace(PURE, kl_clamp=0.01)
    cut: dict[str, Change] = {"opd_clamped_fraction": 0.6, "advantage_std": 0.1}
    assert found(clamped, advantage_opd_std=0.05, **cut) == {}
    finding = found(clamped, advantage_opd_std=0.03, **cut)["teacher_without_effect"]
    assert "opd.kl_clamp 0.01 cuts 60% of all tokens" in finding.evidence
    assert finding.cure.startswith("raise opd.kl_clamp")
    assert found(PURE, advantage_opd_std=0.03, **cut) == {}, "there is no clamp"
    cut["opd_clamped_fraction"] = 0.0
    assert found(clamped, advantage_opd_std=0.03, **cut) == {}, "it cuts nothing"


def test_a_teacher_that_is_sure_of_everything_is_not_uniform() -> None:
    sure: dict[str, Change] = {"teacher_logprob_std": 0.001, "opd_reverse_kl": 0.01}
    assert found(PURE, entropy=0.08, **sure) == {}
    assert list(found(PURE, entropy=0.1, **sure)) == ["uniform_teacher"]


def test_a_teacher_whose_scores_differ_by_a_twentieth_is_uniform() -> None:
    """The mean surprise of the sound run is 0.6 nats."""
    assert found(PURE, teacher_logprob_std=0.031) == {}
    assert list(found(PURE, teacher_logprob_std=0.029)) == ["uniform_teacher"]
    assert found(TASK_ONLY, teacher_logprob_std=0.029) == {}


def test_one_answer_that_was_refused_as_uniform_is_enough() -> None:
    assert list(found(PURE, 1, lost__uniform=1)) == ["uniform_teacher"]


def test_a_disliked_end_must_stand_out() -> None:
    assert found(PURE, rollout__end_token_kl=4.9) == {}
    assert found(PURE, rollout__end_token_kl=5.1)["ending_mismatch"].train_step == 3
    far: dict[str, Change] = {"opd_reverse_kl": 2.0, "opd_abs_logprob_diff": 2.1}
    assert found(PURE, rollout__end_token_kl=5.9, **far) == {}
    assert list(found(PURE, rollout__end_token_kl=6.1, **far)) == ["ending_mismatch"]


def test_answers_that_are_cut_from_the_start_may_be_meant() -> None:
    assert found(PURE, rollout__truncated_fraction=0.49) == {}
    finding = found(PURE, rollout__truncated_fraction=0.51)["ending_mismatch"]
    assert (finding.level, "sampling.max_new_tokens 48" in finding.evidence) == ("note", True)


@pytest.mark.parametrize("facts", [PURE, TASK_ONLY])
def test_answers_that_grow_until_they_are_cut_are_not(facts: RunFacts) -> None:
    cut, longer = falling(0.0, 0.2), falling(20.0, 35.0)
    finding = found(facts, rollout__truncated_fraction=cut, rollout__response_tokens_mean=longer)
    assert finding["ending_mismatch"].level == "warning"
    assert "from 20 in train steps 1 to 5" in finding["ending_mismatch"].evidence
    assert found(facts, rollout__response_tokens_mean=longer) == {}, "nothing is cut"
    assert found(facts, rollout__truncated_fraction=cut) == {}


@pytest.mark.parametrize(
    ("length", "its_noise", "cut", "cuts_noise", "told"),
    [
        (35.0, 0.0, 0.11, 0.0, True),
        (35.0, 0.0, 0.09, 0.0, False),
        (31.0, 0.0, 0.3, 0.0, True),
        (29.0, 0.0, 0.3, 0.0, False),
        (35.0, 6.6, 0.3, 0.0, True),  # z = 3.2
        (35.0, 7.4, 0.3, 0.0, False),  # z = 2.9
        (35.0, 0.0, 0.3, 0.13, True),
        (35.0, 0.0, 0.3, 0.15, False),
    ],
)
def test_answers_grow_for_sure_and_by_much(
    length: float, its_noise: float, cut: float, cuts_noise: float, told: bool
) -> None:
    lengths, cuts = then(20.0, length, its_noise), then(0.0, cut, cuts_noise)
    grown = found(PURE, 10, rollout__response_tokens_mean=lengths, rollout__truncated_fraction=cuts)
    assert list(grown) == ["ending_mismatch"] * told


def test_answers_that_grow_threefold_are_noted_before_they_are_cut() -> None:
    grown = found(PURE, rollout__response_tokens_mean=falling(100.0, 310.0))["ending_mismatch"]
    assert (grown.level, "from 100 in" in grown.evidence) == ("note", True)
    assert found(PURE, rollout__response_tokens_mean=falling(100.0, 290.0)) == {}


def test_a_note_that_gets_worse_is_told_again() -> None:
    series = series_of(
        40,
        {
            "rollout/response_tokens_mean": falling(100.0, 310.0),
            "rollout/truncated_fraction": falling(0.0, 0.6, 25),
        },
    )
    assert [finding.level for finding in detect(series, PURE)] == ["note", "warning"]


def test_sharpening_with_the_teacher_is_no_collapse() -> None:
    sharp = falling(0.3, 0.03)
    assert found(PURE, entropy=sharp, opd_reverse_kl=falling(0.3, 0.03)) == {}
    assert found(PURE, entropy=sharp, opd_reverse_kl=falling(0.3, -0.01)) == {}


def test_sharpening_while_the_teacher_is_as_far_as_before_is_one() -> None:
    finding = found(PURE, entropy=falling(0.3, 0.03))["entropy_collapse"]
    assert finding.train_step == 14
    assert "entropy went from 0.3 nats in train steps 1 to 5 to 0.03 nats" in finding.evidence
    assert found(PURE, entropy=falling(0.3, 0.12)) == {}


def test_with_a_reward_that_rises_the_entropy_may_fall() -> None:
    sharp = falling(0.3, 0.03)
    for facts in (MIXED, TASK_ONLY):
        assert found(facts, entropy=sharp, rollout__reward_mean=falling(0.5, 0.7)) == {}
        assert list(found(facts, entropy=sharp)) == ["entropy_collapse"]
        assert found(facts, entropy=sharp, rollout__reward_mean=None) == {}


def test_a_reward_that_scatters_is_known_over_many_steps() -> None:
    flat: dict[str, Change] = {"rollout/reward_mean": lambda step: 0.4 if step % 2 else 0.6}
    assert list(found(TASK_ONLY, 60, entropy=falling(0.3, 0.03), **flat)) == ["entropy_collapse"]


@pytest.mark.parametrize("scatter", [0.05, 0.08])
def test_a_student_that_learns_from_noisy_rewards_does_not_collapse(scatter: float) -> None:
    for seed in range(10):
        noise = np.random.default_rng(seed).normal(0, scatter, 61)
        learning: dict[str, Change] = {
            "entropy": lambda step: 1 - 0.72 * step / 60,
            "rollout/reward_mean": lambda step, noise=noise: 0.3 + 0.2 * step / 60 + noise[step],
        }
        assert found(TASK_ONLY, 60, **learning) == {}


def test_a_rising_kl_is_seen_from_the_start_and_from_the_lowest() -> None:
    finding = found(PURE, 60, opd_reverse_kl=falling(0.3, 0.6))["kl_rising"]
    assert "went from 0.3 nats in train steps 1 to 5 to 0.6" in finding.evidence
    low: dict[str, Change] = {"opd_reverse_kl": lambda step: 0.1 if 5 < step < 40 else 0.29}
    assert "from 0.1 nats in train steps 6 to 25" in found(PURE, 90, **low)["kl_rising"].evidence


def test_a_kl_that_soars_at_once_is_seen_in_a_young_run() -> None:
    finding = found(PURE, 8, opd_reverse_kl=falling(0.3, 1.0, 3))["kl_rising"]
    assert finding.train_step == 8
    assert found(PURE, 8, opd_reverse_kl=falling(0.3, 0.65, 3)) == {}


def test_a_kl_that_rises_within_its_noise_or_by_rounding_is_not() -> None:
    noisy: dict[str, Change] = {"opd_reverse_kl_stderr": 0.4}
    assert found(PURE, 60, opd_reverse_kl=falling(0.3, 0.6), **noisy) == {}
    assert found(PURE, 60, opd_reverse_kl=falling(0.3, 0.44)) == {}
    tiny = falling(1e-3, 2e-2)
    assert found(PURE, 60, opd_reverse_kl=tiny, opd_reverse_kl_stderr=1e-4) == {}


@pytest.mark.parametrize("stderr_part", [0.0, 0.5, 0.85])
@pytest.mark.parametrize("heavy", [True, False])
def test_a_flat_kl_that_scatters_by_a_third_does_not_rise(stderr_part: float, heavy: bool) -> None:
    for seed in range(4):
        draw = np.random.default_rng(seed).normal(0, 0.33, 401)
        kl = 0.06 * (np.exp(draw) if heavy else 1 + draw)
        noisy: dict[str, Change] = {"opd_reverse_kl_stderr": 0.06 * 0.33 * stderr_part}
        assert found(PURE, 400, opd_reverse_kl=lambda step, kl=kl: kl[step], **noisy) == {}


def test_an_easy_and_a_hard_source_in_turns_are_no_rise() -> None:
    turns: dict[str, Change] = {
        "opd_reverse_kl": lambda step: 0.3 if step // 20 % 2 else 0.1,
        "opd_reverse_kl_stderr": 0.01,
    }
    assert found(PURE, 200, **turns) == {}


@pytest.mark.parametrize(("harder", "told"), [(1.0, []), (2.0, ["kl_rising"])])
def test_where_sources_are_told_apart_each_is_held_against_itself(
    harder: float, told: list[str]
) -> None:
    """The hard one comes alone from train step 50 on; a source without tokens has a KL of 0."""
    changes: dict[str, Change] = {
        "opd_reverse_kl": lambda step: 0.1 if step < 50 else 0.3 * harder,
        "opd_reverse_kl_stderr": 0.01,
    }
    for source, kl in (("easy", 0.1), ("hard", 0.3)):
        on = lambda step, s=source: s == "easy" if step % 50 < 25 or step < 50 else s == "hard"  # noqa: E731
        changes[f"response_tokens/{source}"] = lambda step, on=on: 1000.0 * on(step)
        changes[f"opd_reverse_kl/{source}"] = lambda step, on=on, kl=kl: (
            on(step) * (kl * (harder if step > 100 else 1.0))
        )
    assert list(found(PURE, 300, **changes)) == told


def test_a_reward_that_rises_may_cost_some_kl() -> None:
    away = falling(0.3, 0.6)
    assert found(MIXED, 60, opd_reverse_kl=away, rollout__reward_mean=falling(0.3, 0.6)) == {}
    assert list(found(MIXED, 60, opd_reverse_kl=away)) == ["kl_rising"]


@pytest.mark.parametrize(
    ("gap", "distance", "level"),
    [
        (0.11, 0.4, "error"),
        (0.06, 0.4, "warning"),
        (0.049, 0.4, ""),
        (0.04, 0.07, "warning"),
        (0.025, 0.045, ""),  # bfloat16, at the end of a run
    ],
)
def test_the_engines_gap_is_absolute_and_relative(gap: float, distance: float, level: str) -> None:
    told = found(PURE, engine_logprob_gap=gap, opd_abs_logprob_diff=distance)
    assert [finding.level for finding in told.values()] == [level] * bool(level)
    assert set(told) <= {"engine_gap"}


def test_without_a_teacher_only_the_absolute_gap_counts() -> None:
    assert list(found(TASK_ONLY, engine_logprob_gap=0.11)) == ["engine_gap"]
    assert found(TASK_ONLY, engine_logprob_gap=0.049) == {}


def test_numbers_that_are_none_are_told_once_they_stay_so() -> None:
    for name in ("opd_reverse_kl", "grad_norm", "entropy", "loss"):
        for none in (math.nan, math.inf):
            finding = found(PURE, **{name: falling(0.3, none)})["not_finite"]
            assert (finding.train_step, finding.level) == (12, "error")
            assert f"{name} not finite in train steps 10 to 12" in finding.evidence
    once: dict[str, Change] = {"grad_norm": lambda step: math.inf if step in (8, 9, 11) else 0.5}
    assert found(PURE, **once) == {}


def test_losses_are_told_if_they_are_many_and_of_another_kind() -> None:
    finding = found(PURE, survivors__bias_z=4.1)["survivors_biased"]
    assert "10 of 100 groups (10%)" in finding.evidence
    assert "10 timeout" in finding.evidence
    assert "failed_response_tokens_mean 25 against 20 of the kept" in finding.evidence
    assert found(PURE, survivors__bias_z=3.9) == {}
    assert found(PURE, survivors__bias_z=9.0, groups__failed=4) == {}
    assert found(PURE, survivors__bias_z=None) == {}


def test_an_extreme_token_is_told_if_it_happens_twice() -> None:
    assert found(PURE, **extreme(7)) == {}
    assert found(PURE, **extreme(7, 12)) == {}
    finding = found(PURE, **extreme(7, 11))["advantage_dominated"]
    assert finding.train_step == 11
    assert "in train step 11 advantage_min is -900" in finding.evidence
    assert found(PURE, response_tokens=199, **extreme(7, 11)) == {}


def test_what_is_extreme_depends_on_the_weight() -> None:
    assert found(replace(PURE, opd_adv_weight=40.0), **extreme(7, 11)) == {}
    assert found(PURE, **extreme(7, 11, low=-29.0, std=1.0)) == {}
    assert list(found(PURE, **extreme(7, 11, low=-31.0, std=1.0))) == ["advantage_dominated"]


def test_extreme_tokens_in_every_answer_share_the_blame() -> None:
    many = extreme(7, 11, std=100.0)
    assert found(PURE, **many) == {}
    assert list(found(PURE, advantage_top1pct_share=0.5, **many)) == ["advantage_dominated"]


def test_heavy_tails_are_no_fault() -> None:
    tails: dict[str, Change] = {"advantage_min": -28.0, "advantage_std": 1.0}
    assert found(PURE, advantage_top1pct_share=0.95, **tails) == {}


@pytest.mark.parametrize(
    ("name", "facts", "short_of_it", "beyond"),
    [
        (
            "entropy_collapse",
            TASK_ONLY,
            {"entropy": then(0.3, 0.101)},
            {"entropy": then(0.3, 0.099)},
        ),
        ("entropy_collapse", PURE, {"entropy": then(0.3, 0.061)}, {"entropy": then(0.3, 0.059)}),
        (
            "entropy_collapse",
            TASK_ONLY,
            {"entropy": then(0.3, 0.05), "rollout/reward_mean": then(0.5, 0.601)},
            {"entropy": then(0.3, 0.05), "rollout/reward_mean": then(0.5, 0.599)},
        ),
        (
            "entropy_collapse",
            TASK_ONLY,
            {"entropy": then(0.3, 0.05), "rollout/reward_mean": then(0.5, 0.55, 0.04)},
            {"entropy": then(0.3, 0.05), "rollout/reward_mean": then(0.5, 0.55, 0.03)},
        ),
        (
            "kl_rising",
            PURE,
            {"opd_reverse_kl": soaring(1e-3, 0.0205), "opd_reverse_kl_stderr": 1e-4},
            {"opd_reverse_kl": soaring(1e-3, 0.0215), "opd_reverse_kl_stderr": 1e-4},
        ),
        (
            "kl_rising",
            PURE,
            {"opd_reverse_kl": soaring(0.3, 1.0), "opd_reverse_kl_stderr": 0.14},
            {"opd_reverse_kl": soaring(0.3, 1.0), "opd_reverse_kl_stderr": 0.12},
        ),
        (
            "engine_gap",
            PURE,
            {"engine_logprob_gap": 0.04, "opd_abs_logprob_diff": 0.081},
            {"engine_logprob_gap": 0.04, "opd_abs_logprob_diff": 0.079},
        ),
        (
            "engine_gap",
            PURE,
            {"engine_logprob_gap": 0.0345, "opd_abs_logprob_diff": 0.06},
            {"engine_logprob_gap": 0.0355, "opd_abs_logprob_diff": 0.06},
        ),
        ("advantage_dominated", PURE, extreme(7, 8, std=58.0), extreme(7, 8, std=56.0)),
        (
            "advantage_dominated",
            PURE,
            {**extreme(7, 8, std=58.0), "advantage_top1pct_share": 0.49},
            {**extreme(7, 8, std=58.0), "advantage_top1pct_share": 0.51},
        ),
        (
            "advantage_dominated",
            PURE,
            {**extreme(7, 8), "response_tokens": 199.0},
            {**extreme(7, 8), "response_tokens": 201.0},
        ),
        (
            "survivors_biased",
            PURE,
            {"survivors/bias_z": 9.0, "groups/failed": 4.0},
            {"survivors/bias_z": 9.0, "groups/failed": 5.0},
        ),
    ],
)
def test_a_fault_begins_at_its_threshold(
    name: str, facts: RunFacts, short_of_it: dict[str, Change], beyond: dict[str, Change]
) -> None:
    assert found(facts, 10, **short_of_it) == {}
    assert list(found(facts, 10, **beyond)) == [name]


def test_what_was_not_measured_from_the_start_is_not_compared() -> None:
    late = series_of(20, {"entropy": None})
    values = {name: dict(zip(*map(list, late.of(name)), strict=True)) for name in late.names}
    values["entropy"] = {step: 0.3 / step for step in range(4, 21)}
    assert detect(Series(values), PURE) == ()


def test_a_metric_that_is_missing_silences_and_breaks_nothing() -> None:
    for facts in (MIXED, replace(MIXED, kl_clamp=5.0)):
        for name in SOUND:
            if name != "time/step_s":
                assert found(facts, **{name: None}) == {}


def test_in_the_first_train_steps_nothing_is_compared() -> None:
    assert found(PURE, 4, entropy=falling(0.3, 0.0, 2), opd_reverse_kl=falling(0.3, 3.0, 2)) == {}


def test_a_finding_has_the_name_of_its_detector_and_all_its_parts() -> None:
    assert [detector.__name__ for detector in DETECTORS] == [
        "teacher_equals_student",
        "teacher_without_effect",
        "uniform_teacher",
        "ending_mismatch",
        "entropy_collapse",
        "kl_rising",
        "engine_gap",
        "not_finite",
        "survivors_biased",
        "advantage_dominated",
    ]
    for name, finding in found(
        PURE, opd_abs_logprob_diff=0.0, advantage_opd_std=0.0, lost__uniform=1
    ).items():
        assert name == finding.name
        assert all((finding.evidence, finding.cause, finding.cure))
        assert finding.evidence in str(finding)
