"""A real MLflow on SQLite: one database and one shipped run for the whole module."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opd_core.config import TrackingConfig
from opd_core.errors import ConfigError
from opd_core.tracking import mlflow_sink
from opd_core.tracking.journal import Journal, JournalReader, JournalRecord
from opd_core.tracking.mlflow_check import PointCheck, check_points
from opd_core.tracking.mlflow_sink import (
    COMPLETE_TAG,
    MAX_PARAM_LENGTH,
    POINTS_PER_CALL,
    RUN_TAG,
    MlflowRun,
    MlflowSink,
    artifact_root,
    bound_http_waits,
    flatten_params,
    tracking_uri,
)
from opd_core.tracking.names import accepted_name
from opd_core.tracking.shipper import Shipper, ShippingReport
from opd_core.tracking.sink import Artifact, Ending

ODD = "opd_reverse_kl/math/中文 (a=b)"
CONFIG = {
    "name": "demo",
    "opd": {"teachers": [{"name": "t", "api_key": None}], "map": {"math (a=b)": "t"}},
    "student": {"devices": ["0", "1"], "gradient_checkpointing": False},
    "description": "x" * (MAX_PARAM_LENGTH + 100),
    "many": {str(number): number for number in range(150)},
}


@dataclass
class Interfering:
    """A client with trouble on the line. ``trouble[name]`` holds, for the next calls of a method,
    "before" (nothing was done), "after" (done, the answer got lost) or "" (all well)."""

    client: Any
    trouble: dict[str, list[str]] = field(default_factory=dict)
    metric_calls: list[list[tuple[str, int]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if metrics := kwargs.get("metrics"):
                self.metric_calls.append([(metric.key, metric.step) for metric in metrics])
            planned = self.trouble.get(name)
            kind = planned.pop(0) if planned else ""
            if kind == "before":
                raise ConnectionError(f"{name}: refused")
            result = method(*args, **kwargs)
            if kind == "after":
                raise ConnectionError(f"{name}: the answer got lost")
            return result

        return call


@dataclass(frozen=True)
class Shipped:
    """What is left of the run that the module fixture shipped."""

    run: MlflowRun
    run_id: str
    client: Any
    interfering: Interfering
    journal: Path
    report: ShippingReport

    def history(self, name: str, run_id: str = "") -> list[tuple[int, int, float]]:
        points = self.client.get_metric_history(run_id or self.run_id, name)
        return [(point.step, point.timestamp, point.value) for point in points]

    def another(self, name: str, **changes: Any) -> MlflowRun:
        """A run of its own in the same database."""
        return replace(self.run, run_name=name, tags={RUN_TAG: name}, **changes)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipped]:
    root = tmp_path_factory.mktemp("run root")
    journal = root / "metrics.jsonl"
    (root / "recipe.yaml").write_text("name: demo\n")
    (root / "logs").mkdir()
    (root / "logs" / "flow.log").write_text("all well\n")
    run = MlflowRun(
        tracking_uri=tracking_uri(TrackingConfig(), root),
        artifact_root=root / "mlartifacts",
        experiment="opd 中文",
        run_name="demo-1",
        params=flatten_params(CONFIG),
        tags={RUN_TAG: "demo-1", "opd.teacher": "t", "long": "y" * 9000},
    )
    ending = Ending(
        "FINISHED",
        {"opd.status": "done"},
        (
            Artifact(root / "recipe.yaml"),
            Artifact(root / "logs", "run"),
            Artifact(root / "no-such-card.md"),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        clients: list[Interfering] = []

        def make() -> MlflowSink:
            return MlflowSink(run, connect=lambda uri: clients[-1])

        with Journal(journal) as writer:
            for step in range(1, 4):
                writer.append(step, {"opd_reverse_kl": step / 2, ODD: -1.0, "empty": math.nan})
            writer.append(3, {"eval/accuracy": 0.5})
        # First two calls log params; the third brings the metrics, and its answer gets lost.
        clients.append(
            Interfering(mlflow_sink.connect(run.tracking_uri), {"log_batch": ["", "", "after"]})
        )
        shipper = Shipper(JournalReader(journal), {"mlflow": make}, interval_s=0.01, retry_s=0.01)
        shipper.start()
        report = shipper.close(120.0, ending)
        run_id = report.sinks["mlflow"].reference
        assert run_id is not None, report
        yield Shipped(run, run_id, clients[-1].client, clients[-1], journal, report)


def test_everything_arrives_and_the_report_says_so(shipped: Shipped) -> None:
    report = shipped.report.sinks["mlflow"]
    assert report.complete
    assert (report.shipped, report.failed_attempts, report.dropped_values) == (4, 1, 3)
    assert report.last_error == "ConnectionError: log_batch: the answer got lost"
    assert [missing.endswith("no-such-card.md: no such file") for missing in report.left_out] == [
        True
    ]


def test_after_a_lost_answer_each_point_is_there_exactly_once(shipped: Shipped) -> None:
    records = JournalReader(shipped.journal).read()
    times = [int(record.time_s * 1000) for record in records]
    assert shipped.history("opd_reverse_kl") == [
        (1, times[0], 0.5),
        (2, times[1], 1.0),
        (3, times[2], 1.5),
    ]
    assert shipped.history("eval/accuracy") == [(3, times[3], 0.5)]


def test_what_had_arrived_is_not_even_sent_again(shipped: Shipped) -> None:
    assert len(shipped.interfering.metric_calls) == 1


def test_any_data_source_makes_a_metric(shipped: Shipped) -> None:
    assert [value for _, _, value in shipped.history(accepted_name(ODD))] == [-1.0] * 3


def test_values_that_are_not_finite_are_left_out(shipped: Shipped) -> None:
    assert shipped.history("empty") == []


def test_the_resolved_config_becomes_params(shipped: Shipped) -> None:
    params = shipped.client.get_run(shipped.run_id).data.params
    assert params["opd.teachers.0.name"] == "t"
    assert params["opd.teachers.0.api_key"] == "null"
    assert params["student.devices"] == '["0", "1"]'
    assert params["student.gradient_checkpointing"] == "false"
    assert params[accepted_name("opd.map.math (a=b)")] == "t"
    assert params["description"] == "x" * (MAX_PARAM_LENGTH - 1) + "…"
    assert params["many.149"] == "149"
    assert len(params) == 157


def test_tags_name_and_status_are_set(shipped: Shipped) -> None:
    run = shipped.client.get_run(shipped.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "demo-1"
    assert run.data.tags["opd.teacher"] == "t"
    assert run.data.tags["opd.status"] == "done"
    assert len(run.data.tags["long"]) == 8000
    assert shipped.client.get_experiment(run.info.experiment_id).name == "opd 中文"


def test_artifacts_can_be_read_and_lie_under_the_run_root(shipped: Shipped, tmp_path: Path) -> None:
    fetched = Path(shipped.client.download_artifacts(shipped.run_id, "", str(tmp_path)))
    assert (fetched / "recipe.yaml").read_text() == "name: demo\n"
    assert (fetched / "run" / "logs" / "flow.log").read_text() == "all well\n"
    root = shipped.run.artifact_root
    assert root is not None
    assert (root / shipped.run_id / "artifacts" / "recipe.yaml").exists()


def test_mlflows_global_state_is_left_alone(shipped: Shipped) -> None:
    import mlflow

    assert mlflow.get_tracking_uri() != shipped.run.tracking_uri
    assert mlflow.active_run() is None


def test_a_replay_by_another_process_adds_only_what_is_missing(shipped: Shipped) -> None:
    before = shipped.history("opd_reverse_kl")
    client = Interfering(shipped.client)
    changed = replace(shipped.run, params={"name": "other", "added": "1"})
    sink = MlflowSink(changed, connect=lambda uri: client)
    assert sink.run_id == shipped.run_id
    replay = JournalReader(shipped.journal).read()
    replay.append(JournalRecord(9, 1800000000.0, {"opd_reverse_kl": 9.0}))
    client.trouble["log_batch"] = ["after"]
    with pytest.raises(ConnectionError):
        sink.log(replay)
    sink.log(replay)
    assert shipped.history("opd_reverse_kl") == [*before, (9, 1800000000000, 9.0)]
    assert client.metric_calls == [[("opd_reverse_kl", 9)]]
    params = shipped.client.get_run(shipped.run_id).data.params
    assert (params["name"], params["added"]) == ("demo", "1")  # params never change in MLflow


def test_a_large_batch_cut_in_the_middle_is_completed_once(shipped: Shipped) -> None:
    client = Interfering(shipped.client)
    sink = MlflowSink(shipped.another("large", params={}), connect=lambda uri: client)
    count = 2 * POINTS_PER_CALL + 200
    record = JournalRecord(1, 1700000000.0, {f"m/{number}": 1.0 for number in range(count)})
    client.trouble["log_batch"] = ["", "before"]
    with pytest.raises(ConnectionError):
        sink.log([record])
    client.trouble["get_metric_history"] = ["before"]  # nor is anything sent while in doubt
    with pytest.raises(ConnectionError):
        sink.log([record])
    assert len(client.metric_calls) == 2
    sink.log([record])
    assert [len(call) for call in client.metric_calls] == [500, 500, 500, 200]
    run = shipped.client.get_run(sink.run_id)
    assert len(run.data.metrics) == count
    assert len(shipped.history("m/0", sink.run_id)) == 1


def test_dropped_values_count_once_however_often_a_batch_is_tried(shipped: Shipped) -> None:
    client = Interfering(shipped.client)
    sink = MlflowSink(shipped.another("dropped", params={}), connect=lambda uri: client)
    client.trouble["log_batch"] = ["before"]
    record = JournalRecord(1, 1700000000.0, {"a": math.inf, "b": 1.0})
    with pytest.raises(ConnectionError):
        sink.log([record])
    sink.log([record])
    assert sink.dropped == 1


def test_a_run_whose_creation_was_interrupted_is_taken_up_not_made_twice(
    shipped: Shipped,
) -> None:
    run = shipped.another("interrupted", params={"a": "1"})
    lost = Interfering(shipped.client, {"create_run": ["after"]})
    with pytest.raises(ConnectionError):
        MlflowSink(run, connect=lambda uri: lost)
    sink = MlflowSink(run, connect=lambda uri: shipped.client)
    experiment = shipped.client.get_experiment_by_name(run.experiment)
    found = shipped.client.search_runs(
        [experiment.experiment_id], f"tags.`{RUN_TAG}` = 'interrupted'"
    )
    assert [one.info.run_id for one in found] == [sink.run_id]
    assert found[0].data.params == {"a": "1"}


def test_an_artifact_that_fails_stops_neither_the_others_nor_the_status(
    shipped: Shipped, tmp_path: Path
) -> None:
    client = Interfering(shipped.client)
    sink = MlflowSink(shipped.another("artifacts", params={}), connect=lambda uri: client)
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(name)
    ending = Ending(
        "KILLED", {}, (Artifact(tmp_path / "one.txt"), Artifact(tmp_path / "two.txt", "deep/er"))
    )
    client.trouble["log_artifact"] = ["before"]
    with pytest.raises(ConnectionError):
        sink.finish(ending)
    assert [a.path for a in shipped.client.list_artifacts(sink.run_id, "deep/er")] == [
        "deep/er/two.txt"
    ]
    assert shipped.client.get_run(sink.run_id).info.status == "KILLED"
    client.trouble["log_artifact"] = ["", "before"]  # the second is not stored a second time
    assert sink.finish(ending) == ()
    assert "one.txt" in [a.path for a in shipped.client.list_artifacts(sink.run_id)]


def test_text_becomes_an_artifact_and_a_status_can_be_corrected(
    shipped: Shipped, tmp_path: Path
) -> None:
    sink = MlflowSink(shipped.another("text", params={}), connect=lambda uri: shipped.client)
    sink.log_text("# Model card 中文\n", "card/README.md")
    fetched = shipped.client.download_artifacts(sink.run_id, "card/README.md", str(tmp_path))
    assert Path(fetched).read_text(encoding="utf-8") == "# Model card 中文\n"
    sink.set_status("FINISHED")
    sink.set_status("FAILED")
    assert shipped.client.get_run(sink.run_id).info.status == "FAILED"


def test_an_experiment_that_another_process_creates_first_is_used(shipped: Shipped) -> None:
    class Late:
        """Does not see the experiment at the first look."""

        looks = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(shipped.client, name)

        def get_experiment_by_name(self, name: str) -> Any:
            self.looks += 1
            return shipped.client.get_experiment_by_name(name) if self.looks > 1 else None

    sink = MlflowSink(shipped.another("late", params={}), connect=lambda uri: Late())
    expected = shipped.client.get_experiment_by_name(shipped.run.experiment).experiment_id
    assert shipped.client.get_run(sink.run_id).info.experiment_id == expected


def test_a_deleted_experiment_is_refused_with_what_to_do(shipped: Shipped) -> None:
    shipped.client.delete_experiment(shipped.client.create_experiment("gone"))
    with pytest.raises(ConfigError, match=r"'gone' is deleted .*mlflow experiments restore"):
        MlflowSink(shipped.another("gone", experiment="gone"), connect=lambda uri: shipped.client)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.text(max_size=300) | st.text(alphabet="a./:- _=\n\\", max_size=12))
def test_mlflows_own_check_accepts_every_accepted_name(name: str, shipped: Shipped) -> None:
    from mlflow.utils.validation import _validate_metric, _validate_param, _validate_tag

    accepted = accepted_name(name)
    _validate_metric(accepted, 1.0, 0, 0)
    _validate_param(accepted, "value")
    _validate_tag(accepted, "value")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(names=st.lists(st.text(st.characters(), max_size=270), unique=True, max_size=30))
def test_metrics_of_any_data_sources_come_back_each_under_its_name(
    names: list[str], shipped: Shipped
) -> None:
    """``st.characters()`` has lone surrogates too, which JSON can hold."""
    sink = MlflowSink(shipped.another(uuid4().hex, params={}), connect=lambda uri: shipped.client)
    metrics = {f"eval/accuracy/{name}": float(number) for number, name in enumerate(names)}
    record = JournalRecord(1, 1700000000.0, metrics)
    sink.log([record])
    assert check_points("", sink.run_id, [record], lambda uri: shipped.client) == PointCheck(
        len(names)
    )


def test_a_check_tells_what_is_missing_doubled_and_of_somebody_else(shipped: Shipped) -> None:
    from mlflow.entities import Metric

    class Doubling:
        """A store that keeps a point twice."""

        def get_metric_history(self, run_id: str, name: str) -> list[Metric]:
            return [Metric("a", 1.0, 1000, 1)] * 2 + [Metric("a", 9.0, 9000, 9)]

    records = [JournalRecord(step, float(step), {"a": 1.0, "nan": math.nan}) for step in (1, 2, 3)]
    found = check_points("", "r", records, lambda uri: Doubling())
    assert found == PointCheck(points=3, missing=2, doubled=1, foreign=1)
    assert not found.exact
    assert str(found) == "of 3 points: 2 missing, 1 doubled, 1 foreign"
    assert check_points("", None, records).missing == 3
    whole = check_points("", shipped.run_id, [], lambda uri: shipped.client)
    assert str(whole) == "0 points, each exactly once"


def test_a_metric_that_is_recorded_twice_at_a_step_ends_with_the_last_value(
    shipped: Shipped,
) -> None:
    """A step that failed for want of groups is recorded, and again by the next attempt."""
    records = [JournalRecord(3, 1700000000.0 + n, {"groups/failed": float(n)}) for n in range(2)]
    for _ in range(2):
        sink = MlflowSink(shipped.another("twice", params={}), connect=lambda uri: shipped.client)
        sink.log(records)
        assert [value for _, _, value in shipped.history("groups/failed", sink.run_id)] == [0, 1]
        assert shipped.client.get_run(sink.run_id).data.metrics["groups/failed"] == 1


def test_a_run_that_was_made_twice_is_kept_where_it_is_used(shipped: Shipped) -> None:
    """A request whose answer came too late was sent again, and both were carried out."""
    run = shipped.another("twins", params={})
    first = MlflowSink(run, connect=lambda uri: shipped.client)
    experiment = shipped.client.get_experiment_by_name(run.experiment).experiment_id
    shipped.client.create_run(experiment, start_time=1, tags=run.tags)
    first.log([JournalRecord(1, 1700000000.0, {"a": 1.0})])
    again = MlflowSink(run, connect=lambda uri: shipped.client)
    assert again.run_id == first.run_id
    again.finish(Ending("FINISHED"))
    left = shipped.client.search_runs([experiment], f"tags.`{RUN_TAG}` = 'twins'")
    assert [one.info.run_id for one in left] == [first.run_id]


def test_a_run_is_called_complete_only_once_all_of_its_ending_is_there(
    shipped: Shipped, tmp_path: Path
) -> None:
    def complete() -> str | None:
        tags: dict[str, str] = shipped.client.get_run(sink.run_id).data.tags
        return tags.get(COMPLETE_TAG)

    client = Interfering(shipped.client, {"log_artifact": ["before"]})
    run = shipped.another("complete", params={})
    sink = MlflowSink(run, connect=lambda uri: client)
    (tmp_path / "one.txt").write_text("one")
    ending = Ending("FINISHED", {}, (Artifact(tmp_path / "one.txt"),), at_s=1700000000.5)
    with pytest.raises(ConnectionError):
        sink.finish(ending)
    assert complete() is None
    sink.finish(ending)
    assert complete() == "true"
    assert shipped.client.get_run(sink.run_id).info.end_time == 1700000000500
    MlflowSink(run, connect=lambda uri: shipped.client)
    assert complete() == "false"


def test_a_run_that_is_over_keeps_its_times_and_is_not_called_running_again(
    shipped: Shipped,
) -> None:
    run = shipped.another("over", params={}, began_at_s=1600000000.0, over=True)
    sink = MlflowSink(run, connect=lambda uri: shipped.client)
    sink.finish(Ending("KILLED", at_s=1600000100.0))
    MlflowSink(run, connect=lambda uri: shipped.client)
    info = shipped.client.get_run(sink.run_id).info
    assert (info.start_time, info.end_time) == (1600000000000, 1600000100000)
    assert info.status == "KILLED"


def test_two_processes_never_create_a_sqlite_schema_together(tmp_path: Path) -> None:
    inside, both, release = list[str](), threading.Event(), threading.Event()

    def connect(uri: str) -> Any:
        inside.append(uri)
        if len(inside) > 1:
            both.set()
        release.wait(20.0)
        inside.pop()
        raise ConnectionError("far enough")

    def create() -> None:
        run = MlflowRun(f"sqlite:///{tmp_path}/deep/mlflow.db", None, "e", "r", {}, {})
        with pytest.raises(ConnectionError):
            MlflowSink(run, connect=connect)

    threads = [threading.Thread(target=create) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert not both.wait(0.3)
    release.set()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


def test_a_configured_server_is_used_as_it_is(tmp_path: Path) -> None:
    config = TrackingConfig(mlflow_uri="http://tracker:5000")
    assert tracking_uri(config, tmp_path) == "http://tracker:5000"


def test_without_a_server_the_database_lies_in_the_run_root(tmp_path: Path) -> None:
    uri = tracking_uri(TrackingConfig(), tmp_path / "sub" / "..")
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"


def test_artifacts_lie_beside_a_database_and_else_where_the_server_says() -> None:
    assert artifact_root("sqlite:////runs/mlflow.db?timeout=9") == Path("/runs/mlartifacts")
    assert artifact_root("http://tracker:5000") is None


@pytest.mark.parametrize("sign", ["%", "?", "#"])
def test_a_run_root_that_no_sqlite_url_can_hold_is_refused(tmp_path: Path, sign: str) -> None:
    with pytest.raises(ConfigError, match=r"use another root, or name a server"):
        tracking_uri(TrackingConfig(), tmp_path / f"a{sign}b")


def test_params_are_flat_and_read_like_a_recipe() -> None:
    config = {
        "a": {"b": {"c": 1e-6}, "empty": {}, "none": None, "yes": True},
        "items": [{"x": "1"}, {"x": 2}],
        "plain": (1, 2),
        "中文": "text, not quoted",
    }
    assert flatten_params(config) == {
        "a.b.c": "1e-06",
        "a.empty": "{}",
        "a.none": "null",
        "a.yes": "true",
        "items.0.x": "1",
        "items.1.x": "2",
        "plain": "[1, 2]",
        "中文": "text, not quoted",
    }
    assert flatten_params({}) == {}


def test_waits_are_bounded_only_where_the_environment_does_not_say_otherwise() -> None:
    environ = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "300"}
    bound_http_waits(environ)
    assert environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "300"
    assert int(environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]) < 7
    assert environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] == "true"


def test_a_run_that_is_taken_up_again_runs_again_and_tells_by_whom(shipped: Shipped) -> None:
    first = MlflowSink(shipped.another("resumed"))
    first.finish(Ending("KILLED", {"opd.status": "cancelled"}))
    tags = {RUN_TAG: "resumed", "prefect.flow_run_id": "the second"}
    again = MlflowSink(replace(shipped.another("resumed"), tags=tags))
    assert again.run_id == first.run_id
    tracked = shipped.client.get_run(again.run_id)
    assert tracked.info.status == "RUNNING"
    assert tracked.data.tags["prefect.flow_run_id"] == "the second"
    again.set_status("FINISHED")
    assert shipped.client.get_run(again.run_id).info.status == "FINISHED"


def test_a_run_is_described_when_it_is_made_and_a_persons_own_words_stay(shipped: Shipped) -> None:
    described = shipped.another("described", description="Its run in Prefect")
    sink = MlflowSink(described)
    assert sink.experiment_id == shipped.client.get_run(shipped.run_id).info.experiment_id

    def said() -> str | None:
        return shipped.client.get_run(sink.run_id).data.tags.get("mlflow.note.content")

    assert said() == "Its run in Prefect"
    sink.set_tags({"mlflow.note.content": "the good one"})
    assert MlflowSink(described).run_id == sink.run_id
    assert said() == "the good one"
