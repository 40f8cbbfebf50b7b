"""Student and teachers on disk: readable, of one tokenizer, and long enough for the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opd_core.config import CONTEXT_MARGIN, ExperimentConfig
from opd_core.data import iter_rows
from opd_core.errors import DataError, PreflightError
from opd_core.preflight.launches import Launched, external_teachers, launches
from opd_core.preflight.report import ModelFacts, PreflightReport

WHOLE_FILE_BYTES = 64 * 2**20

LoadTokenizer = Callable[[str], Any]


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside a model, from local files only."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def read_model_facts(path: str, who: str, tokenizers: LoadTokenizer = load_tokenizer) -> ModelFacts:
    """Read config and tokenizer of a local model. Raises :class:`PreflightError`.

    ``tokenizers`` loads one by its path, perhaps from a cache.
    """
    from transformers import AutoConfig

    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise PreflightError(
            f"{who}: no model at {path!r} (expected a directory with config.json; "
            "run `opd prepare` for the models of shipped recipes)"
        )
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    if not weights:
        raise PreflightError(f"{who}: {path} holds no weights (*.safetensors)")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        text = config.get_text_config()
        vocab_size = int(text.vocab_size)
        tokenizer = tokenizers(path)
    except Exception as error:  # the readers of these files raise whatever they like
        raise PreflightError(f"{who}: the model at {path} cannot be read: {error}") from None
    return ModelFacts(
        path=path,
        vocab_size=vocab_size,
        context_length=int(getattr(text, "max_position_embeddings", 0) or 0),
        tokenizer_hash=tokenizer_hash(tokenizer),
        fingerprint=fingerprint([folder / "config.json", *weights]),
        weights_bytes=sum(file.stat().st_size for file in weights),
        eos_token_id=tokenizer.eos_token_id,
        tokenizer_size=1 + max(tokenizer.get_vocab().values()),
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of what ids mean: the vocabulary, special tokens included."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=False).encode()).hexdigest()[:16]


def fingerprint(files: list[Path]) -> str:
    """Hash of the files' contents; of large files: size, first and last MiB."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= WHOLE_FILE_BYTES:
                digest.update(stream.read())
            else:
                digest.update(stream.read(2**20))
                stream.seek(-(2**20), 2)
                digest.update(stream.read())
    return digest.hexdigest()[:16]


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
    for server in launches(config):
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
        _check_context(config, server, facts, report)
        if report.student is not None:
            _check_pair(server.who, report.student, facts, report)
            _compare_rendering(config, server, report, tokenizers)
    report.warnings += [
        f"teacher {name!r}: its server is external, so its tokenizer and its context length "
        "cannot be checked here"
        for name in external_teachers(config)
    ]


def _needed_tokens(config: ExperimentConfig) -> int:
    return config.data.max_prompt_tokens + config.sampling.max_new_tokens


def _check_student(
    config: ExperimentConfig,
    student: ModelFacts,
    report: PreflightReport,
    tokenizers: LoadTokenizer,
) -> None:
    needed = _needed_tokens(config)
    if student.context_length and student.context_length < needed:
        report.problems.append(
            f"student: its context of {student.context_length} tokens is shorter than prompt + "
            f"response ({needed} = data.max_prompt_tokens + sampling.max_new_tokens)"
        )
    if tokenizers(student.path).chat_template is None:
        report.problems.append(
            f"student: the tokenizer at {student.path} has no chat template to render prompts; "
            "set its chat_template"
        )


def _check_context(
    config: ExperimentConfig, server: Launched, facts: ModelFacts, report: PreflightReport
) -> None:
    context = server.launch.context_length or facts.context_length
    margin = CONTEXT_MARGIN[server.backend]
    needed = _needed_tokens(config) + margin
    if context and context < needed:
        report.problems.append(
            f"{server.who}: its context of {context} tokens is too short: data.max_prompt_tokens + "
            f"sampling.max_new_tokens + {margin} (kept back by {server.backend}) = {needed}"
        )


def _check_pair(
    who: str, student: ModelFacts, teacher: ModelFacts, report: PreflightReport
) -> None:
    if teacher.tokenizer_hash != student.tokenizer_hash:
        report.problems.append(
            f"{who}: its tokenizer is not the student's ({teacher.path} against {student.path}): "
            "the same ids would mean other text; choose a teacher of the student's family"
        )
    elif teacher.eos_token_id != student.eos_token_id:
        report.problems.append(
            f"{who}: ends its answers with token {teacher.eos_token_id}, the student with "
            f"{student.eos_token_id}: every end would be scored as a mistake; make the eos_token "
            f"of {student.path} the teacher's"
        )
    if student.vocab_size > teacher.vocab_size:
        report.warnings.append(
            f"{who}: its vocabulary of {teacher.vocab_size} is smaller than the student's padded "
            f"{student.vocab_size}; a rollout with a higher id will fail"
        )


def _compare_rendering(
    config: ExperimentConfig,
    server: Launched,
    report: PreflightReport,
    tokenizers: LoadTokenizer,
) -> None:
    try:
        messages = next(iter_rows(config.data.train)).messages
    except (DataError, StopIteration):
        return  # told by the data check
    ours = _rendered(tokenizers(config.student.model), messages)
    theirs = _rendered(tokenizers(server.launch.model), messages)
    if ours is not None and ours != theirs:
        report.warnings.append(
            f"{server.who}: renders prompts in another way than the student: {theirs!r:.200} "
            f"against {ours!r:.200}; it will score the student's rendering"
        )


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str | None:
    """The prompt as text; None without a chat template, or with one that refuses it."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template refuses in its own words; the data check tells the student's
        return None
    return str(text)
