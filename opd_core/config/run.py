"""What is around an experiment: Ray, the devices' locks, tracking, costs, the run's own
directory."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator

from opd_core.config.values import Frozen, Text, is_http_url, without_password

MLFLOW_WORDS = ("databricks", "databricks-uc", "uc", "")
"""Tracking URIs that are neither a URL nor a path."""


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
        if set("@?#") & set(value or ""):  # not repeated: what stands there may be a secret
            raise ValueError(
                "the address may hold scheme, host, port and path only, as everybody can read it: "
                "a cluster that wants a token is told it by RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH=FILE in the environment of the flow, which Ray's client reads"
            )
        if value is not None and not is_http_url(value):
            raise ValueError(
                f"the student is submitted over Ray's Jobs API: expected the dashboard's URL "
                f"like http://head-node:8265, got {value!r}"
            )
        return value


class DevicesConfig(Frozen):
    """Devices belong to one run at a time: each run of this host locks its own."""

    wait_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=True,
        description="Seconds to queue for devices that another run of this host holds (.inf: for "
        "ever); null is 0 from the command line, and for ever in a deployment",
    )

    @field_serializer("wait_s", when_used="json")
    def _infinity_is_a_word(self, value: float | None) -> float | str | None:
        return "inf" if value == math.inf else value  # JSON has no number for it


class TrackingConfig(Frozen):
    """Where the journal is shipped to, and what is recorded beside metrics."""

    mlflow: bool = True
    mlflow_uri: str | None = Field(
        None,
        description="null is SQLite in the run root; left out it is $MLFLOW_TRACKING_URI, if that "
        "is set; one with a password in it is refused",
    )
    experiment: str = Field("opd", min_length=1)
    tags: dict[str, Text] = Field(default_factory=dict, description="Further tags of MLflow's run")
    tensorboard: bool = True
    system_metrics: bool = Field(True, description="Load of the host and of its GPUs (system/…)")
    rollouts_kept: int = Field(
        8, ge=0, description="Rollouts kept token by token in token_kl/: half the worst, half drawn"
    )
    rollouts_every: int = Field(
        10, ge=1, description="Train steps between those; the first and the last keep some too"
    )
    answer_pattern: str | None = Field(
        None,
        min_length=1,
        description="Regular expression whose last match, in the last 20,000 characters, begins "
        "the answer in a response; null is after `</think>`, else at the last `\\boxed{`, `####` "
        "or `Answer:`, else at the start",
    )

    @field_validator("answer_pattern")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from None
        return value

    @field_validator("mlflow_uri")
    @classmethod
    def _no_password_in_recipes(cls, value: str | None, info: ValidationInfo) -> str | None:
        """What is named on a command line is not written anywhere, and may hold one."""
        written = (info.context or {}).get("written", False)
        return without_password(value) if value is not None and written else value

    @field_validator("mlflow_uri")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """A relative path is one from the working directory, as ``run.root`` is. It becomes
        absolute: the end of a run may be tracked from another directory."""
        return None if value is None else _with_absolute_path(value)


class CostConfig(Frozen):
    """What a run's devices and teachers cost; metrics then tell money too."""

    currency: str = Field("USD", min_length=1)
    device_hour: float = Field(0.0, ge=0, description="An hour of one device of the student")
    teacher_device_hour: float | None = Field(
        None, ge=0, description="An hour of one device of a launched teacher; null is the same"
    )
    teacher_million_tokens: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="By teacher: a million tokens scored, prompts included; for those that are "
        "billed by token. Counted are those of the groups that train; siblings of failed rollouts, "
        "over-sampled and expired groups, retries and hedges are asked for and billed too and are "
        "not in it",
    )


class RunConfig(Frozen):
    """Where a run lives and how long its ending may take."""

    root: str = Field(
        "runs",
        min_length=1,
        description="Each run gets a directory under it; left out it is $OPD_RUNS, if set",
    )
    teardown_s: float = Field(60.0, gt=0, description="One deadline for the whole teardown")
    deadline_s: float | None = Field(
        None, gt=0, description="The run ends so long after its start, resumable; null is never"
    )
    end_with_worker: bool = Field(
        True, description="A flow run of a deployment ends when its worker is gone"
    )

    @property
    def root_dir(self) -> Path:
        """The root as an absolute path."""
        return Path(self.root).expanduser().absolute()


def _with_absolute_path(uri: str) -> str:
    """``sqlite:///mlflow.db``, ``file:mlruns`` and ``./mlruns`` with the path from the root; any
    other URI as it is."""
    for start in ("sqlite:///", "file:"):
        path = uri.removeprefix(start)
        if path != uri:
            elsewhere = path in ("", ":memory:") or path.startswith("/")
            return uri if elsewhere else f"{start}{Path(path).absolute()}"
    if ":" in uri or uri in MLFLOW_WORDS:
        return uri
    return str(Path(uri).expanduser().absolute())
