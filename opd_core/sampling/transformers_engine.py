"""In-process sampling with transformers: continuous batching, exact rollout_logprobs.

A finished row leaves at once and a waiting one takes its slot. A prompt is prefilled whole, once
for all rows that share it and enter together: their first tokens are sampled from that. A row
whose prompt a running row holds copies it, and decodes the prompt's last token with the other
rows. All later tokens are decoded together. Every row draws from its own seeded stream of
uniform numbers (inverse CDF), so what it samples does not depend on its neighbours beyond
floating-point noise.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, FinishReason, SampleRequest, Ticketed
from opd_core.sampling.slots import SlotModel

ADMIT_SHARE = 8
"""While more rows wait than slots are free, one slot in so many must be free before rows enter:
they are prefilled together."""


class TransformersEngine:
    """Samples from one causal language model on one device; others call ``step`` again and again.

    ``prefilled_tokens`` counts what was computed of prompts. Raises :class:`SamplingError` for a
    model that it cannot sample exactly.
    """

    def __init__(self, model: Any, *, end_ids: Sequence[int], max_rows: int, pad_id: int) -> None:
        self.model = model
        self.device = model.device
        self.max_rows = max_rows
        self.policy_version = 0
        self.prefilled_tokens = 0
        self._end_ids = frozenset(end_ids)
        self._slots = SlotModel(model, pad_id=pad_id, max_rows=max_rows)
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row | None] = []  # by slot; None where a row has left

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._waiting and not any(self._rows)

    def load_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Take over the student's weights; raises :class:`SamplingError` if names do not match, or
        while rows are running or waiting."""
        if not self.idle:
            raise SamplingError(
                f"weights of policy version {policy_version} came while the engine samples: "
                f"interrupt it first"
            )
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if missing or unexpected:
            raise SamplingError(
                f"weights of policy version {policy_version} do not fit the engine's model: "
                f"missing {missing[:3]}, unexpected {unexpected[:3]}"
            )
        self.policy_version = policy_version

    def submit(self, tickets_and_requests: Sequence[tuple[int, SampleRequest]]) -> None:
        """Queue requests; first come, first served. A ticket comes back with its completion."""
        self._waiting.extend(_Row(ticket, request) for ticket, request in tickets_and_requests)

    def step(self) -> list[Ticketed]:
        """One token of every running row, or the first one of rows that enter: those that are
        finished by it."""
        sampled = self._enter() or self._advance()
        if sampled is None:
            return []
        rows, logits = sampled
        finished = []
        for row, token, logprob in zip(rows, *self._sample(rows, logits), strict=True):
            if reason := row.append(int(token), logprob, self._end_ids):
                finished.append((row.ticket, row.completion(reason, self.policy_version)))
                self._rows[self._rows.index(row)] = None
        if finished and self.idle:
            self._slots.clear()  # an idle engine keeps no memory
        return finished

    def interrupt(self) -> list[Ticketed]:
        """Drop all that runs or waits; each with the tokens that it has so far."""
        rows = [row for row in self._rows if row] + list(self._waiting)
        self._rows.clear()
        self._waiting.clear()
        self._slots.clear()
        return [(row.ticket, row.completion("abort", self.policy_version)) for row in rows]

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[list[Ticketed]]:
        """Run an idle engine on these alone; each completion with its request's index, as they
        finish."""
        self.submit(list(enumerate(requests)))
        while not self.idle:
            if finished := self.step():
                yield finished

    def _enter(self) -> tuple[list[_Row], Tensor] | None:
        """Move waiting rows into free slots; those whose prompts were computed for it, and the
        logits of what follows them. Rows that share a running row's prompt take it from there, and
        go on with the others."""
        gaps = [slot for slot, row in enumerate(self._rows) if row is None]
        free = [*gaps, *range(len(self._rows), self.max_rows)]
        enough = min(len(self._waiting), max(1, self.max_rows // ADMIT_SHARE))
        if not enough or len(free) < enough:
            return None
        holders = {row.request.token_ids: i for i, row in enumerate(self._rows) if row}
        if not holders:
            self._slots.clear()  # memory follows need; and nothing is left of other weights
        prompts: dict[int, tuple[int, ...]] = {}
        entered: list[tuple[_Row, int]] = []
        copies: list[tuple[int, int]] = []
        for slot in free[: len(self._waiting)]:
            row = self._waiting.popleft()
            self._rows[slot : slot + 1] = [row]
            holder = holders.setdefault(row.request.token_ids, slot)
            if holder == slot:
                prompts[slot] = row.request.token_ids
            else:
                copies.append((holder, slot))
            if holder in prompts:
                entered.append((row, holder))
        follows = self._slots.prefill(prompts)
        self.prefilled_tokens += sum(map(len, prompts.values()))
        self._slots.copy(copies, max(map(len, holders)))
        if not entered:
            return None
        return [row for row, _ in entered], torch.stack([follows[i] for _, i in entered])

    def _advance(self) -> tuple[list[_Row], Tensor] | None:
        """Decode the newest token of every row: the logits of what follows them."""
        self._close_gaps()
        rows = [row for row in self._rows if row]
        if not rows:
            return None
        newest, places = self._on_device([row.newest for row in rows], [row.place for row in rows])
        return rows, self._slots.decode(newest, places, self._longest() + 1)

    def _close_gaps(self) -> None:
        """Move the last rows into free slots: those that are decoded are the first ones."""
        count = len(self._rows) - self._rows.count(None)
        gaps = [slot for slot in range(count) if self._rows[slot] is None]
        last = [slot for slot in range(count, len(self._rows)) if self._rows[slot]]
        for source, target in zip(last, gaps, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[count:]
        self._slots.copy(list(zip(last, gaps, strict=True)), self._longest())

    def _longest(self) -> int:
        """Tokens in the longest slot, without the newest one."""
        return max((row.place for row in self._rows if row), default=0)

    @torch.inference_mode()
    def _sample(self, rows: list[_Row], logits: Tensor) -> tuple[list[float], list[float]]:
        """One token of every row and its logprob; the one copy from the device of a step."""
        chance = self._on_device(
            [row.draw() for row in rows], [row.request.temperature for row in rows]
        )
        drawn = _draw(logits, *chance)
        tokens, logprobs = torch.stack([column.double() for column in drawn]).tolist()
        return tokens, logprobs

    def _on_device(self, first: list[Any], second: list[Any]) -> tuple[Tensor, ...]:
        """Two columns in one copy to the device; whole numbers, or fp64."""
        dtype = torch.long if isinstance(first[0], int) else torch.float64
        return torch.tensor([*first, *second], dtype=dtype).to(self.device).view(2, -1).unbind()


def _draw(
    logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"], temperature: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample by inverse CDF; the logprob is the model's own (temperature 1)."""
    cumulative = (logits / temperature.float()[:, None]).softmax(-1).double().cumsum(-1)
    # Rounding leaves the last sum a little off 1: scale, so that the draw stays inside.
    threshold = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    tokens = tokens.clamp_max(logits.shape[-1] - 1)
    return tokens[:, 0], logits.log_softmax(-1).gather(-1, tokens)[:, 0]


class _Row:
    """One sequence on the host: its tokens so far and its randomness."""

    def __init__(self, ticket: int, request: SampleRequest) -> None:
        self.ticket = ticket
        self.request = request
        self.newest = request.token_ids[-1]
        self.place = len(request.token_ids) - 1  # of the newest token
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.draw = random.Random(request.seed).random
        for _ in range(request.drawn):
            self.draw()

    def append(self, token: int, logprob: float, end_ids: frozenset[int]) -> FinishReason | None:
        """Take a sampled token; why the row is finished by it, if it is."""
        self.newest, self.place = token, self.place + 1
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in end_ids or token in self.request.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_new_tokens else None

    def completion(self, finish_reason: FinishReason, policy_version: int) -> Completion:
        """What the row has become."""
        return Completion(
            tuple(self.tokens),
            tuple(self.logprobs),
            (policy_version,) * len(self.tokens),
            finish_reason,
        )
