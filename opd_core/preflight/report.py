"""What the checks found."""

from __future__ import annotations

from dataclasses import dataclass, field

from opd_core.errors import PreflightError


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model directory says of itself; ``context_length`` 0 means it does not say.

    ``tokenizer_hash`` is of the vocabulary: equal hashes mean that the same ids are the same text.
    ``fingerprint`` is of the weights and the config.
    """

    path: str
    vocab_size: int
    context_length: int
    tokenizer_hash: str
    fingerprint: str
    weights_bytes: int
    eos_token_id: int | None = None
    tokenizer_size: int = 0


@dataclass(slots=True)
class PreflightReport:
    """What was found. ``problems`` stop the run; ``warnings`` are shown."""

    student: ModelFacts | None = None
    teachers: dict[str, ModelFacts] = field(default_factory=dict)
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
