"""Random calls of ``p3o_loss``: a documented error, or loss and gradient as the float64 reference has them.

Whether a call is valid is decided here, in float64, by the rule of the documentation: a valid token needs a finite
log-ratio l with a positive finite rho^2, and finite terms.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from p3o_kernels import ESSContext, p3o_loss, reference
from p3o_kernels._summary import EPSILON, KL_MODES, LOG_RATIO_MAX, LOG_RATIO_MIN, REDUCTIONS
from tests.soak.trials import Finding

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
# around what K clamps, float32 overflows, float32 squares overflow, float64 squares underflow and overflow
EXTREME = (0.0, 1e-6, -1e-6, 9.999, 10.001, -9.999, -10.001, 44.3, 44.5, 88.7, 89.0, -88.0, -104.0, 354.8, -372.5)
IMPOSSIBLE = (355.0, 500.0, -373.0, -500.0, math.inf, -math.inf, math.nan)
POISON = (math.nan, math.inf, -math.inf, 3e38)
TERMS = ("advantages", "ref_log_probs", "entropy")
# half of a unit of float32 for each of: l, which the reference does not round and which an exponential multiplies by
# up to 10, three products and a sum
ROUNDING = 2e-6
SMALLEST = 1e-37
"""Below it float32 has fewer digits."""


def _mistakes(drawn: int) -> st.SearchStrategy[int | None]:
    """Of one call in ten."""
    return st.none() if drawn < 9 else st.sampled_from(range(len(MISTAKES)))


CALLS = st.fixed_dictionaries(
    {
        "content": st.integers(0, 2**16),
        "tokens": st.integers(0, 40),
        "dtypes": st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
        "shape": st.sampled_from(["packed", "packed", "rows"]),
        "mask": st.sampled_from([None, "some", "some", "none valid"]),
        "ratios": st.sampled_from(["near", "near", "extreme", "impossible"]),
        "size": st.sampled_from([1.0, 1.0, 1e4, 1e30]),
        "broken": st.sampled_from([None, None, None, *TERMS]),
        "per": st.sampled_from(["token", "sequence", "token and sequences"]),
        "terms": st.sampled_from([(), ("ref_log_probs",), ("entropy",), ("ref_log_probs", "entropy")]),
        "reduction": st.sampled_from(REDUCTIONS),
        "kl_mode": st.sampled_from(KL_MODES),
        "scope": st.sampled_from([None, None, 0.0, 0.37, 1.0]),
        "num_tokens": st.sampled_from([None, 7, torch.tensor(12), torch.tensor([3.0])]),
        "layout": st.sampled_from(["dense", "strided", "offset"]),
        "mistake": st.integers(0, 9).flatmap(_mistakes),
    }
)

EITHER = (TypeError, ValueError)
"""Of an argument that is wrong in two ways."""
# what to change, the error it must be, and a word of its text
MISTAKES: tuple[tuple[dict[str, Any], Any, str], ...] = (
    ({"reduction": "avg"}, ValueError, "reduction"),
    ({"kl_mode": "exact"}, ValueError, "kl_mode"),
    ({"kl_mode": None}, ValueError, "kl_mode"),
    ({"num_tokens": 0, "reduction": "mean"}, ValueError, "num_tokens"),
    ({"num_tokens": True, "reduction": "mean"}, TypeError, "num_tokens"),
    ({"num_tokens": torch.tensor(0), "reduction": "mean"}, ValueError, "num_tokens"),
    ({"num_tokens": torch.tensor([1, 2]), "reduction": "mean"}, ValueError, "num_tokens"),
    ({"num_tokens": 5, "reduction": "sum"}, ValueError, "num_tokens"),
    ({"clip_low": -0.1}, ValueError, "clip_low"),
    ({"clip_high": math.nan}, ValueError, "clip_high"),
    ({"ref_kl_coef": 0.1, "ref_log_probs": None}, ValueError, "ref_log_probs"),
    ({"entropy_coef": 0.1, "entropy": None}, ValueError, "entropy"),
    ({"entropy_coef": "much"}, TypeError, "entropy_coef"),
    ({"context": 0.5}, TypeError, "context"),
    ({"backend": "cpu"}, ValueError, "backend"),
    ({"log_probs": None}, EITHER, "log_probs"),
    ({"behavior_log_probs": None}, TypeError, "behavior_log_probs"),
    ({"advantages": None}, TypeError, "advantages"),
    ({"log_probs": torch.zeros(3, dtype=torch.float64)}, TypeError, "log_probs"),
    ({"behavior_log_probs": torch.zeros(41)}, ValueError, "behavior_log_probs"),
    ({"advantages": [1.0]}, TypeError, "advantages"),
    ({"mask": torch.zeros(41, dtype=torch.int64)}, TypeError, "mask"),
    ({"cu_seqlens": torch.tensor([0, 3])}, EITHER, "cu_seqlens"),
    ({"cu_seqlens": [0, 3]}, EITHER, "cu_seqlens"),
)


def check_call(drawn: dict[str, Any]) -> str:
    """What became of the call: an outcome that is fine.

    Raises:
        Finding: one that is not.
    """
    if drawn["mistake"] is not None:
        return _refused(make_call(drawn | {"ratios": "near", "broken": None}), *MISTAKES[drawn["mistake"]])
    call = make_call(drawn)
    before = {name: _bits(value) for name, value in call.items() if isinstance(value, Tensor)}
    verdict = _verdict(call)
    try:
        loss, grad, vector = outcome(p3o_loss, call)
        again = outcome(p3o_loss, call)
    except ValueError as error:
        if verdict == "valid" or "invalid data on" not in str(error):
            raise Finding(f"valid data is refused: {str(error)[:120]}") from error
        return "invalid data refused"
    if verdict == "invalid":
        raise Finding("invalid data is accepted")
    if any(not torch.equal(_bits(one), _bits(two)) for one, two in zip((loss, grad, vector), again, strict=True)):
        raise Finding("the same input gives other bits")
    if any(not torch.equal(bits, _bits(call[name])) for name, bits in before.items()):
        raise Finding("an input was changed")
    compare(call, loss, grad)
    return "as the float64 reference"


def _refused(call: dict[str, Any], change: dict[str, Any], error: Any, word: str) -> str:
    try:
        outcome(p3o_loss, call | change)
    except error as raised:
        if word not in str(raised):
            raise Finding(f"the error does not name {word}: {raised}") from raised
        return "wrong argument refused by name"
    raise Finding(f"accepted although wrong: {word}")


def outcome(function: Any, call: dict[str, Any], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of its sum to log_probs, and metrics."""
    call = dict(call)
    if dtype is not None:
        floats = {n for n, v in call.items() if isinstance(v, Tensor) and v.is_floating_point() and n != "num_tokens"}
        call |= {name: call[name].to(dtype) for name in floats}
    log_probs = call.pop("log_probs")
    # a leaf of the same strides
    leaf = log_probs.detach().requires_grad_() if isinstance(log_probs, Tensor) else log_probs
    output = function(leaf, **call)
    (grad,) = torch.autograd.grad(output.loss.sum(), leaf)
    return output.loss.detach(), grad, output.metrics.vector


