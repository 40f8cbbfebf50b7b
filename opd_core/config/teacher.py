"""The teacher side: servers, the replicas behind a teacher's name, how teachers enter training."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    SecretStr,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from opd_core.config.serving import Backend, LaunchConfig
from opd_core.config.values import KEY_REFERENCE, Endpoint, Frozen, Name

LOOPBACK = ("127.0.0.1", "localhost")


def _check_server(endpoint: str | None, backend: Backend, launch: LaunchConfig | None) -> None:
    if launch is not None:
        _check_launch(backend, launch)
        if endpoint is not None:
            _check_address(endpoint, launch)
    elif endpoint is None:
        raise ValueError("name an 'endpoint' (external server) or a 'launch' (started by us)")


def _check_address(endpoint: str, launch: LaunchConfig) -> None:
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


def _check_launch(backend: Backend, launch: LaunchConfig) -> None:
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

    endpoint: Endpoint | None = Field(None, description="http://host:port; null with a launch")
    backend: Backend = Field("sglang", description="The wire format of the server")
    launch: LaunchConfig | None = None

    @model_validator(mode="after")
    def _sound(self) -> Self:
        _check_server(self.endpoint, self.backend, self.launch)
        return self


class OPDTeacherConfig(Frozen):
    """A frozen model that scores. ``endpoint``, ``backend`` and ``launch`` on the teacher itself
    mean one replica; several stand under ``replicas``."""

    name: Name
    endpoint: Endpoint | None = None
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
    max_tokens_in_flight: int = Field(
        2**20, ge=1, description="Tokens of those requests together; a longer one goes alone"
    )
    adaptive: bool = Field(
        True, description="Lower the concurrency when the server is overloaded, raise it again"
    )
    target_latency_s: float | None = Field(
        None, gt=0, description="Slower answers mean overload; null is a quarter of the time-out"
    )
    hedge: bool = Field(
        False, description="Ask a second replica when an answer takes longer than the p99"
    )
    away_limit_s: float = Field(
        60.0,
        ge=0,
        description="How long a teacher that cannot be asked is waited for before the run stops; "
        "a launched one gets the time of its restart on top",
    )
    hang_limit_s: float = Field(
        300.0,
        gt=0,
        description="No health, or requests in flight and not one answer, for so long: a launched "
        "server is restarted. Keep it above the slowest answer",
    )
    canary_every: int = Field(
        1, ge=0, description="Train steps between scorings of known sequences; 0 is never"
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

    @field_serializer("api_key", when_used="unless-none")
    def _never_write_a_plain_key(self, value: SecretStr) -> str:
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
            _check_server(self.endpoint, self.backend, self.launch)
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


class FailureBudgetConfig(Frozen):
    """How many rollouts may fail in scoring before sampling pauses until the teacher has proven
    itself again."""

    ratio: float = Field(0.2, gt=0, le=1, description="Failed rollouts / scored ones, a teacher")
    window: int = Field(64, ge=1, description="Of the last so many rollouts")


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
    failure_budget: FailureBudgetConfig = FailureBudgetConfig()
    score_store: str | None = Field(
        None, min_length=1, description="Folder that keeps scores for later runs; null keeps none"
    )
    kl_clamp: float | None = Field(
        None, gt=0, description="Symmetric clamp of k per token, in nats; null is off"
    )
    kl_baseline: bool = Field(
        False, description="Subtract the batch mean of rollout_logprobs - teacher_logprobs from k"
    )

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.task_adv_weight == 0 and self.opd_adv_weight == 0:
            raise ValueError(
                "task_adv_weight and opd_adv_weight are both 0, so nothing would be learned: "
                "raise one of them (to score and log only, use task_adv_weight: 1)"
            )
        return self

    @model_validator(mode="after")
    def _every_teacher_in_its_place(self) -> Self:
        names = [teacher.name for teacher in self.teachers]
        if len({teacher.key_variable for teacher in self.teachers}) < len(names):
            raise ValueError(
                "teacher names must differ, and not in case or punctuation only (they name the "
                f"environment variables of the keys): {', '.join(names)}"
            )
        used = set(self.data_source_teacher_map.values())
        if self.default_teacher is not None:
            used.add(self.default_teacher)
        if not used:
            raise ValueError(
                "say which teacher scores which data: write "
                f"data_source_teacher_map: {{<data_source>: {names[0]}}} "
                f"or default_teacher: {names[0]}"
            )
        unknown, idle = sorted(used - set(names)), sorted(set(names) - used)
        if unknown:
            raise ValueError(
                f"no teacher is named {unknown[0]!r}; the teachers are: {', '.join(names)}"
            )
        if idle:
            raise ValueError(
                f"teacher {idle[0]!r} is used by no data_source: map one to it, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _known_models_in_the_store(self) -> Self:
        replicas = ((t.name, r) for t in self.teachers for r in t.all_replicas)
        external = next((name for name, replica in replicas if replica.launch is None), None)
        if self.score_store is not None and external is not None:
            raise ValueError(
                f"score_store: teacher {external!r} has a server that this run does not launch, so "
                "its weights are not known and its scores cannot be kept for other runs: launch "
                "it, or write score_store: null"
            )
        idle = next((t.name for t in self.teachers if not t.canary_every), None)
        if self.score_store is not None and idle is not None:
            raise ValueError(
                f"score_store: teacher {idle!r} has canary_every: 0, and only scores between two "
                "right canaries are kept: write canary_every: 1, or score_store: null"
            )
        return self

    def teacher_of(self, data_source: str) -> str | None:
        """Name of the teacher that scores ``data_source``; None if nobody does."""
        return self.data_source_teacher_map.get(data_source, self.default_teacher)
