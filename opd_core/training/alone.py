"""One process at a time with a run that has ended: who settles it, synchronises it or continues
it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opd_core.errors import ConfigError
from opd_core.lifecycle.locks import lock_now
from opd_core.lifecycle.records import RECEIPT_FILE
from opd_core.training.forks import name_of


@contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Lock the run's receipt, without waiting.

    Raises :class:`ConfigError` while another process has it, or the run has none.
    """
    path = run_dir / RECEIPT_FILE
    try:
        receipt = path.open("r+b")  # NFS locks only what can be written
    except FileNotFoundError:
        raise _not_ended(path) from None
    with receipt:
        if not lock_now(receipt.fileno()):
            raise ConfigError(
                f"{name_of(run_dir)}: another process is settling, synchronising or continuing "
                "this run right now; try again when it is through"
            )
        # Whoever continues the run moves the file away, and with it the lock.
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(receipt.fileno())):
            raise _not_ended(path)
        yield


def _not_ended(path: Path) -> ConfigError:
    return ConfigError(f"expected {path}: the run has not ended yet")
