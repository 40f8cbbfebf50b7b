"""What the student needs on each device that trains it, and what sampling actors need."""

from __future__ import annotations

from opd_core.config import ExperimentConfig
from opd_core.planning.items import PROCESS_BYTES, Item, Moment, count
from opd_core.planning.shapes import BYTES, ModelShape

TRAINER = "training actor"
SAMPLER = "sampling actor"
BACKWARD: tuple[Moment, ...] = ("training",)
UPDATE: tuple[Moment, ...] = ("update",)
SAVED = (8, 5, 4)
"""Numbers that a layer's autograd keeps of a token: so many times the hidden size, the width of
queries, keys and values together, and the width of the MLP. Counted on transformers' Qwen3 in bf16
with hooks on what autograd saves (the norms' fp32 among it, the masks of dropout not: there is
none); Korthikanti et al. 2022, section 4, derive the like for GPT."""


def training_items(config: ExperimentConfig, shape: ModelShape, *, gpu: bool) -> list[Item]:
    """On one device, of one training actor.

    Mixed-precision Adam: 16 bytes a parameter (fp32 weight, gradient and two moments; Rajbhandari
    et al. 2020, "ZeRO", section 3.1, where the fp16 copies are two of them), divided by the ranks
    that share one copy (FSDP2); the gradient lives from the backward pass to the update.
    """
    found = [
        *_states(config, shape, gpu=gpu),
        *_passing(config, shape),
        *_activations(config, shape),
        *_logits(config, shape),
    ]
    if gpu:
        found.append(Item(TRAINER, "process", PROCESS_BYTES, "CUDA context and NCCL, by rule"))
    return found


def sampling_items(config: ExperimentConfig, shape: ModelShape, *, gpu: bool) -> list[Item]:
    """On one device, of one sampling actor: it decodes ``max_rows`` rollouts, and its KV cache
    grows by an eighth at a time (:mod:`opd_core.sampling.slots`). What it has once taken, its
    allocator keeps beside training."""
    student, sampling = config.student, config.sampling
    width, rows = BYTES[student.dtype], sampling.max_rows
    per_token = shape.kv_bytes(student.dtype)
    cache = rows * config.rollout_tokens * per_token * 9 // 8
    logits = rows * shape.vocabulary * 24
    found = [
        Item(
            SAMPLER,
            "weights",
            shape.parameters * width,
            f"{count(shape.parameters)} parameters x {width} bytes",
        ),
        Item(
            SAMPLER,
            "KV cache",
            cache,
            f"{rows} rows x {config.rollout_tokens:,} tokens x {per_token:,} bytes x 9/8",
        ),
        Item(SAMPLER, "logits", logits, f"{rows} rows x {shape.vocabulary:,} x 24 bytes"),
    ]
    if gpu:
        found.append(Item(SAMPLER, "process", PROCESS_BYTES, "CUDA context, by rule"))
    return found


