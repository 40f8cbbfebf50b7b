"""The checks before a start: every mistake is found, told with what to do, and all at once."""

from __future__ import annotations

import copy
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from opd_core.config import ExperimentConfig
from opd_core.errors import PreflightError
from opd_core.preflight import ModelFacts, PreflightReport, read_model_facts, run_preflight
from opd_core.preflight.machine import lock_names

SYMBOLS = ["<pad>", "<eos>", "<end>", *"0123456789+-=?"]
VOCAB_SIZE = 24  # padded beyond the tokenizer's, as real models are
CONTEXT = 64
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def save_weights(folder: Path, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> None:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def save_tokenizer(
    folder: Path,
    symbols: list[str] = SYMBOLS,
    eos: str = "<eos>",
    template: str | None = TEMPLATE,
) -> None:
    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token="<pad>")
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student and a teacher; copied for every test, because making them is slow."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        save_weights(folder / name, seed)
        save_tokenizer(folder / name)
    return folder


@pytest.fixture
def place(tmp_path: Path, made_once: Path) -> Path:
    """Two models and a data file, as a run needs them."""
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    write_rows(tmp_path / "train.jsonl", row("1+1=?"), row("12-3=?", truth="9"), row("5=?"))
    return tmp_path


@pytest.fixture
def path_of_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def row(content: str, truth: str | None = "2", source: str = "sums") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": truth},
    }


def write_rows(file: Path, *rows: dict[str, Any] | str) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in rows]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


Change = Callable[[dict[str, Any]], None]


def recipe(place: Path, *changes: Change) -> ExperimentConfig:
    """A run that passes every check, with these changes made to it."""
    data: dict[str, Any] = {
        "name": "test",
        "student": {"model": str(place / "student")},
        "data": {"train": str(place / "train.jsonl"), "max_prompt_tokens": 16},
        "task": {},
        "sampling": {"max_new_tokens": 32},
        "opd": {
            "teachers": [
                {
                    "name": "teacher",
                    "backend": "embedded",
                    "launch": {"model": str(place / "teacher")},
                }
            ],
            "data_source_teacher_map": {"sums": "teacher"},
        },
        "training": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-3},
        "ray": {"object_store_mb": 80},
        "run": {"root": str(place / "runs")},
    }
    for change in changes:
        change(data)
    return ExperimentConfig.model_validate(data)


def put(path: str, value: Any) -> Change:
    """Set one value of the recipe, by its dotted path."""

    def change(data: dict[str, Any]) -> None:
        node: Any = data
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            node = node[part]
        node[last] = value

    return change


def launch(**settings: Any) -> Change:
    return lambda data: data["opd"]["teachers"][0]["launch"].update(settings)


