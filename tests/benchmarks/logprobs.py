"""Logprobs in chunks against the plain computation: time and peak memory, forward and backward."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from opd_core.objective.logprobs import token_logprobs

B, T, H, V = 4, 512, 128, 32_000


def plain(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The whole [B, T, V] in fp32."""
    logits = (hidden @ weight.T).float()
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def chunked(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Ours, in chunks of 256 positions."""
    return token_logprobs(hidden, weight, ids, chunk_tokens=256)


def measure(name: str, pipe: Connection) -> None:
    """In a process of its own: seconds of the best of three, and MiB above the start."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(B, T, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    ids = torch.randint(V, (B, T))
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        {"plain": plain, "chunked": chunked}[name](hidden, weight, ids).sum().backward()
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
    pipe.send((min(seconds), peak / 1024))


def run() -> Iterator[str]:
    """Time and memory of both, and their ratios."""
    context = multiprocessing.get_context("spawn")
    results = {}
    for name in ("plain", "chunked"):
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(name, theirs))
        process.start()
        results[name] = ours.recv()
        process.join()
        yield f"{name:8} {results[name][0]:6.2f} s  peak +{results[name][1]:.0f} MiB"
    (plain_s, plain_mib), (ours_s, ours_mib) = results["plain"], results["chunked"]
    yield f"chunked / plain: time {ours_s / plain_s:.2f}, memory {ours_mib / plain_mib:.2f}"
