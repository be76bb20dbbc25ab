"""Errors that only the data can tell: one host read decides, details are read on the way to the exception."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p3o_kernels._summary import LOG_RATIO_MAX, LOG_RATIO_MIN, NUM_METRICS, SUMMARY_SIZE

_RULE = f"a log-ratio must be finite and in ({LOG_RATIO_MIN - 0.004:.2f}, {LOG_RATIO_MAX - 0.001:.2f})"


def raise_on_invalid_sums(vector: Tensor) -> None:
    """One host read of [S1, S2, N, invalid]."""
    _raise_on_bad_sums(vector.tolist(), "")


def _raise_on_bad_sums(sums: Sequence[float], detail: str) -> None:
    sum_ratio, sum_ratio_sq, num_tokens, invalid = sums
    if invalid or not math.isfinite(sum_ratio) or not math.isfinite(sum_ratio_sq):
        raise ValueError(
            f"invalid data on {invalid:.0f} of {num_tokens:.0f} valid tokens (S1 = {sum_ratio:g}, "
            f"S2 = {sum_ratio_sq:g}): {_RULE}, and advantages, ref_log_probs and entropy must be finite{detail}. "
            "Mask such tokens, or find out why the engines disagree"
        )


def raise_on_invalid(
    summary: Tensor,
    reduced: Sequence[Tensor],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    optional: tuple[Tensor | None, Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
) -> None:
    """Raises what the results of one loss call say about its data.

    Args:
        summary: of the call.
        reduced: nothing, or the [S1, S2, N, invalid] that all ranks share.
        tensors, optional: the call's own, to name the first bad token.
        cu_seqlens: as the caller gave it, needed by the call or not.
    """
    log_probs = tensors[0]
    divisor = optional[2]
    checks = [summary, *reduced]
    if cu_seqlens is not None:
        checks.append(_bad_sequences(cu_seqlens, log_probs.numel()))
    if divisor is not None:
        checks.append(divisor[None])
    values = torch.cat(checks).tolist()  # the one host read
    if cu_seqlens is not None and values[len(values) - 1 - (divisor is not None)]:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at T = {log_probs.numel()}, got {_short(cu_seqlens)}"
        )
    sums = values[SUMMARY_SIZE : SUMMARY_SIZE + 4] if reduced else values[:4]
    if sums[3] or not all(map(math.isfinite, sums)):
        _raise_on_bad_sums(sums, _first_bad_token(tensors, optional))
    if math.isnan(values[NUM_METRICS]):  # the first field of the context: e
        raise ValueError("context.ess is NaN: it was made from invalid data with validate=False")
    if divisor is not None and not values[-1] > 0:
        raise ValueError(f"num_tokens must be >= 1, got {values[-1]:g}")


def _bad_sequences(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[1] float64: how many of the rules are broken."""
    bad = (cu_seqlens[1:] < cu_seqlens[:-1]).sum() + (cu_seqlens[0] != 0) + (cu_seqlens[-1] != num_tokens)
    return bad.double()[None]


def _short(tensor: Tensor) -> str:
    values = tensor.tolist()
    return str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:6]))}, ..., {values[-1]}]"


def _first_bad_token(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    optional: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> str:
    """Names the first offending token of this rank; reads as much as it needs, an exception is on its way."""
    log_probs, behavior_log_probs, advantages = (tensor.detach().cpu() for tensor in tensors[:3])
    mask, cu_seqlens = tensors[3:]
    if cu_seqlens is not None:
        advantages = torch.repeat_interleave(advantages, cu_seqlens.diff().long().cpu())
    log_ratio = log_probs - behavior_log_probs
    bad = ~((log_ratio < LOG_RATIO_MAX) & (log_ratio > LOG_RATIO_MIN) & advantages.isfinite())
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs, "advantages": advantages}
    for name, tensor in zip(("ref_log_probs", "entropy"), optional[:2], strict=True):
        if tensor is not None:
            named[name] = tensor.detach().cpu()
            bad |= ~(named[name].isfinite() & (log_probs - named[name]).isfinite())
    index = (bad if mask is None else bad & mask.cpu()).nonzero()
    if not index.numel():
        return "; no single token of this rank is the cause"
    token = int(index[0])
    return f"; the first is token {token}: " + ", ".join(f"{name} {value[token]:g}" for name, value in named.items())
