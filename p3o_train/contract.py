"""May these rollouts be trained on? Checked once per batch, before anything is computed from it.

    contract = Contract("scaled", temperature=0.6, vocab_size=151936)
    check_sampling(sampling, contract, engine="sglang")         # before requests are sent
    kept, empty, unrecorded = drop_aborts(responses)            # the one thing that is left out, and counted
    check_response(request, response, contract)                 # before a Sample is made of it
    report = check_samples(samples, contract, weight_version=7)
    log(report.to_dict())

Nothing is padded, zeroed or left out here: what is wrong is an error, and whoever wants to go on masks the tokens or
drops the sample, where it can be seen. Evaluation has no contract: it trains nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from p3o_train.contract_rules import (
    CONVENTIONS,
    Contract,
    ContractViolation,
    kept_faults,
    recording_faults,
    refuse,
    sampling_faults,
    token_faults,
    truncates,
)
from p3o_train.recording import Request, Response, Sampling
from p3o_train.types import Sample

__all__ = [
    "CONVENTIONS",
    "Contract",
    "ContractReport",
    "ContractViolation",
    "Kept",
    "check_response",
    "check_samples",
    "check_sampling",
    "drop_aborts",
]

_ALL_ZERO_TOKENS = 8
"""That many probabilities of exactly 1 in a row are no accident of rounding."""
_CLONE_CHANCE = math.log(1e-12)


@dataclass(frozen=True)
class ContractReport:
    """What a batch that passed consists of. Counts are of samples or response tokens; dummies are left out."""

    samples: int
    valid_tokens: int
    masked_tokens: int
    """Response tokens that do not count, by either mask."""
    unpaired_tokens: int
    """Of those, the ones whose log-prob belongs to another token (pairing_mask)."""
    all_masked_samples: int
    """With a response, none of which counts: they add 0 to the token count."""
    empty_samples: int
    aborted_samples: int
    truncated_samples: int
    """The trainer must normalise over their kept tokens."""
    mixed_version_samples: int
    in_place_samples: int
    """Of those, the ones whose later tokens were sampled from a cache of the earlier weights."""
    zero_log_prob_tokens: int
    """Log-probs of exactly 0: of a token that was certain, or appended by hand, or padded."""
    bfloat16_tokens: int
    """Log-probs that are bfloat16 numbers; of float32 numbers one in 2^16 is. All of them: a coarse engine."""
    groups: int
    """With two samples or more."""
    duplicate_groups: int
    """Of those, the ones whose responses are all the same."""
    age_mean: float
    """Weight versions between sampling and now, over valid tokens; 0 without any."""
    age_max: int

    @property
    def recompute_is_wrong(self) -> bool:
        """Whether only the recorded log-probs are those of the policy that sampled: a forward pass with the weights of
        a token has another cache than the engine had."""
        return self.in_place_samples > 0

    def to_dict(self, prefix: str = "rollout/") -> dict[str, float]:
        """Metric name -> number, for a log."""
        named = {name: float(value) for name, value in dataclasses.asdict(self).items()}
        named["recompute_is_wrong"] = float(self.recompute_is_wrong)
        return {prefix + name: value for name, value in named.items()}


class Kept(NamedTuple):
    """What ``drop_aborts`` leaves."""

    indices: list[int]
    """Of the responses that stay, ascending."""
    empty: int
    """Aborted before the first token."""
    unrecorded: int
    """Aborted with tokens, but without any log-prob."""


def check_sampling(sampling: Sampling, contract: Contract, *, engine: str, records_kept_tokens: bool = False) -> None:
    """Refuses settings whose rollouts ``check_samples`` would refuse, before they cost anything.

    Args:
        engine: as in ``Recording``; its semantics are in the message.
        records_kept_tokens: the engine returns log-probs over the kept tokens, and those, so sampling may be truncated.

    Raises:
        ContractViolation: a knob that is not neutral, another temperature than the contract's, truncation.
    """
    faults = list(sampling_faults(sampling, contract, engine))
    if truncates(sampling, contract) and not records_kept_tokens:
        faults.append(
            f"sampling.top_p {sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}: ratios need log-probs "
            "of the untruncated rollout distribution; set top_p 1, top_k -1, min_p 0"
        )
    refuse(faults)


def drop_aborts(responses: Sequence[Response]) -> Kept:
    """Which responses stay: all but those that were aborted and have no token, or no log-prob for any token.

    A group with fewer responses is still a group; one with none has no advantages.
    """
    indices, empty, unrecorded = [], 0, 0
    for index, response in enumerate(responses):
        aborted = response.recording.finish_reason == "abort"
        if aborted and not response.token_ids:
            empty += 1
        elif aborted and all(value is None for value in response.log_probs):
            unrecorded += 1
        else:
            indices.append(index)
    return Kept(indices, empty, unrecorded)


def check_response(
    request: Request, response: Response, contract: Contract, loss_mask: Sequence[int] | None = None
) -> None:
    """Checks what a ``Sample`` could no longer tell: lengths that differ and log-probs that are not numbers.

    Args:
        loss_mask: [R], 0 for tokens that were not sampled, such as the output of a tool; only those may lack a
            log-prob. None: all were sampled.

    Raises:
        ContractViolation: lengths that differ, missing or non-finite log-probs, ids outside the vocabulary.
    """
    refuse(f"sample {request.sample_id!r}: {text}" for text in _response_faults(request, response, contract, loss_mask))


def _response_faults(
    request: Request, response: Response, contract: Contract, loss_mask: Sequence[int] | None
) -> Iterator[str]:
    tokens, log_probs = response.token_ids, response.log_probs
    if len(tokens) != len(log_probs):
        ends = "a stop token belongs to both lists or to neither" if abs(len(tokens) - len(log_probs)) == 1 else ""
        yield (
            f"{len(log_probs)} log-probs for {len(tokens)} response tokens after {len(request.prompt_ids)} of prompt; "
            f"every token needs its own, and none is made up{'; ' if ends else ''}{ends}"
        )
        return
    if loss_mask is not None and len(loss_mask) != len(tokens):
        yield f"loss_mask has {len(loss_mask)} entries for {len(tokens)} response tokens and {len(log_probs)} log-probs"
        return
    counts = [True] * len(tokens) if loss_mask is None else loss_mask
    bad = [
        place
        for place, (value, counted) in enumerate(zip(log_probs, counts, strict=True))
        if counted and (value is None or not math.isfinite(value))
    ]
    if bad:
        yield (
            f"log_probs[{bad[0]}] is {log_probs[bad[0]]} ({len(bad)} such of {len(tokens)} tokens); let the engine "
            "return the log-prob of every token it samples, or mask these tokens"
        )
    for name, ids in (("prompt_ids", request.prompt_ids), ("token_ids", tokens)):
        outside = [place for place, token in enumerate(ids) if not 0 <= token < contract.vocab_size]
        if outside:
            yield (
                f"{name}[{outside[0]}] is {ids[outside[0]]}, ids are in [0, {contract.vocab_size}); engine and trainer "
                "must share a tokenizer"
            )


def check_samples(samples: Sequence[Sample], contract: Contract, *, weight_version: int) -> ContractReport:
    """Checks the samples of one batch and counts what it consists of.

    Args:
        samples: with their recordings; dummies are ignored.
        weight_version: of the trainer's weights now; no token can come from a later one.

    Raises:
        ContractViolation: one for all samples, with the first few violations.
        ValueError: a negative weight_version.

    Of a batch whose every group consists of equal responses, clones of a seed that was not varied are told from a
    converged policy by the recorded probabilities. After the first response, G - 1 others equal it with probability
    p(response)^(G - 1), and the product over the groups is refused below 1e-12, which honest sampling gives with a
    probability of at most 1e-12. "raw" log-probs at a temperature other than 1 are not those of the sampled
    distribution: there, duplicates are only counted.
    """
    if weight_version < 0:
        raise ValueError(f"weight_version must be >= 0, got {weight_version}")
    samples = [sample for sample in samples if not sample.is_dummy]
    groups = _groups(samples)
    duplicates = [group for group in groups if _are_equal(group)]
    faults = [
        f"sample {sample.sample_id!r}: {text}"
        for sample in samples
        for text in _sample_faults(sample, contract, weight_version)
    ]
    refuse([*faults, *_zero_faults(samples), *_clone_faults(groups, duplicates, contract)])
    return _report(samples, weight_version, len(groups), len(duplicates))


def _sample_faults(sample: Sample, contract: Contract, weight_version: int) -> Iterator[str]:
    if sample.recording is None:
        yield "recording is missing, so nothing says what the log-probs are log-probs of; keep that of the response"
    else:
        yield from recording_faults(sample.recording, sample.response_length, contract, weight_version)
        yield from kept_faults(sample.recording, sample, contract)
    yield from token_faults(sample, contract)


def _zero_faults(samples: Sequence[Sample]) -> Iterator[str]:
    """Every log-prob exactly 0, in a response or, where responses are short, in the batch: nothing was recorded."""
    unsure = [sample for sample in samples if sample.valid_mask.any() and not _had_no_choice(sample)]
    zero = [sample for sample in unsure if not (sample.valid_mask & (sample.behavior_log_probs != 0)).any()]
    counts = [int(sample.valid_mask.sum()) for sample in zero]
    shown = [index for index, count in enumerate(counts) if count >= _ALL_ZERO_TOKENS]
    if not shown and len(zero) == len(unsure) and sum(counts) >= _ALL_ZERO_TOKENS:
        shown = [0]
    for index in shown:
        yield (
            f"sample {zero[index].sample_id!r}: behavior_log_probs are exactly 0 at all {counts[index]} valid tokens "
            f"(so are those of {len(zero)} of {len(samples)} samples): none was recorded, as some engines do with "
            "speculative decoding; switch that off, or drop the sample"
        )


def _had_no_choice(sample: Sample) -> bool:
    """Whether one token alone could be sampled at each position, with probability 1."""
    kept = sample.recording.kept_token_ids if sample.recording else None
    return kept is not None and all(len(ids) == 1 for ids in kept)


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    by_id: dict[int, list[Sample]] = {}
    for sample in samples:
        by_id.setdefault(sample.group_id, []).append(sample)
    return [group for group in by_id.values() if len(group) > 1]


def _are_equal(group: Sequence[Sample]) -> bool:
    return all(torch.equal(group[0].response_ids, sample.response_ids) for sample in group[1:])


def _clone_faults(groups: list[list[Sample]], duplicates: list[list[Sample]], contract: Contract) -> Iterator[str]:
    if (
        not groups
        or len(duplicates) < len(groups)
        or not (contract.log_prob_kind == "scaled" or contract.temperature == 1)
    ):
        return
    chance = sum(
        (len(group) - 1) * float(group[0].behavior_log_probs[group[0].valid_mask].double().sum()) for group in groups
    )
    if chance < _CLONE_CHANCE:
        size, sample_id = len(groups[0]), groups[0][0].sample_id
        yield (
            f"sample {sample_id!r}: its group of {size} and all others ({len(groups)} groups) have equal responses, "
            f"which has the log-probability {chance:.4g} by their own log-probs: the engine gave every request of a "
            "group the same random numbers; send another seed with each request"
        )


def _report(samples: Sequence[Sample], weight_version: int, groups: int, duplicate_groups: int) -> ContractReport:
    recordings = [sample.recording for sample in samples if sample.recording is not None]
    mixed = [recording for recording in recordings if len({span.version for span in recording.version_spans}) > 1]
    nothing = torch.zeros(0)
    valid = torch.cat([nothing.bool(), *(sample.valid_mask for sample in samples)])
    unpaired = [~sample.pairing_mask for sample in samples if sample.pairing_mask is not None]
    log_probs = torch.cat([nothing, *(sample.behavior_log_probs for sample in samples)])[valid]
    ages = weight_version - torch.cat([nothing.long(), *(sample.weight_versions for sample in samples)])[valid]
    return ContractReport(
        samples=len(samples),
        valid_tokens=len(log_probs),
        masked_tokens=len(valid) - len(log_probs),
        unpaired_tokens=sum(int(mask.sum()) for mask in unpaired),
        all_masked_samples=sum(bool(sample.response_length) and not sample.valid_mask.any() for sample in samples),
        empty_samples=sum(sample.response_length == 0 for sample in samples),
        aborted_samples=sum(recording.finish_reason == "abort" for recording in recordings),
        truncated_samples=sum(recording.log_prob_kind == "truncated" for recording in recordings),
        mixed_version_samples=len(mixed),
        in_place_samples=sum(recording.pause_mode == "in_place" for recording in mixed),
        zero_log_prob_tokens=int((log_probs == 0).sum()),
        bfloat16_tokens=int((log_probs == log_probs.bfloat16().float()).sum()),
        groups=groups,
        duplicate_groups=duplicate_groups,
        age_mean=float(ages.double().mean()) if len(ages) else 0.0,
        age_max=int(ages.max()) if len(ages) else 0,
    )
