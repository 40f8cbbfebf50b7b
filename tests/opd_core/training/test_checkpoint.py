"""Checkpoints of a learner's state. Run as a script, this file is one of ``RANKS`` ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from opd_core.errors import TrainingError
from opd_core.training.checkpoint import Checkpointer, write_shards

RANKS = 4
LAYOUTS: dict[str, tuple[int, ...]] = {"plain": (), "2": (2,), "4": (4,), "2x2": (2, 2)}


class Block(nn.Module):
    """Uneven on purpose: 3 rows over 4 ranks leave one rank with none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 3)
        self.down = nn.Linear(3, 6, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("derived", torch.ones(1), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Student(nn.Module):
    """Tied embedding and head; with ``frozen`` only the first block trains."""

    def __init__(self, seed: int, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        if frozen:
            self.requires_grad_(False)
            self.layers[0].requires_grad_(True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Run:
    """A student in training, over the ranks that have joined."""

    def __init__(
        self,
        layout: str = "plain",
        *,
        seed: int = 1,
        frozen: bool = False,
        optimizer: str = "AdamW",
        rate: float = 1e-2,
        write: Callable[..., None] = write_shards,
    ) -> None:
        self.model = Student(seed, frozen)
        if shape := LAYOUTS[layout]:
            names = ("replicate", "shard")[-len(shape) :]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
        settings: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = getattr(torch.optim, optimizer)(trained, lr=rate, **settings)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (3 + step))
        self.checkpointer = Checkpointer(self.model, self.optimizer, self.schedule, write=write)

    def train(self, steps: int) -> Run:
        """Each step's batch follows from the step's number."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.schedule.last_epoch)
            tokens = torch.randint(11, (5,), generator=generator)
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            loss = nn.functional.cross_entropy(self.model(tokens), tokens.flip(0)) / ranks
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return self

    def save(self, folder: Path) -> Path:
        self.checkpointer.start(folder)
        self.checkpointer.finish()
        return folder

    def load(self, folder: Path) -> Run:
        self.checkpointer.load(folder)
        return self

    def values(self) -> dict[str, Any]:
        """All that a resumed run needs, whole and copied; found without the checkpointer's help."""
        self.model.state_dict()  # gathered shards go back
        values: dict[str, Any] = {f"buffer {n}": b.clone() for n, b in self.model.named_buffers()}
        for name, parameter in self.model.named_parameters():
            values[name] = _whole(parameter)
            for field, value in self.optimizer.state.get(parameter, {}).items():
                values[f"{name} {field}"] = _whole(value)
        groups = self.optimizer.state_dict()["param_groups"]
        return values | {"groups": groups, "schedule": self.schedule.state_dict()}


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of values that are not bit for bit the same."""

    def same(name: str) -> bool:
        a, b = left.get(name), right.get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return bool(a == b)

    return [name for name in sorted(left.keys() | right.keys()) if not same(name)]


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_loaded_run_is_bit_identical_and_trains_on_alike(
    tmp_path: Path, optimizer: str, steps: int
) -> None:
    run = Run(optimizer=optimizer).train(steps)
    run.save(tmp_path / "state")
    other = Run(seed=2, optimizer=optimizer).load(tmp_path / "state")
    assert differences(run.values(), other.values()) == []
    assert differences(run.train(2).values(), other.train(2).values()) == []


def test_loading_replaces_a_state_that_has_moved_on(tmp_path: Path) -> None:
    run = Run()
    parameters = [id(parameter) for parameter in run.model.parameters()]
    before = run.values()
    run.save(tmp_path / "state")
    run.train(2).load(tmp_path / "state")
    assert differences(before, run.values()) == []
    assert [id(parameter) for parameter in run.model.parameters()] == parameters


def test_a_bf16_student_keeps_its_step_counts_in_fp32(tmp_path: Path) -> None:
    runs = [Run(seed=seed) for seed in (1, 2)]
    for run in runs:
        run.model.bfloat16()
    runs[0].train(3).save(tmp_path / "state")
    runs[1].load(tmp_path / "state")
    assert differences(runs[0].values(), runs[1].values()) == []


class HeldWrite:
    """Waits for ``go`` before it writes."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, *arguments: Any) -> None:
        assert self.go.wait(60)
        write_shards(*arguments)


def test_training_on_while_the_write_is_held_up_leaves_the_state_of_the_start(
    tmp_path: Path,
) -> None:
    held = HeldWrite()
    run = Run(write=held).train(2)
    at_start = run.values()
    run.checkpointer.start(tmp_path / "state")
    run.train(3)
    assert not (tmp_path / "state" / ".metadata").exists()
    held.go.set()
    run.checkpointer.finish()
    assert differences(at_start, Run(seed=2).load(tmp_path / "state").values()) == []
    assert "embedding.weight exp_avg" in differences(at_start, run.values())


def test_a_load_waits_for_the_write(tmp_path: Path) -> None:
    held = HeldWrite()
    run = Run(write=held)
    before = run.values()
    run.checkpointer.start(tmp_path / "state")
    run.train(1)
    threading.Timer(0.05, held.go.set).start()
    run.load(tmp_path / "state")
    assert differences(before, run.values()) == []


def test_frozen_weights_are_not_saved_and_not_touched(tmp_path: Path) -> None:
    whole, part = size(Run().train(1).save(tmp_path / "whole")), tmp_path / "part"
    run = Run(frozen=True).train(2)
    assert size(run.save(part)) < whole
    other = Run(seed=2, frozen=True)
    frozen = other.model.embedding.weight.detach().clone()
    other.load(part)
    different = differences(run.values(), other.values())
    assert set(different) == {n for n, p in run.model.named_parameters() if not p.requires_grad}
    assert torch.equal(other.model.embedding.weight, frozen)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    names: list[str] = []

    def note(state: dict[str, Tensor], *_: Any) -> None:
        names.extend(state)

    Run(write=note).train(1).save(tmp_path)
    assert [name for name in names if "head" in name or "embedding" in name] == [
        "model/embedding.weight",
        "optimizer.AdamW/embedding.weight/step",
        "optimizer.AdamW/embedding.weight/exp_avg",
        "optimizer.AdamW/embedding.weight/exp_avg_sq",
    ]


def test_settings_are_those_of_the_run_that_loads(tmp_path: Path) -> None:
    Run(rate=1e-2).train(3).save(tmp_path / "state")
    fork = Run(rate=1e-3).load(tmp_path / "state")
    assert fork.schedule.get_last_lr() == pytest.approx([1e-3 / 6])
    assert fork.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 6)
    fork.train(1)
    assert fork.schedule.get_last_lr() == pytest.approx([1e-3 / 7])


def test_a_full_disk_is_told_at_finish_and_the_next_checkpoint_can_succeed(tmp_path: Path) -> None:
    run = Run().train(1)
    full = tmp_path / "full"
    full.mkdir()
    (full / "__0_0.distcp").symlink_to("/dev/full")
    run.checkpointer.start(full)
    with pytest.raises(TrainingError, match=f"{full} could not be written.*No space left"):
        run.checkpointer.finish()
    run.save(tmp_path / "state")


def test_the_next_start_tells_that_the_last_write_failed(tmp_path: Path) -> None:
    run = Run()
    (tmp_path / "file").touch()
    run.checkpointer.start(tmp_path / "file")
    with pytest.raises(TrainingError, match=f"{tmp_path}/file could not be written"):
        run.checkpointer.start(tmp_path / "state")


def test_a_folder_that_holds_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    run = Run().train(1)
    before = run.values()
    run.save(tmp_path / "state")
    with pytest.raises(TrainingError, match="exists"):
        run.train(1).save(tmp_path / "state")
    assert differences(before, Run(seed=2).load(tmp_path / "state").values()) == []


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", [_cut, Path.unlink])
def test_a_damaged_checkpoint_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = Run().train(1).save(tmp_path / "state")
    damage(folder / name)
    with pytest.raises(TrainingError, match=f"{folder} is damaged: .+ Move it away"):
        Run().load(folder)


def _wider() -> Run:
    run = Run()
    run.model.layers[1].up = nn.Linear(6, 3, dtype=torch.float64)
    return run


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Run(frozen=True), "model/embedding.weight .* absent here"),
        (lambda: Run(optimizer="SGD"), "optimizer.AdamW/embedding.weight/exp_avg .* absent here"),
        (_wider, r"model/layers.1.up.bias is .*float32.* there, .*float64.* here"),
    ],
)
def test_a_foreign_checkpoint_is_refused_before_anything_changes(
    tmp_path: Path, make: Callable[[], Run], what: str
) -> None:
    folder = Run().train(1).save(tmp_path / "state")
    other = make()
    before = other.values()
    with pytest.raises(TrainingError, match=f"{folder} is of another student or optimizer: {what}"):
        other.load(folder)
    assert differences(before, other.values()) == []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks found: every layout saved, and loaded into every other."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(errors)
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_loads_what_any_other_saved(
    report: dict[str, Any], saved: str, loaded: str
) -> None:
    assert report[f"{saved} to {loaded}"] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_resume_train_on_as_if_nothing_had_happened(
    report: dict[str, Any], layout: str
) -> None:
    assert report[f"{layout} goes on"] == []


