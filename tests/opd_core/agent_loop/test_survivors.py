"""The survivor table: what became of groups, and whether the losses bias what trains."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from opd_core.agent_loop.survivors import Moments, Survivors, difference_z, share_z
from opd_core.errors import TrainingError
from opd_core.rollout import Group, Status

Make = Callable[..., Group]


@pytest.fixture
def group_of(make_group: Any, make_rollout: Any, make_prompt: Any) -> Make:
    """``group_of(status, lengths, source=…, reward=…)``: one rollout per length, all alike else."""

    def make(
        status: Status, lengths: tuple[int, ...], source: str = "sums", reward: float | None = None
    ) -> Group:
        prompt = make_prompt(data_source=source)
        members = [
            make_rollout(index, prompt, response_ids=(6,) * length, reward=reward)
            for index, length in enumerate(lengths)
        ]
        cause = "" if status is Status.COMPLETED else "timeout"
        group: Group = make_group(*members, status=status, cause=cause)
        return group

    return make


def counted(*groups: Group) -> Survivors:
    survivors = Survivors()
    for group in groups:
        survivors.count(group)
    return survivors


# ------------------------------------------------------------------------------------------- counts


def test_causes_are_counted_with_their_first_example(make_group: Any, make_rollout: Any) -> None:
    survivors = counted(make_group())
    for said in ("teacher 'big': one", "teacher 'big': two"):
        failed = make_rollout().failed("http_503", said)
        survivors.count(make_group(failed, status=Status.FAILED, cause="http_503"))
    survivors.count(make_group(status=Status.FILTERED, cause="filtered"))
    assert survivors.started == 4
    assert survivors.table().splitlines()[4:6] == [
        "  http_503: 2 (e.g. teacher 'big': one)",
        "  filtered: 1",
    ]


def test_a_filtered_group_does_not_hide_why_the_filter_failed(
    make_group: Any, make_rollout: Any
) -> None:
    survivors = Survivors()
    survivors.count(make_group(status=Status.FAILED, cause="filter_func"))  # says nothing
    failed = make_rollout().failed("filter_func", "filter_func raised KeyError: 'x'")
    survivors.count(make_group(failed, status=Status.FAILED, cause="filter_func"))
    assert "filter_func: 2 (e.g. filter_func raised KeyError: 'x')" in survivors.table()


def test_counts_name_every_status_and_the_causes_that_occurred(make_group: Any) -> None:
    survivors = counted(make_group(), make_group(status=Status.ABORTED, cause="incomplete"))
    assert survivors.as_counts() == {
        "groups/completed": 1,
        "groups/aborted": 1,
        "groups/failed": 0,
        "groups/filtered": 0,
        "groups/expired": 0,
        "lost/incomplete": 1,
    }


def test_metrics_say_what_the_dropped_groups_were_like(group_of: Make) -> None:
    survivors = counted(
        group_of(Status.COMPLETED, (5, 5)),
        group_of(Status.FAILED, (10, 20)),
        group_of(Status.ABORTED, (0,)),
        group_of(Status.FILTERED, (2,), reward=1.0),
    )
    means = {n: v for n, v in survivors.as_metrics().items() if n.startswith("survivors/")}
    assert means == {
        "survivors/failed_response_tokens_mean": 15.0,
        "survivors/filtered_response_tokens_mean": 2.0,
        "survivors/filtered_reward_mean": 1.0,
    }
    assert survivors.as_counts().items() <= survivors.as_metrics().items()


# ---------------------------------------------------------------------------------------- the table


def test_the_table_is_aligned_and_has_a_row_for_each_outcome(group_of: Make) -> None:
    survivors = counted(
        *[group_of(Status.COMPLETED, (100 + n, 102 + n), reward=n % 2) for n in range(10)],
        group_of(Status.FAILED, (7, 9), source="odd"),
        group_of(Status.ABORTED, (0,), source="odd"),
        group_of(Status.EXPIRED, (8, 8)),
    )
    assert survivors.table().splitlines()[:4] == [
        "outcome   groups  rollouts  mean length       reward  odd  sums",
        "kept          10        20      106 ± 1  0.50 ± 0.17   0%  100%",
        "filtered       0         0            -            -    -     -",
        "failed         3         5        8 ± 0            -  67%   33%",
    ]


def test_the_siblings_of_a_failed_rollout_are_lost_with_it(
    make_group: Any, make_rollout: Any
) -> None:
    failed = make_rollout(0).failed("timeout", "too late")
    survivors = counted(make_group(failed, make_rollout(1), status=Status.FAILED, cause="timeout"))
    assert survivors.tallies["failed"].rollouts == 2
    assert survivors.tallies["kept"].rollouts == 0


def test_tables_of_several_steps_add_up_to_one_of_all(group_of: Make) -> None:
    groups = [
        group_of(status, (length, 2 * length), source=source, reward=length / 3)
        for status in (Status.COMPLETED, Status.FILTERED, Status.FAILED)
        for length, source in ((3, "a"), (4, "b"), (90, "a"))
    ]
    total = counted(*groups[::2])
    total.add(counted(*groups[1::2]))
    assert total == counted(*groups)


# -------------------------------------------------------------------------------------------- state


def test_a_restored_table_is_the_same_to_the_last_bit_and_counts_on(group_of: Make) -> None:
    first = [
        group_of(status, (7 * n, n), source, 0.1 * n)
        for n, (status, source) in enumerate(
            [(Status.COMPLETED, "b"), (Status.FAILED, "a"), (Status.FILTERED, "a")], start=1
        )
    ]
    survivors = counted(*first)
    later = Survivors.restore(json.loads(json.dumps(survivors.state())))
    assert later == survivors
    assert later.table() == survivors.table()
    for table in (survivors, later):
        for group in first[::-1]:
            table.count(group)
    assert later == survivors
    assert later.tallies["failed"].sources == {"a": 2}


def test_a_fresh_table_comes_back_too() -> None:
    assert Survivors.restore(Survivors().state()) == Survivors()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda state: None, "expected Survivors as an object"),
        (lambda state: state | {"more": 1}, r"unknown: \['more'\]"),
        (lambda state: state | {"by_status": {"failed": 1.5}}, "by_status: expected"),
        (lambda state: state | {"by_cause": []}, "by_cause: expected"),
        (lambda state: state | {"examples": {"timeout": None}}, "examples: expected"),
        (lambda state: state | {"tallies": {"kept": state["tallies"]["kept"]}}, "tallies: exp"),
        (lambda state: state["tallies"]["kept"].pop("length") and state, r"\['length'\]"),
        (lambda state: state["tallies"]["kept"]["reward"].update(total="1") or state, "total: exp"),
    ],
)
def test_what_is_no_table_is_refused(group_of: Make, damage: Any, said: str) -> None:
    state = counted(group_of(Status.COMPLETED, (3,))).state()
    with pytest.raises(TrainingError, match=f"^state of the survivors: .*{said}"):
        Survivors.restore(damage(state))


# --------------------------------------------------------------------------------------------- bias


def test_lost_groups_that_are_longer_are_told_with_their_z(group_of: Make) -> None:
    kept = [group_of(Status.COMPLETED, (100 + n % 5,)) for n in range(40)]
    failed = [group_of(Status.FAILED, (300 + n % 7,)) for n in range(20)]
    (said,) = counted(*kept, *failed).bias()
    assert said.startswith("failed rollouts are longer than kept ones: 303 ± 0 tokens against 102")
    z = float(said.split("z = ")[1].rstrip(")"))
    lengths = [[len(g.rollouts[0].response_ids) for g in groups] for groups in (failed, kept)]
    variances = [statistics.variance(x) / len(x) for x in lengths]
    expected = (statistics.mean(lengths[0]) - statistics.mean(lengths[1])) / sum(variances) ** 0.5
    assert z == pytest.approx(expected, abs=0.05)


def test_filtered_groups_with_another_reward_or_source_are_told(group_of: Make) -> None:
    kept = [group_of(Status.COMPLETED, (9,), "math" if n < 5 else "sums", 0.5) for n in range(50)]
    filtered = [
        group_of(Status.FILTERED, (9,), "math" if n < 9 else "sums", n % 3 / 20) for n in range(20)
    ]
    reward, math_share, sums_share = counted(*kept, *filtered).bias()
    assert reward.startswith("filtered rollouts have a lower reward than kept ones: 0.05 ± 0.01 ag")
    assert math_share == (
        "data_source 'math' is 45% of the filtered groups but 10% of the kept (z = 3.3)"
    )
    assert sums_share.startswith("data_source 'sums' is 55% of the filtered groups but 90%")


def test_the_largest_difference_is_a_number_too_once_it_can_be_told(group_of: Make) -> None:
    kept = [group_of(Status.COMPLETED, (4 + i % 2,)) for i in range(5)]
    lost = [group_of(Status.FAILED, (8 + i % 2,)) for i in range(5)]
    assert counted(*kept).bias_z is None
    assert counted(*kept, *lost[:4]).bias_z is None
    found = counted(*kept, *lost)
    means = [Moments() for _ in range(2)]
    for moments, base in zip(means, (8, 4), strict=True):
        for i in range(5):
            moments.take([base + i % 2])
    assert found.bias_z == pytest.approx(difference_z(*means))
    assert any(f"z = {found.bias_z:.1f}" in said for said in found.bias())
    shorter = counted(*(group_of(Status.FAILED, (2 + i % 2,)) for i in range(5)), *kept)
    assert shorter.bias_z is not None
    assert shorter.bias_z > 3, "a difference of either sign"


def test_losses_at_random_are_called_unbiased(group_of: Make) -> None:
    """100 draws of whole groups, whose rollouts share their prompt's length: hardly an alarm."""
    draw, alarms = random.Random(0), 0
    for _ in range(100):
        groups = []
        for n in range(60):
            length = draw.randrange(50, 150)
            status = Status.COMPLETED if n % 3 else Status.FAILED
            groups.append(group_of(status, (length,) * 8, draw.choice("ab"), draw.random()))
        said = counted(*groups).bias()
        alarms += said != ["no bias is seen in length, reward or data source of the failed groups"]
    assert alarms <= 3


