"""A real MLflow server that is away, killed or asleep: afterwards everything is there once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from opd_core.tracking.journal import Journal, JournalReader
from opd_core.tracking.mlflow_check import PointCheck, check_points
from opd_core.tracking.mlflow_sink import RUN_TAG, MlflowRun, MlflowSink, connect
from opd_core.tracking.shipper import Shipper, ShippingReport, SinkReport
from opd_core.tracking.sink import Artifact, Ending
from tests.opd_core.tracking.mlflow_server import MlflowServer

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0
ODD = "opd_reverse_kl/中文 (a=b)?&%20"
WIDTH = 40
"""Metrics a record: a batch of many records is then several requests."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path)
    yield server
    server.kill()


@dataclass
class Tracked:
    """A run whose journal is written, and shipped to a server, at the same time."""

    path: Path
    run: MlflowRun
    shipper: Shipper
    steps: int = 0

    def train(self, steps: int) -> None:
        with Journal(self.path) as journal:
            for _ in range(steps):
                self.steps += 1
                metrics = {f"m/{name}": self.steps / (name + 3) for name in range(WIDTH)}
                journal.append(self.steps, {ODD: 1 / self.steps, "nan": math.nan, **metrics})

    @property
    def mlflow(self) -> SinkReport:
        return self.shipper.report().sinks["mlflow"]

    def until(self, condition: Callable[[SinkReport], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.mlflow):
            assert time.monotonic() < deadline, self.shipper.report()
            time.sleep(0.02)

    def end(self, within_s: float = PATIENCE_S) -> ShippingReport:
        ending = Ending("FINISHED", {"opd.status": "completed"}, (Artifact(self.path),))
        return self.shipper.close(within_s, ending)

    def again(self) -> None:
        """Another process takes the run up."""
        self.shipper = shipper_of(self.path, self.run)
        self.shipper.start()

    def check(self) -> tuple[Any, PointCheck]:
        """The one run that there is, and its points against the journal."""
        client = connect(self.run.tracking_uri)
        experiment = client.get_experiment_by_name(self.run.experiment)
        (found,) = client.search_runs([experiment.experiment_id])
        records = JournalReader(self.path).read()
        return found, check_points(self.run.tracking_uri, found.info.run_id, records)


def shipper_of(path: Path, run: MlflowRun, connect: Callable[[str], Any] = connect) -> Shipper:
    sinks = {"mlflow": partial(MlflowSink, run, connect)}
    return Shipper(JournalReader(path), sinks, interval_s=0.05, retry_s=0.1, max_retry_s=0.5)


@pytest.fixture
def tracked(tmp_path: Path, server: MlflowServer) -> Tracked:
    params = {f"p.{number}": str(number) for number in range(150)}
    run = MlflowRun(server.uri, None, "outages", "r", params, {RUN_TAG: "r-1", "own": "tag"})
    path = tmp_path / "metrics.jsonl"
    return Tracked(path, run, shipper_of(path, run))


def assert_whole(tracked: Tracked) -> None:
    """Points, params, tags, artifacts and status."""
    run, points = tracked.check()
    assert points == PointCheck(tracked.steps * (WIDTH + 1))
    assert run.data.params == tracked.run.params
    told = {key: run.data.tags[key] for key in (RUN_TAG, "own", "opd.status", "opd.complete")}
    assert told == {RUN_TAG: "r-1", "own": "tag", "opd.status": "completed", "opd.complete": "true"}
    client = connect(tracked.run.tracking_uri)
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["metrics.jsonl"]
    assert run.info.status == "FINISHED"


def test_a_server_that_comes_late_and_is_killed_while_metrics_arrive(
    tracked: Tracked, server: MlflowServer
) -> None:
    tracked.train(30)
    tracked.shipper.start()
    tracked.until(lambda sink: sink.failed_attempts > 1)
    assert tracked.shipper.report().lag.records == 30
    server.start()
    training = threading.Thread(target=tracked.train, args=(300,))
    training.start()
    tracked.until(lambda sink: sink.shipped > 100)
    server.kill()
    failed = tracked.mlflow.failed_attempts
    training.join()
    tracked.until(lambda sink: sink.failed_attempts > failed + 1)
    server.start()
    report = tracked.end()
    assert report.complete, report
    assert report.sinks["mlflow"].cpu_s > 0
    assert_whole(tracked)


@pytest.mark.long
def test_a_server_that_sleeps_when_the_run_is_made_does_not_make_it_twice(
    tracked: Tracked, server: MlflowServer
) -> None:
    class Asleep:
        """The server falls asleep when it is first asked to make a run."""

        def __init__(self, uri: str) -> None:
            self._client = connect(uri)

        def __getattr__(self, name: str) -> Any:
            if name == "create_run" and not asked:
                server.sleep()
            asked.extend([name] * (name == "create_run"))
            return getattr(self._client, name)

    server.start()
    asked: list[str] = []
    tracked.shipper = shipper_of(tracked.path, tracked.run, Asleep)
    tracked.train(5)
    tracked.shipper.start()
    tracked.until(lambda sink: sink.failed_attempts > 1)
    assert asked
    server.wake()
    tracked.until(lambda sink: sink.shipped == 5)
    server.sleep()
    tracked.train(100)
    failed = tracked.mlflow.failed_attempts
    tracked.until(lambda sink: sink.failed_attempts > failed + 1)
    server.wake()
    assert tracked.end().complete
    assert_whole(tracked)


def test_a_server_that_is_away_at_the_end_gets_the_rest_later(
    tracked: Tracked, server: MlflowServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    tracked.shipper.start()
    tracked.train(20)
    tracked.until(lambda sink: sink.shipped > 0)
    server.kill()
    tracked.train(20)
    started = time.monotonic()
    report = tracked.end(within_s=3.0)
    assert time.monotonic() - started < 6
    assert not report.complete
    server.start()
    run, points = tracked.check()
    assert run.info.status == "RUNNING"
    assert points.missing
    for _ in range(2):
        tracked.again()
        assert tracked.end().complete
        assert_whole(tracked)
    assert capsys.readouterr().out == ""  # a run's standard output is its summary's
