"""What is taken for a sign of life, and for an illness, of a teacher server during a run."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from opd_core.scoring.state import ReplicaState, ScoringState
from opd_core.serving.life import Diagnosis, HealthWatch

LIMIT_S = 10.0
NOW = 1000.0
HEALTHY = NOW - 1


def state(told_at: float = NOW, **replica: object) -> ScoringState:
    """Of a teacher with two replicas; the fields are those of the second one."""
    return ScoringState(told_at, (ReplicaState(), ReplicaState(**replica)))  # type: ignore[arg-type]


@pytest.fixture
def diagnose() -> Diagnosis:
    """Of the second replica."""
    return Diagnosis(1, LIMIT_S)


def test_a_server_that_says_it_is_well_is_well_before_anybody_asks_it(diagnose: Diagnosis) -> None:
    assert diagnose(NOW, HEALTHY, None) == ""
    assert diagnose(NOW, HEALTHY, state()) == ""


def test_without_health_and_without_answers_it_hangs(diagnose: Diagnosis) -> None:
    silent = NOW - 11
    assert "no sign of life for 11 s" in diagnose(NOW, silent, None)
    assert "no sign of life" in diagnose(NOW, silent, state(progress_at=silent))


def test_answers_are_life_where_health_checks_time_out(diagnose: Diagnosis) -> None:
    assert diagnose(NOW, NOW - 100, state(in_flight=3, progress_at=NOW - 1)) == ""


def test_requests_without_an_answer_show_that_health_lies(diagnose: Diagnosis) -> None:
    waiting = state(in_flight=3, progress_at=NOW - 11)
    assert "though its health says ok" in diagnose(NOW, HEALTHY, waiting)


def test_the_other_replicas_requests_do_not_count(diagnose: Diagnosis) -> None:
    stuck = ReplicaState(in_flight=3, progress_at=NOW - 100)
    assert diagnose(NOW, HEALTHY, ScoringState(NOW, (stuck, ReplicaState()))) == ""


def test_a_job_that_tells_nothing_blames_nobody(diagnose: Diagnosis) -> None:
    old = state(told_at=NOW - 50, in_flight=3, progress_at=NOW - 55)
    assert diagnose(NOW, HEALTHY, old) == ""


def test_an_idle_server_is_not_blamed_for_old_answers(diagnose: Diagnosis) -> None:
    assert diagnose(NOW, HEALTHY, state(in_flight=0, progress_at=NOW - 500)) == ""


def test_a_replica_that_cannot_be_used_for_long_is_ill(diagnose: Diagnosis) -> None:
    away = state(away="HTTP 500: the engine died", in_flight=1, progress_at=NOW - 500)
    assert diagnose(NOW, HEALTHY, away) == ""
    assert diagnose(NOW + 9, NOW + 9, away) == ""
    assert "does not score: HTTP 500" in diagnose(NOW + 11, NOW + 11, away)


def test_coming_back_ends_an_absence(diagnose: Diagnosis) -> None:
    away = state(away="HTTP 500")
    diagnose(NOW, HEALTHY, away)
    diagnose(NOW + 9, NOW + 9, state())
    assert diagnose(NOW + 18, NOW + 18, away) == ""


def test_a_changed_replica_is_ill_once(diagnose: Diagnosis) -> None:
    changed = state(changed=1, away="0.3 nats differently")
    assert "has changed: 0.3 nats" in diagnose(NOW, HEALTHY, changed)
    diagnose.begin(changed)  # a new server was started
    assert diagnose(NOW + 1, NOW, changed) == ""
    assert "has changed" in diagnose(NOW + 2, NOW + 2, state(changed=2))


def test_health_is_asked_one_probe_at_a_time_until_it_is_closed() -> None:
    asked, both = threading.Semaphore(0), threading.Lock()
    overlaps = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            overlaps.append(not both.acquire(blocking=False))
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header("content-length", "0")
            self.end_headers()
            both.release()
            asked.release()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    watch = HealthWatch(endpoint, "lmdeploy", every_s=0.01)
    try:
        started = watch.healthy_at
        for _ in range(4):
            assert asked.acquire(timeout=10)
        assert watch.healthy_at > started
        assert overlaps == [False] * len(overlaps)
    finally:
        watch.close()
        server.shutdown()
        serving.join()
        server.server_close()
