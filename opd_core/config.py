"""The experiment as one frozen tree: all that a run needs to know, checked before it starts.

Reading this module costs milliseconds: it imports pydantic and nothing heavier. Unknown keys are
errors everywhere, and a bad combination is refused with a message that says what to write instead.
Files are read by :mod:`opd_core.recipe`; what a setting *means* is documented at its field.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

Backend = Literal["sglang", "lmdeploy", "embedded"]
Dtype = Literal["float32", "bfloat16", "float16"]

KEY_REFERENCE = re.compile(r"(env|block):[A-Za-z_][\w.-]*")
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
DEVICE = re.compile(r"cpu(:(0|[1-9]\d*))?|0|[1-9]\d*|GPU-[\w-]+|MIG-[\w-]+")
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""Names become file names, process names and command-line values."""
LOOPBACK = ("127.0.0.1", "localhost")
OWNED_FLAGS = {
    "--host",
    "--server-name",
    "--port",
    "--server-port",
    "--api-key",
    "--api-keys",
    "--admin-api-key",
}
OWNED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "launch.devices",
    "OPD_API_KEY": "the teacher's api_key",
}
CONTEXT_MARGIN: dict[Backend, int] = {"sglang": 6, "embedded": 6, "lmdeploy": 1}
"""Tokens that a backend keeps back from its context length (measured on the real servers)."""


