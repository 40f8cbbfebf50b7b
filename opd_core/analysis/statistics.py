"""Intervals, p-values and numbers of seeds; pure numbers in and out.

Two questions, two procedures. *Would these very models differ on new questions?* The questions are
a sample, the models are fixed: bootstrap over questions. *Would new training runs differ on these
questions?* The seeds are a sample, the questions are fixed: Student's t over one mean a seed.

Arrays are [N] or [N, E]: N units (questions, seeds) of E experiments, each on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
Number = Array | np.float64

RESAMPLES = 10_000
POWER = 0.8
MOST_SEEDS = 1000
CHUNK = 4_000_000
"""Counts of a chunk of resamples that are in memory at once (32 MB)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval and the two-sided p-value of "the true value is 0", per experiment."""

    low: Number
    high: Number
    p: Number


def bootstrap_interval(
    values: Array, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Bounds:
    """The interval of the mean over units, by resampling whole units.

    A question's value holds all its samples and seeds, and for a comparison the difference of both
    arms, so what the answers to one question have in common stays together. Expanded percentile
    interval: the plain one is too narrow by sqrt((n - 1) / n) and by z in place of t, so its
    quantiles are taken at Phi(-sqrt(n / (n - 1)) * t) (Hesterberg 2015, "What Teachers Should Know
    about the Bootstrap", section 4). The p-value is where that interval ends at 0.

    Args:
        values: [N] or [N, E], N >= 2, finite.

    Raises:
        ValueError: fewer than two units, or a value that is not finite.
    """
    count = _units(values)
    means = _resampled_means(values, resamples, seed)
    widening = np.sqrt(count / (count - 1))
    tail = special.ndtr(widening * special.stdtrit(count - 1, (1 - confidence) / 2))
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    beyond = np.minimum((means <= 0).sum(axis=0), (means >= 0).sum(axis=0))
    share = np.minimum((beyond + 1) / (resamples + 1), 0.5)
    p = 2 * special.stdtr(count - 1, special.ndtri(share) / widening)
    return Bounds(low, high, p)


def uniform_interval(value: float, units: int, span: float, confidence: float = 0.95) -> Bounds:
    """The interval of a mean over units that all came out as ``value``, so that resampling them
    shows no spread.

    Of new units a share of up to 1 - ((1 - confidence) / 2)^(1 / units) may come out otherwise
    (Clopper and Pearson 1934, none of n), each by ``span`` at most.
    """
    # A true mean of 0 needs a share of |value| / span: unseen in n units with this probability.
    share = 1 - ((1 - confidence) / 2) ** (1 / units)
    p = min(1.0, 2 * max(0.0, 1 - abs(value) / span) ** units) if span > 0 else float(value == 0)
    low, high = value - span * share, value + span * share
    return Bounds(np.float64(low), np.float64(high), np.float64(p))


def wilson_interval(right: int, units: int, *, confidence: float = 0.95) -> Bounds:
    """The interval of a share of which ``right`` of ``units`` were seen (Wilson 1927): resampling
    is too narrow for a share near 0 or 1."""
    z = special.ndtri((1 + confidence) / 2)
    share, whole = right / units, 1 + z**2 / units
    middle = (share + z**2 / (2 * units)) / whole
    half = z / whole * np.sqrt(share * (1 - share) / units + (z / (2 * units)) ** 2)
    low, high = np.clip([middle - half, middle + half], 0.0, 1.0)
    return Bounds(low, high, np.float64(right == 0))


def t_interval(values: Array, *, confidence: float = 0.95) -> Bounds:
    """Student's t-interval of the mean over units, e.g. one difference a seed where both arms have
    the same seeds.

    Raises:
        ValueError: fewer than two units, or a value that is not finite.
    """
    count = _units(values)
    error = values.std(axis=0, ddof=1) / np.sqrt(count)
    return _student(values.mean(axis=0), error, np.float64(count - 1), confidence)


def welch_interval(a: Array, b: Array, *, confidence: float = 0.95) -> Bounds:
    """Welch's t-interval of mean(a) - mean(b): independent units, spreads of their own (Welch
    1947).

    Raises:
        ValueError: fewer than two units on a side, or a value that is not finite.
    """
    counts = _units(a), _units(b)
    one, other = a.var(axis=0, ddof=1) / counts[0], b.var(axis=0, ddof=1) / counts[1]
    total = one + other
    parts = one**2 / (counts[0] - 1) + other**2 / (counts[1] - 1)
    degrees = np.where(parts > 0, total**2 / np.where(parts > 0, parts, 1), sum(counts) - 2)
    return _student(a.mean(axis=0) - b.mean(axis=0), np.sqrt(total), degrees, confidence)


def normal_interval(value: float, error: float, *, confidence: float = 0.95) -> Bounds:
    """The interval of a value whose standard error is known."""
    return _student(np.float64(value), np.float64(error), np.float64(np.inf), confidence)


def paired_seeds_needed(sd: float, difference: float, alpha: float = 0.05) -> int | None:
    """Seeds that both arms need so that the paired t-test at ``alpha`` finds ``difference`` with a
    chance of 80 %.

    ``sd`` is that of the differences of one seed. None above 1000.
    """
    return _seeds_needed(difference, sd, 1.0, alpha)


def welch_seeds_needed(
    sd_a: float, sd_b: float, difference: float, alpha: float = 0.05
) -> int | None:
    """Seeds that each arm needs so that Welch's t-test at ``alpha`` finds ``difference`` with a
    chance of 80 %; None above 1000."""
    return _seeds_needed(difference, *_welch(sd_a, sd_b), alpha)


def paired_seeds_within(sd: float, half_width: float) -> int | None:
    """Seeds from which on half the 95 % paired t-interval is no wider than ``half_width``, at this
    ``sd`` of the differences of one seed; None above 1000."""
    return _seeds_within(half_width, sd, 1.0)


def welch_seeds_within(sd_a: float, sd_b: float, half_width: float) -> int | None:
    """The same of Welch's interval."""
    return _seeds_within(half_width, *_welch(sd_a, sd_b))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Adjusted p-values, in the order given: with each compared to 0.05, the chance of any false
    finding among them stays at 5 % (Holm 1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return tuple(adjusted)


def _units(values: Array) -> int:
    if len(values) < 2 or not np.isfinite(values).all():
        raise ValueError(
            f"expected two or more units with finite values, got {len(values)} units, "
            f"{int((~np.isfinite(values)).sum())} values of them not finite"
        )
    return len(values)


def _resampled_means(values: Array, resamples: int, seed: int) -> Array:
    """[resamples, ...]: the mean of each resample, as counts of units times their values."""
    count, generator = len(values), np.random.default_rng(seed)
    means, at_once = [], max(1, CHUNK // count)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn = generator.integers(0, count, size=(rows, count))
        flat = (drawn + count * np.arange(rows)[:, None]).ravel()
        counts = np.bincount(flat, minlength=rows * count).reshape(rows, count)
        means.append(counts.astype(np.float64) @ values / count)
    return np.concatenate(means)


def _student(value: Number, error: Number, degrees: Number, confidence: float) -> Bounds:
    half = special.stdtrit(degrees, (1 + confidence) / 2) * error
    certain = np.where(value == 0, 0.0, np.inf)
    t = np.where(error > 0, np.abs(value) / np.where(error > 0, error, 1), certain)
    return Bounds(value - half, value + half, 2 * special.stdtr(degrees, -t))


def _welch(sd_a: float, sd_b: float) -> tuple[float, float]:
    """The spread of a difference of two seeds, and Welch's degrees of freedom for each further
    one."""
    sd = float(np.hypot(sd_a, sd_b))
    return sd, sd**4 / (sd_a**4 + sd_b**4) if sd > 0 else 1.0


def _seeds_within(half_width: float, sd: float, freedom: float) -> int | None:
    seeds = np.arange(2, MOST_SEEDS + 1, dtype=np.float64)
    halves = special.stdtrit(freedom * (seeds - 1), 0.975) * sd / np.sqrt(seeds)
    enough = np.flatnonzero(halves <= half_width)
    return int(seeds[enough[0]]) if len(enough) else None


def _seeds_needed(difference: float, sd: float, freedom: float, alpha: float) -> int | None:
    """The least n at which a two-sided t-test with ``freedom`` (n - 1) degrees has the power: its t
    has a noncentral distribution around difference / (sd / sqrt(n)) (Cohen 1988, chapter 2)."""
    if sd == 0:
        return 2
    seeds = np.arange(2, MOST_SEEDS + 1, dtype=np.float64)
    degrees, centre = freedom * (seeds - 1), abs(difference) / sd * np.sqrt(seeds)
    missed = special.nctdtr(degrees, centre, special.stdtrit(degrees, 1 - alpha / 2))
    enough = np.flatnonzero(missed <= 1 - POWER)
    return int(seeds[enough[0]]) if len(enough) else None