def two_replicas(**of_the_second: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        teacher = data["opd"]["teachers"][0]
        first = {"backend": teacher.pop("backend"), "launch": teacher.pop("launch")}
        second = copy.deepcopy(first)
        second["launch"].update(of_the_second)
        teacher["replicas"] = [first, second]

    return change


def the_problem(place: Path, *changes: Change) -> str:
    report = run_preflight(recipe(place, *changes))
    (problem,) = report.problems
    return problem


# ------------------------------------------------------------------ a sound run


def test_a_sound_run_has_no_problems_and_is_described(place: Path) -> None:
    report = run_preflight(recipe(place))
    assert (report.problems, report.warnings) == ([], [])
    report.raise_problems()
    assert report.student == read_model_facts(str(place / "student"), "student")
    assert report.teachers == {"teacher": read_model_facts(str(place / "teacher"), "teacher")}
    assert report.data_sources == {"sums": 3}


def test_a_run_without_teacher_is_checked_as_far_as_it_goes(place: Path) -> None:
    def no_teacher(data: dict[str, Any]) -> None:
        data["opd"] = None
        data["task"] = {"group_size": 2, "judge": "opd_core.agent_loop.judges:arithmetic"}

    report = run_preflight(recipe(place, no_teacher))
    assert (report.problems, report.warnings, report.teachers) == ([], [], {})


def test_proof_sequences_are_prompts_of_at_least_three_tokens(place: Path) -> None:
    write_rows(place / "train.jsonl", row("7"), row("1+1=?"), row("2"))
    report = run_preflight(recipe(place))
    seven = SYMBOLS.index("7")
    assert report.proof_sequences == [[seven] * 3, [SYMBOLS.index(s) for s in "1+1=?"] * 3]


def test_proof_sequences_are_no_longer_than_a_rollout(place: Path) -> None:
    write_rows(place / "train.jsonl", row("1+" * 200))
    assert [len(ids) for ids in run_preflight(recipe(place)).proof_sequences] == [48]
    longer = (put("sampling.max_new_tokens", 500), launch(context_length=1000))
    report = run_preflight(recipe(place, *longer))
    assert [len(ids) for ids in report.proof_sequences] == [64]


def test_proof_sequences_stay_within_every_vocabulary(place: Path) -> None:
    shutil.rmtree(place / "teacher")
    save_weights(place / "teacher", vocab_size=8)
    save_tokenizer(place / "teacher")
    report = run_preflight(recipe(place))
    told_of_the_pair, told_of_the_data = report.problems
    assert "vocabulary of 8 is smaller than the 17 of the student's tokenizer" in told_of_the_pair
    assert "all below the models' vocabulary of 8" in told_of_the_data
    assert report.proof_sequences == []


# ------------------------------------------------------------------ models


def test_a_missing_model_is_named(place: Path) -> None:
    said = the_problem(place, put("student.model", str(place / "none")))
    assert said.startswith(f"student: no model at '{place / 'none'}'")
    assert "run `opd prepare`" in said
    assert the_problem(place, launch(model="Qwen/Qwen3-32B")).startswith(
        "teacher 'teacher': no model at 'Qwen/Qwen3-32B'"
    )


def test_a_model_without_weights_is_refused(place: Path) -> None:
    (place / "teacher" / "model.safetensors").unlink()
    assert "holds no weights (*.safetensors)" in the_problem(place)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "no-such-type"}'),
        ("tokenizer.json", "{"),
        ("tokenizer.json", None),
    ],
)
def test_a_model_that_cannot_be_read_is_refused(
    place: Path, file: str, content: str | None
) -> None:
    if content is None:
        (place / "teacher" / file).unlink()
    else:
        (place / "teacher" / file).write_text(content)
    said = the_problem(place)
    assert said.startswith(f"teacher 'teacher': the model at {place / 'teacher'} cannot be read: ")


def test_facts_are_read_from_the_files(place: Path) -> None:
    facts = read_model_facts(str(place / "student"), "student")
    weights = (place / "student" / "model.safetensors").stat().st_size
    assert (facts.vocab_size, facts.context_length, facts.eos_token_id) == (24, CONTEXT, 1)
    assert facts.weights_bytes == weights
    with pytest.raises(PreflightError, match="me: no model at"):
        read_model_facts(str(place), "me")


def test_the_fingerprint_is_of_the_weights_and_the_hash_of_the_vocabulary(place: Path) -> None:
    student, teacher = (
        read_model_facts(str(place / name), name) for name in ("student", "teacher")
    )
    assert student.tokenizer_hash == teacher.tokenizer_hash
    assert student.fingerprint != teacher.fingerprint
    assert read_model_facts(str(place / "student"), "again") == student


def test_the_end_of_a_large_file_counts_in_its_fingerprint(place: Path) -> None:
    def facts_with(last: bytes) -> ModelFacts:
        with (place / "student" / "model-2.safetensors").open("wb") as file:
            file.seek(65 * 2**20)
            file.write(last)
        return read_model_facts(str(place / "student"), "student")

    assert facts_with(b"a").fingerprint != facts_with(b"b").fingerprint
    assert facts_with(b"a") == facts_with(b"a")


def test_a_teacher_with_another_vocabulary_is_refused(place: Path) -> None:
    swapped = [*SYMBOLS[:-2], SYMBOLS[-1], SYMBOLS[-2]]
    save_tokenizer(place / "teacher", swapped)
    said = the_problem(place)
    assert "teacher 'teacher': its tokenizer is not the student's" in said
    assert "choose a teacher of the student's family" in said


def test_a_teacher_with_another_end_token_is_refused(place: Path) -> None:
    save_tokenizer(place / "teacher", eos="<end>")
    said = the_problem(place)
    assert (
        "teacher 'teacher': ends its answers with token 2 <end>, the student with 1 <eos>" in said
    )
    assert f"make the eos_token of {place / 'student'} the teacher's" in said