def test_few_groups_are_too_few_to_tell(group_of: Make) -> None:
    kept = [group_of(Status.COMPLETED, (1,)) for _ in range(50)]
    failed = [group_of(Status.FAILED, (900 + n,) * 4) for n in range(4)]
    assert counted(*kept, *failed).bias() == [
        "too few groups to tell whether the losses bias the data: 50 kept, 4 failed; "
        "5 of each are needed"
    ]
    (said,) = counted(*kept, *failed, group_of(Status.FAILED, (904,))).bias()
    assert said.startswith("failed rollouts are longer")


def test_without_losses_nothing_is_claimed(group_of: Make) -> None:
    assert Survivors().bias() == ["no group was dropped"]
    assert counted(group_of(Status.COMPLETED, (3,))).bias() == ["no group was dropped"]


def test_groups_without_a_sampled_token_have_no_length(group_of: Make) -> None:
    kept = [group_of(Status.COMPLETED, (100,)) for _ in range(9)]
    aborted = [group_of(Status.ABORTED, (0,)) for _ in range(9)]
    failed = [group_of(Status.FAILED, (n,)) for n in (900, 901)]  # too few to have a mean
    assert counted(*kept, *aborted, *failed).bias() == [
        "no bias is seen in length, reward or data source of the failed groups"
    ]


