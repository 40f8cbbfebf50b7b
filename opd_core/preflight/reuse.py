"""Whether models, data and settings are those of an earlier check, so that it need not be
repeated."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import opd_core
from opd_core.config import ExperimentConfig
from opd_core.serving.servers import teacher_servers

SECTIONS = {"student", "opd", "sampling", "task", "data"}
"""All that the checks of files look at in a recipe."""
READERS = ("transformers", "tokenizers", "jinja2", "pyarrow", "numpy", "pydantic")
"""Packages that read the files."""


def files_key(config: ExperimentConfig) -> str:
    """Another one whenever :func:`~opd_core.preflight.check_files` might find something else.

    It is a hash of the settings in ``SECTIONS``, of size, times and inode of every file of the
    models and the data, of this package's own code, and of the versions of what reads the files. No
    large file is read. ctime is among the times: nobody can set it back, as ``cp -p`` does mtime.
    """
    facts = (
        config.model_dump(mode="json", include=SECTIONS),
        {str(path): _identity(path) for place in _places(config) for path in _files(place)},
        _code(),
        [platform.python_version(), *(metadata.version(name) for name in READERS)],
    )
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _places(config: ExperimentConfig) -> list[Path]:
    """Folders of models and files of data."""
    models = [server.launch.model for server in teacher_servers(config.opd)]
    named = [config.student.model, *models, config.data.train, config.data.evaluation]
    return [Path(name).absolute() for name in named if name]


def _files(place: Path) -> Iterator[Path]:
    """The path itself, and all that is below a folder."""
    yield place
    yield from place.rglob("*")


def _identity(path: Path) -> list[int]:
    """Empty where nothing can be found."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _code() -> str:
    """Hash of this package's sources: a checkout has changes that no version tells of."""
    folder = Path(opd_core.__file__).parent
    digest = hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        digest.update(f"{source.relative_to(folder)}:".encode() + source.read_bytes())
    return digest.hexdigest()
