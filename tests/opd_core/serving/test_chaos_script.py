"""The script of faults: what is refused, which fault meets which request, what happens once."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from opd_core.errors import ConfigError
from opd_core.serving.embedded.chaos_script import (
    Event,
    Script,
    ScriptRun,
    choose,
    parse_script,
    read_script,
    request_digest,
)


def _script(*faults: dict[str, object], **fields: object) -> Script:
    return Script.model_validate_json(json.dumps({"faults": faults} | fields))


def _met(script: Script, requests: int, elapsed_s: float = 0.0) -> list[int]:
    """The fault of each of so many requests, as a server that counts would choose."""
    applied, met = [0] * len(script.faults), []
    for number in range(1, requests + 1):
        met.append(choose(script, Event(number, elapsed_s, [[1]]), applied, ()))
        if met[-1] >= 0:
            applied[met[-1]] += 1
    return met


@pytest.mark.parametrize(
    ("when", "numbers"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"first": 3}, [3, 4, 5, 6, 7, 8]),
        ({"every": 3}, [1, 4, 7]),
        ({"first": 2, "every": 3}, [2, 5, 8]),
        ({"count": 2}, [1, 2]),
        ({"first": 2, "every": 2, "count": 2}, [2, 4]),
    ],
)
def test_requests_are_met_by_number(when: dict[str, object], numbers: list[int]) -> None:
    met = _met(_script({"fault": "hang"} | when), 8)

    assert [number for number, index in enumerate(met, 1) if index == 0] == numbers


def test_the_first_fault_that_fits_wins_and_a_used_one_makes_way() -> None:
    script = _script({"fault": "cut", "first": 2, "count": 1}, {"fault": "hang", "every": 2})

    assert _met(script, 5) == [1, 0, 1, -1, 1]


@pytest.mark.parametrize(("elapsed_s", "met"), [(0.9, -1), (1.0, 0), (1.9, 0), (2.0, -1)])
def test_a_window_holds_its_beginning_and_not_its_end(elapsed_s: float, met: int) -> None:
    script = _script({"fault": "hang", "from_s": 1, "until_s": 2.0})

    assert _met(script, 1, elapsed_s) == [met]


@pytest.mark.parametrize(
    ("when", "sequences", "met"),
    [
        ({"containing": [7, 8]}, [[5, 7, 8]], 0),
        ({"containing": [7, 8]}, [[7, 5, 8], [8, 7]], -1),
        ({"containing": [7, 8]}, [[1], [7, 8, 1]], 0),
        ({"containing": [7, 8]}, [[7]], -1),
        ({"containing": [7]}, [], -1),
        ({"min_tokens": 3}, [[1, 2]], -1),
        ({"min_tokens": 3}, [[1, 2, 3]], 0),
        ({"min_tokens": 3, "containing": [7]}, [[7], [1, 2, 3]], -1),
    ],
)
def test_content_must_fit_within_one_sequence(
    when: dict[str, object], sequences: list[list[int]], met: int
) -> None:
    script = _script({"fault": "die"} | when)

    assert choose(script, Event(1, 0.0, sequences), [0], ()) == met


def test_health_and_requests_are_met_by_their_own_faults_only() -> None:
    script = _script({"fault": "health", "answer": "bad", "first": 3}, {"fault": "hang"})

    checks = [choose(script, Event(number, 0.0, None), [0, 0], ()) for number in (1, 2, 3, 4)]

    assert checks == [-1, -1, 0, 0]
    assert _met(script, 2) == [1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "invalid JSON"),
        ("{}", "faults: field required"),
        ({"faults": [], "seed": 1}, "seed: unknown key (known here: faults, record)"),
        ({"faults": [{}]}, "faults.0: no known fault (known are: cut, die, die_mid_answer"),
        ({"faults": [{"fault": "sleepy"}]}, "faults.0: no known fault (known are: cut, die"),
        (
            {"faults": [{"fault": "hang"}, {"fault": "cut", "delay_s": 1}]},
            "faults.1.cut.delay_s: unknown key (known here: containing, count, every, fault, first"
            ", from_s, min_tokens, once, until_s)",
        ),
        ({"faults": [{"fault": "slow"}]}, "faults.0.slow.delay_s: field required"),
        ({"faults": [{"fault": "hang", "first": 0}]}, "first: input should be greater than or"),
        ({"faults": [{"fault": "hang", "first": True}]}, "first: input should be a valid int"),
        ({"faults": [{"fault": "hang", "every": "2"}]}, "every: input should be a valid int"),
        ({"faults": [{"fault": "wrong_rows", "rows": 0}]}, "rows: input should be -2, -1, 1 or 2"),
        ({"faults": [{"fault": "status", "status": 200}]}, "status: input should be greater"),
        ({"faults": [{"fault": "health", "answer": "no"}]}, "'ok', 'bad' or 'hang'"),
        ({"faults": [{"fault": "health", "answer": "ok", "every": 2}]}, "every: unknown key"),
        ({"faults": [], "record": "no/file"}, "no is no folder to write to"),
    ],
)
def test_a_wrong_script_is_refused_with_what_is_known(
    content: object, message: str, tmp_path: Path
) -> None:
    text = content if isinstance(content, str) else json.dumps(content)

    with pytest.raises(ConfigError) as refusal:
        parse_script(text.encode(), tmp_path / "script.json")

    assert message in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path / 'script.json'}: ")


def test_the_page_shows_a_valid_example_of_every_fault() -> None:
    page = (Path(__file__).parents[3] / "docs" / "chaos.md").read_text()

    shown = _script(*map(json.loads, re.findall(r'`(\{"fault".*?\})`', page)))

    with pytest.raises(ConfigError) as refusal:
        parse_script(b'{"faults": [{"fault": "?"}]}', Path("script.json"))
    known = str(refusal.value).partition("known are: ")[2].rstrip(")").split(", ")
    assert sorted({fault.fault for fault in shown.faults}) == known


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json: the chaos script cannot be read"):
        read_script(tmp_path / "no.json")


def test_a_window_is_measured_from_the_beginning(tmp_path: Path) -> None:
    now = [100.0]
    script = _script({"fault": "hang", "from_s": 5})
    run = ScriptRun(script, tmp_path / "s.json", clock=lambda: now[0])
    run.begin()
    met = []
    for now[0] in (104.0, 105.0):
        run.begin()
        met.append(run.on_request([[1]]) is not None)

    assert met == [False, True]


def test_what_may_happen_once_happens_once_over_restarts_and_replicas(tmp_path: Path) -> None:
    script = _script({"fault": "die", "once": True}, {"fault": "die", "once": True})
    runs = [ScriptRun(script, tmp_path / "s.json") for _ in range(2)]

    met = [run.on_request([[1]]) is not None for run in (*runs, *runs)]
    restarted = ScriptRun(script, tmp_path / "s.json").on_request([[1]])

    assert met == [True, True, False, False]
    assert restarted is None


def test_counts_are_told(tmp_path: Path) -> None:
    script = _script({"fault": "cut", "count": 1}, {"fault": "health", "answer": "ok"})
    run = ScriptRun(script, tmp_path / "s.json")
    for _ in range(3):
        run.on_request([[1]])
    run.on_health_check()

    assert run.facts() == {
        "script": {
            "faults": [{"fault": "cut", "count": 1}, {"fault": "health", "answer": "ok"}],
        },
        "requests": 3,
        "applied": [1, 1],
    }


def test_the_record_grows_by_a_line_and_outlives_the_run(tmp_path: Path) -> None:
    script = _script(record="answered.txt")
    ScriptRun(script, tmp_path / "s.json").record([1, 2], 0)
    ScriptRun(script, tmp_path / "s.json").record([1, 2], 1)

    lines = (tmp_path / "answered.txt").read_text().splitlines()
    assert lines == [request_digest([1, 2], 0), request_digest([1, 2], 1)]
    assert lines[0] == hashlib.sha256(b"[[1, 2], 0]").hexdigest()
