"""The Ray job of a run: ``python -m opd_core.training.driver RUN_DIR``.

Reads ``config.json`` and ``teachers.json`` from the run directory, runs the train loop, and leaves
``metrics.jsonl`` and ``result.json`` there. Heavy imports are inside functions: the judge's process
imports this module again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opd_core.config import ExperimentConfig
    from opd_core.training.results import RunResult


def main() -> int:
    """Run the job; the exit status is 0 only if training completed.

    Whatever it ends with is told in ``result.json``; only a job that was killed leaves none.
    """
    from opd_core.recipe import parse_config
    from opd_core.training.files import CONFIG_FILE

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    run_dir = Path(sys.argv[1])
    try:
        source = run_dir / CONFIG_FILE
        config = parse_config(json.loads(source.read_text(encoding="utf-8")), source=str(source))
        with _alone_in(run_dir):
            result = asyncio.run(run_training(config, run_dir))
    except Exception as error:
        logging.exception("the job failed")
        result = _failed(error)
    result.write(run_dir)
    print(f"{result.status} {result.error_type} {result.error}".strip(), flush=True)
    return 0 if result.status == "completed" else 1


def _failed(error: Exception) -> RunResult:
    from opd_core.errors import ActorLost, SamplersLost
    from opd_core.training.results import RunResult

    restartable = isinstance(error, ActorLost | SamplersLost)
    return RunResult("failed", type(error).__name__, str(error), restartable=restartable)


@contextmanager
def _alone_in(run_dir: Path) -> Iterator[None]:
    """Hold the run directory's lock, which the kernel takes back from whoever dies.

    Raises :class:`~opd_core.errors.TrainingError` if another job trains there.
    """
    from opd_core.errors import TrainingError
    from opd_core.lifecycle.locks import lock_now
    from opd_core.training.files import LOCK_FILE

    with (run_dir / LOCK_FILE).open("w") as lock:
        if not lock_now(lock.fileno()):
            raise TrainingError(
                f"{run_dir}: another job is training in this run directory, perhaps on another Ray "
                "cluster: stop it first (ray job list, ray job stop)"
            )
        yield


async def run_training(config: ExperimentConfig, run_dir: Path) -> RunResult:
    """Connect to Ray, start the actors, train from wherever the run directory is."""
    from opd_core.errors import OPDError
    from opd_core.training import placement
    from opd_core.training.assembly import build_loop
    from opd_core.training.results import RunResult
    from opd_core.training.served_student import served_student

    started = time.perf_counter()
    placement.connect()
    sampling_actors, learner = await placement.start_actors(config)
    seconds = {"actors_start": time.perf_counter() - started}
    async with AsyncExitStack() as exits:
        servers = None
        if config.sampling.by_servers:
            servers = await exits.enter_async_context(served_student(config, run_dir))
        if sampling_actors is not None:
            exits.callback(sampling_actors.close)
        sampler = servers or sampling_actors
        assert sampler is not None  # there are actors where there are no servers
        loop, prompts = await build_loop(
            config,
            run_dir,
            sampler,
            learner,
            exits,
            os.environ,
            sleeper=servers if config.shares_gpus else None,
        )
        # What was imported is a million objects that the collector would walk at long answers.
        gc.collect()
        gc.freeze()
        result = RunResult("completed", prompts=prompts, seconds=seconds)
        try:
            outcome = await loop.run()
        except OPDError as error:
            result = replace(_failed(error), prompts=prompts, seconds=seconds)
        else:
            result = replace(result, student_path=outcome.student_path, stopped=outcome.stopped)
    return replace(result, survivors=loop.collector.survivors.table())


if __name__ == "__main__":
    raise SystemExit(main())
