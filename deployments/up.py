"""``opd up``: a Prefect server, its worker and MLflow with one command, stopped with Ctrl-C.

A supervisor owns all three, so however this ends, they end: first the worker with the runs under
way, whose final states reach Prefect and MLflow, then MLflow, then Prefect.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.doors import guarded
from opd_core.errors import ConfigError, ServingError
from opd_core.lifecycle.errors import LedgerBusy, LifecycleError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.records import RECEIPT_FILE
from opd_core.recipe import run_root

if TYPE_CHECKING:
    from deployments.local_servers import LocalServers

FOLDER = "opd-up"
"""In the run root: the servers' logs, the ledger of what was started, the receipt of its end."""
TEARDOWN_S = 260.0
LOOK_EVERY_S = 1.0
READY = "Ctrl-C stops all of this, and the runs under way"


@dataclass(frozen=True)
class Wishes:
    """What ``opd up`` was asked for. ``root`` is absolute."""

    port: int
    mlflow_port: int
    root: Path
    at_once: int

    @property
    def folder(self) -> Path:
        """Where the logs are."""
        return self.root / FOLDER


def up(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Prefect's port")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="MLflow's port")] = 5000,
    root: Annotated[
        Path | None, typer.Option(help="Where runs live; default $OPD_RUNS, else runs")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Experiments at a time; more wait")] = 1,
) -> None:
    """Start a Prefect server with all forms, a worker, and MLflow; Ctrl-C stops them.

    A server that PREFECT_API_URL or MLFLOW_TRACKING_URI names is used in place of an own one.
    """
    place = (root or Path(run_root())).expanduser().absolute()
    guarded(lambda: stay_up(Wishes(port, mlflow_port, place, at_once)))


def stay_up(wishes: Wishes) -> None:
    """Start everything, and return when asked to stop and all has ended.

    Raises :class:`ConfigError` for a port in use or a named server that does not answer, and
    :class:`ServingError` for one that does not start or has died.
    """
    try:
        with _asked_to_stop_by_signal():
            _stay_up(wishes)
    except LedgerBusy:
        from deployments.local_servers import SECOND_LAB

        raise ConfigError(
            f"expected one `opd up` for the runs in {wishes.root}, another is there already: use "
            f"or stop it. {SECOND_LAB}"
        ) from None
    except LifecycleError as error:
        raise ServingError(str(error)) from None


def _stay_up(wishes: Wishes) -> None:
    from deployments.local_servers import LocalServers

    servers = LocalServers.plan(wishes.port, wishes.mlflow_port, wishes.root, wishes.folder)
    with servers.alone():
        _serve(servers, wishes)


def _serve(servers: LocalServers, wishes: Wishes) -> None:
    from tasks.signals import undisturbed

    wishes.folder.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor.start(
        run_dir=wishes.folder, run_id=_name(wishes.root), teardown_s=TEARDOWN_S
    )
    cause = "stopped"
    try:
        servers.start(supervisor, wishes.at_once, typer.echo)
        typer.echo(READY)
        while True:
            supervisor.raise_if_dead()
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        typer.echo("stopping; runs under way are ended in order, which may take some minutes")
    except BaseException as error:
        cause = type(error).__name__
        raise
    finally:
        with undisturbed():
            receipt = supervisor.end(cause)
    if not receipt.clean:
        raise ServingError(f"not all has ended; read {wishes.folder / RECEIPT_FILE}")
    typer.echo("stopped; nothing is left")


def _name(root: Path) -> str:
    """The same for the same root, so that what a killed `opd up` may have left is found."""
    return f"up-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"


@contextmanager
def _asked_to_stop_by_signal() -> Iterator[None]:
    """SIGTERM and a closed terminal are Ctrl-C, also where Ctrl-C was ignored (a job in the
    background)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {each: signal.signal(each, interrupt) for each in asking}
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