def _states(config: ExperimentConfig, shape: ModelShape, *, gpu: bool) -> list[Item]:
    ranks = shard_ranks(config)
    total = shape.parameters
    trained = total if config.student.lora is None else _adapters(config, shape)
    over = f" / {ranks} ranks" if ranks > 1 else ""
    kept = (4 * total + 8 * trained) // ranks
    if config.student.lora is None:
        how = f"{count(total)} parameters x 12 bytes{over}"
    else:
        how = f"({count(total)} parameters x 4 bytes + {count(trained)} of adapters x 8){over}"
    slopes = f"{count(trained)} parameters x 4 bytes{over}"
    found = [
        Item(TRAINER, "fp32 weights and Adam's moments", kept, how),
        Item(TRAINER, "gradients", 4 * trained // ranks, slopes, (*BACKWARD, *UPDATE)),
    ]
    if gpu:
        # There torch's AdamW works on all parameters at once ("foreach"), with one more set of
        # them; on a CPU one parameter after the other.
        found.append(
            Item(TRAINER, "temporaries of the update", 4 * trained // ranks, slopes, UPDATE)
        )
    if config.training.reference_kl_weight > 0 and config.student.lora is None:
        how = f"{count(total)} parameters x 4 bytes{over}"
        found.append(Item(TRAINER, "the reference's weights", 4 * total // ranks, how))
    return found


def _passing(config: ExperimentConfig, shape: ModelShape) -> list[Item]:
    """Copies of the weights that a forward and backward pass needs beside the optimizer's."""
    width, ranks = BYTES[config.student.dtype], shard_ranks(config)
    if ranks == 1:
        if width == 4:
            return []
        how = f"{count(shape.parameters)} parameters x {width} bytes"
        copies = shape.parameters * width
        return [Item(TRAINER, "autocast's copies of the weights", copies, how, BACKWARD)]
    # FSDP keeps the root (embedding and head) whole from its forward to the end of the backward
    # pass, and of the layers the one that computes and the one that comes next.
    root, layers = shape.embedding_parameters, 2 * shape.layer_parameters
    gathered = Item(
        TRAINER,
        "gathered weights",
        width * (root + layers),
        f"({count(root)} of embedding and head + {count(layers)} of 2 layers) x {width} bytes",
        BACKWARD,
    )
    if config.student.lora is not None:
        return [gathered]
    reduced = Item(
        TRAINER,
        "gradients on their way to the ranks",
        (width + 4) * root,
        f"{count(root)} of embedding and head x ({width} + 4) bytes",
        BACKWARD,
    )
    return [gathered, reduced]


def _activations(config: ExperimentConfig, shape: ModelShape) -> list[Item]:
    tokens, width = forward_tokens(config), BYTES[config.student.dtype]
    of_hidden, of_attention, of_mlp = SAVED
    attention = shape.query + 2 * shape.key_value
    numbers = of_hidden * shape.hidden + of_attention * attention + of_mlp * shape.active
    layer, layers = tokens * numbers * width, shape.layers
    each = f"{tokens:,} tokens x {numbers:,} x {width} bytes"
    slopes = tokens * (2 * shape.hidden + 3 * shape.active) * width
    going = Item(
        TRAINER,
        "gradients within a layer",
        slopes,
        f"{tokens:,} tokens x (2 x {shape.hidden:,} + 3 x {shape.active:,}) x {width} bytes",
        BACKWARD,
    )
    if not config.training.gradient_checkpointing:
        how = f"{layers} layers x {each}"
        return [Item(TRAINER, "activations", layers * layer, how, BACKWARD), going]
    inputs = layers * tokens * shape.hidden * width
    how = f"{layers} layers x {tokens:,} tokens x {shape.hidden:,} x {width} bytes"
    return [
        Item(TRAINER, "checkpointed inputs of the layers", inputs, how, BACKWARD),
        Item(TRAINER, "activations of one layer", layer, each, BACKWARD),
        going,
    ]


def _logits(config: ExperimentConfig, shape: ModelShape) -> list[Item]:
    """Of the chunked loss: :func:`opd_core.objective.logprobs.token_logprobs` says why so many."""
    chunk, width = config.training.logprob_chunk_tokens, BYTES[config.student.dtype]
    each = 4 + (width if width < 4 else 0)
    found = [
        Item(
            TRAINER,
            "logits of a chunk",
            chunk * shape.vocabulary * each,
            f"{chunk:,} tokens x {shape.vocabulary:,} x {each} bytes",
            BACKWARD,
        )
    ]
    if config.student.lora is None:
        found.append(
            Item(
                TRAINER,
                "the head's gradient in fp32",
                shape.vocabulary * shape.hidden * 4,
                f"{shape.vocabulary:,} x {shape.hidden:,} x 4 bytes",
                BACKWARD,
            )
        )
    return found


def _adapters(config: ExperimentConfig, shape: ModelShape) -> int:
    assert config.student.lora is not None
    return shape.adapter_parameters(config.student.lora.rank)


def shard_ranks(config: ExperimentConfig) -> int:
    """Ranks that share one copy of weights and optimizer."""
    return config.training.shard_ranks or config.training.actors


def forward_tokens(config: ExperimentConfig) -> int:
    """Most tokens of one forward on a rank: ``micro_batch_tokens``, or all there are in a batch; a
    rollout that is longer goes alone."""
    batch = config.training.prompts_per_step * config.task.group_size * config.rollout_tokens
    return max(config.rollout_tokens, min(config.training.micro_batch_tokens, batch))
