"""The experiment itself: both sides, their surroundings, and the rules across the tree."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from opd_core.config.run import CostConfig, DevicesConfig, RayConfig, RunConfig, TrackingConfig
from opd_core.config.sampling import SamplingConfig
from opd_core.config.student import (
    DataConfig,
    EvaluationConfig,
    StudentConfig,
    TaskSpecConfig,
    TrainingConfig,
    gpu_shares,
)
from opd_core.config.teacher import OPDConfig
from opd_core.config.values import Frozen, Name


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
    devices: DevicesConfig = DevicesConfig()
    tracking: TrackingConfig = TrackingConfig()
    cost: CostConfig | None = Field(None, description="null tells device time only, no money")
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
    def _nothing_left_to_time(self) -> Self:
        sampling = self.sampling
        if not self.deterministic:
            return self
        by_time = {
            "sampling.engine": sampling.by_servers,
            "sampling.max_staleness": sampling.max_staleness > 0,
            "sampling.over_sampling": sampling.over_sampling > 1,
            "task.tool": self.task.tool is not None,
        }
        if named := [name for name, does in by_time.items() if does]:
            raise ValueError(
                f"deterministic: with {', '.join(named)} it depends on time what is sampled "
                "beside what: remove that, or write deterministic: false"
            )
        return self

    @model_validator(mode="after")
    def _servers_have_their_place(self) -> Self:
        sampling, student = self.sampling, self.student
        if not sampling.by_servers:
            return self
        if self.ray.address is not None:
            raise ValueError(
                f"sampling.engine: {sampling.engine} servers are launched on the flow's host, and "
                "the student's job runs on another cluster: write ray.address: null, or engine: "
                "transformers"
            )
        shared = sampling.devices is None
        if foreign := sorted(set(sampling.devices or ()) - set(student.devices)):
            raise ValueError(
                f"sampling.devices: {', '.join(foreign)} are none of the student's "
                f"({', '.join(student.devices)}): add them to student.devices"
            )
        if shared and 0 < student.gpus < sampling.server_devices:
            raise ValueError(
                f"student.devices: {student.gpus} GPUs are too few for {sampling.actors} servers "
                f"of {sampling.tp_size} (sampling.server.tp_size) each: lower sampling.actors"
            )
        if student.gpus and not self.training_devices:
            raise ValueError("sampling.devices: they leave no device to train on: name fewer")
        if student.gpus and shared and sampling.max_staleness:
            raise ValueError(
                "sampling.devices: servers that sample while the student trains need devices of "
                "their own: name them, or write max_staleness: 0"
            )
        return self

    @model_validator(mode="after")
    def _weights_reach_the_servers(self) -> Self:
        sampling = self.sampling
        if not (sampling.by_servers and self.student.gpus):
            return self
        by, shared, lmdeploy = sampling.sync_by, self.shares_gpus, sampling.engine == "lmdeploy"
        if by == "distributed" and shared:
            raise ValueError(
                "sampling.weight_sync: a process group (distributed) needs servers on devices of "
                "their own: name sampling.devices, or write weight_sync: auto"
            )
        if by == "tensor" and lmdeploy and not shared:
            raise ValueError(
                "sampling.weight_sync: LMDeploy opens handles (tensor) on the device that trains "
                "only: write distributed, or sampling.devices: null"
            )
        needed, training = sampling.server_devices, self.training.actors
        if by == "tensor" and lmdeploy and training < needed:
            raise ValueError(
                f"sampling.weight_sync: LMDeploy opens handles (tensor) on the device that trains "
                f"only, and its servers have {needed} devices (sampling.actors x server.tp_size), "
                f"of which training.actors: {training} train: write training.actors: {needed}, "
                "lower sampling.actors, or name sampling.devices (distributed)"
            )
        return self

    @model_validator(mode="after")
    def _shared_memory_is_divided(self) -> Self:
        server = self.sampling.server
        if self.shares_gpus and (server is None or server.memory_fraction is None):
            raise ValueError(
                "sampling.server.memory_fraction: name one: servers that share the student's GPUs "
                "would take most of their memory, and training needs about 16 bytes a parameter, "
                "divided by the ranks that share them (training.shard_ranks), beside it"
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
    def _billed_by_somebody(self) -> Self:
        names = [teacher.name for teacher in self.opd.teachers] if self.opd else []
        billed = self.cost.teacher_million_tokens if self.cost else {}
        if unknown := sorted(set(billed) - set(names)):
            raise ValueError(
                f"cost.teacher_million_tokens: no teacher is named {unknown[0]!r}; the teachers "
                f"are: {', '.join(names) or 'none'}"
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
        training, sampling = self.training.actors, self.sampling_actors
        gpu_shares(self.training_gpus, training, sampling)
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
        owner: dict[str, str] = {}
        for who, devices in self._devices_here():
            for device in devices:
                if device in owner:
                    raise ValueError(
                        f"device {device} is given to {owner[device]} and to {who}: "
                        "give each its own (student.devices, launch.devices)"
                    )
                if device != "cpu":
                    owner[device] = who
        return self

    def _devices_here(self) -> list[tuple[str, tuple[str, ...]]]:
        """Who uses which devices of the flow's host; servers that sample have the student's."""
        # On an existing cluster the student's devices are that cluster's, and Ray hands them out.
        here = [("the student", self.student.devices)] if self.ray.address is None else []
        for teacher in self.opd.teachers if self.opd else ():
            for number, replica in enumerate(teacher.all_replicas):
                who = f"teacher {teacher.name!r}" + (f" replica {number}" if number else "")
                here.append((who, replica.launch.devices if replica.launch else ()))
        return here

    @property
    def leased_devices(self) -> tuple[str, ...]:
        """What the run has for itself on the flow's host, sorted: all its devices there but plain
        ``cpu``, which is everybody's."""
        used = {device for _, devices in self._devices_here() for device in devices}
        return tuple(sorted(used - {"cpu"}))

    @property
    def training_devices(self) -> tuple[str, ...]:
        """The student's devices without those that servers have for themselves."""
        theirs = self.sampling.devices or ()
        return tuple(device for device in self.student.devices if device not in theirs)

    @property
    def training_gpus(self) -> int:
        """How many GPUs Ray's actors have among them."""
        return sum(not device.startswith("cpu") for device in self.training_devices)

    @property
    def sampling_actors(self) -> int:
        """Sampling actors on Ray; none where servers sample."""
        return 0 if self.sampling.by_servers else self.sampling.actors

    @property
    def rollout_tokens(self) -> int:
        """Tokens of the longest rollout, its prompt included."""
        return self.data.max_prompt_tokens + self.sampling.max_new_tokens

    @property
    def shares_gpus(self) -> bool:
        """Whether servers sample on the GPUs that train."""
        return self.sampling.by_servers and self.sampling.devices is None and self.student.gpus > 0

    @property
    def importance_cap(self) -> float | None:
        """The bound of the importance weights; None where a token's weight is 1 anyway: the
        in-process engine on-policy differs from training by rounding only."""
        weighed = self.sampling.by_servers or not self.sampling.on_policy
        return self.training.importance_cap if weighed else None

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
