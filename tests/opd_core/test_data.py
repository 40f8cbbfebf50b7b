"""Rows in the DAPO layout: read as they stand, refused with file and line, never left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opd_core.data import TOKENIZE_ROWS, Row, count_data_sources, iter_rows, load_prompts
from opd_core.errors import DataError

UUID = "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f7407"


def record(question: str = "1+1=", truth: Any = "2", **changes: Any) -> dict[str, Any]:
    """A row as the public file has it, with the keys that nobody here reads."""
    whole = {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": UUID},
    }
    return {**whole, **changes}


def jsonl(folder: Path, *rows: Any) -> Path:
    """Rows as JSON lines; text and bytes stand as they are."""
    file = folder / "rows.jsonl"
    with file.open("wb") as stream:
        for row in rows:
            text = json.dumps(row, ensure_ascii=False) if isinstance(row, dict) else row
            stream.write((text.encode() if isinstance(text, str) else text) + b"\n")
    return file


def parquet(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file


class Letters:
    """A tokenizer: one id for each letter."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        assert kwargs == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"{m['role'][0]}:{m['content']}" for m in conversation) + "|"

    def __call__(self, text: Any, **kwargs: Any) -> dict[str, list[list[int]]]:
        assert kwargs == {"add_special_tokens": False}
        self.calls.append(len(text))
        return {"input_ids": [[ord(letter) for letter in one] for one in text]}


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_row_of_the_public_layout_is_read(tmp_path: Path, write: Any) -> None:
    (row,) = iter_rows(write(tmp_path, record("Wie groß ist ∠ABC?")))
    assert row == Row(
        number=0,
        data_source="math_dapo",
        messages=[{"role": "user", "content": "Wie groß ist ∠ABC?"}],
        ground_truth="2",
        extra={"index": UUID},
    )


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_rows_id_is_its_number_whatever_its_index_says(tmp_path: Path, write: Any) -> None:
    same = record("again")  # the public file repeats prompts and indices
    rows = list(iter_rows(write(tmp_path, same, record("b"), same)))
    assert [row.number for row in rows] == [0, 1, 2]
    assert rows[0].messages == rows[2].messages
    assert rows[0].extra == rows[2].extra


def test_parquet_rows_keep_counting_over_batches_and_row_groups(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    count = 2 * TOKENIZE_ROWS + 3
    table = pa.Table.from_pylist([record(str(i)) for i in range(count)])
    pq.write_table(table, file, row_group_size=1000)
    rows = list(iter_rows(str(file)))
    assert [row.number for row in rows] == list(range(count))
    assert [row.messages[0]["content"] for row in rows] == [str(i) for i in range(count)]


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    rows = list(iter_rows(jsonl(tmp_path, "", record("a"), "  ", record("b"), "")))
    assert [row.number for row in rows] == [0, 1]


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    (row,) = iter_rows(jsonl(tmp_path, json.dumps(record()) + "\r"))
    assert row.ground_truth == "2"


def test_several_messages_keep_their_order_and_only_role_and_content(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "Be brief.", "name": "x"},
        {"role": "user", "content": ""},
    ]
    (row,) = iter_rows(jsonl(tmp_path, record(prompt=prompt)))
    assert row.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("changes", "truth"),
    [
        ({"truth": 34}, "34"),
        ({"truth": ""}, ""),
        ({"truth": None}, None),
        ({"reward_model": {}}, None),
        ({"reward_model": None}, None),
    ],
)
def test_a_ground_truth_is_text_or_nothing(
    tmp_path: Path, changes: dict[str, Any], truth: str | None
) -> None:
    (row,) = iter_rows(jsonl(tmp_path, record(**changes)))
    assert row.ground_truth == truth


@pytest.mark.parametrize("extra", [None, 5, "index"])
def test_extra_information_that_is_no_record_is_ignored(tmp_path: Path, extra: Any) -> None:
    (row,) = iter_rows(jsonl(tmp_path, record(extra_info=extra)))
    assert row.extra == {}


