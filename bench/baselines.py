"""What the fused loss is measured against."""

import torch
from torch import Tensor


def feynrl_style_loss(
    log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, ess: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The token loss as published training code computes it: eager, differentiated by autograd.

    Our own writing of the operations, in the order and the number, of the policy loss in the authors' FeynRL
    library: a float mask, ratios gathered by a boolean index for the effective sample size and read back to the
    host, ``clamp`` of the ratio as cap, k3 with autograd's derivative, and eight metrics, each read back with
    ``.item()``. With ``ess`` given, its statistics are skipped. Returns the mean loss and the metrics.
    """
    valid = mask > 0.5
    mask = valid.to(log_probs.dtype)
    count = mask.sum().clamp(min=1.0)
    difference = (log_probs - behavior_log_probs).float()
    log_ratio = torch.where(valid, difference, torch.zeros_like(difference))
    ratio = torch.exp(log_ratio)
    if ess is None:
        ess = _effective_sample_size(ratio, valid)
    difference = log_probs - behavior_log_probs
    kl = difference + torch.exp((-difference).clamp(-10.0, 10.0)) - 1.0
    kl = torch.where(valid, kl, torch.zeros_like(kl))
    kl_sum = (kl * mask).sum()
    weight = torch.clamp(ratio, min=0.0, max=ess)
    score_sum = -(weight.detach() * log_probs * advantages * mask).sum()
    entropy_sum, reference_sum = torch.zeros_like(score_sum), torch.zeros_like(score_sum)
    total = score_sum - 0.0 * entropy_sum + 0.0 * reference_sum + (1.0 - ess) * kl_sum
    with torch.no_grad():
        clipped = (ratio > 1.2) | (ratio < 0.8)
        k3 = log_ratio + torch.exp(-log_ratio) - 1.0
        metrics = {
            "clip_fraction": ((clipped.to(mask.dtype) * mask).sum() / count).item(),
            "approximate_kl": ((k3.to(mask.dtype) * mask).sum() / count).item(),
            "entropy": (-(log_probs * mask).sum() / count).item(),
            "score_loss": (score_sum / count).item(),
            "total_loss": (total / count).item(),
            "reference_kl": (reference_sum / count).item(),
            "behavior_kl": (kl_sum / count).item(),
            "ess": ess,
        }
    return total / count, metrics


def plain_loss(
    log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, ess: float | None = None
) -> Tensor:
    """The token loss and nothing else, as short as autograd lets one write it: no metrics, no read to the host.

    Without a graph break, so ``torch.compile`` takes all of it. ``mask`` is bool; the statistics are float64.
    """
    log_ratio = torch.where(mask, log_probs - behavior_log_probs, 0.0)
    ratio = torch.where(mask, log_ratio.detach().exp(), 0.0)
    count = mask.sum()
    if ess is None:
        wide = ratio.double()
        cap = (wide.sum().square() / (count * (wide.square().sum() + 1e-8))).float()
    else:
        cap = ratio.new_tensor(ess)
    kl = log_ratio + torch.exp((-log_ratio).clamp(-10.0, 10.0)) - 1.0
    loss = -torch.minimum(ratio, cap) * log_probs * advantages + (1.0 - cap) * kl
    return torch.where(mask, loss, 0.0).sum() / count


@torch.no_grad()
def _effective_sample_size(ratio: Tensor, valid: Tensor) -> float:
    kept = ratio.detach()[valid]
    count = torch.tensor(float(kept.numel()), dtype=torch.float64, device=ratio.device)
    sums = torch.stack([kept.sum().double(), kept.pow(2).sum().double(), count])
    sum_ratio, sum_ratio_sq, num_tokens = sums.tolist()
    return sum_ratio * sum_ratio / (sum_ratio_sq + 1e-8) / num_tokens