@pytest.mark.parametrize(("backend", "margin"), [("embedded", 7), ("sglang", 7), ("lmdeploy", 1)])
def test_a_context_must_hold_prompt_response_and_the_backends_margin(
    place: Path, backend: str, margin: int
) -> None:
    asked = (put("opd.teachers.0.backend", backend), launch(python=sys.executable))
    needed = 16 + 32 + margin
    assert run_preflight(recipe(place, *asked, launch(context_length=needed))).problems == []
    said = the_problem(place, *asked, launch(context_length=needed - 1))
    assert f"its context of {needed - 1} tokens is too short" in said
    assert f"{margin} (kept back by {backend}) = {needed}" in said


def test_a_context_that_is_not_set_is_the_models_own(place: Path) -> None:
    response = put("sampling.max_new_tokens", CONTEXT - 16 - 5)
    assert "its context of 64 tokens is too short" in the_problem(place, response)


def test_the_students_context_must_hold_prompt_and_response(place: Path) -> None:
    changes = (put("sampling.max_new_tokens", CONTEXT - 15), launch(context_length=1000))
    said = the_problem(place, *changes)
    assert said.startswith("student: its context of 64 tokens is shorter than prompt + response")


def test_a_student_without_chat_template_is_refused(place: Path) -> None:
    save_tokenizer(place / "student", template=None)
    said = the_problem(place)
    assert said.startswith(f"student: the tokenizer at {place / 'student'} has no chat template")


def test_prompts_that_the_students_template_refuses_are_told(place: Path) -> None:
    save_tokenizer(place / "student", template="{{ raise_exception('no system role, please') }}")
    said = the_problem(place)
    assert "row 0: the student's tokenizer cannot render it: no system role, please" in said


def test_a_teacher_that_renders_otherwise_is_a_warning(place: Path) -> None:
    save_tokenizer(place / "teacher", template="{{ messages[0]['content'] }}=")
    report = run_preflight(recipe(place))
    assert report.problems == []
    (warning,) = report.warnings
    assert "renders prompts in another way than the student: '1+1=?='" in warning


def test_replicas_of_a_teacher_must_be_one_model(place: Path) -> None:
    save_weights(place / "other", seed=9)
    save_tokenizer(place / "other", ["<pad>", "<eos>", "<end>", *"abc"])
    problems = run_preflight(recipe(place, two_replicas(model=str(place / "other")))).problems
    assert "teacher 'teacher' replica 1" in problems[0]
    assert "a teacher is one frozen model" in problems[0]
    assert "replica 1: its tokenizer is not the student's" in problems[1]
    assert len(problems) == 2


def test_an_external_teacher_is_said_to_be_unchecked(place: Path) -> None:
    def external(data: dict[str, Any]) -> None:
        data["opd"]["teachers"][0] = {"name": "teacher", "endpoint": "http://127.0.0.1:1"}

    report = run_preflight(recipe(place, external))
    assert report.problems == []
    assert "teacher 'teacher': its server is external" in report.warnings[0]


# ------------------------------------------------------------------ data and functions


def test_a_data_source_without_teacher_is_refused(place: Path) -> None:
    write_rows(place / "train.jsonl", row("1"), row("2", source="gsm8k"), row("3", source="gsm8k"))
    said = the_problem(place)
    assert "data_source 'gsm8k' (2 rows) has no teacher" in said
    assert "opd.data_source_teacher_map, or name opd.default_teacher" in said
    assert run_preflight(recipe(place, put("opd.default_teacher", "teacher"))).problems == []


def test_a_malformed_row_is_told_with_its_line(place: Path) -> None:
    write_rows(place / "train.jsonl", row("1"), "{", row("2"))
    assert "train.jsonl line 2: not valid JSON" in the_problem(place)


def test_a_missing_or_empty_file_is_told(place: Path) -> None:
    assert "no such data file" in the_problem(place, put("data.train", str(place / "none.jsonl")))
    write_rows(place / "train.jsonl")
    assert the_problem(place).endswith("train.jsonl: holds no rows")


