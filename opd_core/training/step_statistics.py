"""What one train step was like: gathered on the device, told once, the same on every rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from opd_core.objective.advantages import OPDAdvantages
from opd_core.objective.importance import ImportanceWeights
from opd_core.objective.loss import PolicyLoss
from opd_core.objective.metrics import (
    gather_tokens,
    group_stderr,
    reverse_kl_metrics,
    teacher_metrics,
)
from opd_core.training.batch import TrainBatch
from opd_core.training.packing import MicroBatch

# k, A, its OPD term, clamped, source, old logprob, |rollout - old|, staleness, reference k,
# importance weight, truncated
TOKEN_COLUMNS = 11


class StepStatistics:
    """Grows by a micro-batch at a time; nothing waits for the device before :meth:`told`."""

    def __init__(self, device: torch.device) -> None:
        self._tokens = [torch.zeros((0, TOKEN_COLUMNS), dtype=torch.float64, device=device)]
        self._rollouts = [torch.zeros((0, 2), dtype=torch.float64, device=device)]
        self._groups: list[int] = []
        self._clipped = torch.zeros((), dtype=torch.float64, device=device)
        self._grad_norm = torch.zeros((), dtype=torch.float64, device=device)
        self._referred = self._weighed = False
        self.optimizer_steps = 0
        self.teacher_grad_norm: Tensor | None = None

    def add(
        self,
        micro: MicroBatch,
        *,
        k: Tensor,
        made: OPDAdvantages,
        old: Tensor,
        reference: Tensor | None,
        weighed: ImportanceWeights | None,
        outcome: PolicyLoss,
    ) -> None:
        """Take in one micro-batch; ``reference`` is its reference k, if there is one."""
        self._referred, self._weighed = reference is not None, weighed is not None
        none = torch.zeros_like(k)
        gap = (micro.rollout_logprobs - old).abs()
        columns = (
            *(k, made.advantages, made.opd_term, made.clamped, micro.source_index),
            *(old, gap, micro.staleness),
            none if reference is None else reference,
            *(weighed or (none, none)),
        )
        rows = torch.stack([column.detach().double().flatten() for column in columns], dim=1)
        rows = rows.index_select(0, micro.flat)
        self._tokens.append(rows)
        of_rollout = micro.rollout_index.flatten().index_select(0, micro.flat)
        pairs = torch.stack([rows[:, 0], torch.ones_like(rows[:, 0])], dim=1)
        sums = rows.new_zeros(len(micro.samples), 2).index_add(0, of_rollout, pairs)
        self._rollouts.append(sums)
        self._groups += (sample.rollout[0] for sample in micro.samples)
        self._clipped += outcome.clipped_tokens

    def _stderr(self) -> Tensor:
        """Of the mean k, by group: the rollouts of one may lie on several ranks."""
        rollouts = torch.cat(self._rollouts)
        groups = rollouts.new_tensor(self._groups)  # exact up to 2^53
        columns = gather_tokens(torch.column_stack([rollouts, groups])).cpu().unbind(1)
        return group_stderr(*columns).to(rollouts.device)

    def stepped(self, grad_norm: Tensor) -> None:
        """An optimizer step was taken."""
        self._grad_norm = torch.maximum(self._grad_norm, grad_norm.detach().double())
        self.optimizer_steps += 1

    def told(self, batch: TrainBatch) -> dict[str, float]:
        """The step's metrics. A collective, and the only wait for the device."""
        tokens = gather_tokens(torch.cat(self._tokens))
        k, advantages, opd_term, clamped, source, *others = tokens.unbind(1)
        old, gap, staleness, far, weights, truncated = others
        metrics = reverse_kl_metrics(
            reverse_kl=k,
            advantages=advantages,
            clamped=clamped,
            source_index=source,
            sources=batch.sources,
        )
        metrics["opd_reverse_kl_stderr"] = self._stderr()
        if batch.scored:
            metrics |= teacher_metrics(old_logprobs=old, reverse_kl=k, opd_term=opd_term)
        else:
            metrics = {n: v for n, v in metrics.items() if not n.startswith("opd_")}
        if dist.is_initialized():
            dist.all_reduce(self._clipped)
        count = max(len(tokens), 1)
        # Of what temperature 1 sampled this mean is an unbiased estimate of the entropy; with
        # another sampling.temperature (possible with opd: null) it is a cross-entropy.
        metrics["entropy"] = (-old).sum() / count
        metrics["ratio_clipped_fraction"] = self._clipped / count
        metrics["staleness_mean"] = staleness.sum() / count
        metrics["staleness_max"] = staleness.amax() if len(tokens) else staleness.new_zeros(())
        gaps = {"engine_logprob_gap": staleness == 0, "stale_logprob_gap": staleness > 0}
        for name, member in gaps.items():
            metrics[name] = torch.where(member, gap, 0.0).sum() / member.sum()
        metrics["grad_norm"] = self._grad_norm
        if self.teacher_grad_norm is not None:
            metrics["grad_norm_teacher"] = self.teacher_grad_norm
        if self._referred:
            metrics["reference_kl"] = far.sum() / count
        if self._weighed:
            metrics["importance_weight_mean"] = weights.sum() / count
            metrics["importance_truncated_fraction"] = truncated.sum() / count
        values = torch.stack([value.double() for value in metrics.values()]).tolist()
        told = dict(zip(metrics, values, strict=True))
        for name in gaps:
            if math.isnan(told[name]):  # 0 / 0: there is no such token
                del told[name]
        told["optimizer_steps"] = float(self.optimizer_steps)
        return told | ({"opd_baseline": batch.baseline} if batch.scored else {})
