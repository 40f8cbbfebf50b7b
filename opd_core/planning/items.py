"""Lines of a memory estimate, each with its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from opd_core.planning.cards import GB

Moment = Literal["sampling", "training", "update"]
"""What a device does: rollouts are sampled and scored; forward and backward passes; the optimizer's
step. A teacher's device only ever samples."""
MOMENTS: tuple[Moment, ...] = ("sampling", "training", "update")
PROCESS_BYTES = 1 * GB
"""A process on a GPU before its first tensor: CUDA's context, loaded kernels, NCCL's buffers. A
rule of thumb (0.3 to 1 GB by card and libraries), not measured here."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line: ``bytes`` on one device for one ``what`` of ``who``, and how that comes about;
    ``moments`` when."""

    who: str
    what: str
    bytes: int
    how: str
    moments: tuple[Moment, ...] = MOMENTS

    def __str__(self) -> str:
        return f"{self.what} {size(self.bytes)} ({self.how})"


@dataclass(frozen=True, slots=True)
class Bound:
    """What must fit into a part of a device that a server keeps apart for itself."""

    who: str
    needs: tuple[Item, ...]
    limit: int
    how: str

    @property
    def broken(self) -> bool:
        """Whether it does not fit."""
        return total(self.needs) > self.limit

    def __str__(self) -> str:
        needs = " and ".join(map(str, self.needs))
        word = "need" if len(self.needs) > 1 else "needs"
        relation = "more than the" if self.broken else "of the"
        return (
            f"{self.who}: {needs} {word} {size(total(self.needs))}, {relation} "
            f"{size(self.limit)} of {self.how}"
        )


def total(items: Sequence[Item]) -> int:
    """Bytes of all of them."""
    return sum(item.bytes for item in items)


def size(number: int) -> str:
    """Bytes for a reader, in units of powers of ten."""
    return f"{number / GB:,.1f} GB" if number >= 0.1 * GB else f"{number / 10**6:,.1f} MB"


def count(number: float) -> str:
    """Parameters for a reader: ``8.19e9``; small ones in full."""
    for power in (9, 6):
        if number >= 10**power:
            return f"{number / 10**power:.2f}e{power}"
    return f"{number:,.0f}"
