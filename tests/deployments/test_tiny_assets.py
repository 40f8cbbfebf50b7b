"""The shipped tiny pair is what its manifest says, and good for the demo."""

from __future__ import annotations

import hashlib
import json
import operator
import random
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from deployments.recipes.assets.tiny import build, task

ASSETS = Path(build.__file__).parent
MODELS = ("teacher", "student")


@cache
def rows(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(map(json.loads, (ASSETS / name).read_text(encoding="utf-8").splitlines()))


def prompts_of(name: str) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows(name)]


def truths_of(name: str) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in rows(name)]


def evaluate(prompt: str) -> int:
    """Left to right over the characters, on purpose unlike the code under test."""
    total, apply = 0, operator.add
    for character in prompt.removesuffix("="):
        if character in "+-":
            apply = operator.add if character == "+" else operator.sub
        else:
            total = apply(total, int(character))
    return total


def load_tokenizer(model: str = "student") -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(ASSETS / model, local_files_only=True)


def answers(model: str, count: int, *, sample: bool) -> list[str | None]:
    """The final answers to the first `count` held-out questions, by the public interfaces only."""
    tokenizer = load_tokenizer(model)
    network = AutoModelForCausalLM.from_pretrained(ASSETS / model, local_files_only=True).eval()
    batch = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows("heldout.jsonl")[:count]],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    torch.manual_seed(0)
    output = network.generate(**batch, do_sample=sample, max_new_tokens=48)
    responses = output[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [task.final_answer(text) for text in texts]


def share_right(given: list[str | None]) -> float:
    truths = truths_of("heldout.jsonl")[: len(given)]
    return sum(a == b for a, b in zip(given, truths, strict=True)) / len(given)


def test_every_file_has_the_hash_in_the_manifest() -> None:
    manifest = json.loads((ASSETS / "manifest.json").read_text(encoding="utf-8"))
    found = {
        name: hashlib.sha256((ASSETS / name).read_bytes()).hexdigest()
        for name in manifest["sha256"]
    }
    assert found == manifest["sha256"]
    assert set(found) == {
        str(path.relative_to(ASSETS).as_posix())
        for pattern in ("*.jsonl", "teacher/*", "student/*")
        for path in ASSETS.glob(pattern)
    }


def test_everything_together_is_under_6_megabytes() -> None:
    files = [p for p in ASSETS.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(path.stat().st_size for path in files) < 6_000_000


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 4000), ("heldout.jsonl", 256)])
def test_every_row_is_a_distinct_question_with_the_right_answer(name: str, count: int) -> None:
    assert len(set(prompts_of(name))) == len(rows(name)) == count
    assert truths_of(name) == [str(evaluate(prompt)) for prompt in prompts_of(name)]
    for index, row in enumerate(rows(name)):
        assert row["data_source"] == "chain_sum"
        assert row["prompt"][0]["role"] == "user"
        assert row["extra_info"] == {"index": index}


def test_no_held_out_question_is_in_the_training_file() -> None:
    assert not set(prompts_of("heldout.jsonl")) & set(prompts_of("train.jsonl"))


@pytest.mark.parametrize("recipe", [build.TEACHER, build.STUDENT], ids=MODELS)
def test_no_held_out_question_was_in_a_models_corpus(recipe: task.SftRecipe) -> None:
    seen = {prompt for prompt, _ in task.corpus(recipe)}
    assert len(seen) > 20_000
    assert not set(prompts_of("heldout.jsonl")) & seen


@pytest.mark.parametrize(
    ("recipe", "digest"),
    [
        (build.TEACHER, "a20807f5a1517d982811537384f70f9bdbedbf772f2a8ddd4a16d16c66f4a942"),
        (build.STUDENT, "27768893cd316478ebbd99038191171a3d4e17b98b6f769f5f134c199b914e43"),
    ],
    ids=MODELS,
)
def test_the_corpus_is_the_one_the_shipped_model_was_trained_on(
    recipe: task.SftRecipe, digest: str
) -> None:
    pairs = "".join(map(repr, islice(task.corpus(recipe), 2000)))
    assert hashlib.sha256(pairs.encode()).hexdigest() == digest


def test_data_and_tokenizer_rebuild_to_the_same_bytes() -> None:
    assert build.check(ASSETS, data_only=True) == []


