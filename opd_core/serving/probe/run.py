"""The checks in their order, cheap ones first, and the report that they make."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from opd_core.config import CONTEXT_MARGIN, Backend, OPDTeacherConfig
from opd_core.errors import ServingError
from opd_core.scoring.client import TeacherLogprobClient
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.proof import observe_replica
from opd_core.serving.probe import checks
from opd_core.serving.probe.asking import NO_ANSWER, Asker, Reply, ask
from opd_core.serving.probe.checks import Check, Scored
from opd_core.serving.probe.connections import check_connections
from opd_core.serving.probe.load import Level, check_refusal, check_throughput, measure_levels
from opd_core.serving.probe.text import ProbeText, probe_text
from opd_core.serving.readiness import HEALTH_PATH, ask_model_info, context_length

TIMEOUT_S = 60.0
PIECE, LONG_PIECE, SHORT_PIECE = 64, 128, 12
FEWEST = 3
TOPS = (1024, 20, 5)
CONTEXTS = tuple(2**power for power in range(7, 31))
"""Lengths that are tried where the server tells none."""
NEEDED = frozenset({"health", "key", "rows"})
"""Where one of these fails, all that comes later would fail too."""
WRONG_KEY = "not-the-key"


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was found at an endpoint. ``seconds`` is what the probe took."""

    endpoint: str
    backend: Backend
    checks: tuple[Check, ...]
    levels: tuple[Level, ...]
    seconds: float

    @property
    def usable(self) -> bool:
        """Whether one can distil from it: no check failed."""
        return all(check.verdict != "fail" for check in self.checks)

    def to_json(self) -> str:
        """All of it, on one line."""
        return json.dumps({"usable": self.usable, **asdict(self)}, allow_nan=False)


async def probe(
    config: OPDTeacherConfig,
    tokenizer: Any,
    *,
    api_key: str | None = None,
    max_concurrency: int = 32,
    context_limit: int = 4096,
    level_s: float = 2.0,
    transport: httpx.AsyncBaseTransport | None = None,
    telling: Callable[[str], None] = lambda what: None,
) -> ProbeReport:
    """Look at the only replica of ``config`` in every way that matters to distillation.

    ``context_limit`` bounds the longest sequence sent, in tokens; ``level_s`` is the time spent on
    each level of concurrency; ``telling`` hears what is looked at now. Behind a ``transport`` of
    the caller's there are no connections to look at. Raises :class:`ServingError` where nobody
    answers and :class:`~opd_core.errors.ConfigError` for a tokenizer that cannot be used.
    """
    started = time.monotonic()
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
        transport=transport,
    ) as http:
        subject = await _meet(http, config, tokenizer, api_key)
        load = _Load(max_concurrency, level_s)
        stages: dict[str, Callable[[], Awaitable[list[Check]]]] = {
            "health and key": lambda: _admission(subject),
            "answers": lambda: _answers(subject),
            "repetition": lambda: _repetition(subject, transport),
            "alternatives and prefix cache": lambda: _extras(subject),
            "context": lambda: _context(subject, context_limit),
            "throughput": lambda: load.measure(subject),
            "connections": lambda: _connections(subject, real=transport is None),
        }
        found: list[Check] = []
        for what, stage in stages.items():
            if _failed(found, NEEDED):
                break
            telling(what)
            found += await stage()
    seconds = time.monotonic() - started
    return ProbeReport(subject.endpoint, subject.backend, tuple(found), load.levels, seconds)


@dataclass(frozen=True, slots=True)
class _Subject:
    """The server under probe, and what it said. ``vocab_size`` and ``context`` are 0 where it did
    not tell them; ``asker`` keeps to the tokenizer's ids then."""

    asker: Asker
    config: OPDTeacherConfig
    api_key: str | None
    text: ProbeText
    health: Reply
    info: dict[str, Any]
    vocab_size: int
    context: int

    @property
    def backend(self) -> Backend:
        return self.asker.backend

    @property
    def endpoint(self) -> str:
        return self.asker.endpoint

    @property
    def longest(self) -> int:
        """Tokens that one sequence may have; 0 where unknown."""
        return max(0, self.context - CONTEXT_MARGIN[self.backend])

    def piece(self, length: int, number: int = 0) -> list[int]:
        """A sequence of ``length`` tokens, or of as many as are allowed."""
        length = min(length, self.longest or length)
        return self.text.piece(length, number * length)

    async def scored(self, ids: list[int], start: int) -> tuple[Reply, Scored]:
        """The answer to a scoring request, and its rows."""
        reply = await self.asker.score(ids, start)
        return reply, Scored(ids, start, reply.meta.get("input_token_logprobs"))


async def _meet(
    http: httpx.AsyncClient, config: OPDTeacherConfig, tokenizer: Any, api_key: str | None
) -> _Subject:
    (replica,) = config.all_replicas
    endpoint, backend = str(replica.endpoint), replica.backend
    health = await ask(http, "GET", endpoint + HEALTH_PATH[backend])
    if health.status == NO_ANSWER:
        raise ServingError(
            f"nobody answers at {endpoint} ({health.problem}); is the server started, and this "
            "its address?"
        )
    info = await ask_model_info(http, endpoint, backend)
    told = info.get("vocab_size")
    vocab_size = told if isinstance(told, int) else 0
    text = probe_text(tokenizer, vocab_size)
    asker = Asker(http, endpoint, backend, vocab_size or text.tokenizer_size)
    context = context_length(info)
    return _Subject(asker, config, api_key, text, health, info, vocab_size, context)


