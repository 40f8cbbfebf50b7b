"""All flows as Prefect deployments; and a door without a work pool: ``python -m
deployments.serve``.

That one needs a Prefect server (``PREFECT_API_URL``); runs started in its UI are then executed
here, one experiment at a time. Comparisons and the janitor run beside it.
"""

from __future__ import annotations

from typing import Any, cast

from prefect import Flow, serve
from prefect.client.schemas.objects import (
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
)
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron, Schedule
from prefect.types.entrypoint import EntrypointType

import flows  # noqa: F401  (sets the defaults that Prefect reads when it is imported)
from flows.compare import compare
from flows.distill import distill
from flows.janitor import janitor
from flows.rerun import rerun

WAIT, SKIP = ConcurrencyLimitStrategy.ENQUEUE, ConcurrencyLimitStrategy.CANCEL_NEW
EVERY_QUARTER = Cron("*/15 * * * *", slug="every-quarter")
# Examples, switched off: put in a recipe or a run of one's own, and switch them on in the UI.
NIGHTLY = Cron(
    "0 2 * * *",
    slug="nightly",
    active=False,
    parameters={"request": {"recipe": "tiny", "seeds": [1234, 1235, 1236]}},
)
WEEKLY = Cron(
    "0 4 * * 0",
    slug="weekly",
    active=False,
    parameters={"request": {"recipe": "tiny_mixed", "seeds": [1, 2, 3, 4, 5], "width": 1}},
)
WAITING_RERUNS = 4


def deployments(at_once: int = 1) -> tuple[RunnerDeployment, ...]:
    """All flows, as they are deployed; ``at_once`` experiments run at a time.

    Each kind has a limit of its own and there is none around them: a rerun waits for experiments,
    and may not take the place of one.
    """
    return (
        _deployment(
            distill,
            "One on-policy-distillation experiment, from its checks to its report",
            ConcurrencyLimitConfig(limit=at_once, collision_strategy=WAIT),
        ),
        _deployment(
            rerun,
            "An experiment again, with other seeds or changes, and whether it was reproduced",
            ConcurrencyLimitConfig(limit=WAITING_RERUNS, collision_strategy=WAIT),
            NIGHTLY,
            WEEKLY,
        ),
        _deployment(
            compare,
            "Which of several runs was better, and how sure that is",
            ConcurrencyLimitConfig(limit=1, collision_strategy=WAIT),
        ),
        _deployment(
            janitor,
            "Ends what dead runs have left on this machine",
            ConcurrencyLimitConfig(limit=1, collision_strategy=SKIP),
            EVERY_QUARTER,
        ),
    )


def _deployment(
    flow: Flow[Any, Any], description: str, limit: ConcurrencyLimitConfig, *schedules: Schedule
) -> RunnerDeployment:
    made = flow.to_deployment(
        name=flow.name,
        description=description,
        concurrency_limit=limit,
        schedules=list(schedules) or None,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    return cast(RunnerDeployment, made)


def main() -> None:
    """Serve until Ctrl-C."""
    serve(*deployments(), limit=None)


if __name__ == "__main__":
    main()
