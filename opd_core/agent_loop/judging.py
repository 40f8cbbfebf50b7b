"""Runs judges and filters: imported by name, judges in a process of their own.

A judge may need the main thread (math-verify's time limit is an alarm), may crash or may be slow;
none of this may hurt the loop. A judge that fails is a reason, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from opd_core.errors import ConfigError, OPDError
from opd_core.rollout import Prompt, RolloutState


class JudgeError(OPDError):
    """A judge raised, crashed or gave something that is no number."""


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
    """Runs in the judge's process. Whatever a judge raises, be it SystemExit or an error that
    cannot be pickled, comes back as a plain one."""
    try:
        return import_function(path)(*args)
    except BaseException as error:
        raise JudgeError(f"{path}: {type(error).__name__}: {error}") from None


class JudgeRunner:
    """Runs the judge named by ``path``. Use as a context manager.

    When no judgement at all has ended for ``timeout_s``, the judge hangs: its process is killed.
    ``make_executor`` is a seam: where judges run.
    """

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

    def __enter__(self) -> JudgeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the judge's process."""
        if self._executor is not None:
            _kill(self._executor)  # it keeps nothing, and may be in the middle of a judgement
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    async def judge(self, text: str, prompt: Prompt) -> float:
        """The reward of one response. Raises :class:`JudgeError`."""
        return _number(await self._run(text, prompt), self.path)

    async def judge_batch(self, rollouts: Sequence[RolloutState]) -> list[float]:
        """The rewards of a group that is judged together. Raises :class:`JudgeError`."""
        rewards = await self._run(tuple(rollouts))
        if not isinstance(rewards, Sequence) or len(rewards) != len(rollouts):
            raise JudgeError(f"{self.path}: expected {len(rollouts)} rewards, got {rewards!r:.200}")
        return [_number(reward, self.path) for reward in rewards]

    async def _run(self, *args: Any) -> Any:
        executor = self._executor = self._executor or self._make_executor()
        loop = asyncio.get_running_loop()
        judging = loop.run_in_executor(executor, _call, self.path, *args)
        try:
            while not judging.done():
                ended = self._ended
                await asyncio.wait({judging}, timeout=self._timeout_s)
                if not judging.done() and self._ended == ended:
                    _kill(executor)
            self._ended += 1
            return await judging
        except BrokenProcessPool:
            if self._executor is executor:  # else a sibling has already replaced it
                self._executor = None
            said = f"the judge's process died, or gave no answer for {self._timeout_s:g} s"
            raise JudgeError(f"{self.path}: {said}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # It was not begun when the runner was closed.
            raise JudgeError(f"{self.path}: the judge was closed") from None
        except JudgeError:
            raise
        except Exception as error:
            raise JudgeError(f"{self.path}: {type(error).__name__}: {error}") from None


def _one_process() -> Executor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _kill(executor: Executor) -> None:
    """End the judge's process at once. The pool has no public way to do it before Python 3.14."""
    for process in list((getattr(executor, "_processes", None) or {}).values()):
        process.kill()


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise JudgeError(f"{path}: expected a finite number as reward, got {value!r:.80}")
