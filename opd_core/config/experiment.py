"""The experiment itself: both sides, the machine, and the rules across the tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from opd_core.config.student import (
    DataConfig,
    EvaluationConfig,
    SamplingConfig,
    StudentConfig,
    TaskSpecConfig,
    TrainingConfig,
    gpu_shares,
)
from opd_core.config.teacher import OPDConfig
from opd_core.config.values import Frozen, Name, is_http_url


class RayConfig(Frozen):
    """Where the student runs: a private head (address null) or an existing cluster."""

    address: str | None = Field(
        None, description="Dashboard of an existing cluster (http://host:8265); null starts a head"
    )
    num_cpus: int | None = Field(None, ge=1, description="CPUs of the private head; null is enough")
    object_store_mb: int = Field(200, ge=80)
    startup_limit_s: float = Field(180.0, gt=0)
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="How Ray places the actors over nodes (its placement group strategies)"
    )

    @field_validator("address")
    @classmethod
    def _http_address(cls, value: str | None) -> str | None:
        if value is not None and not is_http_url(value):
            raise ValueError(
                f"the student is submitted over Ray's Jobs API: expected the dashboard's URL "
                f"like http://head-node:8265, got {value!r}"
            )
        return value


class TrackingConfig(Frozen):
    """Where the journal is shipped to."""

    mlflow: bool = True
    mlflow_uri: str | None = Field(None, description="null is SQLite in the run root")
    experiment: str = Field("opd", min_length=1)
    tensorboard: bool = True


class RunConfig(Frozen):
    """Where a run lives and how long its ending may take."""

    root: str = Field("runs", min_length=1, description="Each run gets a directory under it")
    teardown_s: float = Field(60.0, gt=0, description="One deadline for the whole teardown")

    @property
    def root_dir(self) -> Path:
        """The root as an absolute path."""
        return Path(self.root).expanduser().absolute()


class ExperimentConfig(Frozen):
    """One on-policy-distillation experiment."""

    name: Name
    description: str = ""
    seed: int = Field(1234, ge=0)
    deterministic: bool = Field(
        False,
        description="The same bits from the same recipe on the same machine, at a price: rollouts "
        "are scored one by one, in their order",
    )
    student: StudentConfig
    data: DataConfig
    task: TaskSpecConfig = TaskSpecConfig()
    sampling: SamplingConfig
    opd: OPDConfig | None = Field(description="null trains on the task reward only")
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    ray: RayConfig = RayConfig()
    tracking: TrackingConfig = TrackingConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _on_policy(self) -> Self:
        if self.opd is not None and not self.sampling.plain_policy:
            raise ValueError(
                "sampling: with OPD on, rollouts must come from the plain policy, or k_t is not an "
                "estimate of the reverse KL: remove temperature, top_p, top_k, repetition_penalty "
                "and min_tokens (evaluation.temperature is free)"
            )
        if not self.sampling.unshaped:
            raise ValueError(
                f"sampling: the {self.sampling.engine} engine offers the temperature only: remove "
                "top_p, top_k, repetition_penalty and min_tokens"
            )
        return self

    @model_validator(mode="after")
    def _nothing_left_to_chance(self) -> Self:
        if not self.deterministic or self.opd is None:
            return self
        if self.opd.score_store:
            raise ValueError(
                "deterministic: a score store may hold scores of other runs, which differ in their "
                "last bits: remove opd.score_store, or write deterministic: false"
            )
        if hedging := [teacher.name for teacher in self.opd.teachers if teacher.hedge]:
            raise ValueError(
                f"deterministic: with hedge the first of two answers counts, by chance: write "
                f"hedge: false for {', '.join(hedging)}, or deterministic: false"
            )
        return self

    @model_validator(mode="after")
    def _rewards_where_needed(self) -> Self:
        if self.task_adv_weight > 0 and self.task.group_size < 2:
            raise ValueError(
                "task.group_size: a group-relative advantage needs at least 2 rollouts a prompt "
                f"when task_adv_weight is {self.task_adv_weight}; write group_size: 4, or weight 0"
            )
        if self.task_adv_weight > 0 and not self.task.judged:
            raise ValueError(
                f"task.judge: task_adv_weight is {self.task_adv_weight}, so every rollout needs a "
                "reward: name a judge, e.g. opd_core.agent_loop.judges:math"
            )
        return self

    @model_validator(mode="after")
    def _enough_groups(self) -> Self:
        if self.groups_per_step_limit < self.training.prompts_per_step:
            raise ValueError(
                f"task.max_groups_per_step: {self.groups_per_step_limit} groups cannot fill a "
                f"train step of {self.training.prompts_per_step} (training.prompts_per_step): "
                "raise it, or write null"
            )
        return self

    @model_validator(mode="after")
    def _actors_fit(self) -> Self:
        training, sampling = self.training.actors, self.sampling.actors
        gpu_shares(self.student.gpus, training, sampling)
        cpus = self.ray.num_cpus
        # An existing cluster has CPUs of its own.
        if self.ray.address is None and cpus is not None and cpus < training + sampling:
            raise ValueError(
                f"ray.num_cpus: {cpus} is too few for {training} training actors and {sampling} "
                f"sampling actors, one each; they would wait for ever: write {training + sampling} "
                "or more, or null"
            )
        return self

    @model_validator(mode="after")
    def _devices_apart(self) -> Self:
        # On an existing cluster the student's devices are that cluster's, and Ray hands them out.
        here = self.student.devices if self.ray.address is None else ()
        given = [("the student", here)]
        for teacher in self.opd.teachers if self.opd else ():
            for number, replica in enumerate(teacher.all_replicas):
                who = f"teacher {teacher.name!r}" + (f" replica {number}" if number else "")
                given.append((who, replica.launch.devices if replica.launch else ()))
        owner: dict[str, str] = {}
        for who, devices in given:
            for device in devices:
                if device in owner:
                    raise ValueError(
                        f"device {device} is given to {owner[device]} and to {who}: "
                        "give each its own (student.devices, launch.devices)"
                    )
                if device != "cpu":
                    owner[device] = who
        return self

    @property
    def task_adv_weight(self) -> float:
        """Weight of the task advantage; 1 in a run without teachers."""
        return self.opd.task_adv_weight if self.opd else 1.0

    @property
    def groups_per_step_limit(self) -> int:
        """Groups that one train step may start before the run stops."""
        return self.task.max_groups_per_step or 4 * self.training.prompts_per_step

    def resolved(self) -> dict[str, Any]:
        """The whole tree as plain data, without any plain key in it."""
        return self.model_dump(mode="json")
