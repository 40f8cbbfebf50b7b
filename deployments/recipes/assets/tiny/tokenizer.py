"""The tiny pair's tokenizer: one token per character, four special tokens, a chat template.

It is written with the `tokenizers` library and plain JSON, not with transformers, so that
the files are the same under every release of transformers and can be read by old and new ones.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT)
CHARACTERS = "0123456789+-=;"
PAD_ID, END_ID = 0, 1
MAX_LENGTH = 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}"
    "{{ raise_exception('expected the role user or assistant, got ' + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

FILES = ("tokenizer.json", "tokenizer_config.json")


def build_tokenizer() -> Tokenizer:
    """The tokenizer of 18 symbols; a character it does not know is an error, not a guess."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write `FILES` into the folder; `AutoTokenizer.from_pretrained(folder)` reads them."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
