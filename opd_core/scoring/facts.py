"""What a client must know of a teacher before it trusts a number from it.

The flow finds it out when a teacher becomes ready and writes it for the training job; after a
restart it writes it again, with the new endpoints.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Canary:
    """A known sequence of N tokens, and what each replica answered for it when it was ready.

    ``logprobs[r]`` holds the N - 1 logprobs of ``token_ids[1:]`` from replica number r.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[float, ...], ...]


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


_ALL = TypeAdapter(dict[str, TeacherFacts])


def facts_to_json(facts: dict[str, TeacherFacts]) -> str:
    """All teachers of a run, by name."""
    return _ALL.dump_json(facts, indent=1).decode()


def read_facts(path: Path) -> dict[str, TeacherFacts]:
    """The inverse of :func:`facts_to_json`, from a file. Raises OSError or ValueError."""
    return _ALL.validate_json(path.read_bytes())
