"""A teacher of fixed latency, in a process of its own: ``python -m tests.benchmarks.fixed_latency
PORT SECONDS [serial]``. It waits, then answers; nothing in it is ever busy. A serial one does so
for one request after the other."""

from __future__ import annotations

import asyncio
import sys
import time

import orjson


def answer(body: bytes) -> bytes:
    """An honest-looking answer in SGLang's form."""
    asked = orjson.loads(body)
    ids = asked["input_ids"][asked["logprob_start_len"] :]
    rows = [[None, ids[0], None], *([-0.5 - i % 7 / 8, id_, None] for i, id_ in enumerate(ids[1:]))]
    meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": rows, "cached_tokens": 0}
    return orjson.dumps({"text": "", "meta_info": meta})


async def serve(port: int, seconds: float, *, serial: bool) -> None:
    """Answer until the process is ended."""
    free_at = 0.0  # by the clock, so that late wake-ups do not add up

    async def wait() -> None:
        nonlocal free_at
        now = time.monotonic()
        free_at = (max(now, free_at) if serial else now) + seconds
        await asyncio.sleep(free_at - now)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                body = answer(await reader.readexactly(length))
                await wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", port, backlog=1024)
    print("listening", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), serial="serial" in sys.argv[3:]))
