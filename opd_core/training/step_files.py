"""Folders with one file for each train step, ``step-000050.json``; other names are no concern."""

from __future__ import annotations

import re
from pathlib import Path

FILE_NAME = re.compile(r"step-(\d{6,})\.json")


def path_of(folder: Path, train_step: int) -> Path:
    """Where the file of a train step is, if there is one."""
    return folder / f"step-{train_step:06d}.json"


def step_files(folder: Path) -> dict[int, Path]:
    """Those that are there, by train step, ascending; none where there is no folder."""
    if not folder.is_dir():
        return {}
    found = {path: FILE_NAME.fullmatch(path.name) for path in folder.iterdir()}
    return dict(sorted((int(name[1]), path) for path, name in found.items() if name))
