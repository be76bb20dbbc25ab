"""FeynRL's scaling end to end (driver of its training step, commit 9d5d3d6f): global token count, two averages."""

import pytest
import torch
import torch.distributed as dist
from problem import check_gradient, padded, responses, truth, weight

from p3o_train.adapters.feynrl import compute_policy_loss
from p3o_train.parity import TokenBatch, compare
from tests.distributed.ranks import on_all_ranks

CUTS = ((((0, 1, 2),), ((3, 4, 5),)), (((0,), (1, 2)), ((3, 4), (5,))))
NAMES = {"clipfrac", "approx_kl", "ent_mc", "pi_loss", "loss_total", "kl_ref", "kl_behavioral", "ess_factor"}


def rank_step(rank):
    made = []
    for cut in CUTS:
        samples, at = responses(), weight()
        tokens, steps = sum(int(sample.mask.sum()) for sample in samples), len(cut[rank])
        factors = []
        for part in cut[rank]:
            batch = padded([samples[index] for index in part], at)
            total, _, metrics = compute_policy_loss(
                batch["log_probs"],
                batch["behavior"],
                batch["advantages"],
                batch["mask"].float(),
                None,
                None,
                process_group=dist.group.WORLD,
            )
            # accumulation steps and ranks, which DeepSpeed divides by
            (total * (steps * 2 / tokens) / steps).backward()
            factors.append(metrics["ess_factor"])
        dist.all_reduce(at.grad)
        made.append((at.grad / 2, factors))
    return made


@pytest.mark.host_only
def test_gradients_are_those_of_the_whole_batch():
    ranks = on_all_ranks(rank_step, 2)
    for index, (first, second) in enumerate(CUTS):
        expected = truth(responses(), [a + b for a, b in zip(first, second, strict=True)])
        for rank in ranks:
            check_gradient(rank[index][0], expected)
            assert rank[index][1] == pytest.approx([one.ess.item() for one in expected.contexts], rel=1e-6)


def test_what_it_returns():
    batch = padded(responses(), weight().detach())
    tensors = (batch["log_probs"], batch["behavior"], batch["advantages"], batch["mask"])
    total, divisor, metrics = compute_policy_loss(*tensors)
    expected = truth(responses())
    assert divisor.item() == expected.num_tokens and divisor.dtype == torch.float32
    assert total.item() / expected.num_tokens == pytest.approx(expected.loss, rel=3e-6)
    assert set(metrics) == NAMES
    kept = batch["log_probs"][batch["mask"]]
    assert metrics["ent_mc"] == pytest.approx(-kept.mean().item(), rel=1e-6)
    assert metrics["loss_total"] == pytest.approx(expected.loss, rel=3e-6)
    _, divisor, metrics = compute_policy_loss(*tensors[:3], batch["mask"] * 0.0)
    assert divisor.item() == 1 and metrics["ess_factor"] == 1


def test_it_is_what_theirs_computes_too():
    batch = padded(responses(), weight().detach(), fill=0.0)
    tensors = (batch["log_probs"], batch["behavior"], batch["advantages"], batch["mask"])
    theirs = {row.quantity: row.theirs for row in compare(TokenBatch(*tensors), "feynrl")}
    metrics = compute_policy_loss(*tensors)[2]
    assert metrics["ess_factor"] == pytest.approx(theirs["ess"], rel=1e-6)
    assert metrics["loss_total"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_optional_terms_and_refusals():
    batch = padded(responses(), weight().detach())
    tensors = (batch["log_probs"], batch["behavior"], batch["advantages"], batch["mask"])
    count, plain = batch["mask"].sum().item(), compute_policy_loss(*tensors)[0].item()
    ones = torch.ones_like(batch["log_probs"])
    reference = batch["log_probs"] - 1.0
    total, _, metrics = compute_policy_loss(*tensors, ones, reference, ent_coeff=0.5, kl_coeff=2.0)
    # the entropy is 1 everywhere, and k3 of a log-ratio of 1 is 1 / e
    k3 = torch.tensor(-1.0).exp().item()
    assert total.item() == pytest.approx(plain + count * (2 * k3 - 0.5), rel=1e-5)
    assert metrics["kl_ref"] == pytest.approx(k3, rel=1e-5)
    with pytest.raises(ValueError, match="ref_log_probs"):
        compute_policy_loss(*tensors, kl_coeff=0.1)
    with pytest.raises(ValueError, match=r"advantages \(1, 1\)"):
        compute_policy_loss(*tensors[:2], torch.ones(1, 1), tensors[3])