def test_data_sources_are_counted(tmp_path: Path) -> None:
    file = jsonl(tmp_path, record(), record(data_source="gsm8k"), record())
    assert count_data_sources(file) == {"math_dapo": 2, "gsm8k": 1}


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert list(iter_rows(jsonl(tmp_path))) == []
    assert count_data_sources(jsonl(tmp_path)) == {}


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ('{"data_source": "x", ', "not valid JSON"),
        ("not json", "not valid JSON"),
        ("[1, 2]", r"expected an object with data_source and prompt, got \[1, 2\]"),
        (record(data_source=None), "'data_source' must be a name, got None"),
        (record(data_source=""), "'data_source' must be a name, got ''"),
        (record(data_source=7), "'data_source' must be a name, got 7"),
        (record(prompt="1+1="), "'prompt' must be a list of {role, content} messages, got '1"),
        (record(prompt=[]), r"'prompt' must be a list .*got \[\]"),
        (record(prompt=[{"role": "user"}]), "'prompt' must be a list"),
        (record(prompt=[{"role": "user", "content": [{"type": "text"}]}]), "'prompt' must be"),
        (record(prompt=[{"role": None, "content": "a"}]), "'prompt' must be a list"),
        (record(reward_model="34"), "'reward_model' must hold 'ground_truth', got '34'"),
        (b'{"data_source": "\xff"}', "not UTF-8 text"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, bad: Any, said: str) -> None:
    file = jsonl(tmp_path, record(), "", bad, record())
    with pytest.raises(DataError, match=rf"rows\.jsonl line 3: {said}"):
        list(iter_rows(file))


def test_a_bad_parquet_row_is_named_by_its_number(tmp_path: Path) -> None:
    file = parquet(tmp_path, record(), record(data_source=None))
    with pytest.raises(DataError, match=r"rows\.parquet row 1: 'data_source' must be a name"):
        list(iter_rows(file))


def test_a_long_wrong_prompt_is_not_repeated_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(iter_rows(jsonl(tmp_path, record(prompt="x" * 5000))))
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_the_rows_before_a_bad_line_are_given_first(tmp_path: Path) -> None:
    rows = iter_rows(jsonl(tmp_path, record("a"), record("b"), b"\xff\xfe", record("c")))
    assert [next(rows).number, next(rows).number] == [0, 1]
    with pytest.raises(DataError, match="line 3"):
        next(rows)


def test_a_file_is_streamed(tmp_path: Path) -> None:
    file = jsonl(tmp_path, *(record(str(i) + "x" * 1000) for i in range(300)))
    rows = iter_rows(file)
    next(rows)
    with file.open("r+b") as stream:  # the end of the file has not been read yet
        stream.seek(200_000)
        stream.truncate()
    assert len(list(cut_short(rows))) < 200


def cut_short(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows up to the line at which the file now ends."""
    try:
        yield from rows
    except DataError:
        return


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(DataError, match="no such data file; expected JSONL or Parquet"):
            next(iter_rows(missing))


@pytest.mark.parametrize("content", [b"", b"no parquet at all", b"PAR1" + bytes(40) + b"PAR1"])
def test_a_broken_parquet_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.parquet: not a readable Parquet file"):
        next(iter_rows(file))


# ------------------------------------------------------------------ prompts


def test_prompts_are_rendered_and_tokenised(tmp_path: Path) -> None:
    prompts = load_prompts(jsonl(tmp_path, record("1+1=", "2")), Letters(), 10)
    (prompt,) = prompts.prompts
    assert prompt.text == "u:1+1=|"
    assert prompt.token_ids == tuple(map(ord, "u:1+1=|"))
    assert (prompt.row, prompt.data_source, prompt.ground_truth) == (0, "math_dapo", "2")
    assert prompt.extra == {"index": UUID}


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    file = jsonl(tmp_path, record("aaaa"), record("aaaaa"), record("a"))
    found = load_prompts(file, Letters(), max_prompt_tokens=7)
    assert [prompt.row for prompt in found.prompts] == [0, 2]  # 7 tokens fit, 8 do not
    assert (found.rows, found.too_long, found.path) == (3, 1, str(file))


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path, record("a"), record("aaaaaaaa"), record("b"), "this line is not read")
    found = load_prompts(file, Letters(), max_prompt_tokens=7, limit=3)
    assert [prompt.row for prompt in found.prompts] == [0, 2]
    assert (found.rows, found.too_long) == (3, 1)


def test_prompts_are_tokenised_in_blocks(tmp_path: Path) -> None:
    file = jsonl(tmp_path, *(record(str(i)) for i in range(TOKENIZE_ROWS + 2)))
    tokenizer = Letters()
    found = load_prompts(file, tokenizer, max_prompt_tokens=20)
    assert tokenizer.calls == [TOKENIZE_ROWS, 2]
    assert [prompt.row for prompt in found.prompts] == list(range(TOKENIZE_ROWS + 2))


def test_a_file_of_which_nothing_is_usable_is_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path, record("aaaa"), record("bbbb"))
    with pytest.raises(DataError, match=r"none of its 2 prompts has at most 3 tokens; raise"):
        load_prompts(file, Letters(), max_prompt_tokens=3)
    with pytest.raises(DataError, match=r"rows\.jsonl: holds no rows"):
        load_prompts(jsonl(tmp_path), Letters(), max_prompt_tokens=3)