@pytest.mark.slow
def test_copies_of_a_shard_are_written_once(report: dict[str, Any]) -> None:
    assert report["2x2 bytes"] == pytest.approx(report["2 bytes"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("disk", "could not be written: rank 1: .*No space left"),
        ("folder", "nowhere is damaged: FileNotFoundError"),
        ("shard", "is damaged: rank .: FileNotFoundError: .*__1_0.distcp"),
    ],
)
def test_a_failure_on_one_rank_is_told_on_every_rank(
    report: dict[str, Any], failure: str, words: str
) -> None:
    assert [bool(re.search(words, told)) for told in report[failure]] == [True, True]


def main(rank: int, folder: Path) -> None:
    report: dict[str, Any] = {}
    for layout in LAYOUTS:
        with world(layout, rank, folder / f"store-save-{layout}") as joined:
            if joined:
                save(layout, rank, folder, report)
    meet(rank, folder / "store-between")
    for layout in LAYOUTS:
        with world(layout, rank, folder / f"store-load-{layout}") as joined:
            if joined:
                load_all(layout, folder, report)
    with world("2", rank, folder / "store-failures") as joined:
        if joined:
            failures(rank, folder, report)
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))


@contextmanager
def world(layout: str, rank: int, store: Path) -> Iterator[bool]:
    """The first ranks join, as many as the layout has; says whether this one is among them."""
    ranks = torch.Size(LAYOUTS[layout]).numel()
    joined = rank < ranks
    if joined and layout != "plain":
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    yield joined
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def meet(rank: int, store: Path) -> None:
    with world("4", rank, store):
        dist.barrier()


