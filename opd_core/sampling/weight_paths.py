"""How the student's weights reach the servers that sample with them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from opd_core.errors import SamplingError
from opd_core.sampling.server_calls import StudentServer
from opd_core.sampling.server_wire import ServerLost


class WeightPath(Protocol):
    """One way. Each sync is ``prepare`` and then ``load``."""

    async def prepare(self, learner: Any, policy_version: int) -> None:
        """Get the learner's weights ready; sampling goes on meanwhile. Raises what the learner
        does."""
        ...

    async def load(
        self, servers: Sequence[StudentServer], policy_version: int
    ) -> Mapping[str, SamplingError]:
        """Give the weights last prepared to ``servers``, none of which samples; by endpoint, why
        one did not take them: :class:`~opd_core.sampling.server_wire.ServerLost`, or another error
        where it refused them and would again.

        Is called again, with one server, for one that was lost since and has come back, and is
        cancelled if that takes too long.
        """
        ...

    async def aclose(self) -> None:
        """Remove what was prepared: no server will be given it any more."""
        ...


class DiskPath:
    """Over files, for servers on a file system that the learner's host shares.

    Each version is a folder of its own (``version-000007``) in ``folder``: the last one is kept
    for servers that come back, those before it are removed, and all of them in the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the servers run elsewhere
        self._prepared: Path | None = None

    async def prepare(self, learner: Any, policy_version: int) -> None:
        """Let the learner write its weights, in Hugging Face format."""
        await asyncio.to_thread(self._remove_older)
        target = self._folder / f"version-{policy_version:06d}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._prepared = await learner.save_weights(target)

    async def load(
        self, servers: Sequence[StudentServer], policy_version: int
    ) -> Mapping[str, SamplingError]:
        """All servers at once."""
        folder = self._prepared
        if folder is None:
            raise SamplingError("no weights were prepared that a server could load")
        return await each(servers, lambda server: server.update_from_disk(folder, policy_version))

    async def aclose(self) -> None:
        """Remove all versions, and the folder if nothing else is in it."""
        self._prepared = None
        with suppress(OSError):  # the folder was never made, or holds what others put there
            await asyncio.to_thread(self._remove_older)
            self._folder.rmdir()

    def _remove_older(self) -> None:
        for folder in self._folder.glob("version-*"):
            if folder != self._prepared:
                shutil.rmtree(folder)


async def each(
    servers: Sequence[StudentServer], action: Callable[[StudentServer], Awaitable[None]]
) -> dict[str, SamplingError]:
    """Do it with all servers at once; by endpoint, why it failed with one."""
    done = await asyncio.gather(*map(action, servers), return_exceptions=True)
    failed = {}
    for server, error in zip(servers, done, strict=True):
        if isinstance(error, SamplingError):
            failed[server.endpoint] = error
        elif error is not None:
            raise error
    return failed


def check_not_refused(
    failed: Mapping[str, SamplingError], servers: int, policy_version: int
) -> None:
    """A server that is lost may come back; weights that all refuse would be refused for ever.
    Raises :class:`SamplingError` for those."""
    refusals = [str(error) for error in failed.values() if not isinstance(error, ServerLost)]
    if len(refusals) == servers:
        raise SamplingError(
            f"every server refused the weights of policy version {policy_version}: "
            f"{'; '.join(refusals)}"
        )
