"""One teacher's limit shared by several agent loops in as many processes.

A loop asks once a batch how much of the limit is its own; no request of a rollout asks anybody.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError

from opd_core.errors import OPDError, TrainingError
from opd_core.scoring.limits import FlowLimit, LeaseBook, Share


class LeaseActor:
    """A :class:`~opd_core.scoring.limits.LeaseBook` for all processes, by this actor's clock."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book

    def renew(self, member: str, demand: int, in_flight: Share) -> Share:
        """The member's share from now on."""
        return self._book.renew(member, demand, time.monotonic(), in_flight)

    def release(self, member: str) -> None:
        """Take back the lease of a member that leaves."""
        self._book.release(member)


def start_leases(book: LeaseBook) -> Any:
    """The handle of a new lease actor; it can be passed to other actors and lives as long as one
    of them holds it."""
    return ray.remote(LeaseActor).options(num_cpus=0).remote(book)


class LeasedLimit:
    """Keeps one agent loop's ``limit`` at this loop's share of the whole.

    The limit admits nobody before the first batch has begun, nor while a lease is renewed: what is
    in flight then is counted as this loop's own, so that all loops together never exceed the total.
    """

    def __init__(self, leases: Any, member: str, limit: FlowLimit) -> None:
        self._leases = leases
        self.member = member
        self.limit = limit
        limit.pause()

    async def begin_batch(self, demand: int) -> Share:
        """Renew the lease for a batch of ``demand`` (see :meth:`LeaseBook.renew`) and admit by it.

        0 between two batches lets the others have all but one request. Raises
        :class:`TrainingError` if the lease actor is lost, :class:`~opd_core.errors.ConfigError`
        for a loop too many; the limit then stays closed.
        """
        in_flight = self.limit.pause()
        try:
            share: Share = await self._leases.renew.remote(self.member, demand, in_flight)
        except RayError as error:
            raise self._told(error) from None
        self.limit.resize(share)
        return share

    def _told(self, error: RayError) -> OPDError:
        cause = getattr(error, "cause", None)
        if isinstance(cause, OPDError):
            return cause
        return TrainingError(
            f"agent loop {self.member!r}: the lease actor, which shares the teacher's limit among "
            f"the agent loops, cannot be asked any more: {str(error).strip()}. Nobody knows now "
            "who may send how much, so the run ends: resume it"
        )
