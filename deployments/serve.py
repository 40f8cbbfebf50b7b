"""Serve the flows without a work pool: ``python -m deployments.serve``.

Needs a Prefect server (``PREFECT_API_URL``); runs started in its UI are then executed here, one
at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from prefect import serve
from prefect.deployments.runner import RunnerDeployment

import flows  # noqa: F401  (sets the defaults that Prefect reads when it is imported)
from flows.distill import DistillRequest, distill

RECIPE = Path(__file__).with_name("recipes") / "tiny.yaml"


def main() -> None:
    """Serve until Ctrl-C."""
    deployment = distill.to_deployment(
        name="distill",
        description="One on-policy-distillation experiment, from its checks to its report",
        parameters={"request": DistillRequest(recipe=str(RECIPE)).model_dump()},
    )
    serve(cast(RunnerDeployment, deployment), limit=1)


if __name__ == "__main__":
    main()
