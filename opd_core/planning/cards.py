"""How much memory devices have: as nvidia-smi tells, or as somebody says; of a CPU the host's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from opd_core.lifecycle.gpu_memory import ask_driver

HOST = "cpu"
"""The one name of all CPU slots: they share the host's memory."""
GB = 10**9
COMMON_CARDS_GB = (24, 40, 48, 80, 96, 141, 192)
"""Sizes under which GPUs are sold; what the driver tells is up to 7 % more bytes."""
_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Cards:
    """Bytes by device. ``by_name`` are those of GPUs of this host, by index and by UUID;
    ``otherwise`` those of any other GPU, None where nobody said."""

    by_name: Mapping[str, int] = field(default_factory=dict)
    otherwise: int | None = None

    def of(self, device: str, *, here: bool = True) -> int | None:
        """Bytes of a device, of this host or ``here`` false of another one."""
        if device == HOST:
            return host_bytes() if here else None
        told = self.by_name.get(device) if here else None
        return told or self.otherwise


def read_cards(said_gb: float | None = None) -> Cards:
    """The GPUs of this host; with ``said_gb`` every GPU has so many GB of 10^9 bytes."""
    if said_gb is not None:
        return Cards(otherwise=round(said_gb * GB))
    found: dict[str, int] = {}
    for fields in ask_driver("index,uuid,memory.total,name", _LIMIT_S):
        if len(fields) == 4 and fields[2].isdecimal():
            found[fields[0]] = found[fields[1]] = int(fields[2]) * 2**20
    return Cards(found)


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
