"""What autograd sees of the vocabulary operations: memory that is reused, second passes, frozen and shared weights."""

import pytest
import torch

from p3o_kernels import _linear, linear_log_probs, p3o_loss_from_hidden, p3o_loss_from_logits, token_log_probs
from tests.conftest import lane
from tests.kernels.rows import normal, row_case
from tests.kernels.test_vocabulary_loss import T, case, frozen, run


def arguments(place, context=False, **changes):
    """Positional arguments after logits, and options."""
    tensors = case(place.device) | changes
    options = {"backend": place.backend, "context": frozen(place.device) if context else None}
    return [tensors[name] for name in ("labels", "behavior_log_probs", "advantages", "mask")], options


@pytest.fixture(params=[False, True], ids=["micro-batch", "step"])
def context(request):
    return request.param


def test_gradient_in_place_lives_in_the_logits(place, context):
    source = case(place.device)["logits"].requires_grad_()
    logits, seen = source * 1.0, []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    tokens, options = arguments(place, context)
    p3o_loss_from_logits(logits, *tokens, inplace_backward=True, **options).loss.backward()
    assert seen == [logits.data_ptr()]
    plain = case(place.device)["logits"].requires_grad_()
    p3o_loss_from_logits(plain, *tokens, **options).loss.backward()
    assert torch.equal(source.grad, plain.grad)


def test_use_of_the_logits_elsewhere_goes_wrong_in_silence(place, context):
    """The square saved the logits; its backward pass would multiply by gradients instead."""
    logits = case(place.device)["logits"].requires_grad_() * 1.0
    tokens, options = arguments(place, context)
    elsewhere = logits.square().sum()
    p3o_loss_from_logits(logits, *tokens, inplace_backward=True, **options).loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        elsewhere.backward()


@pytest.mark.parametrize("in_place", [False, True], ids=["out-of-place", "in-place"])
def test_second_backward_pass(place, context, in_place):
    """The same gradient again, or a refusal where its memory was given away; never something else."""
    logits = case(place.device)["logits"].requires_grad_()
    tokens, options = arguments(place, context)
    before = logits.detach().clone()
    loss = p3o_loss_from_logits(logits, *tokens, inplace_backward=in_place, **options).loss
    (once,) = torch.autograd.grad(loss, logits, retain_graph=True)
    once = once.clone()
    formed_forward = context and place.backend == "triton"
    if in_place or formed_forward:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, logits)
    else:
        assert torch.equal(torch.autograd.grad(loss, logits)[0], once)
    assert in_place or torch.equal(logits.detach(), before)


def test_in_place_log_probs(place):
    tensors = row_case(5, 60, place.device)
    logits = tensors["logits"].clone().requires_grad_()
    token_log_probs(logits, tensors["labels"], inplace_backward=True, backend=place.backend).sum().backward()
    plain = tensors["logits"].clone().requires_grad_()
    token_log_probs(plain, tensors["labels"], backend=place.backend).sum().backward()
    assert logits.grad.data_ptr() == logits.data_ptr() and torch.equal(logits.grad, plain.grad)


def test_nothing_is_differentiated_without_need(place, context):
    """No gradient is formed, and in place then leaves the logits alone."""
    logits = case(place.device)["logits"]
    tokens, options = arguments(place, context)
    before = logits.clone()
    assert not p3o_loss_from_logits(logits, *tokens, inplace_backward=True, **options).loss.requires_grad
    with torch.no_grad():
        leaf = logits.clone().requires_grad_()
        assert not p3o_loss_from_logits(leaf, *tokens, inplace_backward=True, **options).loss.requires_grad
    assert torch.equal(logits, before) and torch.equal(leaf.detach(), before)


def layer(place, frozen_weight=False, dtype=torch.float32):
    tensors = case(place.device, dtype)
    hidden = tensors["hidden"].requires_grad_()
    return hidden, tensors["weight"].requires_grad_(not frozen_weight)


def test_number_of_products(place, context, monkeypatch):
    """3 with a context, else 4; one less with a frozen weight."""
    products = []
    for name in ("linear", "product"):
        original = getattr(_linear, name)
        monkeypatch.setattr(_linear, name, lambda *a, _do=original, **o: (products.append(1), _do(*a, **o)))
    for frozen_weight in (False, True):
        products.clear()
        hidden, weight = layer(place, frozen_weight)
        tokens, options = arguments(place, context, mask=None)
        p3o_loss_from_hidden(hidden, weight, *tokens, **options).loss.backward()
        assert len(products) == (3 if context else 4) - frozen_weight
        assert (weight.grad is None) == frozen_weight


def test_frozen_weight_leaves_the_gradient_of_hidden_unchanged(place, context):
    grads = []
    for frozen_weight in (False, True):
        hidden, weight = layer(place, frozen_weight)
        tokens, options = arguments(place, context)
        p3o_loss_from_hidden(hidden, weight, *tokens, **options).loss.backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_adds_up_over_micro_batches(place, context, dtype):
    if dtype != torch.float32 and lane() == "sanitize":
        pytest.skip("its tensors say that they are on CUDA, but there is no cuBLAS to sum in float32")
    main_grad = torch.full((37, 8), 0.5, device=place.device)
    hidden, weight = layer(place, dtype=dtype)
    tokens, options = arguments(place, context)
    losses = [p3o_loss_from_hidden(hidden, weight, *tokens, main_grad=main_grad, **options).loss for _ in range(2)]
    for loss in losses:  # both forward passes come first, as in a pipeline
        (loss * 2.0).backward()
    assert weight.grad is None
    tensors = case(place.device, dtype)
    exact = {"backend": place.backend, "context": options["context"]}
    _, grads = run(p3o_loss_from_hidden, "hidden", tensors | {"bias": torch.zeros_like(tensors["bias"])}, **exact)
    # twice two times; the gradient to compare with is rounded to the weight's dtype
    rounding = torch.finfo(dtype).eps * 4.0 * grads[1].abs().max().item()
    torch.testing.assert_close(main_grad - 0.5, 4.0 * grads[1].float(), rtol=1e-5, atol=rounding + 1e-6)


