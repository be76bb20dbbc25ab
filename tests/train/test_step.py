"""One verdict for a whole step, on every rank: real processes over Gloo, two pipeline stages times two data ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from p3o_kernels import RatioStats, ratio_stats
from p3o_train.parallel import ParallelGroups
from p3o_train.step import CheckedFinalizer, StepStatistics
from tests.distributed.ranks import on_all_ranks

# the ratios 1, 2, 0.5, 4 of the golden case, two tokens for each data rank
LOG_RATIOS = torch.tensor([1.0, 2.0, 0.5, 4.0]).log()
GOLDEN_ESS = 0.6617647055709343


def statistics(log_ratios):
    return ratio_stats(log_ratios, torch.zeros_like(log_ratios))


def grid():
    """Ranks 0 and 1 are the first stage, 2 and 3 the last; even ranks are data rank 0."""
    data = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    return ParallelGroups(data_context=data[rank // 2], pipeline=stages[rank % 2])


def error_of(collected, groups):
    try:
        collected.freeze(groups, "cpu")
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None, "nothing was raised"


def a_step(rank):
    """e, then the verdicts on bad and on missing data, then a collective to show that the groups still work."""
    groups, last = grid(), rank >= 2
    collected = StepStatistics()
    for token in LOG_RATIOS[2 * (rank % 2) :][:2]:  # two micro-batches of a token each
        # what an earlier stage passes in must not count
        collected.add(statistics(token[None]) if last else statistics(torch.tensor([3.0])))
    context = collected.freeze(groups, "cpu")
    bad, empty, half = StepStatistics(), StepStatistics(), StepStatistics()
    bad.add(statistics(torch.tensor([500.0 if rank == 3 else 0.0])))
    empty.add(RatioStats.zeros())
    if rank == 2:  # the other data rank has no token at all
        half.add(statistics(LOG_RATIOS))
    ones = torch.ones(1)
    results = error_of(bad, groups), error_of(empty, groups), half.freeze(groups, "cpu").ess.item()
    dist.all_reduce(ones)
    return context.ess.item(), context.num_tokens.item(), results, ones.item()


@pytest.fixture(scope="module")
def ranks():
    return on_all_ranks(a_step, 4)


def test_stages_or_ranks_count_a_token_twice(ranks):
    assert {made[:2] for made in ranks} == {(ranks[0][0], 4.0)}
    assert ranks[0][0] == pytest.approx(GOLDEN_ESS, rel=1e-7)  # logarithms in float32


def test_bad_data_on_one_rank_stops_that_rank_alone(ranks):
    assert {made[2][0] for made in ranks} == {ranks[0][2][0]}
    assert ranks[0][2][0][0] == "ValueError" and "invalid data on 1 of 2 valid tokens" in ranks[0][2][0][1]


def test_a_step_without_tokens_goes_on(ranks):
    assert {made[2][1][0] for made in ranks} == {"RuntimeError"}
    assert "no valid response tokens globally" in ranks[0][2][1][1]


def test_a_rank_without_tokens_breaks_the_step(ranks):
    assert len({made[2][2] for made in ranks}) == 1
    assert ranks[0][2][2] == pytest.approx(GOLDEN_ESS, rel=1e-7)


def test_the_groups_are_unusable_afterwards(ranks):
    assert [made[3] for made in ranks] == [4.0] * 4


def finalizer(calls):
    def finalize_model_grads(model, num_tokens=None, **kwargs):
        calls.append((model, num_tokens, kwargs))
        return "finalized"

    return finalize_model_grads


def no_loss():
    return None


def test_the_finalizer_runs_on_invalid_data():
    calls = []
    config = SimpleNamespace(finalize_model_grads_func=finalizer(calls))
    refused = pytest.raises(ValueError, match="invalid data on 2 of 5 valid tokens of this optimizer step")
    with CheckedFinalizer(config, ParallelGroups(), lambda: torch.tensor(2.0)), refused:
        config.finalize_model_grads_func(["model"], torch.tensor(5))
    assert calls == []


def test_the_finalizer_runs_on_no_token_at_all():
    calls = []
    config = SimpleNamespace(finalize_model_grads_func=finalizer(calls))
    with CheckedFinalizer(config, ParallelGroups(), no_loss):
        with pytest.raises(RuntimeError, match="the optimizer and the scheduler have not moved"):
            config.finalize_model_grads_func(["model"], torch.tensor(0))
        assert calls == []
        assert config.finalize_model_grads_func(["model"], torch.tensor(3), pg_collection="groups") == "finalized"
    assert calls == [(["model"], torch.tensor(3), {"pg_collection": "groups"})]


def test_the_finalizer_is_not_given_back_after_an_error():
    original = finalizer([])
    config = SimpleNamespace(finalize_model_grads_func=original)
    with pytest.raises(KeyError), CheckedFinalizer(config, ParallelGroups(), no_loss):
        raise KeyError("in the middle")
    assert config.finalize_model_grads_func is original


def test_a_missing_finalizer_or_count_is_found_out_late():
    nothing = SimpleNamespace(finalize_model_grads_func=None)
    missing = pytest.raises(RuntimeError, match="finalize_model_grads_func is not set")
    with missing, CheckedFinalizer(nothing, ParallelGroups(), no_loss):
        pytest.fail("the body must not run")
    config = SimpleNamespace(finalize_model_grads_func=finalizer([]))
    with (
        CheckedFinalizer(config, ParallelGroups(), no_loss),
        pytest.raises(RuntimeError, match="calculate_per_token_loss=True"),
    ):
        config.finalize_model_grads_func(["model"])
