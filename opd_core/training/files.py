"""The files through which flow and training job speak, all in the run directory."""

from __future__ import annotations

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
