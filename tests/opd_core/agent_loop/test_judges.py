"""Judges of the shipped tasks."""

from __future__ import annotations

from typing import Any

import pytest

from opd_core.agent_loop import judges


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3+4=7", 1.0),
        ("3+4=7 ", 1.0),
        ("3+4= 7\n", 1.0),
        ("1+2=3, 3+4=7", 1.0),
        ("nonsense = 7", 1.0),  # the steps are not judged
        ("3+4=8", 0.0),
        ("3+4=77", 0.0),
        ("3+4=7=8", 0.0),
        ("3+4=7.", 0.0),
        ("3+4=", 0.0),
        ("7", 0.0),  # no answer without an equals sign
        ("", 0.0),
    ],
)
def test_arithmetic_judges_what_follows_the_last_equals_sign(
    text: str, reward: float, make_prompt: Any
) -> None:
    assert judges.arithmetic(text, make_prompt(ground_truth=" 7 ")) == reward


@pytest.mark.parametrize(
    ("truth", "text", "reward"),
    [
        ("34", r"so it is \boxed{34}", 1.0),
        ("34", r"so it is \boxed{35}", 0.0),
        ("34", r"first 35, then \boxed{34}, and not 12", 1.0),
        ("34", "Answer: 34.", 1.0),
        ("34", "I do not know", 0.0),
        ("34", "", 0.0),
        ("34", r"\boxed{34", 0.0),  # cut at the length limit
        ("1/2", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("0.5", r"\boxed{\frac12}", 1.0),
        ("0.333", r"\boxed{\frac13}", 0.0),
        ("-5", r"\boxed{5}", 0.0),
        (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", 1.0),
        ("$34$", r"\boxed{34}", 1.0),
        (r"\boxed{34}", r"\boxed{34}", 1.0),
        (" 34\n", r"\boxed{34}", 1.0),
    ],
)
def test_math_judges_the_final_answer_by_its_value(
    truth: str, text: str, reward: float, make_prompt: Any
) -> None:
    assert judges.math(text, make_prompt(ground_truth=truth)) == reward


@pytest.mark.parametrize("judge", [judges.arithmetic, judges.math])
@pytest.mark.parametrize("truth", [None, "", "  "])
def test_without_a_truth_there_is_an_error_and_no_reward(
    judge: Any, truth: str | None, make_prompt: Any
) -> None:
    with pytest.raises(ValueError, match=r"row 12 has no reward_model\.ground_truth"):
        judge("3+4=7", make_prompt(12, ground_truth=truth))


def test_an_empty_answer_does_not_equal_an_empty_truth(make_prompt: Any) -> None:
    with pytest.raises(ValueError, match="no reward_model"):
        judges.arithmetic("3+4=", make_prompt(ground_truth=""))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("32 / 96 * 100% = 33.333...%, which rounds down to 33%\n#### 33", 1.0),
        ("26 points + 15 points = <<26+15=41>>41 points\n#### 33", 1.0),
        ("90 / 450 * 100% = 33%\n#### 34", 0.0),
        ("#### Step 1\nWe add.\n#### Result\n\\boxed{33}", 1.0),
        ("so it is \\boxed{33}.\n#### Remark\nNone of this is hard.", 1.0),
    ],
)
def test_a_marked_answer_counts_and_a_heading_does_not(
    text: str, reward: float, make_prompt: Any
) -> None:
    assert judges.math(text, make_prompt(ground_truth="33")) == reward
