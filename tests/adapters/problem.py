"""One small batch and what P3O makes of it as a whole, in float64: what every framework must arrive at.

The model is a table: the logits of a position are its fixed features times one weight, whose gradient is compared.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from p3o_kernels import ESSContext, reference

HIDDEN, VOCABULARY = 6, 11
# gradients are float32 sums over some forty tokens, in another order and divided at another place
RELATIVE = 3e-6


class Response(NamedTuple):
    """One sample; its advantage belongs to every token."""

    tokens: torch.Tensor
    """[L] int64, prompt and response."""
    mask: torch.Tensor
    """[R] bool."""
    behavior: torch.Tensor
    """[R] float32; NaN or 0 where masked."""
    advantage: float
    features: torch.Tensor
    """[L, H] float32."""

    @property
    def first_row(self) -> int:
        """The row that predicts the first response token."""
        return len(self.tokens) - len(self.mask) - 1


LENGTHS = ((9, 6), (12, 7), (5, 2), (16, 11), (7, 3), (10, 8))


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(HIDDEN, VOCABULARY, generator=torch.Generator().manual_seed(4))
    return made.to(dtype).requires_grad_()


def responses(empty: int | None = None, temperature: float = 1.0) -> list[Response]:
    """Six samples, partly masked; that of index ``empty`` has no valid token."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for index, (total, response) in enumerate(LENGTHS):
        tokens = torch.randint(VOCABULARY, (total,), generator=generator)
        features = torch.randn(total, HIDDEN, generator=generator)
        mask = torch.rand(response, generator=generator) < 0.7
        mask[0] = True
        noise = 0.6 * torch.randn(response, generator=generator)
        advantage = torch.randn((), generator=generator).item()
        sample = Response(tokens, mask if index != empty else mask & False, noise, advantage, features)
        behavior = log_probs(sample, weight().detach(), temperature) + noise
        made.append(sample._replace(behavior=behavior.masked_fill(~sample.mask, 0.0)))
    return made


def log_probs(sample: Response, weight: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """[R] in the dtype of ``weight``, differentiable."""
    rows = slice(sample.first_row, len(sample.tokens) - 1)
    every = (sample.features[rows].to(weight.dtype) @ weight / temperature).log_softmax(-1)
    return every.gather(-1, sample.tokens[sample.first_row + 1 :, None])[:, 0]


class Truth(NamedTuple):
    loss: float
    gradient: torch.Tensor
    """[H, V] float64."""
    contexts: list[ESSContext]
    """Of each part."""
    num_tokens: int


def truth(samples: Sequence[Response], parts: Sequence[Sequence[int]] | None = None, temperature: float = 1.0) -> Truth:
    """Mean loss over all valid tokens, each part of samples with its own e; one part is step scope."""
    at = weight(torch.float64)
    count = sum(int(sample.mask.sum()) for sample in samples)
    total, contexts = torch.zeros((), dtype=torch.float64), []
    for part in [range(len(samples))] if parts is None else parts:
        chosen = [samples[index] for index in part]
        advantages = [torch.full_like(sample.behavior, sample.advantage) for sample in chosen]
        made = reference.p3o_loss(
            torch.cat([log_probs(sample, at, temperature) for sample in chosen]),
            torch.cat([sample.behavior for sample in chosen]).double(),
            torch.cat(advantages).double(),
            torch.cat([sample.mask for sample in chosen]),
            reduction="sum",
        )
        total = total + made.loss
        contexts.append(made.context)
    (total / count).backward()
    return Truth(total.item() / count, at.grad, contexts, count)


def check_gradient(gradient: torch.Tensor, expected: Truth) -> None:
    apart = (gradient.double() - expected.gradient).norm() / expected.gradient.norm()
    assert apart < RELATIVE, f"relative distance {apart:.2e}"


def padded(samples: Sequence[Response], weight: torch.Tensor, fill: float = math.nan) -> dict[str, torch.Tensor]:
    """[B, R] log_probs, behavior, advantages and mask of some samples; ``fill`` where there is no token."""
    width = max(len(sample.mask) for sample in samples)

    def rows(pieces: list[torch.Tensor], value: float | bool) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(piece, (0, width - len(piece)), value=value) for piece in pieces])

    return {
        "log_probs": rows([log_probs(sample, weight) for sample in samples], 0.0),
        "behavior": rows([sample.behavior for sample in samples], fill),
        "advantages": rows([torch.full_like(sample.behavior, sample.advantage) for sample in samples], fill),
        "mask": rows([sample.mask for sample in samples], False),
    }