@pytest.mark.parametrize("which", ["train", "evaluation"])
def test_a_judged_row_needs_a_ground_truth(place: Path, which: str) -> None:
    write_rows(place / "heldout.jsonl", row("1"))
    file = place / ("train.jsonl" if which == "train" else "heldout.jsonl")
    write_rows(file, row("1"), row("2", truth=None))
    evaluated = put("data.evaluation", str(place / "heldout.jsonl"))
    judged = put("task.judge", "opd_core.agent_loop.judges:arithmetic")
    said = the_problem(place, evaluated, judged)
    assert said == f"{file}: row 1 has no reward_model.ground_truth, but task.judge is set"
    assert run_preflight(recipe(place, evaluated)).problems == []  # nobody judges


def test_a_broken_evaluation_file_is_told_beside_a_broken_training_file(place: Path) -> None:
    write_rows(place / "train.jsonl", "[]")
    write_rows(place / "heldout.jsonl", "{}")
    report = run_preflight(recipe(place, put("data.evaluation", str(place / "heldout.jsonl"))))
    assert ["train.jsonl line 1" in report.problems[0], len(report.problems)] == [True, 2]
    assert "heldout.jsonl line 1: 'data_source' must be a name" in report.problems[1]


def test_evaluation_without_a_judge_is_a_warning(place: Path) -> None:
    report = run_preflight(recipe(place, put("data.evaluation", str(place / "train.jsonl"))))
    assert report.problems == []
    assert report.warnings == [
        "data.evaluation is named but no judge is, so nothing can be evaluated: name "
        "task.judge or task.batch_judge"
    ]


def test_evaluation_rows_need_no_teacher(place: Path) -> None:
    write_rows(place / "heldout.jsonl", row("1", source="aime"))
    evaluated = put("data.evaluation", str(place / "heldout.jsonl"))
    judged = put("task.judge", "opd_core.agent_loop.judges:arithmetic")
    assert run_preflight(recipe(place, evaluated, judged)).problems == []


@pytest.fixture
def a_module_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "judge_that_fails.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    yield "judge_that_fails:judge"
    sys.modules.pop("judge_that_fails", None)


def test_functions_that_cannot_be_imported_are_all_told(
    place: Path, a_module_that_fails: str
) -> None:
    changes = (
        put("task.judge", "no_such_module:judge"),
        put("task.filter_func", a_module_that_fails),
    )
    report = run_preflight(recipe(place, *changes))
    assert "task.judge: no_such_module:judge: cannot be imported" in report.problems[0]
    assert "task.filter_func: judge_that_fails:judge: cannot be imported" in report.problems[1]
    assert "no licence" in report.problems[1]
    assert "no_such_name" in the_problem(place, put("task.batch_judge", "json:no_such_name"))
    assert "not a function" in the_problem(place, put("task.judge", "json:__name__"))


def test_a_tool_that_cannot_be_called_is_a_problem(place: Path) -> None:
    def tool(path: str, *stops: str) -> Change:
        return put("task", {"tool": path, "tool_stop": stops})

    calculator = "opd_core.agent_loop.tools:calculator"
    assert run_preflight(recipe(place, tool(calculator, "=", "?"))).problems == []
    assert "task.tool: json:no_such_name" in the_problem(place, tool("json:no_such_name", "="))
    said = the_problem(place, tool(calculator, "=", "+1"))
    assert "'+1' is '+', '1': name a text that is exactly one" in said


# ------------------------------------------------------------------ servers


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_a_port_in_use_is_told(place: Path, taken_port: int) -> None:
    said = the_problem(place, launch(port=taken_port))
    assert said.startswith(f"teacher 'teacher': port {taken_port} is in use on 127.0.0.1; free it")
    endpoint = put("opd.teachers.0.endpoint", f"http://127.0.0.1:{taken_port}")
    assert f"port {taken_port} is in use" in the_problem(place, endpoint)


def test_the_port_of_an_external_server_is_its_own(place: Path, taken_port: int) -> None:
    def external(data: dict[str, Any]) -> None:
        endpoint = f"http://127.0.0.1:{taken_port}"
        data["opd"]["teachers"][0] = {"name": "teacher", "endpoint": endpoint}

    assert run_preflight(recipe(place, external)).problems == []


