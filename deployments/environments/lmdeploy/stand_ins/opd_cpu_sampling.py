"""Sampling token by token with transformers, for the CPU stand-in of LMDeploy's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lmdeploy.messages import GenerationConfig


class Sampled:
    """One sequence that is being sampled, with its KV cache and its own stream of randomness.

    The order is LMDeploy's: raw logprobs, banned ids, temperature, top_k, top_p, min_p.
    """

    def __init__(
        self, model: Any, ids: Sequence[int], config: GenerationConfig, mode: str | None, limit: int
    ) -> None:
        self._model, self._config, self._mode = model, config, mode
        self._next = torch.tensor([list(ids)])
        self._cache: Any = None
        self._random = torch.Generator().manual_seed((config.random_seed or 0) % 2**63)
        self._left = min(config.max_new_tokens, limit - len(ids))
        self._drawn = 0
        stops = config.stop_token_ids or []
        self._stops = set() if config.ignore_eos else set(stops)
        self._banned = (config.bad_token_ids or []) + (stops if config.ignore_eos else [])
        self.finished = self.cancelled = False

    @torch.inference_mode()
    def step(self) -> tuple[int, dict[int, float]]:
        """The next token, and the logprobs that were asked for: its own and those of the best."""
        output = self._model(
            input_ids=self._next, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = output.past_key_values
        scores = output.logits[0, -1].float()
        token = int(torch.multinomial(self._probabilities(scores), 1, generator=self._random))
        self._next = torch.tensor([[token]])
        self._drawn += 1
        self.finished = token in self._stops or self._drawn >= self._left
        return token, self._row(scores, token)

    def _row(self, scores: torch.Tensor, token: int) -> dict[int, float]:
        count = self._config.logprobs or 0
        if self._mode is None or count == 0:
            return {}
        raw = scores.log_softmax(-1) if self._mode == "raw_logprobs" else scores
        best = raw.topk(count)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {token: raw[token].item()} | dict(pairs)

    def _probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        config, scores = self._config, scores.clone()
        early = self._drawn < (config.min_new_tokens or 0)
        for banned in [*self._banned, *(self._stops if early else ())]:
            scores[banned] = float("-inf")
        top_k = config.top_k
        if config.temperature == 0:
            top_k = 1
        else:
            scores /= config.temperature
        values, order = scores.softmax(-1).sort(descending=True)
        rank = torch.arange(len(values))
        kept = (rank < top_k) if top_k > 0 else torch.ones_like(rank, dtype=torch.bool)
        kept &= (values.cumsum(-1) - values) < config.top_p  # the one that reaches it is in
        kept &= values >= config.min_p * values[0]
        return torch.zeros_like(values).scatter(0, order, values * kept)
