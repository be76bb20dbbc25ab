"""P3O with an effective sample size for each sequence by itself.

    e_b = clamp(S1_b^2 / (N_b (S2_b + 1e-8)), 0, 1)      sums over the valid tokens of sequence b
    L_i = - sg(min(rho_i, e_b)) lp_i A_i + (1 - e_b) K_i       for a token i of sequence b

One sequence that drifted is capped and pulled back without a say of the others. e_b belongs to its sequence alone, so
the loss does not depend on how a step is cut into micro-batches, and needs no context.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import _anchored_ops, _anchored_verdict, _backend, _checks, _scalars
from p3o_kernels._collectives import gather_ranks
from p3o_kernels._dense import flat, flat_mask
from p3o_kernels.metrics import P3OMetrics


@dataclass(frozen=True)
class SequenceESS:
    """e of each sequence and what belongs beside it. All fields are [B] float64 on the device.

    e_b cannot see a uniform shift (rho = c all along a sequence gives 1): watch ``ratio_mean`` beside it.
    """

    ess: Tensor
    """e_b in [1 / N_b, 1], but for the 1e-8; 1 without tokens; NaN on invalid data that was not validated."""
    num_tokens: Tensor
    """N_b, the valid tokens."""
    ratio_mean: Tensor
    """S1_b / N_b; 1 without tokens."""


class SequenceP3OOutput(NamedTuple):
    """What ``p3o_loss_per_sequence`` returns."""

    loss: Tensor
    """0-d float32 for "mean" and "sum", [T] float32 for "none"."""
    num_tokens: Tensor
    """0-d int64: the exact number of valid tokens of this call, on this rank."""
    sequence_ess: SequenceESS
    """The e that were used."""
    metrics: P3OMetrics
    """Sums over this call's tokens, on this rank; ``normalized_ess`` is the mean of e_b over tokens."""


def sequence_ess(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None = None,
    *,
    process_group: ProcessGroup | None = None,
    validate: bool = True,
    backend: str = "auto",
) -> SequenceESS:
    """e of every sequence of a packed batch; detached, sums in float64 in a fixed order.

    Args:
        log_probs: lp, [T] float32, float16 or bfloat16: log-probabilities under the current policy, in nats.
        behavior_log_probs: blp, [T]: log-probabilities under the policy that sampled the tokens.
        cu_seqlens: [B + 1] int32 offsets of the packed sequences, from 0 to T; sequences may be empty.
        mask: [T] bool; False positions may hold anything, NaN included. None: every token is valid.
        process_group: ranks that hold parts of the same B sequences (context parallel), each with the offsets of its
            own parts: sums are added sequence by sequence first. Every rank must call, with the same B.
        validate: one host read that raises on invalid data. False reads nothing; e of such a sequence is NaN.
        backend: "auto" (triton on CUDA tensors, else eager), "triton", "eager" or "compiled" (same as eager here).

    Raises:
        ValueError: shapes or devices that differ; with ``validate`` also a bad cu_seqlens and invalid data: a valid
            token whose l, rho or rho^2 is not finite, or rho^2 is 0. With ``process_group`` every rank raises. An
            unknown or unusable backend.
        TypeError: a wrong dtype or type.
    """
    _check_offsets(cu_seqlens)
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs}
    # no advantages here; log_probs stand in for them where the offsets are checked against T
    _checks.check_tokens(named, log_probs, mask, cu_seqlens)
    resolved = _backend.resolve(backend, log_probs)
    named = {name: flat(tensor.detach()) for name, tensor in named.items()}
    valid = flat_mask(mask)
    with torch.no_grad():
        rows = _anchored_ops.sequence_sums(*named.values(), valid, cu_seqlens, resolved)
        if process_group is not None:
            rows = _scalars.with_context(gather_ranks(rows[:4].flatten(), process_group).sum(0).reshape(4, -1))
    if validate:
        _anchored_verdict.raise_on_invalid(rows[:4].sum(1), rows[4], named, valid, cu_seqlens, None)
    return SequenceESS(*rows[4:7].unbind())


def p3o_loss_per_sequence(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    process_group: ProcessGroup | None = None,
    reduction: str = "mean",
    num_tokens: int | Tensor | None = None,
    kl_mode: str = "proxy_safe",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    validate: bool = True,
    backend: str = "auto",
) -> SequenceP3OOutput:
    """P3O loss whose cap and pull of each token come from its own sequence, differentiable in ``log_probs``.

    Arguments and errors are those of ``p3o_loss``, except:

    Args:
        log_probs: [T], packed.
        advantages: [T], or [B], one per sequence (also when B = T).
        cu_seqlens: [B + 1] int32 offsets of the packed sequences, from 0 to T. A sequence without valid tokens has
            e = 1 and no effect.
        process_group: ranks that hold parts of the same B sequences, as in ``sequence_ess``.
        validate: as in ``p3o_loss``; False gives NaN for loss and gradient on invalid data, with "none" in the
            sequences that have it.
        backend: as in ``p3o_loss``, but "compiled" is the same as "eager" here.

    There is no ``context`` (see above), no reference and no entropy term. With "triton" there are 3 launches forward,
    one more where a batch has few sequences of at least 8192 tokens on average, and 1 backward.

    Returns:
        ``SequenceP3OOutput(loss, num_tokens, sequence_ess, metrics)``.
    """
    _check_offsets(cu_seqlens)
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs}
    _checks.check_tokens(named, advantages, mask, cu_seqlens)
    _checks.check_options(reduction, kl_mode, {"clip_low": clip_low, "clip_high": clip_high}, num_tokens)
    lp, blp, valid = flat(log_probs), flat(behavior_log_probs.detach()), flat_mask(mask)
    tensors = (lp, blp, flat(advantages.detach()), valid, cu_seqlens)
    divisor = num_tokens.detach().reshape(()).to(lp.device, torch.float64) if isinstance(num_tokens, Tensor) else None
    whole_tokens = num_tokens if isinstance(num_tokens, int) else 0
    margins = (float(clip_low), float(clip_high))
    options = (divisor, whole_tokens, reduction, kl_mode, *margins, _backend.resolve(backend, lp))
    with torch.no_grad():
        rows = _anchored_ops.sequence_sums(lp.detach(), blp, valid, cu_seqlens, options[-1])
        verdict = rows[3].sum()
        if process_group is not None:
            # A counts as well, or the rank that sees it would raise alone and leave the others waiting
            ones = torch.ones_like(rows[0])
            own = _anchored_ops.sequence_loss(*tensors, ones, *options)[3][3] if validate else verdict
            reduced = gather_ranks(torch.cat([rows[:4].flatten(), own[None]]), process_group).sum(0)
            rows, verdict = _scalars.with_context(reduced[:-1].reshape(4, -1)), reduced[-1]
    loss, _, _, vector, count = _anchored_ops.sequence_loss(*tensors, rows[4], *options)
    if validate:
        shared = rows[:4].sum(1)
        invalid = torch.maximum(shared[3], verdict if process_group is not None else vector[3])
        read = {"log_probs": lp, "behavior_log_probs": blp, "advantages": tensors[2]}
        _anchored_verdict.raise_on_invalid(
            torch.cat([shared[:3], invalid[None]]), rows[4], read, valid, cu_seqlens, divisor
        )
    return SequenceP3OOutput(loss, count, SequenceESS(*rows[4:7].unbind()), P3OMetrics(vector))


def _check_offsets(cu_seqlens: object) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}; e of each sequence needs the "
            "[B + 1] int32 offsets of the packed sequences"
        )
