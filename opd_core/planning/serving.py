"""What a server needs on each of its devices, by the rules of the server itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from opd_core.config import ExperimentConfig
from opd_core.planning.items import PROCESS_BYTES, Bound, Item, Moment, count, size
from opd_core.planning.shapes import BYTES, ModelShape
from opd_core.serving.commands import CPU_POOL_LIMIT, CPU_POOL_TOKENS, uses_gpu
from opd_core.serving.servers import Server

AWAKE: tuple[Moment, ...] = ("sampling",)
MIB = 2**20
SGLANG_PREFILL, SGLANG_ROWS = 8192, 256
"""What SGLang 0.5.23 chooses by itself on cards of 60 to 160 GiB with TP below 4."""
LMDEPLOY_PREFILL, LMDEPLOY_ROWS, LMDEPLOY_SHARE = 8192, 1024, 0.8
"""What LMDeploy 0.18.0 chooses by itself on H100 and H200 (fewer rows on others)."""
LMDEPLOY_CPU_ROWS = 8
"""What its command says of a teacher without a GPU."""
EMBEDDED_PREFILL, EMBEDDED_LOGITS = 16384, 2 * 4 * 2**26
"""The embedded server's: tokens of a forward, and bytes of logits with their copy."""


@dataclass(frozen=True, slots=True)
class ServerNeeds:
    """Lines of one device, and what the server must fit into its own part."""

    items: tuple[Item, ...]
    bounds: tuple[Bound, ...] = ()
    rollouts: float | None = None
    """Rollouts of full length that its KV cache holds; None where it takes what it needs."""


def server_needs(
    server: Server, config: ExperimentConfig, shape: ModelShape, card: int
) -> ServerNeeds:
    """On one device of ``card`` bytes."""
    build = {"sglang": _sglang, "lmdeploy": _lmdeploy, "embedded": _embedded}[server.backend]
    needs = build(server, config, shape, card)
    if not uses_gpu(server.launch):
        return needs
    process = Item(server.who, "process", PROCESS_BYTES, "CUDA context and NCCL, by rule")
    return replace(needs, items=(*needs.items, process))


def _sglang(server: Server, config: ExperimentConfig, shape: ModelShape, card: int) -> ServerNeeds:
    """``--mem-fraction-static`` is (weights + KV cache) / memory that was free before the model was
    loaded; a server whose weights leave nothing of it does not start (SGLang 0.5.23,
    ``mem_cache/kv_cache_configurator.py``). The rest is for activations and CUDA graphs, for which
    its authors reckon 512 MiB + 1.5 MiB for each token of a chunk + 128 MiB for each rank + 2 MiB
    for each sequence decoded together (``arg_groups/memory_hook.py``)."""
    launch = server.launch
    weights, dtype = _weights(server, shape)
    if not uses_gpu(launch):
        context = launch.context_length or 0
        rows = server.sampling.max_rows if server.sampling else 0
        tokens = max(CPU_POOL_TOKENS, min(rows * context, CPU_POOL_LIMIT), context)
        return ServerNeeds((weights, _cache(server, shape, dtype, tokens)))
    one = _cache(server, shape, dtype, config.rollout_tokens, "KV cache of one rollout")
    awake = AWAKE if server.sampling and server.sampling.shares_devices else one.moments
    prefill = launch.prefill_tokens or SGLANG_PREFILL
    rows = min(SGLANG_ROWS, server.sampling.max_rows) if server.sampling else SGLANG_ROWS
    spare = Item(
        server.who,
        "activations and CUDA graphs",
        int((512 + 1.5 * prefill + 128 * launch.tp_size) * MIB),
        f"512 MiB + {prefill:,} tokens of a chunk x 1.5 MiB + TP {launch.tp_size} x 128 MiB",
        awake,
    )
    graphs = Item(server.who, "CUDA graphs", rows * 2 * MIB, f"{rows} sequences x 2 MiB")
    if launch.memory_fraction is None:  # it takes what it finds to be free
        held = (replace(weights, moments=awake), replace(one, moments=awake))
        return ServerNeeds((*held, spare, graphs))
    limit = int(launch.memory_fraction * card)
    how = f"{server.settings}.memory_fraction {launch.memory_fraction} x {size(card)}"
    static = Item(server.who, "weights and KV cache", limit, how, awake)
    left = limit - weights.bytes
    return ServerNeeds(
        (static, spare, graphs),
        (Bound(server.who, (weights, one), limit, how),),
        max(0.0, left / one.bytes),
    )