def test_rows_are_left_out_of_the_products(place, context):
    """On the host's count, with an upper bound, and with all rows computed: the same results."""
    made = []
    valid = int(case(place.device)["mask"].sum())
    for valid_tokens in (None, valid, valid + 3, T):
        hidden, weight = layer(place)
        tokens, options = arguments(place, context)
        output = p3o_loss_from_hidden(hidden, weight, *tokens, valid_tokens=valid_tokens, **options)
        output.loss.backward()
        made.append((output.loss.detach(), hidden.grad, weight.grad))
    for other in made[1:]:
        for a, b in zip(made[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert made[0][1][~case(place.device)["mask"]].abs().sum() == 0


def test_more_valid_rows_than_announced(place, context):
    hidden, weight = layer(place)
    tokens, options = arguments(place, context)
    valid = int(tokens[3].sum())
    with pytest.raises(ValueError, match="invalid data on 1 of"):
        p3o_loss_from_hidden(hidden, weight, *tokens, valid_tokens=valid - 1, **options)
    output = p3o_loss_from_hidden(hidden, weight, *tokens, valid_tokens=valid - 1, validate=False, **options)
    output.loss.backward()
    assert output.loss.isnan() and hidden.grad.isnan().any()


def test_log_probs_of_hidden_equal_those_of_logits(place):
    tensors = case(place.device)
    values = [
        linear_log_probs(
            tensors["hidden"], tensors["weight"], tensors["labels"], bias=tensors["bias"], return_entropy=True,
            workspace_bytes=size, backend=place.backend,
        )
        for size in (1 << 20, 600)
    ]  # fmt: skip
    want = token_log_probs(tensors["logits"], tensors["labels"], return_entropy=True, backend=place.backend)
    for value in values:
        torch.testing.assert_close(value[0], want[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value[1], want[1], rtol=1e-5, atol=1e-6)


def test_a_leaf_that_only_the_bias_differentiates(place, context):
    tensors = case(place.device)
    bias = tensors["bias"].requires_grad_()
    tokens, options = arguments(place, context)
    p3o_loss_from_hidden(tensors["hidden"], tensors["weight"], *tokens, bias=bias, **options).loss.backward()
    _, grads = run(p3o_loss_from_hidden, "hidden", case(place.device), **options)
    torch.testing.assert_close(bias.grad, grads[2], rtol=1e-6, atol=1e-7)


def test_gradients_stay_zero_where_nothing_arrives(place):
    """A zero weight from outside: exact zeros, also where the logits are not finite."""
    tensors = row_case(4, 50, place.device)
    tensors["logits"][1, 7] = float("nan")
    logits = tensors["logits"].requires_grad_()
    weights = normal(4).to(place.device) * torch.tensor([1.0, 0.0, 1.0, 0.0], device=place.device)
    token_log_probs(logits, tensors["labels"], backend=place.backend).backward(weights)
    assert logits.grad[1].abs().sum() == 0 and logits.grad[3].abs().sum() == 0 and logits.grad[0].abs().sum() > 0


@pytest.mark.parametrize("rows", [0, 4])
def test_no_valid_row_leaves_the_weight_gradient_unwritten(place, context, rows):
    tokens, options = arguments(place, context)
    tokens = [tensor[:rows] for tensor in tokens]
    tokens[3] = torch.zeros(rows, dtype=torch.bool, device=place.device)
    for valid_tokens in (None, 0):
        hidden, weight = layer(place)
        output = p3o_loss_from_hidden(hidden[:rows], weight, *tokens, valid_tokens=valid_tokens, **options)
        output.loss.backward()
        assert output.loss == 0 and torch.equal(weight.grad, torch.zeros_like(weight))
        assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("valid_tokens", ["none", "exact", "all"])
def test_nan_in_a_masked_hidden_row_reaches_the_weight(place, context, valid_tokens):
    tokens, options = arguments(place, context)
    mask = tokens[3].clone()
    mask[-1] = False
    tokens[3] = mask
    count = {"none": None, "exact": int(mask.sum()), "all": T}[valid_tokens]
    grads = []
    for poison in (0.0, float("nan")):
        hidden, weight = layer(place)
        with torch.no_grad():
            hidden[~mask] = poison
        p3o_loss_from_hidden(hidden, weight, *tokens, valid_tokens=count, **options).loss.backward()
        grads.append((hidden.grad, weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    assert grads[1][1].isfinite().all()


def test_gradients_of_transposed_parameters_are_scaled_in_the_wrong_order(place, context):
    """A weight kept as [H, V]: what is formed with the loss is multiplied by 0.3 afterwards, row by row."""
    grads = []
    for transposed in (False, True):
        hidden, weight = (tensor.detach() for tensor in layer(place))
        if transposed:
            hidden, weight = (tensor.t().contiguous().t() for tensor in (hidden, weight))
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        tokens, options = arguments(place, context)
        (p3o_loss_from_hidden(*leaves, *tokens, **options).loss * 0.3).backward()
        grads.append([leaf.grad for leaf in leaves])
    for plain, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-7)
