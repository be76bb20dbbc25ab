"""Errors that only the data can tell, for the losses of ``sequences`` and ``p4o``: one host read decides."""

from collections.abc import Mapping

import torch
from torch import Tensor

from p3o_kernels import _verdict
from p3o_kernels._summary import LOG_RATIO_MAX, LOG_RATIO_MIN


def raise_on_invalid(
    sums: Tensor,
    ess: Tensor,
    named: Mapping[str, Tensor],
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    divisor: Tensor | None,
) -> None:
    """Raises what one call says about its data.

    Args:
        sums: [4] S1, S2, N, invalid: of the call, or what all ranks share.
        ess: every e that was used.
        named: log_probs, the log-probs it is compared with, and advantages if there are any; to name a bad token.
        mask, cu_seqlens, divisor: of the call.
    """
    log_probs = named["log_probs"]
    checks = [sums, ess.isnan().sum().double()[None]]
    checks.append(torch.zeros_like(checks[-1]) if cu_seqlens is None else _bad_sequences(cu_seqlens, log_probs))
    if divisor is not None:
        checks.append(divisor[None])
    values = torch.cat(checks).tolist()  # the one host read
    if cu_seqlens is not None and values[5]:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at T = {log_probs.numel()}, "
            f"got {_verdict._short(cu_seqlens)}"
        )
    _verdict._raise_on_bad_sums(values[:4], _first_bad_token(named, mask, cu_seqlens) if values[3] else "")
    if values[4]:
        raise ValueError("context.ess or proximal_context.ess is NaN: it was made from invalid data, validate=False")
    if divisor is not None and not values[6] > 0:
        raise ValueError(f"num_tokens must be >= 1, got {values[6]:g}")


def _bad_sequences(cu_seqlens: Tensor, log_probs: Tensor) -> Tensor:
    return _verdict._bad_sequences(cu_seqlens, log_probs.numel())


def _first_bad_token(named: Mapping[str, Tensor], mask: Tensor | None, cu_seqlens: Tensor | None) -> str:
    """Names the first offending token of this rank; reads as much as it needs, an exception is on its way."""
    read = {name: tensor.detach().cpu() for name, tensor in named.items()}
    log_probs = read["log_probs"]
    bad = torch.zeros_like(log_probs, dtype=torch.bool)
    for name, tensor in read.items():
        if name == "advantages":
            if cu_seqlens is not None and tensor.numel() == cu_seqlens.numel() - 1:
                read[name] = tensor = torch.repeat_interleave(tensor, cu_seqlens.diff().long().cpu())
            bad |= ~tensor.isfinite()
        elif name != "log_probs":
            log_ratio = log_probs - tensor
            bad |= ~((log_ratio < LOG_RATIO_MAX) & (log_ratio > LOG_RATIO_MIN))
    index = (bad if mask is None else bad & mask.cpu()).nonzero()
    if not index.numel():
        return "; no single token of this rank is the cause"
    token = int(index[0])
    return f"; the first is token {token}: " + ", ".join(f"{name} {value[token]:g}" for name, value in read.items())
