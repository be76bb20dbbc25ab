"""Log-probs that are made once and used again, and hidden states instead of logits, on the real model."""

import dataclasses
from unittest import mock

import pytest
import torch

from p3o_train import passes
from p3o_train.device_shim import megatron_on_cpu
from p3o_train.forward import build_rl_forward_kwargs, bypassed_output_layers, output_weight, packed_rows
from p3o_train.objective import Objective
from p3o_train.packing import unpack_responses
from p3o_train.passes import policy_log_probs
from p3o_train.types import ContextLayout
from tests.distributed.ranks import on_all_ranks
from tests.megatron import dense
from tests.megatron.product import build_product
from tests.megatron.steps import Cut, batches, samples
from tests.megatron.topologies import CONFIG, NEEDS_MEGATRON, Topology, groups

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
THREE, THREE_MICRO_BATCHES = Cut(micro_batch_size=2), 3
PREPASS = Objective(ess_scope="step")
REUSE = dataclasses.replace(PREPASS, context_source="reuse")
REFERENCE = Objective(ref_kl_coef=0.1)


def flipped(batch):
    return dataclasses.replace(batch, tokens=batch.tokens.flip(0))


def refusal(product, made, objective, **more):
    try:
        product.gradients(made, objective, **more)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refusals(product, made):
    def of(some, version=0):
        return policy_log_probs([product.model], some, REUSE, product.groups, version)

    other = [made[0], flipped(made[1]), made[2]]
    references = list(of(made).values)
    found = {
        "missing": refusal(product, made, REUSE),
        "version": refusal(product, made, REUSE, log_probs=of(made, 3), weight_version=4),
        "tokens": refusal(product, made, REUSE, log_probs=of(other)),
        "fewer": refusal(product, made, REUSE, log_probs=of(made[:2])),
        "reference": refusal(product, made, REFERENCE),
        "references": refusal(product, made, REFERENCE, ref_log_probs=references[:2]),
        "good reference": refusal(product, made, REFERENCE, ref_log_probs=references),
        "none": refusal(product, [], PREPASS),
    }
    product.model.config.calculate_per_token_loss = False
    found["per token"] = refusal(product, made, PREPASS)
    product.model.config.calculate_per_token_loss = True
    return found


def reused(product, made):
    """e and metrics by a pre-pass and by log-probs made before, and these, put back to responses."""
    before = policy_log_probs([product.model], made, REUSE, product.groups, weight_version=5)
    steps = product.gradients(made, PREPASS), product.gradients(made, REUSE, log_probs=before, weight_version=5)
    values = zip(before.values, made, strict=True)
    responses = [response for shard, batch in values for response in unpack_responses([shard], batch)]
    return [(step.context.ess.item(), step.metrics.to_dict("")) for step in steps], before.values, responses


def draws_left(product, made):
    """Whether a step has drawn from torch's stream what its training pass draws, and no more."""
    handle = product.model.module.register_forward_pre_hook(lambda *_: torch.rand(1) and None)
    torch.manual_seed(2)
    product.gradients(made, PREPASS)
    handle.remove()
    after = torch.rand(1)
    torch.manual_seed(2)
    return torch.equal(after, torch.rand(len(made) + 1)[-1:])


def hidden_states(product, batch):
    """Logits, and hidden states times the weight; whether the model gives logits again; and whose weight it is."""
    module, arguments = product.model.module, build_rl_forward_kwargs(batch)
    with torch.no_grad():
        logits = packed_rows(module(**arguments), batch)
        with bypassed_output_layers([product.model]):
            hidden = packed_rows(module(**arguments), batch)
        again = packed_rows(module(**arguments), batch)
    weight = output_weight(product.model)
    names = {id(value): name for name, value in module.named_parameters()}
    return logits, hidden @ weight.detach().T, torch.equal(logits, again), names[id(weight)]


