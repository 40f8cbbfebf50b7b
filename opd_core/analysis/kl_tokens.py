"""Kept rollouts token by token, as markup: each token's background says its k.

k = student's logprob - teacher's logprob of the token, in nats. A long rollout is shown around its
worst tokens; what is left out is counted in its place.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from opd_core.training.token_kl import KeptRollout

LEVELS = (0.05, 0.25, 1.0, 2.5, 5.0)
"""|k| from which on a token gets the next stronger tint, in nats."""
MAX_TOKENS = 1000
"""Of one rollout that are shown."""
MAX_BYTES = 1_200_000
"""Of the rollouts of one train step; a page holds two of them."""
OVERHEAD = 1500
"""Bytes of a rollout's frame."""
MAX_TOKEN_TEXT, MAX_PROMPT_TEXT = 60, 4000
AROUND, ENDS = 12, 40
"""Tokens shown on each side of a bad one, and at both ends of the rollout."""
SMALL_GAP = 8
"""Fewer tokens are not worth leaving out."""


@dataclass(frozen=True)
class ShownRollout:
    """One rollout of the page. ``tokens`` is the markup of its response, ``data`` the numbers that
    go with it (JSON); ``mean_k`` in nats a token, over the tokens that the student sampled."""

    rollout: KeptRollout
    mean_k: float
    sampled: int
    left_out: int
    prompt: str
    tokens: Markup
    data: Markup

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        texts = (self.tokens, self.data, escape(self.prompt))
        return OVERHEAD + sum(len(text.encode("utf-8", "replace")) for text in texts)


def shown_rollouts(
    rollouts: Sequence[KeptRollout], max_bytes: int = MAX_BYTES
) -> list[ShownRollout]:
    """The rollouts from the worst (largest mean k) on, as many as fit into ``max_bytes``."""
    shown, size = [], 0
    for rollout in sorted(rollouts, key=mean_k, reverse=True):
        one = shown_rollout(rollout)
        size += one.size
        if size > max_bytes:
            break
        shown.append(one)
    return shown


def shown_rollout(rollout: KeptRollout, max_tokens: int = MAX_TOKENS) -> ShownRollout:
    """One rollout, shortened to about ``max_tokens``."""
    kept = _kept(rollout, max_tokens)
    parts = [_part(rollout, kept, run) for run in _runs(kept)]
    shown: list[int] = np.flatnonzero(kept).tolist()
    numbers = {
        "at": shown,
        "student": [_rounded(rollout, rollout.student, t) for t in shown],
        "teacher": [_rounded(rollout, rollout.teacher, t) for t in shown],
    }
    return ShownRollout(
        rollout=rollout,
        mean_k=mean_k(rollout),
        sampled=sum(rollout.response_mask),
        left_out=len(kept) - len(shown),
        prompt=clipped(rollout.prompt_text, MAX_PROMPT_TEXT),
        tokens=Markup("").join(parts),
        data=Markup(json.dumps(numbers, separators=(",", ":"))),  # nothing but numbers
    )


def mean_k(rollout: KeptRollout) -> float:
    """Mean k over the tokens that the student sampled; 0 without any."""
    k = k_of(rollout)
    sampled = k[np.asarray(rollout.response_mask, dtype=bool)]
    return float(sampled.mean()) if sampled.size else 0.0


def k_of(rollout: KeptRollout) -> NDArray[np.float64]:
    """k of each response token; 0 where a tool wrote it, or a logprob is not finite."""
    k = np.asarray(rollout.student, float) - np.asarray(rollout.teacher, float)
    return np.where(np.asarray(rollout.response_mask, dtype=bool) & np.isfinite(k), k, 0.0)


def clipped(text: str, limit: int) -> str:
    """The text, or its beginning with a mark that says how much is missing."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} … {len(text) - limit:,} characters left out"


def _kept(rollout: KeptRollout, max_tokens: int) -> NDArray[np.bool_]:
    """Which tokens are shown: both ends, and the surroundings of the worst ones while room is."""
    count = len(rollout.tokens)
    kept = np.ones(count, dtype=bool)
    if count <= max_tokens:
        return kept
    kept[ENDS:-ENDS] = False
    for t in np.argsort(-np.abs(k_of(rollout)), kind="stable"):
        if kept.sum() >= max_tokens:
            break
        kept[max(t - AROUND, 0) : t + AROUND + 1] = True
    for start, end in list(_runs(kept)):
        if end - start < SMALL_GAP:
            kept[start:end] = True
    return kept


def _runs(kept: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Stretches of tokens that are all shown or all left out, as (start, end)."""
    start = 0
    for _, run in groupby(kept.tolist()):
        end = start + sum(1 for _ in run)
        yield start, end
        start = end


def _part(rollout: KeptRollout, kept: NDArray[np.bool_], run: tuple[int, int]) -> Markup:
    start, end = run
    if kept[start]:
        return Markup("").join(_token(rollout, t) for t in range(start, end))
    mean = float(k_of(rollout)[start:end].mean())
    return Markup('<span class="gap">… {} left out, mean k {}</span>').format(
        "1 token" if end - start == 1 else f"{end - start:,} tokens", f"{mean:.3f}"
    )


def _token(rollout: KeptRollout, t: int) -> Markup:
    name = _class(rollout, t)
    opening = f'<i class="{name}">' if name else "<i>"
    shown = visible(rollout.tokens[t])
    end = "\n" if shown.endswith("\n") else ""  # outside, or its tint would run into the next line
    text = Markup(opening) + escape(shown.removesuffix("\n")) + Markup("</i>" + end)
    if t == rollout.answer_from and t > 0:
        return Markup('<span class="begins">answer</span>') + text
    return text


def _class(rollout: KeptRollout, t: int) -> str:
    """``m``: a tool's; ``s1`` … ``s5``: the student likes it more; ``t1`` … ``t5``: the
    teacher."""
    if not rollout.response_mask[t]:
        return "m"
    k = rollout.student[t] - rollout.teacher[t]
    if math.isnan(k):
        return ""
    level = sum(abs(k) >= bound for bound in LEVELS)
    return f"{'s' if k > 0 else 't'}{level}" if level else ""


def visible(token: str) -> str:
    """A token's text with what is not seen made visible; newlines and tabs still act."""
    if not token:
        return "∅"
    return clipped("".join(map(_visible, token)), MAX_TOKEN_TEXT)


def _visible(char: str) -> str:
    if char == "\n":
        return "↵\n"
    if char == "\t":
        return "⇥\t"
    if ord(char) < 32:
        return chr(0x2400 + ord(char))
    if unicodedata.category(char) in ("Cc", "Cf", "Cs"):
        return "\ufffd"
    return char


def _rounded(rollout: KeptRollout, logprobs: Sequence[float], t: int) -> float | None:
    value = logprobs[t]
    return round(value, 3) if rollout.response_mask[t] and math.isfinite(value) else None
