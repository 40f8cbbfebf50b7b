"""Reverse KL and the weighted sum of the advantage's terms, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from opd_core.objective import OPDAdvantages, opd_advantages, reverse_kl

NAN, INF = math.nan, math.inf
MASK = torch.tensor([[False, True, True, False], [False, True, False, False]])
TASK = torch.tensor([[1.0] * 4, [-2.0] * 4])


def opd_only(
    k: Tensor,
    mask: Tensor,
    *,
    weight: float = 1.0,
    kl_clamp: float | None = None,
    baseline: float | Tensor = 0.0,
) -> OPDAdvantages:
    """Advantages of pure distillation: no task term."""
    return opd_advantages(
        reverse_kl=k,
        response_mask=mask,
        task_advantages=None,
        task_adv_weight=0.0,
        opd_adv_weight=weight,
        kl_clamp=kl_clamp,
        baseline=baseline,
    )


class TestReverseKl:
    def test_is_old_minus_teacher_positive_where_the_student_likes_the_token_more(self) -> None:
        k = reverse_kl(
            torch.tensor([[0.0, -1.0, -4.0]]),
            torch.tensor([[0.0, -3.0, -0.5]]),
            torch.tensor([[False, True, True]]),
        )
        assert k.tolist() == [[0.0, 2.0, -3.5]]

    @pytest.mark.parametrize("padding", [-INF, INF, NAN])
    def test_padding_reaches_neither_value_nor_gradient(self, padding: float) -> None:
        old = torch.tensor([[padding, -1.0, -2.0, padding]] * 2, requires_grad=True)
        teacher = torch.tensor([[padding, -3.0, -2.5, padding]] * 2, requires_grad=True)
        mask = torch.tensor([[False, True, True, False], [False] * 4])

        k = reverse_kl(old, teacher, mask)
        old_grad, teacher_grad = torch.autograd.grad(k.sum(), (old, teacher))

        assert k.tolist() == [[0.0, 2.0, 0.5, 0.0], [0.0] * 4]
        assert old_grad.tolist() == [[0.0, 1.0, 1.0, 0.0], [0.0] * 4]
        assert teacher_grad.tolist() == [[0.0, -1.0, -1.0, 0.0], [0.0] * 4]

    def test_a_nan_on_the_mask_stays_visible(self) -> None:
        k = reverse_kl(torch.tensor([[-1.0]]), torch.tensor([[NAN]]), torch.tensor([[True]]))
        assert k.isnan().all()

    def test_no_response_tokens_give_an_empty_or_zero_result(self) -> None:
        empty = torch.zeros(0, 4)
        assert reverse_kl(empty, empty, empty.bool()).shape == (0, 4)
        assert reverse_kl(torch.ones(2, 4), torch.zeros(2, 4), torch.zeros(2, 4).bool()).sum() == 0

    def test_scores_shifted_by_the_prompt_are_refused_not_broadcast(self) -> None:
        with pytest.raises(ValueError, match="expected teacher_logprobs of the mask's shape"):
            reverse_kl(torch.zeros(2, 4), torch.zeros(2, 1), MASK)

    def test_a_mask_of_numbers_is_refused(self) -> None:
        with pytest.raises(ValueError, match="bool response_mask"):
            reverse_kl(torch.zeros(2, 4), torch.zeros(2, 4), MASK.float())


class TestOPDAdvantages:
    def test_both_terms_by_hand(self) -> None:
        k = torch.tensor([[9.0, 2.0, -1.0, 9.0], [9.0, 0.5, 9.0, 9.0]])

        result = opd_advantages(
            reverse_kl=k,
            response_mask=MASK,
            task_advantages=TASK,
            task_adv_weight=0.5,
            opd_adv_weight=2.0,
        )

        assert result.opd_term.tolist() == [[0.0, -4.0, 2.0, 0.0], [0.0, -1.0, 0.0, 0.0]]
        assert result.advantages.tolist() == [[0.0, -3.5, 2.5, 0.0], [0.0, -2.0, 0.0, 0.0]]
        assert not result.clamped.any()

    def test_the_clamp_comes_first_and_the_baseline_after_it(self) -> None:
        k = torch.tensor([[5.0, -5.0, 1.0, 5.0]])
        mask = torch.tensor([[True, True, True, False]])

        result = opd_only(k, mask, kl_clamp=2.0, baseline=0.5)

        # -(2 - 0.5), -(-2 - 0.5), -(1 - 0.5); the other order would give -2, 2, -0.5.
        assert result.advantages.tolist() == [[-1.5, 2.5, -0.5, 0.0]]
        assert result.clamped.tolist() == [[True, True, False, False]]

    def test_a_k_on_the_bound_does_not_count_as_clamped(self) -> None:
        result = opd_only(torch.tensor([[2.0, -2.0]]), torch.tensor([[True, True]]), kl_clamp=2.0)
        assert result.clamped.tolist() == [[False, False]]

    @pytest.mark.parametrize("baseline", [0.25, torch.tensor(0.25), torch.tensor(0.25).double()])
    def test_the_baseline_is_subtracted_from_k_and_from_the_mask_only(
        self, baseline: float | Tensor
    ) -> None:
        result = opd_only(torch.ones(2, 4), MASK, baseline=baseline, weight=2.0)

        assert result.advantages.dtype == torch.float32
        assert torch.equal(result.advantages, torch.where(MASK, -1.5, 0.0))

    def test_a_teacher_that_agrees_gives_exactly_zero(self) -> None:
        logprobs = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
        result = opd_only(reverse_kl(logprobs, logprobs.clone(), MASK), MASK)
        assert not result.advantages.any()

    @pytest.mark.parametrize("unused", [None, torch.full((2, 4), NAN), torch.full((2, 4), -INF)])
    def test_an_opd_term_of_weight_zero_contributes_exactly_zero(
        self, unused: Tensor | None
    ) -> None:
        result = opd_advantages(
            reverse_kl=unused,
            response_mask=MASK,
            task_advantages=TASK,
            task_adv_weight=3.0,
            opd_adv_weight=0.0,
            kl_clamp=1.0,
            baseline=NAN,
        )
        assert result.opd_term.tolist() == [[0.0] * 4] * 2
        assert result.advantages.tolist() == [[0.0, 3.0, 3.0, 0.0], [0.0, -6.0, 0.0, 0.0]]

    @pytest.mark.parametrize("unused", [None, torch.full((2, 4), NAN), torch.full((2, 4), INF)])
    def test_a_task_term_of_weight_zero_contributes_exactly_zero(
        self, unused: Tensor | None
    ) -> None:
        result = opd_advantages(
            reverse_kl=torch.ones(2, 4),
            response_mask=MASK,
            task_advantages=unused,
            task_adv_weight=0.0,
            opd_adv_weight=1.0,
        )
        assert torch.equal(result.advantages, torch.where(MASK, -1.0, 0.0))

    def test_two_rollouts_of_one_row_keep_their_own_rewards(self) -> None:
        result = opd_advantages(
            reverse_kl=None,
            response_mask=torch.tensor([[False, True, True, False, True]]),
            task_advantages=torch.tensor([[1.0, 1.0, 1.0, -2.0, -2.0]]),
            task_adv_weight=2.0,
            opd_adv_weight=0.0,
        )
        assert result.advantages.tolist() == [[0.0, 2.0, 2.0, 0.0, -4.0]]

    def test_the_reference_is_subtracted_unclamped_and_is_no_part_of_the_opd_term(self) -> None:
        result = opd_advantages(
            reverse_kl=torch.full((2, 4), 3.0),
            response_mask=MASK,
            task_advantages=TASK,
            task_adv_weight=1.0,
            opd_adv_weight=1.0,
            kl_clamp=1.0,
            baseline=0.5,
            reference_kl=torch.tensor([[9.0, 4.0, -2.0, 9.0], [9.0, 0.0, 9.0, 9.0]]),
            reference_kl_weight=0.25,
        )
        assert torch.equal(result.opd_term, torch.where(MASK, -0.5, 0.0))
        # 1 - 0.5 - 0.25 * 4, 1 - 0.5 + 0.25 * 2 and -2 - 0.5.
        assert result.advantages.tolist() == [[0.0, -0.5, 1.0, 0.0], [0.0, -2.5, 0.0, 0.0]]

    @pytest.mark.parametrize("unused", [None, torch.full((2, 4), NAN), torch.full((2, 4), INF)])
    def test_a_reference_of_weight_zero_contributes_exactly_zero(
        self, unused: Tensor | None
    ) -> None:
        result = opd_advantages(
            reverse_kl=torch.ones(2, 4),
            response_mask=MASK,
            task_advantages=None,
            task_adv_weight=0.0,
            opd_adv_weight=1.0,
            reference_kl=unused,
        )
        assert torch.equal(result.advantages, torch.where(MASK, -1.0, 0.0))

    def test_scores_that_are_only_logged_still_report_what_a_clamp_would_change(self) -> None:
        result = opd_only(torch.full((2, 4), 3.0), MASK, kl_clamp=1.0, weight=0.0)
        assert torch.equal(result.clamped, MASK)
        assert not result.advantages.any()

    def test_masked_positions_and_masked_rows_are_zero_whatever_they_hold(self) -> None:
        mask = torch.tensor([[False, True], [False, False]])

        result = opd_advantages(
            reverse_kl=torch.tensor([[NAN, 1.0], [INF, -INF]]),
            response_mask=mask,
            task_advantages=torch.tensor([[NAN, 1.0], [INF, NAN]]),
            task_adv_weight=1.0,
            opd_adv_weight=1.0,
            kl_clamp=5.0,
            reference_kl=torch.tensor([[NAN, 0.25], [-INF, INF]]),
            reference_kl_weight=2.0,
        )

        assert result.advantages.tolist() == [[0.0, -0.5], [0.0, 0.0]]
        assert result.opd_term.tolist() == [[0.0, -1.0], [0.0, 0.0]]
        assert not result.clamped.any()

    def test_nothing_in_it_carries_a_gradient(self) -> None:
        result = opd_advantages(
            reverse_kl=torch.ones(2, 4, requires_grad=True),
            response_mask=MASK,
            task_advantages=torch.ones(2, 4, requires_grad=True),
            task_adv_weight=1.0,
            opd_adv_weight=1.0,
            kl_clamp=0.5,
            baseline=torch.tensor(0.1, requires_grad=True),
            reference_kl=torch.ones(2, 4, requires_grad=True),
            reference_kl_weight=1.0,
        )
        assert [tensor.requires_grad for tensor in result] == [False, False, False]

    def test_a_missing_teacher_is_refused_where_its_weight_is_not_zero(self) -> None:
        with pytest.raises(ValueError, match="set opd_adv_weight to 0"):
            opd_advantages(
                reverse_kl=None,
                response_mask=MASK,
                task_advantages=TASK,
                task_adv_weight=1.0,
                opd_adv_weight=1.0,
            )

    def test_missing_rewards_are_refused_where_their_weight_is_not_zero(self) -> None:
        with pytest.raises(ValueError, match="set task_adv_weight to 0"):
            opd_advantages(
                reverse_kl=torch.zeros(2, 4),
                response_mask=MASK,
                task_advantages=None,
                task_adv_weight=1.0,
                opd_adv_weight=1.0,
            )

    def test_a_missing_reference_is_refused_where_its_weight_is_not_zero(self) -> None:
        with pytest.raises(ValueError, match="set reference_kl_weight to 0"):
            opd_advantages(
                reverse_kl=torch.zeros(2, 4),
                response_mask=MASK,
                task_advantages=None,
                task_adv_weight=0.0,
                opd_adv_weight=1.0,
                reference_kl_weight=0.1,
            )

    @pytest.mark.parametrize("name", ["task_advantages", "reference_kl"])
    def test_a_number_per_rollout_is_refused_not_broadcast(self, name: str) -> None:
        fields: dict[str, Any] = {"task_advantages": TASK, name: torch.zeros(2, 1)}
        with pytest.raises(ValueError, match=f"expected {name} of the mask's shape"):
            opd_advantages(
                reverse_kl=None,
                response_mask=MASK,
                task_adv_weight=1.0,
                opd_adv_weight=0.0,
                **fields,
            )

    def test_a_baseline_per_token_is_refused(self) -> None:
        with pytest.raises(ValueError, match="scalar baseline"):
            opd_only(torch.zeros(2, 4), MASK, baseline=torch.zeros(2, 4))

    def test_a_clamp_to_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="kl_clamp > 0"):
            opd_only(torch.zeros(2, 4), MASK, kl_clamp=0.0)
