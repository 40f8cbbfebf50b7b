"""A run's side of a kept teacher: it is not ended while the run lasts."""

from __future__ import annotations

from opd_core.serving.kept.users import KeptUse, use_kept
from tasks.console import announce
from tasks.environment import RunRecord


def use_kept_teachers(run: RunRecord) -> KeptUse:
    """Those of the run's external teachers that are kept here are in use until this is released.

    Raises :class:`~opd_core.errors.ServingError` for one that is being ended.
    """
    opd = run.config.opd
    replicas = (
        replica for teacher in (opd.teachers if opd else ()) for replica in teacher.all_replicas
    )
    external = [str(replica.endpoint) for replica in replicas if replica.launch is None]
    use = use_kept(external, run.run_id, run.directory)
    for kept in use.teachers:
        order = kept.order
        model = f"{order.teacher.name!r}, fingerprint {order.facts.fingerprint}" if order else ""
        announce(f"using the kept teacher {kept.name} ({model})")
    return use
