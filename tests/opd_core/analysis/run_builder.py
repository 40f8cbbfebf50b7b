"""Run directories as a run leaves them, made up: reports and comparisons are tested on them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd_core.lifecycle.records import ChildEnd, PortState, Receipt, write_receipt
from opd_core.tracking.journal import JournalRecord
from opd_core.training.evaluation_records import (
    EvaluationRecord,
    QuestionResult,
    write_evaluation,
)
from opd_core.training.files import (
    CONFIG_FILE,
    EVALUATIONS_FOLDER,
    JOURNAL_FILE,
    PROVENANCE_FILE,
    RUN_FILE,
    SUMMARY_FILE,
    TOKEN_KL_FOLDER,
)
from opd_core.training.step_files import path_of
from opd_core.training.token_kl import (
    SEGMENTS,
    TOKEN_CLASSES,
    KeptRollout,
    KLSum,
    TokenKL,
    write_token_kl,
)

RUN_ID = "tiny-20260101-120000-ab12"
STARTED_AT = 1_767_268_800.0
WORDS = ("So", " we", " have", " 3", " +", " 4", " =", " 7", ".", "\n", " <b>", " Then", " 12")


@dataclass(frozen=True)
class RunBuilder:
    """What the run is like; :meth:`write` makes its directory."""

    steps: int = 50
    questions: int = 64
    data_sources: tuple[str, ...] = ("chain_sum",)
    response_tokens: int = 40
    rollouts_kept: int = 8
    rollouts_every: int = 10
    prompt: str = "What is 3 + 4?\nAnswer briefly."
    teacher: bool = True
    seed: int = 0

    def write(self, directory: Path) -> Path:
        """Write all files of a run that completed; returns ``directory``."""
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / CONFIG_FILE, self._config())
        _write(directory / RUN_FILE, self._history())
        _write(directory / SUMMARY_FILE, self._summary(directory))
        _write(directory / PROVENANCE_FILE, _provenance())
        _write(directory / "pair_check.json", [_card()] if self.teacher else [])
        write_receipt(directory, _receipt())
        lines = [json.dumps(_line(record)) for record in self.records()]
        (directory / JOURNAL_FILE).write_text("".join(f"{line}\n" for line in lines))
        for step in (0, self.steps // 2, self.steps):
            record = self.evaluation(step)
            write_evaluation(path_of(directory / EVALUATIONS_FOLDER, step), record)
        for step in range(1, self.steps + 1) if self.teacher else ():
            write_token_kl(path_of(directory / TOKEN_KL_FOLDER, step), self.token_kl(step))
        return directory

    def progress(self, step: int) -> float:
        """0 at the start, towards 1 at the end."""
        return 1 - math.exp(-3 * step / self.steps)

    def records(self) -> list[JournalRecord]:
        """The journal."""
        rng = np.random.default_rng(self.seed)
        found = [JournalRecord(0, STARTED_AT, self._evaluated(0))]
        for step in range(1, self.steps + 1):
            metrics = self._trained(step, rng)
            found.append(JournalRecord(step, STARTED_AT + step, metrics))
            if step in (self.steps // 2, self.steps):
                found.append(JournalRecord(step, STARTED_AT + step, self._evaluated(step)))
        return found

    def evaluation(self, step: int) -> EvaluationRecord:
        """One evaluation; questions differ in how hard they are."""
        rng = np.random.default_rng((self.seed, step))
        hard = np.random.default_rng(1).uniform(-0.3, 0.3, self.questions)
        rewards = (
            rng.random((self.questions, 4))
            < np.clip(0.42 + 0.4 * self.progress(step) + hard, 0, 1)[:, None]
        )
        return EvaluationRecord(
            step, 4, 1.0, 7, tuple(self._question(row, rewards[row]) for row in range(len(rewards)))
        )

    def _question(self, row: int, rewards: Any) -> QuestionResult:
        source = self.data_sources[row % len(self.data_sources)]
        answers = tuple(float(reward) for reward in rewards)
        return QuestionResult(f"q{row}", row, source, answers, (20,) * 4, (False,) * 4)

    def token_kl(self, step: int) -> TokenKL:
        """One train step's record; rollouts in the steps that keep any."""
        rng = np.random.default_rng((self.seed, step, 1))
        keeps = step in (1, self.steps) or step % self.rollouts_every == 0
        kept = [self._kept(step, index, rng) for index in range(self.rollouts_kept if keeps else 0)]
        return TokenKL(step, tuple(self._sums(step, rng)), tuple(kept))

    def _sums(self, step: int, rng: np.random.Generator) -> list[KLSum]:
        cells = []
        for source in self.data_sources:
            for segment in SEGMENTS:
                for number, name in enumerate(TOKEN_CLASSES):
                    for position in range(self.response_tokens.bit_length()):
                        tokens = int(rng.integers(20, 60)) * 2**position // 4
                        mean = 0.4 / (1 + number) * (1.05 - self.progress(step))
                        k = tokens * rng.normal(mean, 0.05)
                        cell = (source, segment, name, position)
                        cells.append(KLSum(*cell, tokens, float(k), float(tokens * mean * 2)))
        return cells

    def _kept(self, step: int, index: int, rng: np.random.Generator) -> KeptRollout:
        count = self.response_tokens
        words = [WORDS[i] for i in rng.integers(0, len(WORDS), count)]
        bad = rng.exponential(2.5, count) * (rng.random(count) < 0.15)
        k = bad * (1.1 - self.progress(step)) * rng.choice([1, 1, -1], count)
        student = -rng.exponential(0.4, count) - np.maximum(-k, 0)
        mask = [index != 1 or not 5 <= t < 9 for t in range(count)]
        return KeptRollout(
            group_id=step * 100 + index,
            index=0,
            row=index,
            data_source=self.data_sources[index % len(self.data_sources)],
            why="worst" if index < self.rollouts_kept // 2 else "random",
            reward=float(index % 2),
            finish_reason="stop" if index else "length",
            prompt_text=self.prompt,
            prompt_tokens=12,
            tokens=(*words[:-1], "<|end|>"),
            response_mask=tuple(mask),
            student=tuple(s if m else 0.0 for s, m in zip(student.tolist(), mask, strict=True)),
            teacher=tuple(
                s - d if m else 0.0 for s, d, m in zip(student.tolist(), k, mask, strict=True)
            ),
            answer_from=count * 3 // 4,
        )

    def _evaluated(self, step: int) -> dict[str, float]:
        rewards = [question.mean for question in self.evaluation(step).questions]
        return {
            "eval/accuracy": float(np.mean(rewards)),
            "eval/accuracy_stderr": float(np.std(rewards) / len(rewards) ** 0.5),
            "eval/response_tokens_mean": 20.0,
        }

    def _trained(self, step: int, rng: np.random.Generator) -> dict[str, float]:
        done = self.progress(step)
        noise = float(rng.normal())
        metrics = {
            "entropy": 0.9 - 0.5 * done + 0.01 * noise,
            "response_tokens": 2600.0,
            "grad_norm": 0.5 * math.exp(0.3 * noise),
            "engine_logprob_gap": 1e-7 * math.exp(noise),
            "rollout/reward_mean": 0.4 + 0.4 * done,
            "rollout/response_tokens_mean": 20 + 0.2 * noise,
            "rollout/response_tokens_max": 44.0,
            "rollout/truncated_fraction": 0.02 * (1 - done),
            "rollout/eos_fraction": 1 - 0.02 * (1 - done),
            "rollout/tokens_per_s": 3900 + 90 * noise,
            "time/step_s": 0.7,
            "time/sampling_s": 0.35,
            "time/scoring_s": 0.1,
            "time/training_s": 0.2,
            "time/weight_sync_s": 0.02,
            "time/tracking_s": 0.002,
            "time/tracking_share": 0.003,
            "total/student_tokens": 2600.0 * step,
            "total/device_seconds": 1.4 * step,
            "total/money": 0.001 * step,
        }
        if not self.teacher:
            return metrics
        kl = 0.4 * (1.05 - done) + 0.01 * noise
        by_source = {f"opd_reverse_kl/{s}": kl * (1 + i) for i, s in enumerate(self.data_sources)}
        return (
            metrics
            | by_source
            | {
                "opd_reverse_kl": kl,
                "opd_reverse_kl_stderr": 0.03 * (1.1 - done),
                "grad_norm_teacher": metrics["grad_norm"],
                "advantage_top1pct_share": 0.3,
                "opd_clamped_fraction": 0.04 * (1 - done),
                "teacher/latency_s_mean": 0.09,
                "teacher/latency_s_max": 0.13,
                "total/teacher_tokens": 5000.0 * step,
            }
        )

    def _config(self) -> dict[str, Any]:
        opd = {"mode": "pg-opd", "task_adv_weight": 0.0, "opd_adv_weight": 1.0}
        return {
            "name": "tiny",
            "description": "On-policy distillation of 1-digit chain sums",
            "seed": self.seed,
            "opd": opd if self.teacher else None,
            "training": {"steps": self.steps},
            "cost": {"currency": "EUR", "device_hour": 2.5},
        }

    def _history(self) -> dict[str, Any]:
        attempt = {"started_at": STARTED_AT, "status": "completed"}
        prints = {"student": "9f3c", "training data": "77aa"}
        return {"run_id": RUN_ID, "attempts": [attempt], "fingerprints": prints}

    def _summary(self, directory: Path) -> dict[str, Any]:
        early, late = (self._evaluated(step) for step in (0, self.steps))
        accuracy = {
            f"{side}{end}": metrics[f"eval/accuracy{end}"]
            for side, metrics in (("before", early), ("after", late))
            for end in ("", "_stderr")
        }
        kl = {"before": 0.37, "after": 0.084, "before_stderr": 0.018, "after_stderr": 0.009}
        none = dict.fromkeys(kl)
        return {
            "status": "completed",
            "error": "",
            "run_id": RUN_ID,
            "recipe": "tiny",
            "seed": self.seed,
            "train_steps": self.steps,
            "stopped": "",
            "accuracy": accuracy,
            "opd_reverse_kl": kl if self.teacher else none,
            "groups": {"completed": 128 * self.steps, "filtered": 0, "failed": 3},
            "lost": {"timeout": 3},
            "survivors": "outcome   groups  rollouts\nkept        6400      6400\n"
            "failed         3         3\n  timeout: 3",
            "seconds": {"checks": 4.5, "teachers_wait": 8.05, "student_job": 47.3, "total": 57.9},
            "findings": [FINDING],
            "tracking": {"mlflow": SINK, "tensorboard": {**SINK, "failed_attempts": 0}},
            "mlflow_run_id": "9a6e7d94760b44e1b768ef57132f64c3",
            "student_path": str(directory / "student"),
        }


