"""A settle command that tells how often it ran, where, and with which markers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opd_core.lifecycle.registry import Registry


@dataclass(frozen=True, kw_only=True)
class CountedSettle:
    """The command of the run in `folder`, which stands in `registry`; its calls are in `record`."""

    folder: Path
    registry: Registry
    record: Path

    @property
    def settle(self) -> tuple[str, ...]:
        """Notes where it ran, and the run's markers that it carries."""
        script = 'echo "$(pwd -P) ${OPD_RUN_ID-no}${OPD_RUN_CHILD-mark}" >> "$0"'
        return ("/bin/sh", "-c", script, str(self.record))

    @property
    def settled_once(self) -> str:
        """What the record holds after one call, as it should be."""
        return f"{self.folder} nomark\n"
