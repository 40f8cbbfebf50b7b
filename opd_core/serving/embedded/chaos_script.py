"""The script of faults: its format, its checks, and which fault meets which request.

Nothing here knows of HTTP, and only ``ScriptRun`` keeps counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opd_core.errors import ConfigError

logger = logging.getLogger(__name__)

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _When(_Strict):
    """first: number of the first request, from 1. count: how often at most. from_s and until_s:
    seconds since the script began."""

    first: Positive = 1
    count: Positive | None = None
    from_s: Seconds = 0.0
    until_s: Seconds | None = None


class _OnRequests(_When):
    """every: each how many-th request from ``first`` on. containing: a run of ids that a sequence
    must hold. min_tokens: its least length. once: never again, also after a restart."""

    every: Positive = 1
    containing: tuple[int, ...] = ()
    min_tokens: Annotated[int, Field(ge=0)] = 0
    once: bool = False


class WrongRows(_OnRequests):
    """``rows`` too many (the last again), or too few where it is negative."""

    fault: Literal["wrong_rows"]
    rows: Literal[-2, -1, 1, 2]


class Status(_OnRequests):
    """This HTTP status; retry_after: seconds, the text of an HTTP date, or nothing."""

    fault: Literal["status"]
    status: Annotated[int, Field(ge=400, le=599)]
    retry_after: Annotated[int, Field(ge=0)] | str | None = None


class Slow(_OnRequests):
    """The true answer, ``delay_s`` later."""

    fault: Literal["slow"]
    delay_s: Seconds


class Health(_When):
    """What health checks are told. ``first`` counts requests: from the moment that the next
    request has this number."""

    fault: Literal["health"]
    answer: Literal["ok", "bad", "hang"]


class Plain(_OnRequests):
    """A fault without a choice; docs/chaos.md says what each does."""

    fault: Literal[
        "shifted", "nulls", "nan", "infinite", "positive", "other_ids", "raw_logits", "uniform",
        "stale", "error_200", "hang", "cut", "die", "die_mid_answer",
    ]  # fmt: skip


RequestFault = WrongRows | Status | Slow | Plain
Fault = RequestFault | Health


class Script(_Strict):
    """What goes wrong, first match first; and the file that notes each sequence truly answered."""

    faults: tuple[Annotated[Fault, Field(discriminator="fault")], ...]
    record: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One request, or one health check (``sequences`` is None and ``number`` the next request's).

    elapsed_s: since the script began. sequences: the ids of each sequence.
    """

    number: int
    elapsed_s: float
    sequences: Sequence[Sequence[int]] | None


def read_script(path: Path) -> Script:
    """The script in this file. Raises :class:`ConfigError`, which says what is known."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: the chaos script cannot be read ({error.strerror})") from None
    return parse_script(content, path)


def parse_script(content: bytes, path: Path) -> Script:
    """A script whose record and marks lie beside ``path``. Raises :class:`ConfigError`."""
    try:
        script = Script.model_validate_json(content)
    except ValidationError as error:
        lines = "\n".join(f"  {_explain(item)}" for item in error.errors())
        raise ConfigError(f"{path}: not a chaos script:\n{lines}") from None
    folders = [path.parent] if any(_is_once(fault) for fault in script.faults) else []
    folders += [(path.parent / script.record).parent] if script.record else []
    for folder in folders:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{path}: {folder} is no folder to write to; make it, or move")
    return script


def _explain(item: Mapping[str, Any]) -> str:
    """One mistake in words. A location holds the fault's name after its index."""
    where = ".".join(str(part) for part in item["loc"]) or "the script"
    if item["type"] == "extra_forbidden":
        name = item["loc"][2] if len(item["loc"]) > 2 else None
        known = _MODEL_OF.get(name, Script).model_fields
        return f"{where}: unknown key (known here: {', '.join(sorted(known))})"
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return f"{where}: no known fault (known are: {', '.join(sorted(_MODEL_OF))})"
    return f"{where}: {item['msg'][0].lower()}{item['msg'][1:]}"


