"""Seeds of rollouts: the same on every machine, different for every rollout."""

from __future__ import annotations

import itertools

import pytest

from opd_core.sampling.protocol import rollout_seed


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((1234, 1, 0, 0, 0), 5172947742497256499),
        ((1234, 1, 0, 0, 1), 1932207195955153045),
        ((0,), 4761921975702974394),
        (("evaluation", 5), 1010991042993070816),
    ],
)
def test_a_seed_is_the_same_on_every_machine(parts: tuple[int | str, ...], seed: int) -> None:
    assert rollout_seed(*parts) == seed


def test_every_part_counts_and_so_does_its_place() -> None:
    seeds = {rollout_seed(*parts) for parts in itertools.product(range(5), repeat=5)}
    assert len(seeds) == 5**5


def test_a_seed_fits_into_63_bits() -> None:
    seeds = [rollout_seed(i) for i in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # and uses them
