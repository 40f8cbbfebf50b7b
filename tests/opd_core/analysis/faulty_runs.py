"""Short runs of the tiny pair through the real loop, in one process, with a fault built in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import uvicorn
from numpy.typing import NDArray
from torch import Tensor

from opd_core.analysis.detectors import Finding, RunFacts, detect
from opd_core.analysis.run_data import Series
from opd_core.config import ExperimentConfig
from opd_core.recipe import load_recipe
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.scoring.facts import TeacherFacts, facts_to_json
from opd_core.serving.embedded.app import create_app
from opd_core.serving.embedded.batching import BatchingScorer
from opd_core.serving.embedded.model import TeacherModel
from opd_core.serving.embedded.requests import ModelFacts, ScoreRequest, ScoreResult
from opd_core.tracking.journal import JournalReader
from opd_core.training import models
from opd_core.training.assembly import build_loop
from opd_core.training.files import JOURNAL_FILE, TEACHERS_FILE
from opd_core.training.learner import Learner
from opd_core.training.local import LocalLearner, LocalSampler

RECIPES = Path(__file__).parents[3] / "deployments" / "recipes"
TINY = RECIPES / "assets" / "tiny"
END_ID = 1

Tokens, Scores = NDArray[np.int64], NDArray[np.float32]
Bend = Callable[[Tokens, Scores], Scores]
"""What a faulty teacher makes of the scores of a response's tokens: their ids, their logprobs."""


def honest(ids: Tokens, scores: Scores) -> Scores:
    return scores


class BentModel:
    """The tiny teacher, or another model, whose scores are bent."""

    def __init__(self, path: Path, bend: Bend) -> None:
        self._model = TeacherModel.load(path)
        self._bend = bend

    @property
    def facts(self) -> ModelFacts:
        return self._model.facts

    def score(self, batch: Sequence[ScoreRequest]) -> list[ScoreResult]:
        return [
            replace(true, logprobs=self._bend(asked.token_ids[asked.start + 1 :], true.logprobs))
            for asked, true in zip(batch, self._model.score(batch), strict=True)
        ]

    def texts(self, token_ids: Sequence[int]) -> list[str] | None:
        return self._model.texts(token_ids)


@contextmanager
def teacher_server(bend: Bend = honest, path: Path = TINY / "teacher") -> Iterator[str]:
    """The embedded server before such a model, in threads of this process; its URL."""
    model = BentModel(path, bend)  # before others load theirs: transformers is not thread-safe
    scorer = BatchingScorer()
    scorer.start(lambda: model)
    config = uvicorn.Config(
        create_app(scorer), lifespan="off", ws="none", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            scorer.close()
            scorer.join(30)


class NoisyEngine(TransformersEngine):
    """Samples with other weights than it was given."""

    def load_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        draw = torch.Generator().manual_seed(policy_version)
        spoiled = {
            name: value + 0.3 * value.std() * torch.randn(value.shape, generator=draw)
            for name, value in weights.items()
        }
        super().load_weights(spoiled, policy_version)


def tiny_config(url: str | None, *overrides: str, steps: int = 3) -> ExperimentConfig:
    """The tiny recipe, small: 32 rollouts a train step, the teacher at ``url``."""
    small = ["training.prompts_per_step=32", "training.warmup_steps=0", f"training.steps={steps}"]
    off = [
        "task.judge=null",
        "evaluation.every=0",
        "data.evaluation=null",
        "training.checkpoint_every=0",
    ]
    config = load_recipe(RECIPES / "tiny.yaml", [*small, *off, *overrides])
    if url is None:
        return config.model_copy(update={"opd": None})
    assert config.opd is not None
    teacher = config.opd.teachers[0].with_endpoints([url])
    replicas = tuple(r.model_copy(update={"launch": None}) for r in teacher.all_replicas)
    teacher = teacher.model_copy(update={"replicas": replicas, "away_limit_s": 5.0})
    opd = config.opd.model_copy(update={"teachers": (teacher,)})
    return config.model_copy(update={"opd": opd})


async def findings_of(
    config: ExperimentConfig,
    run_dir: Path,
    engine: type[TransformersEngine] = TransformersEngine,
) -> dict[str, Finding]:
    """Train, and what is then found in the journal, by name."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    tokenizer = models.load_tokenizer(config.student.model)
    sampled, trained = (models.load_model(config.student.model, "float32", cpu) for _ in range(2))
    sampler = LocalSampler(
        engine(
            sampled.requires_grad_(False),
            end_ids=models.end_ids(sampled, tokenizer),
            pad_id=models.pad_id(tokenizer),
            max_rows=config.sampling.max_rows,
        )
    )
    learner = Learner(trained, tokenizer, config.student, config.training, config.opd, device=cpu)
    run_dir.mkdir(exist_ok=True)
    facts = {"teacher": TeacherFacts(sampled.config.vocab_size, 128, fingerprint="tiny")}
    (run_dir / TEACHERS_FILE).write_text(facts_to_json(facts))
    async with AsyncExitStack() as exits:
        loop, _ = await build_loop(config, run_dir, sampler, LocalLearner(learner), exits, {})
        if engine is not TransformersEngine:
            await sampler.sync(loop.learner, 0)
        await loop.run()
    records = JournalReader(run_dir / JOURNAL_FILE).read()
    found = detect(Series.from_records(records), RunFacts.of(config.resolved()))
    return {finding.name: finding for finding in found}
