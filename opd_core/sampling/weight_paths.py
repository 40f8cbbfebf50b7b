"""How the student's weights reach the servers that sample with them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from opd_core.errors import SamplingError
from opd_core.sampling.server_calls import StudentServer


class WeightPath(Protocol):
    """One way. Each sync is ``prepare`` and then ``load``."""

    async def prepare(self, learner: Any, policy_version: int) -> None:
        """Get the learner's weights ready; sampling goes on meanwhile. Raises what the learner
        does."""
        ...

    async def load(
        self, servers: Sequence[StudentServer], policy_version: int
    ) -> Mapping[str, str]:
        """Give the weights last prepared to ``servers``, none of which samples; endpoint and reason
        of those that did not take them.

        Is called again, with one server, for one that was lost since and has come back.
        """
        ...


class DiskPath:
    """Over files, for servers on a file system that the learner's host shares.

    Each version is a folder of its own (``version-000007``) in ``folder``: the last one is kept
    for servers that come back, those before it are removed.
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
    ) -> Mapping[str, str]:
        """All servers at once."""
        folder = self._prepared
        if folder is None:
            raise SamplingError("no weights were prepared that a server could load")
        tries = (server.update_from_disk(folder, policy_version) for server in servers)
        done = await asyncio.gather(*tries, return_exceptions=True)
        failed = {}
        for server, error in zip(servers, done, strict=True):
            if isinstance(error, SamplingError):
                failed[server.endpoint] = str(error)
            elif error is not None:
                raise error
        return failed

    def _remove_older(self) -> None:
        for folder in self._folder.glob("version-*"):
            if folder != self._prepared:
                shutil.rmtree(folder)