def widths(product, made, objective):
    """(width of the rows, whether a weight came along) of every call in a step, pre-pass included."""
    seen = []

    def noting(function):
        def call(rows, *arguments, **options):
            seen.append((rows.shape[1], any(value is weight for value in arguments)))
            return function(rows, *arguments, **options)

        return call

    weight = output_weight(product.model)
    with (
        mock.patch.object(passes, "micro_batch_log_probs", noting(passes.micro_batch_log_probs)),
        mock.patch.object(passes, "micro_batch_loss", noting(passes.micro_batch_loss)),
    ):
        product.gradients(made, objective)
    return seen


def on_one_rank(rank):
    with megatron_on_cpu(), groups(Topology()):
        product, tied = (build_product(dataclasses.replace(CONFIG, tie_embeddings=tied)) for tied in (False, True))
        made = batches(THREE, 0, ContextLayout())
        found = {"refusals": refusals(product, made), "reused": reused(product, made)}
        found["draws"] = draws_left(product, made)
        hidden = dataclasses.replace(PREPASS, from_hidden=True)
        found["widths"] = widths(product, made, PREPASS), widths(product, made, hidden)
        return found | {"untied": hidden_states(product, made[0]), "tied": hidden_states(tied, made[0])}


@pytest.fixture(scope="module")
def found():
    (alone,) = on_all_ranks(on_one_rank, 1)
    return alone


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("missing", "ValueError", "needs log_probs, the result of policy_log_probs for these micro-batches; got None"),
        ("version", "ValueError", "log_probs were made by weights of version 3, but these are version 4"),
        ("tokens", "RuntimeError", "micro-batch 1 of the training pass holds other tokens"),
        ("fewer", "ValueError", "log_probs are of 2 micro-batches, but the step has 3"),
        ("reference", "ValueError", "one [T] for each of 3 micro-batches; got None"),
        ("references", "ValueError", "one [T] for each of 3 micro-batches; got 2"),
        ("none", "ValueError", "batches is empty"),
        ("per token", "RuntimeError", "calculate_per_token_loss must be True"),
    ],
)
def test_arguments_that_do_not_fit_are_used(found, case, kind, text):
    made = found["refusals"][case]
    assert made is not None and made[0] == kind and text in made[1]


def test_arguments_that_fit_are_refused(found):
    assert found["refusals"]["good reference"] is None


def test_reuse_is_another_step_than_a_pre_pass(found):
    (ess, metrics), (reused_ess, reused_metrics) = found["reused"][0]
    assert 0.1 < ess < 0.99 and (ess, metrics) == (reused_ess, reused_metrics)


def test_pre_pass_takes_from_random_streams_or_training_does_not(found):
    assert found["draws"]


def test_log_probs_are_those_of_the_dense_model(found):
    _, values, responses = found["reused"]
    weights = dense.weights(CONFIG)
    for sample, response in zip(samples(), responses, strict=True):
        rows = dense.logits(sample.token_ids, weights, CONFIG).log_softmax(-1)[:-1]
        want = rows.gather(1, sample.token_ids[1:, None])[:, 0][len(rows) - sample.response_length :]
        want = torch.where(sample.valid_mask, want, 0.0).detach()
        # float32 activations and a log-sum-exp of 64 words
        torch.testing.assert_close(response.double(), want, rtol=1e-6, atol=2e-6)
    assert {value.dtype for value in values} == {torch.float32} and not any(value.requires_grad for value in values)


def test_both_passes_get_hidden_states_where_asked_for(found):
    calls = 2 * THREE_MICRO_BATCHES
    from_logits, from_hidden = found["widths"]
    assert from_logits == [(CONFIG.vocab_size, False)] * calls
    assert from_hidden == [(CONFIG.hidden_size, True)] * calls


@pytest.mark.parametrize("which", ["untied", "tied"])
def test_bypass_gives_other_hidden_states_than_the_logits_are_made_of(found, which):
    logits, product, restored, name = found[which]
    # one float32 product of 32 terms, possibly in another order
    torch.testing.assert_close(product, logits, rtol=1e-6, atol=1e-6)
    assert restored
    assert name == {"untied": "output_layer.weight", "tied": "embedding.word_embeddings.weight"}[which]
