"""Replace an eager P3O loss by one call; both give the same loss and the same gradient.

python examples/drop_in.py
"""

import torch
from torch import Tensor

from p3o_kernels import p3o_loss


def eager_p3o_loss(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The loss as it is written in plain PyTorch: a dozen tensors of the size of the batch per call."""
    log_ratio = (log_probs - behavior_log_probs).masked_fill(~mask, 0.0)
    ratio = log_ratio.detach().exp()
    count = mask.sum()
    sum_ratio, sum_squares = (ratio * mask).sum(), (ratio.square() * mask).sum()
    ess = (sum_ratio.square() / (count * (sum_squares + 1e-8))).clamp(0, 1)
    inverse = (-log_ratio.detach()).clamp(-10, 10).exp()
    kl_value = log_ratio.detach() + inverse - 1
    kl = kl_value + (1 - inverse) * (log_ratio - log_ratio.detach())  # its gradient stays 1 - inverse everywhere
    per_token = -torch.minimum(ratio, ess) * advantages * log_probs + (1 - ess) * kl
    return (per_token * mask).sum() / count


def main() -> None:
    """Compare the two on random tokens whose policies differ."""
    torch.manual_seed(0)
    behavior, advantages = -torch.rand(8, 512) * 4, torch.randn(8, 512)
    log_probs = (behavior + 0.3 * torch.randn(8, 512)).clamp(max=0.0)
    mask = torch.rand(8, 512) < 0.9

    before, after = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    eager = eager_p3o_loss(before, behavior, advantages, mask)
    fused = p3o_loss(after, behavior, advantages, mask).loss  # the one line to change
    eager.backward()
    fused.backward()
    difference = (before.grad - after.grad).abs().max().item()
    print(f"eager {eager.item():.7f}   fused {fused.item():.7f}   max gradient difference {difference:.1e}")


if __name__ == "__main__":
    main()
