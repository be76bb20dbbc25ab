"""The token-loss step that benchmarks and the speed check run: forward and backward, one micro-batch of T tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.baselines import feynrl_style_loss
from p3o_kernels import ESSContext, p3o_loss

BASELINE = "feynrl_style"
BASELINE_COMPILED = "feynrl_style_compiled"
# lp, blp, A and mask in, g out; the backward pass reads g and writes the gradient
BYTES_PER_TOKEN = 3 * 4 + 1 + 4 + 2 * 4
SCOPES = ("micro_batch", "given_context")


def providers(device: str) -> list[str]:
    """Implementations that run on ``device``, the baseline first."""
    return [BASELINE, "eager", "compiled"] + (["triton"] if device == "cuda" else [])


def make_inputs(num_tokens: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs (a leaf), behavior log-probs, advantages and a bool mask.

    Log-ratios have a standard deviation of 0.3, and a tenth of the tokens is masked.
    """
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(num_tokens, generator=generator)

    log_probs, drift, advantages = -3.0 * torch.rand(num_tokens, generator=generator), 0.3 * normal(), normal()
    mask = (torch.rand(num_tokens, generator=generator) > 0.1).to(device)
    behavior, advantages = (log_probs + drift).to(device), advantages.to(device)
    return log_probs.to(device).requires_grad_(), behavior, advantages, mask


def make_step(provider: str, num_tokens: int, scope: str = "micro_batch", device: str = "cpu") -> Callable[[], None]:
    """A step on the inputs of ``make_inputs``, always the same ones."""
    log_probs, behavior, advantages, mask = make_inputs(num_tokens, device)
    float_mask = mask.float()
    ess = torch.full((), 0.9, dtype=torch.float64, device=device)
    context = None if scope == "micro_batch" else ESSContext(ess, ess, ess, ess, ess)
    eager_loss = torch.compile(feynrl_style_loss) if provider == BASELINE_COMPILED else feynrl_style_loss

    # the gradient goes at the end: freed at the beginning, it would be subtracted from the peak of the step
    def baseline() -> None:
        loss, _ = eager_loss(log_probs, behavior, advantages, float_mask, None if context is None else 0.9)
        loss.backward()
        log_probs.grad = None

    def step() -> None:
        p3o_loss(
            log_probs, behavior, advantages, mask, context=context, validate=False, backend=provider
        ).loss.backward()
        log_probs.grad = None

    return baseline if provider in (BASELINE, BASELINE_COMPILED) else step
