"""Judges of the shipped tasks: ``(text of the response, prompt) -> reward``.

A judge is a plain importable function; it runs in the main thread of a process of its own.
"""

from __future__ import annotations

import re

from opd_core.rollout import Prompt

MARKED_ANSWER = re.compile(r"####\s*(-?\$?[\d.,]+)\s*$")
"""GSM8K's own form. The text before it holds numbers that only look like answers ("= 33.333…%")."""


def arithmetic(text: str, prompt: Prompt) -> float:
    """1 if the text after the last ``=`` is the ground truth, else 0. The steps are not judged."""
    return float("=" in text and text.rsplit("=", 1)[1].strip() == _truth(prompt))


def math(text: str, prompt: Prompt) -> float:
    r"""1 if the final answer (``#### N`` at the end, else ``\boxed{…}``, else the last
    expression) equals the ground truth mathematically, else 0; by the ``math-verify`` library
    with its own time limit."""
    from math_verify import parse, verify

    gold = parse(f"${_truth(prompt)}$")
    if not gold:
        said = f"the ground truth {prompt.ground_truth!r} is no formula"
        raise ValueError(f"row {prompt.row}: {said}")
    marked = MARKED_ANSWER.search(text)
    return float(verify(gold, parse(marked[1] if marked else text)))


def _truth(prompt: Prompt) -> str:
    truth = (prompt.ground_truth or "").strip()
    if not truth:
        raise ValueError(f"row {prompt.row} has no reward_model.ground_truth to judge by")
    return truth
