"""A student that goes the wrong way: its entropy collapses, or the reverse KL rises."""

from __future__ import annotations

import math
from dataclasses import replace

from opd_core.analysis.detectors.finding import Finding, RunFacts
from opd_core.analysis.detectors.history import LONG, History, Mean, Track

COLLAPSED = 1 / 3
"""Entropy of now over that of the start; and the same of its share in the cross entropy. A student
that learns well may get down to a third, and its share then rises."""
REWARD_Z = 2.0
SAME_REWARD = 0.2
"""Part of the first reward by which it has at most risen, upper bound of :data:`REWARD_Z` standard
errors: what scatters so much that a student may have learned is no proof of a collapse."""
RISEN = 1.5
SOARED = 2.0
"""Each value since over the first one and its standard error, in a run too young for long windows:
it need not wait for them."""
RISEN_NATS = 0.02
"""A smaller rise is that of rounding."""
RISEN_Z = 5.0
"""High, since the lowest of many windows is low by luck too, and both windows must reach it."""


def entropy_collapse(history: History, facts: RunFacts) -> Finding | None:
    """The student has become sure of itself, and not because it learned.

    A student that learns gets sharper too. With a teacher the measure is entropy / (entropy +
    reverse KL): the sum is the cross entropy to the teacher, so this is the share of the teacher's
    surprise that the student foresaw, 1 for a perfect student. Learning raises it, or leaves it
    where the teacher is sure itself; a collapse sends it to 0. Where a reward trains, it must not
    have risen either.

    A collapse that halves the KL on its way (entropy 1 to 0.1, KL 0.5 to 0.2: the share goes from
    0.67 to 0.33) stays unseen: a student of a sure teacher that has learned half of what there is
    looks the same.
    """
    entropy = history.change("entropy")
    if not entropy or not _fell_to(entropy[0].value, entropy[1].value):
        return None
    if facts.task_adv_weight > 0 and not _reward_stays(history):
        return None
    kl = history.change("opd_reverse_kl") if facts.scored else None
    if facts.scored and (kl is None or not _fell_to(*_foreseen(entropy, kl))):
        return None
    told = [_from_to("entropy", *entropy), *([_from_to("opd_reverse_kl", *kl)] if kl else [])]
    keep = "lower training.learning_rate (now too high for this student)"
    if facts.task_adv_weight > 0:
        keep += ", raise training.reference_kl_weight or training.clip_high"
    if facts.scored:
        keep += ", set opd.kl_clamp (5) and opd.kl_baseline"
    return Finding(
        "entropy_collapse",
        history.train_step,
        "error",
        ", ".join(told),
        "the student is sure of its answers without having got better: it no longer tries others",
        f"{keep}, and begin again from an earlier checkpoint with `opd run --fork`",
    )


def kl_rising(history: History, facts: RunFacts) -> Finding | None:
    """The student moves away from its teacher: from where it began, or from where it was nearest.
    Where a reward trains and rises, that is its price, not a fault."""
    risen = next(filter(None, map(_risen, history.kl)), None) if facts.scored else None
    if risen is None or (facts.task_adv_weight > 0 and not _reward_stays(history)):
        return None
    name, since, now = risen
    return Finding(
        "kl_rising",
        history.train_step,
        "warning",
        f"{_from_to(name, since, now)} (z = {_z(since, now):.1f})",
        "the student moves away from its teacher instead of towards it",
        "lower training.learning_rate, raise training.warmup_steps or training.prompts_per_step, "
        "set opd.kl_clamp (5) and opd.kl_baseline; with a task reward lower opd.task_adv_weight",
    )


def _reward_stays(history: History) -> bool:
    """Whether the reward certainly has not risen by much; False where that is not known."""
    reward = history.change("rollout/reward_mean", LONG)
    if reward is None:
        return False
    start, now = reward
    most = now.value - start.value + REWARD_Z * math.hypot(start.stderr, now.stderr)
    return most <= SAME_REWARD * abs(start.value)


def _risen(track: Track) -> tuple[str, Mean, Mean] | None:
    """The metric, since when and until when it rose."""
    both, settled = track.last_two(), track.settled()
    for before in filter(None, (*track.starts, track.lowest)):
        if both and all(_higher(before, now) for now in both):
            return track.name, before, both[1]
    for before in track.starts[:1]:
        if settled and _soared(before, settled):
            return track.name, before, settled
    return None


def _higher(before: Mean, now: Mean) -> bool:
    larger = now.value >= max(RISEN * before.value, before.value + RISEN_NATS)
    return larger and _z(before, now) >= RISEN_Z


def _soared(before: Mean, now: Mean) -> bool:
    most = before.value + _stderr(before, now)
    return _higher(before, now) and now.low >= max(SOARED * most, before.value + RISEN_NATS)


def _z(before: Mean, now: Mean) -> float:
    return now.above(replace(before, stderr=_stderr(before, now)))


def _stderr(before: Mean, now: Mean) -> float:
    """Of ``before``, by the larger of the two scatters from step to step: a window that is low by
    luck is one of little scatter too, and the first step alone has none."""
    return max(before.stderr, now.stderr * math.sqrt(now.count / before.count))


def _foreseen(entropy: tuple[Mean, Mean], kl: tuple[Mean, Mean]) -> tuple[float, float]:
    """entropy / (entropy + reverse KL) at the start and now; the estimate of the latter may be
    negative."""
    first, last = (
        own.value / (own.value + max(far.value, 0.0)) if own.value > 0 else 0.0
        for own, far in zip(entropy, kl, strict=True)
    )
    return first, last


def _fell_to(first: float, last: float) -> bool:
    return first > 0 and last <= COLLAPSED * first


def _from_to(name: str, before: Mean, now: Mean) -> str:
    first, last = f"{before.value:.3g} nats {before.steps}", f"{now.value:.3g} nats {now.steps}"
    return f"{name} went from {first} to {last}"
