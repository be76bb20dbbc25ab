"""Errors that only the data can tell: one host read decides, details are read on the way to the exception."""

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from p3o_kernels._summary import LOG_RATIO_MAX, LOG_RATIO_MIN, NUM_METRICS, SUMMARY_SIZE

_RULE = f"a log-ratio must be finite and in ({LOG_RATIO_MIN - 0.004:.2f}, {LOG_RATIO_MAX - 0.001:.2f})"


def raise_on_invalid_sums(vector: Tensor) -> None:
    """One host read of [S1, S2, N, invalid]."""
    raise_on_bad_sums(vector.tolist(), "")


def raise_on_bad_sums(sums: Sequence[float], detail: str) -> None:
    """Raises on [S1, S2, N, invalid] that are no good; ``detail`` says where to look."""
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
        checks.append(bad_sequences(cu_seqlens, log_probs.numel()))
    if divisor is not None:
        checks.append(divisor[None])
    values = torch.cat(checks).tolist()  # the one host read
    if cu_seqlens is not None and values[len(values) - 1 - (divisor is not None)]:
        raise_on_sequences(cu_seqlens, log_probs.numel())
    sums = values[SUMMARY_SIZE : SUMMARY_SIZE + 4] if reduced else values[:4]
    if sums[3] or not all(map(math.isfinite, sums)):
        named: dict[str, Tensor | None] = {"log_probs": log_probs, "behavior_log_probs": tensors[1]}
        named |= {"advantages": tensors[2], "ref_log_probs": optional[0], "entropy": optional[1]}
        raise_on_bad_sums(sums, first_bad_token(named, tensors[3], tensors[4]))
    if math.isnan(values[NUM_METRICS]):  # the first field of the context: e
        raise ValueError("context.ess is NaN: it was made from invalid data with validate=False")
    if divisor is not None and not values[-1] > 0:
        raise ValueError(f"num_tokens must be >= 1, got {values[-1]:g}")


def bad_sequences(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[1] float64: how many of the rules are broken."""
    bad = (cu_seqlens[1:] < cu_seqlens[:-1]).sum() + (cu_seqlens[0] != 0) + (cu_seqlens[-1] != num_tokens)
    return bad.double()[None]


def raise_on_sequences(cu_seqlens: Tensor, num_tokens: int) -> NoReturn:
    """For offsets of which ``bad_sequences`` is not 0."""
    values = cu_seqlens.tolist()
    short = str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:6]))}, ..., {values[-1]}]"
    raise ValueError(f"cu_seqlens must start at 0, never decrease and end at T = {num_tokens}, got {short}")


def first_bad_token(named: Mapping[str, Tensor | None], mask: Tensor | None, cu_seqlens: Tensor | None) -> str:
    """Names the first offending token of this rank; reads as much as it needs, an exception is on its way.

    ``named``: log_probs, then whatever else the call was given; advantages may be [B] together with ``cu_seqlens``.
    """
    read = {name: tensor.detach().cpu() for name, tensor in named.items() if tensor is not None}
    log_probs = read["log_probs"]
    advantages = read.get("advantages")
    if advantages is not None and cu_seqlens is not None and advantages.numel() == cu_seqlens.numel() - 1:
        read["advantages"] = torch.repeat_interleave(advantages, cu_seqlens.diff().long().cpu())
    bad = torch.zeros_like(log_probs, dtype=torch.bool)
    for name, tensor in read.items():
        log_ratio = log_probs - tensor
        if name in ("behavior_log_probs", "proximal_log_probs"):
            bad |= ~((log_ratio < LOG_RATIO_MAX) & (log_ratio > LOG_RATIO_MIN))
        elif name == "ref_log_probs":
            bad |= ~log_ratio.isfinite()
        elif name != "log_probs":
            bad |= ~tensor.isfinite()
    index = (bad if mask is None else bad & mask.cpu()).nonzero()
    if not index.numel():
        return "; no single token of this rank is the cause"
    token = int(index[0])
    return f"; the first is token {token}: " + ", ".join(f"{name} {value[token]:g}" for name, value in read.items())
