"""In-process sampling with transformers: batched, with a KV cache, exact rollout_logprobs.

Rows are left-padded and decoded together; a finished row is handed out at once and leaves the batch
at the next compaction. Every row draws from its own seeded stream of uniform numbers (inverse CDF),
so what it samples does not depend on its neighbours beyond floating-point noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest

COMPACT_BELOW = 0.75
"""The batch is compacted when no more than this share of its rows is still running."""
PLAIN_ATTENTION = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose attention, unless it slides, needs no mask but causal and padding."""


class TransformersEngine:
    """Samples from one causal language model on one device."""

    def __init__(self, model: Any, *, end_ids: Sequence[int], pad_id: int, max_rows: int) -> None:
        self.model = model.eval()
        self.device = model.device
        self.end_ids = torch.tensor(sorted(set(end_ids)), device=self.device)
        self.pad_id = pad_id
        self.max_rows = max_rows
        self.policy_version = 0
        self._own_mask = _takes_own_mask(model.config)

    def load_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Take over the student's weights; raises :class:`SamplingError` if names do not match."""
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if missing or unexpected:
            raise SamplingError(
                f"weights of policy version {policy_version} do not fit the engine's model: "
                f"missing {missing[:3]}, unexpected {unexpected[:3]}"
            )
        self.policy_version = policy_version

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[list[Completion]]:
        """Yield completions as they finish; at most ``max_rows`` rows are decoded together."""
        # Prompts of like length share a batch: less padding.
        ordered = sorted(requests, key=lambda r: len(r.prompt_ids))
        for first in range(0, len(ordered), self.max_rows):
            yield from self._decode(ordered[first : first + self.max_rows])

    @torch.inference_mode()
    def _decode(self, requests: list[SampleRequest]) -> Iterator[list[Completion]]:
        rows = _Rows(requests, self.device)
        input_ids, valid = self._left_padded(requests)
        positions = (valid.cumsum(-1) - 1).clamp_min(0)
        cache = None
        step = 0
        while rows.running:
            output = self.model(
                input_ids=input_ids,
                attention_mask=self._mask(valid, input_ids.shape[1]),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            tokens, logprobs = _draw(
                output.logits[:, -1].float(), rows.uniforms[:, step], rows.temperature
            )
            ended = torch.isin(tokens, self.end_ids)
            # The one device-to-host copy of a decoding step (where the mask is our own).
            finished = rows.append(*torch.stack([tokens.double(), logprobs.double(), ended]).cpu())
            if finished:
                yield [row.completion(self.policy_version) for row in finished]
            step += 1
            input_ids, positions = tokens[:, None], positions[:, -1:] + 1
            valid = torch.cat([valid, valid.new_ones(len(valid), 1)], dim=1)
            if 0 < rows.running <= COMPACT_BELOW * len(rows.rows):
                keep = rows.compact()
                input_ids, positions, valid = input_ids[keep], positions[keep], valid[keep]
                cache.batch_select_indices(keep)

    def _mask(self, valid: Bool[Tensor, "B K"], queries: int) -> Tensor:
        """What the last ``queries`` positions may see: [B, 1, queries, K], True is seen.

        From the [B, K] form transformers makes the same, but asks the device at every step whether
        any key is padding at all; models with other attention need that form.
        """
        if not self._own_mask:
            return valid
        keys = valid[:, None, None, :]
        if queries == 1:  # the newest position sees every real token, itself among them
            return keys
        causal = torch.ones(queries, queries, dtype=torch.bool, device=self.device).tril()
        # A pad sees itself: a row that sees nothing may become NaN, and 0 * NaN reaches the others.
        return (keys & causal) | causal.triu()

    def _left_padded(
        self, requests: list[SampleRequest]
    ) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
        longest = max(len(r.prompt_ids) for r in requests)
        pads = [longest - len(r.prompt_ids) for r in requests]
        ids = [
            [self.pad_id] * pad + list(r.prompt_ids) for r, pad in zip(requests, pads, strict=True)
        ]
        valid = [[False] * pad + [True] * (longest - pad) for pad in pads]
        return torch.tensor(ids, device=self.device), torch.tensor(valid, device=self.device)


def _takes_own_mask(config: Any) -> bool:
    """Whether a finished boolean mask is used as it is, and says all there is to say."""
    layers = getattr(config, "layer_types", None) or ()
    return (
        config.model_type in PLAIN_ATTENTION
        and config._attn_implementation == "sdpa"  # others want another form
        and getattr(config, "sliding_window", None) is None
        and set(layers) <= {"full_attention"}
    )


def _draw(
    logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"], temperature: Float[Tensor, " B 1"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample by inverse CDF; the logprob is the model's own (temperature 1)."""
    cumulative = (logits / temperature).softmax(-1).double().cumsum(-1)
    # Rounding leaves the last sum a little off 1: scale, so that the draw stays inside.
    threshold = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    tokens = tokens.clamp_max(logits.shape[-1] - 1)
    return tokens[:, 0], logits.log_softmax(-1).gather(-1, tokens)[:, 0]


class _Row:
    """Tokens of one sequence on the host."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason = ""

    def completion(self, policy_version: int) -> Completion:
        return Completion(
            self.request.key,
            tuple(self.tokens),
            tuple(self.logprobs),
            self.finish_reason,
            policy_version,
        )


class _Rows:
    """The rows of a batch: their randomness on the device, their tokens on the host."""

    def __init__(self, requests: list[SampleRequest], device: torch.device) -> None:
        self.rows = [_Row(request) for request in requests]
        longest = max(request.max_new_tokens for request in requests)
        uniforms = [
            torch.rand(longest, generator=torch.Generator().manual_seed(r.seed)) for r in requests
        ]
        self.uniforms = torch.stack(uniforms).double().to(device)
        self.temperature = torch.tensor([[r.temperature] for r in requests], device=device)

    @property
    def running(self) -> int:
        return sum(not row.finish_reason for row in self.rows)

    def append(self, tokens: Tensor, logprobs: Tensor, ended: Tensor) -> list[_Row]:
        """Add one token to every running row; return the rows that this finished."""
        finished = []
        triples = zip(tokens.tolist(), logprobs.tolist(), ended.tolist(), strict=True)
        for row, (token, logprob, end) in zip(self.rows, triples, strict=True):
            if row.finish_reason:
                continue
            row.tokens.append(int(token))
            row.logprobs.append(logprob)
            if end:
                row.finish_reason = "stop"
            elif len(row.tokens) >= row.request.max_new_tokens:
                row.finish_reason = "length"
            if row.finish_reason:
                finished.append(row)
        return finished

    def compact(self) -> Int[Tensor, " kept"]:
        """Drop finished rows; return the indices that stay."""
        kept = [i for i, row in enumerate(self.rows) if not row.finish_reason]
        self.rows = [self.rows[i] for i in kept]
        keep = torch.tensor(kept, device=self.uniforms.device)
        self.uniforms, self.temperature = self.uniforms[keep], self.temperature[keep]
        return keep
