"""A CPU stand-in for ``lmdeploy.pytorch.engine.Engine`` that only scores, with transformers.

It has the methods that LMDeploy's serving side calls. Neither numerics nor scheduler nor memory
are LMDeploy's: what runs here tests LMDeploy's contract, not its engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lmdeploy.messages import (
    EngineOutput,
    GenerationConfig,
    PytorchEngineConfig,
    ResponseType,
    ScheduleMetrics,
)
from lmdeploy.utils import get_logger

LABEL = (
    "CPU STAND-IN for LMDeploy's engine: HTTP, checks, RPC and processes are LMDeploy's; numbers, "
    "scheduler and memory are not (transformers, float32, one sequence at a time)"
)

Row = dict[int, float]


class CpuEngine:
    """A causal model of transformers behind the interface of LMDeploy's engine."""

    def __init__(self, model_path: str, engine_config: PytorchEngineConfig) -> None:
        from transformers import AutoModelForCausalLM

        get_logger("lmdeploy").warning(LABEL)
        self.engine_config = engine_config
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._forward = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self.active = 0
        self.finished = 0

    @classmethod
    def from_pretrained(
        cls, model_path: str, engine_config: PytorchEngineConfig | None = None, **more: Any
    ) -> Any:
        """LMDeploy's own engine process if the configuration asks for one, else the model here."""
        config = engine_config or PytorchEngineConfig()
        if config.enable_mp_engine:
            from lmdeploy.pytorch.engine.mp_engine import build_mp_engine

            return build_mp_engine(
                backend=config.mp_engine_backend,
                model_path=model_path,
                engine_config=config,
                **more,
            )
        return cls(model_path, config)

    def create_instance(self, cuda_stream_id: int = 0) -> CpuInstance:
        """A handle for one request at a time."""
        return CpuInstance(self)

    async def score(self, ids: Sequence[int], start: int, top: int) -> list[Row]:
        """One row per token of ``ids[start + 1:]``: its score, and those of the ``top`` best."""
        self.active += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._forward, self._rows, ids, start, top)
        finally:
            self.active -= 1
            self.finished += 1

    @torch.inference_mode()
    def _rows(self, ids: Sequence[int], start: int, top: int) -> list[Row]:
        scores = self._model(input_ids=torch.tensor([list(ids)])).logits[0, start:-1].float()
        if self.engine_config.logprobs_mode == "raw_logprobs":
            scores = scores.log_softmax(-1)
        best = scores.topk(top)
        own = scores.gather(-1, torch.tensor(ids[start + 1 :]).unsqueeze(-1)).squeeze(-1)
        rows = zip(
            ids[start + 1 :], own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
        return [dict(zip(i, v, strict=True)) | {token: score} for token, score, i, v in rows]

    def get_engine_config(self) -> PytorchEngineConfig:
        """As it was given."""
        return self.engine_config

    def get_schedule_metrics(self) -> ScheduleMetrics:
        """What LMDeploy's health check looks at."""
        return ScheduleMetrics(active_seqs=self.active, scheduler_tick=self.finished)

    def get_local_health_status(self) -> dict[str, Any]:
        """Alive as long as it answers."""
        return {
            "alive": True,
            "message": "the CPU stand-in of the engine is healthy",
            "schedule_metrics": self.get_schedule_metrics(),
        }

    async def get_health_status(self) -> dict[str, Any]:
        """The same, for an engine without a process of its own."""
        return self.get_local_health_status()

    def start_loop(self) -> None:
        """There is no loop: each request calls the model."""

    def end_session(self, session_id: int) -> bool:
        """A session keeps nothing here."""
        return True

    def close(self) -> None:
        """End after the forward that runs."""
        self._forward.shutdown(wait=False, cancel_futures=True)

    async def wait_tasks(self) -> None:
        """Nothing runs but requests."""


class CpuInstance:
    """One request at a time of the engine."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine

    async def async_stream_infer(
        self,
        session_id: int,
        input_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        notify_add_msg_func: Callable[[], None] | None = None,
        **more: Any,
    ) -> AsyncIterator[EngineOutput]:
        """The scores in one output; a request that generates is not supported."""
        if notify_add_msg_func is not None:
            notify_add_msg_func()
        if gen_config is None or gen_config.logprob_start_len < 0:
            yield EngineOutput(ResponseType.NOT_SUPPORTED, [])
            return
        rows = await self._engine.score(
            input_ids, gen_config.logprob_start_len, gen_config.logprobs or 0
        )
        yield EngineOutput(ResponseType.FINISH, [], logprobs=rows)

    async def async_end(self, session_id: int) -> None:
        """Nothing is kept of a session."""

    async def async_cancel(self, session_id: int) -> None:
        """A forward cannot be interrupted, only left."""
