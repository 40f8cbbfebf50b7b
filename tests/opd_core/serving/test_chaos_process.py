"""The chaos teacher as a program: refused scripts, and deaths that do not repeat."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from opd_core.lifecycle.ports import reserve_ports
from opd_core.serving.embedded.chaos_script import request_digest

START_S = 120
ROOT = Path(__file__).parents[3]
POISON, CUT_SHORT, HARMLESS = [5, 7, 8], [5, 9, 9], [5, 6]

Start = Callable[[], "Program"]


class Program:
    """One server in its own process."""

    def __init__(self, model: Path, script: Path) -> None:
        with reserve_ports(1) as reservation:
            (port,) = reservation.ports
        command = [sys.executable, "-m", "opd_core.serving.embedded", "--model-path", str(model)]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--chaos", str(script)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=url, trust_env=False, timeout=30)

    def wait_until_ready(self) -> Program:
        deadline = time.monotonic() + START_S
        while self._health() != 200:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self

    def score(self, ids: list[int]) -> int:
        return self.client.send(self._request(ids)).status_code

    def dies_of(self, ids: list[int]) -> tuple[int, float]:
        """The exit status after a request, and the share of its answer's body that came."""
        promised, received = 1, 0
        with contextlib.suppress(httpx.RemoteProtocolError):
            answer = self.client.send(self._request(ids), stream=True)
            promised = int(answer.headers["content-length"])
            for part in answer.iter_raw():
                received += len(part)
        return self.process.wait(timeout=30), received / promised

    def end(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def _request(self, ids: list[int]) -> httpx.Request:
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
        sampling = {"sampling_params": {"max_new_tokens": 0}}
        return self.client.build_request("POST", "/generate", json=body | sampling)

    def _health(self) -> int | None:
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return None


@pytest.fixture
def start(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers before the tiny model, with the script of the test's folder."""
    programs: list[Program] = []

    def start_program() -> Program:
        programs.append(Program(tiny_model_dir, tmp_path / "script.json"))
        return programs[-1]

    yield start_program
    for program in programs:
        program.end()


@pytest.mark.slow
def test_a_server_dies_once_of_each_fault_and_the_record_outlives_it(
    start: Start, tmp_path: Path
) -> None:
    script = {
        "faults": [
            {"fault": "die", "containing": POISON[1:], "once": True},
            {"fault": "die_mid_answer", "containing": CUT_SHORT[1:], "once": True},
        ],
        "record": "answered",
    }
    (tmp_path / "script.json").write_text(json.dumps(script))

    first = start().wait_until_ready()
    assert first.score(HARMLESS) == 200
    assert first.dies_of(POISON) == (9, 0.0)
    second = start().wait_until_ready()
    assert second.score(POISON) == 200
    assert second.dies_of(CUT_SHORT) == (9, pytest.approx(0.5, abs=0.01))
    third = start().wait_until_ready()
    assert third.score(CUT_SHORT) == 200

    lines = (tmp_path / "answered").read_text().splitlines()
    assert lines == [request_digest(ids, 0) for ids in (HARMLESS, POISON, CUT_SHORT)]


def test_a_wrong_script_ends_the_start_with_what_is_known(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('{"faults": [{"fault": "explode"}]}')

    _, errors = (program := start()).process.communicate(timeout=START_S)

    assert program.process.returncode == 1
    assert "script.json: not a chaos script" in errors
    assert "no known fault (known are: cut, die, die_mid_answer, error_200" in errors
