"""Token metrics of one train step, over all ranks and identical on each of them.

Owns: bringing the ranks' tokens together and the numbers computed from them. Does not own:
writing them anywhere. The caller stacks [k, A, clamped, source_index] of its valid response tokens
to [N_local, 4] in fp64, gathers once per train step, and moves the stacked results to the host
once: every metric is a scalar fp64 tensor. fp64 means CPU or CUDA.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor
from torch.nn import functional

_QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def gather_tokens(
    values: Float[Tensor, "N_local K"], group: dist.ProcessGroup | None = None
) -> Float[Tensor, "N K"]:
    """Rows of all ranks, in rank order, on every rank; ranks may hold different numbers of rows.

    A collective: every rank of the group calls it, one with 0 rows too, with the same K and dtype.
    `values` lies on a device that the group's backend serves (CUDA for NCCL). The result is
    detached; without an initialised process group it is `values`.

    Waits for the device once, since the ranks' row counts decide the result's shape.

    Raises:
        ValueError: values that are not [N_local, K].
    """
    if values.ndim != 2:
        raise ValueError(f"expected values [N_local, K], got {tuple(values.shape)}")
    values = values.detach()
    if not (dist.is_available() and dist.is_initialized()):
        return values
    local_count = torch.full((1,), values.shape[0], dtype=torch.int64, device=values.device)
    counts: list[int] = torch.cat(_all_gather(local_count, group)).tolist()
    if max(counts) == 0:  # on every rank alike, so nobody waits for the second collective
        return values
    padded = functional.pad(values, (0, 0, 0, max(counts) - values.shape[0])).contiguous()
    gathered = _all_gather(padded, group)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def reverse_kl_metrics(
    *,
    reverse_kl: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    clamped: Bool[Tensor, " N"] | Num[Tensor, " N"],
    source_index: Int[Tensor, " N"] | Num[Tensor, " N"],
    sources: tuple[str, ...],
) -> dict[str, Float[Tensor, ""]]:
    """Metrics of N valid response tokens, gathered over all ranks; k unclamped, A final.

    - `opd_reverse_kl`: sum k / N in nats, may be negative; `_p50`, `_p95`, `_p99` of k
      (linear interpolation).
    - `opd_abs_logprob_diff`: mean |k|. `opd_clamped_fraction`: share of tokens with a clamped k.
    - `advantage_mean`, `_std` (unbiased), `_min`, `_max`: of A *including* the OPD term.
    - `advantage_top1pct_share`: the share of sum |A| that the largest N // 100 of the |A| carry,
      the largest one where N < 200; 0.01 if all are alike.
    - `response_tokens`: N.
    - `opd_reverse_kl/<source>` and `response_tokens/<source>` per data source; sum k of a source
      over its own tokens.

    Zero stands for "no value", never NaN: everything at N = 0, a std of fewer than two tokens, and
    a source without tokens. `response_tokens` and `response_tokens/<source>` tell that case apart.

    Args:
        reverse_kl: k_t.
        advantages: A_t.
        clamped: True (or 1) where the clamp changed k_t.
        source_index: position in `sources` of each token's data source; whole numbers. A token
            of another index counts in the totals only.
        sources: names of the data sources, distinct.

    Raises:
        ValueError: fields of different lengths, or a name that occurs twice.
    """
    fields = (reverse_kl, advantages, clamped, source_index)
    if len({tuple(field.shape) for field in fields}) != 1 or reverse_kl.ndim != 1:
        raise ValueError(
            "expected reverse_kl, advantages, clamped and source_index of one shape [N], got "
            f"{[tuple(field.shape) for field in fields]}"
        )
    if len(set(sources)) != len(sources):
        raise ValueError(f"expected distinct data sources, got {sources}")
    k, adv = reverse_kl.detach().double(), advantages.detach().double()
    count = k.numel()
    metrics = {
        "opd_reverse_kl": _mean(k),
        "opd_abs_logprob_diff": _mean(k.abs()),
        "opd_clamped_fraction": _mean(clamped.double()),
        "advantage_mean": _mean(adv),
        "advantage_std": _std(adv),
        "advantage_min": adv.amin() if count else adv.new_zeros(()),
        "advantage_max": adv.amax() if count else adv.new_zeros(()),
        "advantage_top1pct_share": _top_share(adv.abs(), max(count // 100, 1)),
        "response_tokens": k.new_full((), count),
    }
    ordered = k.sort().values
    for name, quantile in _QUANTILES.items():
        metrics[f"opd_reverse_kl_{name}"] = _sorted_quantile(ordered, quantile)
    return metrics | _per_source(k, source_index, sources)


def teacher_metrics(
    *,
    old_logprobs: Float[Tensor, " N"],
    reverse_kl: Float[Tensor, " N"],
    opd_term: Float[Tensor, " N"],
) -> dict[str, Float[Tensor, ""]]:
    """What the teacher says of N valid response tokens, gathered over all ranks, in fp64.

    - `teacher_logprob_std`: of teacher_logprobs = old_logprobs - k, in nats.
    - `advantage_opd_std`: of the teacher's term of the advantage.

    Both unbiased, 0 for fewer than two tokens.
    """
    teacher_logprobs = old_logprobs.detach().double() - reverse_kl.detach().double()
    return {
        "teacher_logprob_std": _std(teacher_logprobs),
        "advantage_opd_std": _std(opd_term.detach().double()),
    }


def group_stderr(
    sums: Float[Tensor, " R"], counts: Num[Tensor, " R"], groups: Num[Tensor, " R"]
) -> Float[Tensor, ""]:
    """Standard error of the token mean sum(sums) / sum(counts) of R rollouts on the CPU, in fp64.

    Tokens of one rollout are not independent, and neither are rollouts of one prompt; groups are.
    With s_g and n_g the sums over the rollouts of group g of G: sqrt(G / (G - 1) * sum((s_g - mean
    * n_g)^2)) / sum(n) (linearised ratio estimator of cluster samples, Cochran 1977, chapter 6). 0
    for fewer than two groups.

    ``groups`` holds each rollout's group number. The order of summing is that of the rows, so
    that ranks which gathered the same rows agree in every bit.
    """
    places: dict[float, int] = {}
    place = torch.tensor(
        [places.setdefault(group, len(places)) for group in groups.tolist()], dtype=torch.long
    )
    sums, counts = (
        rows.new_zeros(len(places), dtype=torch.float64).index_add(0, place, rows.detach().double())
        for rows in (sums, counts)
    )
    if len(places) < 2:
        return sums.new_zeros(())
    total = counts.sum().clamp(min=1)
    residuals = sums - sums.sum() / total * counts
    return (residuals.square().sum() * len(places) / (len(places) - 1)).sqrt() / total


def _per_source(k: Tensor, source_index: Tensor, sources: tuple[str, ...]) -> dict[str, Tensor]:
    # One masked sum per source, not a scatter: atomic adds have no fixed order on a GPU, and the
    # ranks would then differ in the last bits.
    metrics = {}
    for index, source in enumerate(sources):
        member = source_index == index
        tokens = member.sum().double()
        metrics[f"opd_reverse_kl/{source}"] = torch.where(member, k, 0.0).sum() / tokens.clamp(
            min=1
        )
        metrics[f"response_tokens/{source}"] = tokens
    return metrics


def _mean(values: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """Mean; 0 where N = 0."""
    return values.sum() / max(values.numel(), 1)


def _std(values: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """Unbiased standard deviation; 0 where N < 2."""
    return values.std(correction=1) if values.numel() > 1 else values.new_zeros(())


def _top_share(values: Float[Tensor, " N"], number: int) -> Float[Tensor, ""]:
    """Share of the sum that the `number` largest make up; values >= 0. 0 where the sum is 0."""
    total = values.sum()
    top = values.topk(min(number, values.numel())).values.sum()
    return torch.where(total == 0, 0.0, top / total)


def _sorted_quantile(ordered: Float[Tensor, " N"], quantile: float) -> Float[Tensor, ""]:
    """Quantile of ascending values with linear interpolation; 0 where N = 0.

    torch.quantile refuses inputs of more than 2^24 elements, about 1000 long rollouts.
    """
    if ordered.numel() == 0:
        return ordered.new_zeros(())
    position = quantile * (ordered.numel() - 1)
    below = math.floor(position)
    return torch.lerp(ordered[below], ordered[math.ceil(position)], position - below)


def _all_gather(value: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The same-shaped tensor of every rank, in rank order."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, value, group=group)
    return gathered
