"""One rank's part of a checkpoint: what is saved, written while training goes on, loaded again.

Saved are the parameters that train, the model's persistent buffers, the optimizer's state of each
parameter and the position in the schedule. Not saved are:

- frozen parameters: they are those of the original student (a LoRA checkpoint is small);
- settings (learning rate, betas, weight decay): they are those of the run that loads.

Every value is a tensor named ``model/NAME``, ``optimizer.AdamW/NAME/FIELD`` or ``schedule/FIELD``;
NAME is that of ``model.named_parameters()``, the same for plain and sharded models, so a checkpoint
may be loaded on another number of ranks. Tied weights have one name and are saved once. The files
are those of torch.distributed.checkpoint: each rank writes its shards, copies are written once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import LambdaLR

from opd_core.errors import TrainingError

Write = Callable[[dict[str, Tensor], Path, dist.ProcessGroup | None], None]
"""Writes this rank's part of a state into a folder; a collective of the group."""

SCHEDULE = ("last_epoch", "_step_count")
"""The schedule's position. Its rates follow from it, as functions of the settings."""


def write_shards(state: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write and fsync; a failure on one rank is raised on all as CheckpointException."""
    writer = FileSystemWriter(folder, overwrite=False)
    save(state, storage_writer=writer, process_group=group, no_dist=group is None)


class Checkpointer:
    """Saves and loads one learner. All ranks make one together, after sharding, and then call its
    methods in the same order; without a process group it works alone.

    The files are written by a thread, so its collectives run on a gloo group of their own: two
    threads in one group would take each other's messages.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LambdaLR,
        *,
        write: Write = write_shards,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._write = write
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: tuple[Path, Future[None]] | None = None

    def start(self, folder: Path) -> None:
        """Copy the state to host memory and begin to write the copy into ``folder``.

        The copy is what makes it safe to train on at once; it is freed when it is written. Waits
        for a write that still runs, and raises as :meth:`finish` does.
        """
        self.finish()
        self._accept_one_process()
        copy = {name: tensor.to("cpu", copy=True) for name, tensor in self._state().items()}
        self._running = folder, self._thread.submit(self._write, copy, folder, self._group)

    def finish(self) -> None:
        """Wait for the write; does nothing if none runs.

        Raises :class:`TrainingError`, on all ranks, if it failed: ``folder`` is then unusable.
        """
        if self._running is None:
            return
        (folder, written), self._running = self._running, None
        try:
            written.result()
        except (Exception, CheckpointException) as error:
            raise TrainingError(
                f"the checkpoint in {folder} could not be written: {_reason(error)}. Make room "
                "there or mend its file system, then resume the run"
            ) from error

    def load(self, folder: Path) -> None:
        """Take over the state in ``folder``; parameters and buffers are changed in place.

        Raises :class:`TrainingError`, on all ranks, if the checkpoint is of another student or
        optimizer (nothing is changed then) or damaged (the state is then spoilt).
        """
        self.finish()
        self._accept_one_process()
        state = self._state_to_fill(folder)
        reader, group = FileSystemReader(folder), self._group
        try:
            load(state, storage_reader=reader, process_group=group, no_dist=group is None)
        except (Exception, CheckpointException) as error:
            raise TrainingError(_damaged(folder, _reason(error))) from error
        self._take_optimizer(state)
        self._take_schedule(state)

    def _state(self) -> dict[str, Tensor]:
        """Names and values, sharing memory with the model and the optimizer."""
        state = self._model_state()
        for name, parameter in self._trained():
            for field, value in self._optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"{self._prefix}{name}/{field}"] = value
        return state | self._schedule_state()

    def _model_state(self) -> dict[str, Tensor]:
        # Before the names: this also makes FSDP put back the shards that a forward has gathered.
        values = self._model.state_dict()
        trained = {name for name, _ in self._trained()}
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        return {
            f"model/{name}": value
            for name, value in values.items()
            if name in trained or name not in parameters
        }

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self._model.named_parameters() if p.requires_grad)

    def _schedule_state(self) -> dict[str, Tensor]:
        position = self._schedule.state_dict()
        return {f"schedule/{field}": torch.tensor(position[field]) for field in SCHEDULE}

    @property
    def _prefix(self) -> str:
        return f"optimizer.{type(self._optimizer).__name__}/"

    def _state_to_fill(self, folder: Path) -> dict[str, Tensor]:
        """The tensors that the checkpoint will be read into, after a check that it fits."""
        state, problem = self._model_state() | self._schedule_state(), None
        try:
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
            state |= self._optimizer_state_to_fill(saved)
            if misfit := _misfit(saved, state):
                problem = (
                    f"the checkpoint in {folder} is of another student or optimizer: {misfit}. "
                    "Load it with the recipe that it was saved with"
                )
        except Exception as error:  # a pickle: damage can raise anything
            problem = _damaged(folder, _reason(error))
        self._agree(problem)
        return state

    def _optimizer_state_to_fill(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Moments are sharded as their parameter is, whatever they were when they were saved."""
        trained = dict(self._trained())
        state = {}
        for key, tensor in saved.items():
            name = key.removeprefix(self._prefix).rpartition("/")[0]
            if not key.startswith(self._prefix) or name not in trained:
                continue
            if tensor.size == trained[name].shape:
                state[key] = torch.zeros_like(trained[name].detach())
            else:
                state[key] = torch.zeros(tensor.size, dtype=tensor.properties.dtype)
        return state

    def _agree(self, problem: str | None) -> None:
        """Raise on all ranks if one has a problem; else the others would wait for it."""
        problems = [problem]
        if self._group is not None:
            problems = [None] * self._group.size()
            dist.all_gather_object(problems, problem, group=self._group)
        if found := next((p for p in problems if p), None):
            raise TrainingError(found)

    def _take_optimizer(self, state: dict[str, Tensor]) -> None:
        names = {parameter: name for name, parameter in self._trained()}
        groups = self._optimizer.state_dict()["param_groups"]
        fields: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            if key.startswith(self._prefix):
                name, _, field = key.removeprefix(self._prefix).rpartition("/")
                fields.setdefault(name, {})[field] = value
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        states = {i: fields[names[p]] for i, p in enumerate(parameters) if names.get(p) in fields}
        # The optimizer knows on which device it wants its step counts.
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _take_schedule(self, state: dict[str, Tensor]) -> None:
        schedule = self._schedule
        position = {field: int(state[f"schedule/{field}"]) for field in SCHEDULE}
        rates = [
            base * factor(position["last_epoch"])
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        schedule.load_state_dict(schedule.state_dict() | position | {"_last_lr": rates})
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _accept_one_process(self) -> None:
        """Without a group torch would warn, at each save and load, that there is none."""
        if self._group is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")


def _misfit(saved: Mapping[str, Any], state: Mapping[str, Tensor]) -> str:
    """The first difference in names, shapes and dtypes; empty if there is none."""
    ours = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
    theirs = {name: (tuple(t.size), t.properties.dtype) for name, t in saved.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name, 'missing')} there, {ours.get(name, 'absent')} here"
    return ""


def _damaged(folder: Path, reason: str) -> str:
    return f"the checkpoint in {folder} is damaged: {reason}. Move it away to resume from an older"


def _reason(error: BaseException) -> str:
    """In one line: the first rank that failed, and why."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
