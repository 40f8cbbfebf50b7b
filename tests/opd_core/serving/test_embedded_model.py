"""The model, alone and behind the queue, against transformers' own logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from opd_core.serving.embedded.batching import BatchingScorer
from opd_core.serving.embedded.model import ModelLoadError, TeacherModel
from opd_core.serving.embedded.requests import ScoreRequest

OwnLogprobs = Callable[[Sequence[int]], torch.Tensor]
RAGGED = (1, 2, 3, 17, 64, 65, 130)


def _sequences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 97, size=length).tolist() for length in lengths]


def _request(
    ids: Sequence[int], start: int = 0, top_k: int = 0, extra: Sequence[int] = ()
) -> ScoreRequest:
    return ScoreRequest(np.array(ids, np.int64), start, top_k, np.array(extra, np.int64))


def _expected(own: OwnLogprobs, ids: Sequence[int], start: int) -> np.ndarray:
    if len(ids) < 2:
        return np.zeros(0)
    scores = own(ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return scores[start:].numpy()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_padded_batch_scores_each_sequence_as_if_alone(
    teacher_model: TeacherModel, own_logprobs: OwnLogprobs, share: float
) -> None:
    sequences = _sequences(RAGGED)
    starts = [int(share * len(ids)) for ids in sequences]
    batch = [_request(ids, start) for ids, start in zip(sequences, starts, strict=True)]

    results = teacher_model.score(batch)

    for ids, start, result in zip(sequences, starts, results, strict=True):
        expected = _expected(own_logprobs, ids, start)
        assert result.logprobs.shape == (max(0, len(ids) - 1 - start),)
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-4)


def test_ids_equal_to_the_padding_are_scored_like_any_other(
    teacher_model: TeacherModel, own_logprobs: OwnLogprobs
) -> None:
    ids = [0, 5, 0, 0, 7, 0]

    (result, _) = teacher_model.score([_request(ids), _request(range(40))])

    np.testing.assert_allclose(result.logprobs, _expected(own_logprobs, ids, 0), rtol=0, atol=1e-4)


def test_mixed_asks_in_one_batch_get_their_own_alternatives(
    teacher_model: TeacherModel, own_logprobs: OwnLogprobs
) -> None:
    first, second, third = _sequences((20, 9, 14))
    batch = [_request(first, 3, top_k=5), _request(second, 0, extra=(96, 0, 4)), _request(third)]

    with_top, with_extra, plain = teacher_model.score(batch)

    top = own_logprobs(first)[3:].topk(5)
    np.testing.assert_allclose(with_top.top_logprobs, top.values.numpy(), rtol=0, atol=1e-4)
    assert with_top.top_ids.tolist() == top.indices.tolist()
    extra = own_logprobs(second)[:, [96, 0, 4]].numpy()
    np.testing.assert_allclose(with_extra.token_ids_logprobs, extra, rtol=0, atol=1e-4)
    assert plain.top_ids.shape == (13, 0)
    assert plain.token_ids_logprobs.shape == (13, 0)


def test_all_alternatives_of_a_position_sum_to_one(teacher_model: TeacherModel) -> None:
    (result,) = teacher_model.score([_request(range(12), 0, top_k=97)])

    np.testing.assert_allclose(np.exp(result.top_logprobs).sum(axis=1), 1.0, atol=1e-5)


def test_head_in_small_chunks_gives_the_same_scores(
    teacher_model: TeacherModel, tiny_model_dir: Path
) -> None:
    batch = [_request(ids, top_k=3) for ids in _sequences(RAGGED)]
    chunked = TeacherModel.load(tiny_model_dir, max_logits_at_once=97 * 4)

    for whole, parts in zip(teacher_model.score(batch), chunked.score(batch), strict=True):
        np.testing.assert_allclose(whole.logprobs, parts.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(whole.top_logprobs, parts.top_logprobs, rtol=0, atol=1e-5)


def test_half_precision_weights_score_near_float32(
    teacher_model: TeacherModel, tiny_model_dir: Path
) -> None:
    half = TeacherModel.load(tiny_model_dir, dtype="bfloat16")
    batch = [_request(ids) for ids in _sequences((30, 8))]

    assert half.facts.dtype == "bfloat16"
    for exact, rough in zip(teacher_model.score(batch), half.score(batch), strict=True):
        difference = np.abs(exact.logprobs - rough.logprobs)
        assert 0 < difference.mean() < 0.1


def test_concurrent_submissions_return_to_their_own_sequences(
    scorer: BatchingScorer, own_logprobs: OwnLogprobs
) -> None:
    sequences = _sequences([3 + 7 * (i % 11) for i in range(60)], seed=1)

    futures = [scorer.submit([_request(ids, 1)])[0] for ids in sequences]

    for ids, future in zip(sequences, futures, strict=True):
        expected = _expected(own_logprobs, ids, 1)
        np.testing.assert_allclose(future.result(10).logprobs, expected, rtol=0, atol=1e-4)
    assert scorer.stats().sequences == 60


def test_a_checkpoint_that_lacks_weights_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model_dir, broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj"):
        TeacherModel.load(broken)


def test_a_directory_without_weights_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model_dir / "config.json", tmp_path)

    with pytest.raises(ModelLoadError, match=f"cannot load the model in {tmp_path}"):
        TeacherModel.load(tmp_path)


def test_an_architecture_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        final_logit_softcapping=2.0,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)

    with pytest.raises(ModelLoadError, match=r"differ by .* nats from its own logits"):
        TeacherModel.load(tmp_path)


def test_a_broken_tokenizer_costs_the_texts_and_not_the_scores(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")

    model = TeacherModel.load(tmp_path / "model")

    assert model.texts([5]) is None
    assert len(model.score([_request([5, 6])])[0].logprobs) == 1


def test_context_length_beyond_the_model_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ModelLoadError, match="4096 is more than the 2048 positions"):
        TeacherModel.load(tiny_model_dir, context_length=4096)


def test_facts_describe_the_checkpoint(teacher_model: TeacherModel, tiny_model_dir: Path) -> None:
    config = json.loads((tiny_model_dir / "config.json").read_text())
    facts = teacher_model.facts

    assert facts.vocab_size == config["vocab_size"] == 97
    assert facts.context_length == 2048
    assert facts.max_input_length == 2041
    assert facts.architectures == ("Qwen3ForCausalLM",)
