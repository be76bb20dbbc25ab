"""Exact KL over the vocabulary: a yardstick for the sampled estimates, not a term of the loss."""

import torch
from torch import Tensor

from p3o_kernels import _checks


def exact_kl(policy_logits: Tensor, behavior_logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(pi || b) of every row, sum_v pi(v) (log pi(v) - log b(v)), in nats.

    Args:
        policy_logits: [..., V] float; any float dtype, computed in float32 or wider.
        behavior_logits: same shape. -inf where both policies exclude an entry is legal.
        mask: [...] bool; rows with False give an exact 0 and may hold anything. None: all rows.

    Returns:
        [...] float32 (float64 for float64 logits), differentiable in both logits; inf where pi has support that b
        lacks. Memory: several copies of the logits.

    Raises:
        ValueError: shapes or devices that differ.
        TypeError: a dtype that is not floating point, or a mask that is not bool.
    """
    for name, logits in (("policy_logits", policy_logits), ("behavior_logits", behavior_logits)):
        if not logits.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {logits.dtype}")
    if policy_logits.shape != behavior_logits.shape or policy_logits.dim() < 1:
        raise ValueError(
            f"policy_logits and behavior_logits must have the same shape [..., V], got "
            f"{tuple(policy_logits.shape)} and {tuple(behavior_logits.shape)}"
        )
    named = {"policy_logits": policy_logits, "behavior_logits": behavior_logits}
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be torch.bool, got {mask.dtype}; pass mask.bool()")
        if mask.shape != policy_logits.shape[:-1]:
            raise ValueError(f"mask must be {tuple(policy_logits.shape[:-1])}, got {tuple(mask.shape)}")
        named["mask"] = mask
    _checks.check_devices(named)
    dtype = torch.promote_types(torch.promote_types(policy_logits.dtype, behavior_logits.dtype), torch.float32)
    policy, behavior = policy_logits.to(dtype), behavior_logits.to(dtype)
    if mask is not None:
        policy, behavior = (torch.where(mask[..., None], logits, 0.0) for logits in (policy, behavior))
    policy, behavior = policy.log_softmax(-1), behavior.log_softmax(-1)
    support = policy > -torch.inf
    # select before the product: 0 * (-inf - -inf) is NaN
    difference = torch.where(support, policy, 0.0) - torch.where(support, behavior, 0.0)
    return (torch.where(support, policy, -torch.inf).exp() * difference).sum(-1)
