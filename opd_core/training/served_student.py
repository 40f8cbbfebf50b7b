"""The student sampled by the servers that the flow launched: from the run directory to an
engine."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from opd_core.config import ExperimentConfig
from opd_core.errors import TrainingError
from opd_core.sampling.samplers import read_samplers
from opd_core.sampling.server_sampler import ServerSampler
from opd_core.sampling.weight_paths import DiskPath, WeightPath
from opd_core.serving.servers import student_launch
from opd_core.training.files import SAMPLERS_FILE, WEIGHTS_FOLDER
from opd_core.training.models import end_ids_at, load_tokenizer
from opd_core.training.weight_push import DistributedPath, TensorPath


def served_student(config: ExperimentConfig, run_dir: Path) -> ServerSampler:
    """The engine over the student's servers, which the flow starts again where they die. Raises
    :class:`TrainingError` if it has not told where they answer."""
    place = run_dir / SAMPLERS_FILE
    try:
        servers = read_samplers(place)
    except (OSError, ValueError, LookupError) as error:
        raise TrainingError(
            f"{place}: where the student's servers answer cannot be read ({error})"
        ) from None
    model = config.student.model
    startup_s = student_launch(config, 0).startup_limit_s
    return ServerSampler(
        servers.backend,
        servers.endpoints,
        _weight_path(config, run_dir),
        vocab_size=vocab_size_at(model),
        end_ids=end_ids_at(model, load_tokenizer(model)),
        max_rows=config.sampling.max_rows,
        # The flow notices, and starts them again one after the other.
        away_limit_s=2 * startup_s * len(servers.endpoints),
        current_endpoints=lambda: read_samplers(place).endpoints,
    )


def vocab_size_at(model: str) -> int:
    """The ids of the student's vocabulary; of its text part, where it has several parts."""
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    return int(config.get_text_config(decoder=True).vocab_size)


def _weight_path(config: ExperimentConfig, run_dir: Path) -> WeightPath:
    sampling, place = config.sampling, run_dir / SAMPLERS_FILE
    if sampling.sync_by == "distributed":
        return DistributedPath(tp_size=sampling.tp_size)
    if sampling.sync_by == "tensor":

        def devices_of(endpoint: str) -> tuple[str, ...]:
            number = read_samplers(place).endpoints.index(endpoint)
            return student_launch(config, number).devices

        return TensorPath(tp_size=sampling.tp_size, devices_of=devices_of)
    if sampling.sync_folder is None:
        return DiskPath(run_dir / WEIGHTS_FOLDER)
    return DiskPath(Path(sampling.sync_folder) / run_dir.name)
