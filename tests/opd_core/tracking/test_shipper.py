"""Shipping to sinks that are slow, broken for a while, broken for ever, or not there yet."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.tracking.journal import Journal, JournalReader, JournalRecord
from opd_core.tracking.shipper import RECORDS_PER_BATCH, Lag, Shipper, ShippingReport
from opd_core.tracking.sink import Artifact, Ending

PATIENCE_S = 20.0
ENDING = Ending("FAILED", {"reason": "teacher away"}, (Artifact(Path("run.log"), "logs"),))


@dataclass
class FakeSink:
    """Keeps what it gets. ``fails(call)`` decides by the number of the call to ``log``; while
    ``gate`` is not set, ``log`` hangs."""

    fails: Callable[[int], bool] = lambda call: False
    finish_failures: int = 0
    gate: threading.Event | None = None
    reference: str = "somewhere"
    dropped: int = 0
    steps: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    calls: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    called: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def log(self, records: Sequence[JournalRecord]) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls += 1
        self.called.set()
        if self.gate is not None:
            self.gate.wait()
        if self.fails(self.calls):
            raise ConnectionError(f"call {self.calls}\nsecond line")
        with self.changed:
            self.batches.append(len(records))
            self.steps += [record.train_step for record in records]
            self.dropped += sum(math.isnan(v) for r in records for v in r.metrics.values())
            self.changed.notify_all()

    def finish(self, ending: Ending) -> tuple[str, ...]:
        self.threads.add(threading.current_thread().name)
        if self.finish_failures > 0:
            self.finish_failures -= 1
            raise ConnectionError("server away")
        self.endings.append(ending)
        return ("run.log: no such file",)

    def close(self) -> None:
        self.closed.set()

    def make(self) -> FakeSink:
        return self

    def wait_for(self, step: int) -> None:
        """Wait until ``step`` has arrived."""
        with self.changed:
            assert self.changed.wait_for(lambda: step in self.steps, PATIENCE_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal(path) as journal:
        yield journal


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("ship-")]
    for thread in left:
        thread.join(PATIENCE_S)
    assert not [thread for thread in left if thread.is_alive()]


def shipper_of(path: Path, retry_s: float = 0.001, **sinks: FakeSink) -> Shipper:
    factories = {name: sink.make for name, sink in sinks.items()}
    return Shipper(JournalReader(path), factories, interval_s=0.001, retry_s=retry_s)


def test_every_sink_gets_every_record_once_and_in_order(path: Path, journal: Journal) -> None:
    one, two = FakeSink(), FakeSink()
    for step in range(5):
        journal.append(step, {"a": 1.0})
    shipper = shipper_of(path, one=one, two=two)
    shipper.start()
    one.wait_for(4)
    for step in range(5, 12):
        journal.append(step, {"a": 1.0})
    report = shipper.close(PATIENCE_S)
    assert one.steps == two.steps == list(range(12))
    assert report.complete
    assert report.records_read == 12
    assert {name: sink.shipped for name, sink in report.sinks.items()} == {"one": 12, "two": 12}
    assert one.closed.is_set()


def test_records_arrive_while_the_run_goes_on(path: Path, journal: Journal) -> None:
    sink = FakeSink()
    shipper = shipper_of(path, sink=sink)
    shipper.start()
    for step in range(3):
        journal.append(step, {})
        sink.wait_for(step)
    assert not shipper.report().complete  # nobody knows before the end
    assert shipper.report().sinks["sink"].reference == "somewhere"
    shipper.close(PATIENCE_S)


def test_a_record_appended_just_before_the_end_is_shipped(tmp_path: Path) -> None:
    for attempt in range(50):
        path, sink = tmp_path / f"{attempt}.jsonl", FakeSink()
        shipper = shipper_of(path, sink=sink)
        shipper.start()
        with Journal(path) as journal:
            journal.append(1, {})
            assert shipper.close(PATIENCE_S).complete
        assert sink.steps == [1]


def test_a_record_appended_between_the_last_look_and_the_end_is_not_passed_over(
    path: Path, journal: Journal
) -> None:
    looked, go_on = threading.Event(), threading.Event()

    class Interrupted(JournalReader):
        """Sees the journal as it was before the record came."""

        def read(self) -> list[JournalRecord]:
            records = super().read()
            looked.set()
            go_on.wait()
            return records

    sink = FakeSink()
    shipper = Shipper(Interrupted(path), {"sink": sink.make}, interval_s=0.001)
    shipper.start()
    assert looked.wait(PATIENCE_S)
    journal.append(1, {})
    assert not shipper.close(0.05, ENDING).complete
    go_on.set()
    assert sink.closed.wait(PATIENCE_S)
    assert sink.endings == []


def test_a_journal_that_never_came_is_complete_and_empty(path: Path) -> None:
    sink = FakeSink()
    shipper = shipper_of(path, sink=sink)
    shipper.start()
    report = shipper.close(PATIENCE_S, ENDING)
    assert report.complete
    assert report.records_read == 0
    assert sink.endings == [ENDING]


def test_a_sink_is_touched_by_one_thread_only_and_not_by_the_callers(
    path: Path, journal: Journal
) -> None:
    sink, makers = FakeSink(), set[str]()

    def make() -> FakeSink:
        makers.add(threading.current_thread().name)
        return sink

    shipper = Shipper(JournalReader(path), {"mlflow": make}, interval_s=0.001)
    shipper.start()
    journal.append(1, {})
    shipper.close(PATIENCE_S, ENDING)
    assert makers == sink.threads == {"ship-mlflow"}


def test_a_sink_that_recovers_gets_everything_once_and_in_order(
    path: Path, journal: Journal
) -> None:
    flaky = FakeSink(fails=lambda call: call in (1, 2, 4))
    steady = FakeSink()
    journal.append(0, {})
    shipper = shipper_of(path, flaky=flaky, steady=steady)
    shipper.start()
    flaky.wait_for(0)
    journal.append(1, {})
    journal.append(2, {})
    report = shipper.close(PATIENCE_S)
    assert flaky.steps == steady.steps == [0, 1, 2]
    assert report.complete
    assert report.sinks["flaky"].failed_attempts == 3
    assert report.sinks["flaky"].last_error == "ConnectionError: call 4"
    assert report.sinks["steady"].failed_attempts == 0


@settings(max_examples=30, deadline=None)
@given(
    failing=st.sets(st.integers(1, 12)),
    bursts=st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_whatever_fails_and_when_each_record_arrives_once_and_in_order(
    failing: set[int], bursts: list[int]
) -> None:
    sink = FakeSink(fails=lambda call: call in failing)
    with TemporaryDirectory() as folder, Journal(Path(folder) / "m.jsonl") as journal:
        shipper = shipper_of(Path(folder) / "m.jsonl", retry_s=0.0001, sink=sink)
        shipper.start()
        step = 0
        for burst in bursts:
            for _ in range(burst):
                journal.append(step, {})
                step += 1
        assert shipper.close(PATIENCE_S).complete
    assert sink.steps == list(range(step))


def test_a_long_backlog_goes_in_batches_and_only_the_failed_one_is_sent_again(
    path: Path, journal: Journal
) -> None:
    count = 2 * RECORDS_PER_BATCH + 7
    for step in range(count):
        journal.append(step, {})
    sink = FakeSink(fails=lambda call: call == 2)
    shipper = shipper_of(path, sink=sink)
    shipper.start()
    assert shipper.close(PATIENCE_S).complete
    assert sink.batches == [RECORDS_PER_BATCH, RECORDS_PER_BATCH, 7]
    assert sink.steps == list(range(count))
    assert sink.calls == 4


def test_a_sink_that_fails_for_ever_ends_in_time_and_is_reported(
    path: Path, journal: Journal
) -> None:
    broken, steady = FakeSink(fails=lambda call: True), FakeSink()
    for step in range(3):
        journal.append(step, {})
    shipper = shipper_of(path, broken=broken, steady=steady)
    shipper.start()
    started = time.monotonic()
    report = shipper.close(1.0, ENDING)
    assert time.monotonic() - started < 5
    assert not report.complete
    assert report.records_read == 3
    assert report.sinks["steady"].complete
    assert steady.endings == [ENDING]
    bad = report.sinks["broken"]
    assert (bad.complete, bad.shipped) == (False, 0)
    assert bad.failed_attempts > 1
    assert bad.last_error is not None
    assert bad.last_error.startswith("ConnectionError: call ")
    assert broken.endings == []  # no ending is told before the metrics are there
    assert broken.closed.wait(PATIENCE_S)


def test_a_sink_that_hangs_disturbs_neither_the_others_nor_the_caller(
    path: Path, journal: Journal
) -> None:
    gate = threading.Event()
    hanging, steady = FakeSink(gate=gate), FakeSink()
    journal.append(1, {})
    shipper = shipper_of(path, hanging=hanging, steady=steady)
    shipper.start()
    assert hanging.called.wait(PATIENCE_S)
    journal.append(2, {})
    steady.wait_for(2)
    started = time.monotonic()
    report = shipper.close(1.0, ENDING)
    assert time.monotonic() - started < 5
    assert (report.sinks["hanging"].complete, report.sinks["hanging"].shipped) == (False, 0)
    assert report.sinks["steady"].complete
    gate.set()
    assert hanging.closed.wait(PATIENCE_S)
    assert hanging.endings == []  # the caller was told that the ending did not arrive


def test_a_slow_sink_is_waited_for_at_the_end(path: Path, journal: Journal) -> None:
    gate = threading.Event()
    slow = FakeSink(gate=gate)
    journal.append(1, {})
    shipper = shipper_of(path, slow=slow)
    shipper.start()
    assert slow.called.wait(PATIENCE_S)
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    assert shipper.close(PATIENCE_S, ENDING).complete
    assert slow.steps == [1]
    timer.join()


def test_a_factory_that_raises_at_first_is_called_again(path: Path, journal: Journal) -> None:
    sink, attempts = FakeSink(), list[int]()

    def make() -> FakeSink:
        attempts.append(1)
        if len(attempts) < 3:
            raise ImportError("half imported")
        return sink

    journal.append(1, {})
    shipper = Shipper(JournalReader(path), {"s": make}, interval_s=0.001, retry_s=0.001)
    shipper.start()
    report = shipper.close(PATIENCE_S)
    assert report.complete
    assert sink.steps == [1]
    assert report.sinks["s"].failed_attempts == 2


def test_credentials_in_a_url_are_not_repeated(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> FakeSink:
        raise ConnectionError("request to https://me:p@ss@tracker:5000/api failed")

    shipper = Shipper(JournalReader(path), {"s": make}, interval_s=0.001, retry_s=0.001)
    shipper.start()
    last_error = shipper.close(0.5).sinks["s"].last_error
    assert last_error == "ConnectionError: request to https://tracker:5000/api failed"
    assert "tracker:5000" in caplog.text
    assert "ss@" not in caplog.text


def test_a_factory_that_never_succeeds_is_reported(path: Path, journal: Journal) -> None:
    def make() -> FakeSink:
        raise ImportError("no module named mlflow")

    journal.append(1, {})
    shipper = Shipper(JournalReader(path), {"s": make}, interval_s=0.001, retry_s=0.001)
    shipper.start()
    report = shipper.close(0.5)
    assert report.records_read == 1
    assert report.sinks["s"].last_error == "ImportError: no module named mlflow"
    assert report.sinks["s"].reference is None
    assert not report.complete


def test_the_end_of_a_run_cuts_a_long_back_off_short(path: Path, journal: Journal) -> None:
    sink = FakeSink(fails=lambda call: call == 1)
    journal.append(1, {})
    shipper = shipper_of(path, retry_s=3600.0, sink=sink)
    shipper.start()
    assert sink.called.wait(PATIENCE_S)
    assert shipper.close(PATIENCE_S).complete
    assert sink.steps == [1]


def test_the_ending_is_told_once_all_records_are_there_and_again_until_it_is_taken(
    path: Path, journal: Journal
) -> None:
    sink = FakeSink(finish_failures=2)
    journal.append(1, {})
    shipper = shipper_of(path, sink=sink)
    shipper.start()
    report = shipper.close(PATIENCE_S, ENDING)
    assert sink.endings == [ENDING]
    assert sink.steps == [1]
    assert report.complete
    assert report.sinks["sink"].failed_attempts == 2
    assert report.sinks["sink"].left_out == ("run.log: no such file",)


def test_a_malformed_journal_ends_the_run_in_the_sinks_and_is_complete_once_it_is_mended(
    path: Path, journal: Journal
) -> None:
    journal.append(1, {})
    with path.open("a") as file:
        file.write("garbage\n")
    journal.append(2, {})
    sink = FakeSink()
    shipper = shipper_of(path, sink=sink)
    shipper.start()
    told: list[ShippingReport] = []

    def mend(report: ShippingReport) -> None:
        if sink.endings and not told:
            told.append(report)
            path.write_text(path.read_text().replace("garbage\n", ""))

    report = shipper.close(PATIENCE_S, ENDING, mend)
    (meanwhile,) = told
    assert meanwhile.journal_error is not None
    assert "line 2" in meanwhile.journal_error
    assert not meanwhile.sinks["sink"].complete
    assert sink.endings[0] == replace(ENDING, complete=False)
    assert sink.endings[-1] == ENDING
    assert sink.steps == [1, 2]
    assert report.complete


def test_a_sink_that_is_away_lags_by_what_it_lacks_and_the_others_do_not(
    path: Path, journal: Journal
) -> None:
    gate = threading.Event()
    hanging, steady = FakeSink(gate=gate), FakeSink()
    shipper = shipper_of(path, hanging=hanging, steady=steady)
    assert shipper.report().lag == Lag()
    journal.append(1, {})
    shipper.start()
    assert hanging.called.wait(PATIENCE_S)
    waited_since = time.monotonic()
    journal.append(2, {})
    steady.wait_for(2)
    while (report := shipper.report()).sinks["steady"].lag != Lag():
        pass
    assert report.lag == report.sinks["hanging"].lag
    assert report.lag.records == 2
    assert report.lag.seconds >= time.monotonic() - waited_since - 1
    gate.set()
    assert shipper.close(PATIENCE_S).lag == Lag()


def test_records_of_an_earlier_attempt_count_from_when_they_are_read(path: Path) -> None:
    path.write_text('{"train_step":1,"time":1000.0,"metrics":{}}\n')
    shipper = shipper_of(path, sink=FakeSink())
    lag = shipper.report().lag
    assert (lag.records, lag.seconds < 60) == (1, True)


def test_what_a_sink_computes_is_counted_and_not_what_it_waits(
    path: Path, journal: Journal
) -> None:
    def compute(call: int) -> bool:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return False

    gate = threading.Event()
    busy, idle = FakeSink(fails=compute), FakeSink(gate=gate)
    journal.append(1, {})
    shipper = shipper_of(path, busy=busy, idle=idle)
    shipper.start()
    busy.wait_for(1)
    gate.set()
    sinks = shipper.close(PATIENCE_S).sinks
    assert sinks["busy"].cpu_s >= 0.2
    assert 0 < sinks["idle"].cpu_s < 0.2


def test_the_end_tells_how_far_it_is(path: Path, journal: Journal) -> None:
    for step in range(3):
        journal.append(step, {})
    gate, told = threading.Event(), list[int]()

    def progress(report: ShippingReport) -> None:
        told.append(report.sinks["sink"].shipped)
        gate.set()

    shipper = shipper_of(path, sink=FakeSink(gate=gate))
    shipper.start()
    assert shipper.close(PATIENCE_S, ENDING, progress).complete
    assert told[0] == 0
    assert told[-1] <= 3


def test_dropped_values_are_reported(path: Path, journal: Journal) -> None:
    sink = FakeSink()
    journal.append(1, {"a": math.nan, "b": 1.0})
    shipper = shipper_of(path, sink=sink)
    shipper.start()
    assert shipper.close(PATIENCE_S).sinks["sink"].dropped_values == 1


def test_closing_twice_or_without_a_start_is_harmless(path: Path, journal: Journal) -> None:
    sink = FakeSink()
    journal.append(1, {})
    shipper = shipper_of(path, sink=sink)
    assert not shipper.close(PATIENCE_S).complete
    shipper = shipper_of(path, sink=sink)
    shipper.start()
    assert shipper.close(PATIENCE_S, ENDING) == shipper.close(PATIENCE_S, ENDING)
    assert sink.endings == [ENDING]


def test_without_sinks_there_is_nothing_to_wait_for(path: Path, journal: Journal) -> None:
    journal.append(1, {})
    shipper = Shipper(JournalReader(path), {})
    shipper.start()
    report = shipper.close(PATIENCE_S, ENDING)
    assert report.complete
    assert report.records_read == 1