class Frozen(BaseModel):
    """Base of every node: immutable, unknown keys refused, defaults checked too.

    Errors do not repeat their input, which may hold a key.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )


def _existing_path(value: str, info: ValidationInfo) -> str:
    """A relative path means the file beside the recipe, else the one in the working directory. It
    becomes absolute: servers and jobs run elsewhere. What exists in neither stays as written."""
    base = (info.context or {}).get("base_dir")
    if Path(value).is_absolute():
        return value
    folders = [Path.cwd()] if base is None else [Path(base), Path.cwd()]
    found = next((folder / value for folder in folders if (folder / value).exists()), None)
    # Not resolve(): an interpreter of a virtual environment is a link that must stay one.
    return os.path.abspath(found) if found is not None else value


def _interpreter(value: str | None, info: ValidationInfo) -> str | None:
    """A bare name is looked up on the PATH, as a shell does."""
    return value if value is None or os.sep not in value else _existing_path(value, info)


def _import_path(value: str | None) -> str | None:
    if value is not None and not IMPORT_PATH.fullmatch(value):
        raise ValueError(f"expected 'package.module:function', got {value!r}")
    return value


def _devices(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not DEVICE.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a device: write GPU indices or UUIDs ('0', 'GPU-…'), "
                "'cpu', or a named CPU slot ('cpu:0')"
            )
    if len(set(values)) != len(values):
        raise ValueError(f"a device is named twice: {', '.join(values)}")
    if len({value.startswith("cpu") for value in values}) > 1:
        raise ValueError(f"name either GPUs or CPU slots, not both: {', '.join(values)}")
    return values


def _endpoint(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError:
        raise ValueError(f"expected a URL like http://127.0.0.1:13141, got {value!r}") from None
    if parts.query or parts.fragment or "@" in parts.netloc:  # not repeated: it may be a secret
        raise ValueError(
            "an endpoint may hold scheme, host, port and path only; a key belongs in api_key"
        )
    sound = parts.scheme in ("http", "https") and bool(parts.hostname) and port_is_sound
    if not sound or re.search(r"\s", value):
        raise ValueError(f"expected a URL like http://127.0.0.1:13141, got {value!r}")
    return value.rstrip("/")


def _extra_args(values: tuple[str, ...]) -> tuple[str, ...]:
    owned = [flag for value in values if (flag := value.partition("=")[0]) in OWNED_FLAGS]
    if owned:
        raise ValueError(
            f"{', '.join(owned)} cannot stand here: the address is 127.0.0.1, the port belongs in "
            "launch.port or the endpoint, and a key in api_key (command lines are public)"
        )
    return values


def _environment(values: dict[str, str]) -> dict[str, str]:
    for name in sorted(values.keys() & OWNED_VARIABLES.keys()):
        raise ValueError(f"{name} cannot stand here: write {OWNED_VARIABLES[name]}")
    return values


Text = Annotated[str, Field(coerce_numbers_to_str=True)]
"""YAML reads ``[0, 1]`` as numbers; here they are words."""
Endpoint = Annotated[str | None, AfterValidator(_endpoint)]
ModelOrPath = Annotated[str, Field(min_length=1), AfterValidator(_existing_path)]
Interpreter = Annotated[str | None, AfterValidator(_interpreter)]
ImportPath = Annotated[str | None, AfterValidator(_import_path)]
Devices = Annotated[tuple[Text, ...], Field(min_length=1), AfterValidator(_devices)]
Arguments = Annotated[tuple[Text, ...], AfterValidator(_extra_args)]
Environment = Annotated[dict[str, Text], AfterValidator(_environment)]
Beta = Annotated[float, Field(ge=0, lt=1)]


# --------------------------------------------------------------------------- the teacher side


class LaunchConfig(Frozen):
    """A teacher server that this run starts, owns and ends."""

    model: ModelOrPath = Field(description="Model directory that the server loads")
    devices: Devices = Field(("cpu",), description="Devices of the server, on the flow's host")
    port: int | None = Field(None, ge=1, le=65535, description="null takes a free port")
    python: Interpreter = Field(
        None, description="Interpreter of the server's own environment; null is this one"
    )
    dtype: Dtype | None = Field(None, description="null leaves it to the server")
    context_length: int | None = Field(None, ge=8, description="Tokens; null is the model's own")
    tp_size: int = Field(1, ge=1, description="Tensor-parallel size")
    memory_fraction: float | None = Field(None, gt=0, lt=1, description="Of the device's memory")
    prefill_tokens: int | None = Field(None, ge=1, description="Chunked prefill, in tokens")
    cpu_threads: int | None = Field(None, ge=1, description="Compute threads on a CPU")
    startup_limit_s: float = Field(1200.0, gt=0, description="From start to the first answer")
    extra_args: Arguments = Field((), description="Appended to the server's command line")
    env: Environment = Field(default_factory=dict, description="Added to its environment")


def _check_place(endpoint: str | None, launch: LaunchConfig | None) -> None:
    if endpoint is None and launch is None:
        raise ValueError("name an 'endpoint' (external server) or a 'launch' (started by us)")
    if endpoint is None or launch is None:
        return
    if launch.port is not None:
        raise ValueError("name the port once: in 'endpoint' or in 'launch.port', not in both")
    parts = urlsplit(endpoint)
    if parts.scheme != "http" or parts.hostname not in LOOPBACK or parts.path:
        raise ValueError(
            f"a launched server answers at http://127.0.0.1:PORT, got endpoint {endpoint!r}: "
            "correct it, or remove 'launch' if the server is external"
        )
    if parts.port is None:
        raise ValueError("an endpoint that is launched needs a port: http://127.0.0.1:13141")


def _check_backend(backend: Backend, launch: LaunchConfig | None) -> None:
    if launch is None:
        return
    if backend == "lmdeploy" and launch.dtype == "float32":
        raise ValueError("launch.dtype: LMDeploy has no float32; write bfloat16 or float16")
    if backend == "embedded" and (launch.tp_size > 1 or launch.memory_fraction is not None):
        raise ValueError(
            "launch: the embedded server knows neither tp_size nor memory_fraction; remove them, "
            "or choose backend: sglang"
        )


class ReplicaConfig(Frozen):
    """One server behind a teacher's name. ``launch: null`` is an external server: gated and probed,
    never restarted or stopped."""

    endpoint: Endpoint = Field(None, description="http://host:port; null with a launch")
    backend: Backend = Field("sglang", description="The wire format of the server")
    launch: LaunchConfig | None = None

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        _check_place(self.endpoint, self.launch)
        _check_backend(self.backend, self.launch)
        return self


class OPDTeacherConfig(Frozen):
    """A frozen model that scores. ``endpoint``, ``backend`` and ``launch`` on the teacher itself
    mean one replica; several stand under ``replicas``."""

    name: str = Field(pattern=NAME, max_length=64)
    endpoint: Endpoint = None
    backend: Backend = "sglang"
    launch: LaunchConfig | None = None
    replicas: tuple[ReplicaConfig, ...] = ()
    api_key: SecretStr | None = Field(
        None, description="A reference, env:NAME or block:NAME; a plain key from Python only"
    )
    request_timeout_s: float = Field(
        1200.0, gt=0, description="One attempt, from send to last byte; not the wait for a slot"
    )
    max_retry_per_sample: int = Field(2, ge=0, description="Attempts after the first")
    max_concurrency: int = Field(128, ge=1, description="Requests in flight, for the whole run")
    away_limit_s: float = Field(
        60.0, ge=0, description="How long an unreachable teacher is waited for before the run ends"
    )

    @field_validator("api_key")
    @classmethod
    def _reference_only_in_recipes(
        cls, value: SecretStr | None, info: ValidationInfo
    ) -> SecretStr | None:
        if value is None:
            return None
        plain = value.get_secret_value()
        if not plain:
            raise ValueError("the key is empty; a teacher without a key has api_key: null")
        written = (info.context or {}).get("written", False)
        if written and not KEY_REFERENCE.fullmatch(plain):
            raise ValueError(
                "a key is never written in a recipe: name where it is kept, "
                "as 'env:NAME' (environment variable) or 'block:NAME' (Prefect Secret block)"
            )
        return value

    @field_serializer("api_key")
    def _never_write_a_plain_key(self, value: SecretStr | None) -> str | None:
        if value is None:
            return None
        plain = value.get_secret_value()
        return plain if KEY_REFERENCE.fullmatch(plain) else "env:" + self.key_variable

    @model_validator(mode="after")
    def _one_way_to_say_where(self) -> Self:
        if self.replicas and (self.endpoint or self.launch):
            raise ValueError(
                f"teacher {self.name!r}: use either 'replicas' or endpoint/launch, not both"
            )
        if self.replicas and self.backend != "sglang":
            raise ValueError(
                f"teacher {self.name!r}: with 'replicas' the backend is named at each replica"
            )
        if not self.replicas:
            _check_place(self.endpoint, self.launch)
            _check_backend(self.backend, self.launch)
        return self

    @property
    def key_variable(self) -> str:
        """Environment variable through which this run's processes receive the key."""
        return "OPD_TEACHER_KEY_" + re.sub(r"\W", "_", self.name).upper()

    @property
    def all_replicas(self) -> tuple[ReplicaConfig, ...]:
        """The replicas, however they were written."""
        if self.replicas:
            return self.replicas
        one = ReplicaConfig(endpoint=self.endpoint, backend=self.backend, launch=self.launch)
        return (one,)

    def with_endpoints(self, endpoints: Iterable[str]) -> OPDTeacherConfig:
        """This teacher with the endpoint of each replica filled in, in order."""
        replicas = tuple(
            replica.model_copy(
                update={
                    "endpoint": endpoint,
                    "launch": replica.launch and replica.launch.model_copy(update={"port": None}),
                }
            )
            for replica, endpoint in zip(self.all_replicas, endpoints, strict=True)
        )
        alone = {"endpoint": None, "backend": "sglang", "launch": None}
        return self.model_copy(update={"replicas": replicas, **alone})


