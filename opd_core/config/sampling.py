"""Who samples the student, how weights get there, and how far sampling may be ahead of training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from opd_core.config.serving import ServerConfig
from opd_core.config.values import Devices, Frozen

SamplingEngine = Literal["transformers", "sglang", "lmdeploy"]


class SamplingConfig(Frozen):
    """How the student samples. With OPD on only the plain policy is accepted."""

    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, description="null is off")
    repetition_penalty: float = Field(1.0, gt=0)
    min_tokens: int = Field(0, ge=0)
    engine: SamplingEngine = Field(
        "transformers", description="In the sampling actors, or servers that the run launches"
    )
    actors: int = Field(
        1, ge=1, description="Sampling actors, or servers, each with a copy of the student"
    )
    max_rows: int = Field(
        128, ge=1, description="Sequences that one actor or server decodes together"
    )
    max_restarts: int = Field(
        3, ge=0, description="Dead sampling actors that are replaced in a job; servers have theirs"
    )
    server: ServerConfig | None = Field(
        None, description="Of the servers that sample; null takes every default"
    )
    devices: Devices | None = Field(
        None,
        description="Of the servers, out of student.devices, server.tp_size each: the rest trains; "
        "null shares them all with training",
    )
    weight_sync: Literal["auto", "disk", "tensor", "distributed"] = Field(
        "auto",
        description="How weights reach the servers: over files, by handle on the same device, or "
        "in a process group; auto is disk for SGLang, for LMDeploy what its devices allow",
    )
    sync_folder: str | None = Field(
        None, min_length=1, description="For weights on their way; null is the run directory"
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Train steps by which the weights that sampled a token may be behind those "
        "that it trains; so many batches are sampled ahead. 0 is exactly on-policy",
    )
    over_sampling: float = Field(
        1.0,
        ge=1,
        description="Groups under way for a train step, over those that it needs, where that is "
        "more than 1 + max_staleness; on-policy what is left over is given up",
    )

    @model_validator(mode="after")
    def _settings_of_servers(self) -> Self:
        if self.engine == "transformers":
            given = {"server": self.server, "devices": self.devices}
            named = [name for name, value in given.items() if value is not None]
            if self.weight_sync != "auto":
                named.append("weight_sync")
            if named:
                raise ValueError(
                    f"{', '.join(named)}: only servers have that, and engine is transformers: "
                    "remove it, or write engine: sglang"
                )
        elif self.engine == "lmdeploy" and self.weight_sync == "disk":
            raise ValueError("weight_sync: LMDeploy reads no weights from disk: write tensor")
        elif self.engine == "lmdeploy" and self.server and self.server.dtype == "float32":
            raise ValueError("server.dtype: LMDeploy has no float32; write bfloat16 or float16")
        needed = self.server_devices
        if self.devices is not None and len(self.devices) != needed:
            raise ValueError(
                f"devices: {len(self.devices)} for {self.actors} servers (sampling.actors) of "
                f"{self.tp_size} (server.tp_size) each: name {needed}, or change sampling.actors"
            )
        return self

    @property
    def tp_size(self) -> int:
        """Devices of one server."""
        return self.server.tp_size if self.server else 1

    @property
    def server_devices(self) -> int:
        """Devices of all servers together."""
        return self.actors * self.tp_size

    @property
    def by_servers(self) -> bool:
        """Whether servers sample, and no actors."""
        return self.engine != "transformers"

    @property
    def sync_by(self) -> Literal["disk", "tensor", "distributed"]:
        """How weights reach the servers."""
        if self.weight_sync != "auto":
            return self.weight_sync
        if self.engine == "sglang":
            return "disk"
        return "tensor" if self.devices is None else "distributed"

    @property
    def on_policy(self) -> bool:
        """Whether every trained token comes from the very weights that it trains."""
        return self.max_staleness == 0

    @property
    def unshaped(self) -> bool:
        """True where nothing but the temperature changes the model's distribution."""
        shaping = (self.top_p, self.top_k, self.repetition_penalty, self.min_tokens)
        return shaping == (1.0, None, 1.0, 0)

    @property
    def plain_policy(self) -> bool:
        """True where the sampled distribution is the model's own."""
        return self.temperature == 1.0 and self.unshaped
