"""Samples to packed micro-batches, and per-token values of a micro-batch back to samples.

Everything is laid out for the whole micro-batch first, labels shifted inside each sequence, and then one index picks
what the rank holds: a label is right even where the next token lies on another rank.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p3o_train.kept_rows import kept_rows
from p3o_train.layout import local_offsets, offsets, owned_positions
from p3o_train.types import ContextLayout, PackedBatch, Sample, check_equal_lengths


def pack(
    samples: Sequence[Sample],
    advantages: Tensor | Sequence[float],
    layout: ContextLayout | None = None,
    pad_token_id: int = 0,
) -> PackedBatch:
    """One micro-batch, as ``layout.cp_rank`` sees it.

    Args:
        samples: in packed order; a response may be empty. Without samples use ``dummy_batch``.
        advantages: one number per sample.
        layout: the rank; None is a rank that shares with no other.
        pad_token_id: fills padding, and labels without a next token.

    Raises:
        ValueError: no samples; as many advantages as samples are needed; an advantage that is not finite at a sample
            with valid tokens; kept tokens recorded for some samples only.
    """
    layout = ContextLayout() if layout is None else layout
    if not samples:
        raise ValueError("samples is empty; a micro-batch without samples is dummy_batch(layout)")
    values = _advantage_vector(samples, advantages)
    total_lengths = tuple(sample.token_ids.numel() for sample in samples)
    padded = [layout.padded_length(length) for length in total_lengths]
    owned = owned_positions(padded, layout)
    columns = [_columns(sample, length, pad_token_id) for sample, length in zip(samples, padded, strict=True)]
    tokens, labels, position_ids, mask, log_probs, versions = (
        torch.cat(parts)[owned] for parts in zip(*columns, strict=True)
    )
    kept = kept_rows(samples, padded)
    return PackedBatch(
        tokens=tokens,
        labels=labels,
        position_ids=position_ids,
        mask=mask,
        behavior_log_probs=log_probs,
        advantages=values,
        local_cu_seqlens=local_offsets(padded, layout),
        cu_seqlens=offsets(padded),
        cu_seqlens_unpadded=offsets(total_lengths),
        max_seqlen=max(padded),
        num_tokens=int(mask.sum()),
        total_lengths=total_lengths,
        response_lengths=tuple(sample.response_length for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples),
        layout=layout,
        weight_versions=versions,
        kept_token_ids=None if kept is None else kept[owned],
        is_dummy=all(sample.is_dummy for sample in samples),
    )


def _advantage_vector(samples: Sequence[Sample], advantages: Tensor | Sequence[float]) -> Tensor:
    values = torch.as_tensor(advantages, dtype=torch.float32, device="cpu").detach()
    if values.shape != (len(samples),):
        raise ValueError(f"advantages must be ({len(samples)},), one per sample; got {tuple(values.shape)}")
    for sample, value in zip(samples, values.tolist(), strict=True):
        if not math.isfinite(value) and sample.valid_mask.any():
            raise ValueError(f"sample {sample.sample_id!r}: its advantage must be finite, got {value}; check rewards")
    return values


def _columns(sample: Sample, padded_length: int, pad_token_id: int) -> tuple[Tensor, ...]:
    """Tokens, labels, position ids, mask, behavior log-probs and weight versions of one whole padded sequence."""
    length = sample.token_ids.numel()
    tokens = torch.full((padded_length,), pad_token_id)
    tokens[:length] = sample.token_ids
    labels = torch.full((padded_length,), pad_token_id)
    labels[: length - 1] = sample.token_ids[1:]
    position_ids = torch.arange(padded_length).clamp(max=length - 1)
    rows = slice(length - sample.response_length - 1, length - 1)
    valid = sample.valid_mask
    mask = torch.zeros(padded_length, dtype=torch.bool)
    mask[rows] = valid
    log_probs = torch.zeros(padded_length)
    log_probs[rows] = torch.where(valid, sample.behavior_log_probs, 0.0)
    versions = torch.zeros(padded_length, dtype=torch.int64)
    versions[rows] = torch.where(valid, sample.weight_versions, 0)
    return tokens, labels, position_ids, mask, log_probs, versions


def dummy_batch(layout: ContextLayout | None = None, pad_token_id: int = 0) -> PackedBatch:
    """A micro-batch of one padding token: it runs through a model and adds exact zeros to every sum."""
    nothing = torch.zeros(0)
    sample = Sample("dummy", torch.tensor([pad_token_id]), 0, nothing, nothing.bool(), is_dummy=True)
    return pack([sample], [0.0], layout, pad_token_id)


def pack_step(
    samples: Sequence[Sample],
    advantages: Tensor | Sequence[float],
    micro_batches: Sequence[Sequence[int]],
    layout: ContextLayout | None = None,
    pad_token_id: int = 0,
) -> list[PackedBatch]:
    """The micro-batches of one optimizer step on one rank.

    Args:
        micro_batches: indices into ``samples``, as ``plan_micro_batches`` deals them to this data-parallel rank; an
            empty one becomes a dummy.

    Raises:
        ValueError: as ``pack``; one advantage per sample is needed.
    """
    values = _advantage_vector(samples, advantages)
    return [
        pack([samples[index] for index in indices], values[list(indices)], layout, pad_token_id)
        if indices
        else dummy_batch(layout, pad_token_id)
        for indices in micro_batches
    ]


def pack_responses(values: Sequence[Tensor], batch: PackedBatch) -> Tensor:
    """[T]: one value per response token of every sample, laid out like ``batch.labels``; 0 everywhere else.

    Args:
        values: [R] of every sample of ``batch``, one dtype and device: reference log-probs, token advantages.

    Raises:
        ValueError: not one tensor per sample, or not one value per response token.
    """
    check_equal_lengths({"sample_ids": batch.sample_ids, "values": values})
    padded = _padded_lengths(batch)
    whole = values[0].new_zeros(sum(padded))
    for value, rows, name in zip(values, _response_rows(batch, padded), batch.sample_ids, strict=True):
        if value.shape != (rows.stop - rows.start,):
            raise ValueError(
                f"sample {name!r}: values has shape {tuple(value.shape)}, but response_length is "
                f"{rows.stop - rows.start}"
            )
        whole[rows] = value
    return whole[owned_positions(padded, batch.layout).to(whole.device)]


def unpack_responses(shards: Sequence[Tensor], batch: PackedBatch) -> list[Tensor]:
    """Per-token values of all context-parallel ranks, back in the order of each response.

    Args:
        shards: [T] of every rank in the order of the ranks, as an all-gather over the context-parallel group
            returns it; ``[values]`` where the rank shares with no other.
        batch: the micro-batch of any of these ranks.

    Returns:
        [R] for every sample, on the device of the shards.

    Raises:
        ValueError: not one shard per rank, or a shard that is not [T].
    """
    layout, padded = batch.layout, _padded_lengths(batch)
    shapes = [tuple(shard.shape) for shard in shards]
    if shapes != [tuple(batch.tokens.shape)] * layout.cp_size:
        raise ValueError(
            f"shards must be {layout.cp_size} tensors of shape {tuple(batch.tokens.shape)}, one per context-parallel "
            f"rank; got {shapes}"
        )
    whole = shards[0].new_empty(sum(padded))
    for rank, shard in enumerate(shards):
        owned = owned_positions(padded, dataclasses.replace(layout, cp_rank=rank))
        whole[owned.to(whole.device)] = shard
    return [whole[rows] for rows in _response_rows(batch, padded)]


def _padded_lengths(batch: PackedBatch) -> list[int]:
    return [batch.layout.padded_length(length) for length in batch.total_lengths]


def _response_rows(batch: PackedBatch, padded_lengths: Sequence[int]) -> list[slice]:
    """Rows of the whole micro-batch that predict each response. Counted from the front: [-0:] would be everything."""
    rows, begin = [], 0
    for total, response, padded in zip(batch.total_lengths, batch.response_lengths, padded_lengths, strict=True):
        rows.append(slice(begin + total - response - 1, begin + total - 1))
        begin += padded
    return rows