def _lmdeploy(
    server: Server, config: ExperimentConfig, shape: ModelShape, card: int
) -> ServerNeeds:
    """``--cache-max-entry-count`` is the KV cache's share of what is free after the weights and a
    reserve of (prefill tokens + 2 x rows) x vocabulary x 2 bytes (LMDeploy 0.18.0,
    ``pytorch/engine/executor/base.py``). Scoring makes the logits of a whole chunk and their
    log-softmax (``model_agent/agent.py``), which may be more than that reserve. Without a GPU,
    where only a stand-in of its engine runs, the cache is that of all its rows."""
    launch = server.launch
    weights, dtype = _weights(server, shape)
    if not uses_gpu(launch):
        rows = server.sampling.max_rows if server.sampling else LMDEPLOY_CPU_ROWS
        tokens = rows * config.rollout_tokens
        return ServerNeeds((weights, _cache(server, shape, dtype, tokens)))
    prefill = launch.prefill_tokens or LMDEPLOY_PREFILL
    rows = server.sampling.max_rows if server.sampling else LMDEPLOY_ROWS
    share = launch.memory_fraction or LMDEPLOY_SHARE
    one = _cache(server, shape, dtype, config.rollout_tokens, "KV cache of one rollout")
    reserve = (prefill + 2 * rows) * shape.vocabulary * 2
    free = max(0, card - weights.bytes - reserve)
    limit = int(share * free)
    how = (
        f"{server.settings}.memory_fraction {share} x ({size(card)} - {size(weights.bytes)} of "
        f"weights - {size(reserve)} of reserve)"
    )
    awake = AWAKE if server.sampling and server.sampling.shares_devices else one.moments
    logits = Item(
        server.who,
        "logits of a chunk and their log-softmax",
        prefill * shape.vocabulary * 8,
        f"{prefill:,} tokens x {shape.vocabulary:,} x 2 x 4 bytes",
        awake,
    )
    held = (
        replace(weights, moments=awake),
        Item(server.who, "KV cache", limit, how, awake),
        logits,
    )
    return ServerNeeds(held, (Bound(server.who, (one,), limit, how),), limit / one.bytes)


def _embedded(
    server: Server, config: ExperimentConfig, shape: ModelShape, card: int
) -> ServerNeeds:
    """One padded forward at a time without a cache; of a layer's activations two lie side by
    side."""
    weights, dtype = _weights(server, shape)
    tokens = max(server.launch.prefill_tokens or EMBEDDED_PREFILL, config.rollout_tokens)
    width = 4 * shape.hidden + 2 * (shape.query + 2 * shape.key_value) + 3 * shape.active
    forward = Item(
        server.who,
        "activations",
        tokens * width * BYTES[dtype],
        f"{tokens:,} tokens x {width:,} x {BYTES[dtype]} bytes",
    )
    logits = Item(server.who, "logits", EMBEDDED_LOGITS, "2 x 4 bytes x 2^26")
    return ServerNeeds((weights, forward, logits))


def _weights(server: Server, shape: ModelShape) -> tuple[Item, str]:
    launch = server.launch
    dtype = launch.dtype or ("float32" if server.backend == "embedded" else shape.dtype)
    over = f" / TP {launch.tp_size}"
    if shape.weights_bytes is not None:
        found, how = shape.weights_bytes, "its quantised files"
    else:
        found = shape.parameters * BYTES[dtype]
        how = f"{count(shape.parameters)} parameters x {BYTES[dtype]} bytes"
    return Item(server.who, "weights", found // launch.tp_size, how + over), dtype


def _cache(
    server: Server, shape: ModelShape, dtype: str, tokens: int, what: str = "KV cache"
) -> Item:
    """Keys and values of ``tokens`` tokens on one rank, which has its share of the heads."""
    ranks, each = server.launch.tp_size, shape.kv_bytes(dtype)
    how = f"{tokens:,} tokens x {each:,} bytes / TP {ranks}"
    return Item(server.who, what, tokens * each // ranks, how)
