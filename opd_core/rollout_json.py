"""A rollout as JSON and back, exactly: for whatever of a run must outlive its process.

``json`` of the standard library writes the shortest text that reads back as the same float64, and
NaN and the infinities by name.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from opd_core.errors import DataError
from opd_core.rollout import Prompt, RolloutState, Status


def rollout_to_json(rollout: RolloutState) -> bytes:
    """All fields of a rollout and its prompt, as one line of UTF-8.

    ``prompt.extra`` must hold what JSON can: raises TypeError or ValueError for anything else. (A
    tuple in it comes back as a list.)
    """
    text = json.dumps(rollout, default=_fields_of, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")  # half a surrogate pair comes from bad data rows


def rollout_from_json(data: bytes) -> RolloutState:
    """The inverse of :func:`rollout_to_json`. Raises :class:`DataError` for anything else."""
    try:
        record = json.loads(data.decode("utf-8", "surrogatepass"))
        prompt = _made(Prompt, record["prompt"], ints=("token_ids",))
        rollout: RolloutState = _made(
            RolloutState,
            {**record, "prompt": prompt, "status": Status(record["status"])},
            ints=("response_ids",),
            floats=("rollout_logprobs", "teacher_logprobs"),
        )
        return rollout
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"expected a rollout as JSON, got {data[:80]!r} of {len(data)} bytes "
            f"({type(error).__name__}: {error})"
        ) from None


def _fields_of(value: object) -> dict[str, Any]:
    if type(value) is RolloutState or type(value) is Prompt:
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(f"{value!r:.80} of type {type(value).__name__} has no form in JSON")


def _made(
    kind: type[Any], record: dict[str, Any], ints: tuple[str, ...], floats: tuple[str, ...] = ()
) -> Any:
    """A record of ``kind`` with its sequences as tuples; every field must be there, and no
    other."""
    expected = {field.name for field in fields(kind)}
    if set(record) != expected:
        raise ValueError(f"fields that are missing or unknown: {sorted(expected ^ set(record))}")
    made = dict(record)
    for names, types in ((ints, (int,)), (floats, (int, float))):
        for name in names:
            if made[name] is not None:
                made[name] = _checked(name, made[name], types)
    return kind(**made)


def _checked(name: str, values: Any, types: tuple[type, ...]) -> tuple[Any, ...]:
    if not isinstance(values, list) or any(type(value) not in types for value in values):
        raise ValueError(f"{name} is {values!r:.80}, not a list of numbers")
    return tuple(values)
