"""The pair check cards as a person and as a program read them."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from opd_core.preflight import CardRow, PairCard
from tasks.cards import card_table, cards_markdown, summary_line, to_markdown, write_cards

ROOT = Path(__file__).parents[2]
FITS = PairCard("teacher 'a'", (CardRow("tokenizer", "aa", "aa"), CardRow("context", "64", "64")))
DIFFERS = PairCard(
    "teacher 'b'",
    (
        CardRow("tokenizer", "aa", "bb", "error", "choose another"),
        CardRow("end token", "1 <|end|>", "2 [/END]", "warning", "mend *it* | now"),
    ),
    "--- student\n+++ teacher\n@@ row 0 (sums) @@\n <|user|>1\n+```↵",
)


def shown(card: PairCard) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(card_table(card))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_every_row_and_the_difference_of_the_prompts() -> None:
    text = shown(DIFFERS)
    assert "student against teacher 'b'" in text
    assert re.search(r"tokenizer +│ aa +│ bb +│ error", text)
    assert re.search(r"end token +│ 1 <\|end\|> +│ 2 \[/END\] +│ warning", text)
    assert [line.rstrip() for line in text.splitlines()][-2:] == [" <|user|>1", "+```↵"]
    assert "+++" not in shown(FITS)


def test_a_pair_that_fits_is_told_in_one_line() -> None:
    assert summary_line(FITS) == "teacher 'a' fits the student: tokenizer, context"


def cells(line: str) -> list[str]:
    """The cells of a markdown table's line, without what keeps them from being markup."""
    parts = re.split(r"(?<!\\)\|", line)[1:-1]
    return [re.sub(r"\\(.)", r"\1", part.strip()) for part in parts]


def test_the_markdown_table_holds_every_cell_as_it_stands() -> None:
    table = [line for line in to_markdown(DIFFERS).splitlines() if line.startswith("|")]
    assert cells(table[0]) == ["item", "student", "teacher", "level", "what to do"]
    assert [cells(line) for line in table[2:]] == [
        ["tokenizer", "aa", "bb", "error", "choose another"],
        ["end token", "1 <|end|>", "2 [/END]", "warning", "mend *it* | now"],
    ]
    assert "\\<\\|end\\|\\>" in table[3]


def test_the_markdown_diff_cannot_be_closed_by_what_it_shows() -> None:
    lines = to_markdown(DIFFERS).splitlines()
    start = lines.index("````diff")
    assert "\n".join(lines[start + 1 : lines.index("````")]) == DIFFERS.rendering_diff
    assert "diff" not in to_markdown(FITS)


def test_a_run_directory_gets_all_cards_to_read_and_to_parse(tmp_path: Path) -> None:
    write_cards(tmp_path, [FITS, DIFFERS])
    assert (tmp_path / "pair_check.md").read_text() == cards_markdown([FITS, DIFFERS])
    first, second = json.loads((tmp_path / "pair_check.json").read_text())
    assert (first["teacher"], first["rendering_diff"]) == ("teacher 'a'", "")
    assert second["rows"][0] == {
        "item": "tokenizer",
        "student": "aa",
        "teacher": "bb",
        "level": "error",
        "advice": "choose another",
    }
    assert second["rendering_diff"] == DIFFERS.rendering_diff


def test_a_run_without_teacher_has_no_cards_to_write(tmp_path: Path) -> None:
    write_cards(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["tasks.cards", "deployments.checking"])
def test_cards_are_shown_without_prefect(module: str) -> None:
    listing = f"import sys, {module}; print({{'prefect', 'torch', 'ray'}} & set(sys.modules))"
    command = [sys.executable, "-c", listing]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
