"""A CPU stand-in for ``lmdeploy.pytorch.engine.Engine``: scores, samples, takes weights.

It has the methods that LMDeploy's serving side calls. Neither numerics nor scheduler nor memory
are LMDeploy's: what runs here tests LMDeploy's contract, not its engine. It reads the same requests
for weights as LMDeploy's ``ModelAgent``, from host memory in place of CUDA IPC and by gloo in place
of NCCL.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from lmdeploy.messages import (
    EngineOutput,
    GenerationConfig,
    PytorchEngineConfig,
    ResponseType,
    ScheduleMetrics,
)
from lmdeploy.utils import get_logger, init_custom_process_group
from opd_cpu_sampling import Sampled

LABEL = (
    "CPU STAND-IN for LMDeploy's engine: HTTP, checks, RPC and processes are LMDeploy's; numbers, "
    "scheduler and memory are not (transformers, float32, one token of one sequence at a time)"
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
        self._sampled: dict[int, Sampled] = {}
        self._groups: dict[str, Any] = {}
        self.active = 0
        self.ticks = 0

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
            rows: list[Row] = await self._in_turn(self._rows, ids, start, top)
            return rows
        finally:
            self.active -= 1

    async def sample(
        self, session_id: int, ids: Sequence[int], config: GenerationConfig
    ) -> AsyncIterator[EngineOutput]:
        """One output a token, as LMDeploy's engine gives them; the last says how it ended."""
        limit = self._model.config.max_position_embeddings
        mode = self.engine_config.logprobs_mode
        sequence = Sampled(self._model, ids, config, mode, self.engine_config.session_len or limit)
        self._sampled[session_id] = sequence
        self.active += 1
        try:
            while not sequence.finished and not sequence.cancelled:
                token, row = await self._in_turn(sequence.step)
                status = ResponseType.FINISH if sequence.finished else ResponseType.SUCCESS
                yield EngineOutput(status, [token], logprobs=[row] if row else None)
            if not sequence.finished:
                yield EngineOutput(ResponseType.CANCEL, [])
        finally:
            self.active -= 1
            self._sampled.pop(session_id, None)

    def cancel(self, session_id: int) -> ResponseType:
        """End what is sampled for a session after the token that is on its way."""
        if session_id not in self._sampled:
            return ResponseType.SESSION_NOT_EXIST
        self._sampled[session_id].cancelled = True
        return ResponseType.SUCCESS

    async def _in_turn(self, work: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        done = await loop.run_in_executor(self._forward, work, *arguments)
        self.ticks += 1
        return done

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

    def update_params(self, request: Any) -> None:
        """Take a bucket of weights by handle, as LMDeploy's ``ModelAgent.update_params`` does."""
        if request.load_format is not None:
            raise NotImplementedError(f"load_format {request.load_format} in the CPU stand-in")
        handles = request.serialized_named_tensors
        handle = handles[0] if isinstance(handles, list) else handles
        entries = ForkingPickler.loads(base64.b64decode(handle))
        weights = [(name, function(*arguments).clone()) for name, (function, arguments) in entries]
        self._forward.submit(self._load, weights).result()

    async def init_weights_update_group(self, request: Any) -> tuple[bool, str]:
        """Join the group of an external trainer."""
        try:
            self._groups[request.group_name] = await asyncio.to_thread(
                init_custom_process_group,
                backend=request.backend,
                init_method=f"tcp://{request.master_address}:{request.master_port}",
                world_size=request.world_size,
                rank=request.rank_offset,
                group_name=request.group_name,
            )
        except Exception as error:  # told, as LMDeploy does
            return False, f"Failed to initialize weights update group: {error}"
        return True, "Succeeded to initialize weights update group."

    async def update_weights_from_distributed(self, request: Any) -> tuple[bool, str]:
        """Take a bucket of weights by broadcast."""
        group = self._groups.get(request.group_name)
        if group is None:
            return False, f"group {request.group_name!r} not initialized"
        named = zip(request.names, request.dtypes, request.shapes, strict=True)
        weights = [(n, torch.empty(shape, dtype=getattr(torch, kind))) for n, kind, shape in named]
        for _, tensor in weights:
            await asyncio.to_thread(dist.broadcast, tensor, src=0, group=group)
        await self._in_turn(self._load, weights)
        return True, "Succeeded to update parameter online."

    async def destroy_weights_update_group(self, request: Any) -> tuple[bool, str]:
        """Leave the group."""
        dist.destroy_process_group(self._groups.pop(request.group_name))
        return True, f"Succeeded to destroy group {request.group_name!r}."

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        unknown = self._model.load_state_dict(dict(weights), strict=False).unexpected_keys
        if unknown:
            raise ValueError(f"the model has no weights {unknown[:3]}")

    async def sleep(self, level: int = 1) -> None:
        """At level 2 the weights are lost: numbers that nobody can take for good until new ones
        come."""
        if level == 2:
            for parameter in self._model.parameters():
                parameter.data.fill_(float("nan"))

    def wakeup(self, tags: list[str] | None = None) -> None:
        """Nothing was given away but the weights."""

    def get_engine_config(self) -> PytorchEngineConfig:
        """As it was given."""
        return self.engine_config

    def get_schedule_metrics(self) -> ScheduleMetrics:
        """What LMDeploy's health check looks at."""
        return ScheduleMetrics(active_seqs=self.active, scheduler_tick=self.ticks)

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
        """The scores in one output, or the sampled tokens one by one."""
        if notify_add_msg_func is not None:
            notify_add_msg_func()
        if gen_config is None or gen_config.repetition_penalty != 1:
            yield EngineOutput(ResponseType.NOT_SUPPORTED, [])
        elif gen_config.logprob_start_len >= 0:
            start, top = gen_config.logprob_start_len, gen_config.logprobs or 0
            rows = await self._engine.score(input_ids, start, top)
            yield EngineOutput(ResponseType.FINISH, [], logprobs=rows)
        else:
            async for output in self._engine.sample(session_id, input_ids, gen_config):
                yield output

    async def async_end(self, session_id: int) -> ResponseType:
        """Nothing is kept of a session."""
        return ResponseType.SUCCESS

    async def async_cancel(self, session_id: int) -> ResponseType:
        """End what is sampled; a scoring forward cannot be interrupted, only left."""
        return self._engine.cancel(session_id)
