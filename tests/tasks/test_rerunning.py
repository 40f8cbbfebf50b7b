"""What is repeated, with which changes, and what is kept of the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from prefect.states import Completed, Failed

from opd_core.analysis.comparison import Target
from opd_core.errors import ConfigError
from opd_core.recipe import find_recipe, load_recipe
from opd_core.training.files import CONFIG_FILE, RUN_FILE
from tasks.children import Asked, Child
from tasks.rerunning import (
    NotAllRan,
    Source,
    check_target,
    failed_are_named,
    find_source,
    judge_children,
    rerun_overrides,
)
from tests.tasks.compared_runs import write_run

TARGET = Target(axis="steps")


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | fields))


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A run that completed, with a whole recipe."""
    directory = write_run(tmp_path / "runs", "tiny-1", seed=1, mlflow=False)
    config = load_recipe(
        find_recipe("tiny"), ["seed=1", "tracking.mlflow=false", "tracking.tags={team: a}"]
    )
    (directory / CONFIG_FILE).write_text(json.dumps(config.resolved()))
    return directory


def source_of(original: Path, overrides: Sequence[str] = ()) -> Source:
    return find_source(original.name, "tiny", overrides, original.parent)


# --- what is repeated -----------------------------------------------------------------------------


def test_a_run_is_repeated_from_its_resolved_recipe_beside_it(original: Path) -> None:
    source = source_of(original)
    assert source.recipe == original / CONFIG_FILE
    assert source.root == original.parent
    assert source.name == "tiny-1"
    assert source.config.seed == 1


def test_a_recipe_has_no_original() -> None:
    source = find_source("", "tiny", ["training.steps=3"], Path("runs"))
    assert (source.original, source.name, source.config.training.steps) == (None, "tiny", 3)


