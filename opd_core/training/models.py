"""Loading and saving Hugging Face models, always from local files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd_core.errors import PreflightError


def pick_device() -> torch.device:
    """The first GPU that this process sees, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_model(path: str, dtype: str, device: torch.device) -> Any:
    """A causal language model whose head is ``hidden @ weight.T``, the form our logprobs compute.

    Raises :class:`PreflightError` for a model whose logits are made in another way.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), local_files_only=True
    )
    if getattr(model.config, "final_logit_softcapping", None):
        raise PreflightError(f"{path}: models with soft-capped logits are not supported")
    return model.to(device)


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside a model."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's and the tokenizer's."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))


def pad_id(tokenizer: Any) -> int:
    """An id to fill unused places with; masks come from lengths, so any id will do."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(found if found is not None else 0)


def cpu_weights(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """A copy of all weights on the host, for other processes; floating ones in ``dtype``."""
    return {
        name: tensor.detach().to(
            "cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True
        )
        for name, tensor in model.state_dict().items()
    }


def save_model(model: Any, tokenizer: Any, path: Path) -> Path:
    """Write a directory that ``from_pretrained`` loads; it appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if path.exists():
        shutil.rmtree(path)
    os.replace(partial, path)
    return path
