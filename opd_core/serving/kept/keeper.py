"""The keeper of a teacher: ``python -m opd_core.serving.kept.keeper FOLDER LOCK``.

It owns the supervisor of the servers as a run's flow does, and ends them when somebody asks, when
their time is over, on SIGTERM, and when they cannot be kept; if it dies, the supervisor ends them.
Keys come on standard input, as JSON, and stay in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opd_core.errors import OPDError, ServingError
from opd_core.lifecycle.errors import LifecycleError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.leases import DeviceHolder, DeviceLease
from opd_core.lifecycle.logs import log_tail
from opd_core.lifecycle.ports import port_is_free, reserve_ports
from opd_core.lifecycle.process import identify
from opd_core.lifecycle.receipt_text import left_over
from opd_core.lifecycle.registry import Registry
from opd_core.serving.child import server_child
from opd_core.serving.commands import START_RACE
from opd_core.serving.kept.record import HOUR_S, KeptOrder, KeptState, KeptTeacher
from opd_core.serving.kept.users import users_of
from opd_core.serving.life import Diagnosis, HealthWatch
from opd_core.serving.readiness import prove_again, prove_teacher, wait_until_healthy
from opd_core.serving.servers import Server

LOOK_S = 0.5
PORT_S = 20.0
"""How long the port of a server that is started again may still be taken."""
TELL_UNTIL_S = 30.0
NOTHING_TO_WRITE = ("true",)
"""The settle command: the receipt says all that is to be said of a kept teacher."""


class Ended(Exception):
    """The teacher is to be ended, for this cause."""


class Keeper:
    """One kept teacher, from the start of its servers to their end. ``key`` and ``secrets`` as
    :func:`~opd_core.serving.child.server_child` takes them."""

    def __init__(
        self, kept: KeptTeacher, order: KeptOrder, key: str | None, secrets: Mapping[str, str]
    ) -> None:
        self._kept, self._order = kept, order
        self._key, self._secrets = key, secrets
        self._signal = ""
        self._used_at = 0.0
        self._facts = order.facts
        self._started: dict[str, Server] = {}
        self._watches: dict[str, HealthWatch] = {}
        self._restarts: list[tuple[str, float]] = []
        me = identify(os.getpid())
        assert me is not None, "/proc shows the process that reads it"
        self._state = KeptState("starting", "", me.pid, me.start_ticks, time.time())

    def keep(self) -> bool:
        """Keep it until it is to be ended; whether that was in order, and left nothing."""
        self._tell()
        try:
            lease = DeviceLease.take(
                self._order.locks,
                owner={"run_id": self._kept.run_id, "run_dir": str(self._kept.folder)},
                wait_s=self._order.wait_s,
                waiting=self._waiting,
            )
            with lease:
                return self._supervised(lease)
        except Ended as ended:
            self._tell(phase="ended", said=str(ended))
            return True
        except LifecycleError as error:
            self._tell(phase="failed", said=str(error))
            return False

    def end_by_signal(self, number: int, frame: object) -> None:
        """A handler of signals."""
        self._signal = signal.Signals(number).name

    def _supervised(self, lease: DeviceLease) -> bool:
        self._supervisor = Supervisor.start(
            run_dir=self._kept.folder,
            run_id=self._kept.run_id,
            teardown_s=self._order.teardown_s,
            lease=lease,
            settle=NOTHING_TO_WRITE,
            registry=Registry.of_user(),
        )
        cause, said = "", ""
        try:
            self._bring_up()
            self._look_after()
        except Ended as ended:
            cause = str(ended)
        except (OPDError, LifecycleError) as error:
            cause, said = type(error).__name__, str(error)
        except BaseException as error:  # a mistake in here must not keep the devices either
            cause, said = type(error).__name__, traceback.format_exc()
        self._tell(phase="ending", said=said or cause)
        for watch in self._watches.values():
            watch.close()
        receipt = self._supervisor.end(cause)
        self._supervisor.settled()
        left = left_over(receipt)
        phase = "failed" if said else "ended"
        self._tell(phase=phase, said=". ".join(filter(None, (said or cause, left))))
        return not said and receipt.clean

    # --- start

    def _bring_up(self) -> None:
        """Start the servers, all at once, and prove that they score. Raises :class:`ServingError`,
        :class:`Ended`."""
        teacher = self._order.teacher
        servers = self._order.servers
        with reserve_ports(len(servers)) as free:
            placed = [
                server if server.port is not None else replace(server, port=port)
                for server, port in zip(servers, free.ports, strict=True)
            ]
        for server in placed:
            self._start(server)
        self._tell(endpoints=tuple(server.endpoint for server in placed))
        for server in placed:
            while not self._is_up(server):
                race = START_RACE.get(server.backend)
                log = log_tail(self._log(server))
                if race is None or race not in log:
                    raise ServingError(f"{server.who} died while it started; its log:\n{log}")
                self._start_again(server, f"did not start ({race})")
        self._facts = replace(self._facts, endpoints=self._state.endpoints)
        proof = prove_teacher(
            teacher, self._facts, self._key, self._order.sequences, self._order.dtype
        )
        self._facts = replace(self._facts, canaries=proof.canaries, tolerance=proof.tolerance)
        for server in placed:
            self._watches[server.child] = HealthWatch(server.endpoint, server.backend)
        self._tell(
            phase="ready",
            said=f"scores: {proof.tokens} tokens, repeated within {proof.spread:.1e} nats",
        )

    def _start(self, server: Server) -> None:
        assert server.port is not None
        self._started[server.child] = server
        self._supervisor.spawn(
            server_child(
                server,
                port=server.port,
                key=self._key,
                cwd=self._kept.folder,
                log=self._log(server),
                secrets=self._secrets,
            )
        )

    def _is_up(self, server: Server) -> bool:
        """Wait until it is healthy; False if it has died meanwhile."""
        try:
            wait_until_healthy(
                server.endpoint,
                server.backend,
                limit_s=server.launch.startup_limit_s,
                still_alive=lambda: self._check(server.child),
                api_key=self._key,
            )
        except LifecycleError:
            if self._supervisor.child_exit(server.child) is None:
                raise
            return False
        return True

    def _log(self, server: Server) -> Path:
        return self._kept.folder / "logs" / f"{server.child}.log"

    # --- the long while

    def _look_after(self) -> None:
        """Until something ends it. Raises what that is."""
        hang_limit_s = self._order.teacher.hang_limit_s
        diagnoses = {
            server.child: Diagnosis(server.number, hang_limit_s)
            for server in self._started.values()
        }
        while True:
            self._check()
            for child, server in self._started.items():
                why = self._death(child) or diagnoses[child](
                    time.time(), self._watches[child].healthy_at, None
                )
                if why:
                    self._mend(server, why)
            time.sleep(LOOK_S)

    def _death(self, child: str) -> str:
        returncode = self._supervisor.child_exit(child)
        return "" if returncode is None else f"has died (return code {returncode})"

    def _mend(self, server: Server, why: str) -> None:
        """Start a server again and prove that it is what it was; one that dies again meanwhile is
        found at the next look. Raises :class:`ServingError`."""
        self._start_again(server, why)
        self._watches.pop(server.child).close()
        is_up = self._is_up(server)
        self._watches[server.child] = HealthWatch(server.endpoint, server.backend)
        if not is_up:
            return
        said = prove_again(self._order.teacher, self._facts, self._key, server.number)
        self._tell(phase="ready", said=said or f"{server.who} {why}, and is back")

    def _start_again(self, server: Server, why: str) -> None:
        """At its own port, which runs have been told. Raises :class:`ServingError` when that is
        taken, or it was done ``max_restarts`` times within an hour."""
        limit, now = server.launch.max_restarts, time.time()
        lately = [at for child, at in self._restarts if child == server.child and at > now - HOUR_S]
        if len(lately) >= limit:
            raise ServingError(
                f"{server.who} at {server.endpoint} {why}; it was started again {len(lately)} "
                f"times within an hour already (launch.max_restarts: {limit}); its log ends:\n"
                f"{log_tail(self._log(server))}"
            )
        self._restarts.append((server.child, now))
        self._tell(
            phase="restarting" if self._state.phase != "starting" else "starting",
            said=f"{server.who} {why}",
            restarts=len(self._restarts),
        )
        self._supervisor.stop(server.child)
        give_up_at = time.monotonic() + PORT_S
        assert server.port is not None
        while not port_is_free(server.port):
            if time.monotonic() > give_up_at:
                raise ServingError(
                    f"{server.who} {why}, and somebody else has its port {server.port} now; start "
                    "the teacher anew with `opd teacher up`"
                )
            self._check()
            time.sleep(LOOK_S)
        self._start(server)

    # --- what ends it

    def _check(self, child: str | None = None) -> None:
        """Raise :class:`Ended` if the teacher is to be ended, LifecycleError if its supervisor or
        this child has died."""
        if self._signal:
            raise Ended(f"signal {self._signal}")
        with self._kept.gate():
            if (wish := self._kept.end_wish) is not None:
                raise Ended(wish.cause)
            lease, now = self._kept.lease, time.time()
            assert lease is not None, "it is written before a keeper is started"
            self._used_at = max(self._used_at, lease.at, now if users_of(self._kept) else 0.0)
            until = self._used_at + lease.hours * HOUR_S
            if now >= until:
                cause = f"no run has used it for {lease.hours:g} h"
                self._kept.ask_end(cause)  # from here on nobody begins to use it
                raise Ended(cause)
        if abs(until - self._state.until) > TELL_UNTIL_S:
            self._tell(until=until)
        others = [other for other in self._started if other != child]
        self._supervisor.raise_if_dead(*([child] if child else ()), but=others)

    def _waiting(self, seconds: float, holder: DeviceHolder) -> None:
        if self._signal or self._kept.end_wish is not None:
            raise Ended("asked to end before it began")
        self._tell(said=f"waiting for device {holder.device}, held by {holder}")

    def _tell(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        with contextlib.suppress(OSError):  # a full disk must not end it, nor break off its end
            self._kept.tell(self._state)


def main(arguments: list[str]) -> int:
    """Become the keeper in the background, holding the lock that is handed over."""
    folder, lock = Path(arguments[0]), int(arguments[1])
    os.set_inheritable(lock, False)
    given = json.load(sys.stdin)
    if os.fork():  # whoever started this waits for it, and not for the keeper
        os._exit(0)
    kept = KeptTeacher(folder)
    order = kept.order
    assert order is not None, "it is written before a keeper is started"
    keeper = Keeper(kept, order, given["key"], given["secrets"])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, keeper.end_by_signal)
    return 0 if keeper.keep() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
