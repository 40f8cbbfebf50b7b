"""Weights for servers: as files, as handles that another process opens, and by broadcast."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3ForCausalLM,
)

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.lifecycle.ports import reserve_ports
from opd_core.training.models import checkpoint_state, save_weights
from opd_core.training.weight_buckets import ANYWHERE, HeldWeights
from tests.opd_core.training.engine import CPU, learner_of, tiny_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MIXTRAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "vocab_size": 20,
}

OPEN = """
import base64, json, sys
from multiprocessing.reduction import ForkingPickler
import torch.multiprocessing
entries = ForkingPickler.loads(base64.b64decode(sys.stdin.read()))
made = [(name, e if hasattr(e, "tolist") else e[0](*e[1])) for name, e in entries]
print(json.dumps({name: [str(tensor.dtype), tensor.tolist()] for name, tensor in made}))
"""
RECEIVE = """
import json, sys
import torch
from opd_core.training.weight_buckets import GROUP_TIMEOUT, Bucket, MeetingPoint, main_group
address, name, buckets = json.load(sys.stdin)
group = main_group(MeetingPoint(address, name, "gloo"), 1, 2, GROUP_TIMEOUT)
options = torch.distributed.BroadcastOptions()
options.rootRank = 0
taken = {}
for bucket in buckets:
    for key, tensor in Bucket(*bucket).empty(torch.device("cpu")):
        group.broadcast([tensor], options).wait()
        taken[key] = [str(tensor.dtype), tensor.tolist()]
