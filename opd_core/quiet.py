"""Nothing phones home: telemetry and hub look-ups are off unless the user turned them on.

The defaults are applied by whoever starts a process of ours, before the libraries are imported; a
variable that the user has set is left alone. Processes that we start inherit them.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

DEFAULTS = {
    # telemetry
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # hub look-ups: models are local directories
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # a slow machine needs more than Prefect's default of 20 s for its temporary server
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "TOKENIZERS_PARALLELISM": "false",
}


def apply_defaults(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set."""
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
