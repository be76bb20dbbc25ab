"""Checks of arguments that need no tensor to be read; all run before anything is launched.

What only the data can tell is in ``_verdict``.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from p3o_kernels._summary import KL_MODES, REDUCTIONS

LOG_PROB_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_tensors(tensors: Mapping[str, Tensor | None], mask: Tensor | None) -> None:
    """Types, dtypes, devices and identical shapes."""
    named = {name: value for name, value in tensors.items() if value is not None}
    missing = [name for name, value in tensors.items() if value is None and name not in ("ref_log_probs", "entropy")]
    if missing:
        raise TypeError(f"{missing[0]} must be a torch.Tensor, got None")
    _check_types(named if mask is None else named | {"mask": mask})
    for name, value in named.items():
        _check_dtype(name, value)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be torch.bool, got {mask.dtype}; pass mask.bool()")
        named["mask"] = mask
    check_devices(named)
    if len({value.shape for value in named.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in named.items())
        raise ValueError(f"all token tensors must have the same shape, nothing is broadcast; got {shapes}")


def _check_types(named: Mapping[str, Any]) -> None:
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def _check_dtype(name: str, value: Tensor) -> None:
    if value.dtype not in LOG_PROB_DTYPES:
        hint = "; p3o_kernels.reference takes float64" if value.dtype == torch.float64 else ""
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {value.dtype}{hint}")


def check_devices(named: Mapping[str, Tensor]) -> None:
    if len({value.device for value in named.values()}) > 1:
        devices = ", ".join(f"{name} {value.device}" for name, value in named.items())
        raise ValueError(f"all tensors must be on one device; got {devices}")


def check_tokens(
    tensors: Mapping[str, Tensor | None], advantages: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """The tensors of one loss call by name, the first of them always given.

    The values of cu_seqlens cannot be checked without a read.
    """
    if cu_seqlens is None:
        check_tensors({**tensors, "advantages": advantages}, mask)
        return
    check_tensors(tensors, mask)
    name, first = next(iter(tensors.items()))
    _check_types({"advantages": advantages, "cu_seqlens": cu_seqlens})
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be torch.int32, got {cu_seqlens.dtype}; pass cu_seqlens.int()")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens must have shape [B + 1], got {tuple(cu_seqlens.shape)}")
    if first is None or first.dim() != 1:
        raise ValueError(f"cu_seqlens needs packed {name} [T], got {None if first is None else tuple(first.shape)}")
    _check_dtype("advantages", advantages)
    check_devices({name: first, "advantages": advantages, "cu_seqlens": cu_seqlens})
    sequences, tokens = cu_seqlens.numel() - 1, first.numel()
    if advantages.shape not in ((sequences,), (tokens,)):
        raise ValueError(
            f"advantages must be [{sequences}], one per sequence of cu_seqlens, or [{tokens}], one per token; "
            f"got {tuple(advantages.shape)}"
        )
    if sequences == 0 and tokens:
        raise ValueError(f"cu_seqlens must end at T = {tokens}, got no sequence at all")


def check_scope(log_probs: Tensor, context: Any, process_group: Any, name: str = "process_group") -> None:
    """``name``: what the caller's function calls the group that e is reduced over."""
    if context is None:
        return
    if process_group is not None:
        raise ValueError(
            f"context and {name} exclude each other: a context is a frozen e that is reduced already "
            f"(step scope), {name} reduces this call's e (micro-batch scope)"
        )
    ess = getattr(context, "ess", None)
    if not isinstance(ess, Tensor):
        raise TypeError(f"context must be an ESSContext from RatioStats.to_context, got {type(context).__name__}")
    if ess.shape != () or ess.dtype != torch.float64:
        raise ValueError(f"context.ess must be a 0-d float64 tensor, got shape {tuple(ess.shape)} {ess.dtype}")
    check_devices({"log_probs": log_probs, "context.ess": ess})


def check_terms(ref_log_probs: Any, ref_kl_coef: float, entropy: Any, entropy_coef: float) -> None:
    if ref_kl_coef != 0 and ref_log_probs is None:
        raise ValueError(f"ref_kl_coef is {ref_kl_coef} but ref_log_probs is missing")
    if entropy_coef != 0 and entropy is None:
        raise ValueError(f"entropy_coef is {entropy_coef} but entropy is missing")


def check_options(reduction: str, kl_mode: str, numbers: Mapping[str, float], num_tokens: int | Tensor | None) -> None:
    """The plain arguments of the losses; ``numbers`` are clip margins and coefficients by name."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    if kl_mode == "exact":
        raise ValueError(
            'kl_mode="exact" needs the behavior logits of the whole vocabulary, which rollouts do not record; '
            "use p3o_kernels.exact_kl to verify an estimate, and proxy_safe, importance or proxy in the loss"
        )
    if kl_mode not in KL_MODES:
        raise ValueError(f"kl_mode must be one of {', '.join(KL_MODES)}; got {kl_mode!r}")
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
        if name.startswith("clip") and value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}")
    if num_tokens is not None:
        _check_num_tokens(num_tokens, reduction)


def _check_num_tokens(num_tokens: int | Tensor, reduction: str) -> None:
    if reduction != "mean":
        raise ValueError(f'num_tokens divides a mean; with reduction="{reduction}" leave it out')
    if isinstance(num_tokens, Tensor):
        if num_tokens.numel() != 1 or num_tokens.dtype == torch.bool or num_tokens.is_complex():
            raise ValueError(
                f"num_tokens must be one real number, got shape {tuple(num_tokens.shape)} {num_tokens.dtype}"
            )
    elif isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens must be an int or a tensor of one number, got {type(num_tokens).__name__}")
    elif num_tokens < 1:
        raise ValueError(f"num_tokens must be >= 1, got {num_tokens}; skip an optimizer step without valid tokens")
