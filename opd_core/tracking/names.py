"""Metric names that MLflow and TensorBoard both accept, and records as finite points."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from opd_core.tracking.journal import JournalRecord

MAX_NAME_LENGTH = 250
_REFUSED = re.compile(r"[^/\w.\- :]")


def accepted_name(name: str) -> str:
    """``name`` itself where MLflow accepts it, else the nearest name that it does accept.

    MLflow takes letters and digits of any script, ``/ _ - . :`` and spaces, at most 250 characters,
    and no path that would resolve to another one. A changed name ends in six hex digits of the
    original's SHA-256, so that two names never become one. A name that is already the result of
    this function is returned as it is.
    """
    parts = _REFUSED.sub("_", name).split("/")
    safe = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if safe.startswith(".."):
        safe = "_" + safe
    if safe == name and len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{safe[: MAX_NAME_LENGTH - 7]}-{digest[:6]}"


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric; ``time_ms`` is unix time in milliseconds."""

    name: str
    value: float
    time_ms: int
    train_step: int


def finite_points(records: Iterable[JournalRecord]) -> tuple[list[Point], int]:
    """The points of ``records`` in order, under accepted names, and how many were left out because
    they are not finite (MLflow stores infinity as 1.8e308)."""
    points: list[Point] = []
    dropped = 0
    for record in records:
        for name, value in record.metrics.items():
            if math.isfinite(value):
                time_ms = int(record.time_s * 1000)
                points.append(Point(accepted_name(name), value, time_ms, record.train_step))
            else:
                dropped += 1
    return points, dropped
