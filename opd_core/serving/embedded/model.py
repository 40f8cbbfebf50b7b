"""The frozen causal model behind the embedded teacher: loading it, and its exact padded forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from opd_core.errors import ServingError
from opd_core.serving.embedded.requests import ModelFacts, ScoreRequest, ScoreResult

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Logits held at once while the head is applied: 64 Mi numbers are 256 MiB in float32.
MAX_LOGITS_AT_ONCE = 2**26


class ModelLoadError(ServingError):
    """The model directory does not hold a causal model that can be run exactly here."""


class TeacherModel:
    """A frozen causal model from transformers, with an exact padded forward.

    Padding stands on the right and no mask is passed: a causal model never looks right, so the
    scores of the real tokens are those of each sequence alone. Which positions are real comes
    from the lengths, never from the ids. ``load`` proves both on the loaded weights.
    """

    def __init__(
        self, model: Any, facts: ModelFacts, *, tokenizer: Any | None, max_logits_at_once: int
    ) -> None:
        self.facts = facts
        self._model = model
        self._body = model.base_model
        self._head = model.get_output_embeddings()
        self._tokenizer = tokenizer
        self._positions_at_once = max(1, max_logits_at_once // facts.vocab_size)
        self._text_of: dict[int, str] = {}

    @classmethod
    def load(
        cls,
        model_path: Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        context_length: int | None = None,
        max_logits_at_once: int = MAX_LOGITS_AT_ONCE,
    ) -> TeacherModel:
        """Load weights and, if there is one, the tokenizer from a local directory.

        dtype: one of ``DTYPES``; "auto" is the checkpoint's own. context_length (tokens)
        defaults to the model's. Raises :class:`ModelLoadError` with the reason.
        """
        try:
            model = _read_model(model_path, dtype=dtype).to(device).eval()
            teacher = cls(
                model,
                _read_facts(model, model_path, context_length),
                tokenizer=_read_tokenizer(model_path),
                max_logits_at_once=max_logits_at_once,
            )
            teacher._prove_exact()
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(f"cannot load the model in {model_path}: {error}") from error
        return teacher

    def texts(self, token_ids: Sequence[int]) -> list[str] | None:
        """The text of each id decoded alone; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        for token_id in set(token_ids) - self._text_of.keys():
            self._text_of[token_id] = self._tokenizer.decode([token_id])
        return [self._text_of[token_id] for token_id in token_ids]

    def score(self, batch: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """One forward of all sequences; the head runs only where a score is asked."""
        with torch.inference_mode():
            ids = _pad_right(batch).to(self.facts.device)
            hidden = self._body(input_ids=ids, use_cache=False).last_hidden_state
            # All rows are computed before the first is copied, which would wait for the device.
            scored = [self._score_row(hidden[i], ids[i], ask) for i, ask in enumerate(batch)]
            return [ScoreResult(*(part.cpu().numpy() for part in parts)) for parts in scored]

    def _score_row(
        self, hidden: torch.Tensor, ids: torch.Tensor, request: ScoreRequest
    ) -> list[torch.Tensor]:
        """The four fields of a :class:`ScoreResult` from one row: hidden [T, H], ids [T]."""
        span = slice(request.start, request.start + request.rows)
        extra_ids = torch.from_numpy(request.token_ids_logprob).to(ids.device)
        pieces = [
            _score_positions(self._head(some), targets, top_k=request.top_k, extra_ids=extra_ids)
            for some, targets in zip(
                torch.split(hidden[span], self._positions_at_once),
                torch.split(ids[1:][span], self._positions_at_once),
                strict=True,
            )
        ]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def _prove_exact(self) -> None:
        """Compare padded scores with the model's own logits of each sequence alone.

        An architecture that scales or caps its logits after the head, or that looks to the
        right, would answer plausible wrong numbers for ever; it is refused here.
        """
        # Two roundings of one bfloat16 logit near 32 lie 0.25 apart, hence the mean and the slack.
        tolerance = 1e-3 if self.facts.dtype == "float32" else 0.25
        usable = min(self.facts.vocab_size, self.facts.context_length)
        sequences = [np.arange(length, dtype=np.int64) % usable for length in (2, 7, 4)]
        results = self.score([ScoreRequest(ids, start=0) for ids in sequences])
        scores = np.concatenate([result.logprobs for result in results])
        own = np.concatenate([self.own_scores(ids) for ids in sequences])
        difference = float(np.abs(scores - own).mean())
        if not difference <= tolerance:
            raise ModelLoadError(
                f"scores of the model in {self.facts.model_path} differ by {difference:.3g} nats "
                f"from its own logits, expected at most {tolerance:g}. "
                f"{self.facts.model_type} cannot be served here: use SGLang or LMDeploy."
            )

    def own_scores(
        self, token_ids: NDArray[np.int64], *, normalised: bool = True
    ) -> NDArray[np.float32]:
        """[N - 1] scores of one sequence [N] from the model's complete, unpadded forward.

        Logits where they are not ``normalised``.
        """
        with torch.inference_mode():
            ids = torch.from_numpy(token_ids)[None].to(self.facts.device)
            logits: torch.Tensor = self._model(input_ids=ids).logits[0, :-1].float()
            scores = logits.log_softmax(-1) if normalised else logits
            own: NDArray[np.float32] = scores.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()
        return own


def _pad_right(batch: Sequence[ScoreRequest]) -> torch.Tensor:
    """[B, T] int64 ids, T the longest; the padding's value never matters."""
    padded = torch.zeros((len(batch), max(len(r.token_ids) for r in batch)), dtype=torch.long)
    for row, request in enumerate(batch):
        padded[row, : len(request.token_ids)] = torch.from_numpy(request.token_ids)
    return padded


def _score_positions(
    logits: torch.Tensor, targets: torch.Tensor, *, top_k: int, extra_ids: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Scores [M], top scores and ids [M, top_k], scores [M, E] of the extra ids [E].

    logits: [M, V]. targets: [M].
    """
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    top = logits.topk(top_k, dim=-1)

    def normalised(some: torch.Tensor) -> torch.Tensor:
        # A token's own logit can exceed the rounded log-sum-exp by an ulp.
        return (some - normaliser).clamp(max=0.0)

    scores = normalised(logits.gather(-1, targets[:, None]))[:, 0]
    return scores, normalised(top.values), top.indices, normalised(logits[:, extra_ids])


def _read_model(model_path: Path, *, dtype: str) -> Any:
    """The causal model of a local directory, every weight of it from the checkpoint."""
    # transformers takes seconds to import: the port answers before that.
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        str(model_path), dtype=dtype, local_files_only=True, output_loading_info=True
    )
    # transformers fills what a checkpoint lacks with random numbers and only warns.
    if report["missing_keys"] or report["mismatched_keys"]:
        raise ModelLoadError(
            f"the checkpoint in {model_path} lacks weights of {type(model).__name__}: missing "
            f"{sorted(report['missing_keys'])[:5]}, of another shape "
            f"{sorted(map(str, report['mismatched_keys']))[:5]}. Convert or download it again."
        )
    return model


def _read_tokenizer(model_path: Path) -> Any | None:
    """The tokenizer of a local directory, or None: only the texts beside the ids need one."""
    from transformers import AutoTokenizer

    if not any(model_path.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
    except Exception as error:
        logger.warning("answers have no texts, the tokenizer cannot be loaded: %s", error)
        return None


def _read_facts(model: Any, model_path: Path, context_length: int | None) -> ModelFacts:
    config = model.config.get_text_config()
    made_for = getattr(config, "max_position_embeddings", None)
    length = context_length or made_for
    if length is None:
        raise ModelLoadError(f"{model_path} names no context length: pass --context-length.")
    if made_for is not None and length > made_for:
        raise ModelLoadError(
            f"the context length {length} is more than the {made_for} positions that the model "
            f"in {model_path} was made for: pass a smaller --context-length."
        )
    facts = ModelFacts(
        model_path=str(model_path),
        model_type=str(model.config.model_type),
        architectures=tuple(model.config.architectures or (type(model).__name__,)),
        vocab_size=int(config.vocab_size),
        context_length=int(length),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
    )
    if facts.max_input_length <= 0:
        raise ModelLoadError(
            f"the context length {length} leaves no room: {length - facts.max_input_length} "
            "positions are reserved, pass a larger --context-length."
        )
    return facts
