"""The single rules of the behavior log-prob contract, each for one sample: what is wrong, in words, nothing raised."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from p3o_train.recording import FINISH_REASONS, LOG_PROB_KINDS, PAUSE_MODES, Recording, Sampling
from p3o_train.types import Sample

CONVENTIONS = ("scaled", "mismatch", "raw")
SOURCES = ("output", "input")
MAX_LOG_PROB = 1e-4
"""A log-prob above 0 by less is rounding of a float32 softmax."""
CLAMPED = -1e4
"""Below it stands -inf: engines clamp it to the lowest float of their dtype, -65504 or -3.4e38."""
SHOWN = 5
"""Faults in one message."""

# Of engines that have a knob without a field in ``Sampling``: the value that changes nothing.
_NEUTRAL = {"typical_p": 1, "top_a": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "n": 1}
# These end a response or print it, and leave the distribution of a token alone.
_HARMLESS = frozenset(
    {"stop", "stop_regex", "ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"}
    | {"seed", "sampling_seed", "stream_interval"}
)
_PENALTY = {
    "sglang": "SGLang's log-probs are those after it, and the trainer's logits are without it",
    "vllm": "the tokens are drawn with it, vLLM's raw log-probs and the trainer's logits are without it",
}
_PENALTY_ANYWHERE = "the tokens are drawn with it, and the trainer's logits are without it"


class ContractViolation(ValueError):
    """Behavior log-probs that may not be trained on; the message names the samples, the numbers and the remedy."""


@dataclass(frozen=True)
class Contract:
    """What the behavior log-probs of a training batch must be log-probs of.

    Engines differ, and e depends on it, so the convention is declared and never guessed:

        SGLang      log_softmax(z / temperature) over the whole vocabulary, whatever top_p, top_k and min_p are, after
                    penalties and logit_bias. With SGLANG_RETURN_ORIGINAL_LOGPROB before the temperature: raw. Log-probs
                    of prompt tokens ("input") ignore the temperature.
        vLLM        log_softmax(z), raw, by default; logprobs_mode=processed_logprobs: scaled, and over the kept tokens
                    alone where sampling is truncated.
    """

    convention: str | None
    """"scaled": behavior log-probs of softmax(z / temperature), and the trainer divides its logits by the same number:
    ratio 1 on unchanged weights. "mismatch": the same log-probs, the trainer at 1: importance sampling from another
    temperature. "raw": both at 1, while sampling is not, so that ratios are not those of the sampled distribution.
    None: only at temperature 1, where the three are one."""
    temperature: float
    """What training rollouts are sampled at."""
    vocab_size: int
    placeholder_ids: frozenset[int] = frozenset()
    """Tokens that stand for an image, a sound or a video: legal in a prompt, never in a response that counts."""

    def __post_init__(self) -> None:
        temperature = self.temperature
        real = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
        if not real or not 0 < temperature < math.inf:
            raise ValueError(
                f"temperature must be a finite number > 0, got {temperature!r}; greedy decoding (0) samples nothing "
                "and has no behavior log-probs: set --rollout-temperature 1.0"
            )
        if self.convention is None and temperature != 1:
            raise ValueError(
                f"convention must be one of {CONVENTIONS} at temperature {temperature}, got None: it decides what a "
                'ratio is; "scaled" has ratio 1 on unchanged weights'
            )
        if self.convention is not None and self.convention not in CONVENTIONS:
            raise ValueError(f"convention must be one of {CONVENTIONS}, or None, got {self.convention!r}")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be >= 1, got {self.vocab_size}")

    @property
    def trainer_temperature(self) -> float:
        """What the trainer divides its logits by."""
        return self.temperature if self.convention == "scaled" else 1.0

    @property
    def log_prob_kind(self) -> str:
        """Of ``Recording``: what an engine must record; "truncated" stands in for "scaled"."""
        return "raw" if self.convention == "raw" else "scaled"

    @property
    def lowest_log_prob(self) -> float:
        """A token below was not drawn from the distribution: all tokens below together have less than e^-20 of it."""
        return min(-30.0, -math.log(self.vocab_size) - 20)

    def accepts(self, kind: str) -> bool:
        """Whether log-probs of this kind fit; at temperature 1 raw and scaled are the same numbers."""
        if self.temperature == 1:
            return kind in LOG_PROB_KINDS
        return kind == "raw" if self.convention == "raw" else kind in ("scaled", "truncated")


def refuse(faults: Iterable[str]) -> None:
    """Raises one error for all faults, if there is one, and shows the first few.

    Raises:
        ContractViolation: there is a fault.
    """
    found = list(faults)
    if found:
        rest = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise ContractViolation(
            f"{len(found)} violation{'s' * (len(found) > 1)} of the behavior log-prob contract:\n"
            + "\n".join(f"  - {text}" for text in found[:SHOWN] + rest)
        )


def truncates(sampling: Sampling, contract: Contract) -> bool:
    """Whether some tokens of the vocabulary could not be sampled; a top_k of the whole vocabulary truncates nothing."""
    return sampling.top_p < 1 or 0 < sampling.top_k < contract.vocab_size or sampling.min_p > 0


def sampling_faults(sampling: Sampling, contract: Contract, engine: str) -> Iterator[str]:
    """Knobs that make the recorded log-prob another than that of the trainer's distribution; truncation aside."""
    if not math.isclose(sampling.temperature, contract.temperature, rel_tol=1e-6):
        yield (
            f"sampling.temperature is {sampling.temperature}, the contract says {contract.temperature}; sample at "
            "that, or declare the contract of these rollouts"
        )
    if not (0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
        yield f"sampling.top_p and min_p must be in (0, 1] and [0, 1], got {sampling.top_p} and {sampling.min_p}"
    why = _PENALTY.get(engine, _PENALTY_ANYWHERE)
    penalties = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0}
    for name, neutral in penalties.items():
        if getattr(sampling, name) != neutral:
            yield f"sampling.{name} is {getattr(sampling, name)}: {why}; set {neutral}"
    if biased := {token: bias for token, bias in sampling.logit_bias.items() if bias != 0}:
        yield f"sampling.logit_bias is {dict(list(biased.items())[:3])}: {why}; leave it out, and mask such tokens"
    for name, value in sampling.other.items():
        neutral_value: Any = _NEUTRAL.get(name)
        if name not in _HARMLESS and value is not None and value is not False and value != neutral_value:
            remedy = "leave it out" if neutral_value is None else f"set {neutral_value}"
            yield (
                f"sampling.other[{name!r}] is {value!r}: nothing says that the recorded log-probs are those of the "
                f"distribution that it samples from; {remedy}"
            )


