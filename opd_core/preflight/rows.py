"""The data, the functions that judge it, and the sequences of the scoring proof."""

from __future__ import annotations

from itertools import islice

from opd_core.agent_loop.functions import import_function
from opd_core.agent_loop.tools import stop_ids_of
from opd_core.config import ExperimentConfig
from opd_core.data import count_data_sources, iter_rows
from opd_core.errors import ConfigError, DataError
from opd_core.preflight.facts import LoadTokenizer
from opd_core.preflight.report import PreflightReport

PROOF_SEQUENCES = 2
PROOF_TOKENS = 64


def check_data(
    config: ExperimentConfig, report: PreflightReport, tokenizers: LoadTokenizer
) -> None:
    """Scan the data files: every row readable, every ``data_source`` with a teacher."""
    report.data_sources = _scan(config.data.train, report)
    if config.opd is not None:
        for source, rows in sorted(report.data_sources.items()):
            if config.opd.teacher_of(source) is None:
                report.problems.append(
                    f"{config.data.train}: data_source {source!r} ({rows} rows) has no teacher: "
                    "add it to opd.data_source_teacher_map, or name opd.default_teacher"
                )
    if config.data.evaluation is not None:
        held_out = _scan(config.data.evaluation, report)
        if held_out and not config.task.judged:
            report.warnings.append(
                "data.evaluation is named but no judge is, so nothing can be evaluated: name "
                "task.judge or task.batch_judge"
            )
        if held_out:
            _check_ground_truth(config, config.data.evaluation, report)
    if report.data_sources:
        _check_ground_truth(config, config.data.train, report)
        _make_proof(config, report, tokenizers)


def check_functions(
    config: ExperimentConfig, report: PreflightReport, tokenizers: LoadTokenizer
) -> None:
    """Import the judge, the filter and the tool, as the run will, and find the tool's tokens."""
    task = config.task
    named = {
        "task.judge": task.judge,
        "task.batch_judge": task.batch_judge,
        "task.filter_func": task.filter_func,
        "task.tool": task.tool,
    }
    for key, path in named.items():
        if path is None:
            continue
        try:
            import_function(path)
        except ConfigError as error:
            report.problems.append(f"{key}: {error}")
    if task.tool_stop and report.student is not None:  # else told by the model check
        try:
            stop_ids_of(task.tool_stop, tokenizers(config.student.model), report.student.end_ids)
        except ConfigError as error:
            report.problems.append(str(error))


def _scan(path: str, report: PreflightReport) -> dict[str, int]:
    """Rows by ``data_source``; {} with a problem told if the file cannot be used."""
    try:
        sources = dict(count_data_sources(path))
    except DataError as error:
        report.problems.append(str(error))
        return {}
    if not sources:
        report.problems.append(f"{path}: holds no rows")
    return sources


def _check_ground_truth(config: ExperimentConfig, path: str, report: PreflightReport) -> None:
    if config.task.judge is None:
        return
    lacking = next((row.number for row in iter_rows(path) if row.ground_truth is None), None)
    if lacking is not None:
        report.problems.append(
            f"{path}: row {lacking} has no reward_model.ground_truth, but task.judge is set"
        )


def _make_proof(
    config: ExperimentConfig, report: PreflightReport, tokenizers: LoadTokenizer
) -> None:
    """The first prompts as token ids: at least 3 each, and no longer than a rollout may be."""
    if report.student is None:
        return  # told by the model check
    tokenizer = tokenizers(config.student.model)
    if tokenizer.chat_template is None:
        return  # told as well
    models = [report.student, *report.teachers.values()]
    vocab_size = min(model.vocab_size for model in models)
    longest = config.rollout_tokens
    length = max(3, min(PROOF_TOKENS, longest))
    for row in islice(iter_rows(config.data.train), PROOF_SEQUENCES):
        where = f"{config.data.train}: row {row.number}"
        try:
            text = tokenizer.apply_chat_template(
                row.messages, tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # a template may refuse roles in its own words
            report.problems.append(f"{where}: the student's tokenizer cannot render it: {error}")
            return
        if not ids or max(ids) >= vocab_size:
            report.problems.append(
                f"{where}: its ids ({ids!r:.80}) must be some, all below the models' vocabulary of "
                f"{vocab_size}; is the tokenizer that of the model?"
            )
            return
        report.proof_sequences.append((ids * 3)[:length])
