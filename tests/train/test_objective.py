"""The loss of a micro-batch: a token sum that does not depend on how a step is cut."""

import pytest
import torch

from p3o_kernels import ratio_stats, reference
from p3o_train.forward import packed_rows
from p3o_train.objective import Objective, micro_batch_log_probs, micro_batch_loss
from p3o_train.packing import dummy_batch, pack
from p3o_train.parallel import ParallelGroups
from p3o_train.step import StepStatistics
from p3o_train.types import Sample

V, ALONE = 11, ParallelGroups()
STEP = Objective(ess_scope="step", temperature=0.8)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def samples():
    made = []
    for place, (length, response) in enumerate(((7, 4), (5, 2), (9, 8), (6, 1))):
        tokens = torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(place))
        mask = [token != 1 for token in range(response)]
        made.append(
            Sample.from_lists(tokens, response, -2.0 - normal(response, seed=place).abs(), mask, sample_id=str(place))
        )
    return made


ADVANTAGES = [1.0, -0.5, 0.25, 2.0]


def run(cut, objective, context=None):
    """Loss sum, count and gradient of each sample's logits, with the step cut into these micro-batches."""
    total, count, grads = 0.0, 0, {}
    for indices in cut:
        chosen = [samples()[index] for index in indices]
        batch = pack(chosen, [ADVANTAGES[index] for index in indices])
        logits = torch.cat([normal(sample.token_ids.numel(), V, seed=int(sample.sample_id)) for sample in chosen])
        logits.requires_grad_()
        output = micro_batch_loss(logits, batch, objective, ALONE, context)
        output.loss.backward()
        total += output.loss.item()
        tokens = int(output.metrics.means()["valid_tokens"])
        assert tokens == batch.num_tokens
        count += tokens
        offsets = batch.cu_seqlens.tolist()
        for place, index in enumerate(indices):
            grads[index] = logits.grad[offsets[place] : offsets[place + 1]]
    return total, count, grads


def statistics_of(logits, batch):
    return ratio_stats(micro_batch_log_probs(logits, batch, STEP, ALONE), batch.behavior_log_probs, batch.mask)


def frozen(cut):
    statistics = StepStatistics()
    for indices in cut:
        chosen = [samples()[index] for index in indices]
        batch = pack(chosen, [0.0] * len(chosen))
        logits = torch.cat([normal(sample.token_ids.numel(), V, seed=int(sample.sample_id)) for sample in chosen])
        statistics.add(statistics_of(logits, batch))
    return statistics.freeze(ALONE, "cpu")


WHOLE = [[0, 1, 2, 3]]


@pytest.mark.parametrize("cut", [[[0], [1], [2], [3]], [[2, 0], [3, 1]], [[3, 2, 1], [0]]], ids=str)
def test_step_scope_depends_on_how_the_step_is_cut(cut):
    context, other = frozen(WHOLE), frozen(cut)
    torch.testing.assert_close(other.ess, context.ess, rtol=1e-12, atol=0)
    total, count, grads = run(WHOLE, STEP, context)
    cut_total, cut_count, cut_grads = run(cut, STEP, other)
    assert count == cut_count == 4 + 2 + 8 + 1 - 3  # response token 1 of three samples is masked
    assert cut_total == pytest.approx(total, rel=1e-6)
    for index, grad in grads.items():
        torch.testing.assert_close(cut_grads[index], grad, rtol=1e-6, atol=1e-7)


def test_the_whole_step_is_the_reference_loss():
    chosen = samples()
    batch = pack(chosen, ADVANTAGES)
    logits = torch.cat([normal(sample.token_ids.numel(), V, seed=int(sample.sample_id)) for sample in chosen])
    want = reference.p3o_loss_from_logits(
        logits.double(),
        batch.labels,
        batch.behavior_log_probs.double(),
        batch.advantages.double(),
        batch.mask,
        cu_seqlens=batch.local_cu_seqlens,
        reduction="sum",
        temperature=0.8,
    )
    total, count, _ = run(WHOLE, Objective(temperature=0.8))
    assert total == pytest.approx(want.loss.item(), rel=1e-5) and count == int(want.num_tokens)
    assert frozen(WHOLE).ess.item() == pytest.approx(want.context.ess.item(), rel=1e-6)


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
def test_a_dummy_adds_exact_zeros_and_stays_connected(scope):
    batch = dummy_batch()
    logits = torch.full((1, V), float("nan"), requires_grad=True)
    output = micro_batch_loss(
        logits, batch, Objective(ess_scope=scope), ALONE, frozen(WHOLE) if scope == "step" else None
    )
    output.loss.backward()
    assert (
        output.loss == 0 and output.metrics.means()["valid_tokens"] == 0 and torch.equal(logits.grad, torch.zeros(1, V))
    )
    assert statistics_of(logits.detach(), batch).as_vector().tolist() == [0.0] * 4


def test_step_scope_without_its_pre_pass():
    with pytest.raises(RuntimeError, match="the pre-pass must run before the training pass"):
        run(WHOLE, STEP)


def test_micro_batch_scope_with_a_context():
    with pytest.raises(ValueError, match="but a context was given"):
        run(WHOLE, Objective(), frozen(WHOLE))


@pytest.mark.parametrize("name", ["ess_scope", "advantage_estimator", "context_source"])
def test_unknown_choice(name):
    with pytest.raises(ValueError, match=f"{name} must be one of .*; got 'batch'"):
        Objective(**{name: "batch"})


@pytest.mark.parametrize(
    "objective",
    [Objective(), STEP, *(Objective(advantage_estimator=name) for name in ("grpo", "cispo", "pg"))],
    ids=str,
)
def test_hidden_states_give_another_loss_than_logits(objective):
    """The output layer inside the loss: same sum, same gradients of hidden states and weight."""
    batch = pack(samples(), ADVANTAGES)
    context = frozen(WHOLE) if objective.needs_context else None
    hidden = normal(batch.tokens.numel(), 6, seed=1).requires_grad_()
    weight = normal(V, 6, seed=2).requires_grad_()
    outside = micro_batch_loss(hidden @ weight.T, batch, objective, ALONE, context)
    inside = micro_batch_loss(hidden, batch, objective, ALONE, context, weight)
    for one, other in zip(
        *(torch.autograd.grad(made.loss, (hidden, weight)) for made in (outside, inside)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # float32 products of 6 and 27 terms
    assert inside.loss.item() == pytest.approx(outside.loss.item(), rel=1e-6)


def test_logits_of_either_layout():
    batch = pack(samples(), ADVANTAGES)
    tokens = batch.tokens.numel()
    logits = normal(tokens, V, seed=0)
    for output in (logits[None], logits[:, None], logits):
        assert torch.equal(packed_rows(output, batch), logits)
    with pytest.raises(ValueError, match=rf"with T = {tokens} tokens of the micro-batch, got \(1, {tokens + 1}, {V}\)"):
        packed_rows(normal(1, tokens + 1, V, seed=0), batch)
