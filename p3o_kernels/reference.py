"""The same operations in plain differentiable PyTorch: the oracle of the tests, in any float dtype.

Written for reading, with autograd for every gradient. Give it float64 tensors and it is the truth
that the fused implementations are measured against; give it float32 and it is eager PyTorch.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from p3o_kernels._summary import EPSILON, EXPONENT_LIMIT, KL_MODES
from p3o_kernels.ess import ESSContext, RatioStats
from p3o_kernels.loss import P3OOutput
from p3o_kernels.metrics import P3OMetrics
from p3o_kernels.p4o import P4OOutput
from p3o_kernels.sequences import SequenceESS, SequenceP3OOutput


def ratio_stats(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None = None) -> RatioStats:
    """S1, S2, N of the valid tokens, and how many of them have no positive finite rho^2."""
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    log_ratio = torch.where(mask, _promote(log_probs) - _promote(behavior_log_probs), 0.0).detach()
    ratio = torch.where(mask, log_ratio.double().exp(), 0.0)
    usable = ratio.square().isfinite() & (ratio.square() > 0)
    return RatioStats(ratio.sum(), ratio.square().sum(), mask.sum().double(), (mask & ~usable).sum().double())


def to_context(stats: RatioStats) -> ESSContext:
    """e = clamp(S1^2 / (N (S2 + 1e-8)), 0, 1), mean and standard deviation of rho; 1, 1 and 0 without tokens."""
    count, mean = stats.num_tokens, stats.sum_ratio / stats.num_tokens
    if count == 0:
        one = torch.ones_like(count)
        return ESSContext(one, one, count, one, torch.zeros_like(count))
    # divided one by one: N S2 overflows before S2 does
    ess = (stats.sum_ratio / count * (stats.sum_ratio / (stats.sum_ratio_sq + EPSILON))).clamp(0.0, 1.0)
    variance = (stats.sum_ratio_sq / count - mean.square()).clamp_min(0.0)
    return ESSContext(ess, ess, count, mean, variance.sqrt())


def k3(log_ratio: Tensor, kl_mode: str = "proxy_safe") -> Tensor:
    """K of each token with the gradient that ``kl_mode`` names.

    proxy:       l + exp(clamp(-l, -10, 10)) - 1, with autograd's derivative of the clamp
    proxy_safe:  the same value, derivative 1 - exp(clamp(-l, -10, 10))
    importance:  rho l - rho + 1 with rho = exp(clamp(l, -10, 10)), derivative rho l
    """
    if kl_mode not in KL_MODES:
        raise ValueError(f"kl_mode must be one of {', '.join(KL_MODES)}; got {kl_mode!r}")
    if kl_mode == "importance":
        ratio = log_ratio.detach().clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
        return _with_slope(ratio * log_ratio.detach() - ratio + 1.0, ratio * log_ratio.detach(), log_ratio)
    inverse = (-log_ratio).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    value = log_ratio + inverse - 1.0
    return value if kl_mode == "proxy" else _with_slope(value.detach(), (1.0 - inverse).detach(), log_ratio)


def p3o_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    context: ESSContext | None = None,
    reduction: str = "mean",
    num_tokens: int | Tensor | None = None,
    kl_mode: str = "proxy_safe",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ref_log_probs: Tensor | None = None,
    ref_kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> P3OOutput:
    """``p3o_kernels.p3o_loss`` in one process; arguments and result as there, the loss in the promoted input dtype.

    Nothing is validated: invalid data gives NaN or inf.
    """
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    if cu_seqlens is not None and advantages.shape == (cu_seqlens.numel() - 1,):
        advantages = torch.repeat_interleave(advantages, cu_seqlens.diff().long())

    def valid(tensor: Tensor | None) -> Tensor:
        return torch.zeros_like(lp) if tensor is None else torch.where(mask, _promote(tensor), 0.0)

    lp = torch.where(mask, _promote(log_probs), 0.0)
    log_ratio = lp - valid(behavior_log_probs).detach()
    stats = ratio_stats(log_probs, behavior_log_probs, mask)
    context = to_context(stats) if context is None else context
    # min in float64: rho overflows float32 at l = 89, where the weight is still the cap
    ratio = log_ratio.detach().double().exp()
    weight = torch.minimum(ratio, context.ess)
    away = (1.0 - context.ess).to(lp.dtype)
    score, kl = -weight.to(lp.dtype) * lp * valid(advantages).detach(), k3(log_ratio, kl_mode)
    reference_kl = torch.zeros_like(lp) if ref_log_probs is None else k3(lp - valid(ref_log_probs).detach())
    optional = ref_kl_coef * reference_kl - entropy_coef * valid(entropy)
    loss = torch.where(mask, score + away * kl + optional, 0.0)
    clipped = (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)
    terms = [log_ratio.abs(), ratio > context.ess, clipped, weight, score, kl, reference_kl, valid(entropy), away * kl]
    sums = [torch.where(mask, term.detach().double(), 0.0).sum() for term in (*terms, loss)]
    last = [context.ess * stats.num_tokens, log_ratio.detach().abs().amax() if lp.numel() else lp.new_zeros(())]
    vector = torch.stack([*stats.as_vector().unbind(), *sums, *(value.double() for value in last)])
    count = mask.sum()
    if reduction == "mean" and count > 0:
        loss = loss.sum() / (count if num_tokens is None else num_tokens)
    elif reduction != "none":
        loss = loss.sum()
    return P3OOutput(loss, count, context, P3OMetrics(vector))


def sequence_ess(
    log_probs: Tensor, behavior_log_probs: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None
) -> SequenceESS:
    """``to_context`` of each sequence by itself."""
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    parts = [slice(start, end) for start, end in itertools.pairwise(cu_seqlens.tolist())]
    contexts = [to_context(ratio_stats(log_probs[part], behavior_log_probs[part], mask[part])) for part in parts]
    rows = [torch.stack([each.ess, each.num_tokens, each.ratio_mean]) for each in contexts]
    return SequenceESS(*torch.stack(rows).unbind(1))


def p3o_loss_per_sequence(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    kl_mode: str = "proxy_safe",
    **options: Any,
) -> SequenceP3OOutput:
    """``p3o_kernels.p3o_loss_per_sequence`` in one process; the loss in the promoted input dtype, nothing validated."""
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    lengths = cu_seqlens.diff().long()
    if advantages.shape == lengths.shape:
        advantages = torch.repeat_interleave(advantages, lengths)
    lp, blp = (torch.where(mask, _promote(tensor), 0.0) for tensor in (log_probs, behavior_log_probs))
    used = sequence_ess(log_probs, behavior_log_probs, cu_seqlens, mask)
    cap = torch.repeat_interleave(used.ess, lengths)
    kl = k3(lp - blp.detach(), kl_mode)
    loss, metrics = _anchored(lp, blp, advantages, mask, cap, 1.0 - cap, (kl, kl), **options)
    return SequenceP3OOutput(loss, mask.sum(), used, metrics)


def p4o_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    proximal_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    context: ESSContext | None = None,
    proximal_context: ESSContext | None = None,
    kl_mode: str = "proxy_safe",
    **options: Any,
) -> P4OOutput:
    """``p3o_kernels.p4o_loss`` in one process; the loss in the promoted input dtype, nothing validated."""
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    if cu_seqlens is not None and advantages.shape == (cu_seqlens.numel() - 1,):
        advantages = torch.repeat_interleave(advantages, cu_seqlens.diff().long())
    lp, *others = (torch.where(mask, _promote(t), 0.0) for t in (log_probs, behavior_log_probs, proximal_log_probs))
    blp, prox = (other.detach() for other in others)
    if context is None or proximal_context is None:
        context, proximal_context = (to_context(ratio_stats(lp, other, mask)) for other in (blp, prox))
    ess = torch.minimum(context.ess, proximal_context.ess)
    weights = [(1.0 - each.ess).to(lp.dtype) for each in (context, proximal_context)]
    away, mixture = 1.0 - ess, blp
    if away <= 1e-6:
        away = torch.zeros_like(ess)
    else:
        both = torch.stack([weights[0].log() + blp, weights[1].log() + prox])
        mixture = both.logsumexp(0) - (weights[0] + weights[1]).log()
    behavior_kl, kl = k3(lp - blp, kl_mode), k3(lp - mixture, kl_mode)
    if kl_mode == "importance":  # of the policy that sampled, whatever the anchor
        ratio = (lp - blp).detach().clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
        kl = _with_slope((ratio * (lp - mixture) - ratio + 1.0).detach(), (ratio * (lp - mixture)).detach(), lp)
    loss, metrics = _anchored(lp, blp, advantages, mask, ess, away, (kl, behavior_kl), **options)
    return P4OOutput(loss, mask.sum(), ess, context, proximal_context, metrics)


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``p3o_kernels.token_log_probs`` in one process, by log_softmax; the result in the promoted input dtype."""
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    vocab = logits.shape[-1]
    # selected before anything is computed: what a masked row holds reaches no gradient
    x = torch.where(mask[:, None], _promote(logits), 0.0)
    if softcap is not None:
        x = torch.where(x == -torch.inf, x, softcap * torch.tanh(x / softcap))
    x = x / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    every = x.log_softmax(-1)
    known = (labels >= 0) & (labels < vocab)
    picked = every.gather(-1, torch.where(known, labels, 0)[:, None].long())[:, 0]
    log_probs = torch.where(mask, torch.where(known, picked, -torch.inf), 0.0)
    if not return_entropy:
        return log_probs
    terms = every.exp() * torch.where(every == -torch.inf, 0.0, every)
    return log_probs, torch.where(mask, -terms.sum(-1), 0.0)


