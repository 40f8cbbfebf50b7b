"""Both doors to a Prefect server offer the same flows, with the same rules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml

from deployments.serve import deployments

ROOT = Path(__file__).parents[2]


def declared() -> list[dict[str, Any]]:
    """The deployments for a work pool."""
    loaded = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    return list(loaded["deployments"])


def entrypoint(deployment: dict[str, Any]) -> tuple[str, str]:
    """Module and name of the flow that the file names."""
    file, _, name = deployment["entrypoint"].partition(":")
    return file.removesuffix(".py").replace("/", "."), name


def test_what_a_worker_runs_is_there() -> None:
    for deployment in declared():
        module, name = entrypoint(deployment)
        assert getattr(importlib.import_module(module), name).name == deployment["name"]


def test_the_work_pool_and_serve_offer_the_same() -> None:
    for file, served in zip(declared(), deployments(), strict=True):
        assert file["name"] == served.name
        assert file["description"] == served.description
        assert ".".join(entrypoint(file)) == served.entrypoint
        limit = file["concurrency_limit"]
        assert served.concurrency_limit == limit["limit"]
        assert served.concurrency_options is not None
        assert served.concurrency_options.collision_strategy.value == limit["collision_strategy"]
        schedules = [
            {
                "slug": each.slug,
                "cron": each.schedule.cron,
                **({} if each.active is not False else {"active": False}),
                **({"parameters": each.parameters} if each.parameters else {}),
            }
            for each in served.schedules or []
        ]
        assert file.get("schedules", []) == schedules


def test_what_a_schedule_asks_for_is_a_request_of_its_flow() -> None:
    for deployment in declared():
        module, name = entrypoint(deployment)
        flow = getattr(importlib.import_module(module), name)
        for schedule in deployment.get("schedules", []):
            flow.validate_parameters(schedule.get("parameters", {}))


def test_as_many_experiments_run_at_once_as_are_asked_for() -> None:
    limits = {each.name: each.concurrency_limit for each in deployments(at_once=3)}
    assert limits == {"distill": 3, "rerun": 4, "compare": 1, "janitor": 1}
