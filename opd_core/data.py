"""Reads prompts in the DAPO layout from JSONL or Parquet.

A row is ``{data_source, prompt: [{role, content}], reward_model: {ground_truth}, …}``; other
keys are kept in ``Prompt.extra`` when they are small records, and ignored otherwise. A row that
cannot be used is an error that names the file and the line: nothing is left out in silence.
Prompts that are longer than the limit are left out and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from opd_core.errors import DataError
from opd_core.rollout import Prompt

TOKENIZE_ROWS = 1024


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def __call__(self, text: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in the file."""

    number: int
    data_source: str
    messages: list[dict[str, str]]
    ground_truth: str | None
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The usable prompts of a file, and what was left out."""

    path: str
    prompts: tuple[Prompt, ...]
    rows: int
    too_long: int


def iter_rows(path: str | Path) -> Iterator[Row]:
    """Stream the rows of a ``.jsonl`` or ``.parquet`` file. Raises :class:`DataError`."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file}: no such data file; expected JSONL or Parquet in the DAPO layout")
    reader = _parquet_records if file.suffix == ".parquet" else _jsonl_records
    for number, (where, record) in enumerate(reader(file)):
        yield _row(number, where, record)


def count_data_sources(path: str | Path) -> Counter[str]:
    """How many rows each ``data_source`` has; reads the whole file, tokenises nothing."""
    return Counter(row.data_source for row in iter_rows(path))


def load_prompts(
    path: str | Path, tokenizer: Tokenizer, max_prompt_tokens: int, limit: int | None = None
) -> PromptSet:
    """Render and tokenise the prompts of a file, up to ``max_prompt_tokens`` tokens each.

    ``limit`` takes the first rows only. Raises :class:`DataError` if nothing usable is left.
    """
    prompts: list[Prompt] = []
    rows = 0
    stream = islice(iter_rows(path), limit)
    while block := list(islice(stream, TOKENIZE_ROWS)):
        rows += len(block)
        prompts += [p for p in _tokenise(block, tokenizer) if len(p.token_ids) <= max_prompt_tokens]
    if not rows:
        raise DataError(f"{path}: holds no rows")
    if not prompts:
        raise DataError(
            f"{path}: none of its {rows} prompts has at most {max_prompt_tokens} tokens; "
            "raise data.max_prompt_tokens or name another file"
        )
    return PromptSet(str(path), tuple(prompts), rows, rows - len(prompts))


def _tokenise(block: list[Row], tokenizer: Tokenizer) -> list[Prompt]:
    texts = [
        tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
        for row in block
    ]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        Prompt(row.number, row.data_source, tuple(tokens), text, row.ground_truth, row.extra)
        for row, text, tokens in zip(block, texts, ids, strict=True)
    ]


def _jsonl_records(file: Path) -> Iterator[tuple[str, Any]]:
    with _opened(file) as stream:
        for line, text in enumerate(stream, start=1):
            if not text.strip():
                continue
            where = f"{file} line {line}"
            try:
                record = json.loads(text.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 text ({error.reason}); is it JSONL?") from None
            except ValueError as error:
                raise DataError(f"{where}: not valid JSON: {error}") from None
            yield where, record


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None


def _parquet_records(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=TOKENIZE_ROWS):
                for record in batch.to_pylist():
                    yield f"{file} row {number}", record
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from None


def _row(number: int, where: str, record: Any) -> Row:
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with data_source and prompt, got {record!r}")
    source = record.get("data_source")
    if not isinstance(source, str) or not source:
        raise DataError(f"{where}: 'data_source' must be a name, got {source!r}")
    messages = record.get("prompt")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise DataError(
            f"{where}: 'prompt' must be a list of {{role, content}} messages, got {messages!r:.200}"
        )
    reward_model = record.get("reward_model") or {}
    if not isinstance(reward_model, dict):
        raise DataError(f"{where}: 'reward_model' must hold 'ground_truth', got {reward_model!r}")
    truth = reward_model.get("ground_truth")
    extra = record.get("extra_info") or {}
    return Row(
        number,
        source,
        [{"role": m["role"], "content": m["content"]} for m in messages],
        None if truth is None else str(truth),
        extra if isinstance(extra, dict) else {},
    )


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )
