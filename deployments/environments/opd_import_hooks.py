"""Runs something just before or just after another module is imported, in every process.

Copied into a server's environment as ``opd_import_hooks``. It imports nothing that Python has not
imported already, so a process that imports none of the named modules pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def nothing() -> None:
    """Do nothing before the import."""


def leave(module: ModuleType) -> None:
    """Leave the module as it is."""


class ImportHook:
    """Finds one module as Python does, and surrounds its execution; all others are not touched."""

    def __init__(
        self, name: str, before: Callable[[], None], after: Callable[[ModuleType], None]
    ) -> None:
        self._name, self._before, self._after = name, before, after

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec; its loader also runs what stands before and after."""
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def surrounded(module: ModuleType) -> None:
            self._before()
            execute(module)
            self._after(module)

        # On this one loader object: everything else that a loader can do stays as it is.
        spec.loader.exec_module = surrounded  # type: ignore[method-assign]
        return spec


def around_import(
    name: str,
    *,
    before: Callable[[], None] = nothing,
    after: Callable[[ModuleType], None] = leave,
) -> None:
    """Call ``before()`` and ``after(module)`` around the import of the module ``name``."""
    sys.meta_path.insert(0, ImportHook(name, before, after))
