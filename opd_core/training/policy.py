"""The student as training sees it: tokens in, logprobs out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from opd_core.objective.logprobs import token_logprobs
from opd_core.training.packing import MicroBatch


class StudentPolicy(nn.Module):
    """Wraps a causal language model so that one forward gives logprobs and never logits.

    It is the root that FSDP shards: the head's weight is whole from the start of its forward to the
    end of the backward pass, which the chunks of :func:`token_logprobs` need. The weights are fp32;
    the forward runs in ``dtype`` under autocast and keeps the log-softmax in fp32.
    """

    def __init__(self, model: Any, *, dtype: torch.dtype, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.chunk_tokens = chunk_tokens

    def forward(self, micro: MicroBatch) -> Float[Tensor, "B T"]:
        """Logprob of every token, at temperature 1, in nats; 0 where nothing predicts it."""
        # Right padding and packing under causal attention: no valid position ever sees a pad.
        device = micro.token_ids.device.type
        mixed = self.dtype != torch.float32
        with torch.autocast(device, self.dtype) if mixed else nullcontext():
            body = self.model.base_model(
                input_ids=micro.token_ids,
                position_ids=micro.position_ids,
                use_cache=False,
                **micro.model_inputs,
            )
            head = self.model.get_output_embeddings()
            return token_logprobs(
                body.last_hidden_state,
                head.weight,
                micro.token_ids,
                head_bias=head.bias,
                chunk_tokens=self.chunk_tokens,
            )
