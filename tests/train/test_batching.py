"""Which sample goes where: once, everywhere, evenly, and the same on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import PROPERTY

from p3o_train.batching import balanced_split, plan_micro_batches, token_budget_batches

COSTS = st.lists(st.integers(1, 50), max_size=25)


def flat(plan):
    return sorted(index for rank in plan for batch in rank for index in batch)


def test_longest_goes_to_the_lightest():
    assert balanced_split([5, 9, 1, 4, 4], 2) == [[1, 4], [0, 2, 3]]
    assert balanced_split([3, 3, 3, 3], 3) == [[0, 3], [1], [2]]
    assert balanced_split([9, 1, 1, 1], 2, max_items=2) == [[0, 3], [1, 2]]
    assert balanced_split([], 2) == [[], []]


def test_too_few_places():
    with pytest.raises(ValueError, match="3 samples do not fit into 2 parts of at most 1"):
        balanced_split([1, 1, 1], 2, max_items=1)
    with pytest.raises(ValueError, match="into 0 parts"):
        balanced_split([], 0)


def test_a_sample_beyond_the_budget_is_named_by_its_place():
    with pytest.raises(ValueError, match="sample at index 2 has 9 padded tokens per rank, more than max_tokens 8"):
        plan_micro_batches([8, 1, 9], 2, max_tokens=8)
    with pytest.raises(ValueError, match="sample at index 1 has 9"):
        token_budget_batches([8, 9], 8)
    assert token_budget_batches([8, 8], 8) == [[0], [1]]


def test_a_budget_that_balancing_misses_takes_one_more_batch():
    """3 + 3 and 2 + 2 + 2 would fill two batches of 6; the longest-first rule ends at 7 and 5 instead."""
    assert balanced_split([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]
    assert token_budget_batches([3, 3, 2, 2, 2], 6) == [[0, 4], [1], [2, 3]]


def test_samples_without_tokens_are_not_lost():
    assert token_budget_batches([0, 0], 8) == [[0, 1]]


def test_fixed_sizes_and_dummies():
    assert plan_micro_batches([4, 3, 2, 1, 1], 2, micro_batch_size=2) == [[[0, 3], [4]], [[1, 2], []]]
    # equally many samples before equally many tokens, or one rank would wait for three micro-batches of the other
    assert plan_micro_batches([9, 1, 1, 1], 2, micro_batch_size=1) == [[[0], [3]], [[1], [2]]]
    plan = plan_micro_batches([1] * 3, 4, micro_batch_size=1, count_multiple=2)
    assert plan == [[[0], []], [[1], []], [[2], []], [[], []]]
    assert plan_micro_batches([], 2, max_tokens=4) == plan_micro_batches([], 2, micro_batch_size=4) == [[[]], [[]]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "give either micro_batch_size or max_tokens, got"),
        ({"micro_batch_size": 1, "max_tokens": 1}, "give either"),
        ({"micro_batch_size": 0}, "micro_batch_size must be >= 1, got 0"),
        ({"max_tokens": -3}, "max_tokens must be >= 1, got -3"),
        ({"max_tokens": 3, "dp_size": 0}, "dp_size must be >= 1, got 0"),
        ({"max_tokens": 3, "count_multiple": 0}, "count_multiple must be >= 1, got 0"),
    ],
)
def test_bad_sizes(arguments, text):
    with pytest.raises(ValueError, match=text):
        plan_micro_batches([1, 2], **arguments)


@PROPERTY
@given(costs=COSTS, dp_size=st.integers(1, 5), budget=st.integers(50, 120), multiple=st.integers(1, 3))
def test_token_budgets(costs, dp_size, budget, multiple):
    plan = plan_micro_batches(costs, dp_size, max_tokens=budget, count_multiple=multiple)
    assert flat(plan) == list(range(len(costs)))
    assert len(plan) == dp_size
    counts = {len(rank) for rank in plan}
    assert len(counts) == 1
    assert counts.pop() % multiple == 0
    assert all(sum(costs[index] for index in batch) <= budget for rank in plan for batch in rank)
    loads = [sum(costs[index] for batch in rank for index in batch) for rank in plan]
    assert max(loads) - min(loads) <= max(costs, default=0)


@PROPERTY
@given(costs=COSTS, dp_size=st.integers(1, 5), size=st.integers(1, 6))
def test_fixed_numbers(costs, dp_size, size):
    plan = plan_micro_batches(costs, dp_size, micro_batch_size=size)
    assert flat(plan) == list(range(len(costs)))
    most = -(-len(costs) // dp_size)
    assert {len(rank) for rank in plan} == {max(1, -(-most // size))}
    assert all(len(batch) <= size for rank in plan for batch in rank)


@PROPERTY
@given(costs=COSTS, budget=st.integers(50, 120))
def test_no_more_batches_than_twice_the_least(costs, budget):
    batches = token_budget_batches(costs, budget)
    assert all(batches)
    # a number of parts fails only when each of them is more than half full
    assert len(batches) <= 1 + 2 * sum(costs) / budget
