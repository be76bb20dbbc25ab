"""How old the weights are that sampled a step's tokens, in rollouts, and what is too old to train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from p3o_train.types import Sample


def mask_stale(samples: Sequence[Sample], rollout_id: int, max_staleness: int) -> list[Sample]:
    """The samples with tokens masked that are older than ``max_staleness`` rollouts; -1 masks none.

    A response that several weight versions sampled keeps what is young enough.
    """
    if max_staleness < 0:
        return list(samples)
    oldest = rollout_id - max_staleness
    return [_masked(sample, oldest) for sample in samples]


def _masked(sample: Sample, oldest: int) -> Sample:
    fresh = sample.weight_versions >= oldest
    if fresh.all():
        return sample
    pairing = fresh if sample.pairing_mask is None else sample.pairing_mask & fresh
    return dataclasses.replace(sample, pairing_mask=pairing)


def sampled_by(samples: Sequence[Sample]) -> list[int]:
    """The weight versions of all valid tokens, oldest first."""
    versions = torch.cat([sample.weight_versions[sample.valid_mask] for sample in samples])
    return sorted(set(versions.tolist()))


def age_row(samples: Sequence[Sample], rollout_id: int, version_ess: dict[int, float], prefix: str) -> dict[str, float]:
    """Mean and largest age of the valid tokens, and e by age where it is known.

    Args:
        rollout_id: of the rollout that is trained on; weights of version v are those from before rollout v was trained
            on.
        version_ess: weight version -> e of its tokens.
    """
    versions = torch.cat([sample.weight_versions[sample.valid_mask] for sample in samples])
    ages = (rollout_id - versions).double()
    found = ages if len(ages) else ages.new_zeros(1)
    row = {f"{prefix}policy_age_mean": found.mean().item(), f"{prefix}policy_age_max": found.max().item()}
    return row | {f"{prefix}ess_age_{rollout_id - version}": ess for version, ess in version_ess.items()}
