"""Waiting for a server, asking for its model, the proof that it scores: over real HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import pytest

from opd_core.config import Backend, OPDTeacherConfig
from opd_core.errors import ServingError
from opd_core.lifecycle.ports import reserve_ports
from opd_core.scoring.facts import TeacherFacts
from opd_core.serving.readiness import (
    context_length,
    prove_teacher,
    read_model_info,
    wait_until_healthy,
)

Answer = tuple[int, Any]
Answerer = Callable[["Request"], Answer]


class Request(BaseHTTPRequestHandler):
    """One request; what it is answered with is the server's ``answer``."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, TinyServer)
        length = int(self.headers.get("content-length") or 0)
        self.body: Any = orjson.loads(self.rfile.read(length)) if length else None
        status, content = server.answered(self)
        payload = content if isinstance(content, bytes) else orjson.dumps(content)
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests look at what was asked."""


class TinyServer(ThreadingHTTPServer):
    """Answers as it is told, and remembers what was asked and how many asked at once."""

    daemon_threads = True

    def __init__(self, answer: Answerer, port: int) -> None:
        super().__init__(("127.0.0.1", port), Request)
        self.answer = answer
        self.asked: list[Request] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.asked]

    def answered(self, request: Request) -> Answer:
        with self._lock:
            self.asked.append(request)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self.answer(request)
        finally:
            with self._lock:
                self._now -= 1


@contextmanager
def serving(answer: Answerer, port: int = 0) -> Iterator[TinyServer]:
    with TinyServer(answer, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def in_turn(*answers: Answer) -> Answerer:
    """These answers one after the other, the last one for ever."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def alive() -> None:
    """The server's process lives."""


def wait(endpoint: str, backend: Backend = "sglang", **more: Any) -> float:
    return wait_until_healthy(endpoint, backend, **{"limit_s": 30.0, "still_alive": alive, **more})


# ------------------------------------------------------------------ health


def test_a_server_is_waited_for_until_it_is_ready() -> None:
    told: list[tuple[float, str]] = []
    with serving(in_turn((503, b""), (503, b""), (200, b""))) as server:
        seconds = wait(server.endpoint, waiting=lambda s, state: told.append((s, state)))
    assert server.paths == ["/health_generate"] * 3
    assert [state for _, state in told] == ["HTTP 503", "HTTP 503"]
    assert 0 < told[0][0] < told[1][0] < seconds < 30


@pytest.mark.parametrize(
    ("backend", "path"),
    [("sglang", "/health_generate"), ("embedded", "/health_generate"), ("lmdeploy", "/health")],
)
def test_each_backend_has_its_own_health_path(backend: Backend, path: str) -> None:
    with serving(in_turn((200, b""))) as server:
        wait(server.endpoint, backend)
    assert server.paths == [path]


def test_a_server_that_does_not_listen_yet_is_waited_for() -> None:
    told: list[str] = []
    with ExitStack() as later, reserve_ports(1) as reserved:  # held, so that nobody answers there
        (port,) = reserved.ports

        def waiting(seconds: float, state: str) -> None:
            told.append(state)
            reserved.release()
            later.enter_context(serving(in_turn((200, b"")), port))

        wait(f"http://127.0.0.1:{port}", waiting=waiting)
    assert len(told) == 1
    assert "refused" in told[0]


def test_a_dead_process_is_told_at_once_in_its_own_words() -> None:
    with serving(in_turn((503, b""))) as server:
        asked = iter([True, True, False])

        def still_alive() -> None:
            if not next(asked):
                raise ServingError("teacher died: exit status 1\nlast line of its log")

        started = time.monotonic()
        with pytest.raises(ServingError, match="exit status 1\nlast line of its log"):
            wait(server.endpoint, limit_s=15.0, still_alive=still_alive)
        assert time.monotonic() - started < 15
        assert len(server.asked) == 2


def test_a_dead_process_is_not_even_asked() -> None:
    def dead() -> None:
        raise ServingError("dead on arrival")

    with serving(in_turn((200, b""))) as server:
        with pytest.raises(ServingError, match="dead on arrival"):
            wait(server.endpoint, still_alive=dead)
        assert server.asked == []


def test_a_server_that_never_gets_ready_is_given_up_with_its_last_answer() -> None:
    with (
        serving(in_turn((503, b""))) as server,
        pytest.raises(
            ServingError, match=r"lmdeploy server at .* is not ready after 1 s"
        ) as caught,
    ):
        wait(server.endpoint, "lmdeploy", limit_s=0.6)
    assert "last answer: HTTP 503" in str(caught.value)
    assert "raise startup_limit_s" in str(caught.value)


def test_one_probe_waits_at_a_time_and_no_longer_than_the_limit() -> None:
    let_go = threading.Event()

    def frozen(request: Request) -> Answer:
        let_go.wait(timeout=30)
        return 503, b""

    started = time.monotonic()
    with serving(frozen) as server:
        try:
            with pytest.raises(ServingError, match="last answer: timed out"):
                wait(server.endpoint, limit_s=1.0)
            seconds = time.monotonic() - started
        finally:
            let_go.set()
    assert len(server.asked) == server.most_at_once == 1
    assert 1.0 <= seconds < 15  # not the 25 s that a probe may take


