"""AReaL's scaling end to end (driver of its FSDP engine, commit 892a9038): weights, early return, mean of gradients."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from problem import check_gradient, log_probs, responses, truth, weight

from p3o_train.adapters import areal
from tests.distributed.ranks import on_all_ranks

CUTS = ((((0, 1, 2),), ((3, 4, 5),)), (((0,), (1, 2)), ((3,), (4,), (5,))))
CONFIG = SimpleNamespace(use_decoupled_loss=True, recompute_logprob=True, ppo_n_minibatches=1)


def packed(samples, at):
    """One-dimensional rows of a micro-batch; row t is about token t + 1, as AReaL rolls them."""
    pieces = {name: [] for name in ("logprobs", "prox_logp", "advantages", "loss_mask", "trainer")}
    for sample in samples:
        before, response = sample.first_row, log_probs(sample, at)

        def whole(values, fill, before=before):
            return torch.cat([torch.full((before,), fill), values, torch.full((1,), fill)])

        pieces["logprobs"].append(whole(sample.behavior, 0.0))
        pieces["prox_logp"].append(whole(response.detach(), -1.0))
        pieces["advantages"].append(whole(torch.full_like(sample.behavior, sample.advantage), 0.0))
        pieces["loss_mask"].append(whole(sample.mask.float(), 0.0))
        pieces["trainer"].append(whole(response, -1.0))
    return {name: torch.cat(rows) for name, rows in pieces.items()}


def train_batch(samples, parts, at, context, total, dp_size):
    for part in parts:
        data = packed([samples[index] for index in part], at)
        logprobs = data.pop("trainer")
        local = areal.loss_weight(data)
        if local == 0:
            continue
        loss = areal.p3o_loss_fn(
            logprobs, torch.zeros_like(logprobs), data, context=context, vocab_min_logits=None, vocab_max_logits=None
        )
        (loss * (local / total * dp_size)).backward()


def rank_step(rank):
    made = []
    for cut in CUTS:
        samples, at = responses(4), weight()
        mine = [samples[index] for part in cut[rank] for index in part]
        batch = packed(mine, at)
        context = areal.step_context(batch, CONFIG, dist.group.WORLD)
        total = areal.loss_weight(batch).float()
        dist.all_reduce(total)
        train_batch(samples, cut[rank], at, context, total, 2)
        dist.all_reduce(at.grad)
        made.append((at.grad / 2, context.ess.item()))
    return made


@pytest.mark.host_only
def test_gradients_are_those_of_the_whole_batch():
    """Sample 4 has no token: in the second cut rank 1 calls the loss once less than it has micro-batches."""
    expected = truth(responses(4))
    for made in on_all_ranks(rank_step, 2):
        for gradient, ess in made:
            check_gradient(gradient, expected)
            assert ess == pytest.approx(expected.contexts[0].ess.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"use_decoupled_loss": False}, "set actor.use_decoupled_loss=true"),
        ({"recompute_logprob": False}, "set actor.recompute_logprob=true"),
        ({"ppo_n_minibatches": 4}, "set actor.ppo_n_minibatches=1"),
    ],
)
def test_settings_that_lose_a_policy_are_refused(changed, text):
    config = SimpleNamespace(**vars(CONFIG) | changed)
    with pytest.raises(ValueError, match=text):
        areal.step_context(packed(responses(), weight()), config)


def test_data_that_does_not_fit_is_refused():
    batch = packed(responses(), weight())
    with pytest.raises(ValueError, match="no prox_logp"):
        areal.step_context(batch | {"prox_logp": None}, CONFIG)
    with pytest.raises(ValueError, match="invalid"):
        areal.step_context(batch | {"prox_logp": batch["prox_logp"] - 900}, CONFIG)
    with pytest.raises(RuntimeError, match="no valid response tokens"):
        areal.step_context(batch | {"loss_mask": batch["loss_mask"] * 0}, CONFIG)
    context = areal.step_context(batch, CONFIG)
    with pytest.raises(ValueError, match=r"advantages \(1,\)"):
        logprobs = batch.pop("trainer")
        areal.p3o_loss_fn(logprobs, logprobs, batch | {"advantages": torch.ones(1)}, context=context)


def test_the_entropy_bonus_has_a_gradient():
    batch = packed(responses(), weight())
    context, entropy = areal.step_context(batch, CONFIG), torch.ones_like(batch["logprobs"]).requires_grad_()
    loss = areal.p3o_loss_fn(batch.pop("trainer"), entropy, batch, context=context, entropy_coef=0.5)
    loss.backward()
    mask = batch["loss_mask"].bool()
    torch.testing.assert_close(entropy.grad, -0.5 * mask / mask.sum(), rtol=1e-6, atol=0)