class OPDConfig(Frozen):
    """How the teachers enter the advantage: ``task_adv_weight * A_task - opd_adv_weight * k``."""

    mode: Literal["pg-opd"] = "pg-opd"
    task_adv_weight: float = Field(0.0, ge=0)
    opd_adv_weight: float = Field(1.0, ge=0)
    teachers: tuple[OPDTeacherConfig, ...] = Field(min_length=1)
    data_source_teacher_map: dict[str, str] = Field(default_factory=dict)
    default_teacher: str | None = Field(
        None, description="Teacher of every data_source that the map does not name"
    )
    kl_clamp: float | None = Field(
        None, gt=0, description="Symmetric clamp of k per token, in nats; null is off"
    )
    kl_baseline: bool = Field(
        False, description="Subtract the batch mean of rollout_logprobs - teacher_logprobs from k"
    )

    @model_validator(mode="after")
    def _check_routing(self) -> Self:
        names = [teacher.name for teacher in self.teachers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"teacher names must differ; used twice: {', '.join(twice)}")
        if len({teacher.key_variable for teacher in self.teachers}) < len(names):
            raise ValueError(
                "teacher names must differ in letters and digits (their keys' environment "
                f"variables would be the same): {', '.join(names)}"
            )
        if self.task_adv_weight == 0 and self.opd_adv_weight == 0:
            raise ValueError(
                "task_adv_weight and opd_adv_weight are both 0, so nothing would be learned: "
                "raise one of them (to score and log only, use task_adv_weight: 1)"
            )
        used = set(self.data_source_teacher_map.values()) | {self.default_teacher} - {None}
        if not used:
            raise ValueError(
                "say which teacher scores which data: write "
                f"data_source_teacher_map: {{<data_source>: {names[0]}}} "
                f"or default_teacher: {names[0]}"
            )
        for unknown in sorted(str(name) for name in used - set(names)):
            raise ValueError(
                f"no teacher is named {unknown!r}; the teachers are: {', '.join(names)}"
            )
        for idle in sorted(set(names) - used):
            raise ValueError(
                f"teacher {idle!r} is used by no data_source: map one to it, or remove it"
            )
        return self

    def teacher_of(self, data_source: str) -> str | None:
        """Name of the teacher that scores ``data_source``; None if nobody does."""
        return self.data_source_teacher_map.get(data_source, self.default_teacher)


# --------------------------------------------------------------------------- the student side


class StudentConfig(Frozen):
    """The model being trained."""

    model: ModelOrPath
    dtype: Dtype = Field("float32", description="Of the weights that are trained and sampled")
    devices: Devices = ("cpu",)
    cpu_threads: int = Field(1, ge=1, description="Compute threads of each actor on a CPU")


