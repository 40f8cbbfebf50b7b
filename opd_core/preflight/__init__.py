"""Everything that can be known to be wrong before anything starts.

Each check passes, adds a warning, or adds a problem that says what to do; all problems are told at
once. Nothing here starts a server or takes a device.

``models``   student and teachers on disk: readable, and held against each other
``facts``    what a model directory says of itself
``card``     the pair check card: what was found of one student and one teacher
``items``    the rows of the card, each with its level and what to do
``renderings`` the same messages as both chat templates write them
``rows``     the data, the functions that judge it, and the sequences of the scoring proof
``servers``  what the teacher servers need: an interpreter, a port
``machine``  devices, disk, shared memory
``reuse``    whether the files and settings are those of an earlier check
``report``   what was found
"""

from __future__ import annotations

import functools

from opd_core.config import ExperimentConfig
from opd_core.preflight.card import CardRow, PairCard
from opd_core.preflight.facts import ModelFacts, load_tokenizer, read_model_facts
from opd_core.preflight.machine import check_devices, check_room
from opd_core.preflight.models import check_models
from opd_core.preflight.report import PreflightReport
from opd_core.preflight.reuse import files_key
from opd_core.preflight.rows import check_data, check_functions
from opd_core.preflight.servers import check_servers
from opd_core.training.stopping import why_never

__all__ = [
    "run_preflight",
    "check_files",
    "check_machine",
    "files_key",
    "PreflightReport",
    "PairCard",
    "CardRow",
    "ModelFacts",
    "read_model_facts",
]


def run_preflight(config: ExperimentConfig) -> PreflightReport:
    """Check models, tokenizers, data, devices, ports, disk and memory against the configuration."""
    report = check_files(config)
    check_machine(config, report)
    return report


def check_files(config: ExperimentConfig) -> PreflightReport:
    """What depends on nothing but the files of models and data, and the settings that
    :func:`files_key` knows: the same again as long as they are the same."""
    report = PreflightReport()
    tokenizers = functools.cache(load_tokenizer)
    check_models(config, report, tokenizers)
    check_data(config, report, tokenizers)
    return report


def check_machine(config: ExperimentConfig, report: PreflightReport) -> None:
    """Add what may be another thing the next time: code that is imported, servers, ports, devices,
    room. ``report`` is that of :func:`check_files`."""
    if never := why_never(config):
        report.problems.append(never)
    check_functions(config, report, functools.cache(load_tokenizer))
    check_servers(config, report)
    check_devices(config, report)
    check_room(config, report)
