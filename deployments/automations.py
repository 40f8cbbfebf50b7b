"""``opd automations BLOCK``: notifications of failed, unclean and silent runs.

The automations stand in ``automations.yaml``. BLOCK is a notification block of the Prefect server,
as ``TYPE/NAME``: whatever it sends to, its URL is a secret that only the server keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from opd_core.errors import ConfigError
from opd_core.tracking.shipper import without_credentials

FILE = Path(__file__).with_name("automations.yaml")


def register_automations(block: str, file: Path = FILE) -> list[str]:
    """Create each automation of the file, or bring it up to date; the names of those that are on.

    Raises :class:`ConfigError` if no server is named, or it has no such block.
    """
    if not PREFECT_API_URL.value():
        raise ConfigError(
            "expected the address of a Prefect server in PREFECT_API_URL, it is not set: export "
            "it, for `opd up` PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    read = [AutomationCore.model_validate(each) for each in _load(file)]
    with get_client(sync_client=True) as client:
        block_id = _block_id(client, block)
        for automation in read:
            for action in automation.actions:
                if isinstance(action, SendNotification):
                    action.block_document_id = block_id
            known = client.read_automations_by_name(automation.name)
            if known:
                automation.enabled = known[0].enabled
                client.update_automation(known[0].id, automation)
            else:
                client.create_automation(automation)
    return [automation.name for automation in read if automation.enabled]


def _load(file: Path) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8"))["automations"]
    return loaded


def _block_id(client: SyncPrefectClient, block: str) -> UUID:
    kind, _, name = block.partition("/")
    try:
        found = client.read_block_document_by_name(name, kind).id
    except ObjectNotFound:
        raise ConfigError(
            f"expected a notification block {block!r} (TYPE/NAME) on the Prefect server at "
            f"{without_credentials(str(client.api_url))}, found none: make one "
            "in its UI (Blocks, +, for example Slack Webhook or Custom Webhook)"
        ) from None
    assert found is not None, "the server gives every block an id"
    return found
