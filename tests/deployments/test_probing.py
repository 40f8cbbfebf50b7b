"""``opd probe``: arguments, what is shown, exit status; and once before a real server."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from deployments.probing import probe_endpoint, show
from opd_core.errors import ConfigError, PreflightError
from opd_core.lifecycle.ports import reserve_ports
from opd_core.serving.probe import Check, Level, ProbeReport
from opd_core.serving.readiness import wait_until_healthy

ROOT = Path(__file__).parents[2]
TEACHER = str(ROOT / "deployments" / "recipes" / "assets" / "tiny" / "teacher")
CHECKS = (
    Check("health", "pass", "answers 200"),
    Check("cache", "warn", "none of 128 tokens", "turn it on"),
)
LEVELS = (Level(4, 100, 3, 50.0, 6400.0, 0.08, 0.2),)


def shown(*checks: Check) -> str:
    out = io.StringIO()
    report = ProbeReport("http://one", "sglang", checks, LEVELS, 12.3)
    show(report, Console(file=out, width=100))
    return out.getvalue()


def test_the_report_shows_what_was_found_and_what_to_do() -> None:
    text = shown(*CHECKS)
    for part in (
        "http://one (sglang), 12 s",
        "answers 200",
        "warn",
        "→ turn it on",
        "6400",
        "0.080",
    ):
        assert part in text
    assert "One can distil from this endpoint." in text


def test_a_report_with_a_failure_says_which_checks_failed() -> None:
    assert "One cannot distil from this endpoint: rows." in shown(
        *CHECKS, Check("rows", "fail", "[bold]expected 3 rows[/]")
    )


def test_what_a_server_says_is_not_taken_for_markup() -> None:
    assert "[red]oops[/red]" in shown(Check("rows", "fail", "[red]oops[/red]"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"url": "one:80"}, "expected a URL"),
        ({"backend": "vllm"}, "backend: Input should be 'sglang', 'lmdeploy' or 'embedded'"),
        ({"key": "sk-secret"}, "env:NAME"),
        ({"key": "env:ABSENT"}, "ABSENT is not set"),
        ({"tokenizer": "/no/such/folder"}, "--tokenizer /no/such/folder: cannot be read"),
    ],
)
def test_an_argument_that_cannot_be_used_is_told(arguments: dict[str, str], told: str) -> None:
    url = arguments.pop("url", "http://127.0.0.1:1")
    given = {"backend": "sglang", "tokenizer": TEACHER} | arguments
    with pytest.raises(ConfigError) as caught:
        probe_endpoint(url, **given, environ={})
    assert told in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_nobody_at_the_address_is_told() -> None:
    with reserve_ports(1) as reserved:  # held, so that nobody answers there
        url = f"http://127.0.0.1:{reserved.ports[0]}"
        with pytest.raises(PreflightError, match=f"nobody answers at {url}"):
            probe_endpoint(url, backend="sglang", tokenizer=TEACHER)


# ------------------------------------------------------------------ a real server


def opd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli", "probe", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """``embedded(key)``: the endpoint of a real embedded teacher with that key."""
    started: list[subprocess.Popen[bytes]] = []

    def start(key: str) -> str:
        with reserve_ports(1) as reserved:
            (port,) = reserved.ports
        command = [sys.executable, "-m", "opd_core.serving.embedded", "--model-path", TEACHER]
        with (tmp_path / "server.log").open("wb") as log:
            server = subprocess.Popen(
                [*command, "--port", str(port)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPD_API_KEY": key},
                stdout=log,
                stderr=log,
            )
        started.append(server)

        def still_alive() -> None:
            assert server.poll() is None, (tmp_path / "server.log").read_text()

        endpoint = f"http://127.0.0.1:{port}"
        wait_until_healthy(endpoint, "embedded", limit_s=120, still_alive=still_alive)
        return endpoint

    yield start
    for server in started:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


@pytest.mark.slow
def test_a_real_server_is_probed_through_the_command_line(embedded: Callable[[str], str]) -> None:
    url = embedded("sk-real")
    given = (url, "--backend", "embedded", "--tokenizer", TEACHER, "--json")
    done = opd(*given, "--key", "env:TEACHER_KEY", "--max-concurrency", "2", TEACHER_KEY="sk-real")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["usable"] is True
    told = {check["name"]: check["verdict"] for check in report["checks"]}
    assert {name for name, verdict in told.items() if verdict != "pass"} == {
        "tokenizer",  # the tiny teacher knows no English
        "prefix cache",  # the embedded server has none
        "refusal",
    }
    assert [level["concurrency"] for level in report["levels"]] == [1, 2]

    keyless = opd(*given)
    assert keyless.returncode == 1
    assert [check["name"] for check in json.loads(keyless.stdout)["checks"]] == ["health", "key"]


@pytest.mark.slow
def test_the_command_says_by_its_status_that_nobody_answers() -> None:
    with reserve_ports(1) as reserved:
        url = f"http://127.0.0.1:{reserved.ports[0]}"
        done = opd(url, "--tokenizer", TEACHER)
    assert done.returncode == 2
    assert "nobody answers" in done.stderr
    assert done.stdout == ""