def test_a_change_that_is_none_is_refused_before_anything_starts(original: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        source_of(original, ["training.learning_rat=1"])


@pytest.mark.parametrize("status", ["", "failed", "cancelled"])
def test_a_run_that_has_not_completed_is_no_original(original: Path, status: str) -> None:
    attempt = {"started_at": 1.0, "flow_run_id": "", "status": status}
    change(original / RUN_FILE, attempts=[attempt])
    with pytest.raises(ConfigError, match=f"status: {status or 'not recorded'}.*recipe_file"):
        source_of(original)


def test_a_fork_is_not_repeated_by_its_recipe_alone(original: Path) -> None:
    fork = {"run_id": "tiny-0", "train_step": 20, "checkpoint": "c", "batches": 0}
    known = json.loads((original / RUN_FILE).read_bytes())
    change(original / RUN_FILE, forked_from=fork | known.get("forked_from", {}))
    with pytest.raises(ConfigError, match="began from train step 20 of run tiny-0"):
        source_of(original)


def test_a_target_that_the_original_does_not_have_is_refused_before_anything_starts(
    original: Path,
) -> None:
    check_target(source_of(original), TARGET)
    with pytest.raises(ConfigError, match="tiny-1 has no speed"):
        check_target(source_of(original), Target("speed", "steps"))
    check_target(find_source("", "tiny", [], Path("runs")), Target("speed", "steps"))


# --- how its reruns are changed -------------------------------------------------------------------


def changes_of(source: Source, overrides: Sequence[str] = ()) -> dict[str, object]:
    made = rerun_overrides(source, overrides, "flow-9")
    pairs = [each.partition("=") for each in made]
    assert len({key for key, _, _ in pairs}) == len(pairs), "each key once"
    return {key: yaml.safe_load(value) for key, _, value in pairs}


def test_reruns_are_tagged_with_the_original_and_keep_its_own_tags(original: Path) -> None:
    source = source_of(original)
    config = load_recipe(source.recipe, rerun_overrides(source, [], "flow-9"))
    assert config.tracking.tags == {"team": "a", "opd_rerun": "flow-9", "opd_rerun_of": "tiny-1"}


def test_tags_that_are_asked_for_are_kept_too(original: Path) -> None:
    asked = ["tracking.tags.why=drift", "training.steps=3"]
    changes = changes_of(source_of(original, asked), asked)
    assert changes["tracking.tags.why"] == "drift"
    assert changes["tracking.tags.opd_rerun"] == "flow-9"
    assert changes["training.steps"] == 3


def test_reruns_are_where_they_are_looked_for(original: Path, tmp_path: Path) -> None:
    assert changes_of(source_of(original))["run.root"] == str(original.parent)
    asked = [f"run.root={tmp_path / 'elsewhere'}"]
    assert changes_of(source_of(original, asked), asked)["run.root"] == str(tmp_path / "elsewhere")


def test_the_changed_recipe_is_one(original: Path) -> None:
    source = source_of(original)
    config = load_recipe(source.recipe, rerun_overrides(source, [], "flow-9"))
    assert config.tracking.tags["opd_rerun_of"] == "tiny-1"
    assert config.run.root_dir == original.parent


# --- what they came to ----------------------------------------------------------------------------


def child(seed: int, *, completed: bool = True) -> Child:
    state = Completed() if completed else Failed(message="no room")
    return Child(Asked(f"seed-{seed}", f"tiny-1 again · seed {seed}", {}), f"flow-{seed}", state)


def write_rerun(original: Path, seed: int) -> Path:
    """The directory of a rerun, by its flow run."""
    directory = write_run(original.parent, f"tiny-{seed}", seed=seed, mlflow=False)
    attempt = {"started_at": 1.0, "flow_run_id": f"flow-{seed}", "status": "completed"}
    change(directory / RUN_FILE, attempts=[attempt])
    config = json.loads((original / CONFIG_FILE).read_bytes())
    (directory / CONFIG_FILE).write_text(json.dumps(config | {"seed": seed}))
    return directory


@pytest.fixture
def reruns(original: Path) -> list[Path]:
    return [write_rerun(original, seed) for seed in (2, 3, 4)]


def test_the_verdict_is_kept_beside_the_comparison(original: Path, reruns: list[Path]) -> None:
    repeated = judge_children(source_of(original), [child(seed) for seed in (2, 3, 4)], TARGET)
    told = repeated.to_json()
    assert told["verdict"] in ("reproduced", "not reproduced")
    assert told["reruns"] == {f"flow-{run.name[-1]}": str(run) for run in reruns}
    assert repeated.compared is not None
    folder = repeated.compared.directory
    assert json.loads((folder / "reproduction.json").read_text())["verdict"] == told["verdict"]
    assert told["sentence"].split(":")[0] in (folder / "reproduction.md").read_text()
    assert (folder / "comparison.html").is_file()
    json.dumps(told)


@pytest.mark.usefixtures("reruns")
def test_a_run_that_failed_is_told_and_the_rest_is_judged(original: Path) -> None:
    children = [child(2), child(3, completed=False), child(4)]
    repeated = judge_children(source_of(original), children, TARGET)
    assert {run.seed for run in repeated.reproduction.reruns} == {2, 4}
    named = r"of the 3 reruns.*seed 3 \(Failed: no room\)$"
    with pytest.raises(NotAllRan, match=named), failed_are_named(children):
        pass
    with failed_are_named([child(2)]):
        pass


def test_runs_that_failed_are_named_also_where_the_others_cannot_be_judged() -> None:
    named = r"no verdict \(no such metric\).*seed 3 \(Failed: no room\)$"
    with (
        pytest.raises(NotAllRan, match=named),
        failed_are_named([child(2), child(3, completed=False)]),
    ):
        raise ConfigError("no such metric")
    with pytest.raises(ConfigError, match="no such metric"), failed_are_named([child(2)]):
        raise ConfigError("no such metric")


def test_without_any_run_that_completed_there_is_no_verdict(original: Path) -> None:
    with pytest.raises(NotAllRan, match="none of the 1 reruns completed"):
        judge_children(source_of(original), [child(2, completed=False)], TARGET)


def test_a_run_on_another_machine_is_told_as_such(original: Path) -> None:
    with pytest.raises(ConfigError, match=r"another machine.*OPD_RUNS"):
        judge_children(source_of(original), [child(2)], TARGET)


def test_a_recipes_only_run_is_told_without_a_comparison(original: Path) -> None:
    write_rerun(original, 2)
    overrides = [f"run.root={original.parent}"]
    source = find_source("", "tiny", overrides, Path("runs"))
    repeated = judge_children(source, [child(2)], TARGET)
    assert repeated.compared is None
    assert repeated.reproduction.verdict == ""
    assert not (original.parent / "comparisons").exists()
