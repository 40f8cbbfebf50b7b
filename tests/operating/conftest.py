"""One lab for all tests that leave it standing; and a way to have one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.operating.lab import Lab

MakeLab = Callable[..., Lab]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """``opd up``, for the length of the session: one experiment at a time."""
    made = Lab(tmp_path_factory.mktemp("lab"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[MakeLab]:
    """Starts a lab of the test's own, with arguments for ``opd up``, and stops it."""
    made: list[Lab] = []

    def make(*arguments: str, **environment: str) -> Lab:
        lab = Lab(tmp_path / f"lab-{len(made)}", environment)
        made.append(lab)
        lab.start(*arguments)
        return lab

    yield make
    for lab in made:
        lab.stop()
