"""verl's scaling end to end (driver of its FSDP engine, commit 1dda039b): token count, dp_size, mean of gradients."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from problem import check_gradient, padded, responses, truth, weight

from p3o_train.adapters import verl
from p3o_train.adapters._common import LossSettings
from tests.distributed.ranks import on_all_ranks

# samples of each micro-batch of each of two data-parallel ranks; the engine gives both the same number
CUTS = ((((0, 1, 2),), ((3, 4, 5),)), (((0,), (1, 2)), ((3, 4), (5,))))


def update(loss_function, replica, cut, samples, dp_size):
    """One optimizer step of one rank, before gradients are averaged; what the loss function returned comes along."""
    at, count = weight(), sum(int(sample.mask.sum()) for sample in samples)
    config = SimpleNamespace(global_batch_info={"dp_size": dp_size, "batch_num_tokens": count})
    losses, metrics = [], []
    for part in cut[replica]:
        batch = padded([samples[index] for index in part], at)
        loss, logged = loss_function(
            old_log_prob=batch["behavior"],
            log_prob=batch["log_probs"],
            advantages=batch["advantages"],
            response_mask=batch["mask"],
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=None,
        )
        loss.backward()
        losses.append(loss.item())
        metrics.append(logged)
    return at.grad, losses, metrics


def data_parallel_rank(rank):
    loss = verl.policy_loss(LossSettings(), lambda: dist.group.WORLD)
    made = []
    for cut in CUTS:
        gradient, losses, metrics = update(loss, rank, cut, responses(), 2)
        dist.all_reduce(gradient)
        made.append((gradient / 2, losses, metrics))
    return made


@pytest.mark.host_only
def test_micro_batch_scope_over_data_parallel_ranks():
    ranks = on_all_ranks(data_parallel_rank, 2)
    for index, (first, second) in enumerate(CUTS):
        expected = truth(responses(), [a + b for a, b in zip(first, second, strict=True)])
        losses = [loss for rank in ranks for loss in rank[index][1]]
        assert sum(losses) / 2 == pytest.approx(expected.loss, rel=3e-6)
        for rank in ranks:
            check_gradient(rank[index][0], expected)
            for logged, context in zip(rank[index][2], expected.contexts, strict=True):
                assert logged["actor/p3o/normalized_ess"] == pytest.approx(context.ess.item(), rel=1e-6)
                assert logged["actor/pg_clipfrac"] == logged["actor/p3o/clip_fraction"]


@pytest.mark.parametrize("cut", CUTS)
def test_a_published_context_makes_every_cut_the_same(cut):
    expected = truth(responses())
    verl.publish(expected.contexts[0])
    try:
        loss = verl.policy_loss(LossSettings(), None)
        gradients = [update(loss, replica, cut, responses(), 2)[0] for replica in (0, 1)]
    finally:
        verl.withdraw()
    check_gradient(sum(gradients) / 2, expected)


def test_without_a_global_count_the_micro_batch_divides_by_its_own():
    samples, at = responses(), weight()
    batch = padded(samples, at)
    loss, _ = verl.policy_loss(LossSettings(), None)(
        batch["behavior"], batch["log_probs"], batch["advantages"], batch["mask"]
    )
    loss.backward()
    check_gradient(at.grad, truth(samples))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"rollout_is_weights": torch.ones(1, 2)}, "rollout_is=null"),
        ({"loss_agg_mode": "seq-mean-token-mean"}, "loss_agg_mode=token-mean"),
        ({"advantages": torch.ones(1, 1)}, r"advantages \(1, 1\)"),
        ({"config": SimpleNamespace(global_batch_info={"dp_size": 2, "batch_num_tokens": 4})}, "process_group"),
        ({"config": SimpleNamespace(global_batch_info={"dp_size": 2})}, "no batch_num_tokens"),
    ],
)
def test_refusals(changed, text):
    named = dict.fromkeys(("old_log_prob", "log_prob", "advantages"), torch.zeros(1, 2))
    named |= {"response_mask": torch.ones(1, 2), **changed}
    with pytest.raises(ValueError, match=text):
        verl.policy_loss(LossSettings(), None)(**named)


def test_the_behavior_policy_becomes_the_old_one():
    rollout, mask = torch.rand(2, 3), torch.ones(2, 3)
    batch = {"rollout_log_probs": rollout, "old_log_probs": torch.zeros(2, 3), "response_mask": mask}
    data = SimpleNamespace(batch=batch)
    verl.use_rollout_log_probs(data)
    assert data.batch["old_log_probs"] is rollout
    for wrong, text in (
        ({"response_mask": mask}, "calculate_log_probs=True"),
        (batch | {"rollout_is_weights": mask}, "double-corrects"),
        (batch | {"response_mask": mask[:1]}, r"response_mask \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=text):
            verl.use_rollout_log_probs(wrong)


@pytest.fixture
def algorithms():
    """The real registry and aggregation."""
    try:
        return importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError as error:
        pytest.skip(f"verl cannot be imported here: {error}")


def test_the_real_registry_and_aggregation(algorithms):
    loss = verl.register("p3o_under_test", kl_mode="proxy")
    assert algorithms.get_policy_loss_fn("p3o_under_test") is loss
    algorithms.POLICY_LOSS_REGISTRY.pop("p3o_under_test")
    samples = responses()
    batch = padded(samples, weight().detach(), fill=0.0)
    shared = {"dp_size": 1, "batch_num_tokens": 90, "global_batch_size": 6, "loss_scale_factor": None}
    arguments = (batch["behavior"], batch["log_probs"], batch["advantages"], batch["mask"], "token-mean")
    made, _ = loss(*arguments, SimpleNamespace(global_batch_info=shared))
    expected = truth(samples)
    # verl's own scaling of a matrix that has the mean loss everywhere
    constant = torch.full(batch["mask"].shape, expected.loss)
    theirs = algorithms.agg_loss(constant, batch["mask"].float(), "token-mean", **shared)
    assert made.item() == pytest.approx(theirs.item(), rel=3e-6)
