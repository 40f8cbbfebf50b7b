"""Numbers that training cannot trust: another engine's logprobs, a few extreme tokens, and none."""

from __future__ import annotations

import math
from collections.abc import Mapping

from opd_core.analysis.detectors.finding import Finding, RunFacts
from opd_core.analysis.detectors.history import History, in_steps

GAP_STEPS = 3
GAP_NATS = 0.1
"""Mean |rollout - old logprob| of one token under the same weights. Engines in bfloat16 differ by
0.01 to 0.03; at 0.1 the sampled tokens are another policy's."""
GAP_LARGE_NATS = 0.05
"""No rounding of one model, and not yet another policy."""
GAP_PART = 0.5
"""Of mean |k|: the engines differ by half of what the teacher says."""
GAP_FLOOR = 0.035
"""Below, a gap is rounding, however near the student is to its teacher."""

WATCHED = ("opd_reverse_kl", "grad_norm", "loss", "entropy")
"""What is a number in every sound train step that has it."""
NO_NUMBERS = 3
"""Train steps in a row: a single one may be an overflow that was left behind."""

TOP = "advantage_top1pct_share"
ENOUGH_TOKENS = 200
"""Response tokens from which a hundredth of them should not outweigh the others."""
OF_FIVE, DOMINATED = 5, 2
"""Train steps looked at, and how many of them must show it: one token in one step is an accident
that training.max_grad_norm bounds."""
EXTREME = 30.0
"""|A| over the larger weight. A sampled token to which a teacher gives exp(-30) is no judgement of
a language model; in a sound run without a clamp the largest is 21. A clamp, or a group's reward,
never gets there. Tails that are only heavy are no fault: near its end a sound run has an
advantage_top1pct_share of 0.9, since the student errs at few tokens."""
ONE_SHARE = 0.1
"""Of the squared advantages (about their mean), held by the largest token."""
TOP_SHARE = 0.5
"""Or of sum |A|, held by the largest hundredth: extreme tokens in every answer. A few of them do
not get there under opd.kl_baseline, which spreads them over all others."""


def not_finite(history: History, facts: RunFacts) -> Finding | None:
    """What training computes is no number any more."""
    steps = list(history.recent)[-NO_NUMBERS:]
    names = [
        name
        for name in WATCHED
        if all(not math.isfinite(step.metrics.get(name, 0.0)) for step in steps)
    ]
    if len(steps) < NO_NUMBERS or not names:
        return None
    return Finding(
        "not_finite",
        history.train_step,
        "error",
        f"{', '.join(names)} not finite {in_steps(steps[0].train_step, steps[-1].train_step)}",
        "the weights or the scores are no numbers any more, and nothing is learned from them",
        "begin again from a checkpoint before these train steps with `opd run --fork`, at a lower "
        "training.learning_rate; if only opd_reverse_kl is concerned look at the teacher with "
        "`opd probe`",
    )


def engine_gap(history: History, facts: RunFacts) -> Finding | None:
    """What samples is not what trains."""
    gap = history.now("engine_logprob_gap", GAP_STEPS)
    distance = history.now("opd_abs_logprob_diff", GAP_STEPS) if facts.scored else None
    if not gap:
        return None
    drowned = distance is not None and gap.value >= GAP_PART * distance.value
    if gap.value < (GAP_FLOOR if drowned else GAP_LARGE_NATS):
        return None
    beside = f"; opd_abs_logprob_diff {distance.value:.2g}" if distance else ""
    return Finding(
        "engine_gap",
        history.train_step,
        "error" if gap.value >= GAP_NATS else "warning",
        f"engine_logprob_gap is {gap.value:.2g} nats a token {gap.steps}{beside}",
        "the engine that samples gives its tokens other logprobs than the one that trains, under "
        "what should be the same weights: the rollouts are not the student's own",
        "check that sampling.server.dtype and student.dtype agree, that sampling.weight_sync "
        "brings all weights (a server's log says what it loaded), and keep "
        "training.importance_cap on",
    )


def advantage_dominated(history: History, facts: RunFacts) -> Finding | None:
    """A few tokens of impossible scores decide the gradient of their train steps."""
    weight = max(facts.task_adv_weight, facts.opd_adv_weight)
    looked = list(history.recent)[-OF_FIVE:]
    found = [step for step in looked if _dominated(step.metrics, weight)]
    if len(found) < DOMINATED:
        return None
    m = found[-1].metrics
    return Finding(
        "advantage_dominated",
        history.train_step,
        "warning",
        f"in {len(found)} of the last {len(looked)} train steps a few tokens have most of the "
        f"advantage; in train step {found[-1].train_step} advantage_min is "
        f"{m['advantage_min']:.4g}, advantage_max {m['advantage_max']:.4g} at an advantage_std of "
        f"{m['advantage_std']:.2g} over {m['response_tokens']:.0f} tokens ({TOP} {m[TOP]:.0%})",
        "the gradient follows a few extreme scores, not what the teacher says of the answers",
        "set opd.kl_clamp (5), and look at those tokens in the report: often they are special "
        "tokens of a template, or a score that is no logprob",
    )


def _dominated(m: Mapping[str, float], weight: float) -> bool:
    needed = ("advantage_min", "advantage_max", "advantage_mean", "advantage_std")
    if not all(name in m for name in (*needed, TOP, "response_tokens")):
        return False
    low, high, mean, std = (m[name] for name in needed)
    count = m["response_tokens"]
    if count < ENOUGH_TOKENS or max(high, -low) < EXTREME * weight:
        return False
    off = max(high - mean, mean - low)
    return off * off >= ONE_SHARE * (count - 1) * std * std or m[TOP] >= TOP_SHARE
