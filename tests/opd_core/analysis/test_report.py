"""The report as a file: whatever the run left, there is a page, and it is not too large."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest

from opd_core.analysis.report import build_report, write_report
from opd_core.errors import ConfigError
from opd_core.training.links import Links
from opd_core.training.token_kl import read_token_kl, write_token_kl
from tests.opd_core.analysis.run_builder import RunBuilder

MB = 1_000_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RunBuilder(data_sources=("chain_sum", "math_dapo")).write(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A run directory of the test's own; without a journal, whose curves take most of the time."""
    return shutil.copytree(written, tmp_path / "run", ignore=lambda *_: ["metrics.jsonl"])


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", html, flags=re.S).split())


def test_the_report_of_a_whole_run_shows_every_section(written: Path) -> None:
    path = write_report(written)
    assert path == written / "report.html"
    html = path.read_text()
    assert path.stat().st_size < MB
    assert not re.findall('class="missing">([^<]*)', html)
    text = text_of(html)
    for said in (
        "completed",
        "seed 0",
        "130,000",
        "0.05 EUR",
        "9a6e7d94760b44e1b768ef57132f64c3",
        "advantage dominated by a few tokens",
        "set opd.kl_clamp, for example to 5",
        "Reverse KL by data source",
        "KL by token class",
        "not scored; 12 tokens on average",
        "Before (train step 1)",
        "After (train step 50)",
        "timeout 3",
        "tensorboard",
        "clean: nothing is left",
        "device_hour: 2.5",
        "279ef4365b1c",
        "set enable_thinking",
    ):
        assert said in text


def test_held_out_questions_name_the_train_steps_of_their_evaluations(run: Path) -> None:
    (run / "evaluations" / "step-000000.json").unlink()
    section = build_report(run).partition('id="questions"')[2].partition("</section>")[0]
    assert re.findall(r">(train step \d+)<", section) == ["train step 25", "train step 50"]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


REMOVED = {
    "summary.json": "The run has no summary yet",
    "metrics.jsonl": "The journal has no metrics",
    "pair_check.json": "no pair_check.json",
    "receipt.json": "no receipt.json",
    "provenance.json": "no provenance.json",
    "token_kl": "no token_kl/",
    "evaluations": "no evaluations/",
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_is_missing_costs_one_line(run: Path, name: str) -> None:
    remove(run / name)
    assert REMOVED[name] in text_of(build_report(run))


def test_a_run_that_has_only_begun_has_a_report(run: Path) -> None:
    for name in REMOVED:
        remove(run / name)
    text = text_of(build_report(run))
    assert all(said in text for said in REMOVED.values())


@pytest.mark.parametrize("name", ["pair_check.json", "receipt.json", "token_kl/step-000001.json"])
@pytest.mark.parametrize("content", ["{", "[1]", '{"rows": 3}'])
def test_what_cannot_be_read_costs_one_line(run: Path, name: str, content: str) -> None:
    (run / name).write_text(content)
    told = re.findall('class="missing">([^<]*)', build_report(run))
    assert [Path(name).name in each for each in told].count(True) == 1


def test_a_run_without_a_teacher_says_why_there_is_no_kl(tmp_path: Path) -> None:
    text = text_of(build_report(RunBuilder(teacher=False, steps=10).write(tmp_path)))
    assert "This run has no teacher (opd: null), so there is no KL to it." in text
    assert "This run has no teacher to check against its student." in text
    assert "Teacher tokens" not in text
    assert "token by token" not in text


def changed(run: Path, change: Callable[[dict[str, object]], object]) -> str:
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    change(summary)
    path.write_text(json.dumps(summary))
    return text_of(build_report(run))


def test_findings_say_whether_anybody_looked(run: Path) -> None:
    assert "None of the known failures was seen." in changed(run, lambda s: s.update(findings=[]))
    assert "Nothing looked for known failures" in changed(run, lambda s: s.pop("findings"))


def test_a_run_that_failed_says_how_it_ended(run: Path) -> None:
    told = {"status": "failed", "error": "SurvivorError: <too few>"}
    assert "How it ended: SurvivorError: &lt;too few&gt;" in changed(run, lambda s: s.update(told))


def test_no_text_of_the_run_becomes_markup(run: Path) -> None:
    bad = "<script>alert(1)</script>"
    summary = json.loads((run / "summary.json").read_text())
    finding = dict.fromkeys(("name", "evidence", "cause", "cure", "level"), bad)
    summary |= {"error": bad, "survivors": bad, "lost": {bad: 1}, "findings": [finding]}
    summary |= {"status": bad, "student_path": bad, "tracking": {bad: {"last_error": bad}}}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "config.json").write_text(json.dumps({"name": bad, "description": bad, bad: bad}))
    path = run / "token_kl" / "step-000001.json"
    record = read_token_kl(path)
    one = replace(record.rollouts[0], prompt_text=bad, why=bad, data_source=bad, finish_reason=bad)
    sums = tuple(replace(cell, data_source=bad) for cell in record.sums)
    write_token_kl(path, replace(record, rollouts=(one,), sums=sums))
    html = build_report(run)
    assert html.count("&lt;script&gt;alert") > 10
    assert "<script>alert" not in html


