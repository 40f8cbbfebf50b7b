"""token_logprobs in the forward of an FSDP2 root module, on two real gloo ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from opd_core.objective import token_logprobs

REPOSITORY = Path(__file__).parents[3]
V, H = 7, 4
IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])


class Policy(nn.Module):
    """Embedding, one layer that is a shard of its own, head; the head may be the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, H)
        self.layer = nn.Linear(H, H)
        self.head = nn.Linear(H, V, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(ids)).tanh()
        return token_logprobs(
            hidden, self.head.weight, ids, head_bias=self.head.bias, chunk_tokens=4
        )


def gradients(policy: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    """Whole gradients by name, after one backward pass for each batch."""
    for ids in batches:
        policy(ids).sum().backward()
    grads = {name: parameter.grad for name, parameter in policy.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in grads.items()
        if grad is not None
    }


def run_rank(rank: int, folder: str) -> None:
    """The first rank has all tokens and the second none: one row of length 1."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (2,))
    seen = {}
    for tied in (False, True):
        policy = Policy(tied)
        fully_shard(policy.layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        ids = IDS if rank == 0 else IDS[:1, :1]
        seen[tied] = gradients(policy, ids, ids[:1])
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.barrier()
    # Seen once in many runs: a thread of gloo's aborts the process when the interpreter ends.
    os._exit(0)


@pytest.mark.slow
def test_a_sharded_policy_gets_the_gradients_of_a_whole_one(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # A spawned process imports this file by name, relative to the repository.
        patch.syspath_prepend(REPOSITORY)
        spawn(run_rank, args=(str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]

    for rank in (0, 1):
        seen = torch.load(tmp_path / f"rank{rank}.pt")
        for tied in (False, True):
            expected = gradients(Policy(tied), IDS, IDS[:1])
            assert set(seen[tied]) == set(expected)
            for name, want in expected.items():
                torch.testing.assert_close(2 * seen[tied][name], want)  # FSDP takes the mean
