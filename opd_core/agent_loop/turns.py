"""A rollout while it is being sampled: the tokens so far, over interruptions and over turns.

A turn ends with one of the tool's stop tokens; what the tool says is appended to the trace and
masked, and the student goes on. The end token, or the limit of tokens or turns, ends the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opd_core.agent_loop.tools import ToolError, ToolRunner
from opd_core.rollout import Prompt
from opd_core.sampling.protocol import Sampler, SampleRequest


@dataclass(slots=True)
class SampledPart:
    """What has been sampled of a rollout. ``called`` says that a stop token ended the turn;
    ``finish_reason`` is empty as long as the answer goes on."""

    key: tuple[int, int]
    prompt: Prompt
    seed: int
    response_ids: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    response_mask: list[bool] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    called: bool = False
    turns: int = 1

    async def sample(
        self,
        sampler: Sampler,
        *,
        max_new_tokens: int,
        temperature: float,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        """Let the student go on, to its turn's end or until it is interrupted."""
        completion = await sampler.sample(
            SampleRequest(
                self.key,
                (*self.prompt.token_ids, *self.response_ids),
                self.seed,
                max_new_tokens - len(self.response_ids),
                temperature,
                stop_ids,
                drawn=sum(self.response_mask),
            )
        )
        self.response_ids += completion.response_ids
        self.rollout_logprobs += completion.rollout_logprobs
        self.response_mask += [True] * len(completion.response_ids)
        self.policy_versions += completion.policy_versions
        if completion.finish_reason == "abort":
            return
        stopped = completion.finish_reason == "stop"
        self.called = stopped and completion.response_ids[-1] in stop_ids
        if not self.called:
            self.finish_reason = completion.finish_reason

    def append(self, token_ids: Sequence[int]) -> None:
        """What a tool said; none of it is the student's."""
        self.response_ids += token_ids
        self.rollout_logprobs += [0.0] * len(token_ids)
        self.response_mask += [False] * len(token_ids)
        self.policy_versions += [self.policy_versions[-1]] * len(token_ids)


@dataclass(frozen=True, slots=True)
class Turns:
    """Calls the tool at the end of a turn. ``encode`` makes tokens of what it says, ``decode`` text
    of the response so far; ``stop_ids`` are the tokens at which it is called."""

    tool: ToolRunner
    stop_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    max_turns: int

    async def answer(self, part: SampledPart, max_new_tokens: int) -> str:
        """Let the tool answer a turn that has called it, and begin the next turn or end the answer;
        why that failed, or ""."""
        part.called = False
        if part.turns == self.max_turns:
            part.finish_reason = "length"
            return ""
        try:
            said = await self.tool.call(self.decode(part.response_ids), part.prompt)
        except ToolError as error:
            return str(error)
        if said is None:
            part.finish_reason = "stop"
            return ""
        try:
            token_ids = self.encode(said)
        except Exception as error:  # some tokenizers refuse what they do not know
            return f"the student's tokenizer refuses what the tool said, {said!r:.80}: {error}"
        if len(part.response_ids) + len(token_ids) >= max_new_tokens:
            part.finish_reason = "length"  # no room for what it said and a token after it
            return ""
        part.append(token_ids)
        part.turns += 1
        return ""