def recording_faults(recording: Recording, length: int, contract: Contract, weight_version: int) -> Iterator[str]:
    """What is wrong with how a response of ``length`` tokens was sampled, by what the engine says of it."""
    allowed = {"log_prob_kind": LOG_PROB_KINDS, "finish_reason": FINISH_REASONS, "source": SOURCES}
    for name, values in allowed.items():
        if getattr(recording, name) not in values:
            yield f"{name} must be one of {values}, got {getattr(recording, name)!r}; the engine must say which"
    if recording.log_prob_kind in LOG_PROB_KINDS and not contract.accepts(recording.log_prob_kind):
        yield (
            f"log_prob_kind is {recording.log_prob_kind!r} at temperature {contract.temperature}, convention "
            f"{contract.convention!r} needs {contract.log_prob_kind!r}; let the engine return those, or declare "
            "another convention. Dividing log-probs by the temperature does not convert them: only logits scale"
        )
    if recording.source == "input" and contract.temperature != 1:
        yield (
            f"source is 'input' at temperature {contract.temperature}: log-probs scored as part of a prompt ignore the "
            "temperature; use those recorded while sampling ('output')"
        )
    yield from sampling_faults(recording.sampling, contract, recording.engine)
    if truncates(recording.sampling, contract) and recording.log_prob_kind != "truncated":
        sampling = recording.sampling
        yield (
            f"log_prob_kind is {recording.log_prob_kind!r} with top_p {sampling.top_p}, top_k {sampling.top_k}, min_p "
            f"{sampling.min_p}: the token was drawn from the kept tokens alone, which gives it a higher probability; "
            "set top_p 1, top_k -1, min_p 0, or record log-probs over the kept tokens and the tokens (kept_token_ids)"
        )
    yield from _span_faults(recording, length, weight_version)


def _span_faults(recording: Recording, length: int, weight_version: int) -> Iterator[str]:
    spans = recording.version_spans
    shown = f"{[tuple(span) for span in spans[:4]]}{' ...' if len(spans) > 4 else ''} ({len(spans)} in all)"
    ends = [0, *(span.end for span in spans)]
    if ends[-1] != length or any(not span.start == end < span.end for span, end in zip(spans, ends, strict=False)):
        yield (
            f"version_spans must cover tokens [0, {length}) once and in order, got {shown}; record the "
            "version of every token"
        )
    for version, start, end in spans:
        if not 0 <= version <= weight_version:
            yield (
                f"version_spans say version {version} for tokens [{start}, {end}), the trainer has {weight_version}: "
                "an age must be >= 0; give the version that was published to the engine"
            )
    pause = recording.pause_mode
    if pause is not None and pause not in PAUSE_MODES:
        yield f"pause_mode must be None or one of {PAUSE_MODES}, got {pause!r}"
    if pause is None and len(versions := {span.version for span in spans}) > 1:
        yield (
            f"pause_mode is missing, but weights changed inside the response (versions {sorted(versions)}); record it, "
            "since it decides whether log-probs can be computed again"
        )


