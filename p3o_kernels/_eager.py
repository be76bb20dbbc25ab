"""The "eager" backend: the analytic form in chunks of tokens, so that temporaries stay in the cache.

Per-sequence advantages are expanded one chunk at a time, never to [T].
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from p3o_kernels import _eager_terms, _scalars
from p3o_kernels._inputs import LossOptions, TokenInputs, TokenLoss

CPU_CHUNK = 32768
CUDA_CHUNK = 1 << 22  # few launches matter more there than a small working set


def chunks(tensor: Tensor) -> Iterator[slice]:
    """At least one slice, also for T = 0."""
    size = CUDA_CHUNK if tensor.is_cuda else CPU_CHUNK
    for start in range(0, max(tensor.numel(), 1), size):
        yield slice(start, min(start + size, tensor.numel()))


def _part(tensor: Tensor | None, chunk: slice) -> Tensor | None:
    return None if tensor is None else tensor[chunk]


def token_advantages(inputs: TokenInputs, chunk: slice | Tensor) -> Tensor:
    """A of some tokens, given as a slice or an index."""
    if inputs.cu_seqlens is None:
        return inputs.advantages[chunk]
    if isinstance(chunk, slice):
        token = torch.arange(chunk.start, chunk.stop, dtype=torch.int32, device=inputs.cu_seqlens.device)
    else:
        token = chunk.int()
    # the last sequence that starts at or before the token, which skips empty ones
    sequence = torch.searchsorted(inputs.cu_seqlens[1:], token, right=True)
    # the clamp keeps the read inside when cu_seqlens does not end at T, which validate=True reports
    return inputs.advantages[sequence.clamp_max(inputs.advantages.numel() - 1)]


def ratio_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    parts = [
        _eager_terms.ratio_sums(log_probs[chunk], behavior_log_probs[chunk], _part(mask, chunk))
        for chunk in chunks(log_probs)
    ]
    return _scalars.mark_overflow(torch.stack(parts).sum(0))


def token_loss(inputs: TokenInputs, options: LossOptions) -> TokenLoss:
    log_probs = inputs.log_probs
    ess = inputs.ess
    if ess is None:
        ess = _scalars.context(ratio_sums(log_probs, inputs.behavior_log_probs, inputs.mask))[0]
    token_grad = torch.empty_like(log_probs)
    token_values = torch.empty_like(log_probs) if options.reduction == "none" else log_probs.new_empty(0)
    parts = []
    for chunk in chunks(log_probs):
        part = replace(
            inputs,
            log_probs=log_probs[chunk],
            behavior_log_probs=inputs.behavior_log_probs[chunk],
            advantages=token_advantages(inputs, chunk),
            mask=_part(inputs.mask, chunk),
            reference_log_probs=_part(inputs.reference_log_probs, chunk),
            entropy=_part(inputs.entropy, chunk),
        )
        token_grad[chunk], values, sums = _eager_terms.token_terms(part, options, ess)
        if options.reduction == "none":
            token_values[chunk] = values
        parts.append(sums)
    sums = torch.stack(parts)
    sums = torch.cat([sums[:, :-1].sum(0), sums[:, -1].amax()[None]])
    loss, scale, summary, count = _scalars.finish(inputs.divisor, options, sums, ess)
    return TokenLoss(token_values if options.reduction == "none" else loss, token_grad, scale, summary, count)
