"""Runs a user's function: imported by name, in a process of its own.

It may need the main thread (math-verify's time limit is an alarm), may crash or may be slow; none
of this may hurt the loop. A function that fails is a reason, never a result.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self

from opd_core.errors import ConfigError, OPDError


class FunctionError(OPDError):
    """A user's function raised, crashed, hung or gave something that it may not."""


def import_function(path: str) -> Callable[..., Any]:
    """The function named ``package.module:function``. Raises :class:`ConfigError`."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may fail in any way
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: cannot be imported ({said})") from None
    if not callable(function):
        raise ConfigError(f"{path}: is {function!r}, not a function")
    return function  # type: ignore[no-any-return]


def _call(path: str, *args: Any) -> Any:
    """Runs in the function's process. Whatever it raises, be it SystemExit or an error that cannot
    be pickled, comes back as a plain one."""
    try:
        return import_function(path)(*args)
    except BaseException as error:
        raise FunctionError(f"{path}: {type(error).__name__}: {error}") from None


class FunctionRunner:
    """Runs the function named by ``path``. Use as a context manager.

    When no call at all has ended for ``timeout_s``, the function hangs: its process is killed.
    ``make_executor`` is a seam: where it runs. What it is to the run (``kind``) and the ``error``
    that its failures are raised as are the subclass's.
    """

    kind = "function"
    error: type[FunctionError] = FunctionError

    def __init__(
        self,
        path: str,
        timeout_s: float = 60.0,
        make_executor: Callable[[], Executor] | None = None,
    ) -> None:
        self.path = path
        self._timeout_s = timeout_s
        self._ended = 0
        self._make_executor = make_executor or _one_process
        self._executor: Executor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the function's process."""
        if self._executor is not None:
            _kill(self._executor)  # it keeps nothing, and may be in the middle of a call
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    async def _run(self, *args: Any) -> Any:
        """What the function gives. Raises ``error`` with the reason when it gives nothing."""
        executor = self._executor = self._executor or self._make_executor()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(executor, _call, self.path, *args)
        try:
            while not running.done():
                ended = self._ended
                await asyncio.wait({running}, timeout=self._timeout_s)
                if not running.done() and self._ended == ended:
                    _kill(executor)
            self._ended += 1
            return await running
        except BrokenProcessPool:
            if self._executor is executor:  # else a sibling has already replaced it
                self._executor = None
            said = f"the {self.kind}'s process died, or gave no answer for {self._timeout_s:g} s"
            raise self._failed(said) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # It was not begun when the runner was closed.
            raise self._failed(f"the {self.kind} was closed") from None
        except FunctionError as error:
            raise self.error(str(error)) from None
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from None

    def _failed(self, said: str) -> FunctionError:
        return self.error(f"{self.path}: {said}")


def _one_process() -> Executor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _kill(executor: Executor) -> None:
    """End the process at once. The pool has no public way to do it before Python 3.14."""
    for process in list((getattr(executor, "_processes", None) or {}).values()):
        process.kill()