print(json.dumps(taken))
"""


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(3, 4, generator=draw)
    return {"a": first, "b": first.bfloat16(), "c": torch.tensor([7, 8]), "d": first[0] * 2}


def as_told(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: [str(t.dtype), t.tolist()] for name, t in tensors.items()}


def held(bucket_bytes: int = 1 << 30) -> HeldWeights:
    return HeldWeights(weights(), CPU, bucket_bytes)


# ------------------------------------------------------------------ as files


def test_written_weights_are_those_that_sample_in_the_students_dtype(
    student_dir: Path, tmp_path: Path
) -> None:
    learner = learner_of(student_dir, dtype="bfloat16")
    path = learner.save_weights(tmp_path / "weights")
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(path).dtype == torch.bfloat16
    assert str(learner.model.config.dtype).endswith("float32")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, learner.weights()[name])


def test_weights_written_again_take_the_place_of_those_before(
    student_dir: Path, tmp_path: Path
) -> None:
    learner = learner_of(student_dir)
    path = learner.save_weights(tmp_path / "weights")
    learner.model.get_input_embeddings().weight.data += 1
    assert learner.save_weights(path) == path
    written = load_file(path / "model.safetensors")
    assert torch.equal(written[EMBEDDING], learner.model.get_input_embeddings().weight)
    assert [found.name for found in tmp_path.iterdir()] == ["weights"]


def test_written_weights_of_a_student_with_adapters_are_merged(
    student_dir: Path, tmp_path: Path
) -> None:
    learner = learner_of(student_dir, student={"lora": {"rank": 2}})
    for name, parameter in learner.model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.5)
    written = load_file(learner.save_weights(tmp_path / "weights") / "model.safetensors")
    plain = load_file(student_dir / "model.safetensors")
    assert written.keys() == plain.keys()
    assert not torch.equal(
        written["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"]
    )


def test_tied_weights_are_gathered_and_sent_once(student_dir: Path) -> None:
    learner = learner_of(student_dir)
    state = learner.weights()
    assert state[HEAD] is state[EMBEDDING]
    assert HEAD not in learner.served_weights()
    assert learner.served_weights().keys() == state.keys() - {HEAD}


@pytest.mark.parametrize(
    "model",
    [
        Qwen3ForCausalLM(tiny_config(tie_word_embeddings=True)),
        Qwen3ForCausalLM(tiny_config(tie_word_embeddings=False)),
        MixtralForCausalLM(MixtralConfig(**MIXTRAL)),
    ],
    ids=["tied", "untied", "experts in one tensor"],
)
def test_served_weights_are_named_and_cut_as_in_a_checkpoint(model: Any, tmp_path: Path) -> None:
    state = model.state_dict()
    served = checkpoint_state(model, state)
    path = save_weights(model, tmp_path / "weights", state, "float32")
    written = load_file(path / "model.safetensors")
    assert served.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in served.items())


# ------------------------------------------------------------------ buckets


@given(
    sizes=st.lists(st.integers(1, 9), max_size=20), limit=st.integers(4, 60).map(lambda n: 4 * n)
)
def test_buckets_keep_order_and_size_and_no_two_would_fit_in_one(
    sizes: list[int], limit: int
) -> None:
    tensors = {f"w{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    buckets = HeldWeights(tensors, CPU, limit).buckets
    assert [name for bucket in buckets for name in bucket.names] == list(tensors)
    bytes_of = [sum(tensors[name].nbytes for name in bucket.names) for bucket in buckets]
    assert all(
        size <= limit or len(bucket.names) == 1
        for bucket, size in zip(buckets, bytes_of, strict=True)
    )
    following = [tensors[bucket.names[0]].nbytes for bucket in buckets[1:]]
    assert all(size + after > limit for size, after in zip(bytes_of, following, strict=False))


def test_a_bucket_is_told_as_servers_want_it() -> None:
    (bucket,) = held().buckets
    assert bucket.names == ("a", "b", "c", "d")
    assert bucket.dtypes == ("float32", "bfloat16", "int64", "float32")
    assert bucket.shapes == ((3, 4), (3, 4), (2,), (4,))


# ------------------------------------------------------------------ by handle


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sglang", "lmdeploy"])
def test_a_process_that_is_no_child_opens_every_bucket_that_is_lent(backend: Backend) -> None:
    kept = held(bucket_bytes=60)
    opened = {}
    for number in range(len(kept.buckets)):
        (handle,) = kept.lend(number, backend).values()
        done = subprocess.run(
            [sys.executable, "-c", OPEN], input=handle, capture_output=True, text=True, check=True
        )
        opened |= json.loads(done.stdout)
    assert len(kept.buckets) > 1
    assert opened == as_told(weights())


def test_lent_weights_are_copies_that_live_until_they_are_given_back() -> None:
    before = set(shared_files())
    kept = held()
    (place,) = kept.lend(0, "sglang")
    lent = set(shared_files()) - before
    assert place == ANYWHERE
    assert len(lent) == len(weights())
    kept.lend(0, "sglang")  # again, as for a server that comes back
    assert not lent & set(shared_files())
    kept.give_back()
    assert set(shared_files()) <= before


def shared_files() -> list[str]:
    """Shared memory that this process holds open."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line.split()[-1] for line in maps if "/dev/shm/torch_" in line]


def test_a_rank_without_weights_lends_nothing_of_a_host() -> None:
    assert HeldWeights({}, CPU).lend(0, "sglang") == {}


# ------------------------------------------------------------------ by broadcast


@pytest.mark.slow
def test_a_process_that_joins_gets_every_bucket_and_training_knows_no_group() -> None:
    kept = held(bucket_bytes=60)
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    meeting = kept.meeting_point(f"127.0.0.1:{port}")
    assert meeting.backend == "gloo"
    told = [meeting.address, meeting.name, [[b.names, b.dtypes, b.shapes] for b in kept.buckets]]
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        json.dump(told, other.stdin)
        other.stdin.close()
        try:
            kept.join(meeting, 2)
            for number in range(len(kept.buckets)):
                kept.broadcast(number)
            assert json.loads(other.stdout.read()) == as_told(weights())
        finally:
            other.kill()
            kept.leave()
    assert not torch.distributed.is_initialized()
    kept.leave()  # a second time is nothing


def test_a_server_that_does_not_come_is_a_sampling_error() -> None:
    kept = HeldWeights(weights(), CPU, timeout=timedelta(seconds=1))
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    with pytest.raises(SamplingError, match="did not join"):
        kept.join(kept.meeting_point(f"127.0.0.1:{port}"), 2)
