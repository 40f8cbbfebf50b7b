"""``opd eval``: held-out accuracy of any model, measured as a run measures its student.

In this process, with the in-process engine: no Ray, no servers, no Prefect flow. Questions, judge,
samples and seeds are the recipe's, so that a run's student gives the number of its last evaluation.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from opd_core.config import ExperimentConfig
from opd_core.errors import ConfigError, PreflightError
from opd_core.lifecycle.errors import LifecycleError
from opd_core.lifecycle.leases import DeviceLease
from opd_core.preflight.machine import lock_names
from opd_core.recipe import load_recipe
from opd_core.training.evaluation_records import EvaluationRecord, write_evaluation
from opd_core.training.files import CONFIG_FILE, EVALUATIONS_FOLDER, RUN_FILE
from opd_core.training.lineage import find_run
from tasks.console import CONSOLE, TERMINAL

if TYPE_CHECKING:
    from opd_core.agent_loop.evaluation import Evaluation
    from opd_core.sampling.protocol import Completion, Sampler, SampleRequest

STUDENT_FOLDER = "student"
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """How a model answers held-out questions; ``record`` lies in ``file``."""

    label: str
    model: str
    evaluation: Evaluation
    record: EvaluationRecord
    file: Path
    seconds: float

    def lines(self) -> list[str]:
        """For a person."""
        told = self.evaluation
        return [
            f"{self.label}: accuracy {_span(told.accuracy, told.accuracy_stderr)} "
            f"({told.questions} questions, {told.samples} answers, {self.seconds:.0f} s)",
            *(f"  {source}: {_span(*found)}" for source, found in told.by_source.items()),
            *(f"  pass@{k}: {_span(*found)}" for k, found in told.pass_at.items()),
            f"  answers: {told.response_tokens_mean:.1f} tokens on average, "
            f"{told.truncated_fraction:.1%} truncated",
            f"  kept in {self.file}",
        ]


def _span(value: float, stderr: float) -> str:
    return f"{value:.3f} ± {stderr:.3f}"


def evaluate_model(
    model: str,
    recipe: Path | None,
    overrides: Sequence[str] = (),
    *,
    default_recipe: Path,
    out: Path | None = None,
) -> ModelEvaluation:
    """Measure ``model`` on the recipe's held-out questions, and keep what each came to in ``out``,
    by default ``<run root>/evaluations/<label>.json``.

    ``model`` is a Hugging Face directory, ``student``, ``teacher``, ``teacher:NAME``, or a run (its
    id or directory): then its trained student, and without a ``recipe`` by the run's own.
    ``default_recipe`` says where the run root is. Raises :class:`~opd_core.errors.ConfigError`,
    :class:`~opd_core.errors.PreflightError` for a device that is taken, and
    :class:`~opd_core.errors.TrainingError` for an answer that could not be judged.
    """
    subject = _resolve(model, recipe, overrides, default_recipe)
    config = subject.config
    if config.data.evaluation is None or not config.task.judged:
        raise ConfigError(
            f"{config.name}: expected held-out questions and a judge to measure with: name "
            "data.evaluation and task.judge"
        )
    started = time.perf_counter()
    with _device(config):
        evaluation = asyncio.run(_evaluate(config, subject.tokenizer))
    from opd_core.training.questions import evaluation_record

    record = evaluation_record(evaluation, 0, config)
    file = out or config.run.root_dir / EVALUATIONS_FOLDER / f"{subject.label}.json"
    write_evaluation(file, record)
    seconds = time.perf_counter() - started
    return ModelEvaluation(subject.label, config.student.model, evaluation, record, file, seconds)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured: a recipe with the model in the student's place, and where its tokenizer
    is."""

    label: str
    config: ExperimentConfig
    tokenizer: str

    @classmethod
    def of(
        cls, label: str, config: ExperimentConfig, model: str, dtype: str | None = None
    ) -> _Subject:
        has_own = any((Path(model) / name).is_file() for name in TOKENIZERS)
        changed = {"model": model, "dtype": dtype or config.student.dtype}
        student = config.student.model_copy(update=changed)
        measured = config.model_copy(update={"student": student})
        tokenizer = model if has_own else config.student.model
        return cls(re.sub(r"[^\w.-]", "_", label), measured, tokenizer)


