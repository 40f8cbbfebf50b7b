"""The items of the pair check card: one student against one teacher server.

Each item is decided here and nowhere else; the problems and warnings that are told of a pair are
the rows that are not ``ok``. The functions are pure: what they need of the disk is in their
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from opd_core.config import SamplingConfig
from opd_core.preflight.card import CardRow, PairCard
from opd_core.preflight.facts import ModelFacts
from opd_core.preflight.renderings import Rendering, excerpt, rendering_diff

EXTERNAL = (
    "its server is external, so the files of its model cannot be read here: compare what is "
    "unknown by hand"
)
NO_PROMPTS = "prompts cannot be compared before the data can be read and the student renders it"


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """One server of a teacher. ``facts`` is None where it is external; ``context_length`` 0 means
    unknown; ``margin`` are the tokens that its ``backend`` keeps back."""

    who: str
    backend: str
    facts: ModelFacts | None
    context_length: int
    margin: int


def build_card(
    student: ModelFacts | None,
    teacher: TeacherServer,
    sampling: SamplingConfig,
    *,
    group_size: int,
    tokens: int,
    renderings: tuple[Rendering, ...],
) -> PairCard:
    """Hold a teacher against the student. ``tokens`` is the longest prompt + response.

    Of a student that cannot be read (None) only the room for ``tokens`` is checked.
    """
    if student is None:
        return PairCard(teacher.who, (context_row(None, teacher, tokens),))
    facts = teacher.facts
    rows = (
        tokenizer_row(student, facts),
        vocabulary_row(student, facts),
        end_row(student, facts),
        bos_row(student, facts),
        think_row(student, facts, renderings),
        rendering_row(facts, renderings),
        context_row(student, teacher, tokens),
        sampling_row(sampling, group_size),
    )
    differing = (rendering_diff(rendering) for rendering in renderings if rendering.differs)
    return PairCard(teacher.who, rows, next(differing, ""))


def tokenizer_row(student: ModelFacts, teacher: ModelFacts | None) -> CardRow:
    """The same ids are the same text."""
    item, ours = "tokenizer", student.tokenizer_hash
    if teacher is None:
        return _external(item, ours)
    if teacher.tokenizer_hash == student.tokenizer_hash:
        return CardRow(item, ours, teacher.tokenizer_hash)
    advice = (
        f"its tokenizer is not the student's ({teacher.path} against {student.path}): the same ids "
        "would mean other text; choose a teacher of the student's family"
    )
    return CardRow(item, ours, teacher.tokenizer_hash, "error", advice)


def vocabulary_row(student: ModelFacts, teacher: ModelFacts | None) -> CardRow:
    """The teacher's model has a row for every id that the student can sample."""

    def cell(facts: ModelFacts) -> str:
        return f"{facts.tokenizer_size} in the tokenizer, {facts.vocab_size} in the model"

    item, ours = "vocabulary", cell(student)
    if teacher is None:
        return _external(item, ours)
    theirs = cell(teacher)
    if teacher.vocab_size < student.tokenizer_size:
        advice = (
            f"its model's vocabulary of {teacher.vocab_size} is smaller than the "
            f"{student.tokenizer_size} of the student's tokenizer: it cannot score the ids above; "
            "choose a teacher that knows them all"
        )
        return CardRow(item, ours, theirs, "error", advice)
    if teacher.vocab_size < student.vocab_size:
        advice = (
            f"its vocabulary of {teacher.vocab_size} is smaller than the student's padded "
            f"{student.vocab_size}: a rollout with a higher id will fail (a sound student does not "
            "sample one)"
        )
        return CardRow(item, ours, theirs, "warning", advice)
    return CardRow(item, ours, theirs)


def end_row(student: ModelFacts, teacher: ModelFacts | None) -> CardRow:
    """Both end an answer with the same token: it is sampled, scored and trained."""

    def cell(facts: ModelFacts) -> str:
        return f"EOS {facts.named(facts.eos_token_id)}; ends at {facts.named(*facts.end_ids)}"

    item, ours = "end token", cell(student)
    if not student.end_ids:
        advice = (
            "student: it has no end token, so every answer runs to sampling.max_new_tokens; set "
            f"the eos_token of {student.path}"
        )
        return CardRow(item, ours, cell(teacher) if teacher else "unknown", "warning", advice)
    if teacher is None:
        return _external(item, ours)
    if teacher.eos_token_id != student.eos_token_id:
        advice = (
            f"ends its answers with token {teacher.named(teacher.eos_token_id)}, the student with "
            f"{student.named(student.eos_token_id)}: every end would be scored as a mistake; make "
            f"the eos_token of {student.path} the teacher's"
        )
        return CardRow(item, ours, cell(teacher), "error", advice)
    if teacher.end_ids != student.end_ids:
        advice = (
            f"its answers end at {teacher.named(*teacher.end_ids)}, the student's at "
            f"{student.named(*student.end_ids)}: an end that only one of them knows is scored as a "
            f"mistake; give {student.path}/generation_config.json the teacher's eos_token_id"
        )
        return CardRow(item, ours, cell(teacher), "warning", advice)
    return CardRow(item, ours, cell(teacher))


def bos_row(student: ModelFacts, teacher: ModelFacts | None) -> CardRow:
    """Sequences begin alike. Padding is only shown: it is never sent to a teacher."""

    def cell(facts: ModelFacts) -> str:
        return f"BOS {facts.named(facts.bos_token_id)}; PAD {facts.named(facts.pad_token_id)}"

    item, ours = "BOS and PAD", cell(student)
    if teacher is None:
        return _external(item, ours)
    if teacher.bos_token_id == student.bos_token_id:
        return CardRow(item, ours, cell(teacher))
    advice = (
        f"has {teacher.named(teacher.bos_token_id)} as its BOS token, the student "
        f"{student.named(student.bos_token_id)}: it scores the student's sequences as they are; "
        f"make the bos_token of {student.path} the teacher's if the teacher needs one"
    )
    return CardRow(item, ours, cell(teacher), "warning", advice)


