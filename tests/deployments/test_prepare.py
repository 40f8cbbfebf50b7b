"""What `opd prepare smollm2` does to a model, on a small one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deployments.prepare import _remove_layers, _write_prompts, prepare_smollm2


def llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=48,
            vocab_size=31,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
    )


def test_a_pruned_model_is_the_chosen_layers_and_still_decodes_with_a_cache(tmp_path: Path) -> None:
    model = llama(5)
    expected = [model.model.layers[i].mlp.up_proj.weight.clone() for i in (0, 2, 4)]
    _remove_layers(model, (1, 3))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    kept = [layer.mlp.up_proj.weight for layer in loaded.model.layers]
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
    ids = torch.tensor([[3, 4, 5, 6]])
    first = loaded(ids[:, :3], use_cache=True)
    cached = loaded(ids[:, 3:], past_key_values=first.past_key_values).logits[0, -1]
    assert torch.allclose(cached, loaded(ids).logits[0, -1], atol=1e-4)


def test_prompts_are_rows_in_the_layout_that_the_reader_takes(tmp_path: Path) -> None:
    _write_prompts(tmp_path / "train.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    contents = [row["prompt"][0]["content"] for row in rows]
    assert len(set(contents)) == len(contents) == 70
    assert all(c.startswith("Write one sentence about ") and c.endswith(".") for c in contents)


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    said: list[str] = []
    assert prepare_smollm2(tmp_path, said.append) == tmp_path / "smollm2"
    assert said == [f"already prepared: {tmp_path / 'smollm2'}"]