def save(layout: str, rank: int, folder: Path, report: dict[str, Any]) -> None:
    """Save after 3 steps, and train on while the files are written."""
    run = Run(layout).train(3)
    with torch.no_grad():
        run.model(torch.arange(5))  # leaves FSDP's root gathered
    run.checkpointer.start(folder / layout)
    at_start = run.values()
    run.train(2)
    run.checkpointer.finish()
    after = run.values()
    if rank == 0:
        torch.save((at_start, after), folder / f"{layout}.pt")
        report[f"{layout} bytes"] = size(folder / layout)


def load_all(layout: str, folder: Path, report: dict[str, Any]) -> None:
    for saved in LAYOUTS:
        at_start, after = torch.load(folder / f"{saved}.pt")
        run = Run(layout, seed=2).load(folder / saved)
        report[f"{saved} to {layout}"] = differences(at_start, run.values())
        if saved == layout:
            report[f"{layout} goes on"] = differences(after, run.train(2).values())


def failures(rank: int, folder: Path, report: dict[str, Any]) -> None:
    run = Run("2").train(1)
    full = folder / "full"
    if rank == 1:
        full.mkdir()
        (full / "__1_0.distcp").symlink_to("/dev/full")
    dist.barrier()
    report["disk"] = everyone(told(lambda: run.save(full)))
    report["folder"] = everyone(told(lambda: run.load(folder / ("2", "nowhere")[rank])))
    (folder / "2" / "__1_0.distcp").unlink(missing_ok=True)
    dist.barrier()
    report["shard"] = everyone(told(lambda: run.load(folder / "2")))


def told(act: Callable[[], object]) -> str:
    try:
        act()
    except TrainingError as error:
        return str(error)
    return "no error"


def everyone(words: str) -> list[str]:
    heard = [""] * dist.get_world_size()
    dist.all_gather_object(heard, words)
    return heard


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
