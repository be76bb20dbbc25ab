"""NeMo-RL's scaling end to end (driver of its packing wrapper and workers, commit da53530f)."""

import enum
import sys
import types

import pytest
import torch
from problem import VOCABULARY, Response, check_gradient, log_probs, responses, truth, weight

from p3o_train.adapters import nemo_rl

# samples of each micro-batch of each of two data-parallel ranks
CUTS = ((((0, 1, 2),), ((3, 4, 5),)), (((0,), (1, 2)), ((3,), (4,), (5,))))


@pytest.fixture(autouse=True)
def interfaces(monkeypatch):
    module = types.ModuleType("nemo_rl.algorithms.loss.interfaces")
    module.LossType = enum.Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")
    module.LossInputType = enum.Enum("LossInputType", "LOGIT LOGPROB")
    module.MetricNormalizer = enum.Enum("MetricNormalizer", "TOKENS SEQUENCES NONE")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def whole_batch(samples: list[Response], at: torch.Tensor) -> dict[str, torch.Tensor]:
    """[B, S] as grpo_train has it, prompts included; samples that are dropped have sample_mask 0."""
    width = max(len(sample.tokens) for sample in samples)

    def rows(values_of, fill):
        made = torch.full((len(samples), width), fill)
        for row, sample in zip(made, samples, strict=True):
            row[sample.first_row + 1 : len(sample.tokens)] = values_of(sample)
        return made

    return {
        "prev_logprobs": rows(lambda sample: log_probs(sample, at.detach()), 0.0),
        "generation_logprobs": rows(lambda sample: sample.behavior, float("nan")),
        "advantages": rows(lambda sample: torch.full_like(sample.behavior, sample.advantage), float("nan")),
        # tokens of a dropped sample stay in the token mask
        "token_mask": rows(lambda sample: sample.mask.float() if sample.mask.any() else 1.0, 0.0),
        "sample_mask": torch.tensor([float(sample.mask.any()) for sample in samples]),
    }


def next_token_logprobs(samples: list[Response], at: torch.Tensor) -> torch.Tensor:
    width = max(len(sample.tokens) for sample in samples) - 1
    every = []
    for sample in samples:
        prompt = torch.full((sample.first_row,), -float(VOCABULARY))
        row = torch.cat([prompt, log_probs(sample, at)])
        every.append(torch.nn.functional.pad(row, (0, width - len(row))))
    return torch.stack(every)


def step(samples, cut, packed):
    """Two ranks one after the other: losses times ranks, gradients averaged over them, metrics summed."""
    at = weight()
    data, loss_function = whole_batch(samples, at), nemo_rl.P3OLossFn()
    nemo_rl.add_step_context(data, train_global_batch_size=len(samples))
    count = (data["token_mask"] * data["sample_mask"][:, None]).sum()
    totals = dict.fromkeys(loss_function.metric_normalizations, 0.0)
    for part in [part for rank in cut for part in rank]:
        # with packing the wrapper calls once for each sequence, cut to its length
        for calls in [[index] for index in part] if packed else [list(part)]:
            chosen = [samples[index] for index in calls]
            width = max(len(sample.tokens) for sample in chosen)
            slices = {name: value[calls] for name, value in data.items()}
            slices = {
                name: value[:, :width] if value.dim() > 1 and name != nemo_rl.KEY else value
                for name, value in slices.items()
            }
            loss, metrics = loss_function(
                slices, torch.tensor(6), count, next_token_logprobs=next_token_logprobs(chosen, at)
            )
            (loss * len(cut)).backward()
            totals = {name: totals[name] + metrics[name] for name in totals}
    return at.grad / len(cut), totals


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("empty", [None, 4])
def test_gradients_are_those_of_the_whole_batch(cut, packed, empty):
    expected = truth(responses(empty))
    gradient, metrics = step(responses(empty), cut, packed)
    check_gradient(gradient, expected)
    assert metrics["loss"] == pytest.approx(expected.loss, rel=3e-6)
    assert metrics["p3o/total_loss"] == pytest.approx(expected.loss, rel=3e-6)
    assert metrics["p3o/normalized_ess"] == pytest.approx(expected.contexts[0].ess.item(), rel=1e-6)
    assert metrics["num_valid_samples"] == (6 if empty is None else 5)


def test_the_advertised_protocol(interfaces):
    loss_function = nemo_rl.P3OLossFn()
    assert loss_function.loss_type is interfaces.LossType.TOKEN_LEVEL
    assert loss_function.input_type is interfaces.LossInputType.LOGPROB
    assert loss_function.metric_normalizations["p3o/score_loss"] is interfaces.MetricNormalizer.TOKENS
    assert loss_function.metric_normalizations["num_valid_samples"] is interfaces.MetricNormalizer.NONE


def test_the_context_is_a_column_that_slices():
    data = whole_batch(responses(), weight())
    context = nemo_rl.add_step_context(data)
    assert data[nemo_rl.KEY].shape == (6, 5) and data[nemo_rl.KEY].dtype == torch.float64
    assert data[nemo_rl.KEY][3, 0] == context.ess


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (lambda data: data["prev_logprobs"].zero_(), {}, "prev_logprobs are all 0"),
        (lambda data: None, {"train_global_batch_size": 3}, "several optimizer steps"),
        (lambda data: data["generation_logprobs"].fill_(-900.0), {}, "invalid"),
        (lambda data: data.update(prev_logprobs=torch.zeros(6, 3)), {}, r"prev_logprobs \(6, 2\)"),
    ],
)
def test_refusals(change, options, text):
    data = whole_batch(responses(), weight())
    change(data)
    with pytest.raises(ValueError, match=text):
        nemo_rl.add_step_context(data, **options)
    assert nemo_rl.KEY not in data


def test_a_batch_without_tokens_or_context_is_refused():
    data = whole_batch(responses(), weight())
    with pytest.raises(ValueError, match="add_step_context"):
        nemo_rl.P3OLossFn()(data, torch.tensor(6), torch.tensor(1), next_token_logprobs=torch.zeros(6, 15))
    data["sample_mask"].zero_()
    with pytest.raises(RuntimeError, match="no valid response tokens"):
        nemo_rl.add_step_context(data)
