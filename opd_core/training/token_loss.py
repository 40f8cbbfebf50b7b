"""From the logprobs of a micro-batch to its share of the loss, as the recipe has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opd_core.config import OPDConfig, TrainingConfig
from opd_core.objective.advantages import OPDAdvantages, opd_advantages, reverse_kl
from opd_core.objective.importance import ImportanceWeights, importance_weights
from opd_core.objective.loss import PolicyLoss, policy_loss
from opd_core.training.batch import MiniBatch, TrainBatch
from opd_core.training.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The objective with a recipe's weights and bounds. Per-token fields are those of a
    micro-batch, [B, T]; ``old`` are its logprobs before the batch's first optimizer step."""

    training: TrainingConfig
    opd: OPDConfig | None
    importance_cap: float | None

    @property
    def teacher_trains(self) -> bool:
        """Whether a part of the gradient is the teacher's."""
        return self.opd is not None and self.opd.opd_adv_weight > 0

    @property
    def others_train(self) -> bool:
        """Whether a part of it is not: the task reward's, or the reference's."""
        task = self.opd is None or self.opd.task_adv_weight > 0
        return task or self.training.reference_kl_weight > 0

    def advantages(
        self, micro: MicroBatch, old: Tensor, reference: Tensor | None, batch: TrainBatch
    ) -> tuple[Tensor, OPDAdvantages]:
        """k in nats, and the advantages; without ``reference``, its k, they lack that term."""
        k = torch.zeros_like(old)
        if batch.scored:
            k = reverse_kl(old, micro.teacher_logprobs, micro.response_mask)
        opd = self.opd
        made = opd_advantages(
            reverse_kl=k,
            response_mask=micro.response_mask,
            task_advantages=micro.task_advantages,
            task_adv_weight=opd.task_adv_weight if opd else 1.0,
            opd_adv_weight=opd.opd_adv_weight if opd else 0.0,
            kl_clamp=opd.kl_clamp if opd else None,
            baseline=batch.baseline,
            reference_kl=reference,
            reference_kl_weight=0.0 if reference is None else self.training.reference_kl_weight,
        )
        return k, made

    def weights(self, micro: MicroBatch, old: Tensor) -> ImportanceWeights | None:
        """Of tokens that another policy may have sampled; None where all weigh 1."""
        if self.importance_cap is None:
            return None
        return importance_weights(
            old_logprobs=old,
            rollout_logprobs=micro.rollout_logprobs,
            response_mask=micro.response_mask,
            cap=self.importance_cap,
        )

    def loss(
        self,
        mini: MiniBatch,
        micro: MicroBatch,
        *,
        logprobs: Tensor,
        old: Tensor,
        advantages: Tensor,
        weighed: ImportanceWeights | None,
    ) -> PolicyLoss:
        """The micro-batch's share of the loss of ``mini``."""
        return policy_loss(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            response_mask=micro.response_mask,
            valid_tokens=mini.valid_tokens,
            importance_weights=weighed.weights if weighed else None,
            clip_low=self.training.clip_low,
            clip_high=self.training.clip_high,
            dual_clip=self.training.dual_clip,
        )
