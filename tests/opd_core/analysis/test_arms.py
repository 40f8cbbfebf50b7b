from __future__ import annotations

from typing import Any

from opd_core.analysis.arms import group_arms
from opd_core.analysis.run_data import RunData
from tests.opd_core.analysis.compared_runs import FINGERPRINTS, make_run


def labels(*runs: RunData) -> dict[str, list[str]]:
    arms, _ = group_arms(runs)
    return {arm.label: [run.run_id for run in arm.runs] for arm in arms}


def other(run_id: str = "other", seed: int = 1, **fields: Any) -> RunData:
    return make_run(run_id, seed, recipe=["opd.task_adv_weight=0.5", "task.group_size=4"], **fields)


def at_commit(run_id: str, commit: str, seed: int = 1) -> RunData:
    attempt = {"git_commit": commit, "git_changes": ""}
    return make_run(run_id, seed, attempts=[attempt])


def test_runs_that_differ_in_the_seed_only_are_one_arm() -> None:
    runs = [make_run("a", 1), make_run("b", 2), other("c", 1), other("d", 2)]
    assert list(labels(*runs).values()) == [["a", "b"], ["c", "d"]]


def test_the_arm_of_the_first_run_comes_first() -> None:
    assert next(iter(labels(other(), make_run("a")).values())) == ["other"]


def test_where_a_run_lives_and_what_changes_no_number_does_not_part_runs() -> None:
    surroundings = ["run.root=elsewhere", "tracking.mlflow=false", "training.keep_checkpoints=3"]
    devices = "student.devices=['cpu:1']"
    moved = make_run("b", 2, recipe=[*surroundings, devices, "evaluation.every=10"])
    assert labels(make_run("a", 1), moved, other())["tiny"] == ["a", "b"]


def test_another_length_of_training_parts_runs() -> None:
    assert len(labels(make_run("a", 1), make_run("b", 2, recipe=["training.steps=60"]))) == 2


def test_the_content_of_data_and_models_parts_runs_and_their_paths_do_not() -> None:
    run = make_run("b", 2)
    run.config["student"]["model"] = "/elsewhere/student"
    assert labels(make_run("a", 1), run, other())["tiny"] == ["a", "b"]
    retold = make_run("c", 3, fingerprints=FINGERPRINTS | {"data.train": "dddd"})
    assert len(labels(make_run("a", 1), retold)) == 2


def test_a_setting_that_an_older_run_did_not_know_has_its_default() -> None:
    old = make_run("b", 2)
    del old.config["training"]["packing"]
    assert labels(make_run("a", 1), old, other())["tiny"] == ["a", "b"]


def test_arms_of_one_name_are_told_apart_by_what_differs() -> None:
    assert list(labels(make_run("a"), other())) == [
        "tiny",
        "tiny (task.group_size=4, opd.task_adv_weight=0.5)",
    ]


def test_each_arm_of_a_name_is_told_by_what_parts_it_from_the_first_of_that_name() -> None:
    grpo = ["name=grpo", "opd.task_adv_weight=0.5", "task.group_size=4"]
    faster = make_run("faster", recipe=[*grpo, "training.learning_rate=0.01"])
    found = labels(make_run("a"), make_run("grpo", recipe=grpo), faster)
    assert list(found) == ["tiny", "grpo", "grpo (training.learning_rate=0.01)"]


def test_runs_of_one_arm_alone_are_compared_one_by_one() -> None:
    arms, warnings = group_arms([make_run("a", 1), make_run("b", 2)])
    assert [arm.label for arm in arms] == ["a", "b"]
    assert any("one by one" in warning for warning in warnings)


def test_a_run_given_twice_is_an_arm_against_itself_or_counts_once() -> None:
    run = make_run("a")
    assert labels(run, run) == {"a": ["a"], "a again": ["a"]}
    arms, warnings = group_arms([run, run, other()])
    assert [len(arm.runs) for arm in arms] == [1, 1]
    assert "a run that was given more than once counts once" in warnings


def test_the_same_seed_with_other_code_is_a_comparison_of_code() -> None:
    runs = [at_commit("a", "11112222333"), at_commit("b", "44445555666")]
    assert labels(*runs) == {"tiny": ["a"], "tiny (code 44445555)": ["b"]}


def test_seeds_with_other_code_stay_together_with_a_warning() -> None:
    arms, warnings = group_arms([at_commit("a", "1111", 1), at_commit("b", "2222", 2), other("c")])
    assert [run.run_id for run in arms[0].runs] == ["a", "b"]
    assert "tiny: its runs were made with different code (see the differences)" in warnings


def test_one_seed_twice_is_told_as_one() -> None:
    arms, warnings = group_arms([make_run("a", 1), make_run("b", 1), other("c")])
    assert arms[0].seeds == (1,)
    assert any("runs of one seed" in warning for warning in warnings)
