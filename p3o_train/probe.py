"""Are the recorded log-probs what they are declared to be? Answered from a few tokens that were computed again.

Metadata can be wrong, since a version, a flag or an environment variable of an engine changes what it returns. So the
weights that sampled compute the same tokens again, at the trainer's temperature and at 1, and the numbers decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from p3o_train.contract_rules import ContractViolation
from p3o_train.types import Sample

ENOUGH_TOKENS = 16
"""Pairs of log-probs from which a shift is believed."""
_MUCH_WORSE, _CLEARLY_WRONG = 4.0, 0.1
_NO_SHIFT = "recorded and trained tokens must be the same: check how responses are cut from the engine's output"


class Probe(NamedTuple):
    """How well the recorded log-probs fit what they are declared to be."""

    errors: dict[str, float]
    """Candidate -> mean |recorded - candidate|, nats."""
    is_decisive: bool
    """Whether the others do not fit: not so at temperature 1, where they are one, nor for tokens that are certain."""


class Mismatch(NamedTuple):
    """|recorded - recomputed| over the tokens that count, for ``train_rollout_logprob_abs_diff``; nats."""

    mean: float
    max: float
    num_tokens: int


def probe_temperature(
    recorded: Tensor,
    candidates: Mapping[str, Tensor],
    declared: str,
    *,
    temperature: float,
    tolerance: float = 1e-2,
) -> Probe:
    """Decides which distribution recorded log-probs are of, and refuses another than the declared one.

    Args:
        recorded: [n] of sampled tokens, n > 0, all valid.
        candidates: "raw" -> [n] log-probs of the same tokens with the weights that sampled, logits as they are;
            "scaled" -> logits divided by the temperature; "truncated" -> the same over the kept tokens, if there are.
        declared: the one that ``Recording.log_prob_kind`` names.
        temperature: of the sampling.
        tolerance: mean absolute difference that is taken for rounding: 1e-2 is far above float32 engines (1e-5) and
            below any temperature that matters; a bfloat16 engine with a float32 trainer needs 5e-2.

    Raises:
        ContractViolation: the declared candidate does not fit; the message names the one that does, also log-probs
            that were divided by the temperature, and log-probs over kept tokens.
        ValueError: a declared kind without a candidate, shapes that differ, no tokens.
    """
    if declared not in candidates:
        raise ValueError(f"declared kind {declared!r} is not among the candidates {sorted(candidates)}; compute it")
    for name, values in candidates.items():
        if values.shape != recorded.shape or not recorded.numel():
            raise ValueError(
                f"recorded and {name!r} must have one shape and a token at least, got {tuple(recorded.shape)} and "
                f"{tuple(values.shape)}"
            )
    differences = {name: recorded.double() - values.double() for name, values in candidates.items()}
    errors = {name: float(values.abs().mean()) for name, values in differences.items()}
    fits = [name for name, error in errors.items() if error < tolerance]
    if declared not in fits:
        figures = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
        raise ContractViolation(
            f"log_prob_kind is declared {declared!r}, but the mean |recorded - recomputed| of {recorded.numel()} "
            f"tokens at temperature {temperature} is {figures} (tolerance {tolerance}): "
            + (
                f"they are {fits[0]!r}; declare that, or let the engine return {declared!r}"
                if fits
                else _diagnosis(recorded, candidates, differences, temperature, tolerance)
            )
        )
    return Probe(errors, fits == [declared])


def _diagnosis(
    recorded: Tensor,
    candidates: Mapping[str, Tensor],
    differences: Mapping[str, Tensor],
    temperature: float,
    tolerance: float,
) -> str:
    if "raw" in candidates:
        divided = float((recorded.double() - candidates["raw"].double() / temperature).abs().mean())
        if divided < tolerance:
            return (
                f"they are raw log-probs divided by the temperature (difference {divided:.3g}), which are log-probs of "
                "nothing: only logits can be scaled; let the engine return its own"
            )
    if "scaled" in candidates and float(differences["scaled"].min()) > -tolerance:
        mass = float((-differences["scaled"]).exp().mean())
        return (
            f"they are above 'scaled' everywhere, as over kept tokens with {mass:.3g} of the probability on average; "
            "switch top_p, top_k and min_p off, or record the kept tokens and declare 'truncated'"
        )
    return "none of them fits; check that the weights are those that sampled, and the alignment (check_alignment)"


def best_lag(recorded: Tensor, recomputed: Tensor, max_lag: int = 2, mask: Tensor | None = None) -> int:
    """By how many tokens the recorded log-probs come late: recorded[t + lag] fits recomputed[t] best; 0 is right.

    Args:
        recorded, recomputed: [R] of one response.
        max_lag: -max_lag .. max_lag are tried, each with two pairs of tokens or more.
        mask: [R] bool, where recorded holds something. None: everywhere.
    """
    sums, counts = _lag_errors(recorded, recomputed, max_lag, mask)
    return _lag_of_least(_means(sums, counts, 2))


def check_alignment(samples: Sequence[Sample], recomputed: Sequence[Tensor], max_lag: int = 2) -> None:
    """Refuses responses whose recorded log-probs belong to a neighbour of their token.

    A response with 16 pairs of tokens at every lag is judged alone, shorter ones together, if they have as many. A
    shift is believed only if it fits much better: a quarter of the difference without it, which is above 0.1 nats. So
    weights that have moved since, repetitions and a few tokens raise no alarm.

    Args:
        recomputed: for each sample [R] log-probs of its response tokens, by weights near those that sampled.

    Raises:
        ContractViolation: naming samples, the lag and both differences.
        ValueError: another number of tensors than samples, or a length that is not R.
    """
    if len(samples) != len(recomputed):
        raise ValueError(f"recomputed must have one tensor for each of {len(samples)} samples, got {len(recomputed)}")
    sums = counts = torch.zeros(2 * max_lag + 1, dtype=torch.float64)
    short: list[Sample] = []
    for sample, values in zip(samples, recomputed, strict=True):
        if values.shape != (sample.response_length,):
            raise ValueError(
                f"sample {sample.sample_id!r}: recomputed must have shape ({sample.response_length},), got "
                f"{tuple(values.shape)}"
            )
        own = _lag_errors(sample.behavior_log_probs, values, max_lag, sample.valid_mask)
        if own[1].min() >= ENOUGH_TOKENS:
            _refuse_shift(f"sample {sample.sample_id!r}", *own)
        else:
            sums, counts = sums + own[0], counts + own[1]
            short.append(sample)
    if counts.min() >= ENOUGH_TOKENS:
        _refuse_shift(f"{len(short)} short samples, {short[0].sample_id!r} the first", sums, counts)


def _refuse_shift(whose: str, sums: Tensor, counts: Tensor) -> None:
    errors = _means(sums, counts, ENOUGH_TOKENS)
    lag, now, best = _lag_of_least(errors), float(errors[len(errors) // 2]), float(errors.min())
    if lag and now > _CLEARLY_WRONG and now > _MUCH_WORSE * best:
        raise ContractViolation(
            f"{whose}: behavior_log_probs come {abs(lag)} token{'s' * (abs(lag) > 1)} too "
            f"{'late' if lag > 0 else 'early'}: mean |recorded - recomputed| is {now:.3g} as they are "
            f"and {best:.3g} shifted; {_NO_SHIFT}"
        )


def _lag_errors(recorded: Tensor, recomputed: Tensor, max_lag: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """[2 max_lag + 1] sums of absolute differences for every lag, and numbers of pairs."""
    length = len(recorded)
    present = torch.ones(length, dtype=torch.bool) if mask is None else mask
    sums = torch.zeros(2 * max_lag + 1, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    for index, lag in enumerate(range(-max_lag, max_lag + 1)):
        late, early = slice(max(lag, 0), length + min(lag, 0)), slice(max(-lag, 0), length - max(lag, 0))
        if abs(lag) < length:
            usable = present[late] & recomputed[early].isfinite()
            difference = (recorded[late].double() - recomputed[early].double()).abs()
            sums[index], counts[index] = torch.where(usable, difference, 0.0).sum(), usable.sum()
    return sums, counts


def _means(sums: Tensor, counts: Tensor, enough: int) -> Tensor:
    return torch.where(counts >= enough, sums / counts.clamp(min=1), torch.inf)


def _lag_of_least(errors: Tensor) -> int:
    """The smallest shift among those that fit best: a repetition fits every shift."""
    middle = len(errors) // 2
    return min(range(-middle, middle + 1), key=lambda lag: (float(errors[middle + lag]), abs(lag)))


def mismatch_summary(recorded: Tensor, recomputed: Tensor, mask: Tensor | None = None) -> Mismatch:
    """How far the trainer's log-probs are from the engine's; with unchanged weights only rounding.

    Args:
        recorded, recomputed: one shape.
        mask: bool, same shape; elsewhere there may be anything. None: all tokens count.

    Returns:
        Zeros without a token; NaN or inf where a token that counts has it.

    Raises:
        ValueError: shapes that differ.
    """
    shapes = {tuple(values.shape) for values in (recorded, recomputed, mask) if values is not None}
    if len(shapes) > 1:
        raise ValueError(f"recorded, recomputed and mask must have one shape, got {sorted(shapes)}")
    difference = (recorded.double() - recomputed.double()).abs().flatten()
    if mask is not None:
        difference = difference[mask.flatten()]
    if not len(difference):
        return Mismatch(0.0, 0.0, 0)
    return Mismatch(float(difference.mean()), float(difference.max()), len(difference))
