"""slime's scaling end to end, over Gloo, against the whole batch in one process."""

import sys

import pytest
import torch
from problem import check_gradient, responses, truth
from slime_driver import CUTS, TEMPERATURE, arguments, batch_of, install, refusals, slime_ranks

from p3o_train.adapters import slime
from tests.distributed.ranks import on_all_ranks
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
EMPTY = 4
RUNS = (
    *((scope, cut, None) for scope in ("step", "micro-batch") for cut in range(len(CUTS))),
    ("step", 1, EMPTY),
    ("micro-batch", 2, EMPTY),
)


@pytest.mark.parametrize("cp", [1, 2])
def test_gradients_are_those_of_the_whole_batch(cp):
    ranks = on_all_ranks(slime_ranks, 2 * cp, cp, RUNS)
    for index, (scope, cut, empty) in enumerate(RUNS):
        first, second = CUTS[cut]
        parts = None if scope == "step" else [a + b for a, b in zip(first, second, strict=True)]
        expected = truth(responses(empty, TEMPERATURE), parts, TEMPERATURE)
        for rank in ranks:
            check_gradient(rank[index]["gradient"], expected)
            metrics = rank[index]["metrics"]
            assert metrics["loss"] == pytest.approx(expected.loss, rel=3e-6)
            assert metrics["p3o/total_loss"] == pytest.approx(expected.loss, rel=3e-6)
            assert metrics["pg_loss"] == metrics["p3o/score_loss"]
            weighted = sum(float(one.ess * one.num_tokens) for one in expected.contexts) / expected.num_tokens
            assert metrics["p3o/normalized_ess"] == pytest.approx(weighted, rel=3e-6)


def test_every_stage_is_told_the_same():
    first, second = on_all_ranks(refusals, 2)
    expected = [
        "invalid",
        "leave --use-rollout-logprobs out",
        "no valid response tokens globally",
        "no valid response tokens globally",
        "feeds 2 optimizer steps",
        "the loss mask of sample 0",
        "leave the hook out and set p3o_ess_scope: micro-batch",
        "published",
    ]
    for stage in (first, second):
        for said, part in zip(stage, expected, strict=True):
            assert part in said, said


@pytest.fixture
def alone(monkeypatch):
    """slime's modules and nothing published."""
    before = dict(sys.modules)
    install()
    slime._step.withdraw()
    yield
    slime._step.withdraw()
    for name in set(sys.modules) - set(before):
        if name.startswith(("slime.", "relax.")):
            del sys.modules[name]


def call(args, batch=None):
    batch = batch_of(responses(), 1, 0) if batch is None else batch
    return slime.p3o_loss_function(args, batch, torch.zeros(1, 1, 1), None)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"calculate_per_token_loss": False}, "set --calculate-per-token-loss"),
        ({"recompute_loss_function": True}, "leave --recompute-loss-function out"),
        ({"use_tis": True}, "leave --use-tis out"),
        ({"rollout_top_k": 20}, "--rollout-top-k 20"),
        ({"kl_loss_coef": 0.1}, "--kl-loss-coef"),
        ({"p3o_kl_mode": "exact"}, "--p3o-kl-mode"),
        ({"p3o_ess_scope": "rollout"}, "--p3o-ess-scope"),
        ({"p3o_ess_scope": "step", "keep_old_actor": True}, "--keep-old-actor"),
        ({"p3o_ess_scope": "step", "attention_dropout": 0.1}, "--attention-dropout"),
    ],
)
def test_arguments_that_change_the_objective_are_refused(alone, changed, text):
    with pytest.raises(ValueError, match=text):
        call(arguments("micro-batch", **changed))


def test_step_scope_without_the_hook_says_which_flag_is_missing(alone):
    with pytest.raises(RuntimeError, match=r"--rollout-data-postprocess-path p3o_train\.adapters\.slime\.collect_step"):
        call(arguments("step"))


def test_an_empty_sample_without_the_hook_is_refused(alone):
    with pytest.raises(ValueError, match=r"sample 4 of this micro-batch is empty \(1 of 6 are\)"):
        call(arguments("micro-batch"), batch_of(responses(EMPTY), 1, 0))