def _resolve(
    model: str, recipe: Path | None, overrides: Sequence[str], default_recipe: Path
) -> _Subject:
    word, _, name = model.partition(":")
    place = Path(model).absolute()
    if word in ("student", "teacher") or _is_model(place):
        if recipe is None:
            raise ConfigError(f"{model}: name the recipe whose questions it is asked (--recipe)")
        config = load_recipe(recipe, overrides)
        if word == "teacher":
            return _teacher(config, name)
        if word == "student":
            return _Subject.of(word, config, config.student.model)
        return _Subject.of(place.name, config, str(place))
    run_dir = find_run(model, recipe or default_recipe, overrides)
    student = run_dir / STUDENT_FOLDER
    if not _is_model(student):
        raise ConfigError(f"{run_dir} holds no trained student: expected a model in {student}")
    config = load_recipe(recipe or run_dir / CONFIG_FILE, overrides)
    return _Subject.of(run_dir.name, config, str(student))


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() and not (path / RUN_FILE).exists()


def _teacher(config: ExperimentConfig, name: str) -> _Subject:
    teachers = {teacher.name: teacher for teacher in (config.opd.teachers if config.opd else ())}
    label = f"teacher-{name}" if name else "teacher"
    if not name and len(teachers) == 1:
        (name,) = teachers
    if name not in teachers:
        there = ", ".join(f"teacher:{each}" for each in teachers) or "none"
        raise ConfigError(f"expected a teacher of {config.name} ({there}), got {name!r}")
    launch = next((r.launch for r in teachers[name].all_replicas if r.launch is not None), None)
    if launch is None:
        raise ConfigError(
            f"teacher {name!r} is not launched by {config.name}, so its model is not known here: "
            "name its directory"
        )
    return _Subject.of(label, config, launch.model, launch.dtype)


@contextmanager
def _device(config: ExperimentConfig) -> Iterator[None]:
    """The student's first GPU, for this process alone; CPUs are everybody's."""
    gpus = [device for device in config.student.devices if not device.startswith("cpu")][:1]
    owner = {"run_id": "opd eval", "run_dir": ""}
    try:
        lease = DeviceLease.take(lock_names(tuple(gpus)), owner=owner, wait_s=0.0)
    except LifecycleError as error:
        raise PreflightError(str(error)) from None
    with lease:
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]  # before torch looks for devices
        yield


async def _evaluate(config: ExperimentConfig, tokenizer_at: str) -> Evaluation:
    import torch
    import transformers

    from opd_core.agent_loop.judging import JudgeRunner
    from opd_core.training.assembly import evaluator, turns_of
    from opd_core.training.models import load_tokenizer

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(config.student.cpu_threads)
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
    tokenizer = load_tokenizer(tokenizer_at)
    task = config.task

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    async with AsyncExitStack() as exits:
        judge, batch_judge = (
            exits.enter_context(JudgeRunner(path, task.judge_timeout_s)) if path else None
            for path in (task.judge, task.batch_judge)
        )
        turns = turns_of(config, tokenizer, exits, decode)
        sampler = _sampler(config, tokenizer, exits.enter_context(_progress()))
        organs = {"sampler": sampler, "decode": decode, "turns": turns}
        evaluate = evaluator(config, tokenizer, judge, batch_judge, **organs)
        assert evaluate is not None, "there are questions and a judge"
        return await evaluate()


def _sampler(config: ExperimentConfig, tokenizer: Any, sampled: Callable[[], None]) -> Sampler:
    """The student's engine as a sampling actor has it; ``sampled`` is called after each answer."""
    from opd_core.sampling.transformers_engine import TransformersEngine
    from opd_core.training import models
    from opd_core.training.local import LocalSampler

    class Told(LocalSampler):
        async def sample(self, request: SampleRequest) -> Completion:
            completion = await super().sample(request)
            sampled()
            return completion

    student = config.student
    model = models.load_model(student.model, student.dtype, models.pick_device(student))
    engine = TransformersEngine(
        model.requires_grad_(False),
        end_ids=models.end_ids(model, tokenizer),
        pad_id=models.pad_id(tokenizer),
        max_rows=config.sampling.max_rows,
    )
    return Told(engine)


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """Answers at the terminal, as they are sampled."""
    live = TERMINAL.lines and sys.stderr.isatty()
    columns = TextColumn("{task.completed} answers"), TimeElapsedColumn()
    with Progress(*columns, console=CONSOLE, disable=not live) as bar:
        task = bar.add_task("", total=None)
        yield lambda: bar.advance(task)
