"""What became of the groups that were started, and whether the losses bias what trains.

A group lives and dies as one: the siblings of a FAILED rollout are lost with it and count as lost.
The unit of all statistics is therefore the group (the mean over its rollouts): rollouts of one
prompt resemble each other, and counted singly they would look like far more evidence than they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

from opd_core.rollout import Group, Status
from opd_core.rollout_json import from_plain, refused_as, to_plain

KEPT, DROPPED = "kept", ("filtered", "failed")
OUTCOMES = (KEPT, *DROPPED)
BIASED_Z = 3.0
MIN_GROUPS = 5


@dataclass(slots=True)
class Moments:
    """Count, sum and sum of squares: all that a mean and its standard error need."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def take(self, values: Iterable[float]) -> None:
        """Take the mean of a group's values in; nothing if it has none."""
        if values := list(values):
            mean = fmean(values)
            self.count, self.total = self.count + 1, self.total + mean
            self.squares += mean * mean

    def add(self, other: Moments) -> None:
        """Take another's values in."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares

    @property
    def mean(self) -> float:
        """NaN without values."""
        return self.total / self.count if self.count else math.nan

    @property
    def stderr(self) -> float:
        """Standard error of the mean, with the unbiased variance; NaN below two values."""
        if self.count < 2:
            return math.nan
        variance = (self.squares - self.total * self.mean) / (self.count - 1)
        return math.sqrt(max(variance, 0.0) / self.count)

    def shown(self, digits: int) -> str:
        """``mean ± stderr``, or a dash."""
        if not self.count:
            return "-"
        mean = f"{self.mean:.{digits}f}"
        return mean if self.count < 2 else f"{mean} ± {self.stderr:.{digits}f}"


@dataclass(slots=True)
class Tally:
    """The groups of one outcome. ``length`` is in response tokens that the student sampled, and
    leaves out rollouts that did not come to an end; ``sources`` counts groups by
    ``data_source``."""

    groups: int = 0
    rollouts: int = 0
    length: Moments = field(default_factory=Moments)
    reward: Moments = field(default_factory=Moments)
    sources: Counter[str] = field(default_factory=Counter)

    def count(self, group: Group) -> None:
        """Count one group."""
        self.groups += 1
        self.rollouts += len(group.rollouts)
        ended = (r for r in group.rollouts if r.response_ids and r.finish_reason)
        self.length.take(rollout.sampled_tokens for rollout in ended)
        rewards = (r.reward for r in group.rollouts if r.reward is not None)
        self.reward.take(reward for reward in rewards if math.isfinite(reward))
        self.sources[group.prompt.data_source] += 1

    def add(self, other: Tally) -> None:
        """Take another's groups in."""
        self.groups += other.groups
        self.rollouts += other.rollouts
        self.length.add(other.length)
        self.reward.add(other.reward)
        self.sources.update(other.sources)

    def share(self, source: str) -> float:
        """Share of the groups that are of a data source; 0 without groups."""
        return self.sources[source] / self.groups if self.groups else 0.0


@dataclass(slots=True)
class Survivors:
    """What became of groups: counts by status and, for the dropped ones, by cause; and what the
    kept (COMPLETED), the filtered and the failed (all others) were like. Constant memory."""

    by_status: Counter[str] = field(default_factory=Counter)
    by_cause: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in OUTCOMES})

    def count(self, group: Group) -> None:
        """Count one ended group; the first message of each cause is kept as its example."""
        self.by_status[group.status.value] += 1
        self.tallies[_outcome(group.status)].count(group)
        if group.status is not Status.COMPLETED:
            cause = group.cause or group.status.value
            self.by_cause[cause] += 1
            if group.error_msg:
                self.examples.setdefault(cause, group.error_msg)

    @property
    def started(self) -> int:
        """Groups that were started."""
        return self.by_status.total()

    def add(self, other: Survivors) -> None:
        """Take another table's groups in."""
        self.by_status.update(other.by_status)
        self.by_cause.update(other.by_cause)
        for cause, example in other.examples.items():
            self.examples.setdefault(cause, example)
        for outcome, tally in other.tallies.items():
            self.tallies[outcome].add(tally)

    def state(self) -> dict[str, Any]:
        """All of it as plain JSON data."""
        state: dict[str, Any] = to_plain(self)
        return state

    @classmethod
    def restore(cls, state: object) -> Self:
        """The inverse of :meth:`state`. Raises :class:`TrainingError` for anything else."""
        with refused_as("state of the survivors"):
            survivors: Self = from_plain(cls, state)
            if survivors.tallies.keys() != set(OUTCOMES):
                raise ValueError(f"tallies: expected {OUTCOMES}, got {[*survivors.tallies]}")
        return survivors

    def table(self) -> str:
        """For people: a row for each outcome, each cause with an example, then :meth:`bias`."""
        causes = [
            f"  {cause}: {count}"
            + (f" (e.g. {self.examples[cause]})" if cause in self.examples else "")
            for cause, count in self.by_cause.most_common()
        ]
        return "\n".join([*_aligned(self._rows()), *causes, *self.bias()])

    def _rows(self) -> list[list[str]]:
        sources = sorted({source for tally in self.tallies.values() for source in tally.sources})
        header = ["outcome", "groups", "rollouts", "mean length", "reward", *sources]
        return [header] + [
            [
                outcome,
                str(tally.groups),
                str(tally.rollouts),
                tally.length.shown(0),
                tally.reward.shown(2),
                *(f"{tally.share(source):.0%}" if tally.groups else "-" for source in sources),
            ]
            for outcome, tally in self.tallies.items()
        ]

    def bias(self) -> list[str]:
        """A sentence for each way in which dropped groups differ from kept ones (``|z| >= 3``), or
        one that says that none is seen, or that there are too few groups to tell."""
        kept = self.tallies[KEPT]
        dropped = {name: self.tallies[name] for name in DROPPED if self.tallies[name].groups}
        if not dropped:
            return ["no group was dropped"]
        if not (enough := self._enough):
            counts = ", ".join(f"{tally.groups} {name}" for name, tally in dropped.items())
            return [
                f"too few groups to tell whether the losses bias the data: {kept.groups} kept, "
                f"{counts}; {MIN_GROUPS} of each are needed"
            ]
        seen = [said for name in enough for said in _differences(name, dropped[name], kept)]
        none = f"no bias is seen in length, reward or data source of the {' and '.join(enough)}"
        return seen or [f"{none} groups"]

    @property
    def bias_z(self) -> float | None:
        """The largest ``|z|`` by which dropped groups differ from kept ones in length, reward or
        data source; None with too few groups to tell."""
        kept = self.tallies[KEPT]
        found = [_all_z(self.tallies[name], kept) for name in self._enough]
        return max((abs(z) for of_one in found for z in of_one.values()), default=None)

    @property
    def _enough(self) -> list[str]:
        """The outcomes of dropped groups of which, as of kept ones, there are enough to tell."""
        kept = self.tallies[KEPT].groups
        return [n for n in DROPPED if min(self.tallies[n].groups, kept) >= MIN_GROUPS]

    def as_counts(self) -> Mapping[str, int]:
        """Metric names and values: ``groups/<status>`` and ``lost/<cause>``."""
        counts = {f"groups/{s.value}": self.by_status[s.value] for s in Status if s != Status.INIT}
        return counts | {f"lost/{cause}": count for cause, count in self.by_cause.items()}

    def as_metrics(self) -> dict[str, float]:
        """:meth:`as_counts`, and what the dropped groups were like, to hold against ``rollout/…``:
        ``survivors/<outcome>_response_tokens_mean`` and ``survivors/<outcome>_reward_mean``."""
        means = {
            f"survivors/{outcome}_{name}_mean": moments.mean
            for outcome in DROPPED
            for name, moments in (
                ("response_tokens", self.tallies[outcome].length),
                ("reward", self.tallies[outcome].reward),
            )
            if moments.count
        }
        return {**self.as_counts(), **means}


