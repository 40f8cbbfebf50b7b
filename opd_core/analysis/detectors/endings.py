"""Answers that do not end as the teacher ends them, or do not end at all."""

from __future__ import annotations

from opd_core.analysis.detectors.finding import Finding, Level, RunFacts
from opd_core.analysis.detectors.history import History, Mean

LENGTH, TRUNCATED = "rollout/response_tokens_mean", "rollout/truncated_fraction"

END_STEPS = 3
"""Train steps, each the mean over its rollouts."""
END_NATS = 5.0
"""The teacher gives the end token less than a hundredth of the student's chance. One that would
only write longer still ends now and then, at 1 to 2 nats."""
END_OVER_MEAN = 3.0
"""And the end must stand out from what the teacher thinks of all tokens."""
CUT = 0.5
"""Share of truncated answers; by tokens they are then the larger part."""
LONGER = 1.5
"""Growth of the mean answer that is no drift, where also more of them are cut."""
CUT_MORE = 0.1
MUCH_LONGER = 3.0
"""Growth that is told also where nothing is cut yet."""
SURE_Z = 3.0


def ending_mismatch(history: History, facts: RunFacts) -> Finding | None:
    """End token or chat template differ between the two, answers grow without end, or the limit
    of length is too low. Only the last may be meant."""
    if evidence := _disliked_end(history) if facts.scored else "":
        level: Level = "warning"
        cause = (
            "the teacher hardly ever ends where the student does: its end token or chat template "
            "is another one, or it writes far longer answers"
        )
        cure = (
            "compare renderings and end tokens with `opd check`, and give student.model the chat "
            "template of the teacher"
        )
    elif evidence := _growing(history):
        level = "warning"
        cause = "training lengthens the answers, until they are cut before they end"
        cure = (
            "look for what rewards length (task.judge, or an end token that the teacher does not "
            "use), lower training.learning_rate, or set training.truncated: mask"
        )
    elif evidence := _much_longer(history):
        level = "note"
        cause = "training lengthens the answers, which may end at the limit and costs time already"
        cure = (
            "nothing, if the teacher is to teach longer answers; else look for what rewards length "
            "(task.judge, or an end token that the teacher does not use)"
        )
    elif evidence := _cut_from_the_start(history, facts):
        level = "note"
        cause = "most answers are cut before they end, and are trained and judged unfinished"
        cure = "raise sampling.max_new_tokens, or set training.truncated: mask or drop"
    else:
        return None
    return Finding("ending_mismatch", history.train_step, level, evidence, cause, cure)


def _disliked_end(history: History) -> str:
    end = history.now("rollout/end_token_kl", END_STEPS)
    mean = history.now("opd_reverse_kl", END_STEPS)
    if not (end and mean) or end.value < max(END_NATS, END_OVER_MEAN * mean.value):
        return ""
    ended = history.now("rollout/eos_fraction", END_STEPS)
    share = f", rollout/eos_fraction {ended.value:.0%}" if ended else ""
    return (
        f"rollout/end_token_kl is {end.value:.3g} nats and opd_reverse_kl {mean.value:.3g} "
        f"{end.steps}{share}"
    )


def _growing(history: History) -> str:
    before, now = history.at_start(TRUNCATED), history.now(TRUNCATED)
    if before and now and before.value < CUT <= now.value - now.stderr:
        return f"{TRUNCATED} went from {before.value:.0%} {before.steps} to {_shown(now)}"
    length, cut = history.change(LENGTH), history.change(TRUNCATED)
    if not (length and cut):
        return ""
    if (
        not _grown(length, LONGER)
        or cut[1].value < cut[0].value + CUT_MORE
        or cut[1].above(cut[0]) < SURE_Z
    ):
        return ""
    return f"{_lengths(length)}, {TRUNCATED} from {cut[0].value:.0%} to {cut[1].value:.0%}"


def _much_longer(history: History) -> str:
    length = history.change(LENGTH)
    return _lengths(length) if length and _grown(length, MUCH_LONGER) else ""


def _grown(length: tuple[Mean, Mean], factor: float) -> bool:
    before, now = length
    return now.value >= factor * before.value and now.above(before) >= SURE_Z


def _lengths(length: tuple[Mean, Mean]) -> str:
    before, now = length
    return f"{LENGTH} went from {before.value:.3g} {before.steps} to {now.value:.3g} {now.steps}"


def _cut_from_the_start(history: History, facts: RunFacts) -> str:
    cut = history.now(TRUNCATED)
    if not cut or cut.value - cut.stderr < CUT:
        return ""
    return f"{TRUNCATED} is {_shown(cut)} (sampling.max_new_tokens {facts.max_new_tokens})"


def _shown(share: Mean) -> str:
    return f"{share.value:.0%} {share.steps}"
