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


def test_what_a_worker_runs_is_there() -> None:
    for deployment in declared():
        file, _, name = deployment["entrypoint"].partition(":")
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert getattr(module, name).name == deployment["name"]


def test_the_work_pool_and_serve_offer_the_same() -> None:
    for file, served in zip(declared(), deployments(), strict=True):
        assert file["name"] == served.name
        assert file["description"] == served.description
        limit = file["concurrency_limit"]
        assert served.concurrency_limit == limit["limit"]
        assert served.concurrency_options is not None
        assert served.concurrency_options.collision_strategy.value == limit["collision_strategy"]
        crons = [schedule["cron"] for schedule in file.get("schedules", [])]
        assert crons == [schedule.schedule.cron for schedule in served.schedules or []]
