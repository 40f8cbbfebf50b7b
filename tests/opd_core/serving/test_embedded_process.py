"""The server as a real process: start, scores over a socket, signals, failures to start."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from opd_core.serving.embedded.process import main

pytestmark = pytest.mark.slow

START_S = 120
# Two seconds is the promise; the rest is for a machine that does other things too.
STOP_S = 6
KEY = "not-in-argv"
ROOT = Path(__file__).parents[3]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _score(input_ids: object) -> dict[str, object]:
    sampling = {"max_new_tokens": 0}
    body = {"input_ids": input_ids, "return_logprob": True, "logprob_start_len": 0}
    return body | {"sampling_params": sampling}


@dataclass
class Server:
    """One embedded teacher in its own process."""

    process: subprocess.Popen[str]
    port: int
    client: httpx.Client
    seen: list[int | None] = field(default_factory=list)

    @classmethod
    def start(cls, model_dir: Path, port: int, *flags: str, key: str | None = None) -> Server:
        command = [sys.executable, "-m", "opd_core.serving.embedded", "--port", str(port)]
        environment = {k: v for k, v in os.environ.items() if k != "OPD_API_KEY"}
        environment |= {"OMP_NUM_THREADS": "1"} | ({} if key is None else {"OPD_API_KEY": key})
        process = subprocess.Popen(
            [*command, "--model-path", str(model_dir), *flags],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        url = f"http://127.0.0.1:{port}"
        return cls(process, port, httpx.Client(base_url=url, trust_env=False, timeout=60))

    def health(self) -> int | None:
        """The status of the health check, None while nothing listens."""
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return None

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Poll until `done`, keeping the health statuses that were seen on the way."""
        deadline = time.monotonic() + START_S
        while not done():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, f"saw {set(self.seen)}"
            time.sleep(0.02)

    def wait_for_health(self, status: int) -> None:
        def reached() -> bool:
            self.seen.append(self.health())
            return self.seen[-1] == status

        self.wait_for(reached)

    def stop(self, number: signal.Signals) -> tuple[int, float]:
        """The exit status, and the seconds from the signal to the end."""
        began = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        return status, time.monotonic() - began

    def end(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def start(tiny_model_dir: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers before the tiny model and ends them all."""
    servers: list[Server] = []

    def start_server(
        *flags: str, key: str | None = None, model_dir: Path = tiny_model_dir, port: int = 0
    ) -> Server:
        servers.append(Server.start(model_dir, port or _free_port(), *flags, key=key))
        return servers[-1]

    yield start_server
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    """A server that is ready and asks for a key; one forward may be very long."""
    server = start("--max-running-tokens", "1000000", key=KEY)
    server.wait_for_health(200)
    server.client.headers["Authorization"] = f"Bearer {KEY}"
    return server


Start = Callable[..., Server]


def test_port_answers_503_while_the_model_loads_then_200(server: Server) -> None:
    first_answer = next(status for status in server.seen if status is not None)

    assert first_answer == 503
    assert server.seen[-1] == 200


def test_scores_over_a_socket_are_those_of_the_model(
    server: Server, own_logprobs: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    sequences = [[(5 * i + j) % 97 for j in range(10 + 20 * i)] for i in range(6)]

    answers = server.client.post("/generate", json=_score(sequences)).json()

    for ids, answer in zip(sequences, answers, strict=True):
        rows = answer["meta_info"]["input_token_logprobs"]
        expected = own_logprobs(ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose([row[0] for row in rows[1:]], expected, rtol=0, atol=1e-4)


def test_key_from_the_environment_is_asked_for_and_not_in_the_command_line(server: Server) -> None:
    with httpx.Client(base_url=server.client.base_url, trust_env=False) as stranger:
        statuses = [stranger.get(path).status_code for path in ("/health", "/model_info")]
    info = server.client.get("/model_info")

    assert statuses == [200, 401]
    assert info.status_code == 200
    assert info.json()["served_model_name"] == "teacher"
    assert KEY not in " ".join(map(str, server.process.args))  # type: ignore[arg-type]


def test_requests_that_would_kill_sglang_leave_the_process_alive(server: Server) -> None:
    poisons: list[list[object]] = [[5, 97], [[5, 6], []], [[]], [-1]]
    for poison in poisons:
        assert server.client.post("/generate", json=_score(poison)).status_code == 400

    assert server.client.post("/generate", json=_score([5, 6])).status_code == 200


def test_a_client_that_hangs_up_does_not_disturb_the_next(server: Server) -> None:
    before = server.client.get("/server_info").json()
    impatient = httpx.Timeout(60, read=0.001)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/generate", json=_score([[7] * 2000] * 8), timeout=impatient)

    answer = server.client.post("/generate", json=_score([5, 6]))

    assert answer.status_code == 200
    assert server.client.get("/server_info").json()["failed_batches"] == before["failed_batches"]


def test_sigterm_during_a_long_forward_ends_in_time_and_frees_the_port(server: Server) -> None:
    rows = 300  # tens of seconds in one forward, which nothing can interrupt
    statuses: list[int] = []

    def long_request() -> None:
        answer = server.client.post("/generate", json=_score([[7] * 2000] * rows))
        statuses.append(answer.status_code)

    thread = threading.Thread(target=long_request)
    thread.start()
    server.wait_for(lambda: server.client.get("/server_info").json()["running"] == rows)

    status, seconds = server.stop(signal.SIGTERM)
    thread.join(timeout=60)

    assert status == 0
    assert seconds < STOP_S
    assert statuses == [503]
    with socket.create_server(("127.0.0.1", server.port)):
        pass


def test_sigint_while_the_model_loads_ends_in_time_and_frees_the_port(start: Start) -> None:
    server = start()
    server.wait_for_health(503)

    status, seconds = server.stop(signal.SIGINT)

    assert status == 0
    assert seconds < STOP_S
    with socket.create_server(("127.0.0.1", server.port)):
        pass


def test_taken_port_ends_the_start_with_the_reason(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = int(holder.getsockname()[1])
        _, errors = (server := start(port=port)).process.communicate(timeout=START_S)

    assert server.process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in errors


def test_missing_model_ends_the_start_with_the_reason(start: Start, tmp_path: Path) -> None:
    _, errors = (server := start(model_dir=tmp_path / "no")).process.communicate(timeout=START_S)

    assert server.process.returncode == 1
    assert f"no model at {tmp_path / 'no'}" in errors


def test_model_that_cannot_be_loaded_ends_the_server_with_the_reason(
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("OPD_API_KEY", raising=False)
    shutil.copy(tiny_model_dir / "config.json", tmp_path)
    port = _free_port()

    status = main(["--model-path", str(tmp_path), "--port", str(port)])

    assert status == 1
    assert f"cannot load the model in {tmp_path}" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_empty_key_is_refused_before_anything_starts(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPD_API_KEY", "")

    assert main(["--model-path", str(tiny_model_dir), "--port", "1"]) == 1
    assert "OPD_API_KEY is empty" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--port", "70000"], ["--port", "1", "--context-length", "0"]])
def test_numbers_out_of_range_are_a_usage_error(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--model-path", "anything", *flags])

    assert "expected a number" in capsys.readouterr().err
