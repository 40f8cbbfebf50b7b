"""Logprobs in chunks against the plain computation: time, peak memory and gradients.

Forward and backward in fp32 on one CPU thread, each measurement in a process of its own. Memory is
the peak above the hidden states, the head's weight and its gradient, which both need.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from opd_core.objective.logprobs import token_logprobs

H, CHUNK_TOKENS = 1024, 256
POSITIONS = {32_000: 2048, 151_936: 1024}
"""Per vocabulary size, so that the plain computation fits into 4 GiB."""
REPEATS = 2


def plain(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The whole [1, T - 1, V]."""
    logits = hidden[:, :-1] @ weight.T
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def chunked(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Ours, in chunks."""
    return token_logprobs(hidden, weight, ids, chunk_tokens=CHUNK_TOKENS)


def inputs(V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and a head whose logits spread like a language model's, and token ids."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    length = POSITIONS[V] + 1
    hidden = torch.randn(1, length, H, requires_grad=True)
    weight = torch.empty(V, H).normal_(0, 3 / H**0.5).requires_grad_()
    return hidden, weight, torch.randint(V, (1, length))


def backward(name: str, hidden: Tensor, weight: Tensor, ids: Tensor) -> None:
    """Leave the gradients of a weighted sum in the leaves."""
    result = {"plain": plain, "chunked": chunked}[name](hidden, weight, ids)
    upstream = torch.linspace(-1, 1, ids.shape[1] - 1)
    result[:, -len(upstream) :].backward(upstream.unsqueeze(0))  # type: ignore[no-untyped-call]


def measure(pipe: Connection, name: str, V: int) -> None:
    """Sends wall seconds and CPU seconds of the fastest repeat, and MiB of the peak."""
    hidden, weight, ids = inputs(V)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(REPEATS):
        hidden.grad = weight.grad = None
        wall, cpu = time.perf_counter(), time.process_time()
        backward(name, hidden, weight, ids)
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    pipe.send((*min(seconds), peak - weight.nbytes / 2**20))


def compare(pipe: Connection, V: int) -> None:
    """Sends the relative distance of ours to the plain gradients: of the states, of the weight."""
    hidden, weight, ids = inputs(V)
    backward("plain", hidden, weight, ids)
    expected = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    backward("chunked", hidden, weight, ids)
    distances = []
    for got, want in zip((hidden.grad, weight.grad), expected, strict=True):
        assert got is not None
        assert want is not None
        distances.append(((got - want).norm() / want.norm()).item())
    pipe.send(distances)


def alone(target: Callable[..., None], *args: object) -> Any:
    """What the function sends, from a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()  # a process that dies then ends the wait
    received = ours.recv()
    process.join()
    return received


def run() -> Iterator[str]:
    """Per vocabulary: both, their ratios, and how far the gradients are apart."""
    for V, positions in POSITIONS.items():
        yield f"V = {V}, H = {H}, {positions} positions, chunks of {CHUNK_TOKENS}"
        rows = {name: alone(measure, name, V) for name in ("plain", "chunked")}
        for name, (wall, cpu, mib) in rows.items():
            yield f"  {name:8} {wall:6.2f} s  {cpu:6.2f} s CPU  peak +{mib:5.0f} MiB"
        pairs = zip(rows["chunked"], rows["plain"], strict=True)
        wall, cpu, mib = (ours / theirs for ours, theirs in pairs)
        yield f"  ratio    {wall:6.2f}    {cpu:6.2f}             {mib:6.2f}"
        states, weight = alone(compare, V)
        yield f"  relative error of the gradients: states {states:.0e}, head {weight:.0e}"
