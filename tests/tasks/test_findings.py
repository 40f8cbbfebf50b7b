"""Findings while a run is under way: each told once, from the journal's records as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from opd_core.analysis.detectors import Finding, RunFacts
from opd_core.tracking.journal import Journal, JournalReader, JournalRecord
from opd_core.tracking.shipper import Lag, Shipper, ShippingReport, SinkReport
from opd_core.tracking.sink import Ending
from tasks.findings import LiveDetection

FACTS = RunFacts.of({"opd": {"teachers": []}})
WAIT_S = 20.0


def records_of(first: int, last: int, gap: float = 0.5) -> list[JournalRecord]:
    """Train steps of a run whose engines differ by ``gap`` nats a token."""
    metrics = {"time/step_s": 1.0, "opd_abs_logprob_diff": 0.6, "engine_logprob_gap": gap}
    return [JournalRecord(step, float(step), metrics) for step in range(first, last + 1)]


def names(findings: Sequence[Finding]) -> list[str]:
    return [finding.name for finding in findings]


def test_a_finding_is_told_once_when_it_is_first_seen() -> None:
    told: list[Finding] = []
    live = LiveDetection(FACTS, told.append)
    assert live.see(records_of(1, 2)) == ()
    (finding,) = live.see(records_of(3, 5))
    assert (finding.name, finding.train_step) == ("engine_gap", 3)
    assert live.see(records_of(6, 9)) == ()
    assert told == [finding]
    assert live.findings == (finding,)


def test_what_an_earlier_attempt_told_is_kept_and_not_told_again() -> None:
    told: list[Finding] = []
    live = LiveDetection(FACTS, told.append)
    live.skip(records_of(1, 5))
    assert live.see(records_of(6, 9)) == ()
    assert told == []
    assert names(live.findings) == ["engine_gap"]


def test_a_record_that_is_read_twice_counts_once() -> None:
    live = LiveDetection(FACTS, lambda finding: None)
    assert live.see(records_of(1, 1) * 5) == ()


def behind(seconds: float) -> ShippingReport:
    lag = Lag(records=7, seconds=seconds)
    sink = SinkReport(
        shipped=3,
        failed_attempts=2,
        last_error="ConnectionError: refused",
        dropped_values=0,
        left_out=(),
        reference=None,
        complete=False,
        lag=lag,
        cpu_s=0.0,
    )
    return ShippingReport(10, None, {"mlflow": sink})


def test_a_sink_that_is_a_minute_behind_is_told_once() -> None:
    live = LiveDetection(FACTS, lambda finding: None)
    assert live.see(records_of(1, 1), behind(59.0)) == ()
    (finding,) = live.see((), behind(61.0))
    assert (finding.name, finding.train_step) == ("tracker_lagging", 1)
    assert finding.evidence.startswith("mlflow lacks 7 records, the oldest for 61 s")
    assert "refused" in finding.evidence
    assert live.see((), behind(90.0)) == ()


class SleepingSink:
    """Takes nothing before its time has come."""

    dropped = 0
    reference = None

    def __init__(self, awake: threading.Event) -> None:
        self._awake = awake

    def log(self, records: Sequence[JournalRecord]) -> None:
        self._awake.wait()

    def finish(self, ending: Ending) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass


def test_a_sink_that_sleeps_is_found(tmp_path: Path) -> None:
    path, awake = tmp_path / "metrics.jsonl", threading.Event()
    with Journal(path) as journal:
        journal.append(1, {"time/step_s": 1.0})
    shipper = Shipper(JournalReader(path), {"slow": lambda: SleepingSink(awake)}, 0.01)
    live = LiveDetection(FACTS, lambda finding: None, lag_s=0.2)
    live.see(JournalReader(path).read())
    shipper.start()
    try:
        deadline = time.monotonic() + WAIT_S
        while not live.see((), shipper.report()):
            assert time.monotonic() < deadline
    finally:
        awake.set()
        shipper.close(WAIT_S)
    (finding,) = live.findings
    assert finding.evidence.startswith("slow lacks 1 records")


def test_a_record_costs_less_than_a_millisecond_after_a_thousand_train_steps() -> None:
    live = LiveDetection(FACTS, lambda finding: None)
    sound = {f"other/{number}": 0.5 for number in range(60)} | {
        "opd_reverse_kl": 0.3,
        "opd_reverse_kl_stderr": 0.03,
        "entropy": 0.3,
        "teacher_logprob_std": 2.0,
        "advantage_opd_std": 1.0,
        "rollout/truncated_fraction": 0.0,
        "rollout/response_tokens_mean": 20.0,
    }
    live.see(
        [
            JournalRecord(record.train_step, record.time_s, {**record.metrics, **sound})
            for record in records_of(1, 1000, gap=0.01)
        ]
    )
    more = [
        JournalRecord(record.train_step, record.time_s, {**record.metrics, **sound})
        for record in records_of(1001, 1100, gap=0.01)
    ]
    started = time.thread_time()
    live.see(more)
    assert (time.thread_time() - started) / len(more) < 1e-3
    assert live.findings == ()
