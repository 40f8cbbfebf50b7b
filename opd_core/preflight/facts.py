"""What a model directory says of itself, read from its files without loading the weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_core.errors import PreflightError

BLOCK_BYTES, SAMPLED_BLOCKS = 2**20, 64
WHOLE_FILE_BYTES = BLOCK_BYTES * SAMPLED_BLOCKS
THINK_TAG = re.compile(r"<\|?/?(?:think|thinking|thought)\|?>|\[/?think\]", re.IGNORECASE)
"""The marks around a model's thoughts, as the common families write them."""

LoadTokenizer = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model directory says of itself; ``context_length`` 0 means it does not say.

    ``tokenizer_hash`` is of the vocabulary: equal hashes mean that the same ids are the same text.
    ``fingerprint`` is of the weights and the config. ``vocab_size`` is the model's, padding
    included; ``tokenizer_size`` is one more than the tokenizer's highest id.
    ``generation_end_ids`` are those of the generation config, ``think_ids`` of the tokens that are
    a think tag; ``token_names`` holds the text of every id that is named here.
    """

    path: str
    vocab_size: int
    context_length: int
    tokenizer_hash: str
    fingerprint: str
    weights_bytes: int
    bytes_per_weight: int = 4
    eos_token_id: int | None = None
    tokenizer_size: int = 0
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    generation_end_ids: tuple[int, ...] = ()
    think_ids: tuple[int, ...] = ()
    token_names: tuple[tuple[int, str], ...] = ()

    @property
    def fp32_bytes(self) -> int:
        """Size of the weights in float32, as they are trained and saved."""
        return self.weights_bytes * 4 // self.bytes_per_weight

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer of this model: the generation config's and the
        tokenizer's."""
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        return tuple(sorted({*self.generation_end_ids, *own}))

    def named(self, *token_ids: int | None) -> str:
        """Ids with their text, for a reader: ``2 <|im_end|>``, or ``none``."""
        names = dict(self.token_names)
        there = [f"{i} {names.get(i, '')}".rstrip() for i in token_ids if i is not None]
        return ", ".join(there) or "none"


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside a model, from local files only."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def read_model_facts(path: str, who: str, tokenizers: LoadTokenizer = load_tokenizer) -> ModelFacts:
    """Read config and tokenizer of a local model. Raises :class:`PreflightError`.

    ``tokenizers`` loads one by its path, perhaps from a cache.
    """
    from transformers import AutoConfig

    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise PreflightError(
            f"{who}: no model at {path!r} (expected a directory with config.json; "
            "run `opd prepare` for the models of shipped recipes)"
        )
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    if not weights:
        raise PreflightError(f"{who}: {path} holds no weights (*.safetensors)")
    try:
        text = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        return ModelFacts(
            path=path,
            vocab_size=int(text.vocab_size),
            context_length=int(getattr(text, "max_position_embeddings", 0) or 0),
            fingerprint=fingerprint([folder / "config.json", *weights]),
            weights_bytes=sum(file.stat().st_size for file in weights),
            bytes_per_weight=getattr(text.dtype, "itemsize", None) or 4,
            **_tokens(tokenizers(path), _generation_end_ids(folder, text)),
        )
    except Exception as error:  # the readers of these files raise whatever they like
        raise PreflightError(f"{who}: the model at {path} cannot be read: {error}") from None


def _generation_end_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """As transformers finds them: from the generation config, without one from the model's."""
    file = folder / "generation_config.json"
    if file.is_file():
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    else:
        named = getattr(config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return tuple(sorted({int(i) for i in ids if i is not None}))


def _tokens(tokenizer: Any, generation_end_ids: tuple[int, ...]) -> dict[str, Any]:
    """The fields of :class:`ModelFacts` that the tokenizer decides."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    think_ids = tuple(sorted(i for text, i in vocabulary.items() if THINK_TAG.fullmatch(text)))
    shown = {*special, *generation_end_ids, *think_ids}
    return {
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "tokenizer_size": 1 + max(vocabulary.values()),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "generation_end_ids": generation_end_ids,
        "think_ids": think_ids,
        "token_names": tuple(sorted((i, text) for text, i in vocabulary.items() if i in shown)),
    }


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of what ids mean: the vocabulary, special tokens included."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=False).encode()).hexdigest()[:16]


def fingerprint(files: list[Path]) -> str:
    """Hash of the files' contents; of large files: size, first and last MiB."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= WHOLE_FILE_BYTES:
                digest.update(stream.read())
            else:  # a merged adapter changes layers throughout the file, and neither of its ends
                for block in range(SAMPLED_BLOCKS):
                    stream.seek(block * (size - BLOCK_BYTES) // (SAMPLED_BLOCKS - 1))
                    digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
