"""A kept teacher whose server is a small program of the standard library, up in a tenth of a
second. Files beside it make it die at its start, or score differently."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from opd_core.config import OPDTeacherConfig
from opd_core.scoring.facts import TeacherFacts
from opd_core.serving.kept.keeper import Keeper
from opd_core.serving.kept.record import KeptOrder, KeptState, KeptTeacher

WAIT_S = 30.0
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "starts"), "a") as starts:
    starts.write(str(os.getpid()) + "\\n")
if os.path.exists(os.path.join(here, "dies")):
    sys.exit("no weights here")
shift = 0.5 if os.path.exists(os.path.join(here, "differs")) else 0.0

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        key = os.environ.get("OPD_API_KEY")
        if key and self.headers.get("authorization") != "Bearer " + key:
            self.send_error(401)
            return
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids = asked["input_ids"][asked["logprob_start_len"]:]
        scores = [[-0.1 - shift - each % 7 / 3, each, None] for each in ids[1:]]
        self.answer({"meta_info": {"input_token_logprobs": [[None, ids[0], None], *scores]}})

    def answer(self, content):
        payload = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *ignored):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def wait_until(condition: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    """Wait for a truthy value, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def an_order(
    folder: Path, *, max_restarts: int = 1, locks: tuple[str, ...] = (), api_key: str | None = None
) -> KeptOrder:
    """Keep the stand-in, whose program and files are in ``folder``."""
    program = folder / "server"
    program.write_text(f"#!{sys.executable} -IS\n{SERVER}")
    program.chmod(0o755)
    launch = {
        "model": "no-model",
        "python": str(program),
        "max_restarts": max_restarts,
        "startup_limit_s": WAIT_S,
    }
    teacher = OPDTeacherConfig.model_validate(
        {"name": "sums", "backend": "embedded", "launch": launch, "api_key": api_key}
    )
    return KeptOrder(
        recipe="sums.yaml",
        number=0,
        only=True,
        teacher=teacher,
        facts=TeacherFacts(vocab_size=50, context_length=100, fingerprint="abc"),
        sequences=((1, 2, 3, 4, 5, 6), (7, 8, 9, 10)),
        dtype="float32",
        locks=locks,
        wait_s=0.0,
        teardown_s=10.0,
    )


@contextmanager
def said_to_serve(kept: KeptTeacher, order: KeptOrder, *endpoints: str) -> Iterator[None]:
    """As it stands on disk while its keeper lives and has called it up; nobody serves."""
    lock = kept.take()
    assert lock is not None
    try:
        kept.begin(order, 1.0)
        kept.tell(KeptState("ready", "scores", endpoints=endpoints))
        yield
    finally:
        os.close(lock)


class Keeping:
    """A keeper in a thread, ended with the block."""

    def __init__(self, kept: KeptTeacher, order: KeptOrder, *, hours: float = 1.0) -> None:
        lock = kept.take()
        assert lock is not None
        self.kept, self._lock = kept, lock
        kept.begin(order, hours)
        self._keeper = Keeper(kept, order, None, {})
        self._thread = threading.Thread(target=self._keeper.keep, daemon=True)

    def __enter__(self) -> Keeping:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self.kept.ask_end("the test is over")
        self.wait()
        os.close(self._lock)

    @property
    def state(self) -> KeptState:
        """Its last word."""
        return self.kept.state or KeptState("starting")

    def wait_ready(self) -> KeptState:
        """Once it is up."""
        wait_until(lambda: self.state.phase == "ready", "the teacher to be up")
        return self.state

    def wait(self) -> KeptState:
        """Once it has ended."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.state
