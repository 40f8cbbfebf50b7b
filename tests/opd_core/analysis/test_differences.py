from __future__ import annotations

from dataclasses import replace
from typing import Any

from opd_core.analysis.differences import find_differences, identity
from opd_core.analysis.outcome import Difference
from opd_core.analysis.run_data import RunData
from tests.opd_core.analysis.compared_runs import FINGERPRINTS, make_run

MADE = {
    "git_commit": "1111",
    "git_changes": "",
    "python": "3.11.9",
    "host": "one",
    "gpus": ["H200", "H200"],
    "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
}


def found(*arms: RunData | list[RunData]) -> dict[tuple[str, str], dict[str, str]]:
    grouped = [(f"arm {i}", arm if isinstance(arm, list) else [arm]) for i, arm in enumerate(arms)]
    return {(each.kind, each.key): dict(each.values) for each in find_differences(grouped)}


def made(run_id: str, **changes: Any) -> RunData:
    return make_run(run_id, attempts=[MADE | changes])


def test_equal_runs_differ_in_nothing_but_the_seed() -> None:
    assert find_differences([("a", [make_run("a", 1)]), ("b", [make_run("b", 2)])]) == ()


def test_a_setting_is_told_with_its_value_in_each_arm_and_which_is_the_default() -> None:
    changed = make_run("b", recipe=["training.max_grad_norm=0.5"])
    assert found(make_run("a"), changed) == {
        ("recipe", "training.max_grad_norm"): {"arm 0": "1.0 (default)", "arm 1": "0.5"}
    }


def test_runs_of_an_arm_that_disagree_are_told_one_by_one() -> None:
    runs = [made("a"), made("b", git_commit="2222")]
    assert found(runs, made("c"))[("code", "commit")] == {"a": "1111", "b": "2222", "arm 1": "1111"}


def test_a_setting_without_effect_is_told_as_one_and_last() -> None:
    changed = make_run("b", recipe=["training.keep_checkpoints=5", "training.betas=[0.9, 0.95]"])
    told = find_differences([("a", [make_run("a")]), ("b", [changed])])
    assert [(each.kind, each.key) for each in told] == [
        ("recipe", "training.betas"),
        ("without effect", "training.keep_checkpoints"),
    ]


def test_a_fork_is_another_beginning_and_no_run_of_the_same_arm() -> None:
    fork = replace(make_run("b"), forked_from="tiny-1@20")
    assert found(make_run("a"), fork) == {
        ("recipe", "begun from"): {"arm 0": "the student's model", "arm 1": "tiny-1@20"}
    }
    assert identity(make_run("a")) != identity(fork)


def test_where_a_run_lives_is_no_difference() -> None:
    moved = make_run("b", recipe=["run.root=there", "tracking.mlflow=false", "description=x"])
    assert found(make_run("a"), moved) == {}


def test_a_part_that_one_recipe_leaves_out_is_one_difference() -> None:
    grpo = make_run("b", recipe=["opd=null", "task.group_size=4"])
    assert found(make_run("a"), grpo) == {
        ("recipe", "task.group_size"): {"arm 0": "1 (default)", "arm 1": "4"},
        ("recipe", "opd"): {"arm 0": "set", "arm 1": "null"},
    }


def test_content_is_told_by_fingerprint_and_a_path_alone_has_no_effect() -> None:
    other = make_run("b", fingerprints=FINGERPRINTS | {"the student": "eeee"})
    other.config["data"]["train"] = "/elsewhere/train.jsonl"
    told = found(make_run("a"), other)
    assert told[("models", "the student")] == {"arm 0": "aaaa", "arm 1": "eeee"}
    assert ("without effect", "data.train") in told


def test_code_python_packages_and_machine_are_told() -> None:
    other = made(
        "b",
        git_changes="beef",
        python="3.12.1",
        host="two",
        gpus=["A100"],
        packages={"torch": "2.12.0", "numpy": "2.4.6", "extra": "1"},
    )
    assert found(made("a"), other) == {
        ("code", "uncommitted changes"): {"arm 0": "none", "arm 1": "beef"},
        ("python", "python"): {"arm 0": "3.11.9", "arm 1": "3.12.1"},
        ("machine", "host"): {"arm 0": "one", "arm 1": "two"},
        ("machine", "gpus"): {"arm 0": "H200, H200", "arm 1": "A100"},
        ("packages", "extra"): {"arm 0": "absent", "arm 1": "1"},
        ("packages", "torch"): {"arm 0": "2.13.0", "arm 1": "2.12.0"},
    }


def test_a_run_that_recorded_no_versions_says_so_once() -> None:
    told = find_differences([("a", [made("a")]), ("b", [make_run("b")])])
    versions = [each for each in told if each.kind == "packages"]
    assert versions == [
        Difference("packages", "versions", (("a", "recorded"), ("b", "not recorded")))
    ]


def test_a_run_that_was_continued_with_other_code_names_both() -> None:
    continued = make_run("b", attempts=[MADE, MADE | {"git_commit": "2222"}])
    assert found(made("a"), continued) == {
        ("code", "commit"): {"arm 0": "1111", "arm 1": "1111 → 2222"}
    }


def test_a_recipe_that_today_is_refused_is_compared_as_it_stands() -> None:
    old = make_run("b")
    old.config["training"]["forgotten"] = 3
    assert found(make_run("a"), old)[("recipe", "training.forgotten")]["arm 1"] == "3"
