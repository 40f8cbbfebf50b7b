"""The experiment as one frozen tree: all that a run needs to know, checked before it starts.

``values``      what a single setting may be
``serving``     servers that a run launches
``teacher``     the teacher side: servers, replicas, how teachers enter the advantage
``sampling``    who samples the student, and how far ahead
``student``     the rest of the student side: data, task, training, evaluation
``run``         what is around them: Ray, devices, tracking, costs, the run's directory
``experiment``  the whole, and the rules across the tree

Reading this package costs milliseconds: it imports pydantic and nothing heavier. Unknown keys are
errors everywhere, and a bad combination is refused with a message that says what to write instead.
Files are read by :mod:`opd_core.recipe`; what a setting *means* is documented at its field.
"""

from __future__ import annotations

from opd_core.config.experiment import ExperimentConfig
from opd_core.config.run import CostConfig, DevicesConfig, RayConfig, RunConfig, TrackingConfig
from opd_core.config.sampling import SamplingConfig
from opd_core.config.serving import CONTEXT_MARGIN, Backend, LaunchConfig, ServerConfig
from opd_core.config.student import (
    DataConfig,
    EvaluationConfig,
    LoRAConfig,
    StopConfig,
    StudentConfig,
    TaskSpecConfig,
    TrainingConfig,
    TruncatedPolicy,
)
from opd_core.config.teacher import (
    FailureBudgetConfig,
    OPDConfig,
    OPDTeacherConfig,
    ReplicaConfig,
)

__all__ = [
    "ExperimentConfig",
    "StudentConfig",
    "LoRAConfig",
    "DataConfig",
    "TaskSpecConfig",
    "SamplingConfig",
    "TrainingConfig",
    "TruncatedPolicy",
    "StopConfig",
    "EvaluationConfig",
    "RayConfig",
    "DevicesConfig",
    "TrackingConfig",
    "CostConfig",
    "RunConfig",
    "OPDConfig",
    "OPDTeacherConfig",
    "ReplicaConfig",
    "LaunchConfig",
    "ServerConfig",
    "FailureBudgetConfig",
    "Backend",
    "CONTEXT_MARGIN",
]
