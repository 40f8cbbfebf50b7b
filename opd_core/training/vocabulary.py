"""What the ids of a vocabulary stand for: their texts, and what kind of token each is.

The class of a token is the first that fits: ``special`` (a control token, or one that ends an
answer), ``whitespace``, ``other`` (part of a character), ``digit`` (digits only), ``word`` (has a
letter), ``symbol`` (has an operator, or a character of Unicode's category S), ``punctuation``
(category P), ``other``. Spaces around a text do not count.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd_core.training.token_kl import TOKEN_CLASSES

OPERATORS = frozenset("-*/\\%&#@_")
"""Operators that Unicode counts as punctuation."""
PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_NUMBERS = {name: number for number, name in enumerate(TOKEN_CLASSES)}


class Vocabulary:
    """Looks each id up once, when it is first met: a step meets few of a large vocabulary."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        added = {i for text, i in tokenizer.get_added_vocab().items() if text.strip()}
        self._special = added | set(tokenizer.all_special_ids) | set(end_ids)
        self.texts: list[str] = []
        """By id; those that were not met are empty."""
        self.classes: NDArray[np.int64] = np.zeros(0, np.int64)
        """By id, numbers in TOKEN_CLASSES; those that were not met are -1."""
        self.lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        """By id, in characters."""

    def meet(self, ids: NDArray[np.int64]) -> None:
        """Look up what is new among ``ids``."""
        met = np.unique(ids)
        if (more := int(met.max(initial=-1)) + 1 - len(self.texts)) > 0:
            self.texts += [""] * more
            self.classes = np.append(self.classes, np.full(more, -1))
            self.lengths = np.append(self.lengths, np.zeros(more, np.int64))
        for one in met[self.classes[met] < 0].tolist():
            text = self._text_of(one)
            self.texts[one], self.lengths[one] = text, len(text)
            name = "special" if one in self._special else class_of(text)
            self.classes[one] = _NUMBERS[name]

    def _text_of(self, one: int) -> str:
        """Decoded after itself: at the start of a text some tokenizers drop a token's space."""
        alone, twice = (
            self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in ([one], [one, one])
        )
        return str(twice[len(alone) :])


def class_of(text: str) -> str:
    """The class of a token that is not special: see above."""
    core = text.strip()
    if not core:
        return "whitespace" if text else "other"
    if PART_OF_A_CHARACTER in core:
        return "other"
    if core.isdigit():
        return "digit"
    kinds = {"S" if char in OPERATORS else unicodedata.category(char)[0] for char in core}
    named = {"L": "word", "S": "symbol", "P": "punctuation"}
    return next((name for kind, name in named.items() if kind in kinds), "other")
