"""Advantages relative to the group of a response."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import PROPERTY, make_sample

from p3o_train.advantage import group_advantages
from p3o_train.packing import pack

# a float32 result of float64 arithmetic: one rounding
ROUNDING = 2**-23


def scored(*rewards_and_groups):
    return [
        make_sample(reward=reward, group_id=group, sample_id=f"s{index}")
        for index, (reward, group) in enumerate(rewards_and_groups)
    ]


def test_values_with_groups_that_are_no_neighbours():
    samples = scored((1.0, 7), (2.0, 3), (3.0, 7), (6.0, 3), (4.0, 3))
    advantages = group_advantages(samples, divide_by_std=False)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [-1.0, -2.0, 1.0, 2.0, 0.0]
    # standard deviations with n - 1: sqrt(2) and 2
    root, two = math.sqrt(2) + 1e-6, 2 + 1e-6
    expected = [-1 / root, -2 / two, 1 / root, 2 / two, 0.0]
    assert group_advantages(samples).tolist() == pytest.approx(expected, rel=ROUNDING)


def test_scale_of_rewards_is_divided_away():
    one, other = group_advantages(scored((1.0, 0), (3.0, 0))), group_advantages(scored((2.0, 0), (6.0, 0)))
    assert one.tolist() == pytest.approx(other.tolist(), rel=1e-6)  # the epsilon beside a deviation of 1.4


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e30, -7e-5])
def test_equal_rewards_give_exactly_zero(reward, divide_by_std):
    samples = scored(*[(reward, 0)] * 3, *[(reward / 7, 1)] * 7)
    assert group_advantages(samples, divide_by_std=divide_by_std).tolist() == [0.0] * 10


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_a_group_of_one_has_nothing_to_compare_with(divide_by_std):
    advantages = group_advantages(scored((5.0, 1), (0.0, 2), (1.0, 2)), divide_by_std=divide_by_std)
    assert advantages[0].item() == 0.0
    assert advantages[2] > 0 > advantages[1]


def test_dummies_join_no_group():
    dummy = dataclasses.replace(
        make_sample(response=1, valid=[0]), is_dummy=True, reward=math.nan, group_id=0, sample_id="filler"
    )
    samples = scored((1.0, 0), (3.0, 0))
    advantages = group_advantages([samples[0], dummy, samples[1]], divide_by_std=False)
    assert advantages.tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_named(reward):
    with pytest.raises(ValueError, match=f"'s1' of group 4: the reward must be .* got {reward} \\(1 of 2"):
        group_advantages(scored((1.0, 4), (reward, 4), (0.0, 5)))


def test_an_advantage_beyond_float32_is_named():
    with pytest.raises(ValueError, match="'s0' of group 0: the advantage must be a finite number, got -inf"):
        group_advantages(scored((-1e300, 0), (1e300, 0)), divide_by_std=False)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
def test_epsilon_is_positive(epsilon):
    with pytest.raises(ValueError, match="epsilon must be positive"):
        group_advantages(scored((1.0, 0)), epsilon=epsilon)


def test_no_samples():
    assert group_advantages([]).shape == (0,)


REWARDS = st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=12)


@PROPERTY
@given(pairs=REWARDS, seed=st.integers(0, 9))
def test_order_of_samples_does_not_matter(pairs, seed):
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    straight = group_advantages(scored(*pairs), divide_by_std=False)
    shuffled = group_advantages(scored(*(pairs[index] for index in order)), divide_by_std=False)
    # sums of up to 12 float64 numbers of size 200 in another order, rounded to float32
    torch.testing.assert_close(shuffled, straight[order], rtol=ROUNDING, atol=1e-12)


@PROPERTY
@given(pairs=REWARDS)
def test_advantages_of_a_group_add_up_to_zero_and_keep_its_order(pairs):
    advantages = group_advantages(scored(*pairs)).double()
    for group in {group for _, group in pairs}:
        members = [index for index, pair in enumerate(pairs) if pair[1] == group]
        # up to 12 numbers below 4, each rounded to float32
        assert advantages[members].sum().item() == pytest.approx(0, abs=12 * 4 * ROUNDING)
        ranked = sorted(members, key=lambda index: pairs[index][0])
        assert advantages[ranked].diff().ge(0).all()


def test_a_bad_advantage_does_not_get_into_a_batch():
    samples = [make_sample(), make_sample(response=2, valid=[0, 0], sample_id="masked")]
    assert pack(samples, [1.0, math.nan]).num_tokens == 3
    with pytest.raises(ValueError, match="'s100': its advantage must be finite, got nan"):
        pack(samples, [math.nan, 1.0])
