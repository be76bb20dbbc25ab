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

from p3o_kernels import _anchored, _anchored_verdict, _checks, _scalars
from p3o_kernels._collectives import gather_ranks
from p3o_kernels.metrics import P3OMetrics


@dataclass(frozen=True)
class SequenceESS:
    """e of each sequence and what belongs beside it. All fields are [B] float64 on the device.

    e_b cannot see a uniform shift (rho = c all along a sequence gives 1): watch ``ratio_mean`` beside it.
    """

    ess: Tensor
    """e_b in [1 / N_b, 1]; 1 without tokens; NaN on invalid data that was not validated."""
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

    Raises:
        ValueError: shapes or devices that differ; with ``validate`` also a bad cu_seqlens and invalid data: a valid
            token whose l, rho or rho^2 is not finite, or rho^2 is 0. With ``process_group`` every rank raises.
        TypeError: a wrong dtype or type.
    """
    _check_offsets(cu_seqlens)
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs}
    # no advantages here; log_probs stand in for them where the offsets are checked against T
    _checks.check_tokens(named, log_probs, mask, cu_seqlens)
    named = {name: _anchored.flat(tensor.detach()) for name, tensor in named.items()}
    with torch.no_grad():
        sums = _anchored.sequence_sums(*named.values(), _anchored.flat_mask(mask), cu_seqlens)
        if process_group is not None:
            sums = gather_ranks(sums.flatten(), process_group).sum(0).reshape(4, -1)
        result = _from_sums(sums)
    if validate:
        _anchored_verdict.raise_on_invalid(sums.sum(1), result.ess, named, mask, cu_seqlens, None)
    return result


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

    There is no ``context`` (see above), no reference and no entropy term, and no ``backend``: the analytic gradient
    runs in PyTorch on every device, after sums for each sequence. On CUDA those are some 180 small operations in all,
    not the fused kernel of ``p3o_loss``.

    Returns:
        ``SequenceP3OOutput(loss, num_tokens, sequence_ess, metrics)``.
    """
    _check_offsets(cu_seqlens)
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs}
    _checks.check_tokens(named, advantages, mask, cu_seqlens)
    _checks.check_options(reduction, kl_mode, {"clip_low": clip_low, "clip_high": clip_high}, num_tokens)
    lp, blp, valid = _anchored.flat(log_probs), _anchored.flat(behavior_log_probs.detach()), _anchored.flat_mask(mask)
    tensors = (lp, blp, None, _anchored.flat(advantages.detach()), valid, cu_seqlens)
    divisor = num_tokens.detach().reshape(()).to(lp.device, torch.float64) if isinstance(num_tokens, Tensor) else None
    whole_tokens = num_tokens if isinstance(num_tokens, int) else 0
    options = (divisor, whole_tokens, reduction, kl_mode, float(clip_low), float(clip_high))
    with torch.no_grad():
        sums = _anchored.sequence_sums(lp.detach(), blp, valid, cu_seqlens)
        verdict = sums[3].sum()
        if process_group is not None:
            # A counts as well, or the rank that sees it would raise alone and leave the others waiting
            ones = torch.ones_like(sums[0])
            own = _anchored.anchored_loss(*tensors, ones, *options)[3][3] if validate else verdict
            reduced = gather_ranks(torch.cat([sums.flatten(), own[None]]), process_group).sum(0)
            sums, verdict = reduced[:-1].reshape(4, -1), reduced[-1]
        used = _from_sums(sums)
    loss, _, _, vector, count = _anchored.anchored_loss(*tensors, used.ess, *options)
    if validate:
        shared = sums.sum(1)
        invalid = torch.maximum(shared[3], verdict if process_group is not None else vector[3])
        read = {"log_probs": lp, "behavior_log_probs": blp, "advantages": tensors[3]}
        _anchored_verdict.raise_on_invalid(
            torch.cat([shared[:3], invalid[None]]), used.ess, read, valid, cu_seqlens, divisor
        )
    return SequenceP3OOutput(loss, count, used, P3OMetrics(vector))


def _check_offsets(cu_seqlens: object) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}; e of each sequence needs the "
            "[B + 1] int32 offsets of the packed sequences"
        )


def _from_sums(sums: Tensor) -> SequenceESS:
    ess, num_tokens, ratio_mean, _ = _scalars.context(sums).unbind()
    return SequenceESS(ess, num_tokens, ratio_mean)
