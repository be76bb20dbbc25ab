"""Errors that only the data can tell, for the losses of ``sequences`` and ``p4o``: one host read decides."""

from collections.abc import Mapping

import torch
from torch import Tensor

from p3o_kernels import _verdict


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
    no_rule = torch.zeros_like(checks[-1])
    checks.append(no_rule if cu_seqlens is None else _verdict.bad_sequences(cu_seqlens, log_probs.numel()))
    if divisor is not None:
        checks.append(divisor[None])
    values = torch.cat(checks).tolist()  # the one host read
    if cu_seqlens is not None and values[5]:
        _verdict.raise_on_sequences(cu_seqlens, log_probs.numel())
    _verdict.raise_on_bad_sums(values[:4], _verdict.first_bad_token(named, mask, cu_seqlens) if values[3] else "")
    if values[4]:
        raise ValueError("context.ess or proximal_context.ess is NaN: it was made from invalid data, validate=False")
    if divisor is not None and not values[6] > 0:
        raise ValueError(f"num_tokens must be >= 1, got {values[6]:g}")
