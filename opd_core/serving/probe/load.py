"""Latency and throughput of a teacher server at 1, 2, 4, … requests at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opd_core.serving.probe.asking import Asker, Reply
from opd_core.serving.probe.checks import Check
from opd_core.serving.probe.text import ProbeText

RISE = 1.05
"""More requests at once must bring this much more throughput, else it has been reached."""


@dataclass(frozen=True, slots=True)
class Level:
    """What came of ``concurrency`` requests at once. Latencies are of good answers, in seconds."""

    concurrency: int
    answers: int
    errors: int
    requests_per_s: float
    tokens_per_s: float
    p50_s: float
    p95_s: float


async def measure_levels(
    asker: Asker, text: ProbeText, length: int, *, max_concurrency: int, level_s: float
) -> tuple[tuple[Level, ...], tuple[Reply, ...]]:
    """Levels of ``level_s`` seconds until throughput stops rising or something fails; and the
    failures. Each request is another piece of ``length`` tokens, its second half scored."""
    levels: list[Level] = []
    failures: list[Reply] = []
    concurrency, offset = 1, 0
    while concurrency <= max_concurrency and not failures:
        began = time.monotonic()
        replies: list[Reply] = []

        async def work() -> None:
            nonlocal offset
            while True:
                offset += 1
                reply = await asker.score(text.piece(length, offset), length // 2)
                replies.append(reply)  # noqa: B023 (all workers end before the next level)
                if reply.problem or time.monotonic() - began >= level_s:  # noqa: B023
                    return

        await asyncio.gather(*(work() for _ in range(concurrency)))
        failures = [reply for reply in replies if reply.problem]
        good = sorted(reply.seconds for reply in replies if not reply.problem)
        levels.append(_level(concurrency, good, len(failures), length, time.monotonic() - began))
        if not _rising(levels):
            break
        concurrency *= 2
    return tuple(levels), tuple(failures)


def check_throughput(levels: Sequence[Level], failures: Sequence[Reply]) -> Check:
    """What the server gives at its best, and whether it fails under load."""
    best = max(levels, key=lambda level: level.tokens_per_s)
    found = (
        f"best at {best.concurrency} at once: {best.requests_per_s:.1f} requests/s, "
        f"{best.tokens_per_s:.0f} tokens/s, p95 {best.p95_s:.3f} s"
    )
    if failures:
        found += f"; at {levels[-1].concurrency} at once {len(failures)} failed"
        found += f" ({failures[0].problem})"
        return Check("throughput", "warn", found, f"set max_concurrency to {best.concurrency}")
    return Check("throughput", "pass", found)


def check_refusal(failures: Sequence[Reply], concurrency: int) -> Check:
    """How the server says that it has too much."""
    refusals = [reply for reply in failures if reply.status in (429, 503)]
    if not refusals:
        return Check("refusal", "unknown", f"no request was turned away, up to {concurrency}")
    first = refusals[0]
    wish = f"Retry-After: {first.retry_after}" if first.retry_after else "no Retry-After"
    return Check("refusal", "pass", f"HTTP {first.status} with {wish}")


def _rising(levels: Sequence[Level]) -> bool:
    """Whether one of the last two levels brought more than all before; one alone may be noise."""
    rates = [level.tokens_per_s for level in levels]
    return len(rates) < 3 or max(rates[-2:]) >= RISE * max(rates[:-2])


def _level(
    concurrency: int, latencies: Sequence[float], errors: int, length: int, seconds: float
) -> Level:
    """From the sorted latencies of the good answers."""
    rate = len(latencies) / seconds
    return Level(
        concurrency,
        len(latencies),
        errors,
        rate,
        rate * length,
        _quantile(latencies, 0.5),
        _quantile(latencies, 0.95),
    )


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else 0.0