def make_call(drawn: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``p3o_loss``; what is masked is poisoned."""
    # of everything that was drawn, since hypothesis likes some numbers better than others
    generator = torch.Generator().manual_seed(zlib.crc32(repr(drawn).encode()))
    tokens = drawn["tokens"]

    def pick(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (tokens,), generator=generator)]

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator)

    log_probs = -normal(1.0).abs() - 0.01
    ratios = normal(0.5)
    if drawn["ratios"] != "near":
        ratios = torch.where(torch.rand(tokens, generator=generator) < 0.3, pick(EXTREME), ratios)
    if drawn["ratios"] == "impossible":
        ratios = torch.where(torch.rand(tokens, generator=generator) < 0.1, pick(IMPOSSIBLE), ratios)
    named = {
        "log_probs": log_probs,
        "behavior_log_probs": log_probs - ratios,
        "advantages": drawn["size"] * normal(1.0),
        "ref_log_probs": log_probs + normal(0.2),
        "entropy": normal(1.0).abs(),
    }
    call: dict[str, Any] = {
        name: value.to(torch.float32 if drawn["size"] > 1e4 and name == "advantages" else dtype)
        for (name, value), dtype in zip(named.items(), drawn["dtypes"], strict=True)
    }
    for name in ("ref_log_probs", "entropy"):
        if name not in drawn["terms"]:
            del call[name]
    if drawn["mask"] is not None:
        valid = torch.rand(tokens, generator=generator) > (0.3 if drawn["mask"] == "some" else 2.0)
        poison = pick(POISON)
        call = {name: torch.where(valid, value, poison).to(value.dtype) for name, value in call.items()}
        call["mask"] = valid
    if drawn["broken"] in call and tokens:
        call[drawn["broken"]][int(torch.randint(tokens, (), generator=generator))] = math.nan
    if drawn["per"] != "token":
        call |= _sequences(call["advantages"], drawn["per"] == "sequence", generator)
    elif drawn["shape"] == "rows" and tokens % 2 == 0:
        call = {name: value.reshape(2, -1) for name, value in call.items()}
    call = {name: _laid_out(value, drawn["layout"]) for name, value in call.items()}
    return call | _options(drawn)


def _options(drawn: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"reduction": drawn["reduction"], "kl_mode": drawn["kl_mode"]}
    if drawn["reduction"] == "mean":
        made["num_tokens"] = drawn["num_tokens"]
    if drawn["scope"] is not None:
        ess = torch.tensor(drawn["scope"], dtype=torch.float64)
        made["context"] = ESSContext(ess, ess, ess, ess, ess)
    made |= {"ref_kl_coef": 0.3} if "ref_log_probs" in drawn["terms"] else {}
    return made | ({"entropy_coef": 0.05} if "entropy" in drawn["terms"] else {})


def _sequences(advantages: Tensor, looked_up: bool, generator: torch.Generator) -> dict[str, Any]:
    """Offsets with empty sequences among them, and an advantage for each where they are looked up."""
    tokens = advantages.numel()
    cuts = torch.randint(tokens + 1, (int(torch.randint(0, 6, (), generator=generator)),), generator=generator)
    ends = torch.tensor([0, tokens])
    offsets = torch.cat([cuts, ends]).sort().values.int()
    if not looked_up:
        return {"cu_seqlens": offsets}
    drawn = torch.randn(offsets.numel() - 1, generator=generator).to(advantages.dtype)
    return {"cu_seqlens": offsets, "advantages": drawn}


def _laid_out(value: Tensor, layout: str) -> Tensor:
    if layout == "strided":
        return torch.stack([value, value], -1)[..., 0]
    if layout == "offset" and value.dim() == 1:
        return torch.cat([value[:1], value])[1:] if value.numel() else value
    return value


def _valid(call: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Flat mask and flat float64 tensors, advantages one for each token."""
    flat = {
        name: call[name].reshape(-1).double() for name in ("log_probs", "behavior_log_probs", *TERMS) if name in call
    }
    if "cu_seqlens" in call and call["advantages"].numel() == call["cu_seqlens"].numel() - 1:
        lengths = call["cu_seqlens"].diff().long()
        if flat["advantages"].numel() != flat["log_probs"].numel() or (lengths != 1).any():
            flat["advantages"] = torch.repeat_interleave(flat["advantages"], lengths)
    mask = call.get("mask")
    return torch.ones_like(flat["log_probs"]).bool() if mask is None else mask.reshape(-1), flat


def _verdict(call: dict[str, Any]) -> str:
    """ "valid", "invalid", or "either" within float32's rounding of a limit."""
    mask, flat = _valid(call)
    flat = {name: value[mask] for name, value in flat.items()}
    log_ratio = flat["log_probs"] - flat["behavior_log_probs"]
    square = log_ratio.exp().square()
    fine = log_ratio.isfinite() & square.isfinite() & (square > 0)
    for name in TERMS:
        fine &= flat[name].isfinite() if name in flat else True
    if not fine.all():
        return "invalid"
    edges = ((log_ratio - LOG_RATIO_MAX).abs() < 0.01) | ((log_ratio - LOG_RATIO_MIN).abs() < 0.01)
    if edges.any():
        return "either"
    return "valid" if square.sum().isfinite() else "invalid"


def compare(call: dict[str, Any], loss: Tensor, grad: Tensor) -> None:
    """At most 1.5 times the largest error of the same arithmetic in float32, or rounding of the largest term."""
    call = {"context": _context(call)} | call
    truth, want, _ = outcome(reference.p3o_loss, call, torch.float64)
    eager, plain, _ = outcome(reference.p3o_loss, call, torch.float32)
    if call["reduction"] == "mean":  # a divisor of shape [1] makes a loss of shape [1] there
        truth, eager = truth.reshape(()), eager.reshape(())
    tokens, _, _ = outcome(reference.p3o_loss, call | {"reduction": "none", "num_tokens": None}, torch.float64)
    largest = _largest_terms(call)
    divisor = 1.0 if call["reduction"] != "mean" else float(call["num_tokens"] or max(1, int(_valid(call)[0].sum())))
    total = largest if call["reduction"] == "none" else largest * max(1, tokens.numel()) / divisor
    unit = torch.finfo(grad.dtype).eps / 2 if grad.dtype != torch.float32 else 0.0
    for name, value, exact, rough, scale, step in (
        ("loss", loss, truth, eager, total, 0.0),
        ("gradient", grad, want, plain, largest / divisor, unit),
    ):
        largest_number = torch.finfo(value.dtype).max
        value, exact, rough = value.double(), exact.double(), rough.double()
        if value.shape != exact.shape:
            raise Finding(f"the {name} has shape {tuple(value.shape)}, not {tuple(exact.shape)}")
        fits = exact.abs() < largest_number  # beyond it the dtype has infinity alone
        error = torch.where(fits, (value - exact).abs(), 0.0)
        allowed = 1.5 * torch.where(fits, (rough - exact).abs(), 0.0).max() if exact.numel() else 0.0
        allowed = allowed + ROUNDING * scale + step * exact.abs() + (1e-7 if step else SMALLEST)
        if not bool((error <= allowed).all()):
            raise Finding(f"the {name} is not that of the reference")


def _context(call: dict[str, Any]) -> ESSContext:
    """e = S1^2 / (N (S2 + 1e-8)), all ratios divided by the largest, so that no sum of squares overflows."""
    mask, flat = _valid(call)
    log_ratio = (flat["log_probs"] - flat["behavior_log_probs"])[mask]
    ess = torch.ones((), dtype=torch.float64)
    if log_ratio.numel():
        top = log_ratio.max()
        ratio = (log_ratio - top).exp()
        ess = ratio.sum().square() / (ratio.numel() * (ratio.square().sum() + EPSILON * (-2 * top).exp()))
    return ESSContext(*[ess.clamp_max(1.0)] * 5)


def _largest_terms(call: dict[str, Any]) -> float:
    """The largest of what is added up in one token, in the loss or in the gradient."""
    mask, flat = _valid(call)
    flat = {name: value[mask] for name, value in flat.items()}
    if not mask.any():
        return 0.0
    lp, log_ratio = flat["log_probs"], flat["log_probs"] - flat["behavior_log_probs"]
    weight = log_ratio.exp().clamp_max(1.0)
    score = weight * flat["advantages"].abs() * lp.abs().clamp_min(1.0)
    exponent = log_ratio.abs().clamp_max(10.0).exp()
    kl = exponent * log_ratio.abs().clamp_min(1.0) + 1.0
    terms = score.max() + kl.max()
    if "ref_log_probs" in flat:
        terms = terms + (lp - flat["ref_log_probs"]).abs().clamp_max(10.0).exp().max() + 1.0
    return float(terms + (flat["entropy"].abs().max() if "entropy" in flat else 0.0))


def _bits(value: Tensor) -> Tensor:
    """Comparable where there is a NaN."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.contiguous().view(kinds[value.element_size()]).clone() if value.is_floating_point() else value.clone()
