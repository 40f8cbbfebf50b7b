"""Series of made runs: sound ones, and with what a test changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from opd_core.analysis.detectors import Finding, RunFacts, detect
from opd_core.analysis.run_data import Series

PURE = RunFacts(
    scored=True,
    exact=False,
    judged=True,
    task_adv_weight=0.0,
    opd_adv_weight=1.0,
    kl_clamp=None,
    max_new_tokens=48,
)
MIXED = replace(PURE, task_adv_weight=1.0)
TASK_ONLY = replace(PURE, scored=False, task_adv_weight=1.0, opd_adv_weight=0.0)
SOUND: dict[str, float] = {
    "time/step_s": 1.0,
    "opd_reverse_kl": 0.3,
    "opd_reverse_kl_stderr": 0.03,
    "opd_abs_logprob_diff": 0.4,
    "opd_clamped_fraction": 0.0,
    "entropy": 0.3,
    "teacher_logprob_std": 2.0,
    "advantage_mean": 0.0,
    "advantage_std": 1.0,
    "advantage_min": -5.0,
    "advantage_max": 2.0,
    "advantage_opd_std": 1.0,
    "advantage_top1pct_share": 0.3,
    "response_tokens": 2500.0,
    "engine_logprob_gap": 0.01,
    "grad_norm": 0.5,
    "grad_norm_teacher": 0.5,
    "rollout/response_tokens_mean": 20.0,
    "rollout/truncated_fraction": 0.05,
    "rollout/eos_fraction": 0.95,
    "rollout/reward_mean": 0.5,
    "rollout/end_token_kl": 0.1,
    "groups/completed": 90.0,
    "groups/failed": 10.0,
    "lost/timeout": 10.0,
    "survivors/bias_z": 1.0,
    "survivors/failed_response_tokens_mean": 25.0,
}
Change = float | None | Callable[[int], float]


def series_of(steps: int, changes: Mapping[str, Change]) -> Series:
    """A run of so many train steps: sound but for the changes, of which None takes a metric
    away."""
    values: dict[str, dict[int, float]] = {}
    for name, change in {**SOUND, **changes}.items():
        if change is not None:
            made = change if callable(change) else lambda step, value=change: value
            values[name] = {step: made(step) for step in range(1, steps + 1)}
    return Series(values)


def found(facts: RunFacts, steps: int = 20, **changes: Change) -> dict[str, Finding]:
    """What is found, by name; a double underscore stands for the slash in a metric's name."""
    named = {name.replace("__", "/"): change for name, change in changes.items()}
    findings = detect(series_of(steps, named), facts)
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def falling(first: float, last: float, at: int = 10) -> Callable[[int], float]:
    """``first`` until a train step, then ``last``."""
    return lambda step: first if step < at else last


def then(before: float, now: float, noise: float = 0.0) -> Callable[[int], float]:
    """``before`` in train steps 1 to 5, then ``now`` on average over 6 to 10."""
    return lambda step: before if step <= 5 else now + noise * (step - 8)


def soaring(before: float, now: float) -> Callable[[int], float]:
    """``before`` in train step 1, then ``now``."""
    return falling(before, now, 2)


def extreme(*steps: int, low: float = -900.0, std: float = 20.0) -> dict[str, Change]:
    """A token of an impossible score in these train steps, among 2500 tokens."""
    return {
        "advantage_min": lambda step: low if step in steps else -5.0,
        "advantage_std": lambda step: std if step in steps else 1.0,
    }
