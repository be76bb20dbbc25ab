"""Right values: a 128-bit evaluation of the objective, some of it confirmed by the authors' own code."""

import json
from pathlib import Path

import pytest
import torch

from p3o_kernels import ESSContext, P3OOutput, p3o_loss, ratio_stats, reference

CASES = json.loads((Path(__file__).parents[1] / "data" / "p3o_cases.json").read_text())["cases"]
# float32 inputs: every stored number carries 6e-8, a token's gradient is a few roundings of it
RELATIVE = 1e-6


@pytest.fixture(params=CASES, ids=lambda case: case["name"])
def case(request):
    return request.param


def inputs(case, device, dtype=torch.float32):
    names = ("log_probs", "behavior_log_probs", "advantages")
    log_probs, behavior, advantages = (torch.tensor(case[name], dtype=dtype, device=device) for name in names)
    return log_probs.requires_grad_(), behavior, advantages, torch.tensor(case["mask"], device=device)


def frozen(case, device):
    if case["context_ess"] is None:
        return None
    ess = torch.tensor(case["context_ess"], dtype=torch.float64, device=device)
    return ESSContext(ess, ess, ess, ess, ess)


def run(case, place, **options) -> tuple[P3OOutput, torch.Tensor]:
    log_probs, *rest = inputs(case, place.device)
    options = {"reduction": "sum", "kl_mode": case["kl_mode"], "backend": place.backend} | options
    output = p3o_loss(log_probs, *rest, context=frozen(case, place.device), **options)
    output.loss.sum().backward()
    return output, log_probs.grad


def eager_run(case) -> tuple[float, torch.Tensor]:
    """Plain float32 PyTorch with autograd: its distance from the right value is what a user has today."""
    log_probs, *rest = inputs(case, "cpu")
    context = frozen(case, "cpu")
    loss = reference.p3o_loss(log_probs, *rest, context=context, reduction="sum", kl_mode=case["kl_mode"]).loss
    loss.backward()
    return loss.item(), log_probs.grad.double()


def close(value, want, eager=None):
    allowed = RELATIVE * abs(want)
    return abs(value - want) <= max(allowed, 1.5 * abs(eager - want) if eager is not None else 0.0)


def test_loss_and_gradient(case, place):
    output, grad = run(case, place)
    eager_loss, eager_grad = eager_run(case)
    want = torch.tensor(case["expect"]["grad"], dtype=torch.float64)
    assert close(output.loss.item(), case["expect"]["loss_sum"], eager_loss)
    # relative to the larger of the two terms of g, which may cancel
    scale = want.abs().clamp_min(
        torch.tensor(case["advantages"], dtype=torch.float64).abs() * output.context.ess.item()
    )
    allowed = torch.maximum(RELATIVE * scale, 1.5 * (eager_grad - want).abs().amax())
    assert ((grad.cpu().double() - want).abs() <= allowed).all()
    assert (grad.cpu()[~torch.tensor(case["mask"])] == 0).all()


def test_sums_and_metrics(case, place):
    output, _ = run(case, place)
    want, count = case["expect"], max(case["expect"]["num_tokens"], 1)
    stats = ratio_stats(*inputs(case, place.device)[:2], inputs(case, place.device)[3], backend=place.backend)
    metrics = output.metrics.to_dict(prefix="")
    assert int(output.num_tokens) == stats.num_tokens.item() == metrics["valid_tokens"] == want["num_tokens"]
    # float64 sums of a float64 exp: 1e-12 is a thousand roundings
    assert stats.sum_ratio.item() == pytest.approx(want["sum_ratio"], rel=1e-12)
    assert stats.sum_ratio_sq.item() == pytest.approx(want["sum_ratio_sq"], rel=1e-12)
    assert output.context.ess.item() == pytest.approx(want["ess"], rel=1e-12)
    assert metrics["normalized_ess"] == metrics["adaptive_cap"] == pytest.approx(want["ess"], rel=1e-12)
    assert metrics["cap_fraction"] * count == pytest.approx(want["cap_fraction"] * count, abs=1e-9)
    assert close(metrics["score_loss"] * count, want["score_sum"])
    assert close(metrics["behavior_kl_proxy"] * count, want["kl_sum"])
    assert close(metrics["adaptive_kl_loss"] * count, (1 - want["ess"]) * want["kl_sum"])
    if case["peer"] is not None:
        assert metrics["clip_fraction"] == pytest.approx(case["peer"]["clip_fraction"], abs=1e-6)


def test_the_same_bits_again(case, place):
    first, first_grad = run(case, place)
    second, second_grad = run(case, place)
    assert torch.equal(first.loss, second.loss) and torch.equal(first_grad, second_grad)
    assert torch.equal(first.metrics.vector, second.metrics.vector)


def test_reference_is_right(case):
    log_probs, *rest = inputs(case, "cpu", torch.float64)
    context = frozen(case, "cpu")
    loss = reference.p3o_loss(log_probs, *rest, context=context, reduction="sum", kl_mode=case["kl_mode"]).loss
    loss.backward()
    want = torch.tensor(case["expect"]["grad"], dtype=torch.float64)
    # the golden values round l to float32 (6e-8 of l); the float64 reference does not
    torch.testing.assert_close(log_probs.grad, want, rtol=1e-6, atol=5e-7)
    assert loss.item() == pytest.approx(case["expect"]["loss_sum"], rel=2e-7)
