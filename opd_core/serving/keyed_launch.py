"""Runs a server's module with its API key, so that the key never stands in a command line.

``python keyed_launch.py MODULE KEY_FLAG ARGS…`` runs MODULE as ``python -m MODULE ARGS… KEY_FLAG
$OPD_API_KEY`` would. Standard library only: it runs under the server's own interpreter.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Append the key to the arguments, inside this process, and become the module."""
    module, key_flag, *arguments = sys.argv[1:]
    key = os.environ.pop("OPD_API_KEY", "")
    if not key:
        sys.exit(f"{module}: expected the key in the environment variable OPD_API_KEY")
    sys.argv = [module, *arguments, key_flag, key]
    here = str(Path(__file__).parent)  # `python -m` would not have it
    sys.path[:] = [folder for folder in sys.path if folder != here]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
