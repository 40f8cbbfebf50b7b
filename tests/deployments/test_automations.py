"""The notifications as they are shipped."""

from __future__ import annotations

from typing import Any

import yaml
from prefect.events.schemas.automations import AutomationCore

from deployments.automations import FILE
from deployments.serve import deployments
from tasks.unclean import UNCLEAN

SHIPPED: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["automations"]


def test_each_is_an_automation_of_prefect_that_notifies() -> None:
    automations = [AutomationCore.model_validate(each) for each in SHIPPED]
    assert [action.type for each in automations for action in each.actions] == [
        "send-notification"
    ] * len(automations)
    assert len({each.name for each in automations}) == len(automations)


def test_they_watch_over_every_flow_that_is_deployed() -> None:
    flows = {deployment.flow_name for deployment in deployments()}
    watched = [
        set(each["trigger"]["match_related"]["prefect.resource.name"])
        for each in SHIPPED
        if "match_related" in each["trigger"]
    ]
    assert watched
    assert all(flows <= names for names in watched)


def test_what_a_run_left_is_told_by_the_event_that_one_of_them_expects() -> None:
    assert [UNCLEAN] in [each["trigger"]["expect"] for each in SHIPPED]
