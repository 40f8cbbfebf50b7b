"""What the engine over the student's servers is told of the student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from opd_core.training.served_student import vocab_size_at


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3", {"vocab_size": 96}), ("gemma3", {"text_config": {"vocab_size": 96}})],
)
def test_the_vocabulary_is_that_of_the_text(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    AutoConfig.for_model(family, **settings).save_pretrained(tmp_path)
    assert vocab_size_at(str(tmp_path)) == 96