async def _admission(subject: _Subject) -> list[Check]:
    ids = subject.piece(SHORT_PIECE)
    own = await subject.asker.score(ids, 0)
    wrong = await subject.asker.score(ids, 0, key=WRONG_KEY) if subject.api_key else None
    return [
        checks.check_health(subject.health, subject.backend),
        checks.check_key(subject.api_key is not None, own, wrong),
    ]


async def _answers(subject: _Subject) -> list[Check]:
    backend, answers = subject.backend, list[Scored]()
    for number, part in ((0, 0), (1, 0), (2, 2)):  # the third one from its middle
        ids = subject.piece(PIECE, number)
        reply, scored = await subject.scored(ids, len(ids) // part if part else 0)
        if reply.problem:
            advice = "the server does not score: look at its log"
            return [Check("rows", "fail", reply.problem, advice)]
        answers.append(scored)
    vocab_size = subject.asker.vocab_size
    found = [checks.check_model(subject.info, subject.text), checks.check_rows(backend, answers)]
    if not _failed(found, NEEDED):
        found.append(checks.check_ids(backend, answers, vocab_size))
        found.append(checks.check_values(backend, answers))
    if not _failed(found, {"rows", "values"}):
        found.append(checks.check_uniform(backend, answers))
        found.append(checks.check_tokenizer(backend, answers, subject.text, vocab_size))
    return found


async def _repetition(subject: _Subject, transport: httpx.AsyncBaseTransport | None) -> list[Check]:
    """The quick part: what a run demands of a teacher before it trusts it."""
    steady = {"request_timeout_s": TIMEOUT_S, "max_retry_per_sample": 0, "adaptive": False}
    config = subject.config.model_copy(update=steady)
    facts = TeacherFacts(subject.asker.vocab_size, subject.context)
    sequences = [subject.piece(PIECE, number) for number in range(3)]
    key = subject.api_key
    try:
        async with TeacherLogprobClient(config, facts, api_key=key, transport=transport) as client:
            seen = await observe_replica(client, sequences)
    except ServingError as error:
        return [Check("repeatable", "fail", str(error), "a run would refuse this teacher")]
    return [
        checks.check_gap("repeatable", seen.again),
        checks.check_gap("order and batch", seen.together),
        checks.check_gap("later starts", seen.later),
    ]


async def _extras(subject: _Subject) -> list[Check]:
    prompt = subject.piece(LONG_PIECE, 1)
    for _ in range(2):
        repeated = await subject.asker.score(prompt, len(prompt) - 2)
    ids = subject.piece(SHORT_PIECE)
    most = subject.asker.vocab_size
    for top in (min(most, number) for number in TOPS):  # servers have their own limits
        reply = await subject.asker.score(ids, 0, top=top)
        if not reply.problem:
            break
    scored = Scored(ids, 0, reply.meta.get("input_token_logprobs"))
    tops = reply.meta.get("input_top_logprobs")
    return [
        checks.check_cache(repeated, len(prompt)),
        checks.check_normalised(subject.backend, scored, tops, subject.vocab_size),
    ]


async def _context(subject: _Subject, limit: int) -> list[Check]:
    """The longest sequence that is allowed and within ``limit``; where no length was told, ever
    longer ones."""
    longest = subject.longest
    lengths = [min(longest, limit)] if longest else [n for n in CONTEXTS if n < limit] + [limit]
    scored = FEWEST
    for length in lengths:
        refusal = await _refusal(subject, length)
        if refusal:
            most = await _most(subject, scored, length)
            found = f"{length} tokens are refused ({refusal}), {most} are scored"
            advice = "prompt + response must fit, or the server needs a longer context"
            return [Check("context", "warn", found, advice)]
        scored = length
    if scored == longest:
        return [Check("context", "pass", f"{scored} tokens are scored, the most that it allows")]
    told = f"it says {subject.context}" if longest else "it does not tell its limit"
    return [Check("context", "pass", f"{scored} tokens are scored; {told}")]


async def _refusal(subject: _Subject, length: int) -> str:
    """Why a sequence of so many tokens is not scored; "" if it is."""
    return (await subject.asker.score(subject.text.piece(length), length - 2)).problem


async def _most(subject: _Subject, scored: int, refused: int) -> int:
    """The most tokens that are scored, by halving what lies between."""
    while refused - scored > 1:
        middle = (scored + refused) // 2
        if await _refusal(subject, middle):
            refused = middle
        else:
            scored = middle
    return scored


class _Load:
    """The stage that leaves more than checks behind."""

    def __init__(self, max_concurrency: int, level_s: float) -> None:
        self.levels: tuple[Level, ...] = ()
        self._max_concurrency = max_concurrency
        self._level_s = level_s

    async def measure(self, subject: _Subject) -> list[Check]:
        length = len(subject.piece(LONG_PIECE))
        self.levels, failures = await measure_levels(
            subject.asker,
            subject.text,
            length,
            max_concurrency=self._max_concurrency,
            level_s=self._level_s,
        )
        most = self.levels[-1].concurrency
        return [check_throughput(self.levels, failures), check_refusal(failures, most)]


async def _connections(subject: _Subject, *, real: bool) -> list[Check]:
    if not real:
        return []
    body = subject.asker.body(subject.piece(SHORT_PIECE), 0)
    headers = {"authorization": f"Bearer {subject.api_key}"} if subject.api_key else {}
    path = HEALTH_PATH[subject.backend]
    return [*await check_connections(subject.endpoint, path, headers, body)]


def _failed(found: list[Check], names: Collection[str]) -> bool:
    return any(check.verdict == "fail" and check.name in names for check in found)
