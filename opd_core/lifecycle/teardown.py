"""The one ending of a run, whatever its cause, and the ending of a run whose supervisor died.

Children are stopped in order, each with its own signal and time; then everything of the run is
killed until nothing is found; then ports and scratch folders are proven gone. One deadline bounds
all waiting, and a part of it is kept for the killing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .children import Children, StartedChild
from .gpu_memory import await_released
from .ledger import LedgerRecord
from .ports import port_is_free
from .process import ProcessId, boot_id, executable_name, kill_exactly, with_ancestors
from .records import ChildEnd, DeviceState, PortState, Receipt, ScratchState, Survivor
from .sweep import markers, sweep

_REAP_S = 3.0
_SLICE_S = 0.25
# A driver's own bookkeeping, and what a neighbour's context takes on a shared device.
_MEMORY_SLACK_MIB = 512


@dataclass(frozen=True)
class RunFacts:
    """What a teardown must know of its run. `spare` are processes that it may never touch,
    `used_mib` the memory in use on its devices before it began."""

    run_id: str
    run_dir: Path
    teardown_s: float
    spare: frozenset[ProcessId]
    used_mib: Mapping[str, int] = field(default_factory=dict)


def tear_down(
    run: RunFacts, children: Children, *, cause: str, turn: Callable[[float], None]
) -> Receipt:
    """End everything the supervisor started and return the proof.

    `turn` waits up to that many seconds for something to happen and reaps what has ended.
    """
    began = time.monotonic()
    deadline = began + run.teardown_s
    ask_until = deadline - min(10.0, run.teardown_s / 4)
    turn(0.0)
    for order in sorted({child.spec.stop_order for child in children.all() if child.living}):
        group = [child for child in children.all() if child.spec.stop_order == order]
        stop(group, ask_until=ask_until, turn=turn)
    survivors = sweep(
        markers(run.run_id), root=os.getpid(), spare=run.spare, deadline=deadline, pause=turn
    )
    # Whatever a look at /proc says: a child that cannot be reaped has not ended.
    named = {survivor.pid for survivor in survivors}
    unreaped = [child for child in children.all() if child.living and child.pid not in named]
    survivors += tuple(Survivor(child.pid, executable_name(child.pid)) for child in unreaped)
    specs = [child.spec for child in children.all()]
    return _receipt(
        run,
        cause=cause,
        began=began,
        children=tuple(child.to_end() for child in children.all()),
        survivors=survivors,
        ports=_check_ports((port for spec in specs for port in spec.ports), deadline, turn),
        scratch=_remove_scratch(path for spec in specs for path in spec.scratch),
        devices=await_released(run.used_mib, _MEMORY_SLACK_MIB, deadline, turn),
    )


def stop(
    group: Sequence[StartedChild],
    *,
    ask_until: float,
    turn: Callable[[float], None],
    give_up: Callable[[], bool] = lambda: False,
) -> None:
    """Stop children at the same time: signal, each one's grace but not past `ask_until`, SIGKILL.

    Returns once they have ended, some seconds after SIGKILL at the latest, or when `give_up` is
    true.
    """
    began = time.monotonic()
    for child in group:
        child.ask_to_stop()
    while not give_up():
        now = time.monotonic()
        pauses = []
        for child in (child for child in group if child.living):
            grace_left = min(began + child.spec.grace_s, ask_until) - now
            if grace_left <= 0:
                child.kill()
            if child.killed_at is None:
                pauses.append(grace_left)
            elif now < child.killed_at + _REAP_S:
                pauses.append(_SLICE_S)
        if not pauses:
            return
        turn(min(_SLICE_S, *pauses))


def end_without_supervisor(
    run: RunFacts, records: Sequence[LedgerRecord], cause: str, *, patient: bool = True
) -> Receipt:
    """End what a dead supervisor left, from the ledger's records of its run and the markers; return
    an honest receipt.

    Call it only when that supervisor is known to be dead. Its direct children die with it; what is
    killed here are their descendants. How and when they ended was seen by nobody. Ports and memory
    are waited for only by the `patient`: nobody keeps them for a run that died long ago, and under
    another boot they are not looked at.
    """
    began = time.monotonic()
    deadline = began + run.teardown_s
    this_boot = boot_id()
    begun = records[0].facts if records else {}
    is_this_boot = begun.get("boot_id", this_boot) == this_boot
    before = begun.get("used_mib", {}) if is_this_boot else {}
    proofs_until = deadline if patient else began
    ends = {_identity(record): record for record in records if record.event == "child_ended"}
    started = [record for record in records if record.event == "child_started"]
    for record in started:
        if _identity(record) not in ends and record.facts["boot_id"] == this_boot:
            kill_exactly(_identity(record))
    survivors = sweep(
        markers(run.run_id), root=None, spare=run.spare, deadline=deadline, pause=time.sleep
    )
    orders = [record.facts for record in records if record.event == "child_starting"]
    ports = [port for order in orders for port in order["ports"] if is_this_boot]
    return _receipt(
        run,
        cause=cause,
        began=began,
        children=tuple(_recorded_end(record, ends.get(_identity(record))) for record in started),
        survivors=survivors,
        ports=_check_ports(ports, proofs_until, time.sleep),
        scratch=_remove_scratch(Path(path) for order in orders for path in order["scratch"]),
        devices=await_released(before, _MEMORY_SLACK_MIB, proofs_until, time.sleep),
    )


def spared(owner_pid: int) -> frozenset[ProcessId]:
    """Return the processes that no teardown may touch: this one, the owner, and their ancestors."""
    return with_ancestors(owner_pid) | with_ancestors(os.getpid())


def _receipt(
    run: RunFacts,
    *,
    cause: str,
    began: float,
    children: tuple[ChildEnd, ...],
    survivors: tuple[Survivor, ...],
    ports: tuple[PortState, ...],
    scratch: tuple[ScratchState, ...],
    devices: tuple[DeviceState, ...],
) -> Receipt:
    ports_free = all(each.free for each in ports)
    scratch_removed = all(each.removed for each in scratch)
    memory_released = all(each.released for each in devices)
    return Receipt(
        run_id=run.run_id,
        cause=cause,
        clean=not survivors and ports_free and scratch_removed and memory_released,
        seconds=round(time.monotonic() - began, 3),
        children=children,
        survivors=survivors,
        ports=ports,
        scratch=scratch,
        devices=devices,
    )


def _check_ports(
    ports: Iterable[int], deadline: float, pause: Callable[[float], None]
) -> tuple[PortState, ...]:
    """Check each port until it is free, all of them together not past the deadline."""
    states: list[PortState] = []
    for port in dict.fromkeys(ports):
        while not (free := port_is_free(port)) and time.monotonic() < deadline:
            pause(_SLICE_S)
        states.append(PortState(port, free))
    return tuple(states)


def _remove_scratch(paths: Iterable[Path]) -> tuple[ScratchState, ...]:
    states: list[ScratchState] = []
    for path in dict.fromkeys(paths):
        # A link is refused by rmtree and stays: what it points at is not known to be scratch.
        shutil.rmtree(path, ignore_errors=True)
        states.append(ScratchState(str(path), removed=not os.path.lexists(path)))
    return tuple(states)


def _identity(record: LedgerRecord) -> ProcessId:
    return ProcessId(record.facts["pid"], record.facts["start_ticks"])


def _recorded_end(started: LedgerRecord, ended: LedgerRecord | None) -> ChildEnd:
    facts = started.facts
    return ChildEnd(
        name=facts["name"],
        kind=facts["kind"],
        pid=facts["pid"],
        started_at=started.at,
        ended_at=None if ended is None else ended.at,
        how="SIGKILL" if ended is None else ended.facts["how"],
        returncode=None if ended is None else ended.facts["returncode"],
    )
