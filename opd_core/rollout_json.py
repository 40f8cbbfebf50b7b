"""Rollouts, groups and other records as JSON and back, exactly: for whatever of a run must outlive
its process.

``json`` of the standard library writes the shortest text that reads back as the same float64, NaN
and the infinities by name, and halves of surrogate pairs; faster writers do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from opd_core.errors import DataError, OPDError, TrainingError
from opd_core.rollout import Group, Prompt, RolloutState

_NUMBERS: dict[Any, set[Any]] = {int: {int}, float: {int, float}}


def to_json(plain: Any) -> bytes:
    """Plain data as one line of UTF-8. Raises TypeError or ValueError for what JSON cannot hold."""
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")  # half a surrogate pair comes from bad data rows


def from_json(data: bytes) -> Any:
    """The inverse of :func:`to_json`. Raises ValueError."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def rollout_to_json(rollout: RolloutState) -> bytes:
    """All fields of a rollout and its prompt.

    ``prompt.extra`` must hold what JSON can: raises TypeError or ValueError for anything else. (A
    tuple in it comes back as a list.)
    """
    return to_json(to_plain(rollout))


def rollout_from_json(data: bytes) -> RolloutState:
    """The inverse of :func:`rollout_to_json`. Raises :class:`DataError` for anything else."""
    try:
        rollout: RolloutState = from_plain(RolloutState, from_json(data))
    except ValueError as error:
        raise DataError(
            f"expected a rollout as JSON, got {data[:80]!r} of {len(data)} bytes ({error})"
        ) from None
    return rollout


def group_to_plain(group: Group) -> dict[str, Any]:
    """A group as plain data, its prompt once and without ``extra``: only judges and filters read
    that, before a group ends, and it may hold what JSON cannot."""
    if any(rollout.prompt != group.prompt for rollout in group.rollouts):
        raise ValueError(f"the rollouts of group {group.group_id} are not all of its prompt")
    return {
        **to_plain(group, without=("prompt", "rollouts")),
        "prompt": to_plain(group.prompt, without=("extra",)),
        "rollouts": [to_plain(rollout, without=("prompt",)) for rollout in group.rollouts],
    }


def group_from_plain(plain: Any) -> Group:
    """The inverse of :func:`group_to_plain`. Raises ValueError."""
    if not isinstance(plain, dict) or not isinstance(plain.get("rollouts"), list):
        raise ValueError(f"expected a group with its rollouts, got {plain!r:.80}")
    rest = dict(plain)
    prompt = from_plain(Prompt, rest.pop("prompt", None), extra={})
    rollouts = tuple(
        from_plain(RolloutState, rollout, prompt=prompt) for rollout in rest.pop("rollouts")
    )
    group: Group = from_plain(Group, rest, prompt=prompt, rollouts=rollouts)
    return group


def to_plain(value: Any, *, without: tuple[str, ...] = ()) -> Any:
    """Dataclasses (``without`` some fields), dicts with string keys, sequences and enums as what
    JSON has."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.name not in without]
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        only_numbers = {int, float}.issuperset(map(type, value))  # by far the longest sequences
        return list(value) if only_numbers else [to_plain(inner) for inner in value]
    return value


def from_plain(kind: Any, plain: Any, **given: Any) -> Any:
    """A ``kind`` from what :func:`to_plain` made of it; ``given`` are the fields that it was made
    without.

    Kinds are dataclasses whose every field is there and no other, variable-length tuples, dicts
    with string keys, enums, ``str``, ``int``, ``float``, these or None, and Any. Raises ValueError.
    """
    if kind is Any:
        return plain
    if is_dataclass(kind):
        return _dataclass(kind, plain, given)
    if isinstance(kind, UnionType):
        (inner,) = (inner for inner in get_args(kind) if inner is not NoneType)
        return None if plain is None else from_plain(inner, plain)
    origin, inners = get_origin(kind) or kind, get_args(kind)
    if origin is tuple and isinstance(plain, list):
        if _NUMBERS.get(inners[0], set()).issuperset(map(type, plain)):
            return tuple(plain)
        return tuple(from_plain(inners[0], inner) for inner in plain)
    if issubclass(origin, dict) and isinstance(plain, dict):
        inner = int if origin is not dict else inners[1]  # Counter[str] counts
        return origin({key: from_plain(inner, value) for key, value in plain.items()})
    if issubclass(origin, Enum):
        return origin(plain)
    if type(plain) in _NUMBERS.get(origin, {origin}):
        return plain
    raise ValueError(f"expected {getattr(kind, '__name__', kind)}, got {plain!r:.80}")


@contextmanager
def refused_as(what: str) -> Iterator[None]:
    """Data that is found wrong within is told as a :class:`TrainingError` that begins with
    ``what``."""
    try:
        yield
    except (OPDError, ValueError) as error:
        raise TrainingError(f"{what}: {error}") from None


@cache
def _field_kinds(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _dataclass(kind: Any, plain: Any, given: dict[str, Any]) -> Any:
    kinds = {name: k for name, k in _field_kinds(kind).items() if name not in given}
    if not isinstance(plain, dict):
        raise ValueError(f"expected {kind.__name__} as an object, got {plain!r:.80}")
    if plain.keys() != kinds.keys():
        odd = sorted(plain.keys() ^ kinds.keys())
        raise ValueError(f"fields of {kind.__name__} that are missing or unknown: {odd}")
    made = {}
    for name, inner in kinds.items():
        try:
            made[name] = from_plain(inner, plain[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return kind(**made, **given)
