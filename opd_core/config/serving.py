"""Servers that a run launches, whatever they serve: a teacher, or the student."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opd_core.config.values import (
    Arguments,
    Devices,
    Dtype,
    Environment,
    Frozen,
    Interpreter,
    ModelOrPath,
)

Backend = Literal["sglang", "lmdeploy", "embedded"]
CONTEXT_MARGIN: dict[Backend, int] = {"sglang": 7, "embedded": 7, "lmdeploy": 1}
"""Tokens that a backend keeps back from its context length (measured on the real servers)."""


class ServerConfig(Frozen):
    """How a server is launched, whatever its model."""

    python: Interpreter | None = Field(
        None, description="Interpreter of the server's own environment; null is this one"
    )
    dtype: Dtype | None = Field(None, description="null leaves it to the server")
    context_length: int | None = Field(None, ge=8, description="Tokens; null is the model's own")
    tp_size: int = Field(1, ge=1, description="Tensor-parallel size")
    memory_fraction: float | None = Field(None, gt=0, lt=1, description="Of the device's memory")
    prefill_tokens: int | None = Field(None, ge=1, description="Chunked prefill, in tokens")
    cpu_threads: int | None = Field(None, ge=1, description="Compute threads on a CPU")
    startup_limit_s: float = Field(1200.0, gt=0, description="From start to the first answer")
    max_restarts: int = Field(
        3, ge=0, description="Times in a run that a dead, hung or changed server is started again"
    )
    extra_args: Arguments = Field((), description="Appended to the server's command line")
    env: Environment = Field(
        default_factory=dict,
        description="Added to its environment; a secret as env:NAME or block:NAME",
    )


class LaunchConfig(ServerConfig):
    """A server that this run starts, owns and ends: its model, and where it runs."""

    model: ModelOrPath = Field(description="Model directory that the server loads")
    devices: Devices = Field(("cpu",), description="Devices of the server, on the flow's host")
    port: int | None = Field(None, ge=1, le=65535, description="null takes a free port")
