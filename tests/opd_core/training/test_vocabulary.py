"""What the tokens of a vocabulary are called, and what kind each is."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opd_core.training.token_kl import TOKEN_CLASSES
from opd_core.training.vocabulary import Vocabulary, class_of

WORDS = ["<unk>", "▁The", "▁7", "12", "=", ".", "▁", "<0xE2>", "<0x80>"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One of those that drop the space of a text's first token."""
    ids = {word: i for i, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    made.add_tokens([AddedToken("</think>"), AddedToken("  ")])
    return made


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("7", "digit"),
        (" 12", "digit"),
        ("٣", "digit"),
        ("Hello", "word"),
        (" über", "word"),
        ("\\frac", "word"),
        ("x2", "word"),
        ("學", "word"),
        ("+", "symbol"),
        ("-", "symbol"),
        ("=\n", "symbol"),
        ("}$", "symbol"),
        ("\\", "symbol"),
        ("€", "symbol"),
        (".", "punctuation"),
        ("):", "punctuation"),
        ("\n\n", "whitespace"),
        (" ", "whitespace"),
        ("", "other"),
        ("�", "other"),
        (" �", "other"),
        ("\u0301", "other"),
    ],
)
def test_a_token_is_of_the_class_that_its_characters_say(text: str, name: str) -> None:
    assert class_of(text) == name


def test_a_tokens_space_is_kept_where_a_decoder_drops_it_at_the_start_of_a_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert tokenizer.decode([1]) == "The"
    vocabulary = Vocabulary(tokenizer)
    vocabulary.meet(np.array([1, 2, 3]))
    assert vocabulary.texts[1:4] == [" The", " 7", "12"]
    assert vocabulary.lengths[1:4].tolist() == [4, 2, 2]


def test_control_tokens_and_those_that_end_an_answer_are_special(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    end, thought, blank = (tokenizer.convert_tokens_to_ids(t) for t in ("<end>", "</think>", "  "))
    vocabulary = Vocabulary(tokenizer, end_ids=[4])
    vocabulary.meet(np.array([end, thought, blank, 4, 5]))
    names = [TOKEN_CLASSES[vocabulary.classes[i]] for i in (end, thought, blank, 4, 5)]
    assert names == ["special", "special", "whitespace", "special", "punctuation"]
    assert vocabulary.texts[thought] == "</think>"


def test_ids_are_looked_up_once_and_beyond_the_vocabulary_too(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    vocabulary = Vocabulary(tokenizer)
    vocabulary.meet(np.array([3, 3]))
    vocabulary.texts[3] = "looked up"
    vocabulary.meet(np.array([3, 500]))  # a padded row of the model's head
    vocabulary.meet(np.array([], np.int64))
    assert vocabulary.texts[3] == "looked up"
    assert (vocabulary.texts[500], TOKEN_CLASSES[vocabulary.classes[500]]) == ("", "other")
    assert vocabulary.classes[4] == -1
