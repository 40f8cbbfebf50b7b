"""Student and teachers on disk: readable, and each teacher held against the student."""

from __future__ import annotations

from opd_core.config import CONTEXT_MARGIN, ExperimentConfig
from opd_core.data import Row
from opd_core.errors import DataError, PreflightError
from opd_core.preflight.facts import LoadTokenizer, ModelFacts, read_model_facts
from opd_core.preflight.items import TeacherServer, build_card, student_context_problem
from opd_core.preflight.renderings import Rendered, Rendering, choose_rows, render, sample_rows
from opd_core.preflight.report import PreflightReport
from opd_core.serving.servers import Server, needed_context, student_servers, teacher_servers


def check_models(
    config: ExperimentConfig, report: PreflightReport, tokenizers: LoadTokenizer
) -> None:
    """Read every model, then hold each teacher against the student."""
    try:
        report.student = read_model_facts(config.student.model, "student", tokenizers)
    except PreflightError as error:
        report.problems.append(str(error))
    else:
        _check_student(config, report.student, report, tokenizers)
    if problem := _context_of_samplers(config, report.student):
        report.problems.append(problem)
    rows = _rows(config) if report.student else []
    checked: set[tuple[object, ...]] = set()
    for server in teacher_servers(config.opd):
        assert server.teacher is not None
        try:
            facts = read_model_facts(server.launch.model, server.who, tokenizers)
        except PreflightError as error:
            report.problems.append(str(error))
            continue
        first = report.teachers.setdefault(server.teacher, facts)
        if facts.fingerprint != first.fingerprint:
            report.problems.append(
                f"{server.who}: {facts.path} is not the model of its other replicas "
                f"({first.path}): a teacher is one frozen model; give this one its own name"
            )
        alike = (server.teacher, facts.path, server.backend, server.launch.context_length)
        if alike in checked:
            continue  # a further replica of the same server
        checked.add(alike)
        chosen = _rows_of(server.teacher, rows, config)
        renderings = _render(chosen, config.student.model, facts.path, tokenizers)
        _add_card(config, report, _launched(server, facts), renderings)
    for name in _external_teachers(config):
        renderings = _render(_rows_of(name, rows, config), config.student.model, None, tokenizers)
        _add_card(config, report, _external(name, config), renderings)


def _external_teachers(config: ExperimentConfig) -> list[str]:
    """Names of the teachers with a server that the run does not start."""
    return [
        teacher.name
        for teacher in (config.opd.teachers if config.opd else ())
        if any(replica.launch is None for replica in teacher.all_replicas)
    ]


def _check_student(
    config: ExperimentConfig,
    student: ModelFacts,
    report: PreflightReport,
    tokenizers: LoadTokenizer,
) -> None:
    if problem := student_context_problem(student, config.rollout_tokens):
        report.problems.append(problem)
    if tokenizers(student.path).chat_template is None:
        report.problems.append(
            f"student: the tokenizer at {student.path} has no chat template to render prompts; "
            "set its chat_template"
        )


def _context_of_samplers(config: ExperimentConfig, student: ModelFacts | None) -> str:
    """What is wrong with the context of the student's servers; empty where nothing is known to
    be. All of them are launched alike."""
    for server in student_servers(config)[:1]:
        needed, given = needed_context(config, server.backend), server.launch.context_length or 0
        own = (student and student.context_length) or given
        if own >= config.rollout_tokens and not needed <= given <= own:
            return (
                f"the student's servers: their context of {given} tokens has to hold {needed} "
                f"(data.max_prompt_tokens + sampling.max_new_tokens + "
                f"{CONTEXT_MARGIN[server.backend]} kept back by {server.backend}), and the model's "
                f"own is {own}: lower one of them, or mend sampling.server.context_length"
            )
    return ""


def _rows(config: ExperimentConfig) -> list[Row]:
    try:
        return sample_rows(config.data.train)
    except DataError:
        return []  # told by the data check


def _rows_of(teacher: str, rows: list[Row], config: ExperimentConfig) -> list[Row]:
    """Some rows of every ``data_source`` that this teacher scores."""
    assert config.opd is not None
    return choose_rows(row for row in rows if config.opd.teacher_of(row.data_source) == teacher)


def _render(
    rows: list[Row], student: str, teacher: str | None, tokenizers: LoadTokenizer
) -> tuple[Rendering, ...]:
    return tuple(
        Rendering(
            row.number,
            row.data_source,
            render(tokenizers(student), row.messages),
            render(tokenizers(teacher), row.messages) if teacher else Rendered(refusal="external"),
        )
        for row in rows
    )


def _launched(server: Server, facts: ModelFacts) -> TeacherServer:
    context = server.launch.context_length or facts.context_length
    margin = CONTEXT_MARGIN[server.backend]
    return TeacherServer(server.who, server.backend, facts, context, margin)


def _external(name: str, config: ExperimentConfig) -> TeacherServer:
    """The external servers of one teacher, of which no file is known."""
    assert config.opd is not None
    (teacher,) = (teacher for teacher in config.opd.teachers if teacher.name == name)
    backends = [replica.backend for replica in teacher.all_replicas if replica.launch is None]
    strictest = max(backends, key=lambda backend: CONTEXT_MARGIN[backend])
    return TeacherServer(f"teacher {name!r}", strictest, None, 0, CONTEXT_MARGIN[strictest])


def _add_card(
    config: ExperimentConfig,
    report: PreflightReport,
    teacher: TeacherServer,
    renderings: tuple[Rendering, ...],
) -> None:
    """Keep the card, and tell what its rows decided; each message once."""
    card = build_card(
        report.student,
        teacher,
        config.sampling,
        group_size=config.task.group_size,
        tokens=config.rollout_tokens,
        renderings=renderings,
    )
    report.cards.append(card)
    report.problems += [text for text in card.told("error") if text not in report.problems]
    report.warnings += [
        text for text in card.told("warning", "unknown") if text not in report.warnings
    ]
