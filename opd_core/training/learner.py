"""One rank's part of the student and its optimizer: a batch in, an update done, metrics out.

Every rank gets the whole batch and takes its own part. Loss and gradients are sums over tokens
divided by the valid tokens of all ranks, so gradients of micro-batches and ranks are added, never
averaged, and the update does not depend on how the batch is cut.

The weights that the optimizer holds, and those that are saved, are fp32 whatever ``student.dtype``
says: a bf16 number near 1 has a spacing of 2**-7 and would swallow an update of 1e-6. The forward
pass runs in ``student.dtype`` under autocast (mixed precision, Micikevicius et al. 2018).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from opd_core.config import OPDConfig, StudentConfig, TrainingConfig
from opd_core.errors import TrainingError
from opd_core.objective.advantages import reverse_kl
from opd_core.training import lora
from opd_core.training.attention import use_packed_attention, why_not_packed
from opd_core.training.batch import MiniBatch, TrainBatch
from opd_core.training.checkpoint import Checkpointer
from opd_core.training.models import checkpoint_state, pad_id, save_model, save_weights
from opd_core.training.packing import MicroBatch, collate, plan
from opd_core.training.policy import StudentPolicy
from opd_core.training.schedule import learning_rate_factor
from opd_core.training.sharding import rank_and_ranks, shard, tied_names, whole, whole_state
from opd_core.training.step_statistics import StepStatistics
from opd_core.training.token_loss import TokenLoss

MakeOptimizer = Callable[[list[nn.Parameter], TrainingConfig], torch.optim.Optimizer]


class Learner:
    """Holds this rank's part of the student and its optimizer.

    ``model`` is in float32, whole; where ranks have joined it is sharded over them here, on
    ``device``. Making a learner, and all of its methods, are collectives. ``importance_cap`` bounds
    the tokens' importance weights; without it they are 1. ``make_optimizer`` is a seam: AdamW
    unless given.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        student: StudentConfig,
        training: TrainingConfig,
        opd: OPDConfig | None,
        *,
        device: torch.device,
        seed: int = 0,
        importance_cap: float | None = None,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.model = model.train()
        self.tokenizer = tokenizer
        self.device = device
        self._student = student
        self._training = training
        self._objective = TokenLoss(training, opd, importance_cap)
        self._rank, self._ranks = rank_and_ranks()
        self.why_padded = why_not_packed(model.config) if training.packing else "packing is off"
        self._packed = self.why_padded is None
        if self._packed:
            use_packed_attention(model)
        if student.lora is not None:
            lora.add_lora(model, student.lora, seed)
        self._reference = self._reference_policy()
        if training.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self._policy = self._placed(model)
        self._tied = tied_names(model.state_dict(keep_vars=True))
        self._parameters = [p for p in self._policy.parameters() if p.requires_grad]
        self._optimizer = (make_optimizer or adamw)(self._parameters, training)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: learning_rate_factor(step, training)
        )
        self._checkpointer = Checkpointer(self._policy, self._optimizer, self._schedule)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on a batch; the metrics are those of all ranks.

        Raises :class:`TrainingError` if the gradient is not finite, naming the rollouts that it
        comes from (the weights are then as before), and if memory runs out, naming the settings
        that need less.
        """
        try:
            return self._update(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(self._too_little_memory(error)) from None

    def weights(self) -> dict[str, Tensor]:
        """The current weights of the plain model on rank 0's host, in the dtype that the samplers
        hold, tied ones as one tensor; empty on other ranks."""
        return self._plain_state(getattr(torch, self._student.dtype))

    def served_weights(self) -> dict[str, Tensor]:
        """The same, named and cut as a checkpoint of this model is, the form that servers load."""
        state = self.weights()
        return checkpoint_state(self.model, state) if self._rank == 0 else {}

    def save_weights(self, path: Path) -> Path:
        """Write them in Hugging Face format, for a server that reads weights from disk."""
        state = self.weights()
        if self._rank == 0:
            save_weights(self.model, path, state, self._student.dtype)
        return path

    def save(self, path: Path) -> Path:
        """Write the student in Hugging Face format, in fp32; of a LoRA student the merged weights,
        and the adapters under ``adapter/``."""
        state = self._plain_state(torch.float32)
        if self._rank == 0:
            save_model(self.model, self.tokenizer, path, state)
        if self._student.lora is not None:
            parts = (part for part in whole_state(self.model) if "lora_" in part[0])
            adapted = self._on_host(parts, torch.float32)
            if self._rank == 0:
                base = self._student.model
                lora.save_adapter(adapted, self._student.lora, base, path / "adapter")
        return path

    def start_checkpoint(self, folder: Path) -> None:
        """Begin to write all that training holds; it goes on meanwhile."""
        self._checkpointer.start(folder)

    def finish_checkpoint(self) -> None:
        """Wait until what was begun is on disk. Raises :class:`TrainingError` if it is not."""
        self._checkpointer.finish()

    def restore(self, folder: Path) -> None:
        """Take over a checkpoint, of any number of ranks. Raises :class:`TrainingError`."""
        self._checkpointer.load(folder)

    def _placed(self, model: Any) -> StudentPolicy:
        """The policy on this rank's device, sharded where there are several ranks."""
        dtype = getattr(torch, self._student.dtype)
        chunk_tokens = self._training.logprob_chunk_tokens
        policy = StudentPolicy(model, dtype=dtype, chunk_tokens=chunk_tokens)
        if self._ranks == 1:
            return policy.to(self.device)
        kinds = set(model._no_split_modules or ())
        layers = [m for m in model.modules() if type(m).__name__ in kinds]
        shard(policy, layers, self._training, self.device)
        return policy

    def _reference_policy(self) -> StudentPolicy | None:
        """The student as it was at the start; a LoRA student without its adapters is just that."""
        if self._training.reference_kl_weight == 0 or self._student.lora is not None:
            return None
        reference = self._placed(copy.deepcopy(self.model).requires_grad_(False))
        if isinstance(reference, FSDPModule):
            # FSDP keeps a root whole until its backward, which never comes.
            reference.set_reshard_after_forward(True, recurse=False)
        return reference

    def _plain_state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights of the plain model on rank 0's host, floating ones in ``dtype``; else
        empty."""
        config, state = self._student.lora, whole_state(self.model)
        if config is not None:  # added up in fp32 and rounded once
            state = lora.plain_weights(state, config.alpha / config.rank)
        return self._on_host(state, dtype)

    def _on_host(
        self, state: Iterator[tuple[str, Tensor]], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Copies on rank 0's host, made one by one."""
        copies: dict[str, Tensor] = {}
        for name, value in state:  # all ranks gather, one keeps
            if self._rank == 0 and self._tied.get(name) in copies:
                copies[name] = copies[self._tied[name]]
            elif self._rank == 0:
                # Rounded where it is, so that the shorter form travels.
                kept = value.to(dtype) if value.is_floating_point() else value
                copies[name] = kept.to("cpu", copy=kept is value)
        return copies

    def _update(self, batch: TrainBatch) -> dict[str, float]:
        stats, objective = StepStatistics(self.device), self._objective
        apart = batch.measure_teacher and objective.teacher_trains and objective.others_train
        parts = [self._micro_batches(mini) for mini in batch.mini_batches]
        old = [self._old_logprobs(part) for part in parts] if len(parts) > 1 else None
        for number, (mini, micros) in enumerate(zip(batch.mini_batches, parts, strict=True)):
            if mini.valid_tokens == 0:
                continue  # on all ranks alike: the count is the whole mini-batch's
            before = old[number] if old else None
            if apart and stats.optimizer_steps == 0:
                stats.teacher_grad_norm = self._teacher_grad_norm(mini, micros, batch, before)
            self._optimizer_step(mini, micros, batch, before, stats)
        told = stats.told(batch)
        if objective.teacher_trains and not objective.others_train:
            told["grad_norm_teacher"] = told["grad_norm"]  # the teacher's gradient is all of it
        return told | {"learning_rate": float(self._schedule.get_last_lr()[0])}

    def _micro_batches(self, mini: MiniBatch) -> list[MicroBatch]:
        """This rank's micro-batches, on the device; every rank has the same number of them."""
        dealt = plan(
            mini.samples,
            ranks=self._ranks,
            max_tokens=self._training.micro_batch_tokens,
            packed=self._packed,
            hidden_size=self.model.config.hidden_size,
        )
        pad = pad_id(self.tokenizer)
        return [
            collate(samples, packed=self._packed, pad_id=pad, device=self.device)
            for samples in dealt[self._rank]
        ]

    @torch.no_grad()
    def _old_logprobs(self, micros: list[MicroBatch]) -> list[Tensor]:
        """Logprobs before the first optimizer step, for batches that take several."""
        return [self._policy(micro) for micro in micros]

    @torch.no_grad()
    def _reference_kl(self, micro: MicroBatch, old: Tensor) -> Tensor | None:
        if self._training.reference_kl_weight == 0:
            return None
        if self._reference is not None:
            logprobs = self._reference(micro)
        else:
            with lora.without_lora(self.model):
                logprobs = self._policy(micro)
        return reverse_kl(old, logprobs, micro.response_mask)

    def _optimizer_step(
        self,
        mini: MiniBatch,
        micros: list[MicroBatch],
        batch: TrainBatch,
        old: list[Tensor] | None,
        stats: StepStatistics,
    ) -> None:
        losses, objective = [], self._objective
        for number, micro in enumerate(micros):
            logprobs = self._policy(micro)
            # One optimizer step a batch: ratio 1, the forward's own logprobs are the old ones.
            before = old[number] if old else logprobs.detach()
            reference = self._reference_kl(micro, before)
            k, made = objective.advantages(micro, before, reference, batch)
            weighed = objective.weights(micro, before)
            outcome = objective.loss(
                mini,
                micro,
                logprobs=logprobs,
                old=before,
                advantages=made.advantages,
                weighed=weighed,
            )
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            losses.append(outcome.loss.detach())
            stats.add(
                micro,
                k=k,
                made=made,
                old=before,
                reference=reference,
                weighed=weighed,
                outcome=outcome,
            )
        stats.stepped(self._apply_gradient(micros, losses))

    def _teacher_grad_norm(
        self,
        mini: MiniBatch,
        micros: list[MicroBatch],
        batch: TrainBatch,
        old: list[Tensor] | None,
    ) -> Tensor:
        """Norm of the gradient that the teacher's term alone would give; nothing else is left of
        it. At ratio 1 the gradient is linear in the advantage: this is the teacher's part of it."""
        objective = self._objective
        for number, micro in enumerate(micros):
            logprobs = self._policy(micro)
            before = old[number] if old else logprobs.detach()
            _, made = objective.advantages(micro, before, None, batch)
            outcome = objective.loss(
                mini,
                micro,
                logprobs=logprobs,
                old=before,
                advantages=made.opd_term,
                weighed=objective.weights(micro, before),
            )
            outcome.loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _apply_gradient(self, micros: list[MicroBatch], losses: list[Tensor]) -> Tensor:
        limit = self._training.max_grad_norm
        norm = whole(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        # A NaN gradient would spoil the weights for good, so this one wait for the device is spent.
        if not math.isfinite(norm.item()):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(self._not_finite(norm.item(), micros, losses))
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.detach()

    def _not_finite(self, norm: float, micros: list[MicroBatch], losses: list[Tensor]) -> str:
        """What to say; all ranks get here alike, since the norm is that of all of them."""
        bad = [
            sample.rollout
            for micro, loss in zip(micros, losses, strict=True)
            if not math.isfinite(loss.item())
            for sample in micro.samples
        ]
        found: list[Any] = [bad]
        if self._ranks > 1:
            found = [None] * self._ranks
            dist.all_gather_object(found, bad)
        named = sorted(rollout for part in found for rollout in part)
        where = (
            f"the loss itself is not finite where these rollouts (group, index) are: {named}"
            if named
            else "the loss is finite, and the gradient overflowed on its way back"
        )
        return (
            f"the gradient norm is {norm}; the weights were not touched. {where}. Look for "
            "infinite logprobs in the batch, or lower training.learning_rate"
        )

    def _too_little_memory(self, error: RuntimeError) -> str:
        training = self._training
        said = str(error).splitlines()[0][:200]
        return (
            f"out of memory on {self.device} in a training forward or backward ({said}). Lower "
            f"training.micro_batch_tokens (now {training.micro_batch_tokens}) to no less than the "
            f"longest sequence, then training.logprob_chunk_tokens (now "
            f"{training.logprob_chunk_tokens}); or set training.gradient_checkpointing: true (now "
            f"{str(training.gradient_checkpointing).lower()}), or more training.actors (now "
            f"{training.actors}) to shard over"
        )


def adamw(parameters: list[nn.Parameter], training: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW as the recipe has it."""
    return torch.optim.AdamW(
        parameters,
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=training.weight_decay,
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the host could not give the memory that was asked for."""
    # The CPU allocator has no exception type of its own.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
