"""Token sequences for a probe: plain English in the tokens of the tokenizer at hand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from opd_core.errors import ConfigError

SENTENCES = (
    "The old bridge over the river was built of stone, and it has carried carts, horses and "
    "finally buses for almost three hundred years.",
    "When the rain stopped, the children ran out of the house and looked for snails under the "
    "wet leaves of the garden.",
    "Water boils at a lower temperature on a high mountain, because the air above it is thinner "
    "and presses less on its surface.",
    "She opened the letter slowly, read the first two lines, and began to laugh so loudly that "
    "the whole train carriage turned to look at her.",
    "A good loaf of bread needs flour, water, salt, a little yeast and above all a lot of time.",
    "If a shop sells four apples for two euros, then ten apples cost five euros, and half an "
    "apple costs a quarter of a euro.",
    "The museum is closed on Mondays, but on the first Sunday of each month nobody has to pay for "
    "a ticket.",
    "He had promised to repair the clock before winter, and now it was snowing and the hands "
    "still stood at twenty past four.",
    "Most birds leave the island in autumn; only the gulls remain and quarrel about the fish that "
    "the boats bring back.",
    "To find the shortest way through the city, the program looks at every crossing once and "
    "remembers how far it is from the start.",
    "My grandfather used to say that a map is a kind of promise: it tells you that somebody has "
    "been there before you.",
    "The doctor asked three questions, listened carefully to the answers, and wrote nothing down "
    "until the patient had left the room.",
)
RANDOM_TOKENS = 512
FEWEST_IDS, ENGLISH_IDS = 8, 20


@dataclass(frozen=True, slots=True)
class ProbeText:
    """Ordinary token ids in the order in which they are sent. ``english`` is False where the
    tokenizer cannot write English, and the ids are a random choice. ``tokenizer_size`` is one
    more than the tokenizer's largest id."""

    ids: tuple[int, ...]
    english: bool
    tokenizer_size: int

    def piece(self, length: int, offset: int = 0) -> list[int]:
        """``length`` ids from ``offset`` on; behind the end the text begins again."""
        return [self.ids[(offset + i) % len(self.ids)] for i in range(length)]


def probe_text(tokenizer: Any, vocab_size: int = 0) -> ProbeText:
    """The text for a server with ``vocab_size`` ids (0: unknown), without special tokens.

    Raises :class:`ConfigError` for a tokenizer with hardly any ordinary token below that.
    """
    vocabulary = sorted(set(tokenizer.get_vocab().values()))
    size = vocabulary[-1] + 1 if vocabulary else 0
    special, limit = set(tokenizer.all_special_ids), vocab_size or size
    ids = [i for i in _encode(tokenizer) if i not in special and i < limit]
    english = len(set(ids)) >= ENGLISH_IDS
    if not english:
        ordinary = [i for i in vocabulary if i not in special and i < limit]
        if len(ordinary) < FEWEST_IDS:
            raise ConfigError(
                f"the tokenizer has {len(ordinary)} ordinary tokens with ids below {limit}, a "
                f"probe needs {FEWEST_IDS}; is it the tokenizer of the model?"
            )
        ids = random.Random(0).choices(ordinary, k=RANDOM_TOKENS)
    return ProbeText(tuple(ids), english, size)


def _encode(tokenizer: Any) -> list[int]:
    try:
        texts = [tokenizer(text + " ", add_special_tokens=False) for text in SENTENCES]
    except Exception:  # each tokenizer says in its own way that it knows no such letters
        return []
    return [token for text in texts for token in text["input_ids"]]