def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """``token_log_probs`` of hidden @ weight^T + bias, all of it held at once."""
    return token_log_probs(torch.nn.functional.linear(hidden, weight, bias), labels, **options)


def p3o_loss_from_logits(
    logits: Tensor,
    labels: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    entropy_coef: float = 0.0,
    **options: Any,
) -> P3OOutput:
    """``p3o_loss`` of ``token_log_probs``; ``options`` are those of ``p3o_loss``."""
    made = token_log_probs(logits, labels, mask=mask, temperature=temperature, softcap=softcap, return_entropy=True)
    log_probs, entropy = made
    wanted = entropy if return_entropy or entropy_coef else None
    return p3o_loss(
        log_probs, behavior_log_probs, advantages, mask, entropy=wanted, entropy_coef=entropy_coef, **options
    )


def p3o_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    **options: Any,
) -> P3OOutput:
    """``p3o_loss_from_logits`` of hidden @ weight^T + bias, all of it held at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return p3o_loss_from_logits(logits, labels, behavior_log_probs, advantages, mask, **options)


def _promote(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _with_slope(value: Tensor, slope: Tensor, log_ratio: Tensor) -> Tensor:
    """``value`` with the gradient ``slope`` with respect to ``log_ratio``."""
    return value + slope * (log_ratio - log_ratio.detach())


def _anchored(
    lp: Tensor,
    blp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cap: Tensor,
    away: Tensor,
    kls: tuple[Tensor, Tensor],
    *,
    reduction: str = "mean",
    num_tokens: int | Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, P3OMetrics]:
    """Loss and metrics of - sg(min(rho, cap)) lp A + away K; ``kls`` are K to the anchor and K to b, lp is masked."""
    log_ratio = (lp - blp).detach()
    ratio = log_ratio.double().exp()
    weight = torch.minimum(ratio, cap)
    score = -weight.to(lp.dtype) * lp * torch.where(mask, _promote(advantages), 0.0).detach()
    pull = away.to(lp.dtype) * kls[0]
    loss = torch.where(mask, score + pull, 0.0)
    clipped = (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)
    none, caps = torch.zeros_like(lp), cap.expand(lp.shape)
    terms = [ratio, ratio.square(), mask, none, log_ratio.abs(), ratio > cap, clipped, weight, score, kls[1]]
    terms += [none, none, pull, loss, caps]
    sums = [torch.where(mask, term.detach().double(), 0.0).sum() for term in terms]
    largest = log_ratio.abs().amax().double() if lp.numel() else lp.new_zeros((), dtype=torch.float64)
    count = mask.sum()
    if reduction == "mean" and count > 0:
        loss = loss.sum() / (count if num_tokens is None else num_tokens)
    elif reduction != "none":
        loss = loss.sum()
    return loss, P3OMetrics(torch.stack([*sums, largest]))
