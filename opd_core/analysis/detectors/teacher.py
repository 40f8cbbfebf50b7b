"""A teacher that teaches nothing: it is the student, its term is too small, it scores nothing."""

from __future__ import annotations

import math

from opd_core.analysis.detectors.finding import Finding, RunFacts
from opd_core.analysis.detectors.history import History, in_steps

ENOUGH_TOKENS = 100
"""Response tokens from which the first train step says whether two models are the same."""
SAME_NATS = 0.02
"""Mean |k| of one model under two engines, of which one rounds to bfloat16: 0.005 to 0.02."""
SAME_EXACT_NATS = 2e-5
"""The same where both compute in float32: about 3e-7. Two models that differ at one token in a
thousand may have 2e-4 in a step that lacks such a token."""
SAME_SPREAD_NATS = 0.1
"""Spread of k: rounding moves many tokens by little, another model a few by nats."""
EFFECT = 0.01
"""Part of the gradient, or of the advantage's spread, below which a term steers nothing."""
REACHED_NATS = 0.05
"""Mean |k| of a student that has reached its teacher, in bfloat16 too: nothing is left to steer."""
MEASUREMENTS = 2
"""Measured gradients: one may be that of an odd batch."""
STEPS = 3
"""Train steps in a row, for what hardly varies between them."""
LEFT_BY_CLAMP = 0.1
"""Spread of the teacher's term over its weight times mean |k|. Unclamped it is above 1 (k has heavy
tails), with a clamp that only cuts outliers about 2."""
SPREAD = 0.05
"""Spread of the teacher's logprobs over their size. A language model's is above 1: it is sure of
most tokens and surprised by a few."""
UNSURE_NATS = 0.1
"""Mean surprise above which a teacher cannot be sure of every token alike."""
UNIFORM = "uniform"
"""Cause of a rollout whose scores were one and the same number."""


def teacher_equals_student(history: History, facts: RunFacts) -> Finding | None:
    """The scores of the first train step are the student's own logprobs, but for rounding.

    Only of the first: a student that starts as its teacher is moved by noise, and a good one comes
    to resemble its teacher later.
    """
    step = history.start
    if step is None or not facts.scored:
        return None
    metrics = step.metrics
    distance, tokens = metrics.get("opd_abs_logprob_diff"), metrics.get("response_tokens", 0.0)
    spread = metrics.get("advantage_opd_std", 0.0)
    same = SAME_EXACT_NATS if facts.exact else SAME_NATS
    if distance is None or tokens < ENOUGH_TOKENS or not distance <= same:
        return None
    if spread > SAME_SPREAD_NATS * facts.opd_adv_weight:
        return None
    return Finding(
        "teacher_equals_student",
        step.train_step,
        "error",
        f"opd_abs_logprob_diff is {distance:.2g} nats over {tokens:.0f} tokens of train step "
        f"{step.train_step}",
        "the teacher scores as the student itself does, so there is nothing to learn from it",
        "compare student.model with the teacher's launch.model, or with the model that its "
        "endpoint serves: one of them is not the one that was meant",
    )


def teacher_without_effect(history: History, facts: RunFacts) -> Finding | None:
    """The teacher's term exists and steers nothing. ``opd_adv_weight: 0`` is a wish, not a
    fault."""
    if not facts.scored or facts.opd_adv_weight == 0:
        return None
    if evidence := _clamped_away(history, facts):
        cure = f"raise opd.kl_clamp (now {facts.kl_clamp:g}); 5 cuts outliers only"
    elif not _reached(history) and (evidence := _small_gradient(history) or _small_part(history)):
        cure = (
            f"raise opd.opd_adv_weight (now {facts.opd_adv_weight:g}) or lower "
            f"opd.task_adv_weight (now {facts.task_adv_weight:g})"
        )
    else:
        return None
    return Finding(
        "teacher_without_effect",
        history.train_step,
        "error",
        evidence,
        "the teacher is asked and paid for, and its answer changes almost nothing",
        cure,
    )


def _reached(history: History) -> bool:
    distance = history.now("opd_abs_logprob_diff", 1)
    return distance is not None and distance.value <= REACHED_NATS


def _clamped_away(history: History, facts: RunFacts) -> str:
    spread = history.now("advantage_opd_std", STEPS)
    distance = history.now("opd_abs_logprob_diff", STEPS)
    clamped = history.now("opd_clamped_fraction", STEPS)
    if facts.kl_clamp is None or not (spread and distance and clamped) or clamped.value == 0:
        return ""
    if spread.value > LEFT_BY_CLAMP * facts.opd_adv_weight * distance.value:
        return ""
    return (
        f"opd.kl_clamp {facts.kl_clamp:g} cuts {clamped.value:.0%} of all tokens {clamped.steps}, "
        f"and leaves the teacher's term a spread of {spread.value:.2g} (advantage_opd_std) where "
        f"mean |k| is {distance.value:.2g} nats (opd_abs_logprob_diff)"
    )


def _small_gradient(history: History) -> str:
    names = ("grad_norm_teacher", "grad_norm")
    found = history.latest(*names, count=MEASUREMENTS)
    norms = [(step.metrics[names[0]], step.metrics[names[1]]) for step in found]
    if not found or not all(own < EFFECT * whole < math.inf for own, whole in norms):
        return ""
    told = ", ".join(f"{own:.2g} of {whole:.2g}" for own, whole in norms)
    steps = in_steps(found[0].train_step, found[-1].train_step)
    return f"grad_norm_teacher is {told} (grad_norm) where it was measured {steps}"


def _small_part(history: History) -> str:
    own = history.now("advantage_opd_std", STEPS)
    whole = history.now("advantage_std", STEPS)
    if not (own and whole and own.value < EFFECT * whole.value):
        return ""
    return f"advantage_opd_std is {own.value:.2g} of {whole.value:.2g} (advantage_std) {own.steps}"


def uniform_teacher(history: History, facts: RunFacts) -> Finding | None:
    """Every token gets the same score: the server lost its weights, or answers a constant."""
    evidence = _refused(history) or _constant(history)
    if not evidence or not facts.scored:
        return None
    return Finding(
        "uniform_teacher",
        history.train_step,
        "error",
        evidence,
        "no model finds all tokens equally likely: the server has lost its weights, or does not "
        "answer with logprobs",
        "start the teacher again and look at it with `opd probe`; check launch.model, or what is "
        "served at opd.teachers endpoint",
    )


def _refused(history: History) -> str:
    count = history.lost[UNIFORM]
    return f"{count} groups were lost because all their tokens had one score" if count else ""


def _constant(history: History) -> str:
    spread = history.now("teacher_logprob_std", STEPS)
    kl = history.now("opd_reverse_kl", STEPS)
    entropy = history.now("entropy", STEPS)
    if not (spread and kl and entropy):
        return ""
    surprise = kl.value + entropy.value  # minus the mean of teacher_logprobs
    if surprise < UNSURE_NATS or spread.value > SPREAD * surprise:
        return ""
    return (
        f"teacher_logprob_std is {spread.value:.2g} around a mean of {-surprise:.3g} nats "
        f"{spread.steps}"
    )
