"""No secret is written down or shown, wherever it comes from: planted ones are searched for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.blocks.system import Secret
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    temporary_settings,
)
from pydantic import SecretStr

from deployments.drill.watching import RunView
from tests.operating.conftest import MakeLab
from tests.operating.lab import Lab
from tests.operating.test_sharing import begun
from tests.teardown.stage import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LOOK_EVERY_S = 0.05
QUICK = ["training.prompts_per_step=8", "evaluation.every=0"]


class Planted:
    """Secrets that are found nowhere else, by where they are kept."""

    def __init__(self) -> None:
        names = ("key", "token", "block_key", "block_token", "mlflow", "api")
        self._values = {name: f"planted{uuid4().hex}" for name in names}

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def found_in(self, text: bytes) -> list[str]:
        """The names of those that stand in a text."""
        return [name for name, value in self._values.items() if value.encode() in text]


def files_with(planted: Planted, *folders: Path) -> dict[str, list[str]]:
    """Every file below the folders that holds a planted secret."""
    found = {str(path): planted.found_in(path.read_bytes()) for path in files_in(*folders)}
    return {path: names for path, names in found.items() if names}


def files_in(*folders: Path) -> Iterator[Path]:
    return (path for folder in folders for path in folder.rglob("*") if path.is_file())


def assert_searched(folder: Path, reference: str) -> None:
    """The same search finds what is no secret where it is to be expected."""
    found = {path.name for path in files_in(folder) if reference.encode() in path.read_bytes()}
    assert {"prefect.db", "mlflow.db", "config.json"} <= found


class CommandLines(threading.Thread):
    """Reads every command line on this machine, again and again."""

    def __init__(self, planted: Planted) -> None:
        super().__init__(daemon=True)
        self.found: set[tuple[str, ...]] = set()
        self.looks = 0
        self._planted, self._over = planted, threading.Event()

    def run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self.looks += 1
            for text in _of_all_processes("cmdline"):
                self.found |= {tuple(self._planted.found_in(text))} - {()}

    def stop(self) -> None:
        self._over.set()
        self.join()


def _of_all_processes(file: str) -> Iterator[bytes]:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            yield Path("/proc", pid, file).read_bytes()
        except OSError:
            continue


@contextmanager
def watched_command_lines(planted: Planted) -> Iterator[None]:
    watch = CommandLines(planted)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
    assert watch.looks > 0
    assert not watch.found


def secret_lab(make_lab: MakeLab, planted: Planted) -> Lab:
    auth = f"opd:{planted['api']}"
    return make_lab(
        PLANTED_KEY=planted["key"],
        PLANTED_TOKEN=planted["token"],
        MLFLOW_TRACKING_USERNAME="opd",
        MLFLOW_TRACKING_PASSWORD=planted["mlflow"],
        PREFECT_SERVER_API_AUTH_STRING=auth,
        PREFECT_API_AUTH_STRING=auth,
    )


@contextmanager
def as_a_client_of(planted: Planted) -> Iterator[None]:
    with temporary_settings({PREFECT_API_AUTH_STRING: f"opd:{planted['api']}"}):
        yield


def request(key: str, token: str, *more: str, **fields: Any) -> Mapping[str, Any]:
    environment = f"opd.teachers.0.launch.env={{HF_TOKEN: {token}}}"
    overrides = [*QUICK, environment, *more]
    return {"recipe": "tiny", "steps": 3, "teacher_api_key": key, "overrides": overrides, **fields}


def environment_of_the_teacher(run: RunView) -> bytes:
    (pid,) = wait_until(lambda: run.started("teacher"), "the teacher", 120.0)
    return Path(f"/proc/{pid}/environ").read_bytes()


def scratch_of(run: RunView) -> list[Path]:
    starting = run.events("child_starting")
    return [Path(folder) for record in starting for folder in record.facts["scratch"]]


def test_planted_secrets_are_used_and_found_nowhere(make_lab: MakeLab) -> None:
    planted = Planted()
    lab = secret_lab(make_lab, planted)
    with as_a_client_of(planted), watched_command_lines(planted):
        with temporary_settings({PREFECT_API_URL: lab.api_url}):
            Secret(value=SecretStr(planted["block_key"])).save("planted-key")
            Secret(value=SecretStr(planted["block_token"])).save("planted-token")
        for names, asked in (
            (["key", "token"], request("env:PLANTED_KEY", "env:PLANTED_TOKEN")),
            (
                ["block_key", "block_token"],
                request("block:planted-key", "block:planted-token"),
            ),
        ):
            flow_run = lab.start_run("distill", dict(asked))
            run = begun(lab, flow_run)
            used = planted.found_in(environment_of_the_teacher(run))
            assert set(names) <= set(used)  # what is searched for is there to be found
            wait_until(lambda run=run: run.trained_steps(), "a train step", 180.0)
            assert not files_with(planted, *scratch_of(run))
            lab.wait_for(flow_run, "Completed")
        failing = request(
            "env:PLANTED_KEY",
            "env:PLANTED_TOKEN",
            "opd.teachers.0.launch.extra_args=[--no-such-flag]",
        )
        lab.wait_for(lab.start_run("distill", dict(failing)), "Failed")
        lab.stop()
    assert_searched(lab.folder, "env:PLANTED_TOKEN")
    assert not files_with(planted, lab.folder)


@pytest.mark.parametrize(
    "asked",
    [
        {"teacher_api_key": "{secret}"},
        {"overrides": ["opd.teachers.0.api_key={secret}"]},
        {"overrides": ["opd.teachers.0.launch.env={{HF_TOKEN: {secret}}}"]},
        {"overrides": ["opd.teachers.0.launch.env.HF_TOKEN={secret}"]},
        {"overrides": ["tracking.mlflow_uri=http://me:{secret}@mlflow:5000"]},
        {"overrides": ["ray.address=http://me:{secret}@head:8265"]},
        {"settings": "opd:\n  teachers:\n    - api_key: {secret}\n"},
        {"teacher_endpoint": "http://me:{secret}@teacher:13141"},
    ],
)
def test_a_secret_in_the_form_is_refused_before_it_is_stored(
    lab: Lab, asked: dict[str, Any]
) -> None:
    planted = Planted()
    filled = {
        field: [value.format(secret=planted["key"]) for value in given]
        if isinstance(given, list)
        else given.format(secret=planted["key"])
        for field, given in asked.items()
    }
    with pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
        lab.start_run("distill", {"recipe": "tiny", **filled})
    assert not files_with(planted, lab.folder)
