"""The kept tokens of truncated sampling, from the recordings of samples to the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from p3o_train.types import Sample


def kept_rows(samples: Sequence[Sample], padded_lengths: Sequence[int]) -> Tensor | None:
    """[sum of padded_lengths, K] int64, filled up with -1: row t has what the token after t was sampled among.

    None where no sample records any.

    Raises:
        ValueError: a sample with valid tokens that records none beside others that do: its log-probs are over another
            set than the trainer's; not one set for each response token.
    """
    kept = {index: _kept_of(sample) for index, sample in enumerate(samples)}
    found = {index: sets for index, sets in kept.items() if sets is not None}
    if not found:
        return None
    width = max((len(ids) for sets in found.values() for ids in sets), default=0)
    rows = torch.full((sum(padded_lengths), width), -1)
    begin = 0
    for index, (sample, padded) in enumerate(zip(samples, padded_lengths, strict=True)):
        if index not in found and sample.valid_mask.any():
            raise ValueError(
                f"sample {sample.sample_id!r}: no kept_token_ids are recorded, but sample "
                f"{samples[min(found)].sample_id!r} of the same micro-batch has some; record them for all samples, or "
                "sample without top-p, top-k and min-p"
            )
        first = begin + sample.token_ids.numel() - sample.response_length - 1
        for place, ids in enumerate(found.get(index, ())):
            rows[first + place, : len(ids)] = torch.tensor(ids)
        begin += padded
    return rows


def _kept_of(sample: Sample) -> tuple[tuple[int, ...], ...] | None:
    sets = sample.recording.kept_token_ids if sample.recording else None
    if sets is not None and len(sets) != sample.response_length:
        raise ValueError(
            f"sample {sample.sample_id!r}: kept_token_ids has {len(sets)} sets, but response_length is "
            f"{sample.response_length}; one set per response token is needed"
        )
    return sets
