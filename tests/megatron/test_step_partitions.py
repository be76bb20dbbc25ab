"""Loss, e and every gradient of a step do not depend on how it is cut, on real Megatron-Core over Gloo.

Single process, one micro-batch against TP, PP, CP, DP and smaller micro-batches, float32. The bound is a relative L2
error of 1e-6: what the same float32 additions in another order make. With TP every layer adds two halves of its inner
products, also forward, so activations differ in their last bit before any gradient does: 3e-6 there.
"""

import pytest

from p3o_train.model import join_shards
from p3o_train.objective import Objective
from tests.distributed.ranks import on_all_ranks
from tests.megatron.steps import Cut, every_cut
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
STEP = Objective(ess_scope="step", entropy_coef=0.02)
MICRO = Objective(ess_scope="micro-batch")
WHOLE = Cut()
ALONE = (WHOLE, Cut(micro_batch_size=1), Cut(micro_batch_size=2))
PAIRS = (Cut(dp=2), Cut(dp=2, micro_batch_size=1), Cut(cp=2), Cut(tp=2), Cut(pp=2, micro_batch_size=2))
FOURS = (Cut(dp=2, cp=2, micro_batch_size=2), Cut(tp=2, cp=2), Cut(tp=2, pp=2, micro_batch_size=1), Cut(cp=4))
BOUND = 1e-6


def bound(cut):
    return 3e-6 if cut.tp > 1 else BOUND


@pytest.fixture(scope="module")
def outcomes():
    """{(cut, objective): outcomes of the ranks}."""
    made = {}
    for ranks, cuts in ((1, ALONE), (2, PAIRS), (4, FOURS)):
        collected = on_all_ranks(every_cut, ranks, cuts, (STEP, MICRO))
        made |= {key: [outcome[key] for outcome in collected] for key in collected[0]}
    return made


def whole_gradients(ranks):
    """Full name -> gradient, put together from the shards of the tensor-parallel ranks."""
    shards = {}
    for outcome in ranks:
        for name, (grad, dim) in outcome.gradients.items():
            shards.setdefault(name, {})[outcome.tp_rank] = (grad, dim)
    whole = {}
    for name, parts in shards.items():
        ordered = [grad for _, (grad, _) in sorted(parts.items())]
        dim = parts[0][1]
        whole[name] = ordered[0] if dim is None else join_shards(ordered, name, dim)
    return whole


def loss_of(ranks):
    (last,) = {outcome.metrics["total_loss"] for outcome in ranks if outcome.metrics is not None}
    return last


def worst(ranks, reference):
    """The largest relative L2 error of a parameter's gradient, and its name."""
    ours, truth = whole_gradients(ranks), whole_gradients(reference)
    assert ours.keys() == truth.keys()
    return max(((ours[name] - truth[name]).norm() / truth[name].norm()).item() for name in truth)


@pytest.mark.parametrize("cut", [*ALONE[1:], *PAIRS, *FOURS], ids=str)
def test_step_scope_depends_on_the_cut(outcomes, cut, record_property):
    ranks, reference = outcomes[cut, STEP], outcomes[WHOLE, STEP]
    assert len({outcome.ess for outcome in ranks}) == 1
    assert ranks[0].ess == pytest.approx(reference[0].ess, rel=BOUND)
    assert 0.1 < reference[0].ess < 0.99
    assert loss_of(ranks) == pytest.approx(loss_of(reference), rel=BOUND)
    error = worst(ranks, reference)
    record_property("gradient_error", error)
    assert error <= bound(cut)


@pytest.mark.parametrize("cut", [Cut(dp=2), Cut(cp=2), Cut(tp=2), Cut(tp=2, cp=2), Cut(cp=4)], ids=str)
def test_micro_batch_scope_depends_on_ranks(outcomes, cut):
    """With the same micro-batches, cut over ranks only, e is the same as well."""
    ranks, reference = outcomes[cut, MICRO], outcomes[WHOLE, MICRO]
    assert loss_of(ranks) == pytest.approx(loss_of(reference), rel=BOUND)
    assert worst(ranks, reference) <= bound(cut)


def test_micro_batch_scope_is_not_step_scope(outcomes):
    """So the two tests above are about something: smaller micro-batches have other e."""
    assert worst(outcomes[Cut(micro_batch_size=1), MICRO], outcomes[WHOLE, MICRO]) > 1e-3


def test_counts_are_totals_and_not_means(outcomes):
    counts = {outcome.metrics["valid_tokens"] for ranks in outcomes.values() for outcome in ranks if outcome.metrics}
    assert len(counts) == 1 and counts.pop() > 10


def test_bad_data_on_one_rank_leaves_the_others_waiting():
    """In step scope the pre-pass finds it, in micro-batch scope the gradient finalizer: before anything moves."""
    cuts, objectives = (Cut(dp=2), Cut(pp=2)), (STEP, MICRO)
    ranks = on_all_ranks(every_cut, 2, cuts, objectives, 1)
    for key in ranks[0]:
        first, second = (outcome[key].error.split(":")[:2] for outcome in ranks)
        assert first == second and first[0] == "ValueError" and "invalid data on" in first[1]