def test_a_port_given_twice_is_told(place: Path, taken_port: int) -> None:
    changes = (launch(port=taken_port), two_replicas())
    report = run_preflight(recipe(place, *changes))
    assert f"port {taken_port} is given to 2 servers" in report.problems[0]
    assert f"port {taken_port} is in use" in report.problems[1]


@pytest.mark.parametrize("backend", ["sglang", "lmdeploy"])
def test_a_backend_that_is_not_installed_needs_an_interpreter(place: Path, backend: str) -> None:
    chosen = put("opd.teachers.0.backend", backend)
    said = the_problem(place, chosen)
    assert f"{backend} is not installed here" in said
    assert "set launch.python to that environment's interpreter" in said
    assert run_preflight(recipe(place, chosen, launch(python=sys.executable))).problems == []


def sampled_by(engine: str, **sampling: Any) -> Change:
    return lambda data: data["sampling"].update(engine=engine, **sampling)


def test_the_students_servers_need_an_interpreter_too(place: Path) -> None:
    said = the_problem(place, sampled_by("sglang"))
    assert said.startswith("student server 0: sglang is not installed here")
    assert "set sampling.server.python to that environment's interpreter" in said
    there = sampled_by("sglang", server={"python": sys.executable})
    assert run_preflight(recipe(place, there)).problems == []
    missing = sampled_by("sglang", server={"python": str(place / "none")})
    assert "student server 0: sampling.server.python" in the_problem(place, missing)


def test_the_students_servers_hold_a_rollout_and_what_they_keep_back(place: Path) -> None:
    def server(**settings: Any) -> Change:
        return sampled_by("sglang", server={"python": sys.executable, **settings})

    assert run_preflight(recipe(place, server(context_length=16 + 32 + 7))).problems == []
    for context in (16 + 32 + 6, CONTEXT + 1):
        said = the_problem(place, server(context_length=context))
        assert f"the student's servers: their context of {context} tokens has to hold 55" in said
    longest = (put("sampling.max_new_tokens", CONTEXT - 16), launch(context_length=1000))
    assert f"the model's own is {CONTEXT}" in the_problem(place, *longest, server())
    too_long = (put("sampling.max_new_tokens", CONTEXT - 15), launch(context_length=1000))
    assert the_problem(place, *too_long, server()).startswith("student: its context of 64")


def test_an_interpreter_that_is_not_there_is_told(place: Path) -> None:
    for python in (str(place / "venv/bin/python"), str(place / "train.jsonl"), "no-such-python"):
        said = the_problem(place, launch(python=python))
        assert said == f"teacher 'teacher': launch.python {python!r} is not executable"


# ------------------------------------------------------------------ devices


def fake_nvidia_smi(folder: Path, *lines: str, status: int = 0) -> None:
    program = folder / "nvidia-smi"
    echoed = "\n".join(f"echo '{line}'" for line in lines)
    program.write_text(f"#!/bin/sh\n{echoed}\nexit {status}\n")
    program.chmod(0o755)


def on_gpus(student: list[str], teacher: list[str]) -> tuple[Change, Change]:
    return put("student.devices", student), launch(devices=teacher)


def test_free_gpus_are_found_by_index_and_by_uuid(place: Path, path_of_programs: Path) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-aa, 4", "1, GPU-bb, 1024", "2, GPU-cc, [N/A]")
    report = run_preflight(recipe(place, *on_gpus(["0", "2"], ["GPU-bb"])))
    assert (report.problems, report.warnings) == ([], [])


def test_a_gpu_that_is_not_there_is_told(place: Path, path_of_programs: Path) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-aa, 4", "1, GPU-bb, 4")
    said = the_problem(place, *on_gpus(["0"], ["7"]))
    assert said == "teacher 'teacher': no GPU '7' on this host (there: 0, 1)"


def test_without_a_driver_there_is_no_gpu(place: Path, path_of_programs: Path) -> None:
    assert "student: no GPU '0' on this host (there: none)" in the_problem(
        place, *on_gpus(["0"], ["cpu"])
    )
    fake_nvidia_smi(path_of_programs, "NVIDIA-SMI has failed", status=9)
    assert "no GPU '0' on this host (there: none)" in the_problem(place, *on_gpus(["0"], ["cpu"]))


