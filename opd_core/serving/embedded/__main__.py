"""The program: ``python -m opd_core.serving.embedded``."""

from __future__ import annotations

import logging
import os
import sys

from opd_core.serving.embedded.process import main

if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # End now: a forward or a load still on its thread cannot be interrupted, only left.
    os._exit(status)
