"""The histogram of a step on the real Megatron-Core: the right counts, however it is cut, and no other numbers."""

import math

import numpy
import pytest
import torch

from p3o_train.histogram import EDGES, NUM_BINS, PREFIX, counts_of
from p3o_train.objective import Objective
from tests.distributed.ranks import on_all_ranks
from tests.megatron.dense import logits, weights
from tests.megatron.histograms import of_a_step, with_and_without
from tests.megatron.steps import Cut, samples
from tests.megatron.topologies import CONFIG, NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
STEP, GRPO = Objective(ess_scope="step"), Objective(advantage_estimator="grpo")
RECORDED = (STEP, Objective(ess_scope="step", context_source="reuse"), Objective(ess_scope="step", from_hidden=True))
RECORDED = (*RECORDED, GRPO, Objective(advantage_estimator="grpo", from_hidden=True, entropy_coef=0.1))
CUTS = [Cut(), Cut(micro_batch_size=1), Cut(tp=2), Cut(pp=2), Cut(cp=2, micro_batch_size=2), Cut(dp=2)]


@pytest.fixture(scope="module")
def expected():
    """Of log-ratios from a float64 model; float32 logits are off by 1e-6, which moves no token over an edge."""
    model, found = weights(CONFIG), []
    for sample in samples():
        if sample.response_length:
            log_probs = logits(sample.token_ids, model, CONFIG).detach().log_softmax(-1)[:-1]
            chosen = log_probs.gather(1, sample.token_ids[1:, None])[-sample.response_length :, 0]
            found += (chosen - sample.behavior_log_probs.double())[sample.valid_mask].tolist()
    assert min(abs(abs(one) - edge) for one in found for edge in EDGES) > 1e-5
    counts = numpy.histogram(found, (-math.inf, *EDGES, math.inf))[0].tolist()
    assert sum(counts) > 10 and sum(map(bool, counts)) > 5
    return counts


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_counts_of_a_step_do_not_depend_on_the_cut_or_the_pass(cut, expected):
    for found in on_all_ranks(of_a_step, cut.ranks, cut, RECORDED):
        assert [counts_of(counts) for counts in found] == [expected] * len(RECORDED)


def test_micro_batch_scope_of_p3o_records_none():
    assert on_all_ranks(of_a_step, 1, Cut(), (Objective(),)) == [[{}]]


def test_losses_and_weights_are_the_same_bits_without_it():
    (runs,) = on_all_ranks(with_and_without, 1, (STEP, GRPO))
    for (rows, trained), (plain_rows, plain_trained) in runs:
        counted = [{name: value for name, value in row.items() if name.startswith(PREFIX)} for row in rows]
        tokens = [next(value for name, value in row.items() if name.endswith("/valid_tokens")) for row in rows]
        assert [sum(counts.values()) for counts in counted] == tokens and len(counted[0]) < NUM_BINS
        assert [{n: v for n, v in row.items() if not n.startswith(PREFIX)} for row in rows] == plain_rows
        assert all(torch.equal(one, two) for one, two in zip(trained, plain_trained, strict=True))