def test_shared_gpus_on_which_nothing_trains_are_told(place: Path, path_of_programs: Path) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-aa, 4", "1, GPU-bb, 4")
    server = {"python": sys.executable, "memory_fraction": 0.4}
    shared = sampled_by("sglang", server=server, actors=2)
    devices = on_gpus(["0", "1"], ["cpu"])
    (warning,) = run_preflight(recipe(place, *devices, shared)).warnings
    assert warning.startswith("student.devices: nothing trains on 1 of the 2 GPUs")
    ranks = put("training.actors", 2)
    assert run_preflight(recipe(place, *devices, shared, ranks)).warnings == []


def test_a_gpu_that_holds_somebodys_memory_is_told(place: Path, path_of_programs: Path) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-aa, 1025", "1, GPU-bb, 4")
    said = the_problem(place, *on_gpus(["0"], ["1"]))
    assert "student: GPU 0 already holds 1025 MiB of somebody's memory; wait" in said


def test_one_gpu_under_two_names_is_told(place: Path, path_of_programs: Path) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-aa, 4")
    said = the_problem(place, *on_gpus(["0"], ["GPU-aa"]))
    assert "GPU GPU-aa is the same as that of student (0, GPU-aa): give each its own" in said


def test_tensor_parallelism_needs_as_many_devices(place: Path, path_of_programs: Path) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-aa, 4", "1, GPU-bb, 4")
    changes = (
        put("opd.teachers.0.backend", "sglang"),
        launch(python=sys.executable, tp_size=2, devices=["0"]),
    )
    assert "tp_size 2 needs as many devices, got 0" in the_problem(place, *changes)


def test_the_students_gpus_on_an_existing_cluster_are_not_looked_for_here(
    place: Path, path_of_programs: Path
) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-aa, 4")
    cluster = put("ray", {"address": "http://127.0.0.1:8265"})
    assert run_preflight(recipe(place, *on_gpus(["5"], ["0"]), cluster)).problems == []


def test_a_launched_teacher_cannot_serve_a_student_on_another_host(place: Path) -> None:
    elsewhere = put("ray", {"address": "http://head:8265"})
    (said,) = run_preflight(recipe(place, elsewhere)).problems
    assert "loopback only: start the teacher yourself" in said


def test_a_slice_of_a_gpu_is_taken_on_trust(place: Path, path_of_programs: Path) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-aa, 4")
    report = run_preflight(recipe(place, *on_gpus(["0"], ["MIG-cc"])))
    assert report.problems == []
    assert report.warnings == ["teacher 'teacher': MIG device 'MIG-cc' is taken on trust"]


def test_a_device_has_one_name_to_be_locked_by(path_of_programs: Path) -> None:
    fake_nvidia_smi(path_of_programs, "0, GPU-bb, 4", "1, GPU-aa, [N/A]")
    names = lock_names(("1", "cpu:0", "0", "GPU-bb", "7", "MIG-cc", "GPU-dd"))
    assert names == ("7", "GPU-aa", "GPU-bb", "GPU-dd", "MIG-cc", "cpu:0")


def test_without_a_driver_a_device_keeps_its_name(path_of_programs: Path) -> None:
    assert lock_names(["cpu:1", "0", "cpu:0", "0"]) == ("0", "cpu:0", "cpu:1")


# ------------------------------------------------------------------ disk and shared memory


def test_too_little_disk_is_told(place: Path) -> None:
    # A file of holes as large as the disk's free space: a student and its checkpoints never fit.
    with (place / "student" / "model-2.safetensors").open("wb") as file:
        file.truncate(shutil.disk_usage(place).free)
    problems = run_preflight(recipe(place)).problems
    (said,) = [problem for problem in problems if problem.startswith(str(place / "runs"))]
    assert "GiB free, this run needs about" in said
    assert "up to 3 checkpoints of" in said
    assert "free some, lower training.keep_checkpoints, or set run.root" in said
    kept = (put("training.checkpoint_every", 1), put("training.keep_checkpoints", 4))
    problems = run_preflight(recipe(place, *kept)).problems
    assert any("up to 5 checkpoints of" in problem for problem in problems)
    none = put("training.checkpoint_every", 0)
    assert any("up to 0 checkpoints" in p for p in run_preflight(recipe(place, none)).problems)


