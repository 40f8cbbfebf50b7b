"""Reading a teacher's answer with all checks, against only reading its JSON, and for how long that
stops an event loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import orjson

from opd_core.scoring.wire import parse_answer, request_body

VOCAB_SIZE = 151_936
ROWS = (20, 1_000, 16_384)
REQUEST = 18_432
ROUNDS, STALLS = 40, 40


def an_answer(rows: int) -> tuple[list[int], bytes]:
    """``rows`` + 1 ids, and SGLang's answer from position 0."""
    ids = [7919 * i % (VOCAB_SIZE - 1) for i in range(1, rows + 2)]
    scored = [[-(i * 0.618033988 % 9), token, None] for i, token in enumerate(ids[1:], start=1)]
    meta = {"finish_reason": {"type": "length"}, "cached_tokens": 1}
    return ids, orjson.dumps(
        {"text": "", "meta_info": meta | {"input_token_logprobs": [[None, ids[0], None], *scored]}}
    )


def plain(body: bytes) -> list[float]:
    """Reads the numbers, checks nothing."""
    return [row[0] for row in orjson.loads(body)["meta_info"]["input_token_logprobs"][1:]]


def medians_us(*works: Callable[[], object]) -> list[float]:
    """Median CPU time of each, in microseconds; they take turns, so that all see the same noise."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for work, taken in zip(works, times, strict=True):
            began = time.thread_time()
            work()
            taken.append(time.thread_time() - began)
    return [1e6 * statistics.median(taken) for taken in times]


async def stalls_ms(work: Callable[[], object], *, on_thread: bool) -> list[float]:
    """The longest that the loop stood still during each of ``STALLS`` works, sorted."""
    longest, busy = 0.0, True

    async def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while busy:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watching = asyncio.create_task(watch())
    stalls = []
    for _ in range(STALLS):
        await asyncio.sleep(0.005)
        longest = 0.0
        if on_thread:
            await asyncio.to_thread(work)
        else:
            work()
        await asyncio.sleep(0)
        stalls.append(1e3 * longest)
    busy = False
    await watching
    return sorted(stalls)


def run() -> Iterator[str]:
    """CPU times and their ratio, and the stalls of a loop that reads its largest answers itself."""
    for rows in ROWS:
        ids, body = an_answer(rows)
        parse = partial(parse_answer, "sglang", body, ids, 0, VOCAB_SIZE)
        checked, unchecked = medians_us(parse, partial(plain, body))
        yield (
            f"{rows:6,} rows, {len(body):7,} bytes: checked {checked:7,.0f} us, "
            f"plain {unchecked:7,.0f} us, ratio {checked / unchecked:.2f}"
        )
    (asked,) = medians_us(partial(request_body, "sglang", list(range(REQUEST)), 2_047))
    yield f"{REQUEST:6,} ids: request {asked:,.0f} us"
    for on_thread in (False, True):
        stalls = asyncio.run(stalls_ms(parse, on_thread=on_thread))
        yield (
            f"{ROWS[-1]:6,} rows {'on a thread' if on_thread else 'in the loop'}: the loop stands "
            f"still for {statistics.median(stalls):.1f} ms, at most {stalls[-1]:.1f} ms"
        )
