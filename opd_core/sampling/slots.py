"""The keys and values of many sequences in slots, and the forward passes that fill and read them.

Slot r holds one sequence, its token i at place i. What lies behind a sequence's end is masked or
not yet read, so that sequences of any lengths are decoded together and come and go at any step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from opd_core.errors import SamplingError

PREFILL_TOKENS = 16384
"""At most so many tokens, padding included, are prefilled in one forward (one prompt at least)."""
BLOCK = 8
"""Memory grows in blocks of so many rows and so many tokens of each row."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How far decoded logprobs may be from a plain forward's, as a mean over the vocabulary."""
COARSE_TOLERANCE = 0.1
"""The same for short dtypes."""


class Slots(Cache):  # type: ignore[misc]  # transformers has no types here
    """Of every layer: keys and values [rows, heads, length, head_dim].

    A forward is announced first (``fill`` or ``extend``); then the layers' ``update`` follow it.
    """

    def __init__(self, max_rows: int) -> None:
        super().__init__(layers=[])
        self._max_rows = max_rows
        self._room = (0, 0)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = torch.empty(0, dtype=torch.long)
        self._places: Tensor | None = None
        self._seen = 0

    def fill(self, rows: Int[Tensor, " B"], count: int, width: int) -> None:
        """The next forward gives the first ``width`` tokens of ``rows``, all below ``count``."""
        self._reserve(count, width)
        self._rows, self._places, self._seen = rows, None, 0

    def extend(self, places: Int[Tensor, " R"], longest: int) -> None:
        """The next forward gives one token, at ``places``, to each of the first R rows, of which
        the longest then has ``longest`` tokens; no other rows are kept."""
        if longest > self._room[1]:
            self._resize(len(places), max(longest, self._room[1] * 9 // 8))
        rows = torch.arange(len(places), device=places.device)
        self._rows, self._places, self._seen = rows, places, longest - 1

    def copy(self, pairs: Int[Tensor, "N 2"], count: int, length: int) -> None:
        """Copy the first ``length`` tokens of row to row, all below ``count``."""
        self._reserve(count, length)
        sources, targets = pairs.unbind(1)
        for kept in self._kept.values():
            for tensor in kept:
                tensor[targets, :, :length] = tensor[sources, :, :length]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep what a layer has computed; all that its attention may look at."""
        if layer_idx not in self._kept:
            empty = key_states[:0, :, :0], value_states[:0, :, :0]
            self._kept[layer_idx] = (self._resized(empty[0]), self._resized(empty[1]))
        keys, values = self._kept[layer_idx]
        if self._places is None:
            width = key_states.shape[2]
            keys[self._rows, :, :width] = key_states
            values[self._rows, :, :width] = value_states
            return key_states, value_states
        keys[self._rows, :, self._places] = key_states[:, :, 0]
        values[self._rows, :, self._places] = value_states[:, :, 0]
        shown = slice(len(self._rows)), slice(None), slice(self._seen + 1)
        return keys[shown], values[shown]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the ones that are coming: of the longest row."""
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys ``update`` will show, and the first one's place."""
        return self._seen + query_length, 0

    def _reserve(self, rows: int, length: int) -> None:
        room = self._room
        if rows > room[0] or length > room[1]:
            self._resize(max(rows, room[0]), max(length, room[1]))

    def _resize(self, rows: int, length: int) -> None:
        """Change the room, layer after layer."""
        self._room = min(self._max_rows, _round_up(rows, BLOCK)), _round_up(length, BLOCK)
        for layer, (keys, values) in self._kept.items():
            self._kept[layer] = (self._resized(keys), self._resized(values))

    def _resized(self, old: Tensor) -> Tensor:
        rows, length = self._room
        old = old[:rows]
        new = old.new_empty(rows, old.shape[1], length, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        # What is masked is still multiplied by 0: it must be finite.
        new[:, :, old.shape[2] :] = 0
        new[old.shape[0] :] = 0
        return new


class SlotModel:
    """A causal language model over ``max_rows`` slots.

    Raises :class:`SamplingError` for a model that keeps more than keys and values, or whose
    decoding in slots does not give a plain forward's logprobs (tried once, with a few tokens).
    """

    def __init__(self, model: Any, *, pad_id: int, max_rows: int) -> None:
        self.model = model.eval()
        self._pad_id = pad_id
        self._max_rows = max(2, max_rows)  # the proof takes two
        self._windows = _attention_windows(model)
        self.clear()
        self._prove()

    def clear(self) -> None:
        """Give the memory of all slots back."""
        self._slots = Slots(self._max_rows)

    @torch.inference_mode()
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, Float[Tensor, " V"]]:
        """Compute prompts into their slots; by slot, the fp32 logits of what follows the prompt."""
        follows: dict[int, Tensor] = {}
        for rows in _batches({row: len(tokens) for row, tokens in prompts.items()}):
            width = max(len(prompts[row]) for row in rows)
            # Padding on the right: no token can see what follows it, so that no mask is needed.
            ids = [[*prompts[r], *[self._pad_id] * (width - len(prompts[r]))] for r in rows]
            self._slots.fill(self._on_device(rows), max(rows) + 1, width)
            output = self.model.base_model(
                input_ids=self._on_device(ids),
                position_ids=torch.arange(width, device=self.model.device).expand(len(rows), -1),
                past_key_values=self._slots,
                use_cache=True,
            )
            last = self._on_device([[i, len(prompts[row]) - 1] for i, row in enumerate(rows)])
            head = self.model.get_output_embeddings()
            logits = head(output.last_hidden_state[*last.unbind(1)]).float()
            follows.update(zip(rows, logits, strict=True))
        return follows

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first ``length`` tokens of slot to slot; no slot is both source and target."""
        if pairs:
            self._slots.copy(self._on_device(pairs), max(map(max, pairs)) + 1, length)

    @torch.inference_mode()
    def decode(
        self, tokens: Int[Tensor, " R"], places: Int[Tensor, " R"], longest: int
    ) -> Float[Tensor, "R V"]:
        """Append one token to each of the first R slots; fp32 logits of what follows it.

        ``longest`` is the largest of ``places`` + 1, which the host knows without asking.
        """
        self._slots.extend(places, longest)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=self._masks(places, longest),
            position_ids=places[:, None],
            past_key_values=self._slots,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _masks(self, places: Int[Tensor, " R"], longest: int) -> Any:
        """[R, 1, 1, longest]: what each row's newest token sees. A mapping from the layers' type
        where they are of several."""
        keys = torch.arange(longest, device=places.device)
        masks = {}
        for kind, window in self._windows.items():
            seen = keys <= places[:, None]
            if window is not None:
                seen &= keys > places[:, None] - window
            masks[kind] = seen[:, None, None, :]
            if self.model.config._attn_implementation == "eager":  # adds its mask to the scores
                least = torch.finfo(self.model.dtype).min
                zeros = masks[kind].new_zeros((), dtype=self.model.dtype)
                masks[kind] = torch.where(masks[kind], zeros, least)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _on_device(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, device=self.model.device)

    @torch.inference_mode()
    def _prove(self) -> None:
        """Decode one sequence in two slots, of which one is three tokens ahead."""
        config = self.model.config
        vocabulary = config.get_text_config(decoder=True).vocab_size
        ids = [(7 * i + 3) % vocabulary for i in range(9)]
        tokens = self._on_device(ids)
        try:
            exact = self.model(input_ids=tokens[None], use_cache=False).logits[0].float()
            follows = self.prefill({0: ids[:3], 1: ids[:6]})
            found = {2: follows[0], 5: follows[1]}
            for step in range(3):
                places = [3 + step, 6 + step]
                at = self._on_device(places)
                found |= zip(places, self.decode(tokens[at], at, 7 + step), strict=True)
            wanted = exact[list(found)].log_softmax(-1)
            wrong = torch.stack(list(found.values())).log_softmax(-1) - wanted
            gap = float(wrong.abs().mean(-1).nan_to_num(torch.inf).max())
        except torch.OutOfMemoryError:
            raise
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise _refused(model_type=config.model_type, why=f"{error!r:.300}") from error
        if gap > TOLERANCE.get(self.model.dtype, COARSE_TOLERANCE):
            why = f"decoded logprobs are {gap:.2g} away from a plain forward's"
            raise _refused(model_type=config.model_type, why=why)
        self.clear()


def _attention_windows(model: Any) -> dict[str, int | None]:
    """How far back each type of attention layer sees; None is to the beginning."""
    config = model.config.get_text_config(decoder=True)
    types, settings = get_layer_types_and_kwargs(config)
    others = set(types) - {"full_attention", "sliding_attention"}
    if others or getattr(model, "_is_stateful", False):
        found = ", ".join(sorted(others)) or "a state of its own"
        raise _refused(model_type=config.model_type, why=f"it has {found}")
    return {
        kind: setting.get("sliding_window") for kind, setting in zip(types, settings, strict=True)
    }


def _refused(*, model_type: str, why: str) -> SamplingError:
    return SamplingError(
        f"the in-process engine samples models whose only memory is plain or sliding attention; "
        f"{model_type!r} cannot be sampled with it ({why}): set sampling.engine: sglang"
    )


def _batches(lengths: Mapping[int, int]) -> Iterator[list[int]]:
    """Rows that are prefilled together: of like length, ``PREFILL_TOKENS`` at most."""
    batch: list[int] = []
    for row in sorted(lengths, key=lambda row: lengths[row]):
        if batch and (len(batch) + 1) * lengths[row] > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _round_up(number: int, block: int) -> int:
    return -(-number // block) * block
