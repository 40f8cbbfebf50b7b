"""The two specialists and their data are what their manifest says, and fit for the recipe."""

from __future__ import annotations

import hashlib
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.recipes.assets.tiny import build, task
from opd_core.recipe import load_recipe

RECIPES = Path(build.__file__).parents[2]
MULTI = Path(build.__file__).parent / "multi"
RECIPE = RECIPES / "tiny_multi_teacher.yaml"
OPERATOR = {"chain_add": "+", "chain_sub": "-"}
GOOD_AT = {"adder": "chain_add", "subtractor": "chain_sub"}


@cache
def rows(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(map(json.loads, (MULTI / name).read_text(encoding="utf-8").splitlines()))


def prompts_of(name: str) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows(name)]


@cache
def manifest() -> dict[str, Any]:
    text = (MULTI / "manifest.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def sampled_accuracy(model: str, source: str, count: int) -> float:
    """Of the answers to the first held-out questions of a source, by the public interfaces only."""
    tokenizer = AutoTokenizer.from_pretrained(MULTI / model, local_files_only=True)
    network = AutoModelForCausalLM.from_pretrained(MULTI / model, local_files_only=True).eval()
    asked = [row for row in rows("heldout.jsonl") if row["data_source"] == source][:count]
    batch = tokenizer.apply_chat_template(
        [row["prompt"] for row in asked],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    torch.manual_seed(0)
    output = network.generate(**batch, do_sample=True, max_new_tokens=48)
    responses = output[:, batch["input_ids"].shape[1] :]
    answers = map(task.final_answer, tokenizer.batch_decode(responses, skip_special_tokens=True))
    truths = [row["reward_model"]["ground_truth"] for row in asked]
    return sum(a == b for a, b in zip(answers, truths, strict=True)) / count


def test_every_file_has_the_hash_in_the_manifest() -> None:
    files = [p for pattern in ("*.jsonl", "*/*") for p in MULTI.glob(pattern)]
    found = {p.relative_to(MULTI).as_posix(): p.read_bytes() for p in files}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}
    assert hashes == manifest()["sha256"]


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 2000), ("heldout.jsonl", 128)])
def test_each_source_has_its_own_operator_and_right_answers(name: str, count: int) -> None:
    assert len(set(prompts_of(name))) == len(rows(name)) == 2 * count
    assert [row["extra_info"] for row in rows(name)] == [{"index": i} for i in range(2 * count)]
    for source, operator in OPERATOR.items():
        members = [row for row in rows(name) if row["data_source"] == source]
        assert len(members) == count
        for row in members:
            (message,) = row["prompt"]
            first, *rest = map(int, message["content"].removesuffix("=").split(operator))
            answer = first + sum(rest) if operator == "+" else first - sum(rest)
            assert message["role"] == "user"
            assert row["reward_model"] == {"ground_truth": str(answer)}


def test_no_held_out_question_is_in_the_training_file() -> None:
    assert not set(prompts_of("heldout.jsonl")) & set(prompts_of("train.jsonl"))


@pytest.mark.parametrize("recipe", [build.ADDER, build.SUBTRACTOR], ids=GOOD_AT)
def test_no_held_out_question_was_in_a_teachers_corpus(recipe: task.SftRecipe) -> None:
    seen = {prompt for prompt, _ in task.corpus(recipe)}
    assert len(seen) > 20_000
    assert not set(prompts_of("heldout.jsonl")) & seen


def test_a_mistake_rate_per_operator_spoils_the_steps_of_that_operator_only() -> None:
    recipe = task.SftRecipe(
        seed=5, mistake_rate={"+": 0.0, "-": 0.5}, steps=50, batch_size=40, learning_rate=0.0
    )
    wrong: dict[str, list[bool]] = {"+": [], "-": []}
    for _, response in task.corpus(recipe):
        for left, operator, digit, result in re.findall(r"(-?\d+)([+-])(\d)=(-?\d+);", response):
            right = int(left) + int(operator + digit)
            wrong[operator].append(int(result) != right)
    assert not any(wrong["+"])
    assert sum(wrong["-"]) / len(wrong["-"]) == pytest.approx(0.5, abs=0.03)


def test_one_rate_for_both_operators_is_the_single_rate() -> None:
    both, single = (
        task.solution("9-4+3-2+8", mistake_rate=rate, rng=random.Random(3))
        for rate in ({"+": 0.5, "-": 0.5}, 0.5)
    )
    assert both == single


@pytest.mark.parametrize("teacher", GOOD_AT)
def test_the_manifest_says_that_a_teacher_is_good_at_its_own_source_only(teacher: str) -> None:
    for source in OPERATOR:
        figures = manifest()["figures"][source][teacher]
        if source == GOOD_AT[teacher]:
            assert figures["teacher_sampled_accuracy"] > 0.95
        else:
            assert figures["teacher_sampled_accuracy"] < 0.35
        assert 0.4 < figures["student_sampled_accuracy"] < 0.5


@pytest.mark.parametrize("teacher", GOOD_AT)
def test_a_teacher_is_good_at_its_own_source_only(teacher: str) -> None:
    own = GOOD_AT[teacher]
    (other,) = set(OPERATOR) - {own}
    assert sampled_accuracy(teacher, own, 64) > 0.9
    assert sampled_accuracy(teacher, other, 64) < 0.5


def test_teachers_and_student_have_the_same_tokenizer_files() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        student = (MULTI.parent / "student" / name).read_bytes()
        assert [(MULTI / teacher / name).read_bytes() for teacher in GOOD_AT] == [student] * 2


def test_the_recipe_sends_every_source_to_the_teacher_that_is_good_at_it() -> None:
    config = load_recipe(RECIPE)
    assert config.opd is not None
    models = {t.name: t.launch.model for t in config.opd.teachers if t.launch is not None}
    assert models == {teacher: str(MULTI / teacher) for teacher in GOOD_AT}
    for name in (config.data.train, config.data.evaluation):
        assert name is not None
        for row in rows(Path(name).name):
            teacher = config.opd.teacher_of(row["data_source"])
            assert teacher is not None
            assert GOOD_AT[teacher] == row["data_source"]


def test_a_build_of_the_data_writes_this_folder_too(tmp_path: Path) -> None:
    written = build.build(tmp_path, data_only=True)
    assert {"multi/train.jsonl", "multi/heldout.jsonl", "multi/adder/tokenizer.json"} <= {*written}
    assert all((tmp_path / name).is_file() for name in written)
