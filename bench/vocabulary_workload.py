"""The loss from logits or from hidden states that benchmarks and checks run: forward and backward of one micro-batch.

Every provider gets the same tensors, all tokens valid, and leaves gradients in the same leaves. ``p3o`` and ``naive``
compute the same loss; peers (``bench.peers``) compute theirs from the same matrix products and the same vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import feynrl_style_loss
from bench.memory import peak_extra_bytes
from p3o_kernels import ESSContext, p3o_loss_from_hidden, p3o_loss_from_logits

MIB = 2**20
GIVEN_ESS = 0.9
SCOPES = ("given_context", "micro_batch")
NAIVE, NAIVE_COMPILED, GEMMS = "naive", "naive_compiled", "three_gemms"


class Shape(NamedTuple):
    """Sizes of a micro-batch; logits need no H and no workspace."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    workspace_bytes: int

    def __str__(self) -> str:
        return f"T{self.tokens}-H{self.hidden}-V{self.vocab}"

    @property
    def gemm_flops(self) -> int:
        """Of the three matrix products that a loss from hidden states cannot do without."""
        return 6 * self.tokens * self.hidden * self.vocab


SMOKE = Shape(64, 32, 1024, torch.float32, 64 * 1024)
CPU = Shape(2048, 512, 32_768, torch.float32, 32 * MIB)
CUDA = tuple(Shape(8192, 4096, vocab, torch.bfloat16, 512 * MIB) for vocab in (128_256, 151_936))


@dataclass(frozen=True, slots=True)
class Batch:
    """Leaves are (logits,) or (hidden, weight)."""

    leaves: tuple[Tensor, ...]
    labels: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward and backward; returns the loss, if it has one."""

    run: Callable[[], Tensor | None]
    leaves: tuple[Tensor, ...] = ()

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def __call__(self) -> Tensor | None:
        self.clear()
        return self.run()


def trained(loss: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Step:
    """The step of a loss that autograd differentiates in ``leaves``."""

    def run() -> Tensor:
        value = loss()
        value.backward()
        return value.detach()

    return Step(run, leaves)


def peak_bytes(step: Step, device: str) -> int:
    """Peak extra memory, gradients included: without ``clear`` those of the step before would be subtracted."""
    step.clear()
    return peak_extra_bytes(step, device)


def make_batch(shape: Shape, source: str, device: str = "cpu") -> Batch:
    """Logits with a standard deviation of 2; log-ratios with one of 0.3."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    labels = torch.randint(shape.vocab, (shape.tokens,), generator=generator, device=device)
    if source == "logits":
        leaves: tuple[Tensor, ...] = (normal(shape.tokens, shape.vocab, dtype=shape.dtype).mul_(2.0),)
    else:
        hidden = normal(shape.tokens, shape.hidden, dtype=shape.dtype)
        leaves = (hidden, normal(shape.vocab, shape.hidden, dtype=shape.dtype).mul_(2.0 * shape.hidden**-0.5))
    rows = range(0, shape.tokens, 256)
    parts = [naive_log_probs((leaves[0][at : at + 256], *leaves[1:]), labels[at : at + 256]) for at in rows]
    behavior = torch.cat(parts) + 0.3 * normal(shape.tokens)
    for leaf in leaves:
        leaf.requires_grad_()
    mask = torch.ones(shape.tokens, dtype=torch.bool, device=device)
    return Batch(leaves, labels, behavior, normal(shape.tokens), mask, shape.workspace_bytes)


def naive_log_probs(leaves: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Eager autograd: logits in their dtype, log_softmax of a float32 copy."""
    logits = leaves[0] if len(leaves) == 1 else F.linear(*leaves)
    return logits.float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def naive(batch: Batch, scope: str, compiled: bool) -> Step:
    """Compiled: the log-probs, where all of the vocabulary is; the token loss on [T] stays eager."""
    log_probs = torch.compile(naive_log_probs, dynamic=False) if compiled else naive_log_probs
    float_mask = batch.mask.float()
    ess = GIVEN_ESS if scope == "given_context" else None

    def loss() -> Tensor:
        made = log_probs(batch.leaves, batch.labels)
        return feynrl_style_loss(made, batch.behavior_log_probs, batch.advantages, float_mask, ess)[0]

    return trained(loss, batch.leaves)


def p3o(batch: Batch, scope: str, workspace_bytes: int | None = None) -> Step:
    """This project, the backend that "auto" means on the device."""
    ess = torch.full((), GIVEN_ESS, dtype=torch.float64, device=batch.labels.device)
    context = ESSContext(ess, ess, ess, ess, ess) if scope == "given_context" else None
    arguments = (*batch.leaves, batch.labels, batch.behavior_log_probs, batch.advantages, batch.mask)
    if len(batch.leaves) == 1:
        return trained(lambda: p3o_loss_from_logits(*arguments, context=context, validate=False).loss, batch.leaves)
    workspace = workspace_bytes or batch.workspace_bytes

    def loss() -> Tensor:
        return p3o_loss_from_hidden(*arguments, context=context, validate=False, workspace_bytes=workspace).loss

    return trained(loss, batch.leaves)


def three_gemms(batch: Batch) -> Step:
    """X W^T, dz W and dz^T X into memory allocated before: nothing from hidden states can be faster."""
    hidden, weight = (leaf.detach() for leaf in batch.leaves)
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    hidden_grad, weight_grad = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=hidden_grad)
        torch.mm(logits.t(), hidden, out=weight_grad)

    return Step(run)
