"""The devices of a run on this host: nobody else's while it lasts."""

from __future__ import annotations

import math

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import deployment, flow_run

from opd_core.config import ExperimentConfig
from opd_core.errors import PreflightError
from opd_core.lifecycle.errors import LifecycleError
from opd_core.lifecycle.leases import DeviceHolder, DeviceLease
from opd_core.preflight.machine import lock_names
from tasks.console import announce

TELL_EVERY_S = 30.0


@task(name="take devices", cache_policy=NO_CACHE)
def take_devices(config: ExperimentConfig) -> DeviceLease:
    """Lock the run's devices on this host, waiting in line for them if the recipe says so.

    Raises :class:`PreflightError` that names the run which has one.
    """
    names = lock_names(config.leased_devices)
    try:
        lease = DeviceLease.take(
            names,
            owner={"run_id": str(flow_run.name or config.name), "run_dir": ""},
            wait_s=patience(config),
            waiting=_Teller(),
        )
    except LifecycleError as error:
        raise PreflightError(str(error)) from None
    if lease.devices:
        announce(f"devices taken: {', '.join(lease.devices)}")
    return lease


def patience(config: ExperimentConfig) -> float:
    """Seconds to queue for devices: as the recipe says, else without limit in a deployment and not
    at all from the command line."""
    if config.devices.wait_s is not None:
        return config.devices.wait_s
    return math.inf if deployment.id else 0.0


class _Teller:
    """Tells every half minute whom the run waits for."""

    def __init__(self) -> None:
        self._told = -TELL_EVERY_S

    def __call__(self, seconds: float, holder: DeviceHolder) -> None:
        if seconds - self._told >= TELL_EVERY_S:
            self._told = seconds
            announce(f"waiting for device {holder.device}, held by {holder} ({seconds:.0f} s)")
