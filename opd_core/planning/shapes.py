"""The size of a model: from the ``config.json`` of its directory, or of a known public model
that is not here yet."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen3-32B": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
}
"""The sizes in the published ``config.json`` of models that shipped recipes name, by the name of
their directory."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer; widths in numbers. ``query`` and ``key_value`` are heads times
    their dimension, ``mlp`` is of all experts and ``active`` of those that a token sees.

    ``source`` says where this is from. ``weights_bytes`` is what its weights take as they are kept,
    None where they are not quantised: then it is parameters times the dtype.
    """

    source: str
    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int
    active: int
    vocabulary: int
    tied: bool
    dtype: str
    layer_extras: int = 0
    weights_bytes: int | None = None

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding and the output head, which may be one."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> int:
        """Of one layer: the projections of attention (to queries, keys, values, and back), those of
        a gated MLP (up, gate, down), two norms, and ``layer_extras``."""
        attention = 2 * self.hidden * (self.query + self.key_value)
        return attention + 3 * self.hidden * self.mlp + 2 * self.hidden + self.layer_extras

    @property
    def parameters(self) -> int:
        """All of them, the last norm included."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on every linear layer but the head: rank x (inputs + outputs) of each."""
        widths = 4 * self.hidden + 2 * (self.query + self.key_value)
        return self.layers * rank * (widths + 3 * (self.hidden + self.mlp))

    def kv_bytes(self, dtype: str) -> int:
        """Of a token in the KV cache: a key and a value in every layer."""
        return 2 * self.layers * self.key_value * BYTES[dtype]


def read_shape(model: str) -> ModelShape | None:
    """The shape of the model in this directory; without it, of the known one of its name; None
    where neither is there or can be understood."""
    folder = Path(model)
    if (folder / "config.json").is_file():
        return shape_on_disk(model)
    known = KNOWN.get(folder.name)
    return _shape(known, f"the published {folder.name} ({model} is not here)") if known else None


def shape_on_disk(model: str) -> ModelShape | None:
    """The shape of the model in this directory; None where it is not there or cannot be
    understood."""
    folder = Path(model)
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shape = _shape(found.get("text_config", found), str(folder / "config.json"))
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None
    if "quantization_config" not in found:
        return shape
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return replace(shape, weights_bytes=size) if size else None


def _shape(config: dict[str, Any], source: str) -> ModelShape:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    width = int(config.get("head_dim") or hidden // heads)
    key_value = width * int(config.get("num_key_value_heads") or heads)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    expert = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    active = expert * int(config.get("num_experts_per_tok") or 1) if experts else expert
    kind = str(config.get("model_type", ""))
    extras = 2 * width if kind.startswith("qwen3") else 0  # norms of queries and keys
    if kind == "qwen2" or config.get("attention_bias"):
        extras += heads * width + 2 * key_value
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return ModelShape(
        source=source,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        query=heads * width,
        key_value=key_value,
        mlp=expert * experts if experts else int(config["intermediate_size"]),
        active=active if experts else int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype if dtype in BYTES else "bfloat16",
        layer_extras=extras + hidden * experts,  # the router
    )