FINDING = {
    "name": "advantage dominated by a few tokens",
    "train_step": 12,
    "level": "warning",
    "evidence": "the largest 1 % of tokens carry 71 % of the advantage (12 of 12 train steps)",
    "cause": "a few tokens of very low teacher probability outweigh the rest",
    "cure": "set opd.kl_clamp, for example to 5",
}
SINK = {"shipped": 53, "failed_attempts": 2, "cpu_s": 0.41, "last_error": "", "complete": True}


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def _line(record: JournalRecord) -> dict[str, Any]:
    return {"train_step": record.train_step, "time": record.time_s, "metrics": record.metrics}


def _provenance() -> dict[str, Any]:
    attempt = {
        "started_at": STARTED_AT,
        "git_commit": "279ef4365b1c",
        "git_changes": "",
        "python": "3.11.9",
        "platform": "Linux-6.1-x86_64",
        "host": "laptop",
        "cpu": "8 x Example CPU",
        "gpus": [],
        "packages": {"torch": "2.13.0", "transformers": "5.19.0"},
    }
    return {"attempts": [attempt]}


def _card() -> dict[str, Any]:
    fine = {"student": "fdd5eb46b83fa5af", "teacher": "fdd5eb46b83fa5af", "level": "ok"}
    rows = [
        {"item": "tokenizer", **fine, "advice": ""},
        {
            "item": "think tags",
            "student": "none; prompt ends without one",
            "teacher": "<think>; prompt ends with one",
            "level": "warning",
            "advice": "the teacher's prompt ends inside its reasoning: set enable_thinking",
        },
    ]
    return {"teacher": "teacher 'teacher'", "rows": rows, "rendering_diff": "-a\n+b"}


def _receipt() -> Receipt:
    child = ChildEnd("ray-head", "ray", 4242, STARTED_AT, STARTED_AT + 57, "SIGTERM", 0)
    ports = (PortState(25781, True),)
    return Receipt(RUN_ID, "completed", True, 1.9, (child,), (), ports, (), ())
