"""Our kernels behind Megatron-Core's cross entropy: its values, its signatures, and everything put back afterwards."""

import inspect
import logging
import sys
import types

import pytest
import torch

from p3o_train import patch
from p3o_train.patch import apply_p3o_kernels_to_megatron, remove_p3o_kernels_from_megatron
from tests.distributed.ranks import on_all_ranks
from tests.megatron.entropies import OURS, everything, truth
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [
    pytest.mark.host_only,
    NEEDS_MEGATRON,
    pytest.mark.filterwarnings("ignore::Warning:megatron.*"),  # about what is not installed
]
# two float32 roundings of numbers below 32: of the shifted logit of the label, and of the loss
LOSS_BOUND = 2e-6
# probabilities, times a gradient of at most 2.1, each with some four roundings of 6e-8
GRADIENT_BOUND = 5e-7


@pytest.fixture(scope="module", params=[1, 2], ids="tp{}".format)
def outcomes(request):
    return on_all_ranks(everything, request.param, request.param)


@pytest.mark.parametrize("name", ["their function", "our function", "our fused function"])
def test_the_function_gives_loss_and_gradient(outcomes, name):
    right = truth()
    gradient = torch.cat([outcome[name].gradients["logits"] for outcome in outcomes], -1)
    assert gradient.dtype == torch.float32
    assert (gradient - right.gradients["logits"]).abs().max() <= GRADIENT_BOUND
    for outcome in outcomes:
        assert outcome[name].loss.dtype == torch.float32
        assert (outcome[name].loss - right.loss).abs().max() <= LOSS_BOUND


@pytest.mark.parametrize("name", ["our model", "our fused model"])
def test_the_model_trains_as_with_megatrons_own(outcomes, name):
    for outcome in outcomes:
        theirs, ours = outcome["their model"], outcome[name]
        assert (theirs.calls, ours.calls) == (0, 1)
        # losses near log(64) = 4.2 from either order of the same operations: one rounding is 2.4e-7
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=0, atol=1e-6)
        assert ours.gradients.keys() == theirs.gradients.keys()
        for parameter, gradient in theirs.gradients.items():
            # sums of the same float32 products, each with other last bits in its softmax
            assert (ours.gradients[parameter] - gradient).norm() <= 1e-6 * gradient.norm(), parameter


class Alone:
    """A group of one rank."""

    def size(self):
        return 1


@pytest.fixture
def theirs():
    """Megatron's modules, as they are again afterwards."""
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.models.common.language_module import language_module
    from megatron.core.tensor_parallel import cross_entropy

    yield types.SimpleNamespace(
        cross_entropy=cross_entropy, package=tensor_parallel, fused=fused_cross_entropy, model=language_module
    )
    remove_p3o_kernels_from_megatron()


def bindings(theirs):
    return (
        theirs.cross_entropy.vocab_parallel_cross_entropy,
        theirs.package.vocab_parallel_cross_entropy,
        theirs.fused.fused_vocab_parallel_cross_entropy,
        theirs.model.fused_vocab_parallel_cross_entropy,
    )


def same(first, second):
    return all(one is other for one, other in zip(first, second, strict=True))


def test_every_name_is_replaced_and_put_back(theirs):
    before = bindings(theirs)
    for _ in range(2):  # and again
        apply_p3o_kernels_to_megatron()
        once = bindings(theirs)
        assert all(function in OURS for function in once)
        apply_p3o_kernels_to_megatron()
        assert same(bindings(theirs), once)
        remove_p3o_kernels_from_megatron()
        assert same(bindings(theirs), before)
        remove_p3o_kernels_from_megatron()
        assert same(bindings(theirs), before)
        assert (patch._cross_entropy, patch._cross_entropy_in_group, patch._fused) == OURS


def test_signatures_are_those_of_this_release(theirs):
    before = [inspect.signature(function).parameters.values() for function in bindings(theirs)]
    apply_p3o_kernels_to_megatron()
    for function, parameters in zip(bindings(theirs), before, strict=True):
        ours = inspect.signature(function, follow_wrapped=False).parameters.values()
        assert [(part.name, part.kind, part.default) for part in ours] == [
            (part.name, part.kind, part.default) for part in parameters
        ]


