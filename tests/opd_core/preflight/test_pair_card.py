"""The pair check card, decided from real tokenizers and configs: variants of the tiny models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd_core.config import ExperimentConfig, SamplingConfig
from opd_core.preflight import CardRow, ModelFacts, PairCard, PreflightReport, read_model_facts
from opd_core.preflight.facts import load_tokenizer
from opd_core.preflight.items import EXTERNAL, NO_PROMPTS, sampling_row, vocabulary_row
from opd_core.preflight.models import check_models

ASSETS = Path(__file__).parents[3] / "deployments" / "recipes" / "assets" / "tiny"
ITEMS = [
    "tokenizer",
    "vocabulary",
    "end token",
    "BOS and PAD",
    "think tags",
    "rendered prompts",
    "context",
    "sampling",
]
THINK_AT_THE_END = "{{ '<|assistant|><think>\n' }}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Both tiny models and three rows of data."""
    for name in ("student", "teacher"):
        shutil.copytree(ASSETS / name, tmp_path / name)
    write_rows(tmp_path, ("sums", "1+1="), ("sums", "2+2="), ("sums", "3+3="))
    return tmp_path


def write_rows(place: Path, *rows: tuple[str, str]) -> None:
    records = (
        {"data_source": source, "prompt": [{"role": "user", "content": content}]}
        for source, content in rows
    )
    (place / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def edit(file: Path, **values: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    data = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def template(place: Path, name: str, change: Callable[[str], str | None]) -> None:
    file = place / name / "tokenizer_config.json"
    edit(file, chat_template=change(json.loads(file.read_text())["chat_template"]))


def think_at_the_end(text: str) -> str:
    changed = text.replace("{{ '<|assistant|>' }}", THINK_AT_THE_END)
    assert changed != text
    return changed


def add_tokens(place: Path, name: str, *tokens: str) -> None:
    tokenizer = load_tokenizer(str(place / name))
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(place / name)


def recipe(place: Path, *teachers: dict[str, Any], **changes: Any) -> ExperimentConfig:
    launched = {
        "name": "t",
        "backend": "embedded",
        "launch": {"model": str(place / "teacher")},
    }
    data: dict[str, Any] = {
        "name": "test",
        "student": {"model": str(place / "student")},
        "data": {"train": str(place / "train.jsonl"), "max_prompt_tokens": 16},
        "task": {"group_size": 3},
        "sampling": {"max_new_tokens": 32},
        "opd": {"teachers": list(teachers) or [launched], "default_teacher": "t"},
        "training": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-3},
    }
    for path, value in changes.items():
        group, _, key = path.partition("__")
        data[group] = data[group] | {key: value}
    return ExperimentConfig.model_validate(data)


def checked(config: ExperimentConfig) -> PreflightReport:
    report = PreflightReport()
    check_models(config, report, load_tokenizer)
    return report


def the_card(place: Path, **changes: Any) -> PairCard:
    (card,) = checked(recipe(place, **changes)).cards
    return card


def row_of(card: PairCard, item: str) -> CardRow:
    (row,) = (row for row in card.rows if row.item == item)
    return row


def the_row(place: Path, item: str, **changes: Any) -> CardRow:
    return row_of(the_card(place, **changes), item)


def levels(card: PairCard) -> dict[str, str]:
    """The rows that are not ok."""
    return {row.item: row.level for row in card.rows if row.level != "ok"}


def facts(**fields: Any) -> ModelFacts:
    return ModelFacts("somewhere", 32, 256, "hash", "print", 1, **fields)


# ------------------------------------------------------------------ a pair that fits


def test_a_pair_that_fits_is_ok_in_every_row(place: Path) -> None:
    report = checked(recipe(place))
    (card,) = report.cards
    assert [row.item for row in card.rows] == ITEMS
    assert (card.ok, card.teacher, card.rendering_diff) == (True, "teacher 't'", "")
    assert {row.advice for row in card.rows} == {""}
    assert (report.problems, report.warnings) == ([], [])


def test_a_card_says_what_was_found_on_each_side(place: Path) -> None:
    card = the_card(place)
    found = {row.item: (row.student, row.teacher) for row in card.rows}
    both = "18 in the tokenizer, 32 in the model"
    assert found["vocabulary"] == (both, both)
    assert found["end token"][0] == "EOS 1 <|end|>; ends at 1 <|end|>"
    assert found["BOS and PAD"][0] == "BOS none; PAD 0 <|pad|>"
    assert found["think tags"][0] == "none; prompt ends without one"
    assert found["rendered prompts"] == ("3 rows", "the same")
    assert found["context"] == ("256 of 48 needed", "256 of 55 needed")
    assert found["sampling"] == (
        "temperature 1, top_p 1, top_k off, 3 a prompt",
        "scores at temperature 1",
    )


# ------------------------------------------------------------------ tokenizer and vocabulary


def test_another_tokenizer_is_an_error(place: Path) -> None:
    add_tokens(place, "teacher", "<new>")
    card = the_card(place)
    assert levels(card) == {"tokenizer": "error"}
    assert row_of(card, "tokenizer").student != row_of(card, "tokenizer").teacher
    assert "choose a teacher of the student's family" in card.told("error")[0]


@pytest.mark.parametrize(
    ("student", "teacher", "level"),
    [
        (151936, 151936, "ok"),
        (151936, 152064, "ok"),  # the ids above the student's are never asked for
        (152064, 151936, "warning"),
        (152064, 151669, "warning"),
        (152064, 151668, "error"),
        (151936, 151668, "error"),
    ],
)
def test_padded_vocabularies_may_differ_but_the_tokenizers_ids_must_be_there(
    student: int, teacher: int, level: str
) -> None:
    ours, theirs = (
        replace(facts(tokenizer_size=151669), vocab_size=size) for size in (student, teacher)
    )
    row = vocabulary_row(ours, theirs)
    assert row.level == level
    assert row.teacher == f"151669 in the tokenizer, {teacher} in the model"
    assert (str(teacher) in row.advice) == (level != "ok")


def test_the_vocabulary_of_the_model_is_read_from_its_config(place: Path) -> None:
    edit(place / "teacher" / "config.json", vocab_size=17)
    report = checked(recipe(place))
    assert levels(report.cards[0]) == {"vocabulary": "error"}
    assert "vocabulary of 17 is smaller than the 18" in report.problems[0]
    edit(place / "teacher" / "config.json", vocab_size=18)
    report = checked(recipe(place))
    assert levels(report.cards[0]) == {"vocabulary": "warning"}
    assert report.problems == []
    assert "vocabulary of 18 is smaller than the student's padded 32" in report.warnings[0]


# ------------------------------------------------------------------ special tokens


def test_another_eos_token_is_an_error(place: Path) -> None:
    edit(place / "teacher" / "tokenizer_config.json", eos_token="<|user|>")
    report = checked(recipe(place))
    assert report.cards[0].told("error") == report.problems
    assert levels(report.cards[0]) == {"end token": "error"}
    assert "<|user|>, the student with 1 <|end|>" in report.problems[0]


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_an_end_id_that_only_one_generation_config_knows_is_a_warning(
    place: Path, side: str
) -> None:
    edit(place / side / "generation_config.json", eos_token_id=[1, 0])
    card = the_card(place)
    assert levels(card) == {"end token": "warning"}
    shown = getattr(row_of(card, "end token"), side)
    assert shown == "EOS 1 <|end|>; ends at 0 <|pad|>, 1 <|end|>"
    assert "generation_config.json the teacher's eos_token_id" in card.told("warning")[0]


def test_without_a_generation_config_the_models_config_counts(place: Path) -> None:
    for name in ("student", "teacher"):
        (place / name / "generation_config.json").unlink()
    assert the_card(place).ok
    edit(place / "teacher" / "config.json", eos_token_id=[1, 2])
    assert read_model_facts(str(place / "teacher"), "t").end_ids == (1, 2)
    assert levels(the_card(place)) == {"end token": "warning"}


def test_the_end_ids_are_those_that_sampling_stops_at(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    from opd_core.training.models import end_ids

    folder = place / "student"
    edit(folder / "generation_config.json", eos_token_id=[0, 3])
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    sampled = end_ids(model, load_tokenizer(str(folder)))
    assert read_model_facts(str(folder), "student").end_ids == sampled == (0, 1, 3)


def test_a_student_without_any_end_token_is_a_warning(place: Path) -> None:
    edit(place / "student" / "generation_config.json", eos_token_id=None)
    edit(place / "student" / "tokenizer_config.json", eos_token=None)
    report = checked(recipe(place))
    assert levels(report.cards[0]) == {"end token": "warning"}
    assert report.warnings[0].startswith("student: it has no end token")


def test_another_bos_token_is_a_warning_and_another_pad_token_is_shown(place: Path) -> None:
    edit(place / "teacher" / "tokenizer_config.json", pad_token="<|end|>")
    row = the_row(place, "BOS and PAD")
    assert (row.level, row.teacher) == ("ok", "BOS none; PAD 1 <|end|>")
    edit(place / "teacher" / "tokenizer_config.json", bos_token="<|user|>")
    card = the_card(place)
    assert levels(card) == {"BOS and PAD": "warning"}
    assert "<|user|> as its BOS token, the student none" in card.told("warning")[0]


# ------------------------------------------------------------------ think tags and prompts


def test_think_tokens_are_shown_with_their_ids(place: Path) -> None:
    for name in ("student", "teacher"):
        add_tokens(place, name, "<think>", "</think>", "<think>er")
    row = the_row(place, "think tags")
    assert row.student == "18 <think>, 19 </think>; prompt ends without one"
    assert row.level == "ok"


def test_a_teacher_that_expects_a_think_tag_first_is_a_warning(place: Path) -> None:
    template(place, "teacher", think_at_the_end)
    report = checked(recipe(place))
    (card,) = report.cards
    assert levels(card) == {"think tags": "warning", "rendered prompts": "warning"}
    assert row_of(card, "think tags").teacher == "none; prompt ends with <think>"
    assert report.problems == []
    assert "its prompts end with <think>, the student's with no think tag" in report.warnings[0]
    assert card.rendering_diff.splitlines()[-2:] == [" <|user|>1+1=<|assistant|>", "+<think>↵"]


def test_the_same_think_tag_on_both_sides_is_ok(place: Path) -> None:
    for name in ("student", "teacher"):
        template(place, name, think_at_the_end)
    row = the_row(place, "think tags")
    assert (row.level, row.student) == ("ok", "none; prompt ends with <think>")


def only_for(content: str) -> Callable[[str], str]:
    return lambda text: f"{{% if messages[0]['content'] == '{content}' %}}:{{% endif %}}{text}"


def test_a_difference_in_a_later_data_source_is_found(place: Path) -> None:
    rows = [("sums", "1+1=")] * 20 + [("rare", "9-9=")]
    write_rows(place, *rows)
    template(place, "teacher", only_for("9-9="))
    card = the_card(place)
    assert levels(card) == {"rendered prompts": "warning"}
    row = row_of(card, "rendered prompts")
    assert (row.level, row.student, row.teacher) == ("warning", "8 rows", "1 differ: rows 20")
    assert "@@ row 20 (rare) @@" in card.rendering_diff
    assert "'<|user|>9-9=<|assistant|>' (row 20)" in row.advice


def test_a_think_tag_in_a_later_row_is_found(place: Path) -> None:
    only_later = "{% if messages[0]['content'] == '2+2=' %}<think>{% endif %}"
    template(place, "teacher", lambda text: text + only_later)
    row = the_row(place, "think tags")
    assert (row.level, row.teacher) == ("warning", "none; prompt ends with <think>")


def test_only_the_data_that_a_teacher_scores_is_rendered(place: Path) -> None:
    write_rows(place, ("sums", "1+1="), ("rare", "9-9="))
    template(place, "teacher", only_for("9-9="))
    launch = {"model": str(place / "teacher")}
    teachers = [{"name": n, "backend": "embedded", "launch": launch} for n in ("t", "other")]
    mapped = {"sums": "t", "rare": "other"}
    cards = checked(recipe(place, *teachers, opd__data_source_teacher_map=mapped)).cards
    assert [row_of(card, "rendered prompts").level for card in cards] == ["ok", "warning"]
    assert row_of(cards[0], "rendered prompts").student == "1 rows"


def test_a_teacher_without_chat_template_leaves_its_prompt_unknown(place: Path) -> None:
    template(place, "teacher", lambda _: None)
    report = checked(recipe(place))
    assert levels(report.cards[0]) == {"think tags": "unknown", "rendered prompts": "unknown"}
    (warning,) = report.warnings
    assert "does not render row 0 (it has no chat template)" in warning


def test_a_teacher_that_refuses_a_row_is_told_in_its_own_words(place: Path) -> None:
    template(place, "teacher", lambda text: "{{ raise_exception('users only') }}")
    row = the_row(place, "rendered prompts")
    assert row.level == "unknown"
    assert "does not render row 0 (users only)" in row.advice


@pytest.mark.parametrize("lacking", ["data", "template"])
def test_prompts_are_not_compared_without_data_or_a_students_template(
    place: Path, lacking: str
) -> None:
    if lacking == "data":
        (place / "train.jsonl").unlink()
    else:
        template(place, "student", lambda _: "{{ raise_exception('no') }}")
    card = the_card(place)
    assert levels(card) == {"think tags": "unknown", "rendered prompts": "unknown"}
    assert card.told("unknown") == [f"teacher 't': {NO_PROMPTS}"]


# ------------------------------------------------------------------ context and sampling


def test_a_context_that_is_too_short_is_an_error_of_its_owner(place: Path) -> None:
    edit(place / "teacher" / "config.json", max_position_embeddings=54)
    report = checked(recipe(place))
    assert levels(report.cards[0]) == {"context": "error"}
    assert "teacher 't': its context of 54 tokens is too short" in report.problems[0]
    edit(place / "teacher" / "config.json", max_position_embeddings=55)
    assert the_card(place).ok
    edit(place / "student" / "config.json", max_position_embeddings=47)
    report = checked(recipe(place))
    assert levels(report.cards[0]) == {"context": "error"}
    (problem,) = report.problems
    assert problem.startswith("student: its context of 47 tokens is shorter")


def test_a_context_that_is_not_stated_is_unknown(place: Path) -> None:
    edit(place / "teacher" / "config.json", max_position_embeddings=0)
    row = the_row(place, "context")
    assert (row.level, row.teacher) == ("unknown", "unknown of 55 needed")
    assert "set launch.context_length" in row.advice


def test_a_teachers_context_is_checked_beside_a_student_that_cannot_be_read(place: Path) -> None:
    shutil.rmtree(place / "student")
    edit(place / "teacher" / "config.json", max_position_embeddings=54)
    report = checked(recipe(place))
    assert [row.item for row in report.cards[0].rows] == ["context"]
    assert report.cards[0].rows[0].student == "unknown of 48 needed"
    assert "its context of 54 tokens is too short" in report.problems[1]


def test_sampling_that_is_not_the_plain_policy_is_an_error() -> None:
    assert sampling_row(SamplingConfig(max_new_tokens=1), 4).level == "ok"
    row = sampling_row(SamplingConfig(max_new_tokens=1, temperature=0.7, top_k=20), 4)
    assert row.student == "temperature 0.7, top_p 1, top_k 20, 4 a prompt"
    assert row.level == "error"
    assert "remove temperature" in row.advice


# ------------------------------------------------------------------ servers


def test_of_an_external_teacher_everything_but_the_sampling_is_unknown(place: Path) -> None:
    external = {"name": "t", "endpoint": "http://127.0.0.1:1", "backend": "lmdeploy"}
    report = checked(recipe(place, external))
    (card,) = report.cards
    assert levels(card) == dict.fromkeys(ITEMS[:-1], "unknown")
    assert report.warnings == [f"teacher 't': {EXTERNAL}"]
    assert report.problems == []
    assert row_of(card, "end token").student == "EOS 1 <|end|>; ends at 1 <|end|>"
    assert row_of(card, "rendered prompts").student == "3 rows"
    assert row_of(card, "context").teacher == "unknown of 49 needed"


def test_replicas_that_are_alike_share_a_card(place: Path) -> None:
    replica = {"backend": "embedded", "launch": {"model": str(place / "teacher")}}
    shorter = {"backend": "embedded", "launch": replica["launch"] | {"context_length": 55}}
    outside = {"endpoint": "http://127.0.0.1:1"}
    teacher = {"name": "t", "replicas": [replica, replica, shorter, outside]}
    cards = checked(recipe(place, teacher)).cards
    names = ["teacher 't'", "teacher 't' replica 2", "teacher 't'"]
    assert [card.teacher for card in cards] == names
    assert [card.ok for card in cards] == [True, True, False]
