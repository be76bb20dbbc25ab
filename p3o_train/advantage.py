"""Advantages of whole responses from the rewards of their group.

    A_i = r_i - mean(r of the group)      or      A_i = (r_i - mean) / (std + epsilon)

std divides by n - 1, as torch.std does and as the GRPO implementations of TRL, verl and slime do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from p3o_train.types import Sample


def group_advantages(samples: Sequence[Sample], *, divide_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Group-relative advantages, one per sample.

    Equal rewards give an exact 0 whatever their value, and so does a group of one, which has nothing to be compared
    with. Members of a group need not be neighbours. Dummies belong to no group and get 0.

    Args:
        samples: all samples of every group that occurs: a group cut in two would get two means.
        divide_by_std: True for GRPO; False keeps the scale of the rewards.
        epsilon: added to the standard deviation.

    Returns:
        [n] float32 on the CPU, in the order of ``samples``.

    Raises:
        ValueError: a reward or an advantage that is not finite, naming the sample; an epsilon that is not positive.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}; a group of equal rewards divides by it alone")
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if not sample.is_dummy:
            groups.setdefault(sample.group_id, []).append(index)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    advantages = torch.zeros(len(samples), dtype=torch.float64)
    for indices in groups.values():
        members = rewards[indices]
        _check_finite("reward", members, [samples[index] for index in indices])
        # distances from the first member: where all are equal the differences are exact zeros, unlike r - mean(r)
        distances = members - members[0]
        centered = distances - distances.mean()
        if divide_by_std and len(indices) > 1:
            centered = centered / (centered.std() + epsilon)
        advantages[indices] = centered
    result = advantages.float()
    _check_finite("advantage", result, samples)
    return result


def _check_finite(name: str, values: Tensor, samples: Sequence[Sample]) -> None:
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        sample = samples[bad[0]]
        raise ValueError(
            f"sample {sample.sample_id!r} of group {sample.group_id}: the {name} must be a finite number, got "
            f"{values[bad[0]].item()} ({len(bad)} of {len(samples)} samples); score it again or drop its group"
        )
