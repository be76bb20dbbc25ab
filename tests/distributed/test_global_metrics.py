"""Means over the ranks of a step: real processes over Gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from p3o_kernels import P3OMetrics
from p3o_train.metrics import MAX_NAMES, MetricSums, global_means
from p3o_train.parallel import ParallelGroups
from tests.distributed.ranks import on_all_ranks

pytestmark = pytest.mark.host_only
TOKENS, LARGEST = (100, 300), (2.0, 0.5)


class Collectives(TorchDispatchMode):
    """The names of the collectives that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def p3o(rank):
    """Every sum is as many as there are tokens; log-ratios up to the given one."""
    vector = torch.full((P3OMetrics.zeros().vector.numel(),), float(TOKENS[rank]), dtype=torch.float64)
    vector[-1] = LARGEST[rank]
    return P3OMetrics(vector)


def outcome(sums, metrics, groups):
    try:
        return global_means(sums, metrics, groups, "cpu")
    except ValueError as error:
        return f"ValueError: {error}"


def two_data_ranks(rank):
    groups = ParallelGroups(data_context=dist.group.WORLD)
    sums = MetricSums.of(value=((1.0, 1), (9.0, 3))[rank], third=(0.1 * (rank + 1), 3), none=(0.0, 0))
    with Collectives() as ran:
        found = global_means(sums, p3o(rank), groups, "cpu")
    # the reward of samples that both ranks share, as context-parallel ranks do
    reward = outcome(MetricSums.of(reward=(6.0, 4 if rank == 0 else 0)), None, groups)
    one_has_p3o = outcome(MetricSums({}), p3o(0) if rank == 0 else None, groups)
    others = [
        outcome(MetricSums.of(a=(1.0, 1)) if rank == 0 else MetricSums.of(b=(1.0, 1)), None, groups),
        outcome(MetricSums.of(a=(1.0, 1)) if rank == 0 else MetricSums({}), None, groups),
        outcome(MetricSums({f"n{place}": (1.0, 1) for place in range(1 + rank * MAX_NAMES)}), None, groups),
    ]
    # the group still works, and nothing is left over in it
    return found, ran.names, reward, one_has_p3o, others, outcome(MetricSums.of(a=(1.0 + rank, 1)), None, groups)


@pytest.fixture(scope="module")
def pair():
    return on_all_ranks(two_data_ranks, 2)


def test_means_and_totals_are_those_of_all_ranks(pair):
    found = pair[0][0]
    assert found["value"] == 2.5
    assert found["train/p3o/valid_tokens"] == 400 and found["train/p3o/score_loss"] == 1.0
    assert "none" not in found


def test_a_maximum_is_a_maximum(pair):
    assert pair[0][0]["train/p3o/log_ratio_abs_max"] == max(LARGEST)


def test_every_rank_has_the_same_bits(pair):
    assert pair[0][0] == pair[1][0] and pair[0][0]["third"] == (0.1 + 0.2) / 6


def test_one_collective(pair):
    assert [ran for _, ran, *_ in pair] == [["c10d::allgather_"]] * 2


def test_shared_samples_are_counted_once(pair):
    assert [made[2] for made in pair] == [{"reward": 1.5}] * 2


def test_a_rank_without_p3o_adds_no_token(pair):
    assert [made[3]["train/p3o/valid_tokens"] for made in pair] == [100, 100]
    assert pair[0][3] == pair[1][3] == p3o(0).to_dict("train/p3o/")


def test_names_that_differ_are_an_error_on_every_rank(pair):
    for case in range(3):
        for made in pair:
            assert made[4][case].startswith("ValueError: every rank must pass the same names")
    assert [made[5] for made in pair] == [{"a": 1.5}] * 2


def two_stages_of_two_data_ranks(rank):
    """Ranks 0 and 1 are the first stage, 2 and 3 the last; even ranks are data rank 0."""
    data = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    last, data_rank = rank >= 2, rank % 2
    groups = ParallelGroups(data_context=data[rank // 2], pipeline=stages[data_rank])
    # what an earlier stage passes in must not count
    sums = MetricSums.of(value=((1.0, 1), (9.0, 3))[data_rank] if last else (1000.0, 1000))
    with Collectives() as ran:
        found = global_means(sums, p3o(data_rank) if last else None, groups, "cpu")
    on_the_last = outcome(MetricSums.of(b=(1.0, 1)) if rank == 3 else MetricSums.of(a=(1.0, 1)), None, groups)
    on_the_first = outcome(MetricSums.of(b=(1.0, 1)) if rank == 0 else MetricSums.of(a=(1.0, 1)), None, groups)
    return found, ran.names, on_the_last, on_the_first


@pytest.fixture(scope="module")
def grid():
    return on_all_ranks(two_stages_of_two_data_ranks, 4)


def test_every_stage_has_the_numbers_of_the_last(grid):
    found = grid[0][0]
    assert [made[0] for made in grid] == [found] * 4
    assert found["value"] == 2.5 and found["train/p3o/valid_tokens"] == 400
    assert found["train/p3o/log_ratio_abs_max"] == max(LARGEST)


def test_one_collective_on_the_last_stage_and_one_broadcast(grid):
    first, last = ["c10d::broadcast_"], ["c10d::allgather_", "c10d::broadcast_"]
    assert [made[1] for made in grid] == [first, first, last, last]


def test_other_names_on_the_last_stage_are_an_error_on_all_stages(grid):
    assert [made[2].startswith("ValueError: every rank must pass the same names") for made in grid] == [True] * 4


def test_other_names_on_an_earlier_stage_are_an_error_there(grid):
    assert grid[0][3].startswith("ValueError: every rank must pass the same names")
    assert [made[3] for made in grid[1:]] == [{"a": 1.0}] * 3