def think_row(
    student: ModelFacts, teacher: ModelFacts | None, renderings: tuple[Rendering, ...]
) -> CardRow:
    """Both begin an answer on the same side of a think tag."""

    def cell(facts: ModelFacts, tag: str) -> str:
        ending = f"with {tag}" if tag else "without one"
        return f"{facts.named(*facts.think_ids)}; prompt ends {ending}"

    item = "think tags"
    if teacher is None:
        first = next((r.student.think_tag for r in renderings if not r.student.refusal), "")
        return _external(item, cell(student, first))
    compared = [rendering for rendering in renderings if rendering.compared]
    if not compared:
        ours, theirs = (facts.named(*facts.think_ids) for facts in (student, teacher))
        return CardRow(item, ours, theirs, "unknown", _why_not_compared(renderings))
    other = (r for r in compared if r.student.think_tag != r.teacher.think_tag)
    shown = next(other, compared[0])
    our_tag, their_tag = shown.student.think_tag, shown.teacher.think_tag
    ours, theirs = cell(student, our_tag), cell(teacher, their_tag)
    if our_tag == their_tag:
        return CardRow(item, ours, theirs)
    advice = (
        f"its prompts end with {their_tag or 'no think tag'}, the student's with "
        f"{our_tag or 'no think tag'}: one of them begins its answer inside a thought and the "
        f"other does not; make the chat template of {student.path} end as the teacher's"
    )
    return CardRow(item, ours, theirs, "warning", advice)


def rendering_row(teacher: ModelFacts | None, renderings: tuple[Rendering, ...]) -> CardRow:
    """Both templates write the same prompt. The teacher scores the student's in any case."""
    item, ours = "rendered prompts", f"{len(renderings)} rows"
    if teacher is None:
        return _external(item, ours)
    differing = [rendering for rendering in renderings if rendering.differs]
    if differing:
        first = differing[0]
        student, other = first.student.text, first.teacher.text
        rows = ", ".join(str(rendering.row) for rendering in differing)
        advice = (
            f"renders prompts in another way than the student: {excerpt(other, student)!r} "
            f"against {excerpt(student, other)!r} (row {first.row}); it will score the "
            "student's rendering: give the student the teacher's chat template, unless its own is "
            "meant"
        )
        return CardRow(item, ours, f"{len(differing)} differ: rows {rows}", "warning", advice)
    if not (renderings and all(rendering.compared for rendering in renderings)):
        return CardRow(item, ours, "unknown", "unknown", _why_not_compared(renderings))
    return CardRow(item, ours, "the same")


def context_row(student: ModelFacts | None, teacher: TeacherServer, tokens: int) -> CardRow:
    """Both hold the longest prompt with the longest response; ``tokens`` is their sum."""
    item, needed = "context", tokens + teacher.margin
    context = teacher.context_length
    ours = f"{(student and student.context_length) or 'unknown'} of {tokens} needed"
    theirs = f"{context or 'unknown'} of {needed} needed"
    if context and context < needed:
        advice = (
            f"its context of {context} tokens is too short: data.max_prompt_tokens + "
            f"sampling.max_new_tokens + {teacher.margin} (kept back by {teacher.backend}) = "
            f"{needed}; lower one of them, or choose a teacher with a longer context"
        )
        return CardRow(item, ours, theirs, "error", advice)
    if student and (short := student_context_problem(student, tokens)):
        return CardRow(item, ours, theirs, "error", short)
    if teacher.facts is None:
        return CardRow(item, ours, theirs, "unknown", EXTERNAL)
    if not context:
        advice = "its config does not say its context length: set launch.context_length"
        return CardRow(item, ours, theirs, "unknown", advice)
    return CardRow(item, ours, theirs)


def student_context_problem(student: ModelFacts, tokens: int) -> str:
    """What is wrong with the student's context; empty if nothing is known to be."""
    if not student.context_length or student.context_length >= tokens:
        return ""
    return (
        f"student: its context of {student.context_length} tokens is shorter than prompt + "
        f"response ({tokens} = data.max_prompt_tokens + sampling.max_new_tokens)"
    )


def sampling_row(sampling: SamplingConfig, group_size: int) -> CardRow:
    """The student samples from the very distribution that is trained and scored."""
    ours = (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k "
        f"{sampling.top_k or 'off'}, {group_size} a prompt"
    )
    theirs = "scores at temperature 1"
    if sampling.plain_policy:
        return CardRow("sampling", ours, theirs)
    advice = (
        "scores the plain policy, and the student does not sample from it: remove temperature, "
        "top_p, top_k, repetition_penalty and min_tokens from sampling"
    )
    return CardRow("sampling", ours, theirs, "error", advice)


def _external(item: str, student: str) -> CardRow:
    return CardRow(item, student, "unknown", "unknown", EXTERNAL)


def _why_not_compared(renderings: tuple[Rendering, ...]) -> str:
    """Why a comparison of prompts says nothing."""
    if not renderings or any(rendering.student.refusal for rendering in renderings):
        return NO_PROMPTS
    refused = next(rendering for rendering in renderings if rendering.teacher.refusal)
    return (
        f"its tokenizer does not render row {refused.row} ({refused.teacher.refusal}), so the "
        "prompt that it expects is not known; it will score the student's rendering"
    )