_MODEL_OF: dict[Any, type[_When]] = {
    name: model
    for model in get_args(Fault)
    for name in get_args(model.model_fields["fault"].annotation)
}


def choose(script: Script, event: Event, applied: Sequence[int], spent: Collection[int]) -> int:
    """Index of the first fault that meets this event, -1 for none.

    applied: how often each fault was applied. spent: faults that may never be applied again.
    """
    for index, fault in enumerate(script.faults):
        left = index not in spent and (fault.count is None or applied[index] < fault.count)
        if left and _meets(fault, event):
            return index
    return -1


def _meets(fault: Fault, event: Event) -> bool:
    in_time = fault.from_s <= event.elapsed_s and (
        fault.until_s is None or event.elapsed_s < fault.until_s
    )
    if not in_time or event.number < fault.first:
        return False
    if isinstance(fault, Health) or event.sequences is None:
        return isinstance(fault, Health) and event.sequences is None
    if (event.number - fault.first) % fault.every:
        return False
    if not fault.containing and not fault.min_tokens:
        return True
    return any(
        len(ids) >= fault.min_tokens and _contains(ids, fault.containing) for ids in event.sequences
    )


def _contains(ids: Sequence[int], run: Sequence[int]) -> bool:
    """Whether the ids of ``run`` stand somewhere in ``ids`` one after the other."""
    width, wanted = len(run), list(run)
    return any(list(ids[i : i + width]) == wanted for i in range(len(ids) - width + 1))


def _is_once(fault: Fault) -> bool:
    return isinstance(fault, _OnRequests) and fault.once


class ScriptRun:
    """One script at work: it counts, asks ``choose``, and remembers what may happen only once."""

    def __init__(
        self, script: Script, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.script = script
        self._path = path
        self._clock = clock
        self._began_at: float | None = None
        self._requests = 0
        self._applied = [0] * len(script.faults)
        self._spent: set[int] = set()

    def begin(self) -> None:
        """Start the clock, unless it runs."""
        self._began_at = self._clock() if self._began_at is None else self._began_at

    def on_request(self, sequences: Sequence[Sequence[int]]) -> RequestFault | None:
        """The fault of the next request, which is hereby counted."""
        self._requests += 1
        fault = self._take(Event(self._requests, self._elapsed_s(), sequences))
        return None if isinstance(fault, Health) else fault

    def on_health_check(self) -> Health | None:
        """The fault of a health check."""
        fault = self._take(Event(self._requests + 1, self._elapsed_s(), None))
        return fault if isinstance(fault, Health) else None

    def facts(self) -> dict[str, Any]:
        """The script, the number of requests, and how often each fault was applied."""
        script = self.script.model_dump(mode="json", exclude_unset=True)
        return {"script": script, "requests": self._requests, "applied": self._applied}

    def record(self, token_ids: Sequence[int], start: int) -> None:
        """Append the digest of a sequence that was truly answered, in one write."""
        if self.script.record is None:
            return
        line = f"{request_digest(token_ids, start)}\n".encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.open(self._path.parent / self.script.record, flags, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def _elapsed_s(self) -> float:
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    def _take(self, event: Event) -> Fault | None:
        while (index := choose(self.script, event, self._applied, self._spent)) >= 0:
            fault = self.script.faults[index]
            if not _is_once(fault) or self._claim(index):
                self._applied[index] += 1
                logger.info("chaos: %s meets request %d", fault.fault, event.number)
                return fault
        return None

    def _claim(self, index: int) -> bool:
        """True for the first to ask, of all processes that ever share this script's folder."""
        self._spent.add(index)
        fault = self.script.faults[index].model_dump_json()
        mark = hashlib.sha256(f"{index} {fault}".encode()).hexdigest()[:12]
        try:
            self._path.with_name(f"{self._path.name}.once-{mark}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def request_digest(token_ids: Sequence[int], start: int) -> str:
    """What the record keeps of a sequence: SHA-256 of the JSON list [ids, start], in hex."""
    return hashlib.sha256(json.dumps([list(token_ids), start]).encode()).hexdigest()
