"""The losses from logits and from hidden states against the float64 reference, on every backend."""

import pytest
import torch

from p3o_kernels import ESSContext, _row_launch, p3o_loss_from_hidden, p3o_loss_from_logits, reference
from tests.kernels.rows import assert_as_exact, normal, stored_rounding

T, H, V = 13, 8, 37
LAYER = ("hidden", "weight", "bias")
FUNCTIONS = {"logits": p3o_loss_from_logits, "hidden": p3o_loss_from_hidden}
REFERENCES = {"logits": reference.p3o_loss_from_logits, "hidden": reference.p3o_loss_from_hidden}


def frozen(device, value=0.37) -> ESSContext:
    ess = torch.tensor(value, dtype=torch.float64, device=device)
    return ESSContext(ess, ess, ess, ess, ess)


def case(device, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden, weight, bias = normal(T, H), normal(V, H), 0.5 * normal(V)
    labels = torch.randint(0, V, (T,), generator=generator)
    log_probs = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    tensors = {
        "hidden": hidden.to(dtype),
        "weight": weight.to(dtype),
        "bias": bias.to(dtype),
        "labels": labels,
        "behavior_log_probs": log_probs + 0.3 * normal(T, seed=1),
        "advantages": normal(T, seed=2),
        "mask": torch.rand(T, generator=generator) > 0.3,
        "ref_log_probs": log_probs + 0.2 * normal(T, seed=3),
        "cu_seqlens": torch.tensor([0, 1, 1, 6, T], dtype=torch.int32),
    }
    tensors["logits"] = torch.nn.functional.linear(tensors["hidden"], tensors["weight"], tensors["bias"])
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def run(function, entry, tensors, dtype=None, sequences=False, masked=True, terms=False, upstream=1.0, **options):
    """Loss and gradients of what the entry point differentiates."""
    names = ("logits",) if entry == "logits" else LAYER
    made = {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor.detach().clone()
        for name, tensor in tensors.items()
    }
    leaves = [made[name].requires_grad_() for name in names]
    if terms:
        options |= {"ref_log_probs": made["ref_log_probs"], "ref_kl_coef": 0.3, "entropy_coef": 0.05}
    if sequences:
        options["cu_seqlens"] = made["cu_seqlens"]
        made["advantages"] = made["advantages"][: made["cu_seqlens"].numel() - 1]
    if entry == "hidden":
        options["bias"] = leaves[2]
    tokens = (made["labels"], made["behavior_log_probs"], made["advantages"], made["mask"] if masked else None)
    output = function(*leaves[:2], *tokens, **options)
    weights = torch.linspace(0.5, 2.0, output.loss.numel(), device=output.loss.device, dtype=output.loss.dtype)
    total = output.loss if output.loss.dim() == 0 else (output.loss * weights).sum()
    (total * upstream).backward()
    return output, [leaf.grad for leaf in leaves]


def compare(place, entry, tensors, own=None, **options) -> None:
    """``own``: options that the reference does not have."""
    output, grads = run(FUNCTIONS[entry], entry, tensors, backend=place.backend, **options, **(own or {}))
    exact, truths = run(REFERENCES[entry], entry, tensors, torch.float64, **options)
    eager, plains = run(REFERENCES[entry], entry, tensors, **options)
    assert output.loss.dtype == torch.float32 and int(output.num_tokens) == int(exact.num_tokens)
    assert_as_exact(output.loss.detach(), exact.loss.detach(), eager.loss.detach())
    assert_as_exact(output.context.ess, exact.context.ess, eager.context.ess)
    assert_as_exact(output.metrics.vector, exact.metrics.vector, eager.metrics.vector)
    for grad, truth, plain in zip(grads, truths, plains, strict=True):
        assert grad.dtype == plain.dtype
        assert_as_exact(grad, truth, plain, stored_rounding(place, grad.dtype))


@pytest.mark.parametrize("terms", [False, True], ids=["plain", "reference-and-entropy"])
@pytest.mark.parametrize("context", [False, True], ids=["micro-batch", "step"])
@pytest.mark.parametrize("entry", ["logits", "hidden"])
class TestEntry:
    def test_reductions(self, place, entry, context, terms):
        for reduction in ("mean", "sum", "none"):
            given = frozen(place.device) if context else None
            compare(place, entry, case(place.device), context=given, terms=terms, reduction=reduction)

    def test_advantages_of_sequences_and_no_mask(self, place, entry, context, terms):
        given = frozen(place.device) if context else None
        compare(place, entry, case(place.device), context=given, terms=terms, sequences=True, masked=False)

    def test_gradient_that_arrives_is_not_one(self, place, entry, context, terms):
        """Two steps of a scaler: 2^10, and a factor that is no power of two."""
        for upstream in (1024.0, 0.3):
            given = frozen(place.device) if context else None
            compare(place, entry, case(place.device), context=given, terms=terms, upstream=upstream)

    def test_temperature_softcap_and_token_count(self, place, entry, context, terms):
        given = frozen(place.device) if context else None
        options = {"temperature": 0.8, "softcap": 3.0, "num_tokens": 40}
        compare(place, entry, case(place.device), context=given, terms=terms, **options)

    def test_half_precision(self, place, entry, context, terms):
        given = frozen(place.device) if context else None
        compare(place, entry, case(place.device, torch.bfloat16), context=given, terms=terms)


@pytest.mark.parametrize("kl_mode", ["proxy", "importance"])
@pytest.mark.parametrize("context", [False, True], ids=["micro-batch", "step"])
def test_kl_modes(place, context, kl_mode):
    given = frozen(place.device) if context else None
    compare(place, "logits", case(place.device), context=given, kl_mode=kl_mode)


@pytest.mark.parametrize("tokens", ["integer", "tensor"])
def test_token_count_of_the_step(place, tokens):
    number = 55 if tokens == "integer" else torch.tensor(55, device=place.device)
    compare(place, "logits", case(place.device), context=frozen(place.device), num_tokens=number)


@pytest.mark.parametrize("context", [False, True], ids=["micro-batch", "step"])
@pytest.mark.parametrize("kind", ["row temperature", "tiny workspace", "in place"])
def test_options_of_one_entry(place, kind, context):
    given = frozen(place.device) if context else None
    if kind == "row temperature":
        temperature = torch.linspace(0.6, 1.5, T, device=place.device)
        compare(place, "hidden", case(place.device), context=given, temperature=temperature)
    elif kind == "tiny workspace":  # every token a tile of its own, and a vocabulary in parts
        compare(place, "hidden", case(place.device), own={"workspace_bytes": 600}, context=given, terms=True)
    else:
        compare(place, "logits", case(place.device), own={"inplace_backward": True}, context=given, terms=True)


def test_entropy_for_the_metrics_alone(place):
    for context in (None, frozen(place.device)):
        compare(place, "logits", case(place.device), context=context, return_entropy=True)


def test_the_context_makes_micro_batches_add_up(place):
    """One step in one call, and cut into two with the same e and the same divisor: the same gradients."""
    tensors = case(place.device)
    whole, want = run(
        p3o_loss_from_hidden, "hidden", tensors, context=frozen(place.device), num_tokens=9, backend=place.backend
    )
    losses, grads = [], []
    for part in (slice(0, 5), slice(5, T)):
        cut = {
            name: tensor if name in ("weight", "bias", "cu_seqlens") else tensor[part]
            for name, tensor in tensors.items()
        }
        output, grad = run(
            p3o_loss_from_hidden, "hidden", cut, context=frozen(place.device), num_tokens=9, backend=place.backend
        )
        losses.append(output.loss.detach())
        grads.append(grad)
    torch.testing.assert_close(sum(losses), whole.loss.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.cat([grads[0][0], grads[1][0]]), want[0], rtol=1e-6, atol=1e-7)
    for place_of, tensor in ((1, want[1]), (2, want[2])):
        torch.testing.assert_close(grads[0][place_of] + grads[1][place_of], tensor, rtol=1e-5, atol=1e-7)


def test_a_program_goes_on_to_its_next_row(place, monkeypatch):
    """Two programs for 13 rows: what a row leaves behind must not reach the next one."""
    monkeypatch.setattr(_row_launch, "rows_under_way", lambda logits: 2)
    for in_place in (False, True):
        own = {"inplace_backward": in_place}
        compare(place, "logits", case(place.device), own=own, context=frozen(place.device), terms=True)
