"""The files of a run directory. Flow and training job speak through them, and an attempt to
continue the run begins from them."""

from __future__ import annotations

CONFIG_FILE = "config.json"
"""The resolved recipe; written by the flow."""
RUN_FILE = "run.json"
"""Which run this is: its attempts, the fingerprints of its models and data, where it comes from;
written by the flow."""
TEACHERS_FILE = "teachers.json"
"""Facts of each teacher that the scoring client needs; written by the flow, again after a
restart."""
SCORING_FILE = "scoring.json"
"""How scoring goes; written by the job, read by the flow that looks after the teachers."""
PARKED_FOLDER = "parked"
"""Rollouts whose teacher is away; written by the job."""
JOURNAL_FILE = "metrics.jsonl"
"""The metrics journal; written by the job."""
BATCHES_FOLDER = "batches"
"""The groups of every train step that no kept checkpoint covers; written by the job."""
CHECKPOINTS_FOLDER = "checkpoints"
"""Whole states of the training, by train step; written by the job."""
RESULT_FILE = "result.json"
"""How the job ended; written by the job."""
SUMMARY_FILE = "summary.json"
"""What the run came to; written by the flow."""
MODEL_CARD_FILE = "model_card.md"
"""What the student is; written by the flow."""
LOGS_FOLDER = "logs"
"""The logs of all processes."""
ATTEMPTS_FOLDER = "attempts"
"""What earlier attempts left of their own, in a folder each."""
