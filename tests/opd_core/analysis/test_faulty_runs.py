"""Each known failure, built into a short real run of the tiny pair, is found and named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.opd_core.analysis.faulty_runs import (
    END_ID,
    TINY,
    NoisyEngine,
    Scores,
    Tokens,
    findings_of,
    teacher_server,
    tiny_config,
)

MODULE = """
def short(group):
    return all(len(rollout.response_ids) < 22 for rollout in group)

def length(text, prompt):
    return len(text) / 10
"""
GROUPS = ("task.group_size=4", "training.prompts_per_step=8")
ARITHMETIC = "task.judge=opd_core.agent_loop.judges:arithmetic"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with a filter and a judge."""
    (tmp_path / "of_this_run.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "of_this_run"


def never_ends(ids: Tokens, scores: Scores) -> Scores:
    return np.where(ids == END_ID, scores - 20, scores).astype(np.float32)


def nearly_constant(ids: Tokens, scores: Scores) -> Scores:
    wave = np.sin(np.arange(len(scores)))
    return (-2 + 1e-3 * wave).astype(np.float32)


def sometimes_constant(ids: Tokens, scores: Scores) -> Scores:
    return np.full_like(scores, -2.0) if ids.sum() % 8 == 0 else scores


class Poisoned:
    """One token of every sixteenth answer has a score that no model gives."""

    def __init__(self) -> None:
        self.answers = 0

    def __call__(self, ids: Tokens, scores: Scores) -> Scores:
        self.answers += 1
        if self.answers % 16:
            return scores
        return np.where(np.arange(len(scores)) == 2, np.float32(-1000), scores)


@pytest.mark.slow
async def test_in_a_run_without_a_fault_nothing_is_found(tmp_path: Path) -> None:
    with teacher_server() as url:
        assert await findings_of(tiny_config(url, steps=12), tmp_path / "run") == {}


async def test_a_student_that_is_its_own_teacher(tmp_path: Path) -> None:
    with teacher_server(path=TINY / "student") as url:
        found = await findings_of(tiny_config(url, steps=2), tmp_path / "run")
    assert list(found) == ["teacher_equals_student"]
    finding = found["teacher_equals_student"]
    assert (finding.train_step, finding.level) == (1, "error")
    assert "student.model" in finding.cure


@pytest.mark.slow  # a judge's process
async def test_a_teacher_whose_weight_is_lost_beside_the_reward(tmp_path: Path) -> None:
    mixed = ("opd.task_adv_weight=1", "opd.opd_adv_weight=1e-6", ARITHMETIC, *GROUPS)
    with teacher_server() as url:
        config = tiny_config(url, *mixed, "training.teacher_gradient_every=1")
        found = await findings_of(config, tmp_path / "run")
    assert list(found) == ["teacher_without_effect"]
    assert "grad_norm_teacher" in found["teacher_without_effect"].evidence
    assert "opd.opd_adv_weight (now 1e-06)" in found["teacher_without_effect"].cure


async def test_a_clamp_that_erases_the_teacher(tmp_path: Path) -> None:
    with teacher_server() as url:
        found = await findings_of(tiny_config(url, "opd.kl_clamp=1e-4"), tmp_path / "run")
    assert list(found) == ["teacher_without_effect"]
    assert "opd.kl_clamp (now 0.0001)" in found["teacher_without_effect"].cure


async def test_a_teacher_that_does_not_know_the_end_token(tmp_path: Path) -> None:
    with teacher_server(never_ends) as url:
        found = await findings_of(tiny_config(url), tmp_path / "run")
    assert list(found) == ["ending_mismatch"]
    assert found["ending_mismatch"].level == "warning"
    assert "rollout/end_token_kl is 20 nats" in found["ending_mismatch"].evidence


@pytest.mark.slow
async def test_a_limit_of_length_that_cuts_nearly_all_answers(tmp_path: Path) -> None:
    with teacher_server() as url:
        config = tiny_config(url, "sampling.max_new_tokens=10", steps=5)
        found = await findings_of(config, tmp_path / "run")
    assert list(found) == ["ending_mismatch"]
    assert found["ending_mismatch"].level == "note"
    assert "raise sampling.max_new_tokens" in found["ending_mismatch"].cure


@pytest.mark.slow
async def test_a_reward_of_length_makes_answers_grow_until_they_are_cut(
    module: str, tmp_path: Path
) -> None:
    judged = (f"task.judge={module}:length", *GROUPS, "training.learning_rate=2e-3")
    found = await findings_of(tiny_config(None, *judged, steps=16), tmp_path / "run")
    assert list(found) == ["ending_mismatch"]
    assert found["ending_mismatch"].level == "warning"
    assert "rollout/truncated_fraction went from 0%" in found["ending_mismatch"].evidence


@pytest.mark.slow
async def test_a_learning_rate_that_leads_away_from_the_teacher(tmp_path: Path) -> None:
    with teacher_server() as url:
        config = tiny_config(url, "training.learning_rate=5e-3", steps=8)
        found = await findings_of(config, tmp_path / "run")
    assert list(found) == ["kl_rising"]
    assert "training.learning_rate" in found["kl_rising"].cure


@pytest.mark.slow
async def test_a_learning_rate_that_makes_the_entropy_collapse(tmp_path: Path) -> None:
    with teacher_server() as url:
        config = tiny_config(url, "training.learning_rate=5e-2", steps=12)
        found = await findings_of(config, tmp_path / "run")
    assert {"kl_rising", "entropy_collapse"} <= set(found)
    assert found["entropy_collapse"].train_step >= 10


async def test_an_engine_that_samples_with_other_weights(tmp_path: Path) -> None:
    with teacher_server() as url:
        found = await findings_of(tiny_config(url), tmp_path / "run", NoisyEngine)
    assert list(found) == ["engine_gap"]
    assert found["engine_gap"].level == "error"


async def test_a_filter_that_drops_long_answers(module: str, tmp_path: Path) -> None:
    with teacher_server() as url:
        config = tiny_config(url, f"task.filter_func={module}:short")
        found = await findings_of(config, tmp_path / "run")
    assert list(found) == ["survivors_biased"]
    assert "survivors/filtered_response_tokens_mean" in found["survivors_biased"].evidence


async def test_a_teacher_that_scores_all_tokens_nearly_alike(tmp_path: Path) -> None:
    with teacher_server(nearly_constant) as url:
        found = await findings_of(tiny_config(url), tmp_path / "run")
    assert "teacher_logprob_std" in found["uniform_teacher"].evidence


async def test_a_teacher_that_answers_one_constant_now_and_then(tmp_path: Path) -> None:
    """The client refuses such an answer; the groups are counted as lost."""
    with teacher_server(sometimes_constant) as url:
        config = tiny_config(url, "opd.failure_budget.ratio=0.9", steps=1)
        found = await findings_of(config, tmp_path / "run")
    assert list(found) == ["uniform_teacher"]
    assert "groups were lost" in found["uniform_teacher"].evidence


async def test_a_token_with_an_impossible_score_and_no_clamp(tmp_path: Path) -> None:
    with teacher_server(Poisoned()) as url:
        config = tiny_config(url, "opd.kl_clamp=null", steps=2)
        found = await findings_of(config, tmp_path / "run")
    assert list(found) == ["advantage_dominated"]
    assert "opd.kl_clamp" in found["advantage_dominated"].cure


async def test_a_clamp_cures_it(tmp_path: Path) -> None:
    with teacher_server(Poisoned()) as url:
        assert await findings_of(tiny_config(url, steps=2), tmp_path / "run") == {}
