"""The devices of a run on this host: nobody else's while it lasts."""

from __future__ import annotations

import math
from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.runtime import deployment, flow_run
from prefect.states import Running

from opd_core.config import ExperimentConfig
from opd_core.errors import PreflightError
from opd_core.lifecycle.errors import LifecycleError
from opd_core.lifecycle.leases import DeviceHolder, DeviceLease
from opd_core.preflight.machine import lock_names
from tasks.console import announce, logger
from tasks.flow_state import api_states

WAITING = "WaitingForDevices"
"""The name of the flow run's state while another run holds a device of it."""
TELL_EVERY_S = 30.0
API_TIMEOUT_S = 5.0


@task(name="take devices", cache_policy=NO_CACHE)
def take_devices(config: ExperimentConfig) -> DeviceLease:
    """Lock the run's devices on this host, waiting in line for them if the recipe says so.

    Raises :class:`PreflightError` that names the run which has one.
    """
    names = lock_names(config.leased_devices)
    waiting = WaitingLine(_show)
    try:
        lease = DeviceLease.take(
            names,
            owner={"run_id": str(flow_run.name or config.name), "run_dir": ""},
            wait_s=patience(config),
            waiting=waiting,
        )
    except LifecycleError as error:
        raise PreflightError(str(error)) from None
    if lease.devices:
        waiting.over(f"has {', '.join(lease.devices)}")
        announce(f"devices taken: {', '.join(lease.devices)}")
    return lease


def patience(config: ExperimentConfig) -> float:
    """Seconds to queue for devices: as the recipe says, else without limit in a deployment and not
    at all from the command line."""
    if config.devices.wait_s is not None:
        return config.devices.wait_s
    return math.inf if deployment.id else 0.0


class WaitingLine:
    """Tells whom the run waits for: every half minute in the log, and by ``show``, as the state of
    the flow run, whenever that is another run."""

    def __init__(self, show: Callable[[State[None]], None]) -> None:
        self._show = show
        self._told = -TELL_EVERY_S
        self._shown: tuple[str, str, int] | None = None

    def __call__(self, seconds: float, holder: DeviceHolder) -> None:
        said = f"waiting for device {holder.device}, held by {holder}"
        if seconds - self._told >= TELL_EVERY_S:
            self._told = seconds
            announce(f"{said} ({seconds:.0f} s)")
        whose = (holder.device, holder.run_id, holder.pid)
        if whose != self._shown:
            self._shown = whose
            self._show(Running(name=WAITING, message=said))

    def over(self, message: str) -> None:
        """The devices are there: where a wait was shown, it is no more."""
        if self._shown is not None:
            self._show(Running(message=message))


def _show(state: State[None]) -> None:
    """Make it the flow run's state. Prefect counts each Running state as a try, so a flow that is
    to be tried again (``retries``) keeps the one it has; a failure costs the display only."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.empirical_policy.retries:
        return
    try:
        with api_states(str(context.flow_run.id), API_TIMEOUT_S, retries=0) as states:
            states.propose(state)
    except Exception as error:  # Prefect's API may be away; the log tells the same
        logger().warning(f"the wait for devices could not be shown as the state: {error}")