def difference_z(first: Moments, second: Moments) -> float:
    """z of the difference of two means whose variances may differ; two or more values a side.

    B. L. Welch, "The significance of the difference between two means when the population
    variances are unequal", Biometrika 29 (1938). Infinite where the means differ and nothing
    varies.
    """
    if math.isclose(first.mean, second.mean, rel_tol=1e-9, abs_tol=1e-12):  # sums are rounded
        return 0.0
    stderr = math.hypot(first.stderr, second.stderr)
    difference = first.mean - second.mean
    return difference / stderr if stderr else math.copysign(math.inf, difference)


def share_z(hits: int, count: int, other_hits: int, other_count: int) -> float:
    """z of the difference of two shares, with their pooled variance; counts above 0.

    The two-proportion z-test (NIST/SEMATECH e-Handbook of Statistical Methods, 7.3.3). 0 where a
    cell of the 2 x 2 table is expected to hold less than 1: there the approximation fails (I.
    Campbell, "Chi-squared and Fisher-Irwin tests of two-by-two tables with small sample
    recommendations", Statistics in Medicine 26 (2007)).
    """
    pooled = (hits + other_hits) / (count + other_count)
    if min(count, other_count) * min(pooled, 1 - pooled) < 1:
        return 0.0
    stderr = math.sqrt(pooled * (1 - pooled) * (1 / count + 1 / other_count))
    return (hits / count - other_hits / other_count) / stderr


def _enough_z(first: Moments, second: Moments) -> float:
    return difference_z(first, second) if min(first.count, second.count) >= MIN_GROUPS else 0.0


def _all_z(tally: Tally, kept: Tally) -> dict[str, float]:
    """z of each way in which dropped groups may differ from the kept: ``length``, ``reward``, and
    ``source <name>`` of each data source."""
    found = {
        "length": _enough_z(tally.length, kept.length),
        "reward": _enough_z(tally.reward, kept.reward),
    }
    for source in sorted(tally.sources | kept.sources):
        counts = tally.sources[source], tally.groups, kept.sources[source], kept.groups
        found[f"source {source}"] = share_z(*counts)
    return found


def _differences(name: str, tally: Tally, kept: Tally) -> list[str]:
    seen = {what: z for what, z in _all_z(tally, kept).items() if abs(z) >= BIASED_Z}
    return [_difference(what, z, name, tally, kept) for what, z in seen.items()]


def _difference(what: str, z: float, name: str, tally: Tally, kept: Tally) -> str:
    if what == "length":
        return (
            f"{name} rollouts are {'longer' if z > 0 else 'shorter'} than kept ones: "
            f"{tally.length.shown(0)} tokens against {kept.length.shown(0)} (z = {z:.1f})"
        )
    if what == "reward":
        return (
            f"{name} rollouts have a {'higher' if z > 0 else 'lower'} reward than kept ones: "
            f"{tally.reward.shown(2)} against {kept.reward.shown(2)} (z = {z:.1f})"
        )
    source = what.removeprefix("source ")
    return (
        f"data_source {source!r} is {tally.share(source):.0%} of the {name} groups but "
        f"{kept.share(source):.0%} of the kept (z = {z:.1f})"
    )


def _outcome(status: Status) -> str:
    if status is Status.COMPLETED:
        return KEPT
    return "filtered" if status is Status.FILTERED else "failed"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart: the first to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  ".join(
            [row[0].ljust(first), *(c.rjust(w) for c, w in zip(row[1:], others, strict=True))]
        )
        for row in rows
    ]
