"""One micro-batch of slime, miles and Relax on one rank: optional terms, lists that do not fit, miles' own modules."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from problem import check_gradient, log_probs, responses, truth, weight
from slime_driver import arguments, batch_of

from p3o_train.adapters import slime
from p3o_train.adapters._slime_family import Outputs, checked_objective, micro_batch
from p3o_train.types import ContextLayout

MILES = ("miles.backends.training_utils.parallel", "miles.backends.training_utils.loss_hub.logit_processors")


def run(batch, entropy=None, **changed):
    args = arguments("micro-batch", rollout_temperature=1.0, **changed)
    rows = [log_probs(sample, weight().detach()) for sample in responses()]
    return micro_batch(args, batch, Outputs(rows, entropy, ContextLayout(), None), checked_objective(args), None)


def test_entropy_bonus_and_reference_term():
    samples = responses()
    count, plain = sum(int(sample.mask.sum()) for sample in samples), run(batch_of(samples, 1, 0))[0].item()
    entropy = [torch.ones_like(sample.behavior) for sample in samples]
    batch = batch_of(samples, 1, 0)
    batch["ref_log_probs"] = [log_probs(sample, weight().detach()) - 1.0 for sample in samples]
    changed = {"use_kl_loss": True, "kl_loss_coef": 2.0, "kl_loss_type": "k3", "entropy_coef": 0.5}
    loss, metrics = run(batch, entropy, **changed)
    # the entropy is 1 everywhere, and k3 of a log-ratio of 1 is 1 / e
    k3 = torch.tensor(-1.0).exp().item()
    assert loss.item() == pytest.approx(plain + count * (2 * k3 - 0.5), rel=1e-5)
    assert metrics["kl_loss"].item() == pytest.approx(count * k3, rel=1e-5)
    assert metrics["entropy_loss"].item() == count


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda batch: batch.pop("rollout_log_probs"), "rollout_log_probs is missing"),
        (lambda batch: batch["rollout_log_probs"].pop(), r"rollout_log_probs has \(29,\) tokens .* masks have 37"),
        (lambda batch: batch["advantages"].append(torch.zeros(2)), r"advantages has \(39,\) tokens"),
        (lambda batch: batch["loss_masks"].pop(), "lengths must match"),
        (lambda batch: batch["rollout_log_probs"][0].fill_(-900.0), "invalid"),
    ],
)
def test_data_that_does_not_fit_is_refused(change, text):
    batch = batch_of(responses(), 1, 0)
    change(batch)
    with pytest.raises(ValueError, match=text):
        run(batch)


@pytest.fixture
def miles(monkeypatch):
    """Its modules (commit 0ef0ab50), as far as the adapter asks for them; the parallel state can be changed."""
    alone = SimpleNamespace(size=1, rank=0, group=None)
    state = SimpleNamespace(cp=alone, intra_dp_cp=alone, indep_dp=alone, is_ulysses_cp=False)

    def get_log_probs_and_entropy(logits, *, args, unconcat_tokens, with_entropy, max_seq_lens, **lengths):
        assert not with_entropy and max_seq_lens is None and len(lengths) == 2
        return {"log_probs": [log_probs(sample, logits) for sample in responses()]}

    for name in MILES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[MILES[0]].get_parallel_state = lambda: state
    sys.modules[MILES[1]].get_log_probs_and_entropy = get_log_probs_and_entropy
    slime._step.withdraw()
    return state


def test_miles_on_one_rank(miles):
    """Its driver: the token sum, divided by the count of the step."""
    at, expected = weight(), truth(responses())
    loss, log = slime.p3o_loss_function(arguments("micro-batch"), batch_of(responses(), 1, 0), at, None)
    (loss / expected.num_tokens).backward()
    check_gradient(at.grad, expected)
    assert log["loss"].item() / expected.num_tokens == pytest.approx(expected.loss, rel=3e-6)


def test_layouts_of_miles_that_are_not_understood_are_refused(miles):
    for change, text in (
        ({"is_ulysses_cp": True}, "use ring context parallelism"),
        ({"is_ulysses_cp": False, "indep_dp": SimpleNamespace(size=2)}, "use one data-parallel group"),
    ):
        vars(miles).update(change)
        with pytest.raises(ValueError, match=text):
            slime.p3o_loss_function(arguments("micro-batch"), batch_of(responses(), 1, 0), weight(), None)
