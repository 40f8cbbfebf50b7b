"""Tiny random models with a tokenizer, as directories on disk; a teacher server; data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from opd_core.lifecycle.ports import reserve_ports
from opd_core.serving.readiness import wait_until_healthy
from tests.opd_core.training.engine import tiny_config

FILTERS = """
def none_pass(group):
    return False

def some_pass(group):
    return all(sum(r.response_ids) % 3 for r in group)

def length(text, prompt):
    return len(text) / 10
"""
SYMBOLS = ["<pad>", "<eos>", *"0123456789+-=;ab"]


def build_model(folder: Path, seed: int, *, tied: bool = True) -> Path:
    """A random Qwen3 of 2 layers over 18 symbols (vocabulary padded to 20)."""
    torch.manual_seed(seed)
    config = tiny_config(tie_word_embeddings=tied)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def student_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("student"), seed=1)


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("teacher"), seed=2)


@pytest.fixture(scope="session")
def teacher_url(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded server with the random teacher, in a process of its own."""
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "opd_core.serving.embedded", "--model-path", str(teacher_dir)]
    log = tmp_path_factory.mktemp("teacher-log") / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output)

    def still_alive() -> None:
        assert server.poll() is None, log.read_text()

    try:
        wait_until_healthy(url, "embedded", limit_s=120, still_alive=still_alive)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``rows.jsonl`` (9 prompts of two data sources) and a module of filters."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "data_source": "odd" if number % 2 else "even",
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "reward_model": {"ground_truth": str(number + 1)},
        }
        for number in range(9)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "loop_filters.py").write_text(FILTERS)
    return folder


@pytest.fixture
def data(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rows; the filters can be imported."""
    monkeypatch.syspath_prepend(data_dir)
    return data_dir / "rows.jsonl"
