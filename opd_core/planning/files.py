"""What a run writes, and the room that the large things take."""

from __future__ import annotations

from dataclasses import dataclass

from opd_core.config import ExperimentConfig
from opd_core.lifecycle.launch import SUPERVISOR_LOG
from opd_core.lifecycle.ledger import LEDGER_FILE
from opd_core.lifecycle.records import RECEIPT_FILE
from opd_core.training import files

WEIGHTS_ON_DISK = 2
"""Copies of the student that lie on their way to its servers: the one in use, and the next."""


@dataclass(frozen=True, slots=True)
class Written:
    """One file or folder, relative to the run's directory; ``bytes`` at most, 0 where small."""

    path: str
    what: str
    bytes: int = 0


def written_files(config: ExperimentConfig, parameters: int) -> tuple[Written, ...]:
    """In the order of a run; ``parameters`` of the student, 0 where they are not known."""
    training = config.training
    number, each = checkpoints(config, 4 * parameters)
    found = [
        Written(files.CONFIG_FILE, "the resolved recipe, every default spelled out"),
        Written(files.RUN_FILE, "attempts, fingerprints of models and data"),
        Written(files.PROVENANCE_FILE, "code, packages and machine of each attempt"),
        Written(LEDGER_FILE, "every process before and after its start"),
        Written(SUPERVISOR_LOG, "what the process says that starts and ends the others"),
        Written(f"{files.LOGS_FOLDER}/", "a log of each process"),
        Written(files.LINKS_FILE, "pages on which the run is shown"),
        *_of_servers(config),
        Written(files.LOCK_FILE, "locked by the job as long as it lives"),
        Written(files.PHASE_FILE, "what the job does right now"),
        Written(files.JOURNAL_FILE, "the metrics of every train step"),
        Written(f"{files.BATCHES_FOLDER}/", "the groups that no kept checkpoint covers"),
    ]
    if config.sampling.by_servers and config.sampling.sync_by == "disk":
        on_their_way = WEIGHTS_ON_DISK * served_bytes(config, 4 * parameters)
        folder = config.sampling.sync_folder
        place = folder or f"{files.WEIGHTS_FOLDER}/"
        found.append(Written(place, "weights on their way to the student's servers", on_their_way))
    if training.checkpoint_every:
        what = f"every {training.checkpoint_every} train steps, {number} at once at most"
        found.append(Written(f"{files.CHECKPOINTS_FOLDER}/", what, number * each))
    if config.opd is not None:
        found.append(Written(f"{files.TOKEN_KL_FOLDER}/", "where the reverse KL lies"))
    if config.data.evaluation is not None:
        found.append(Written(f"{files.EVALUATIONS_FOLDER}/", "each held-out question"))
    found += [
        Written("student/", "the trained student, in Hugging Face format", 4 * parameters),
        Written(files.MODEL_CARD_FILE, "what the student is"),
        Written(files.RESULT_FILE, "how the job ended"),
        Written(files.SUMMARY_FILE, "what the run came to"),
        Written(files.REPORT_FILE, "the run as a page"),
        Written(RECEIPT_FILE, "how every process ended, and that nothing is left"),
    ]
    return (*found, *_tracking(config))


def run_directory(config: ExperimentConfig) -> str:
    """Where the run will lie; its id has the time of its start."""
    return f"{config.run.root_dir}/{config.name}-DATE-TIME-ID"


def served_bytes(config: ExperimentConfig, fp32_bytes: int) -> int:
    """Size of the student's weights as servers read them, in its dtype."""
    return fp32_bytes if config.student.dtype == "float32" else fp32_bytes // 2


def checkpoints(config: ExperimentConfig, fp32_bytes: int) -> tuple[int, int]:
    """How many checkpoints lie on disk at once, one being written, and the bytes of each: fp32
    weights with both of Adam's moments (of a LoRA student the adapters, which weigh little), and
    the export."""
    if not config.training.checkpoint_every:
        return 0, 0
    state = 0 if config.student.lora is not None else 3
    copies = state + config.training.export_checkpoints
    return config.training.keep_checkpoints + 1, copies * fp32_bytes


def _of_servers(config: ExperimentConfig) -> list[Written]:
    found = []
    if config.opd is not None:
        found += [
            Written("pair_check.md", "how each teacher fits the student"),
            Written("pair_check.json", "the same, to parse"),
            Written(files.TEACHERS_FILE, "facts of each teacher that scoring needs"),
            Written(files.SCORING_FILE, "how scoring goes"),
        ]
    if config.sampling.by_servers:
        found.append(Written(files.SAMPLERS_FILE, "where the student's servers answer"))
    return found


def _tracking(config: ExperimentConfig) -> list[Written]:
    tracking, found = config.tracking, []
    if tracking.tensorboard:
        found.append(Written("tensorboard/", "event files of the metrics"))
    if tracking.mlflow:
        place = tracking.mlflow_uri or f"{config.run.root_dir}/mlflow.db"
        found.append(Written(place, "MLflow: metrics, report, tables"))
    return found
