"""One rank's model and optimizer: a batch in, an update done, metrics out.

Loss and gradients are sums over this rank's tokens divided by the valid tokens of all ranks, so
gradients of ranks are added, never averaged.

The weights that the optimizer holds, and those that are saved, are fp32 whatever ``student.dtype``
says: a bf16 number near 1 has a spacing of 2**-7 and would swallow an update of 1e-6. The forward
pass runs in ``student.dtype`` under autocast (mixed precision, Micikevicius et al. 2018).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opd_core.config import OPDConfig, TrainingConfig
from opd_core.errors import TrainingError
from opd_core.objective.advantages import OPDAdvantages, opd_advantages, reverse_kl
from opd_core.objective.logprobs import token_logprobs
from opd_core.objective.loss import policy_loss
from opd_core.objective.metrics import gather_tokens, reverse_kl_metrics, rollout_stderr
from opd_core.training.batch import MiniBatch, PaddedBatch, TrainBatch, collate, micro_batches
from opd_core.training.models import cpu_weights, pad_id, save_model

TOKEN_COLUMNS = 5  # k, A, clamped, source, |rollout - old|


@dataclass(slots=True)
class _StepStatistics:
    """What accumulates on the device over a train step."""

    tokens: list[Tensor]
    rollouts: list[Tensor]
    clipped: Tensor
    grad_norm: Tensor
    optimizer_steps: int = 0


class Learner:
    """Holds one replica of the student and its optimizer.

    ``model`` is in float32; ``dtype`` is the student's: of the forward pass and of the weights that
    are handed out.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        training: TrainingConfig,
        opd: OPDConfig | None,
        dtype: str = "float32",
    ) -> None:
        self.model = model.train()
        self.tokenizer = tokenizer
        self.device = model.device
        self._training = training
        self._opd = opd
        self._dtype: torch.dtype = getattr(torch, dtype)
        if training.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=training.learning_rate,
            betas=training.betas,
            weight_decay=training.weight_decay,
        )
        warmup = max(training.warmup_steps, 1)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on this rank's part of a batch; the metrics are those of all ranks.

        Raises :class:`TrainingError` if the gradient is not finite; the weights are then as before.
        """
        zero = torch.zeros((), device=self.device)
        stats = _StepStatistics(tokens=[], rollouts=[], clipped=zero, grad_norm=zero)
        old = self._old_logprobs(batch) if len(batch.mini_batches) > 1 else None
        for number, mini in enumerate(batch.mini_batches):
            self._optimizer_step(mini, batch, old[number] if old else None, stats)
        return self._metrics(batch, stats)

    def weights(self) -> dict[str, Tensor]:
        """The current weights on the host, in the dtype that the samplers hold."""
        return cpu_weights(self.model, self._dtype)

    def save(self, path: Path) -> Path:
        """Write the student in Hugging Face format, in fp32."""
        return save_model(self.model, self.tokenizer, path)

    def _logprobs(self, padded: PaddedBatch) -> Tensor:
        """[B, T] in fp32; a forward in a shorter dtype keeps the log-softmax in fp32."""
        mixed = self._dtype != torch.float32
        with torch.autocast(self.device.type, self._dtype) if mixed else nullcontext():
            # Right padding under causal attention: no valid position ever sees a pad.
            body = self.model.base_model(input_ids=padded.token_ids, use_cache=False)
            head = self.model.get_output_embeddings()
            return token_logprobs(
                body.last_hidden_state,
                head.weight,
                padded.token_ids,
                head_bias=head.bias,
                chunk_tokens=self._training.logprob_chunk_tokens,
            )

    def _padded(self, mini: MiniBatch) -> list[PaddedBatch]:
        pad = pad_id(self.tokenizer)
        parts = micro_batches(mini.samples, self._training.micro_batch_tokens)
        return [collate(part, pad, self.device) for part in parts]

    @torch.no_grad()
    def _old_logprobs(self, batch: TrainBatch) -> list[list[Tensor]]:
        """Logprobs before the first optimizer step, for batches that take several."""
        return [[self._logprobs(p) for p in self._padded(mini)] for mini in batch.mini_batches]

    def _optimizer_step(
        self, mini: MiniBatch, batch: TrainBatch, old: list[Tensor] | None, stats: _StepStatistics
    ) -> None:
        if mini.valid_tokens == 0:
            return  # on all ranks alike: the count is the whole mini-batch's
        for number, padded in enumerate(self._padded(mini)):
            logprobs = self._logprobs(padded)
            # One optimizer step a batch: ratio 1, the forward's own logprobs are the old ones.
            before = old[number] if old else logprobs.detach()
            k, made = self._advantages(padded, before, batch)
            outcome = policy_loss(
                logprobs=logprobs,
                old_logprobs=before,
                advantages=made.advantages,
                response_mask=padded.response_mask,
                valid_tokens=mini.valid_tokens,
                clip_low=self._training.clip_low,
                clip_high=self._training.clip_high,
                dual_clip=self._training.dual_clip,
            )
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            stats.clipped = stats.clipped + outcome.clipped_tokens
            stats.tokens.append(_token_rows(padded, k, made, before))
            stats.rollouts.append(
                torch.stack([k.detach().double().sum(1), padded.response_mask.sum(1)], dim=1)
            )
        stats.grad_norm = torch.maximum(stats.grad_norm, self._apply_gradient())
        stats.optimizer_steps += 1

    def _advantages(
        self, padded: PaddedBatch, old: Tensor, batch: TrainBatch
    ) -> tuple[Tensor, OPDAdvantages]:
        k = torch.zeros_like(old)
        if batch.scored:
            k = reverse_kl(old, padded.teacher_logprobs, padded.response_mask)
        opd = self._opd
        made = opd_advantages(
            reverse_kl=k,
            response_mask=padded.response_mask,
            task_advantages=padded.task_advantages,
            task_adv_weight=opd.task_adv_weight if opd else 1.0,
            opd_adv_weight=opd.opd_adv_weight if opd else 0.0,
            kl_clamp=opd.kl_clamp if opd else None,
            baseline=batch.baseline,
        )
        return k, made

    def _apply_gradient(self) -> Tensor:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if dist.is_initialized():
            for parameter in parameters:
                if parameter.grad is None:  # this rank had no sample; the others did
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._training.max_grad_norm)
        # A NaN gradient would spoil the weights for good, so this one wait for the device is spent.
        if not math.isfinite(norm.item()):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the gradient norm is {norm.item()}; the weights were not touched. Look for "
                "infinite logprobs in the batch, or lower training.learning_rate"
            )
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.detach()

    def _metrics(self, batch: TrainBatch, stats: _StepStatistics) -> dict[str, float]:
        empty = torch.zeros((0, TOKEN_COLUMNS), dtype=torch.float64, device=self.device)
        tokens = gather_tokens(torch.cat([empty, *stats.tokens]))
        metrics = reverse_kl_metrics(
            reverse_kl=tokens[:, 0],
            advantages=tokens[:, 1],
            clamped=tokens[:, 2],
            source_index=tokens[:, 3],
            sources=batch.sources,
        )
        sums, counts = gather_tokens(torch.cat([empty[:, :2], *stats.rollouts])).unbind(1)
        metrics["opd_reverse_kl_stderr"] = rollout_stderr(sums, counts)
        if not batch.scored:
            metrics = {n: v for n, v in metrics.items() if not n.startswith("opd_")}
        clipped = stats.clipped.double()
        if dist.is_initialized():
            dist.all_reduce(clipped)
        count = max(len(tokens), 1)
        metrics["ratio_clipped_fraction"] = clipped / count
        metrics["engine_logprob_gap"] = tokens[:, 4].sum() / count
        metrics["grad_norm"] = stats.grad_norm.double()
        names, values = list(metrics), torch.stack([v.double() for v in metrics.values()])
        told = dict(zip(names, values.tolist(), strict=True))
        told["learning_rate"] = float(self._schedule.get_last_lr()[0])
        told["optimizer_steps"] = float(stats.optimizer_steps)
        return told | ({"opd_baseline": batch.baseline} if batch.scored else {})


def _token_rows(padded: PaddedBatch, k: Tensor, made: OPDAdvantages, old: Tensor) -> Tensor:
    """[N, 5] of the micro-batch's valid tokens, in fp64."""
    gap = (padded.rollout_logprobs - old).abs()
    columns = (k, made.advantages, made.clamped, padded.source_index, gap)
    rows = torch.stack([column.detach().double().flatten() for column in columns], dim=1)
    return rows.index_select(0, padded.flat)
