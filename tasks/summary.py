"""What a run came to, for people and programs: the summary, the model card, the table."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from opd_core.analysis.detectors import RunFacts, detect
from opd_core.analysis.run_data import Series
from opd_core.errors import DataError
from opd_core.lifecycle.records import Receipt
from opd_core.preflight import PreflightReport
from opd_core.tracking.journal import JournalRecord, read_all
from opd_core.training.attempts import COMPLETED, can_go_on
from opd_core.training.files import JOURNAL_FILE, MODEL_CARD_FILE, RESULT_FILE, SUMMARY_FILE
from opd_core.training.forks import name_of
from opd_core.training.results import RunResult, read_result, summarise
from opd_core.whole_file import write_whole
from tasks.console import CONSOLE, TERMINAL, announce, log, print_result, warn
from tasks.environment import RunRecord
from tasks.guard import TIMED_OUT
from tasks.mlflow_run import recipe_hash
from tasks.provenance import git_commit

GROUPS = ("completed", "filtered", "failed")
PACKAGES = ("torch", "transformers", "ray", "prefect", "mlflow")
TOLD_BY_CAUSE = {
    "cancelled": "cancelled",
    "KeyboardInterrupt": "cancelled",
    "TerminationSignal": "cancelled",
    TIMED_OUT: "failed",
    "deadline": "failed",
}
"""What a receipt's cause says of the run, where the flow could say no more."""
CRASHED = "crashed"
"""Status of a run whose flow was killed: it has no words of its own."""


def build_summary(
    run: RunRecord, receipt: Receipt, seconds: Mapping[str, float], error: BaseException | None
) -> dict[str, Any]:
    """What ``summary.json`` holds, for a run that ended in any way."""
    status = COMPLETED
    if error is not None:
        status = "failed" if isinstance(error, Exception) else "cancelled"
    elif not receipt.clean:
        status = "failed"
    said = "" if error is None else f"{type(error).__name__}: {error}"
    return _summary(run, receipt, seconds, status, said)


def late_summary(run: RunRecord, receipt: Receipt) -> dict[str, Any]:
    """The summary of a run whose flow was killed before it wrote one. If it had begun to end the
    run by itself, the receipt has its own word for why."""
    said = f"the flow could not tell how the run went; the run's end: {receipt.cause}"
    return _summary(run, receipt, {"teardown": receipt.seconds}, late_status(receipt), said)


def late_status(receipt: Receipt) -> str:
    """The status of such a run."""
    if receipt.cause == "completed":
        return COMPLETED if receipt.clean else "failed"
    told = "failed" if receipt.cause[:1].isupper() else CRASHED  # an exception's name
    return TOLD_BY_CAUSE.get(receipt.cause, told)


def _summary(
    run: RunRecord, receipt: Receipt, seconds: Mapping[str, float], status: str, error: str
) -> dict[str, Any]:
    told = partial(_tell, run, receipt, seconds, status, error)
    try:
        return told(_read_result(run), _read_records(run))
    except Exception as broken:  # whatever the job left, there must be a summary
        warn(f"what the job left makes no summary: {type(broken).__name__}: {broken}")
        return told(RunResult(status="failed"), [])


def _tell(
    run: RunRecord,
    receipt: Receipt,
    seconds: Mapping[str, float],
    status: str,
    error: str,
    result: RunResult,
    records: Sequence[JournalRecord],
) -> dict[str, Any]:
    numbers = summarise(records, since_s=run.history.attempts[-1].started_at)
    facts = RunFacts.of(run.config.resolved())
    return {
        "status": status,
        "error": error,
        "run_id": run.run_id,
        "attempts": len(run.history.attempts),
        "recipe": run.config.name,
        "seed": run.config.seed,
        "train_steps": numbers.train_steps,
        "stopped": result.stopped,
        "accuracy": asdict(numbers.accuracy),
        "pass_at": numbers.pass_at,
        "opd_reverse_kl": asdict(numbers.opd_reverse_kl),
        "groups": dict.fromkeys(GROUPS, 0) | {s: n for s, n in numbers.groups.items() if n},
        "lost": numbers.lost,
        "survivors": result.survivors,
        "findings": [asdict(found) for found in detect(Series.from_records(records), facts)],
        "prompts": result.prompts,
        "server_restarts": {},
        "job_restarts": 0,
        "seconds": {
            name: round(value, 3)
            for name, value in {**seconds, **result.seconds, **numbers.seconds}.items()
        },
        "teardown_clean": receipt.clean,
        "mlflow_run_id": None,
        "student_path": result.student_path,
        "run_directory": str(run.directory),
    }


def _read_result(run: RunRecord) -> RunResult:
    try:
        return read_result(run.directory) or RunResult(status="failed")
    except (OSError, ValueError, TypeError) as error:
        warn(f"{RESULT_FILE} cannot be read: {error}")
        return RunResult(status="failed")


def _read_records(run: RunRecord) -> list[JournalRecord]:
    """Those before a line that cannot be read, which is told."""
    records: list[JournalRecord] = []
    try:
        for record in read_all(run.directory / JOURNAL_FILE):
            records.append(record)
    except (OSError, DataError) as error:
        warn(f"the journal cannot be read to its end: {error}")
    return records