def test_other_importers_under_any_name(theirs, monkeypatch):
    early, late = types.ModuleType("early"), types.ModuleType("late")
    original = theirs.cross_entropy.vocab_parallel_cross_entropy
    early.renamed = original
    monkeypatch.setitem(sys.modules, "early", early)
    monkeypatch.setitem(sys.modules, "absent", None)
    apply_p3o_kernels_to_megatron()
    assert early.renamed is theirs.cross_entropy.vocab_parallel_cross_entropy is not original
    late.renamed = theirs.package.vocab_parallel_cross_entropy
    monkeypatch.setitem(sys.modules, "late", late)
    remove_p3o_kernels_from_megatron()
    assert early.renamed is late.renamed is original


def test_every_replacement_is_logged(theirs, caplog):
    with caplog.at_level(logging.INFO, "p3o_train.patch"):
        apply_p3o_kernels_to_megatron()
    for name in (
        "megatron.core.tensor_parallel.cross_entropy.vocab_parallel_cross_entropy",
        "megatron.core.tensor_parallel.vocab_parallel_cross_entropy",
        "megatron.core.fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy",
        "megatron.core.models.common.language_module.language_module.fused_vocab_parallel_cross_entropy",
    ):
        assert sum(record.getMessage().startswith(f"{name} is now p3o_train.patch.") for record in caplog.records) == 1


def test_label_smoothing_is_refused(theirs):
    apply_p3o_kernels_to_megatron()
    with pytest.raises(ValueError, match=r"label_smoothing must be 0 .* got 0\.1; .*remove_p3o_kernels_from_megatron"):
        theirs.package.vocab_parallel_cross_entropy(torch.zeros(2, 1, 4), torch.zeros(2, 1).long(), label_smoothing=0.1)


def with_another_argument(vocab_parallel_logits, target, tp_group, z_loss=0.0): ...


def with_another_default(vocab_parallel_logits, target, label_smoothing=0.1): ...


@pytest.mark.parametrize(
    ("module", "name", "function"),
    [
        ("fused", "fused_vocab_parallel_cross_entropy", with_another_argument),
        ("cross_entropy", "vocab_parallel_cross_entropy", with_another_default),
    ],
)
def test_an_unknown_signature_leaves_everything(theirs, monkeypatch, module, name, function):
    monkeypatch.setattr(getattr(theirs, module), name, function)
    before = bindings(theirs)
    with pytest.raises(RuntimeError, match=f"{function.__name__} has the signature .*megatron-core<0.20"):
        apply_p3o_kernels_to_megatron()
    assert same(bindings(theirs), before)


def test_releases_that_pass_the_group(theirs, monkeypatch):
    def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None): ...

    monkeypatch.setattr(theirs.cross_entropy, "vocab_parallel_cross_entropy", vocab_parallel_cross_entropy)
    apply_p3o_kernels_to_megatron()
    # no parallel state here: the group that is passed is the one that is used
    loss = theirs.cross_entropy.vocab_parallel_cross_entropy(
        torch.zeros(2, 1, 4), torch.zeros(2, 1).long(), tp_group=Alone()
    )
    torch.testing.assert_close(loss, torch.full((2, 1), 4.0).log())
    remove_p3o_kernels_from_megatron()
    assert theirs.cross_entropy.vocab_parallel_cross_entropy is vocab_parallel_cross_entropy


def test_ignored_labels_add_nothing_and_impossible_ones_show(theirs):
    apply_p3o_kernels_to_megatron()
    logits = torch.zeros(3, 1, 4).requires_grad_()
    loss = theirs.fused.fused_vocab_parallel_cross_entropy(logits, torch.tensor([[-100], [1], [4]]), Alone())
    assert loss[0] == 0
    assert loss[2] == torch.inf
    loss[:2].sum().backward()
    assert (logits.grad[0] == 0).all()
    torch.testing.assert_close(logits.grad[1, 0], torch.tensor([0.25, -0.75, 0.25, 0.25]))


def test_shapes_that_do_not_fit(theirs):
    apply_p3o_kernels_to_megatron()
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(3, 2, 4\)"):
        theirs.fused.fused_vocab_parallel_cross_entropy(torch.zeros(3, 2, 4), torch.zeros(2, 3).long(), Alone())
