"""The process around the application: command line, socket, signals, a stop in bounded time.

The port listens before the model loads; health says 503 until it can score. An API key is read
from the environment variable OPD_API_KEY only, because command lines are visible to everybody.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from opd_core.errors import ConfigError
from opd_core.serving.embedded.app import create_app
from opd_core.serving.embedded.batching import BatchingScorer
from opd_core.serving.embedded.model import DTYPES, TeacherModel

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "OPD_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a stop that was asked for, else 1.

    The reason of a failure goes to standard error. A wrong command line raises ``SystemExit(2)``.
    """
    arguments = _read_arguments(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    api_key = os.environ.get(API_KEY_VARIABLE)
    if api_key == "":
        return _report(f"{API_KEY_VARIABLE} is empty: set a key, or unset it to serve without.")
    if not (arguments.model_path / "config.json").is_file():
        return _report(
            f"no model at {arguments.model_path}: expected a directory with config.json."
        )
    host, port = arguments.host, arguments.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        return _report(
            f"cannot listen on {host}:{port}: {error.strerror}. "
            "Stop what holds the port, or choose another one."
        )
    # asyncio does so only for sockets that name their protocol; else every answer waits 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener:
        return _serve(arguments, listener, api_key)


def _read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m opd_core.serving.embedded",
        description=f"Score token ids over SGLang's protocol. API key: {API_KEY_VARIABLE}.",
    )
    parser.add_argument("--model-path", type=Path, required=True, help="a local directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=_integer(0, 65535), required=True, help="0: any free one")
    parser.add_argument("--served-model-name", default="teacher")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--context-length", type=_integer(1), help="in tokens; the model's own by default"
    )
    parser.add_argument(
        "--max-running-tokens",
        type=_integer(1),
        default=16384,
        help="rows times longest row of one forward; on CPU a few thousand are as fast, and "
        "health checks wait less",
    )
    parser.add_argument(
        "--max-queued-requests", type=_integer(1), default=4096, help="sequences that may wait"
    )
    parser.add_argument(
        "--chaos", type=Path, metavar="FILE", help="a script of faults to test with: docs/chaos.md"
    )
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"]
    )
    return parser.parse_args(argv)


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: an integer from ``low`` to ``high``."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"expected a number {limits}, came {value}")
        return value

    return parse


def _serve(arguments: argparse.Namespace, listener: socket.socket, api_key: str | None) -> int:
    # Belt and braces: nothing below may look for files on the network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    scorer = BatchingScorer(
        max_running_tokens=arguments.max_running_tokens,
        max_queued_requests=arguments.max_queued_requests,
    )
    try:
        app = _make_app(arguments, scorer, api_key)
    except ConfigError as error:
        return _report(str(error))
    server = _Server(app, scorer)
    load = partial(
        TeacherModel.load,
        arguments.model_path,
        dtype=arguments.dtype,
        device=arguments.device,
        context_length=arguments.context_length,
    )

    def ready() -> None:
        # The modules imported so far are a million objects that the collector would walk, with
        # the interpreter's lock held, each time a large answer is built.
        gc.freeze()
        logger.info("ready to score")

    def stop() -> None:
        server.should_exit = True

    logger.info("listening on %s:%d, loading %s", *listener.getsockname()[:2], arguments.model_path)
    scorer.start(load, on_ready=ready, on_failure=stop)
    server.run(sockets=[listener])
    scorer.join(timeout_s=0.2)
    return 0 if scorer.failure is None else _report(str(scorer.failure))


def _make_app(
    arguments: argparse.Namespace, scorer: BatchingScorer, api_key: str | None
) -> ASGIApp:
    """The application, with the faults of ``--chaos`` in it if asked. Raises ``ConfigError``."""
    app = create_app(scorer, served_model_name=arguments.served_model_name, api_key=api_key)
    if arguments.chaos is not None:
        from opd_core.serving.embedded.chaos import add_chaos

        add_chaos(app, arguments.chaos, scorer)
    return app


class _Server(uvicorn.Server):
    """uvicorn that ends in bounded time whatever is in flight, and does not re-raise signals."""

    # Together with uvicorn's own polling these keep a stop under two seconds.
    FINISH_S = 0.5
    CLOSE_S = 1

    def __init__(self, app: ASGIApp, scorer: BatchingScorer) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=self.CLOSE_S,
            )
        )
        self._scorer = scorer

    def handle_exit(self, sig: int, frame: object) -> None:
        """First signal: end in order; second: do not wait for connections."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what waits with 503 at once, what runs when it ends or after ``FINISH_S``."""
        self._scorer.close()
        asyncio.get_running_loop().call_later(self.FINISH_S, self._scorer.abandon)
        await super().shutdown(sockets)


def _report(reason: str) -> int:
    print(f"embedded teacher: {reason}", file=sys.stderr)
    return 1