def write_summary(run: RunRecord, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json``; it appears whole or not at all."""
    write_whole(run.directory / SUMMARY_FILE, json.dumps(summary, indent=2))


def read_summary(directory: Path) -> dict[str, Any] | None:
    """What :func:`write_summary` wrote; None where nobody has. Raises OSError or ValueError."""
    try:
        summary: dict[str, Any] = json.loads((directory / SUMMARY_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return summary


def write_model_card(run: RunRecord, checked: PreflightReport, summary: Mapping[str, Any]) -> None:
    """Write what the student is, where it comes from and how it was measured."""
    opd, config = run.config.opd, run.config
    teachers = {name: facts.fingerprint for name, facts in checked.teachers.items()}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    lines = [
        f"# {config.name}: a student distilled on-policy",
        "",
        config.description,
        "",
        f"- Base: `{config.student.model}` ({checked.student and checked.student.fingerprint})",
        f"- Teachers: {teachers or [t.name for t in opd.teachers] if opd else 'none'}",
        f"- Data: `{config.data.train}` {checked.data_sources}",
        f"- Train steps: {summary['train_steps']}, seed {config.seed}, status {summary['status']}",
        f"- Held-out accuracy (sampled): {_span(summary['accuracy'])}",
        f"- opd_reverse_kl (nats/token, first and last five train steps): "
        f"{_span(summary['opd_reverse_kl'])}",
        f"- Groups: {summary['groups']}",
        f"- Recipe hash {recipe_hash(run)}, code {git_commit(run.directory) or 'unknown'}, "
        f"{versions}",
    ]
    if (forked_from := run.history.forked_from) is not None:
        lines.append(f"- Began from train step {forked_from.train_step} of {forked_from.run_id}")
    (run.directory / MODEL_CARD_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def show_summary(summary: Mapping[str, Any]) -> None:
    """Tell the run's end: a table at the terminal, JSON on standard output if it was asked for.
    Raises OSError if nobody takes that."""
    log(logging.INFO, f"summary: {json.dumps(summary)}")
    if TERMINAL.lines:
        CONSOLE.print(_table(summary))
        if summary["lost"] and summary["survivors"]:
            # Below the table: a cell of it would break the lines.
            CONSOLE.print(summary["survivors"], markup=False, soft_wrap=True)
    directory = Path(summary["run_directory"])
    if summary["status"] != COMPLETED and can_go_on(directory):
        announce(f"continue it with: opd run --resume {name_of(directory)}")
    if TERMINAL.summary_json:
        print_result(json.dumps(summary))


def _table(summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"{summary['run_id']}: {summary['status']}", show_header=False)
    table.add_row("accuracy (held out, sampled)", _span(summary["accuracy"]))
    table.add_row("opd_reverse_kl (nats/token)", _span(summary["opd_reverse_kl"]))
    if summary["pass_at"]:
        shares = (f"pass@{k} {share:.3f}" for k, share in summary["pass_at"].items())
        table.add_row("held out, any of k answers", ", ".join(shares))
    table.add_row("train steps", str(summary["train_steps"]))
    if summary["stopped"]:
        table.add_row("stopped early", Text(summary["stopped"]))
    if summary["attempts"] > 1:
        table.add_row("attempts", str(summary["attempts"]))
    counts = (f"{count} {status}" for status, count in summary["groups"].items())
    table.add_row("groups", ", ".join(counts))
    if summary["lost"]:
        causes = (f"{count} {cause}" for cause, count in summary["lost"].items())
        table.add_row("lost", ", ".join(causes))
    for found in summary["findings"]:
        table.add_row(f"{found['level']}: {found['name']}", Text(found["evidence"]))
    if summary["server_restarts"]:
        table.add_row("servers started again", str(summary["server_restarts"]))
    if summary["job_restarts"]:
        table.add_row("job started again", str(summary["job_restarts"]))
    seconds = sorted(summary["seconds"].items(), key=lambda item: -item[1])
    table.add_row("seconds", ", ".join(f"{name} {value:.0f}" for name, value in seconds))
    for name, sink in summary.get("tracking", {}).items():
        table.add_row(f"tracking: {name}", Text(_shipped(sink)))
    table.add_row("teardown", "nothing left" if summary["teardown_clean"] else "NOT CLEAN")
    table.add_row("student", summary["student_path"] or "-")
    table.add_row("MLflow run", summary["mlflow_run_id"] or "-")
    table.add_row("everything else", summary["run_directory"])
    if summary["error"]:
        table.add_row("error", Text(summary["error"]))
    return table


def _shipped(sink: Mapping[str, Any]) -> str:
    whole = "everything" if sink["complete"] else f"INCOMPLETE, {sink['shipped']} records"
    failed = sink["failed_attempts"]
    troubles = f", {failed} failed attempts ({sink['last_error']})" if failed else ""
    return f"{whole}, {sink['cpu_s']:.1f} s of CPU{troubles}"


def _span(span: Mapping[str, Any]) -> str:
    def number(key: str) -> str:
        value, stderr = span[key], span[f"{key}_stderr"]
        return "-" if value is None else f"{value:.3f} ± {stderr:.3f}"

    return f"{number('before')} → {number('after')}"
