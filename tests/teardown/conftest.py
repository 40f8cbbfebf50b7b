"""What the cells on the real stack share, for the length of a session."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.teardown.stage import Prefect, Stage, environment_in, foreigners
from tests.teardown.surfaces import Door, Worker

MakeDoor = Callable[..., Any]


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A Prefect server, a foreign HTTP server and a foreign Ray cluster."""
    folder = tmp_path_factory.mktemp("stage")
    prefect = Prefect(folder / "prefect")
    try:
        with foreigners(folder) as foreign:
            prefect.start()
            yield Stage(folder, prefect, foreign, environment_in(folder))
    finally:
        prefect.close()


@pytest.fixture(scope="session")
def mortal_prefect(stage: Stage) -> Iterator[Prefect]:
    """Another Prefect server, for those who kill it; whoever does starts it again."""
    prefect = Prefect(stage.folder / "mortal")
    try:
        prefect.start()
        yield prefect
    finally:
        prefect.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of one cell."""
    path = Path(tempfile.mkdtemp(prefix="opd-cell-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def door(stage: Stage, folder: Path) -> Iterator[MakeDoor]:
    """Makes doors, and ends whatever a failed cell has left behind them."""
    made: list[Door] = []

    def make(kind: type[Door], *arguments: Any, **options: Any) -> Door:
        made.append(kind(stage, folder, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def shared_worker(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process worker for all cells that do not end it."""
    worker = Worker(stage, tmp_path_factory.mktemp("worker"))
    try:
        yield worker
    finally:
        worker.close()


@pytest.fixture
def worker(shared_worker: Worker, folder: Path) -> Worker:
    """The shared worker, ready for a run in this cell's folder."""
    shared_worker.begin(folder)
    return shared_worker
