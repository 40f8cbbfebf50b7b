"""Which run goes on, with which settings, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from opd_core.config import ExperimentConfig
from opd_core.errors import ConfigError, DataError
from opd_core.lifecycle.process import boot_id, identify
from opd_core.recipe import load_recipe
from opd_core.tracking.journal import Journal
from opd_core.tracking.mlflow_sink import flatten_params
from opd_core.training.attempts import Attempt, RunHistory
from opd_core.training.checkpoint_folder import CheckpointFolder
from opd_core.training.lineage import FREE, ROUNDING, RunPlan, plan_run

RECIPE = Path(__file__).parents[3] / "deployments" / "recipes" / "tiny.yaml"
STEPS, TRAINED = 10, 4
KILLED = Attempt(1.0)


def make_run(root: Path, *settings: str, attempt: Attempt = KILLED, name: str = "tiny-1") -> Path:
    """A run of ten train steps of which four were trained, and a checkpoint after two."""
    run_dir = root / name
    checkpoints = CheckpointFolder(run_dir / "checkpoints", keep=1, keep_every=0)
    checkpoints.commit(checkpoints.begin(2), {})
    config = load_recipe(RECIPE, [f"training.steps={STEPS}", f"run.root={root}", *settings])
    (run_dir / "config.json").write_text(json.dumps(config.resolved(), ensure_ascii=False))
    RunHistory(name, (attempt,), {}).write(run_dir)
    with Journal(run_dir / "metrics.jsonl") as journal:
        for train_step in range(1, TRAINED + 1):
            journal.append(train_step, {"time/step_s": 1.0})
    return run_dir


def resume(run_dir: Path, *overrides: str) -> ExperimentConfig:
    plan = plan_run(RECIPE, overrides, resume=str(run_dir))
    assert plan.resume == run_dir
    return plan.config


def test_a_recipe_alone_begins_anew() -> None:
    assert plan_run(RECIPE, ["seed=5"]) == RunPlan(load_recipe(RECIPE, ["seed=5"]))


def test_a_run_goes_on_with_its_own_recipe(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "training.learning_rate=1e-05", "description=Über λ 🎓")
    config = resume(run_dir)
    assert config.training.steps == STEPS
    assert config.training.learning_rate == 1e-05
    assert config.description == "Über λ 🎓"
    assert config.opd is not None
    assert config.opd.teachers[0].launch is not None


@pytest.mark.parametrize(
    "override",
    [
        "training.steps=20",
        "training.actors=2",
        "training.micro_batch_tokens=64",
        "training.stop_when={metric: eval/accuracy, at_least: 0.9}",
        "training.checkpoint_every=1",
        "sampling.max_rows=3",
        "sampling.max_restarts=0",
        "sampling.sync_folder=/dev/shm",
        "student.devices=['0']",
        "ray.address=http://head:8265",
        "tracking.mlflow=false",
        "tracking.rollouts_kept=0",
        "training.teacher_gradient_every=3",
        "cost={device_hour: 2, teacher_million_tokens: {teacher: 0.5}}",
        "evaluation.every=1",
        "opd.teachers.0.max_concurrency=1",
        "opd.teachers.0.launch.port=4000",
        "opd.teachers.0.launch.env={A: b}",
        "opd.failure_budget.ratio=0.5",
    ],
)
def test_what_changes_no_number_may_change(tmp_path: Path, override: str) -> None:
    run_dir = make_run(tmp_path)
    assert resume(run_dir, override) != resume(run_dir)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.learning_rate=0.5", "training.learning_rate: 0.0005 → 0.5"),
        ("seed=7", "seed: 1234 → 7"),
        ("name=other", "name: tiny → other"),
        ("deterministic=true", "deterministic: false → true"),
        ("training.prompts_per_step=3", "training.prompts_per_step: 128 → 3"),
        ("student.model=/other", "student.model: "),
        ("student.lora={}", "student.lora: null → -"),
        ("evaluation.samples=9", "evaluation.samples: "),
        ("sampling.engine=sglang", "sampling.engine: transformers → sglang"),
        ("sampling.max_staleness=1", "sampling.max_staleness: 0 → 1"),
        ("training.importance_cap=9", "training.importance_cap: "),
        ("opd.teachers.0.launch.model=/other", "opd.teachers.0.launch.model: "),
        ("opd.teachers.0.launch.dtype=bfloat16", "opd.teachers.0.launch.dtype: "),
        ("opd.opd_adv_weight=2", "opd.opd_adv_weight: 1.0 → 2.0"),
    ],
)
def test_what_changes_a_number_is_refused_with_both_values_and_the_way_out(
    tmp_path: Path, override: str, told: str
) -> None:
    run_dir = make_run(tmp_path)
    with pytest.raises(ConfigError) as refused:
        resume(run_dir, "training.actors=2", override)
    said = str(refused.value)
    assert f"  {told}" in said
    assert f"opd run --fork {run_dir} --set '{override.partition('=')[0]}" in said
    assert "training.actors" not in said  # that one may


def test_the_students_servers_may_be_served_in_another_way(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "sampling.engine=sglang")
    more = resume(run_dir, "sampling.server={startup_limit_s: 9, cpu_threads: 2}")
    assert more.sampling.server is not None
    assert more.sampling.server.cpu_threads == 2
    with pytest.raises(ConfigError, match=r"sampling\.server\.dtype: null → bfloat16"):
        resume(run_dir, "sampling.server={dtype: bfloat16, cpu_threads: 2}")


def test_a_deterministic_run_keeps_what_may_change_its_last_bits(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "deterministic=true")
    for override in ("training.actors=2", "opd.teachers.0.launch.cpu_threads=2"):
        with pytest.raises(ConfigError, match=r"deterministic: true, and it may change last bits"):
            resume(run_dir, override)
    assert resume(run_dir, "training.steps=20", "ray.num_cpus=9").training.steps == 20


def test_more_steps_would_change_a_learning_rate_that_falls_over_all_of_them(
    tmp_path: Path,
) -> None:
    run_dir = make_run(tmp_path, "training.schedule=cosine")
    with pytest.raises(ConfigError, match=r"steps: 10 → 20 \(schedule: cosine, so the learning"):
        resume(run_dir, "training.steps=20")


def test_a_completed_run_goes_on_only_to_further_steps_or_another_target(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, attempt=Attempt(1.0, status="completed"))
    with pytest.raises(ConfigError, match="has completed after 4 of 10 train steps"):
        resume(run_dir)
    with pytest.raises(ConfigError, match="has completed after 4 of 10 train steps"):
        resume(run_dir, "training.steps=9")
    assert resume(run_dir, "training.steps=11").training.steps == 11
    resume(run_dir, "training.stop_when={metric: opd_reverse_kl, at_most: 0.1}")


def test_a_run_that_stopped_at_its_target_is_told_how_to_train_on(tmp_path: Path) -> None:
    target = "training.stop_when={at_least: 0.8}"
    run_dir = make_run(tmp_path, target, attempt=Attempt(1.0, status="completed"))
    with pytest.raises(ConfigError, match=r"its target \(eval/accuracy\).*stop_when=null"):
        resume(run_dir)
    resume(run_dir, "training.stop_when=null")


def test_steps_that_were_trained_cannot_be_taken_back(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    assert resume(run_dir, f"training.steps={TRAINED}").training.steps == TRAINED
    with pytest.raises(ConfigError, match="3 is below the 4 train steps that run tiny-1 has"):
        resume(run_dir, "training.steps=3")


def test_a_living_run_is_neither_resumed_nor_kept_from_being_forked(tmp_path: Path) -> None:
    parent = identify(os.getppid())
    assert parent is not None
    alive = replace(Attempt(1.0), pid=parent.pid, start_ticks=parent.start_ticks, boot_id=boot_id())
    run_dir = make_run(tmp_path, attempt=alive)
    with pytest.raises(ConfigError, match=rf"still running \(pid {os.getppid()}\)"):
        resume(run_dir)
    assert plan_run(RECIPE, fork=str(run_dir)).fork == run_dir


def test_a_run_whose_journal_is_damaged_does_not_go_on(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    with (run_dir / "metrics.jsonl").open("a") as journal:
        journal.write("nonsense\n")
    with pytest.raises(DataError, match=f"line {TRAINED + 1}: .*mend"):
        resume(run_dir)


def test_a_run_is_found_by_its_id_under_the_run_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "elsewhere")
    where = f"run.root={tmp_path / 'elsewhere'}"
    assert plan_run(RECIPE, [where], resume="tiny-1").resume == run_dir
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{RECIPE.read_text()}\nrun: {{root: {tmp_path / 'elsewhere'}}}\n")
    assert plan_run(recipe, fork="tiny-1").fork == run_dir
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no run 'tiny-1': .* in {tmp_path / 'runs'}"):
        plan_run(RECIPE, resume="tiny-1")
    assert plan_run(RECIPE, resume="elsewhere/tiny-1").resume == run_dir


def test_a_fork_may_change_anything_and_has_something_left_to_train(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    plan = plan_run(RECIPE, ["training.learning_rate=0.5", "seed=3"], fork=str(run_dir))
    assert (plan.config.seed, plan.config.training.learning_rate) == (3, 0.5)
    with pytest.raises(ConfigError, match=r"newest checkpoint of tiny-1 is of train step 2"):
        plan_run(RECIPE, ["training.steps=2"], fork=str(run_dir))


def test_a_run_goes_on_or_begins_anew_not_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got both"):
        plan_run(RECIPE, resume="a", fork="b")


def test_every_setting_that_may_change_exists() -> None:
    given = ["opd.teachers.0.launch.env={A: b}", "training.stop_when={metric: x, at_most: 1}"]
    given += ["sampling.engine=sglang", "sampling.server={}"]
    keys = flatten_params(load_recipe(RECIPE, given).resolved())
    for pattern in [
        p for table in (FREE, ROUNDING) for patterns in table.values() for p in patterns
    ]:
        assert any(fnmatchcase(key, pattern) for key in keys), pattern
