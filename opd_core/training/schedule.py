"""The learning rate of every optimizer step."""

from __future__ import annotations

import math

from opd_core.config.student import TrainingConfig


def learning_rate_factor(optimizer_step: int, training: TrainingConfig) -> float:
    """What ``training.learning_rate`` is multiplied by at a 0-based optimizer step.

    With W = max(warmup_steps, 1) and T = steps * optimizer_steps_per_batch::

        step < W    (step + 1) / W                            rises to 1 at step W - 1
        later       p = (step + 1 - W) / (T - W)              falls to f at step T - 1
            constant    1
            linear      1 - (1 - f) * p
            cosine      f + (1 - f) * (1 + cos(pi * p)) / 2

    f = final_learning_rate / learning_rate. Where the warm-up takes all T steps, nothing falls. The
    warm-up is that of Goyal et al. 2017, "Accurate, Large Minibatch SGD", the cosine equation 5 of
    Loshchilov & Hutter 2017, "SGDR", without restarts.
    """
    warmup = max(training.warmup_steps, 1)
    if optimizer_step < warmup:
        return (optimizer_step + 1) / warmup
    if training.schedule == "constant":
        return 1.0
    total = training.steps * training.optimizer_steps_per_batch
    # An optimizer's scheduler also asks for the step after the last.
    progress = min(1.0, (optimizer_step + 1 - warmup) / max(total - warmup, 1))
    remaining = (
        1 - progress if training.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    )
    final = training.final_learning_rate / training.learning_rate
    return final + (1 - final) * remaining