def test_half_a_surrogate_pair_does_not_break_the_page(run: Path) -> None:
    path = run / "token_kl" / "step-000001.json"
    record = read_token_kl(path)
    rollouts = tuple(replace(rollout, prompt_text="\ud83d") for rollout in record.rollouts)
    write_token_kl(path, replace(record, rollouts=rollouts))
    assert write_report(run).read_text(encoding="utf-8")


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        write_report(tmp_path)


@pytest.mark.slow
def test_a_run_of_50_mb_gives_a_report_below_5_mb(tmp_path: Path) -> None:
    build = RunBuilder(
        steps=300,
        response_tokens=16_384,
        rollouts_kept=6,
        rollouts_every=50,
        prompt="<p>" * 20_000,
        data_sources=("chain_sum", "math_dapo", "code"),
    )
    run = build.write(tmp_path)
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert size > 50 * MB
    started = process_time()
    path = write_report(run)
    seconds = process_time() - started
    assert path.stat().st_size < 5 * MB
    print(f"{size / MB:.0f} MB gave {path.stat().st_size / MB:.2f} MB in {seconds:.1f} s of CPU")
    text = text_of(path.read_text())
    assert "tokens left out, mean k" in text
    assert "56,000 characters left out" in text


@pytest.mark.slow
def test_more_rollouts_than_there_is_room_for_are_counted(tmp_path: Path) -> None:
    run = RunBuilder(steps=2, response_tokens=1500, rollouts_kept=60).write(tmp_path)
    path = write_report(run)
    assert path.stat().st_size < 5 * MB
    shown = path.read_text().count('class="tokens"')
    (first, last) = map(int, re.findall(r"(\d+) more kept rollouts of this step", path.read_text()))
    assert shown + first + last == 120


UNREADABLE = {
    "metrics.jsonl": "curves",
    "config.json": "settings",
    "provenance.json": "provenance",
    "evaluations/step-000050.json": "questions",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_damaged_file_costs_its_own_section_one_line(run: Path, name: str) -> None:
    (run / name).write_text("nonsense\n{}\n")
    html = build_report(run)
    section = html.partition(f'<h2 id="{UNREADABLE[name]}"')[2].partition("</section>")[0]
    (told,) = re.findall('class="missing">([^<]*)', section)
    assert name in told
    assert "completed" in text_of(html)


def test_a_damaged_summary_is_told_in_the_head(run: Path) -> None:
    (run / "summary.json").write_text("{")
    header = build_report(run).partition("</header>")[0]
    assert "summary.json: expected JSON" in header


ODD = {
    "findings": (["x"], 7, {"a": 1}, [[1]]),
    "seconds": ({"total": "x"}, {"total": [1]}, {"checks": None}),
    "tracking": ({"mlflow": None}, 7, [1]),
    "groups": ([1], {"completed": "many"}, "abc"),
    "lost": ("abc", [1], {"timeout": None}),
    "accuracy": ({"before": "x"},),
}


@pytest.mark.parametrize(("key", "value"), [(key, v) for key in ODD for v in ODD[key]])
def test_an_odd_summary_costs_its_sections_one_line(run: Path, key: str, value: object) -> None:
    told = changed(run, lambda summary: summary.update({key: value}))
    assert "summary.json" in told
    assert "holds what cannot be shown here" in told


@pytest.mark.parametrize(
    "attempts", [[1, 2], 7, {"a": 1}, [{"gpus": 5}], [{"started_at": 1e300}], [[1]]]
)
def test_odd_attempts_cost_their_section_one_line(run: Path, attempts: object) -> None:
    (run / "provenance.json").write_text(json.dumps({"attempts": attempts}))
    told = re.findall('class="missing">([^<]*)', build_report(run).partition('id="provenance"')[2])
    assert ["holds what cannot be shown here" in each for each in told] == [True]


def test_a_summary_without_findings_has_them_looked_for(written: Path, tmp_path: Path) -> None:
    run = shutil.copytree(written, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["train_step"]:
            record["metrics"]["engine_logprob_gap"] = 0.2
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert "engine_gap train step 3" in changed(run, lambda summary: summary.pop("findings"))


def test_the_page_says_what_the_teacher_does_and_what_the_whiskers_are(run: Path) -> None:
    text = text_of(build_report(run))
    assert "the teacher&#39;s term pushes it down" in text or "the teacher's term pushes" in text
    assert "The thin lines are ± one standard error" in text


def test_the_head_links_the_runs_pages_and_nothing_that_is_no_page(run: Path) -> None:
    assert "Shown in" not in build_report(run)
    Links("http://prefect:4200/runs/x", "http://mlflow:5000/#/a", "javascript:x").write(run)
    html = build_report(run)
    assert '<a href="http://prefect:4200/runs/x">Prefect run</a>' in html
    assert '<a href="http://mlflow:5000/#/a">MLflow run</a>' in html
    assert "javascript:x" not in html
