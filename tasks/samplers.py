"""The student's servers, where servers sample: launch, readiness, starting one again.

Readiness is health only. What such a server samples is judged by the training job, which gives it
the student's weights first and asks for their version; a server knows only the student that it
loaded, when it was started and when it was started again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.errors import ServingError
from opd_core.sampling.samplers import Samplers, write_samplers
from opd_core.serving.readiness import PROBE_TIMEOUT_S
from opd_core.serving.servers import Server, student_servers
from opd_core.training.files import SAMPLERS_FILE
from tasks.console import announce, warn
from tasks.names import awaiting_samplers, of_session, starting_samplers
from tasks.servers import await_again, await_start, death, start_again, start_server
from tasks.session import Session


@task(name="start samplers", task_run_name=of_session(starting_samplers), cache_policy=NO_CACHE)
def start_samplers(session: Session) -> None:
    """Start the student's servers, if servers sample; they load while the teachers do."""
    for server in student_servers(session.run.config):
        start_server(session, server)


@task(name="wait for samplers", task_run_name=of_session(awaiting_samplers), cache_policy=NO_CACHE)
def await_samplers(session: Session) -> None:
    """Wait until all are healthy, and tell the training job where they answer.

    Raises :class:`~opd_core.errors.ServingError`, at once and with the log's tail if a server dies.
    """
    servers = samplers(session)
    if not servers:
        return
    with session.stage("samplers_wait"):
        for server in servers:
            limit_s = server.launch.startup_limit_s
            seconds = await_start(session, server.endpoint, server.backend, limit_s)
            announce(f"{server.who} is up at {server.endpoint} ({seconds:.0f} s)")
    _tell_samplers(session)


def samplers(session: Session) -> list[Server]:
    """The student's servers as they run now."""
    return [server for server in session.servers.values() if server.teacher is None]


def restart_sampler(
    session: Session,
    server: Server,
    why: str,
    still_alive: Callable[[], None],
    *,
    counts: bool = True,
) -> None:
    """Start one again, at another port: a job that knew the old one finds nobody there, and gives
    the weights to the new one. Returns when that is healthy, or has died again.

    One that was started again ``max_restarts`` times already, or does not come up in time, is given
    up; :class:`ServingError` if no other is left. ``still_alive`` is called while it loads, and
    raises if the wait is in vain. With ``counts`` false there is no limit.
    """
    try:
        again = start_again(session, server, why, moves=True, counts=counts)
        session.loading.add(server.child)
        _tell_samplers(session)
        seconds = await_again(session, again, still_alive)
    except ServingError as error:
        still_alive()  # raises again what is not of this server
        _give_up(session, server, error)
        return
    session.loading.discard(server.child)
    if seconds is not None:
        announce(f"{server.who} is back at {again.endpoint} ({seconds:.0f} s), without weights yet")


def revive_samplers(session: Session, *, probe_s: float = PROBE_TIMEOUT_S) -> None:
    """Start again what no longer samples, between two jobs. A job that was killed may have left a
    server paused, asleep or hung, and only now may its health be asked for; that is no fault of the
    server, so it does not count as a restart. One that still loads is waited for."""
    others = partial(
        session.still_alive, but=session.servers
    )  # servers are looked after one by one
    for server in samplers(session):
        if server.child in session.given_up:
            continue
        limit_s = None if server.child in session.loading else probe_s
        session.loading.discard(server.child)
        if why := _unfit(session, server, others, limit_s):
            restart_sampler(session, server, why, others, counts=False)


def _unfit(
    session: Session, server: Server, still_alive: Callable[[], None], limit_s: float | None
) -> str:
    try:
        await_again(session, server, still_alive, limit_s=limit_s)
    except ServingError:
        still_alive()  # raises again what is not of this server
        return "does not sample"
    return death(session, server)


def _give_up(session: Session, server: Server, error: ServingError) -> None:
    """Go on without a server, or raise ``error`` if it was the last one."""
    session.given_up.add(server.child)
    left = [other for other in samplers(session) if other.child not in session.given_up]
    if not left:
        raise error
    session.stop(server.child)  # it may hold its devices
    warn(f"{error}\n{server.who} is given up; {len(left)} others sample")


def _tell_samplers(session: Session) -> None:
    """Write where they answer, for the training job."""
    servers = samplers(session)
    endpoints = tuple(server.endpoint for server in servers)
    told = Samplers(servers[0].backend, endpoints)
    write_samplers(session.run.directory / SAMPLERS_FILE, told)
