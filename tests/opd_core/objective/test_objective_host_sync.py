"""A whole train step's maths, forward and backward, never makes the host wait for the device.

It runs on the meta device, whose tensors have shapes and no values: whatever needs a value on the
host, or a shape that depends on values, fails there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opd_core.objective import (
    group_relative_advantages,
    importance_weights,
    opd_advantages,
    policy_loss,
    reverse_kl,
    reverse_kl_metrics,
    token_logprobs,
)
from opd_core.objective.metrics import teacher_metrics


@pytest.mark.parametrize(
    "offence",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: x.masked_select(x > 0),
    ],
    ids=["item", "tolist", "bool", "boolean index", "nonzero", "masked_select"],
)
def test_the_meta_device_refuses_what_would_wait(offence: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        offence(torch.empty(3, device="meta"))


def test_a_train_step_needs_no_value_on_the_host() -> None:
    B, T, V, H = 4, 6, 11, 5
    hidden = torch.empty(B, T, H, device="meta", requires_grad=True)
    weight = torch.empty(V, H, device="meta", requires_grad=True)
    token_ids = torch.empty(B, T, device="meta", dtype=torch.int64)
    mask = torch.empty(B, T, device="meta", dtype=torch.bool)

    logprobs = token_logprobs(hidden, weight, token_ids, chunk_tokens=4)
    k = reverse_kl(logprobs.detach(), torch.empty_like(logprobs), mask)
    task = group_relative_advantages(
        torch.empty(B, device="meta"), torch.empty(B, device="meta", dtype=torch.int64), 2
    )
    result = opd_advantages(
        reverse_kl=k,
        response_mask=mask,
        task_advantages=task.unsqueeze(1).expand(B, T),
        task_adv_weight=0.5,
        opd_adv_weight=1.0,
        kl_clamp=2.0,
        baseline=k.mean(),
        reference_kl=k,
        reference_kl_weight=0.1,
    )
    weights = importance_weights(
        old_logprobs=logprobs.detach(), rollout_logprobs=k, response_mask=mask, cap=2.0
    ).weights
    loss = policy_loss(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=result.advantages,
        response_mask=mask,
        valid_tokens=mask.sum(),
        importance_weights=weights,
    ).loss
    grads = torch.autograd.grad(loss, (hidden, weight))
    metrics = reverse_kl_metrics(
        reverse_kl=k.flatten(),
        advantages=result.advantages.flatten(),
        clamped=result.clamped.flatten(),
        source_index=torch.empty(B * T, device="meta"),
        sources=("math", "code"),
    ) | teacher_metrics(
        old_logprobs=logprobs.flatten(),
        reverse_kl=k.flatten(),
        opd_term=result.opd_term.flatten(),
    )

    assert [grad.shape for grad in grads] == [hidden.shape, weight.shape]
    assert torch.stack(list(metrics.values())).device.type == "meta"
