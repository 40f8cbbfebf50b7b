"""Loading and saving Hugging Face models, always from local files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from opd_core.config import StudentConfig
from opd_core.errors import PreflightError
from opd_core.whole_file import whole_folder


def pick_device(student: StudentConfig) -> torch.device:
    """The GPU that Ray gave this process; the CPU where the recipe names no GPU."""
    if student.gpus and torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("cpu")


def load_model(path: str, dtype: str, device: torch.device) -> Any:
    """A causal language model whose head is ``hidden @ weight.T``, the form our logprobs compute.

    Its forward has no randomness, in training neither: the policy that is trained must be the one
    that sampled. Raises :class:`PreflightError` for a model whose logits are made in another way.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    _without_noise(config)
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=getattr(torch, dtype), local_files_only=True
    )
    if getattr(model.config, "final_logit_softcapping", None):
        raise PreflightError(f"{path}: models with soft-capped logits are not supported")
    return model.to(device)


def _without_noise(config: PreTrainedConfig) -> None:
    """Set every kind of dropout (of activations, attention, layers) and of jitter (of a router) to
    0, before the model is built: all architectures take theirs from the configuration."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _without_noise(value)
        elif type(value) in (int, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, type(value)(0))


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside a model."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's and the tokenizer's."""
    return _end_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)


def end_ids_at(path: str, tokenizer: Any) -> tuple[int, ...]:
    """The same of a model that is not loaded."""
    try:
        found = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # it has none of its own, and a loaded model makes it from this
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        found = GenerationConfig.from_model_config(config)
    return _end_ids(found.eos_token_id, tokenizer)


def _end_ids(named: Any, tokenizer: Any) -> tuple[int, ...]:
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))


def pad_id(tokenizer: Any) -> int:
    """An id to fill unused places with; masks come from lengths, so any id will do."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(found if found is not None else 0)


def save_model(
    model: Any, tokenizer: Any, path: Path, state_dict: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a directory that ``from_pretrained`` loads; it appears whole or not at all.

    ``state_dict`` stands for the model's own, where that is sharded or has adapters: whole tensors
    under the plain model's names.
    """
    # A copy: transformers takes tied weights out of the mapping that it is given.
    state = None if state_dict is None else dict(state_dict)
    with whole_folder(path) as partial:
        model.save_pretrained(partial, state_dict=state)
        tokenizer.save_pretrained(partial)
    return path


def save_weights(model: Any, path: Path, state: Mapping[str, Tensor], dtype: str) -> Path:
    """Write weights in ``dtype`` and their configuration, for a server that has the tokenizer; they
    appear whole or not at all. Nothing waits for the disk: the next sync writes them anew."""
    config = copy.copy(model.config)
    config.dtype = dtype
    with whole_folder(path, durable=False) as partial:
        model.save_pretrained(partial, state_dict=dict(state))
        config.save_pretrained(partial)  # the model's own says the dtype that it trains in
    return path


def checkpoint_state(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names, and in the parts, that a checkpoint of this model has, tied ones
    once; from those that the model itself has, as :func:`save_model` writes them."""
    untied = remove_tied_weights_from_state_dict(dict(state), model)
    return dict(revert_weight_conversion(model, untied))
