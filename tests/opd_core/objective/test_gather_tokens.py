"""Two real gloo ranks with ragged token counts see the metrics that one rank would see."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TypedDict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from opd_core.objective import gather_tokens, reverse_kl_metrics

REPOSITORY = Path(__file__).parents[3]
SOURCES = ("math", "code")
# Rows on rank 0 and rank 1.
SPLITS = {"ragged": (7, 3), "one rank without tokens": (0, 5), "no token at all": (0, 0)}


class Seen(TypedDict):
    """What one rank sees of one split."""

    gathered: Tensor
    single: Tensor
    metrics: dict[str, Tensor]


def token_table(rows: int) -> Tensor:
    """[N, 4] of k, A, clamped and source_index."""
    generator = torch.Generator().manual_seed(rows)
    k = torch.randn(rows, generator=generator, dtype=torch.float64) * 3
    source = torch.arange(rows, dtype=torch.float64) % 2
    return torch.stack([k, 0.3 - k, (k.abs() > 2).double(), source], dim=1)


def metrics_of(table: Tensor) -> dict[str, Tensor]:
    k, advantages, clamped, source_index = table.unbind(dim=1)
    return reverse_kl_metrics(
        reverse_kl=k,
        advantages=advantages,
        clamped=clamped,
        source_index=source_index,
        sources=SOURCES,
    )


def run_rank(rank: int, folder: str) -> None:
    """One rank: gather every split, keep what it sees in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    seen: dict[str, Seen] = {}
    for name, (first, second) in SPLITS.items():
        table = token_table(first + second)
        local = table[:first] if rank == 0 else table[first:]
        gathered = gather_tokens(local.requires_grad_())
        single = gather_tokens(local.float())
        seen[name] = {"gathered": gathered, "single": single, "metrics": metrics_of(gathered)}
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Seen]]:
    """What rank 0 and rank 1 gathered."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        # A spawned process imports this file by name, relative to the repository.
        patch.syspath_prepend(REPOSITORY)
        spawn(run_rank, args=(str(folder),), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("split", SPLITS)
def test_every_rank_gathers_all_rows_in_rank_order(seen: list[dict[str, Seen]], split: str) -> None:
    expected = token_table(sum(SPLITS[split]))
    for rank in range(2):
        here = seen[rank][split]
        assert torch.equal(here["gathered"], expected)
        assert torch.equal(here["single"], expected.float())
        assert not here["gathered"].requires_grad


@pytest.mark.parametrize("split", SPLITS)
def test_metrics_are_identical_on_both_ranks_and_equal_those_of_one_rank(
    seen: list[dict[str, Seen]], split: str
) -> None:
    first, second = seen[0][split]["metrics"], seen[1][split]["metrics"]

    assert first == second
    assert first == metrics_of(token_table(sum(SPLITS[split])))


def test_metrics_over_ranks_are_not_the_mean_of_the_ranks_means(
    seen: list[dict[str, Seen]],
) -> None:
    table, (first, _) = token_table(10), SPLITS["ragged"]
    mean_of_means = (table[:first, 0].mean() + table[first:, 0].mean()) / 2

    over_ranks = seen[0]["ragged"]["metrics"]["opd_reverse_kl"]

    assert abs(over_ranks - mean_of_means) > 0.01


def test_without_a_process_group_the_values_come_back() -> None:
    values = torch.rand(3, 4, requires_grad=True)
    result = gather_tokens(values)
    assert torch.equal(result, values)
    assert not result.requires_grad


def test_values_that_are_no_table_are_refused() -> None:
    with pytest.raises(ValueError, match="N_local, K"):
        gather_tokens(torch.zeros(3))
