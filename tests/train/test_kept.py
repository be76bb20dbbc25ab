"""Truncated sampling: log-probs over the tokens that could have been sampled."""

import dataclasses
import math

import pytest
import torch

from p3o_kernels import reference
from p3o_train.kept import kept_log_probs
from p3o_train.objective import Objective, micro_batch_log_probs, micro_batch_loss
from p3o_train.packing import pack
from p3o_train.parallel import ParallelGroups
from p3o_train.recording import Recording, Sampling, VersionSpan
from p3o_train.types import Sample
from tests.distributed.ranks import on_all_ranks

V, TAU = 16, 0.7
ALONE = ParallelGroups()
# response tokens and the sets that they were sampled among; the third set lies in one half of the vocabulary
TOKENS = (3, 9, 1, 14)
KEPT = ((3, 8, 15), (9,), (0, 1, 2, 4), (14, 2))
MASK = (1, 1, 1, 0)
LOG_PROBS = (-0.4, 0.0, -1.2, math.nan)


def batch_of(kept=KEPT, mask=MASK):
    recording = Recording(
        "local", "1", Sampling(8, top_k=4), "truncated", (VersionSpan(0, 0, 4),), "length", None, kept
    )
    return pack([Sample.from_lists((5, 6, *TOKENS), 4, LOG_PROBS, mask, recording=recording)], [0.75])


def logits():
    return 3 * torch.randn(6, V, generator=torch.Generator().manual_seed(0))


def expected(rows):
    """[4] log-probs and entropies of the response tokens by the definition, in the dtype of ``rows``."""
    made = []
    for place, (token, kept) in enumerate(zip(TOKENS, KEPT, strict=True)):
        distribution = (rows[1 + place, list(kept)] / TAU).log_softmax(0)
        made.append((distribution[kept.index(token)], -(distribution.exp() * distribution).sum()))
    log_probs, entropies = zip(*made, strict=True)
    return torch.stack(log_probs), torch.stack(entropies)


def test_log_probs_and_entropies_are_over_the_kept_tokens():
    batch, rows = batch_of(), logits()
    made = kept_log_probs(rows, batch.labels, batch.kept_token_ids, batch.mask, temperature=TAU)
    for values, right in zip(made, expected(rows.double()), strict=True):
        # float32 of a few sums around 1
        torch.testing.assert_close(values[1:4].double(), right[:3], rtol=2e-6, atol=2e-7)
        assert values[[0, 4, 5]].tolist() == [0.0, 0.0, 0.0]  # prompt, masked token, last row


@pytest.mark.parametrize("estimator", ["p3o", "grpo"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_loss_and_gradient(estimator, entropy_coef):
    objective = Objective(advantage_estimator=estimator, temperature=TAU, entropy_coef=entropy_coef)
    batch, rows = batch_of(), logits().requires_grad_()
    made = micro_batch_loss(rows, batch, objective, ALONE)
    made.loss.backward()

    exact = rows.detach().double().requires_grad_()
    log_probs, entropies = (values[:3] for values in expected(exact))
    behavior, advantages = torch.tensor(LOG_PROBS[:3]).double(), torch.full((3,), 0.75).double()
    if estimator == "p3o":
        options = {"reduction": "sum", "entropy": entropies, "entropy_coef": entropy_coef}
        right = reference.p3o_loss(log_probs, behavior, advantages, **options).loss
    else:
        ratio = (log_probs - behavior).exp()
        right = -(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * 0.75).sum() - entropy_coef * entropies.sum()
    right.backward()
    torch.testing.assert_close(made.loss.double(), right, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(rows.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)
    assert rows.grad[1:4].count_nonzero() > 3


def test_unchanged_weights_give_a_ratio_of_one_where_the_whole_vocabulary_would_not():
    """Item 2 of what users report: p = (.5, .3, .15, .05), top_p 0.8 keeps two: log .625, and log .5 over all."""
    rows = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(3, 4)
    recording = Recording("sglang", "0.5.23", Sampling(2, top_p=0.8), "truncated", (VersionSpan(0, 0, 1),), "length")

    def log_prob(recording):
        sample = Sample.from_lists([2, 2, 0], 1, [math.log(0.625)], recording=recording)
        return micro_batch_log_probs(rows, pack([sample], [1.0]), Objective(), ALONE)[1]

    over_kept, over_all = log_prob(dataclasses.replace(recording, kept_token_ids=((0, 1),))), log_prob(recording)
    assert (over_kept - math.log(0.625)).exp().item() == pytest.approx(1.0, abs=1e-6)
    assert (over_all - math.log(0.625)).exp().item() == pytest.approx(0.8, abs=1e-6)


def test_masked_rows_may_hold_anything():
    batch, rows = batch_of(), logits()
    rows[[0, 4, 5]] = math.nan
    rows.requires_grad_()
    log_probs, entropies = kept_log_probs(rows, batch.labels, batch.kept_token_ids, batch.mask, temperature=TAU)
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.isfinite().all() and entropies.isfinite().all()
    assert rows.grad.isfinite().all() and not rows.grad[[0, 4, 5]].any()


def test_no_valid_token_is_an_exact_zero():
    batch = batch_of(kept=((),) * 4, mask=(0,) * 4)
    assert batch.kept_token_ids.shape == (6, 0)
    rows = logits().requires_grad_()
    made = micro_batch_loss(rows, batch, Objective(), ALONE)
    made.loss.backward()
    assert made.loss.item() == 0.0 and not rows.grad.any()


def test_hidden_states_are_refused():
    with pytest.raises(ValueError, match=r"--loss-from-hidden.*normalises over the whole vocabulary"):
        micro_batch_loss(logits(), batch_of(), Objective(), ALONE, weight=torch.zeros(V, V))


def shard(rank, ranks):
    group = torch.distributed.group.WORLD
    batch = batch_of()
    rows = logits().chunk(ranks, 1)[rank].clone().requires_grad_()
    objective = Objective(temperature=TAU, entropy_coef=0.3)
    made = micro_batch_loss(rows, batch, objective, ParallelGroups(tensor=group))
    made.loss.backward()
    return made.loss.item(), rows.grad


@pytest.mark.host_only
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_vocabulary_may_be_cut(ranks):
    shards = on_all_ranks(shard, ranks, ranks)
    batch, rows = batch_of(), logits().requires_grad_()
    made = micro_batch_loss(rows, batch, Objective(temperature=TAU, entropy_coef=0.3), ALONE)
    made.loss.backward()
    for loss, _ in shards:
        assert loss == pytest.approx(made.loss.item(), rel=1e-6)
    torch.testing.assert_close(torch.cat([grad for _, grad in shards], 1), rows.grad, rtol=1e-5, atol=1e-7)
