"""Means of a step are means over all its tokens, in one process; tests/distributed has the same over ranks."""

import math

import pytest
import torch

from p3o_kernels import P3OMetrics
from p3o_train.metrics import MAX_NAMES, MetricSums, global_means
from p3o_train.parallel import ParallelGroups

ALONE = ParallelGroups()


def means(sums, p3o=None, **options):
    return global_means(sums, p3o, ALONE, "cpu", **options)


def p3o(tokens, largest, scale=1.0):
    """Metrics of ``tokens`` tokens: every other sum is ``scale`` times that; the largest |log-ratio| is given."""
    vector = torch.full((P3OMetrics.zeros().vector.numel(),), float(tokens), dtype=torch.float64) * scale
    vector[2], vector[-1] = tokens, largest
    return P3OMetrics(vector)


def test_the_mean_of_1_and_3_3_3_is_not_the_mean_of_their_means():
    short, long = MetricSums.of(value=(1.0, 1)), MetricSums.of(value=(torch.tensor([3.0, 3.0, 3.0]).sum(), 3))
    assert means(short + long) == means(long + short) == {"value": 2.5}


def test_weights_need_not_be_counts():
    assert means(MetricSums.of(value=(1.0, 0.25)) + MetricSums.of(value=(0.5, 0.5))) == {"value": 2.0}


def test_a_name_that_one_micro_batch_lacks_is_that_of_the_others():
    total = MetricSums.of(a=(1.0, 1), b=(4.0, 2)) + MetricSums.of(b=(2.0, 1), c=(7.0, 1))
    assert means(total) == {"a": 1.0, "b": 2.0, "c": 7.0}


def test_numbers_keep_their_names_whatever_the_order_they_come_in():
    pairs = {f"train/{letter}": (float(place), 1) for place, letter in enumerate("qzadm")}
    assert means(MetricSums(pairs)) == {name: total for name, (total, _) in pairs.items()}


def test_a_mean_of_nothing_is_left_out():
    assert means(MetricSums.of(reward=(0.0, 0), length=(0.0, 2))) == {"length": 0.0}
    assert means(MetricSums({})) == {}


@pytest.mark.parametrize("nothing", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("ignored", [5.0, math.nan, torch.tensor(5.0), torch.tensor(math.inf)])
def test_a_sum_of_weight_0_does_not_count(nothing, ignored):
    assert means(MetricSums.of(reward=(ignored, nothing)) + MetricSums.of(reward=(1.0, 2))) == {"reward": 0.5}


def test_what_is_not_finite_is_seen_in_the_mean():
    found = means(MetricSums.of(a=(math.nan, 1)) + MetricSums.of(a=(1.0, 1), b=(1.0, 1)))
    assert math.isnan(found["a"]) and found["b"] == 1.0


@pytest.mark.parametrize("number", [float, torch.tensor, lambda value: torch.tensor([value], dtype=torch.float32)])
def test_large_counts_are_added_exactly(number):
    """In float32 2^24 + 1 is 2^24."""
    total = MetricSums.of(value=(number(2**24), number(2**24))) + MetricSums.of(value=(number(1), 1))
    # as Python numbers: compared with a float32 tensor, 2^24 + 1 would be rounded
    assert [float(value) for value in total.sums["value"]] == [2**24 + 1, 2**24 + 1]
    mixed = MetricSums.of(value=(2**24 + 1, torch.tensor(1))) + MetricSums.of(value=(number(1), 1))
    assert means(mixed) == {"value": (2**24 + 2) / 2}


def test_a_tensor_of_several_elements_is_refused():
    with pytest.raises(ValueError, match=r"reward: sum and weight .* got the shape \(3,\)"):
        MetricSums.of(reward=(torch.ones(3), 3))


def test_tensors_are_detached():
    value = torch.tensor(2.0, requires_grad=True)
    assert not MetricSums.of(value=(value, value)).sums["value"][0].requires_grad


def test_metrics_of_p3o_stand_under_their_prefix():
    given = p3o(100, 2.0) + p3o(300, 0.5, scale=3.0)
    found = means(MetricSums.of(reward=(1.0, 2)), given)
    # every sum is 100 + 900 over 400 tokens
    assert found["train/p3o/valid_tokens"] == 400 and found["train/p3o/score_loss"] == 2.5
    assert found["train/p3o/log_ratio_abs_max"] == 2.0 and found["reward"] == 0.5
    assert found == {"reward": 0.5, **given.to_dict("train/p3o/")}
    assert means(MetricSums({}), given, prefix="train/grpo/") == given.to_dict("train/grpo/")


def test_without_p3o_only_the_sums_are_reported():
    assert means(MetricSums.of(a=(1.0, 1))) == {"a": 1.0}


def test_nothing_that_was_passed_in_changes():
    given, sums = p3o(3, 1.0), MetricSums.of(a=(torch.tensor(1.0), 1))
    before = given.vector.clone()
    means(sums, given)
    assert torch.equal(given.vector, before) and sums.sums["a"] == (1.0, 1.0)


def test_as_many_names_as_there_are_places():
    full = MetricSums({f"n{place:02}": (float(place), 1) for place in range(MAX_NAMES)})
    assert list(means(full).values()) == [float(place) for place in range(MAX_NAMES)]
    with pytest.raises(ValueError, match=f"at most {MAX_NAMES} names, got {MAX_NAMES + 1}"):
        means(full + MetricSums.of(one_more=(1.0, 1)))


def test_a_name_of_p3o_is_refused():
    with pytest.raises(ValueError, match=r"got \['train/p3o/entropy'\]"):
        means(MetricSums({"train/p3o/entropy": (1.0, 1)}), p3o(1, 1.0))
