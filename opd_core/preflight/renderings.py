"""The same messages as the student's and as the teacher's chat template write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from opd_core.data import Row, iter_rows
from opd_core.preflight.facts import THINK_TAG

RENDERED_ROWS = 8
KEPT = 48
"""Characters that are shown on each side of what two prompts have in common."""
PIECE = re.compile(r"<[^<>\s]{1,64}>|\n|[^\s<]+[^\S\n]*|[^\S\n]+|<")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text; ``refusal`` is the reason where the chat template gives none."""

    text: str = ""
    refusal: str = ""

    @property
    def think_tag(self) -> str:
        """The think tag that the prompt ends with; empty without one."""
        tags = THINK_TAG.findall(self.text)
        return tags[-1] if tags and self.text.rstrip().endswith(tags[-1]) else ""


@dataclass(frozen=True, slots=True)
class Rendering:
    """One row of the data, rendered by both."""

    row: int
    data_source: str
    student: Rendered
    teacher: Rendered

    @property
    def differs(self) -> bool:
        """True where both give a prompt and the two are not the same."""
        return self.compared and self.student.text != self.teacher.text

    @property
    def compared(self) -> bool:
        """True where both give a prompt."""
        return not (self.student.refusal or self.teacher.refusal)


def render(tokenizer: Any, messages: list[dict[str, str]]) -> Rendered:
    """The prompt that a model answers, as text."""
    if tokenizer.chat_template is None:
        return Rendered(refusal="it has no chat template")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template refuses in its own words
        return Rendered(refusal=str(error) or type(error).__name__)
    return Rendered(str(text))


def sample_rows(path: str) -> list[Row]:
    """The first rows of every ``data_source``, in the order of the file.

    Reads the whole file. Raises :class:`~opd_core.errors.DataError`.
    """
    kept: dict[str, list[Row]] = {}
    for row in iter_rows(path):
        of_source = kept.setdefault(row.data_source, [])
        if len(of_source) < RENDERED_ROWS:
            of_source.append(row)
    return sorted((row for rows in kept.values() for row in rows), key=lambda row: row.number)


def choose_rows(rows: Iterable[Row], limit: int = RENDERED_ROWS) -> list[Row]:
    """One row of every ``data_source``, then further ones up to ``limit``."""
    ordered = list(rows)
    firsts = {row.data_source: row for row in reversed(ordered)}
    chosen = {row.number: row for row in firsts.values()}
    for row in ordered:
        if len(chosen) < limit:
            chosen.setdefault(row.number, row)
    return sorted(chosen.values(), key=lambda row: row.number)


def excerpt(text: str, other: str) -> str:
    """The part of ``text`` around the first place where it is not ``other``."""
    pairs = enumerate(zip(text, other, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    start, end = max(0, first - KEPT), first + KEPT
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def rendering_diff(rendering: Rendering) -> str:
    """Unified diff from the student's prompt to the teacher's; empty where they do not differ.

    Control characters are visible (``↵`` is a newline, ``·`` a space at an edge). Long stretches
    that both have are shortened; nothing that differs is.
    """
    if not rendering.differs:
        return ""
    ours = PIECE.findall(rendering.student.text)
    theirs = PIECE.findall(rendering.teacher.text)
    lines = [
        "--- student",
        "+++ teacher",
        f"@@ row {rendering.row} ({rendering.data_source}) @@",
    ]
    for what, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if what == "equal":
            lines += _shown(" ", _shortened("".join(ours[a:b])))
        else:
            lines += _shown("-", "".join(ours[a:b])) + _shown("+", "".join(theirs[c:d]))
    return "\n".join(lines)


def _shortened(text: str) -> str:
    left_out = len(text) - 2 * KEPT
    if left_out < KEPT:
        return text
    return f"{text[:KEPT]}… {left_out} characters that both have …{text[-KEPT:]}"


def _shown(mark: str, text: str) -> list[str]:
    return [mark + _visible(line) for line in re.findall(r"[^\n]*\n|[^\n]+", text)]


def _visible(line: str) -> str:
    body = line.removesuffix("\n")
    inner = body.strip(" ")
    before = len(body) - len(body.lstrip(" "))
    after = len(body) - before - len(inner)
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in inner)
    return "·" * before + shown + "·" * after + ("↵" if line.endswith("\n") else "")
