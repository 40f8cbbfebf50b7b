"""Low-rank adapters: a layer's ``W x`` becomes ``W x + alpha / rank * B A x``; only A and B train.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1. The
``peft`` library puts the adapters into the model, which keeps its class; a layer that got some
keeps its own weight as ``base_layer.weight`` beside ``lora_A.default.weight`` and
``lora_B.default.weight``.

The adapters have no dropout: it would make the training forward another policy than the one that
sampled, so that old_logprobs, and with them k_t and the ratio, would be off by noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from opd_core.config.student import LoRAConfig
from opd_core.errors import ConfigError
from opd_core.whole_file import whole_folder

ALL_LINEAR = "all-linear"
BASE, A, B = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"
"""How the names of an adapted layer's three matrices end: [out, in], [rank, in], [out, rank]."""


def add_lora(model: Any, config: LoRAConfig, seed: int) -> None:
    """Put adapters into a causal language model, in place; nothing else trains afterwards.

    They are in fp32 whatever the model's dtype is. B is 0, so the policy is still the model's own;
    A is drawn from ``seed`` alone, so every rank has the same, and no global generator moves on.
    Raises :class:`ConfigError` if ``target_modules`` names a layer that the model does not have.
    """
    targets = _targets(model, config.target_modules)
    with torch.random.fork_rng(devices=[]):  # peft draws on the host, also for a model on a GPU
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(_peft_config(config, targets), model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft gave it its layer's dtype
            parameter.data = parameter.data.float()


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is the one that it was before :func:`add_lora`: the reference policy of a
    student with adapters costs no memory. For forwards without gradient."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def plain_weights(
    named: Iterable[tuple[str, Tensor]], scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the plain model, adapters merged: ``W + scaling * B A`` under W's old name.

    ``named`` are names and whole tensors of the adapted model's state; ``scaling`` is alpha / rank.
    No more than one layer's matrices are held at a time where they come one after the other, as in
    a state dict. The sum is taken in fp32 and has W's dtype. Raises ValueError for a layer of which
    a matrix is missing.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        part = next((part for part in (BASE, A, B) if name.endswith(part)), None)
        if part is None:
            yield name.replace(".base_layer.", "."), tensor  # the bias of an adapted layer
            continue
        layer = name.removesuffix(part)
        found = waiting.setdefault(layer, {})
        found[part] = tensor
        if len(found) == 3:
            del waiting[layer]
            base, a, b = (found[part] for part in (BASE, A, B))
            whole = torch.addmm(base.float(), b.float(), a.float(), alpha=scaling)
            yield f"{layer}.weight", whole.to(base.dtype)
    if waiting:
        layer, found = next(iter(waiting.items()))
        raise ValueError(f"layer {layer}: expected {BASE}, {A} and {B}, got {', '.join(found)}")


def merged(state: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """:func:`plain_weights` of a whole state dict."""
    return dict(plain_weights(state.items(), scaling))


def adapter_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Only the adapters of an adapted model's state, under the names of a peft adapter file."""
    return {
        f"base_model.model.{name.removesuffix('.default.weight')}.weight": tensor
        for name, tensor in state.items()
        if name.endswith((A, B))
    }


def save_adapter(
    state: Mapping[str, Tensor], config: LoRAConfig, base_model_path: str, folder: Path
) -> None:
    """Write the adapters in ``state`` (an adapted model's) so that
    ``peft.PeftModel.from_pretrained(base, folder)`` loads them on the model they were put into. The
    folder appears whole or not at all."""
    targets = [name.removesuffix(A) for name in state if name.endswith(A)]
    adapter = {name: tensor.contiguous() for name, tensor in adapter_state(state).items()}
    with whole_folder(folder) as partial:
        save_file(adapter, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        _peft_config(config, targets, base_model_path).save_pretrained(str(partial))


def _targets(model: Any, wanted: str | tuple[str, ...]) -> list[str]:
    """Full names of the layers that get adapters.

    Never the output head: our logprobs multiply by its weight and would pass its adapter by.
    """
    head = model.get_output_embeddings()
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    if not layers:
        raise ConfigError(
            f"student.lora: {type(model).__name__} has no torch.nn.Linear but its output head, so "
            "nothing can get an adapter: write student.lora: null, which trains all weights"
        )
    if wanted == ALL_LINEAR:
        return layers
    names = (wanted,) if isinstance(wanted, str) else wanted
    chosen = {name: [x for x in layers if f".{x}".endswith(f".{name}")] for name in names}
    unknown = [name for name, found in chosen.items() if not found]
    if unknown or not chosen:
        offered = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        raise ConfigError(
            f"student.lora.target_modules: expected linear layers of {type(model).__name__} other "
            f"than its output head, got {', '.join(unknown) or 'none'}: name some of {offered}; or "
            f"write {ALL_LINEAR}"
        )
    return sorted({layer for found in chosen.values() for layer in found})


def _peft_config(config: LoRAConfig, targets: list[str], base: str | None = None) -> Any:
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # only ever divided by the rank
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=base is not None,
    )