def test_a_reward_that_is_no_number_does_not_spoil_the_mean(group_of: Make) -> None:
    survivors = counted(
        group_of(Status.FAILED, (1,), reward=math.nan), group_of(Status.FAILED, (1,), reward=1.0)
    )
    assert survivors.as_metrics()["survivors/failed_reward_mean"] == 1.0


# --------------------------------------------------------------------------------------- statistics


def moments(*values: float) -> Moments:
    made = Moments()
    for value in values:
        made.take([value])
    return made


def test_a_mean_and_its_standard_error_are_those_of_the_textbook() -> None:
    values = [3.0, 4.5, 1.25, 9.0, 2.0]
    made = moments(*values)
    assert made.mean == pytest.approx(statistics.mean(values))
    assert made.stderr == pytest.approx(statistics.stdev(values) / 5**0.5)


def test_a_group_counts_once_however_many_rollouts_it_has() -> None:
    made = Moments()
    made.take([1.0, 3.0])
    made.take([])
    assert (made.count, made.mean) == (1, 2.0)
    assert math.isnan(made.stderr)


def test_means_that_differ_only_by_rounding_are_the_same() -> None:
    assert difference_z(moments(*[0.1] * 10), moments(*[0.1] * 7)) == 0.0
    assert difference_z(moments(1, 1, 1), moments(0, 0)) == math.inf
    assert difference_z(moments(0, 0), moments(1, 1, 1)) == -math.inf


def test_shares_are_compared_as_by_hand() -> None:
    # pooled 14/70 = 0.2: sqrt(0.2 * 0.8 * (1/20 + 1/50)) = 0.105830
    assert share_z(9, 20, 5, 50) == pytest.approx(0.35 / 0.105830, rel=1e-5)
    assert share_z(0, 20, 0, 50) == share_z(20, 20, 50, 50) == 0.0


def test_one_group_of_a_rare_source_is_no_alarm() -> None:
    assert share_z(1, 5, 1, 1000) == 0.0
