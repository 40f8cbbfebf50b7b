"""The Ray cluster that the student runs on: a private head of this run, or an existing cluster."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.lifecycle.errors import ChildDied, LifecycleError
from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.records import ChildSpec
from opd_core.training.head import PORT_FLAGS, head_command, write_token
from tasks.console import announce
from tasks.names import of_session, starting_cluster
from tasks.session import Cluster, Session

STOP_FIRST = 0
STOP_LAST = 1
HEAD = "ray-head"
LONGEST = 25


@task(name="start Ray cluster", task_run_name=of_session(starting_cluster), cache_policy=NO_CACHE)
def start_cluster(session: Session) -> None:
    """Start a private head under the supervisor; it comes up while the teacher loads."""
    run = session.run
    if run.config.ray.address is not None:
        session.cluster = Cluster(run.config.ray.address, token=None, owned=False)
        announce(f"using the Ray cluster at {run.config.ray.address}")
    else:
        start_head(session)


def head_is_dead(session: Session) -> bool:
    """Whether the head of the run's own has died, and not because the whole run is being ended."""
    try:
        session.supervisor.raise_if_dead(HEAD)
    except ChildDied:
        return True
    except LifecycleError:  # the run is over, or never had one
        return False
    return False


def start_head(session: Session) -> None:
    """Start a private head, with files, ports and token of its own."""
    temp_dir = Path(tempfile.mkdtemp(prefix="opd-ray-", dir=short_folder(tempfile.gettempdir())))
    try:
        _start_head(session, temp_dir)
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise


def short_folder(wanted: str) -> str:
    """A folder for Ray's: a socket's path holds 107 characters, of which Ray needs 82 below it."""
    return wanted if len(wanted) <= LONGEST else "/tmp"


def _start_head(session: Session, temp_dir: Path) -> None:
    run = session.run
    token = write_token(temp_dir / "token")
    with reserve_ports(len(PORT_FLAGS)) as reserved:
        ports = reserved.ports
    command = head_command(run.config, ports, temp_dir, temp_dir / "token")
    session.spawn(
        ChildSpec(
            name=HEAD,
            kind="ray",
            argv=command.argv,
            env={**command.env, **session.key_environment},
            cwd=run.directory,
            log=run.log(HEAD),
            stop_order=STOP_FIRST,
            grace_s=15.0,
            ports=ports,
            scratch=(temp_dir,),
            devices=run.config.training_devices,
            ledger_argv=command.argv,
        )
    )
    session.cluster = Cluster(command.dashboard, token=token, owned=True, temp_dir=temp_dir)
    announce(f"starting a private Ray head ({command.dashboard})")
