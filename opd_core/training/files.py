"""The files through which flow and training job speak, all in the run directory."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_FILE = "config.json"
"""The resolved recipe; written by the flow."""
TEACHERS_FILE = "teachers.json"
"""Facts of each teacher that the scoring client needs; written by the flow, again after a
restart."""
SCORING_FILE = "scoring.json"
"""How scoring goes; written by the job, read by the flow that looks after the teachers."""
PARKED_FOLDER = "parked"
"""Rollouts whose teacher is away; written by the job."""
JOURNAL_FILE = "metrics.jsonl"
"""The metrics journal; written by the job."""
RESULT_FILE = "result.json"
"""How the job ended; written by the job."""


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
