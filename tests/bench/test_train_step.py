"""The step benchmark measures what it says: every candidate leaves gradients, and the table is relative to GRPO."""

import dataclasses
from unittest import mock

import pytest

from bench import interleave, train_step
from p3o_train.runtime import OptimizerSettings, Parallelism, build_trainee, megatron_run
from tests.distributed.ranks import on_all_ranks
from tests.megatron.topologies import CONFIG, NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]


def small_round(rank):
    """(times, largest gradient) of each candidate, over sequences of 3 + 5 tokens of a small model."""
    model = dataclasses.replace(CONFIG, vocab_size=32)
    with mock.patch.multiple(train_step, MODEL=model, PROMPT=3, RESPONSE=5), megatron_run(Parallelism()):
        trainee = build_trainee(model, OptimizerSettings(lr=1e-3, total_steps=1))
        steps = train_step.candidates(trainee, train_step.micro_batches())
        gradients = {}
        for name, step in steps.items():
            step()
            gradients[name] = max(value.main_grad.abs().max().item() for value in trainee.model[0].parameters())
            step.clear()
        return interleave.seconds(steps, 1, interleave.clock_for(1)), gradients


def test_candidates():
    ((times, gradients),) = on_all_ranks(small_round, 1)
    assert set(times) == {*train_step.CANDIDATES, train_step.LOG_PROB_PASS}
    assert all(len(values) == 1 and values[0] > 0 for values in times.values())
    assert gradients.pop(train_step.LOG_PROB_PASS) == 0 and min(gradients.values()) > 0


def test_report_is_relative_to_grpo():
    text = train_step.report({"grpo": 0.5, "p3o step, prepass": 0.75})
    assert text.splitlines()[1].split() == ["p3o", "step,", "prepass", "750.0", "ms", "1.50x", "of", "GRPO"]
