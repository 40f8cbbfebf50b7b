"""A comparison as the surfaces get it: three arms of three seeds, a teacher's line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd_core.analysis.outcome import (
    AXES,
    Arm,
    ArmCurve,
    ArmRun,
    Comparison,
    Difference,
    Interval,
    Pair,
    ReferenceValue,
    Target,
)

MODELS = (
    "These very models on new questions of this kind; not what another training run would give."
)
TRAINING = "New training runs with other seeds, on these questions; not other models or data."
PER_STEP = {
    "steps": 1.0,
    "student_tokens": 8200.0,
    "teacher_tokens": 10300.0,
    "device_seconds": 2.5,
    "money": 0.002,
}
EVERY, STEPS = 5, 40
AT = STEPS * PER_STEP["student_tokens"]


def interval(low: float, high: float, covers: str, p: float = 0.04) -> Interval:
    units = 256 if covers == MODELS else 3
    return Interval(low, high, p, units, "bootstrap" if covers == MODELS else "t", covers)


def arm(label: str, reached: float, seeds: Sequence[int] = (1, 2, 3), number: int = 0) -> Arm:
    """An arm whose accuracy climbs to ``reached``."""
    random = np.random.default_rng(number)
    steps = np.arange(0, STEPS + 1, EVERY)
    climb = 1 - np.exp(-steps / 12)
    shapes = {
        "eval/accuracy": 0.12 + (reached - 0.12) * climb / climb[-1],
        "opd_reverse_kl": 0.9 - 0.8 * reached * climb,
        "rollout/response_tokens_mean": 6 + 2 * climb * (number + 1),
        "entropy": 1.1 - 0.7 * climb * (1 + number / 5),
    }
    curves = []
    for metric, y in shapes.items():
        noise = 0.02 * np.abs(y) * (1 + random.random(len(y)))
        for axis in AXES if metric == "eval/accuracy" else AXES[:2]:
            x = steps * PER_STEP[axis] * (1 + 0.1 * number * (axis != "steps"))
            points = (x, y, y - noise, y + noise)
            curves.append(ArmCurve(metric, axis, *(tuple(map(float, each)) for each in points)))
    runs = tuple(
        ArmRun(f"tiny-2026{number}-{seed:04x}", seed, STEPS, AT, reached + 0.01 * (seed - 2))
        for seed in seeds
    )
    return Arm(label, number == 0, runs, reached, None, None, tuple(curves))


def pair(
    label: str,
    difference: float,
    verdict: str,
    half: float = 0.03,
    more_seeds: int | None = None,
    beyond: bool | None = None,
) -> Pair:
    sentence = {
        "better": f"{label} is better than pure OPD by {100 * difference:.1f} points",
        "worse": f"{label} is worse than pure OPD by {-100 * difference:.1f} points",
        "cannot tell": f"It cannot be told whether {label} differs from pure OPD",
        "no difference": f"{label} and pure OPD do not differ by more than 2 points",
    }[verdict]
    return Pair(
        label=label,
        baseline="pure OPD",
        difference=difference,
        models=interval(difference - half / 2, difference + half / 2, MODELS),
        training=interval(difference - half, difference + half, TRAINING, 0.0004),
        basis="training",
        p=0.0004,
        holm_p=0.0008,
        verdict=verdict,
        sentence=f"{sentence} in held-out accuracy at 328,000 student tokens (3 seeds each).",
        beyond_margin=beyond,
        more_seeds=more_seeds,
        questions=256,
        left_out=2,
    )


def example() -> Comparison:
    """Mixed advantage is better than pure OPD, task reward only is worse."""
    return Comparison(
        target=Target(),
        at=AT,
        lower_is_better=False,
        axes=AXES,
        arms=(
            arm("pure OPD", 0.71),
            arm("opd.task_adv_weight=0.5", 0.76, number=1),
            arm("opd=null task_adv_weight=1", 0.70, number=2),
        ),
        pairs=(
            pair("opd.task_adv_weight=0.5", 0.05, "better", beyond=True),
            pair("opd=null task_adv_weight=1", -0.01, "cannot tell", more_seeds=14),
        ),
        differences=(
            Difference(
                "recipe",
                "opd.task_adv_weight",
                (("pure OPD", "0"), ("opd.task_adv_weight=0.5", "0.5")),
            ),
            Difference(
                "code",
                "git_commit",
                (("pure OPD", "279ef4300aab"), ("opd.task_adv_weight=0.5", "d51323e")),
            ),
            Difference(
                "packages",
                "torch",
                (("tiny-20260-0001", "2.13.0"), ("tiny-20260-0002", "2.12.1 <a|b>")),
            ),
        ),
        references=(ReferenceValue("teacher", 0.93, interval(0.9, 0.95, MODELS), 256),),
        warnings=(
            "the runs ended at different train steps: compared at 40, the last that all had",
        ),
    )
