"""prime-rl's scaling end to end (driver of its compute_loss and trainer, commit 3586e667)."""

import sys
import types
from dataclasses import dataclass, field

import pytest
import torch
from problem import check_gradient, log_probs, responses, truth, weight

from p3o_train.adapters import prime_rl

CUTS = ((((0, 1, 2),), ((3, 4, 5),)), (((0,), (1, 2)), ((3, 4), (5,))))


@dataclass
class Inputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    ref_logprobs: torch.Tensor | None = None
    loss_weights: torch.Tensor | None = None


@dataclass
class Outputs:
    loss: torch.Tensor
    metrics: dict = field(default_factory=dict)


@pytest.fixture(autouse=True)
def framework(monkeypatch):
    module = types.ModuleType("prime_rl.trainer.rl.loss")
    module.LossOutputs = Outputs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    prime_rl.withdraw()


def inputs_of(sample, at):
    """Prompt positions too, masked: one sequence as it lies in a micro-batch."""
    response = log_probs(sample, at)
    prompt = sample.first_row + 1

    def whole(values, fill):
        return torch.cat([torch.full((prompt,), fill), values])

    return Inputs(
        whole(response, -2.0),
        whole(sample.behavior, 0.0),
        whole(torch.full_like(sample.behavior, sample.advantage), float("nan")),
        torch.cat([torch.zeros(prompt, dtype=torch.bool), sample.mask]),
    )


def step(samples, cut):
    """Sums of samples over the global count; gradients are summed over ranks."""
    at, count, metrics = weight(), sum(int(sample.mask.sum()) for sample in samples), []
    for part in [part for rank in cut for part in rank]:
        made = [prime_rl.p3o_loss_fn(inputs_of(samples[index], at)) for index in part]
        (sum(one.loss for one in made) / count).backward()
        metrics += [one.metrics for one in made]
    return at.grad, metrics


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("empty", [None, 4])
def test_gradients_are_those_of_the_whole_batch(cut, empty):
    expected = truth(responses(empty))
    prime_rl.publish(expected.contexts[0])
    gradient, metrics = step(responses(empty), cut)
    check_gradient(gradient, expected)
    assert metrics[0]["p3o/normalized_ess"].item() == pytest.approx(expected.contexts[0].ess.item(), rel=1e-6)
    assert all(value.dim() == 0 for value in metrics[0].values())


def test_a_call_has_no_e_of_its_own():
    with pytest.raises(RuntimeError, match=r"p3o_train.adapters.prime_rl.publish\(context\)"):
        step(responses(), CUTS[0])
    prime_rl.publish(truth(responses()).contexts[0])
    prime_rl.withdraw()
    with pytest.raises(RuntimeError, match="none was published"):
        step(responses(), CUTS[0])


def test_weights_of_tokens_are_refused_where_they_count():
    prime_rl.publish(truth(responses()).contexts[0])
    inputs = inputs_of(responses()[0], weight())
    inputs.loss_weights = inputs.loss_mask.float()
    prime_rl.p3o_loss_fn(inputs)
    inputs.loss_weights = 0.5 * inputs.loss_mask
    with pytest.raises(ValueError, match="loss_weights must be 1"):
        prime_rl.p3o_loss_fn(inputs)
