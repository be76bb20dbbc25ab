"""What happens once per call after the sums: e, the summary, the loss and its scale, in PyTorch.

The counterpart of ``_finish_kernels`` for the backends without Triton; [] and short vectors only.
"""

import torch
from torch import Tensor

from p3o_kernels._inputs import LossOptions
from p3o_kernels._summary import EPSILON


def mark_overflow(sums: Tensor) -> Tensor:
    """Counts one more invalid when S1 or S2 left the float64 range although every term was finite."""
    overflowed = ~sums[:2].isfinite().all()
    return torch.cat([sums[:3], (sums[3] + overflowed)[None]])


def context(sums: Tensor) -> Tensor:
    """[e, N, mean of rho, standard deviation of rho] from [S1, S2, N, invalid]; e is NaN on invalid data."""
    sum_ratio, sum_ratio_sq, count, invalid = sums.unbind()
    empty = count == 0
    safe = torch.where(empty, 1.0, count)
    ess = (sum_ratio / safe) * (sum_ratio / (sum_ratio_sq + EPSILON))  # this grouping cannot overflow
    ess = torch.where(empty, 1.0, ess.clamp(0.0, 1.0))
    usable = (invalid == 0) & sum_ratio.isfinite() & sum_ratio_sq.isfinite()
    mean = torch.where(empty, 1.0, sum_ratio / safe)
    variance = torch.where(empty, 0.0, sum_ratio_sq / safe - mean.square())
    return torch.stack([torch.where(usable, ess, torch.nan), count, mean, variance.clamp_min(0.0).sqrt()])


def with_context(sums: Tensor) -> Tensor:
    """[4, ...] S1, S2, N, invalid -> [8, ...]: the same, and their ``context``."""
    return torch.cat([sums, context(sums)])


def finish(
    divisor: Tensor | None, options: LossOptions, sums: Tensor, ess: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, scale, summary and count from the [13] sums of ``token_terms``, added over chunks."""
    ratio_part = mark_overflow(sums[:4])
    invalid, count = ratio_part[3], ratio_part[2]
    adaptive = (1.0 - ess) * sums[9]
    total = sums[8] + adaptive + options.reference_coef * sums[10] - options.entropy_coef * sums[11]
    total = torch.where(invalid == 0, total, torch.nan)
    empty = count == 0
    own = [adaptive, total, torch.where(empty, 0.0, ess * count), sums[12], ess]
    moments = context(torch.cat([sums[:3], torch.zeros_like(count)[None]]))[1:]
    summary = torch.cat([ratio_part, sums[4:12], torch.stack(own), moments])
    own_divisor = _divisor(divisor, options, count)
    scale = torch.where(empty, 0.0, 1.0 / torch.where(empty, 1.0, own_divisor))
    loss = torch.where(empty, 0.0, total * scale).float()
    if options.reduction != "none":
        scale = torch.where(invalid == 0, scale, torch.nan)
    return loss, scale, summary, count.long()


def _divisor(divisor: Tensor | None, options: LossOptions, count: Tensor) -> Tensor:
    if options.reduction != "mean":
        return torch.ones_like(count)
    if divisor is not None:
        return divisor
    return torch.full_like(count, options.num_tokens) if options.num_tokens else count