def kept_faults(recording: Recording, sample: Sample, contract: Contract) -> Iterator[str]:
    """Kept sets against the sampled tokens: one set for each, which holds it, without repetition."""
    kept, kind = recording.kept_token_ids, recording.log_prob_kind
    if kept is None or kind != "truncated":
        if kind == "truncated":
            yield "kept_token_ids are missing for log_prob_kind 'truncated'; record the kept tokens of each position"
        elif kept is not None:
            yield f"kept_token_ids are given with log_prob_kind {kind!r}; log-probs over them are 'truncated'"
        return
    length = sample.response_length
    if len(kept) != length:
        yield (
            f"kept_token_ids has {len(kept)} sets for {length} response tokens ({len(recording.version_spans)} "
            "version_spans); one set for each token is needed. Cut flat ids by R + 1 offsets, the first of them 0"
        )
        return
    # Python's own containers: tensors of this size would be sorted and gathered by threads, at many times the price
    tokens, valid = sample.response_ids.tolist(), sample.valid_mask.tolist()
    missing = [
        place
        for place, (token, ids, counts) in enumerate(zip(tokens, kept, valid, strict=True))
        if counts and token not in ids
    ]
    if missing:
        place = missing[0]
        yield (
            f"kept_token_ids of response token {place} are {kept[place][:4]} ({len(kept[place])}), without the sampled "
            f"token {tokens[place]} ({len(missing)} such of {length}); they belong to another position or response"
        )
    strange = [token for token in {*itertools.chain.from_iterable(kept)} if not 0 <= token < contract.vocab_size]
    if strange:
        yield f"kept_token_ids holds {min(strange)}, ids are in [0, {contract.vocab_size}); check the engine"
    if any(len(set(ids)) < len(ids) for ids in kept):
        yield "kept_token_ids repeats a token in one set, whose mass the trainer would count twice; keep each once"


def token_faults(sample: Sample, contract: Contract) -> Iterator[str]:
    """Ids and log-probs of one sample; log-probs of tokens that do not count may be anything."""
    outside = (sample.token_ids < 0) | (sample.token_ids >= contract.vocab_size)
    yield from _at(
        outside,
        lambda place: (
            f"token_ids[{place}] is {int(sample.token_ids[place])}, ids are in [0, {contract.vocab_size}); "
            "engine and trainer must share a tokenizer"
        ),
    )
    valid, log_probs = sample.valid_mask, sample.behavior_log_probs
    lowest = contract.lowest_log_prob

    def value(place: int) -> str:
        return f"behavior_log_probs of response token {place} is {log_probs[place].item():.6g}"

    yield from _at(
        valid & (log_probs > MAX_LOG_PROB),
        lambda place: f"{value(place)}, above 0 by more than {MAX_LOG_PROB}: no log-prob; check the engine's softmax",
    )
    yield from _at(
        valid & (log_probs < CLAMPED),
        lambda place: (
            f"{value(place)}: -inf in disguise, the engine says that the token could not be sampled; mask "
            "it (pairing_mask) or drop the sample"
        ),
    )
    yield from _at(
        valid & (log_probs < lowest) & (log_probs >= CLAMPED),
        lambda place: (
            f"{value(place)}, below {lowest:.4g}: at {contract.vocab_size} tokens the distribution never "
            "gives that one; check the engine's sampler, and mask the token (pairing_mask) or drop the sample"
        ),
    )
    if contract.placeholder_ids:
        placeholders = torch.tensor(sorted(contract.placeholder_ids))
        yield from _at(
            valid & torch.isin(sample.response_ids, placeholders),
            lambda place: (
                f"response token {place} is the placeholder {int(sample.response_ids[place])}, which stands "
                "for features that a response has not; use p3o_train.turns.replace_placeholders"
            ),
        )


def _at(bad: Tensor, text: Any) -> Iterator[str]:
    """One fault for the first True of a mask, with their number."""
    if bad.any():
        places = bad.nonzero().flatten()
        more = f" ({len(places)} such of {bad.numel()} tokens)" if len(places) > 1 else ""
        yield text(int(places[0])) + more
