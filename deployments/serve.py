"""Serve the flows without a work pool: ``python -m deployments.serve``.

Needs a Prefect server (``PREFECT_API_URL``); runs started in its UI are then executed here, one
experiment at a time. Comparisons and the janitor run beside it.
"""

from __future__ import annotations

from typing import cast

from prefect import serve
from prefect.client.schemas.objects import (
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
)
from prefect.deployments.runner import RunnerDeployment

import flows  # noqa: F401  (sets the defaults that Prefect reads when it is imported)
from flows.compare import compare
from flows.distill import distill
from flows.janitor import janitor

EVERY_QUARTER = "*/15 * * * *"


def deployments() -> tuple[RunnerDeployment, ...]:
    """All flows, as they are served."""
    experiment = distill.to_deployment(
        name="distill",
        description="One on-policy-distillation experiment, from its checks to its report",
        concurrency_limit=_one_at_a_time(ConcurrencyLimitStrategy.ENQUEUE),
    )
    comparing = compare.to_deployment(
        name="compare",
        description="Which of several runs was better, and how sure that is",
        concurrency_limit=_one_at_a_time(ConcurrencyLimitStrategy.ENQUEUE),
    )
    cleaning = janitor.to_deployment(
        name="janitor",
        description="Ends what dead runs have left on this machine",
        cron=EVERY_QUARTER,
        concurrency_limit=_one_at_a_time(ConcurrencyLimitStrategy.CANCEL_NEW),
    )
    return tuple(cast(RunnerDeployment, each) for each in (experiment, comparing, cleaning))


def _one_at_a_time(further: ConcurrencyLimitStrategy) -> ConcurrencyLimitConfig:
    return ConcurrencyLimitConfig(limit=1, collision_strategy=further)


def main() -> None:
    """Serve until Ctrl-C."""
    serve(*deployments(), limit=3)


if __name__ == "__main__":
    main()