def test_the_check_names_a_file_that_was_changed_and_one_that_is_missing(tmp_path: Path) -> None:
    build.build(tmp_path, data_only=True)
    (tmp_path / "train.jsonl").write_bytes(b"{}\n")
    (tmp_path / "teacher" / "tokenizer.json").unlink()
    assert build.check(tmp_path, data_only=True) == ["train.jsonl", "teacher/tokenizer.json"]
    assert build.main(["--out", str(tmp_path), "--data-only", "--check"]) == 1


def test_solutions_propagate_a_mistake_and_are_right_without_any() -> None:
    clean = task.SftRecipe(seed=5, mistake_rate=0.0, steps=5, batch_size=40, learning_rate=0.0)
    for prompt, response in task.corpus(clean):
        assert task.final_answer(response) == str(evaluate(prompt))
    wrong_steps = steps = 0
    spoilt = task.SftRecipe(seed=5, mistake_rate=0.3, steps=50, batch_size=40, learning_rate=0.0)
    for _, response in task.corpus(spoilt):
        *worked, answer = response.split(";")
        lefts, results = zip(*(step.split("=") for step in worked), strict=True)
        assert answer == f"={results[-1]}"
        for left, result in zip(lefts[1:], results, strict=False):
            assert left[:-2] == result
        steps += len(worked)
        wrong_steps += sum(
            evaluate_step(left) != int(result) for left, result in zip(lefts, results, strict=True)
        )
    assert wrong_steps / steps == pytest.approx(0.3, abs=0.03)


def evaluate_step(left: str) -> int:
    """`-12-3` is -15: the first number may be negative and have two digits."""
    return int(left[:-2]) + int(left[-2:])


def test_a_worked_solution_reads_as_documented() -> None:
    assert task.solution("9-4+3", rng=random.Random(0)) == "9-4=5;5+3=8;=8"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("9-4=5;5+3=8;=8", "8"),
        ("2-8=-6;=-6", "-6"),
        ("=8", "8"),
        ("1+2=3;=3\n", "3"),
        ("1+2=3;=03", "3"),
        ("", None),
        ("9-4=5;5+3=8", None),
        ("9-4=5;5+3=8;=", None),
        ("9-4=5;5+3=8;=-", None),
        ("9-4=5;=8;", None),
        ("9-4=5;=8;=", None),
        ("9-4=5;=8=9", None),
        ("9-4=5;=5+3", None),
        ("8", None),
    ],
)
def test_the_final_answer_is_the_number_after_the_last_mark(text: str, answer: str | None) -> None:
    assert task.final_answer(text) == answer


def test_both_models_have_the_same_tokenizer_files() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (ASSETS / "teacher" / name).read_bytes() == (ASSETS / "student" / name).read_bytes()


def test_the_template_puts_the_question_between_the_marks() -> None:
    tokenizer = load_tokenizer()
    messages = [{"role": "user", "content": "9-4+3="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>9-4+3=<|assistant|>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == [2, 13, 15, 8, 14, 7, 16, 3]
    done = [*messages, {"role": "assistant", "content": "9-4=5;5+3=8;=8"}]
    finished = tokenizer.apply_chat_template(done, tokenize=False)
    assert finished == "<|user|>9-4+3=<|assistant|>9-4=5;5+3=8;=8<|end|>"


def test_the_tokenizer_gives_one_token_a_character_and_reads_them_back() -> None:
    tokenizer = load_tokenizer()
    text = "9-4=5;5+3=8;=8"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id]) == f"{text}<|end|>"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert set(tokenizer.all_special_ids) == {0, 1, 2, 3}


def test_the_last_id_of_the_models_is_free_and_their_special_ids_agree() -> None:
    tokenizer = load_tokenizer()
    for model in MODELS:
        config = json.loads((ASSETS / model / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        assert len(tokenizer) < config["vocab_size"] == 32
        assert config["pad_token_id"] == tokenizer.pad_token_id
        assert config["eos_token_id"] == tokenizer.eos_token_id


def test_the_teacher_answers_nearly_every_held_out_question() -> None:
    assert share_right(answers("teacher", 64, sample=False)) >= 0.95


def test_the_student_knows_the_way_but_often_slips_when_sampled() -> None:
    assert share_right(answers("student", 64, sample=False)) >= 0.85
    assert share_right(answers("student", 64, sample=True)) < 0.60
