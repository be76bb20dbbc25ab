"""Bad arguments of the vocabulary operations: named, with what came and what to do, before anything is launched."""

import pytest
import torch

from p3o_kernels import linear_log_probs, p3o_loss_from_hidden, p3o_loss_from_logits, token_log_probs

T, H, V = 6, 4, 10
LOGITS, LABELS = torch.zeros(T, V), torch.zeros(T, dtype=torch.int64)
HIDDEN, WEIGHT = torch.zeros(T, H), torch.zeros(V, H)
TOKEN = torch.zeros(T)
MASK = torch.ones(T, dtype=torch.bool)

CASES = {
    "three dimensions": (
        ValueError,
        r"logits must be \[T, V\], got \(2, 3, 10\); flatten the batch",
        {"logits": LOGITS.reshape(2, 3, V)},
    ),
    "float64": (
        TypeError,
        "logits must be float32, float16 or bfloat16, got torch.float64",
        {"logits": LOGITS.double()},
    ),
    "no tensor": (TypeError, "logits must be a torch.Tensor, got list", {"logits": [[0.0]]}),
    "no entry": (ValueError, "logits must have at least one vocabulary entry", {"logits": torch.zeros(T, 0)}),
    "float labels": (
        TypeError,
        "labels must be an int64 or int32 tensor of token ids, got torch.float32",
        {"labels": TOKEN},
    ),
    "label count": (
        ValueError,
        r"labels must be \[T\] = \[6\], one for each row of logits; got \(5,\)",
        {"labels": LABELS[:5]},
    ),
    "mask dtype": (TypeError, r"mask must be torch.bool, got torch.int64; pass mask.bool\(\)", {"mask": LABELS}),
    "mask shape": (ValueError, r"mask must be \[T\] = \[6\]", {"mask": MASK[:2]}),
    "temperature of zero": (ValueError, "temperature must be finite and > 0, got 0.0", {"temperature": 0.0}),
    "temperature shape": (
        ValueError,
        r"temperature must be a number or \[T\] = \[6\] floats, got \(2,\)",
        {"temperature": torch.ones(2)},
    ),
    "temperature type": (TypeError, "temperature must be a number, got str", {"temperature": "0.6"}),
    "softcap": (ValueError, "softcap must be finite and > 0, got -1.0", {"softcap": -1.0}),
    "overlapping rows in place": (
        ValueError,
        "inplace_backward=True needs logits whose rows do not overlap",
        {"logits": torch.zeros(1, V).expand(T, V), "inplace_backward": True},
    ),
    "backend": (ValueError, "backend must be one of auto, triton, eager, compiled; got 'cuda'", {"backend": "cuda"}),
}
LOSS_CASES = {
    "behavior count": (
        ValueError,
        r"behavior_log_probs must be \[T\] = \[6\], one for each row of",
        {"behavior_log_probs": TOKEN[:5]},
    ),
    "advantages count": (ValueError, "all token tensors must have the same shape", {"advantages": TOKEN[:5]}),
    "exact": (ValueError, "needs the behavior logits of the whole vocabulary", {"kl_mode": "exact"}),
    "reduction": (ValueError, "reduction must be one of none, sum, mean; got 'max'", {"reduction": "max"}),
    "reference": (ValueError, "ref_kl_coef is 0.1 but ref_log_probs is missing", {"ref_kl_coef": 0.1}),
    "both scopes": (
        ValueError,
        "context and ess_process_group exclude each other",
        {"context": "a context", "ess_process_group": "a group"},
    ),
    "no context": (TypeError, "context must be an ESSContext", {"context": 0.5}),
}
LAYER_CASES = {
    "logits for hidden": (
        ValueError,
        r"hidden \(6, 10\) and weight \(10, 4\); hidden has as many columns",
        {"hidden": LOGITS},
    ),
    "width": (
        ValueError,
        r"hidden \[T, H\] and weight \[V, H\] must agree in H, got hidden \(6, 4\) and weight \(10, 5\)",
        {"weight": torch.zeros(V, 5)},
    ),
    "dtypes": (
        TypeError,
        "nothing is cast; got hidden torch.float32, weight torch.bfloat16",
        {"weight": WEIGHT.bfloat16()},
    ),
    "bias": (ValueError, r"bias must be \[V\] = \[10\], got \(4,\)", {"bias": torch.zeros(4)}),
    "workspace": (ValueError, "workspace_bytes must be an int >= 1, got 0", {"workspace_bytes": 0}),
    "count without mask": (
        ValueError,
        "valid_tokens counts the True entries of mask, and there is no mask",
        {"valid_tokens": 3},
    ),
    "count": (ValueError, "valid_tokens must be an int between 0 and T = 6, got 7", {"valid_tokens": 7, "mask": MASK}),
    "main_grad shape": (
        ValueError,
        r"main_grad must be float32 in the shape of weight \(10, 4\), got \(4, 10\)",
        {"main_grad": torch.zeros(H, V)},
    ),
    "main_grad of a frozen weight": (ValueError, "weight.requires_grad is False", {"main_grad": torch.zeros(V, H)}),
}


@pytest.mark.parametrize("name", CASES)
def test_log_probs_from_logits(name):
    error, text, changes = CASES[name]
    with pytest.raises(error, match=text):
        token_log_probs(**({"logits": LOGITS, "labels": LABELS} | changes))


@pytest.mark.parametrize("name", [*CASES, *LOSS_CASES])
def test_loss_from_logits(name):
    error, text, changes = (CASES | LOSS_CASES)[name]
    arguments = {"logits": LOGITS, "labels": LABELS, "behavior_log_probs": TOKEN, "advantages": TOKEN}
    with pytest.raises(error, match=text):
        p3o_loss_from_logits(**(arguments | changes))


@pytest.mark.parametrize("name", LAYER_CASES)
def test_log_probs_from_hidden(name):
    error, text, changes = LAYER_CASES[name]
    with pytest.raises(error, match=text):
        linear_log_probs(**({"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS} | changes))


@pytest.mark.parametrize("name", [*LAYER_CASES, *LOSS_CASES])
def test_loss_from_hidden(name):
    error, text, changes = (LAYER_CASES | LOSS_CASES)[name]
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, "behavior_log_probs": TOKEN, "advantages": TOKEN}
    with pytest.raises(error, match=text):
        p3o_loss_from_hidden(**(arguments | changes))


def test_a_distributed_tensor_is_named_with_its_recipe():
    """What FSDP2 leaves in a module outside its forward pass."""
    from torch.distributed.tensor import DTensor

    class Sharded(torch.Tensor):
        pass

    Sharded.__module__ = DTensor.__module__
    weight = WEIGHT.as_subclass(Sharded)
    with pytest.raises(TypeError, match=r"weight is a Sharded: pass the local shard, weight.to_local\(\)"):
        linear_log_probs(HIDDEN, weight, LABELS)


@pytest.mark.host_only
def test_in_place_is_for_eager_mode():
    def in_place(logits):
        return token_log_probs(logits, LABELS, inplace_backward=True)

    with pytest.raises(Exception, match="inplace_backward=True is for eager mode"):
        torch.compile(in_place, fullgraph=True, backend="eager")(LOGITS)