# ------------------------------------------------------------------ model info


def by_path(answers: dict[str, Answer]) -> Answerer:
    return lambda request: answers.get(request.path, (404, {"error": "no such path"}))


def test_the_model_is_asked_for_at_its_path() -> None:
    told = {"vocab_size": 97, "context_length": 64}
    with serving(by_path({"/model_info": (200, told)})) as server:
        assert read_model_info(server.endpoint, "sglang", None) == told
        assert server.paths == ["/model_info"]
        assert "authorization" not in server.asked[0].headers


@pytest.mark.parametrize("missing", [(404, b""), (200, b"no json"), (200, [1]), (500, {"a": 1})])
def test_an_older_server_is_asked_under_the_older_name(missing: Answer) -> None:
    older = {"model_path": "/m", "context_length": 64}
    answers = {"/model_info": missing, "/get_model_info": (200, older)}
    with serving(by_path(answers)) as server:
        info = read_model_info(server.endpoint, "embedded", None)
        assert server.paths == ["/model_info", "/get_model_info"]
    assert info["model_path"] == "/m"
    assert context_length(info) == 64


def test_a_context_length_that_only_the_list_of_models_tells_is_found() -> None:
    listed = {"object": "list", "data": [{"id": "teacher", "max_model_len": 256}]}
    answers = {"/model_info": (200, {"model_path": "/m", "id": "m"}), "/v1/models": (200, listed)}
    with serving(by_path(answers)) as server:
        info = read_model_info(server.endpoint, "sglang", None)
    assert (info["model_path"], info["id"], context_length(info)) == ("/m", "m", 256)


def test_lmdeploys_list_of_models_gives_its_one_model() -> None:
    listed = {"object": "list", "data": [{"id": "teacher", "max_model_len": 2048}]}
    with serving(by_path({"/v1/models": (200, listed)})) as server:
        info = read_model_info(server.endpoint, "lmdeploy", None)
    assert info == {"id": "teacher", "max_model_len": 2048}
    assert server.paths == ["/v1/models"]


def test_a_key_is_sent_as_a_bearer_token() -> None:
    with serving(by_path({"/model_info": (200, {"a": 1})})) as server:
        read_model_info(server.endpoint, "sglang", "sk-1")
    assert server.asked[0].headers["authorization"] == "Bearer sk-1"


def test_a_server_that_says_nothing_usable_is_no_error() -> None:
    with serving(by_path({"/v1/models": (200, {"data": []})})) as server:
        assert read_model_info(server.endpoint, "sglang", None) == {}
        assert read_model_info(server.endpoint, "lmdeploy", None) == {}
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    assert read_model_info(f"http://127.0.0.1:{port}", "sglang", None) == {}


# ------------------------------------------------------------------ the scoring round trip


def scores(offset_of_a_later_start: float) -> Answerer:
    """SGLang's rows with logprob -position, moved where the scoring starts later."""

    def answer(request: Request) -> Answer:
        ids, start = request.body["input_ids"], request.body["logprob_start_len"]
        moved = offset_of_a_later_start if start else 0.0
        rows = [[None, ids[start], None]]
        rows += [[moved - i, ids[i], None] for i in range(start + 1, len(ids))]
        return 200, {"meta_info": {"input_token_logprobs": rows}}

    return answer


def prove(*servers: TinyServer) -> Any:
    teacher = OPDTeacherConfig.model_validate(
        {"name": "teacher", "replicas": [{"endpoint": server.endpoint} for server in servers]}
    )
    facts = TeacherFacts(vocab_size=97)
    return prove_teacher(teacher, facts, "sk-1", [[5, 6, 7, 8], [9, 10, 11]], "float32")


def test_a_teacher_is_proven_on_all_its_replicas() -> None:
    with serving(scores(0.0)) as one, serving(scores(0.0)) as other:
        proof = prove(one, other)
        assert len(one.asked) == len(other.asked) > 4
        assert one.asked[0].headers["authorization"] == "Bearer sk-1"
    assert (proof.tokens, proof.spread) == (2 * (3 + 2), 0.0)
    assert proof.mean_logprob == -(1 + 2 + 3 + 1 + 2) / 5


def test_a_teacher_that_scores_differently_from_a_later_start_is_refused() -> None:
    with (
        serving(scores(0.0)) as good,
        serving(scores(-0.5)) as bad,
        pytest.raises(ServingError, match=r"differs by 0\.5 nats"),
    ):
        prove(good, bad)


def test_a_teacher_that_is_up_but_does_not_score_is_refused() -> None:
    with (
        serving(in_turn((401, {"error": "Unauthorized"}))) as server,
        pytest.raises(ServingError, match=r"does not score .*HTTP 401: Unauthorized"),
    ):
        prove(server)