class DataConfig(Frozen):
    """Rows in the DAPO layout, JSONL or Parquet: ``data_source``, ``prompt`` (messages),
    ``reward_model.ground_truth``."""

    train: ModelOrPath
    evaluation: ModelOrPath | None = Field(
        None, description="Held-out rows; null runs without evaluation"
    )
    max_prompt_tokens: int = Field(2048, ge=1, description="Longer prompts are left out, counted")
    evaluation_rows: int | None = Field(None, ge=1, description="First rows only; null is all")


class TaskSpecConfig(Frozen):
    """What is asked, how it is judged, and what becomes of a group."""

    group_size: int = Field(1, ge=1, description="Rollouts per prompt")
    judge: ImportPath = Field(None, description="module:function(text, prompt) -> reward")
    batch_judge: ImportPath = Field(None, description="module:function(rollouts) -> rewards")
    filter_func: ImportPath = Field(None, description="module:function(group) -> keep?")
    max_requeue: int = Field(2, ge=0, description="Times that a lost prompt is tried again")
    max_groups_per_step: int | None = Field(
        None, ge=1, description="Groups started for one train step; null is 4 x prompts_per_step"
    )

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.judge and self.batch_judge:
            raise ValueError("name either 'judge' (per sample) or 'batch_judge', not both")
        return self

    @property
    def judged(self) -> bool:
        """Whether rollouts get a reward at all."""
        return bool(self.judge or self.batch_judge)


class SamplingConfig(Frozen):
    """How the student samples. With OPD on only the plain policy is accepted."""

    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, description="null is off")
    repetition_penalty: float = Field(1.0, gt=0)
    min_tokens: int = Field(0, ge=0)
    engine: Literal["transformers"] = "transformers"
    actors: int = Field(1, ge=1, description="Sampling actors, each with a copy of the student")
    max_rows: int = Field(128, ge=1, description="Sequences that one actor decodes together")

    @property
    def plain_policy(self) -> bool:
        """True where the sampled distribution is the model's own."""
        return (
            self.temperature == 1.0
            and self.top_p == 1.0
            and self.top_k is None
            and self.repetition_penalty == 1.0
            and self.min_tokens == 0
        )


class TrainingConfig(Frozen):
    """The optimizer's side of a train step."""

    steps: int = Field(ge=1, description="Train steps, one batch each")
    prompts_per_step: int = Field(ge=1, description="Groups in one batch")
    learning_rate: float = Field(gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up, in optimizer steps")
    max_grad_norm: float = Field(1.0, gt=0)
    optimizer_steps_per_batch: int = Field(1, ge=1)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float = Field(10.0, gt=1)
    micro_batch_tokens: int = Field(8192, ge=1, description="Padded tokens of one forward, a rank")
    logprob_chunk_tokens: int = Field(512, ge=1, description="Positions whose logits live at once")
    gradient_checkpointing: bool = False
    actors: int = Field(1, ge=1, description="Data-parallel training actors (ranks)")
    checkpoint_every: int = Field(0, ge=0, description="Train steps; 0 saves at the end only")
    keep_checkpoints: int = Field(2, ge=1)


class EvaluationConfig(Frozen):
    """Held-out evaluation. It never asks a teacher."""

    every: int = Field(0, ge=0, description="Train steps between evaluations; 0 is ends only")
    samples: int = Field(1, ge=1, description="Sampled answers a question")
    temperature: float = Field(1.0, gt=0)


# --------------------------------------------------------------------------- the machine's side


class RayConfig(Frozen):
    """Where the student runs: a private head (address null) or an existing cluster."""

    address: str | None = Field(
        None, description="Dashboard of an existing cluster (http://host:8265); null starts a head"
    )
    num_cpus: int | None = Field(None, ge=1, description="CPUs of the private head; null is enough")
    object_store_mb: int = Field(200, ge=80)
    startup_limit_s: float = Field(180.0, gt=0)

    @field_validator("address")
    @classmethod
    def _http_address(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "")
        if value is not None and (parts.scheme not in ("http", "https") or not parts.hostname):
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


class ExperimentConfig(Frozen):
    """One on-policy-distillation experiment."""

    name: str = Field(pattern=NAME, max_length=64)
    description: str = ""
    seed: int = Field(1234, ge=0)
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
    def _devices_apart(self) -> Self:
        owner = {device: "the student" for device in self.student.devices if device != "cpu"}
        for teacher in self.opd.teachers if self.opd else ():
            for number, replica in enumerate(teacher.all_replicas):
                who = f"teacher {teacher.name!r}" + (f" replica {number}" if number else "")
                for device in replica.launch.devices if replica.launch else ():
                    if device != "cpu" and device in owner:
                        raise ValueError(
                            f"device {device} is given to {owner[device]} and to {who}: "
                            "give each its own (student.devices, launch.devices)"
                        )
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
