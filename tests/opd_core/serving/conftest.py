"""A tiny random Qwen3 with a tokenizer, and the numbers that transformers itself gives for it.

Besides, a model on a gate, for what depends on timing and not on numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from opd_core.serving.embedded.batching import BatchingScorer
from opd_core.serving.embedded.model import TeacherModel
from opd_core.serving.embedded.requests import ModelFacts, ScoreRequest, ScoreResult

VOCAB_SIZE = 97
CONTEXT_LENGTH = 2048
WAIT_S = 10


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    # Two threads fight over a busy machine and are several times slower at this size.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, hidden 32, 97 words `w0 .. w96`; large weights make the scores differ."""
    directory = tmp_path_factory.mktemp("tiny-qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def own_logprobs(tiny_model_dir: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """ids [N] -> log-probabilities [N - 1, V] after each prefix, without padding or batching."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()

    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1]
        return logits.float().log_softmax(-1)

    return logprobs


@pytest.fixture(scope="session")
def teacher_model(tiny_model_dir: Path) -> TeacherModel:
    return TeacherModel.load(tiny_model_dir)


@pytest.fixture
def scorer(teacher_model: TeacherModel) -> Iterator[BatchingScorer]:
    """A running queue before the tiny model."""
    scorer = BatchingScorer(max_running_tokens=512)
    ready = threading.Event()
    scorer.start(lambda: teacher_model, on_ready=ready.set)
    assert ready.wait(WAIT_S)
    yield scorer
    scorer.close()
    assert scorer.join(WAIT_S)


class GatedModel:
    """Scores -1 everywhere, but only while its gate is open.

    The id POISON fails the whole forward, NAN makes its own sequence's scores not finite.
    """

    POISON, NAN = 13, 14

    def __init__(self) -> None:
        self.facts = ModelFacts("models/gated", "gated", ("Gated",), 97, 10_000, "float32", "cpu")
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[int]] = []

    def score(self, batch: Sequence[ScoreRequest]) -> list[ScoreResult]:
        self.batches.append([len(request.token_ids) for request in batch])
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if any(self.POISON in request.token_ids for request in batch):
            raise MemoryError("out of memory on this device")
        return [self._result(request) for request in batch]

    def texts(self, token_ids: Sequence[int]) -> list[str] | None:
        return None

    def running(self) -> None:
        """Return once one more batch is inside the forward."""
        assert self.entered.acquire(timeout=WAIT_S)

    def _result(self, request: ScoreRequest) -> ScoreResult:
        value = np.nan if self.NAN in request.token_ids else -1.0
        none = np.zeros((request.rows, 0), np.float32)
        scores = np.full(request.rows, value, np.float32)
        return ScoreResult(scores, none, none.astype(np.int64), none)


@pytest.fixture
def gated_model() -> Iterator[GatedModel]:
    """A model whose forward the test holds up, opens and makes fail."""
    model = GatedModel()
    yield model
    model.gate.set()


@pytest.fixture
def start_scorer(gated_model: GatedModel) -> Iterator[Callable[..., BatchingScorer]]:
    """Starts scorers before the gated model and ends them."""
    started: list[BatchingScorer] = []

    def start(**limits: int) -> BatchingScorer:
        scorer = BatchingScorer(**limits)
        ready = threading.Event()
        scorer.start(lambda: gated_model, on_ready=ready.set)
        started.append(scorer)
        assert ready.wait(WAIT_S)
        return scorer

    yield start
    gated_model.gate.set()
    for scorer in started:
        scorer.close()
        assert scorer.join(WAIT_S)
