"""Loading a student without noise, and saving it whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    Qwen3Config,
)

from opd_core.training.models import load_model, load_tokenizer, save_model
from opd_core.whole_file import whole_folder

CPU = torch.device("cpu")
TOKENS = torch.randint(2, 18, (2, 16), generator=torch.Generator().manual_seed(0))
ENDS: dict[str, Any] = {"vocab_size": 20, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
SMALL: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, **ENDS}


def noisy_gpt2() -> GPT2Config:
    return GPT2Config(
        n_embd=32, n_layer=2, n_head=2, embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1, **ENDS
    )


def noisy_opt() -> OPTConfig:
    """It drops whole layers too, and calls dropout as a function."""
    small = {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 6}
    return OPTConfig(dropout=0.1, attention_dropout=0.1, layerdrop=0.3, **small, **SMALL)


def noisy_bloom() -> BloomConfig:
    return BloomConfig(n_layer=2, n_head=2, hidden_dropout=0.1, attention_dropout=0.1, **SMALL)


def attention_noise() -> Qwen3Config:
    small = {"intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return Qwen3Config(attention_dropout=0.1, head_dim=16, **small, **SMALL)


def router_noise() -> MixtralConfig:
    small = {"intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return MixtralConfig(num_local_experts=2, router_jitter_noise=0.3, **small, **SMALL)


@pytest.mark.parametrize(
    "configured", [noisy_gpt2, noisy_opt, noisy_bloom, attention_noise, router_noise]
)
def test_the_training_forward_has_no_randomness(
    configured: Callable[[], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(configured()).train()
    with torch.no_grad():
        assert not torch.equal(made(TOKENS).logits, made(TOKENS).logits)  # as it was trained once
        made.save_pretrained(tmp_path)
        model = load_model(str(tmp_path), "float32", CPU).train()
        assert torch.equal(model(TOKENS).logits, model(TOKENS).logits)
        assert torch.equal(model(TOKENS).logits, made.eval()(TOKENS).logits)
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))


def test_noise_that_a_part_of_the_configuration_names_is_off_too(tmp_path: Path) -> None:
    attention = {"attn_pdrop": 1}  # all of it: this setting is a whole number
    config = MptConfig(d_model=32, n_heads=2, n_layers=1, attn_config=attention, **ENDS)
    made = AutoModelForCausalLM.from_config(config).eval()
    made.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "float32", CPU).train()
    assert torch.equal(model(TOKENS).logits, made(TOKENS).logits)


def test_a_model_is_loaded_in_the_dtype_asked_for(student_dir: Path) -> None:
    model = load_model(str(student_dir), "bfloat16", CPU)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# ------------------------------------------------------------------ saving


def saved_and_loaded(student_dir: Path, path: Path, **state: Any) -> Any:
    model = load_model(str(student_dir), "float32", CPU)
    assert save_model(model, load_tokenizer(str(student_dir)), path, **state) == path
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)


def test_a_saved_student_is_itself_with_its_tokenizer(student_dir: Path, tmp_path: Path) -> None:
    loaded = saved_and_loaded(student_dir, tmp_path / "student")
    original = AutoModelForCausalLM.from_pretrained(student_dir)
    assert torch.equal(loaded(TOKENS).logits, original(TOKENS).logits)
    text = AutoTokenizer.from_pretrained(tmp_path / "student").decode([5, 12, 6])
    assert text == load_tokenizer(str(student_dir)).decode([5, 12, 6])


def test_a_given_state_is_saved_in_place_of_the_models_own(
    student_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(teacher_dir)
    state = other.state_dict()
    names = set(state)
    loaded = saved_and_loaded(student_dir, tmp_path / "student", state_dict=state)
    assert torch.equal(loaded(TOKENS).logits, other(TOKENS).logits)
    assert set(state) == names  # tied weights are still in the caller's mapping


def test_saving_again_replaces_all_that_was_there(student_dir: Path, tmp_path: Path) -> None:
    saved_and_loaded(student_dir, tmp_path / "student")
    (tmp_path / "student" / "left-over").touch()
    (tmp_path / "student.partial").mkdir()
    (tmp_path / "student.partial" / "half").touch()
    saved_and_loaded(student_dir, tmp_path / "student")
    assert [path.name for path in tmp_path.iterdir()] == ["student"]
    assert not {"left-over", "half"} & {path.name for path in (tmp_path / "student").iterdir()}


def test_a_folder_that_was_not_filled_leaves_the_old_one_alone(tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "old").touch()
    with pytest.raises(OSError, match="full"), whole_folder(tmp_path / "student"):
        raise OSError("the disk is full")
    assert [path.name for path in (tmp_path / "student").iterdir()] == ["old"]


def test_a_folder_may_have_folders_in_it(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "runs" / "student") as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("x")
        assert not (tmp_path / "runs" / "student").exists()
    assert (tmp_path / "runs" / "student" / "inner" / "file").read_text() == "x"
