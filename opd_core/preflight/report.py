"""What the checks found."""

from __future__ import annotations

from dataclasses import dataclass, field

from opd_core.errors import PreflightError
from opd_core.preflight.card import PairCard
from opd_core.preflight.facts import ModelFacts


@dataclass(slots=True)
class PreflightReport:
    """What was found. ``problems`` stop the run; ``warnings`` are shown; ``cards`` say how each
    teacher server fits the student."""

    student: ModelFacts | None = None
    teachers: dict[str, ModelFacts] = field(default_factory=dict)
    cards: list[PairCard] = field(default_factory=list)
    data_sources: dict[str, int] = field(default_factory=dict)
    proof_sequences: list[list[int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def raise_problems(self) -> None:
        """Raise :class:`PreflightError` with all problems, if there are any."""
        if self.problems:
            told = "\n".join(f"  - {problem}" for problem in self.problems)
            raise PreflightError(f"nothing was started, because:\n{told}")
