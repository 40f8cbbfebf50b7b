"""What a client must know of a teacher before it trusts a number from it.

The flow finds it out when a teacher becomes ready and writes it for the training job; after a
restart it writes it again, with the new endpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from opd_core.errors import TeacherAnswerError, TeacherRefused


@dataclass(frozen=True, slots=True)
class Canary:
    """A known sequence of N tokens, and what each replica answered for it when it was ready.

    ``logprobs[r]`` holds the N - 1 logprobs of ``token_ids[1:]`` from replica number r.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[float, ...], ...]

    def check(self, replica: int, logprobs: Sequence[float], tolerance: float) -> None:
        """Hold what a replica answers now against what it answered first.

        Raises :class:`TeacherAnswerError` if a logprob differs by more than ``tolerance`` nats.
        """
        if not self.logprobs:
            return
        pairs = zip(self.logprobs[replica], logprobs, strict=True)
        gap = max(abs(first - now) for first, now in pairs)
        if gap > tolerance:
            raise TeacherAnswerError(
                f"a known sequence of {len(self.token_ids)} tokens now scores up to {gap:.3g} nats "
                f"differently (tolerance {tolerance:.3g}): the server's weights, or what computes "
                "with them, have changed",
                "changed",
            )


SOME_SEQUENCE = Canary((0, 1, 2), ())
"""Where nothing was scored before: that it is answered soundly is all that can be asked."""


@dataclass(frozen=True, slots=True)
class TeacherFacts:
    """What must be known of the teacher's model before an id is sent to its server.

    ``context_length`` 0 means unknown (an external server that does not tell). ``endpoints`` are
    those of the replicas, in their order; empty means those of the configuration. ``tolerance``
    is the largest difference, in nats, of a canary's logprob from its first scoring.
    ``fingerprint`` names the frozen model; empty where it is not known.
    """

    vocab_size: int
    context_length: int = 0
    endpoints: tuple[str, ...] = ()
    canaries: tuple[Canary, ...] = ()
    tolerance: float = 1e-3
    fingerprint: str = ""

    def check_sendable(self, token_ids: Sequence[int], start: int, margin: int) -> None:
        """Refuse what no server may get: one bad id can end a whole SGLang server.

        ``margin`` (tokens) is what the backend keeps back of its context. Raises
        :class:`TeacherRefused`.
        """
        if not 0 <= start < len(token_ids) - 1:
            said = f"nothing to score after position {start} of {len(token_ids)} tokens"
            raise TeacherRefused(said, "start")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            bad = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            said = f"id {bad} is outside the teacher's vocabulary of {self.vocab_size}"
            raise TeacherRefused(said, "bad_id")
        limit = self.context_length - margin
        if self.context_length and len(token_ids) > limit:
            said = f"{len(token_ids)} tokens are over the teacher's limit of {limit}"
            raise TeacherRefused(said, "too_long")


_ALL = TypeAdapter(dict[str, TeacherFacts])


def facts_to_json(facts: dict[str, TeacherFacts]) -> str:
    """All teachers of a run, by name."""
    return _ALL.dump_json(facts, indent=1).decode()


def read_facts(path: Path) -> dict[str, TeacherFacts]:
    """The inverse of :func:`facts_to_json`, from a file. Raises OSError or ValueError."""
    return _ALL.validate_json(path.read_bytes())
