"""The pair check card: what was found of one student and one teacher server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error", "unknown"]


@dataclass(frozen=True, slots=True)
class CardRow:
    """One item: what was found on each side, and what to do where that is not ``ok``."""

    item: str
    student: str
    teacher: str
    level: Level = "ok"
    advice: str = ""


@dataclass(frozen=True, slots=True)
class PairCard:
    """All items of one pair; ``teacher`` says which server, as in ``teacher 'math' replica 1``."""

    teacher: str
    rows: tuple[CardRow, ...]
    rendering_diff: str = ""

    @property
    def ok(self) -> bool:
        """True where every row is."""
        return all(row.level == "ok" for row in self.rows)

    def told(self, *levels: Level) -> list[str]:
        """The advice of the rows of these levels, each once and with its subject."""
        found = [row.advice for row in self.rows if row.level in levels]
        return list(
            dict.fromkeys(
                text if text.startswith("student: ") else f"{self.teacher}: {text}"
                for text in found
            )
        )