def test_weights_on_their_way_to_servers_need_room_too(place: Path) -> None:
    with (place / "student" / "model-2.safetensors").open("wb") as file:
        file.truncate(shutil.disk_usage(place).free)
    server = {"python": sys.executable}

    def told(engine: str, **more: Any) -> str:
        changes = (sampled_by(engine, server=server, **more), put("training.checkpoint_every", 0))
        return "\n".join(run_preflight(recipe(place, *changes)).problems)

    assert "GiB of weights on their way to its servers" in told("sglang")
    assert "on their way" not in told("sglang", weight_sync="tensor")
    elsewhere = told("sglang", sync_folder=str(place / "none" / "yet"))
    assert f"sampling.sync_folder {place / 'none' / 'yet'}: " in elsewhere
    assert "way to its servers" not in elsewhere


def test_a_target_that_is_never_measured_is_told(place: Path) -> None:
    stop = put("training.stop_when", {"at_least": 0.9})
    assert "eval/accuracy is never recorded without held-out rows" in the_problem(place, stop)


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="this system has no /dev/shm to be full")
def test_too_little_shared_memory_is_told(place: Path) -> None:
    mib = shutil.disk_usage("/dev/shm").free // 2**20 + 1024
    said = the_problem(place, put("ray.object_store_mb", mib))
    assert said.startswith("/dev/shm: ")
    assert f"Ray's object store needs {mib} MiB; enlarge it, or lower ray.object_store_mb" in said
    cluster = put("ray", {"address": "http://127.0.0.1:8265", "object_store_mb": mib})
    assert run_preflight(recipe(place, cluster)).problems == []  # it has a store of its own


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="this system has no /dev/shm to be full")
def test_weights_that_sglang_takes_from_shared_memory_need_room_there(place: Path) -> None:
    server = {"python": sys.executable}
    with (place / "student" / "model-2.safetensors").open("wb") as file:
        file.truncate(3 * 2**29)  # more than one bucket
    almost_all = put("ray.object_store_mb", shutil.disk_usage("/dev/shm").free // 2**20 - 8)
    by_handle = sampled_by("sglang", server=server, weight_sync="tensor")
    (said,) = (
        p for p in run_preflight(recipe(place, almost_all, by_handle)).problems if "shm" in p
    )
    assert "way to the student's servers 1024 MiB; enlarge it" in said
    assert said.endswith("or write sampling.weight_sync: disk")
    (place / "student" / "model-2.safetensors").unlink()
    for changes in (by_handle, sampled_by("sglang", server=server)):  # a student of some KiB
        problems = run_preflight(recipe(place, almost_all, changes)).problems
        assert not any("shm" in problem for problem in problems)


def test_an_object_store_of_less_than_two_students_is_a_warning(place: Path) -> None:
    with (place / "student" / "model-2.safetensors").open("wb") as file:
        file.truncate(41 * 2**20)
    (warning,) = run_preflight(recipe(place)).warnings
    assert "ray.object_store_mb 80 holds fewer than two copies" in warning


# ------------------------------------------------------------------ all at once


def test_all_problems_are_told_at_once(
    place: Path, path_of_programs: Path, taken_port: int
) -> None:
    write_rows(place / "train.jsonl", "{")
    (place / "teacher" / "model.safetensors").unlink()
    changes = (
        put("student.model", str(place / "none")),
        put("student.devices", ["0"]),
        put("task.filter_func", "no_such_module:f"),
        put("opd.teachers.0.backend", "lmdeploy"),
        launch(port=taken_port),
    )
    report = run_preflight(recipe(place, *changes))
    expected = [
        "student: no model at",
        "teacher 'teacher': ",
        "train.jsonl line 1",
        "task.filter_func",
        "lmdeploy is not installed",
        f"port {taken_port} is in use",
        "no GPU '0'",
    ]
    assert len(report.problems) == len(expected)
    for part, problem in zip(expected, report.problems, strict=True):
        assert part in problem
    with pytest.raises(PreflightError) as caught:
        report.raise_problems()
    said = str(caught.value)
    assert said.startswith("nothing was started, because:\n  - student: no model at")
    assert all(problem in said for problem in report.problems)


def test_a_report_without_problems_raises_nothing() -> None:
    report = PreflightReport(warnings=["only a warning"])
    report.raise_problems()
