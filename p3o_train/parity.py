"""P3O's loss, e and gradient beside what other implementations make of the same tokens: ``p3o parity``.

Theirs are restated here in plain PyTorch with autograd, in float32 where they are in float32:

    feynrl   rho^2 in float32, sums in float64, e not clamped and 1 where a sum is not finite; the pull back with
             autograd's derivative of the clamped exponent
    relax    sums of float64 ratios, e clamped to [0, 1]; kl_mode proxy or proxy_safe
    trl      the terms of its GRPO loss set to be P3O's: loss_type cispo with epsilon_high = e, and beta = 1 - e towards
             the behavior policy as reference, without the clamp of the exponent. It has no e of its own

They multiply by the mask where P3O selects, so a NaN that is masked reaches their gradients.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from p3o_kernels import p3o_loss
from p3o_train.advantage import group_advantages
from p3o_train.rollout_files import read_rollout

AGAINST = ("feynrl", "relax", "trl")
KL_MODES = ("proxy_safe", "proxy")
TOLERANCE = 1e-5
"""Relative, of ``run_parity``: float32 sums over thousands of tokens, in another order, differ by less."""

_EPSILON, _EXPONENT_LIMIT = 1e-8, 10.0
_KEYS = ("log_probs", "behavior_log_probs", "advantages", "mask")
_NAME = re.compile(r"rollout_(\d{7,})\.jsonl")


class TokenBatch(NamedTuple):
    """Tokens of any number of responses, all in one shape."""

    log_probs: Tensor
    """float32, under the current policy."""
    behavior_log_probs: Tensor
    """float32, under the policy that sampled."""
    advantages: Tensor
    """float32."""
    mask: Tensor
    """bool: True for tokens that count."""


class Row(NamedTuple):
    """One number of both sides."""

    quantity: str
    """"ess", "loss" (mean over valid tokens) or "gradient" (Euclidean norm of its gradient)."""
    ours: float
    theirs: float
    difference: float
    """Absolute; of gradients the norm of the difference, which equal norms do not hide."""
    relative: float
    """``difference`` over the absolute value of theirs; of the loss over the mean absolute loss of a token, since a
    mean may be near 0 by chance. 0 where there is no difference."""


class _Theirs(NamedTuple):
    ess: float | None
    loss: Tensor


def seeded_batch(tokens: int = 4096, drift: float = 0.5, seed: int = 0) -> TokenBatch:
    """Log-ratios of standard deviation ``drift``, one token in ten masked."""
    generator = torch.Generator().manual_seed(seed)
    noise, drawn, advantages = (torch.randn(tokens, generator=generator) for _ in range(3))
    behavior = -drawn.abs() - 0.1
    mask = torch.rand(tokens, generator=generator) < 0.9
    return TokenBatch(behavior + drift * noise, behavior, advantages, mask)


def load_batch(path: str | os.PathLike[str], drift: float = 0.5, seed: int = 0) -> TokenBatch:
    """A dumped batch, or a rollout of this package.

    Args:
        path: a .pt file with a dict of log_probs, behavior_log_probs, advantages, mask, in one shape; or
            rollout_0000012.jsonl, which holds no log-probs of a later policy: these are the recorded ones, moved by
            noise of standard deviation ``drift``, and advantages are relative to the group.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, a missing key, shapes that differ.
    """
    file = Path(path)
    if match := _NAME.fullmatch(file.name):
        return _from_rollout(file, int(match[1]), drift, seed)
    if file.suffix != ".pt":
        raise ValueError(f"--batch must be a .pt file or rollout_<id>.jsonl, got {file.name!r}")
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    missing = [name for name in _KEYS if not isinstance(loaded, dict) or not isinstance(loaded.get(name), Tensor)]
    if missing:
        raise ValueError(f"{file} must hold a dict with the tensors {', '.join(_KEYS)}; {', '.join(missing)} missing")
    log_probs, behavior, advantages = (loaded[name].float() for name in _KEYS[:3])
    batch = TokenBatch(log_probs, behavior, advantages, loaded["mask"] > 0.5)
    if len({tensor.shape for tensor in batch}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(_KEYS, batch, strict=True))
        raise ValueError(f"{file}: shapes must be equal, got {shapes}")
    return batch


def _from_rollout(file: Path, rollout_id: int, drift: float, seed: int) -> TokenBatch:
    _, samples = read_rollout(file.parent, rollout_id)
    # a masked NaN, as a rollout has it for tokens that were not sampled, would be all that theirs give
    behavior = torch.cat([sample.behavior_log_probs.where(sample.valid_mask, 0.0) for sample in samples])
    lengths = torch.tensor([sample.response_length for sample in samples])
    noise = torch.randn(behavior.numel(), generator=torch.Generator().manual_seed(seed))
    advantages = group_advantages(samples).repeat_interleave(lengths)
    mask = torch.cat([sample.valid_mask for sample in samples])
    return TokenBatch(behavior + drift * noise, behavior, advantages, mask)


def compare(batch: TokenBatch, against: str, *, kl_mode: str = "proxy_safe") -> list[Row]:
    """Both sides of e (not for trl), mean loss and gradient with respect to the log-probs.

    Args:
        against: one of ``AGAINST``.
        kl_mode: of ours, and of relax, which knows both; the derivative of the others is that of "proxy".

    Raises:
        ValueError: an unknown name; invalid data, which ours refuses.
    """
    for name, value, choices in (("against", against, AGAINST), ("kl_mode", kl_mode, KL_MODES)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    ours_at, theirs_at = (batch.log_probs.detach().clone().requires_grad_() for _ in range(2))
    count = batch.mask.sum().clamp_min(1)
    made = p3o_loss(ours_at, *batch[1:], kl_mode=kl_mode, reduction="none")
    their_batch = batch._replace(log_probs=theirs_at)
    if against == "feynrl":
        theirs = _feynrl(their_batch)
    elif against == "relax":
        theirs = _relax(their_batch, kl_mode)
    else:
        theirs = _trl(their_batch, made.context.ess)
    rows = [] if theirs.ess is None else [_row("ess", made.context.ess.item(), theirs.ess)]
    ours, their_loss = made.loss.double().sum() / count, theirs.loss / count
    size = made.loss.detach().double().abs().sum().item() / count.item()
    rows.append(_row("loss", ours.item(), their_loss.item(), scale=size))
    ours_gradient = torch.autograd.grad(ours, ours_at)[0].double()
    their_gradient = torch.autograd.grad(their_loss, theirs_at)[0].double()
    apart = (ours_gradient - their_gradient).norm().item()
    return [*rows, _row("gradient", ours_gradient.norm().item(), their_gradient.norm().item(), apart)]


def _row(quantity: str, ours: float, theirs: float, difference: float | None = None, scale: float | None = None) -> Row:
    difference = abs(ours - theirs) if difference is None else difference
    scale = abs(theirs) if scale is None else scale
    return Row(
        quantity, ours, theirs, difference, 0.0 if difference == 0 else difference / scale if scale else math.inf
    )


def _feynrl(batch: TokenBatch) -> _Theirs:
    log_probs, behavior, advantages, mask = batch
    weight_of = mask.to(log_probs.dtype)
    ratio = torch.where(mask, log_probs - behavior, 0.0).exp()
    kept = ratio.detach()[mask]
    sums = kept.sum().double(), kept.pow(2).sum().double()
    first, second = (value.item() for value in sums)
    finite = math.isfinite(first) and math.isfinite(second) and kept.numel() > 0
    ess = first * first / (second + _EPSILON) / kept.numel() if finite else 1.0
    weight = ratio.detach().clamp(min=0, max=ess)
    score = -(weight * log_probs * advantages * weight_of).sum()
    pull = (_clamped_kl(log_probs - behavior, mask) * weight_of).sum()
    return _Theirs(ess, score + (1 - ess) * pull)


def _clamped_kl(log_ratio: Tensor, mask: Tensor) -> Tensor:
    value = log_ratio + (-log_ratio).clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT).exp() - 1.0
    return torch.where(mask, value, 0.0)


def _relax(batch: TokenBatch, kl_mode: str) -> _Theirs:
    log_probs, behavior, advantages, mask = batch
    weight_of = mask.to(log_probs.dtype)
    log_ratio = torch.where(mask, log_probs - behavior, 0.0)
    ratio = torch.where(mask, log_ratio.detach().double().exp(), 0.0)
    tokens = mask.sum().double()
    ess = (ratio.sum().square() / (tokens * (ratio.square().sum() + _EPSILON))).clamp(0.0, 1.0)
    cap = ess.to(log_probs.dtype)
    score = -torch.minimum(log_ratio.detach().exp(), cap) * log_probs * advantages
    kl = _clamped_kl(log_ratio, mask)
    if kl_mode == "proxy_safe":
        slope = 1.0 - (-log_ratio.detach()).clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT).exp()
        kl = kl.detach() + slope * (log_ratio - log_ratio.detach())
    return _Theirs(ess.item(), ((score + (1.0 - cap) * kl) * weight_of).sum())


def _trl(batch: TokenBatch, ess: Tensor) -> _Theirs:
    log_probs, behavior, advantages, mask = batch
    high, beta = ess.item(), 1.0 - ess.item()
    ratio = (log_probs - behavior).exp()
    score = -ratio.clamp(max=high).detach() * advantages * log_probs
    apart = behavior - log_probs
    kl = apart.exp() - apart - 1.0
    return _Theirs(None, ((score + beta * kl) * mask.to(log_probs.dtype)).sum())


def table(rows: list[Row], against: str) -> str:
    """A line for each row."""
    lines = [f"{'':<10}{'p3o':>16}{against:>16}{'difference':>13}{'relative':>11}"]
    lines += [f"{q:<10}{ours:>16.9g}{theirs:>16.9g}{apart:>13.2e}{rel:>11.1e}" for q, ours, theirs, apart, rel in rows]
    return "\n".join(lines)


def add_parity_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of ``p3o parity`` to ``parser``, which is returned."""
    parser.add_argument("--against", choices=AGAINST, required=True, help="Whose P3O (of trl: whose terms).")
    parser.add_argument(
        "--batch",
        help="A .pt file with a dict of log_probs, behavior_log_probs, advantages, mask, or rollout_<id>.jsonl of a "
        "run; without it a seeded batch.",
    )
    parser.add_argument("--tokens", type=int, default=4096, help="Of the seeded batch.")
    parser.add_argument("--seed", type=int, default=0, help="Of the seeded batch, and of the drift of a rollout.")
    parser.add_argument("--drift", type=float, default=0.5, help="Standard deviation of the log-ratios; not of a .pt.")
    parser.add_argument("--p3o-kl-mode", choices=KL_MODES, default=KL_MODES[0], help="Gradient of the pull back.")
    return parser


def run_parity(args: argparse.Namespace) -> int:
    """Prints the comparison. 0: equal within ``TOLERANCE``; 1: not; 2: refused, with the reason on stderr."""
    try:
        if args.batch is None:
            batch = seeded_batch(args.tokens, args.drift, args.seed)
        else:
            batch = load_batch(args.batch, args.drift, args.seed)
        rows = compare(batch, args.against, kl_mode=args.p3o_kl_mode)
    except (ValueError, OSError) as error:
        print(f"p3o parity: {error}", file=sys.stderr)
        return 2
    print(f"{int(batch.mask.sum())} valid tokens of {batch.mask.numel()}, kl_mode {args.p3o_kl_mode}")
    print(table(rows, args.against))
    return 0 if all(row.relative <= TOLERANCE for row in rows) else 1
