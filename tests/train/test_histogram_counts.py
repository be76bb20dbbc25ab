"""Counts of tokens by log-ratio, against numpy's histogram in float64."""

import math
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from p3o_kernels import P3OMetrics
from p3o_train.histogram import EDGES, NUM_BINS, PREFIX, RatioHistogram, counts_of, named_counts
from p3o_train.metrics import MAX_NAMES, MetricSums, global_means
from p3o_train.packing import pack
from p3o_train.parallel import ParallelGroups
from p3o_train.types import Sample
from tests.distributed.ranks import on_all_ranks

ENDS = (-math.inf, *EDGES, math.inf)


def batch_of(behavior, mask=None):
    """One response; row t predicts response token t, since the prompt is one token."""
    return pack([Sample.from_lists(range(len(behavior) + 1), len(behavior), behavior, mask)], [0.0])


def drawn(seed, tokens=400):
    """Log-probs, a batch, and numpy's counts of its log-ratios, over all sizes that there are bins for."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (5 * torch.rand(tokens, generator=generator) - 3.5)
    log_ratio = torch.where(torch.rand(tokens, generator=generator) < 0.3, -size, size)
    log_probs = -2 - torch.rand(tokens + 1, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.2
    batch = batch_of((log_probs[:-1] - log_ratio).tolist(), mask.int().tolist())
    exact = log_probs.double().numpy() - batch.behavior_log_probs.double().numpy()
    return log_probs, batch, numpy.histogram(exact[batch.mask.numpy()], ENDS)[0]


def test_counts_are_those_of_numpy_and_micro_batches_add_up():
    histogram, expected = RatioHistogram(), 0
    assert histogram.counts is None
    for seed in range(3):
        log_probs, batch, wanted = drawn(seed)
        histogram.add(log_probs, batch)
        expected = expected + wanted
    assert histogram.counts.dtype == torch.int64 and (expected > 0).sum() > 20
    assert histogram.counts.tolist() == expected.tolist()


def test_an_edge_belongs_to_the_bin_above_it_and_the_ends_are_open():
    histogram = RatioHistogram()
    histogram.add(torch.tensor([1.0, -1.0, 2.0, 300.0, -300.0, 0.5, 0.0]), batch_of([0.0] * 6))
    by_edge = dict(zip(ENDS, histogram.counts.tolist(), strict=False))
    assert {edge: count for edge, count in by_edge.items() if count} == {1: 1, -1: 1, 2: 1, 10: 1, -math.inf: 1, 0.5: 1}


def test_differences_are_exact():
    """-0.1 + 5.1 of float32 numbers is 5 - 1e-7 in float64, and 5, an edge, in float32."""
    batch = batch_of([-5.1])
    histogram = RatioHistogram()
    histogram.add(torch.tensor([-0.1, 0.0]), batch)
    difference = torch.tensor(-0.1).double().item() - torch.tensor(-5.1).double().item()
    assert difference < 5.0 == (torch.tensor(-0.1) - torch.tensor(-5.1)).item()
    assert histogram.counts.tolist() == numpy.histogram([difference], ENDS)[0].tolist()


def test_masked_tokens_do_not_count_whatever_they_hold():
    batch = batch_of([0.0, math.nan, 0.0], [1, 0, 0])
    histogram = RatioHistogram()
    histogram.add(torch.tensor([0.3, math.nan, math.inf, -math.inf]), batch)
    assert histogram.counts.sum() == 1


def test_nothing_is_read_back():
    """Fake tensors hold no data, so a read would raise."""
    histogram = RatioHistogram()
    with FakeTensorMode():
        batch = SimpleNamespace(behavior_log_probs=torch.zeros(6), mask=torch.ones(6, dtype=torch.bool))
        for _ in range(2):
            histogram.add(torch.zeros(6), batch)
        assert histogram.counts.shape == (NUM_BINS,)


def test_counts_come_back_from_their_names():
    counts = [float(place % 3) for place in range(NUM_BINS)]
    named = named_counts(counts)
    assert len(named) == NUM_BINS * 2 // 3 and named[PREFIX + "-10"] == 1 and named[PREFIX + "10"] == 2
    assert counts_of({name.removeprefix(PREFIX): value for name, value in named.items()}) == counts
    with pytest.raises(ValueError, match=r"bins must begin at one of -inf, -10, .*; got 0\.7, x"):
        counts_of({"-inf": 1.0, "x": 1.0, "0.7": 1.0})


def reduced(histogram, groups):
    return global_means(MetricSums.of(a=(1.0, 1)), None, groups, "cpu", histogram=histogram)


def test_counts_have_places_of_their_own_in_what_the_ranks_exchange():
    sums = {f"n{place:02}": (1.0 * place, 2) for place in range(MAX_NAMES)}
    found = global_means(
        MetricSums(sums), P3OMetrics.zeros(), ParallelGroups(), "cpu", histogram=torch.arange(NUM_BINS) + 1
    )
    assert {name: found[name] for name in sums} == {name: total / 2 for name, (total, _) in sums.items()}
    counts = {name.removeprefix(PREFIX): value for name, value in found.items() if name.startswith(PREFIX)}
    assert counts_of(counts) == list(range(1, NUM_BINS + 1)) and found["train/p3o/valid_tokens"] == 0


def test_without_counts_there_are_no_names():
    assert reduced(None, ParallelGroups()) == {"a": 1.0}


def a_rank(rank):
    """The second rank has two micro-batches, the third none."""
    histogram = RatioHistogram()
    for seed in ((0,), (1, 2), ())[rank]:
        histogram.add(*drawn(seed)[:2])
    return reduced(histogram.counts, ParallelGroups(data_context=torch.distributed.group.WORLD))


@pytest.mark.host_only
def test_ranks_add_up():
    expected = sum(drawn(seed)[2] for seed in range(3))
    found = on_all_ranks(a_rank, 3)
    assert found[0] == found[1] == found[2] == {"a": 1.0, **named_counts(expected.tolist())}
