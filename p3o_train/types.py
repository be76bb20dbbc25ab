"""The values that the training layer passes around: samples, layouts and packed micro-batches.

Letters: L tokens of one sample, R of them response; B sequences of a micro-batch; T tokens of it that one
context-parallel rank holds, padding included. All three classes check themselves when they are made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from p3o_train.recording import Recording

CP_ORDERS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class ContextLayout:
    """Which tokens of a packed micro-batch one rank holds, and what sequences are padded to."""

    cp_size: int = 1
    """Context-parallel ranks that share the micro-batch."""
    cp_rank: int = 0
    """This rank among them."""
    tp_size: int = 1
    """Ranks that cut the tokens once more: the tensor-parallel size with sequence parallelism, otherwise 1."""
    order: str = "zigzag"
    """"zigzag": 2 cp_size chunks of every sequence, rank r holds chunks r and 2 cp_size - 1 - r, which balances
    causal attention. "contiguous": one piece of the whole micro-batch (context parallelism by all-gather)."""

    def __post_init__(self) -> None:
        if self.order not in CP_ORDERS:
            raise ValueError(f"order must be one of {CP_ORDERS}, got {self.order!r}")
        if self.cp_size < 1 or self.tp_size < 1:
            raise ValueError(f"cp_size and tp_size must be >= 1, got {self.cp_size} and {self.tp_size}")
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(f"cp_rank must be in [0, {self.cp_size}), got {self.cp_rank}")

    @property
    def alignment(self) -> int:
        """Every sequence is padded to a multiple of this."""
        chunks = 2 * self.cp_size if self.order == "zigzag" and self.cp_size > 1 else self.cp_size
        return chunks * self.tp_size

    def padded_length(self, length: int) -> int:
        """``length`` rounded up to a multiple of ``alignment``."""
        return -(-length // self.alignment) * self.alignment


@dataclass(frozen=True, eq=False)
class Sample:
    """One prompt with one sampled response. ``Sample.from_lists`` makes one from what an engine returns."""

    sample_id: str
    """Names the sample in errors."""
    token_ids: Tensor
    """[L] int64: prompt, then response. At least one prompt token: the first response token needs a predecessor."""
    response_length: int
    """R, the number of tokens at the end that were sampled; may be 0."""
    behavior_log_probs: Tensor
    """[R] float32: log-probs under the policy that sampled; anything, NaN included, where ``valid_mask`` is False."""
    loss_mask: Tensor
    """[R] bool: False for tokens that the policy did not choose, such as the output of a tool."""
    pairing_mask: Tensor | None = None
    """[R] bool: False where token and log-prob no longer belong together, such as replaced tokens. None: all True."""
    reward: float = 0.0
    """Score of the response; checked where advantages are made of it."""
    group_id: int = 0
    """Samples of one prompt share it: their rewards are compared with each other."""
    recording: Recording | None = None
    """How the response was sampled. None for samples that no engine made; a trainer's contract may need one."""
    is_dummy: bool = False
    """Filler that keeps ranks in step: it has no valid token and belongs to no group."""

    def __post_init__(self) -> None:
        _check_tensor(self, "token_ids", torch.int64, None)
        length = self.token_ids.numel()
        if not 0 <= self.response_length < length:
            raise ValueError(
                f"sample {self.sample_id!r}: response_length must be in [0, {length}), because one of the {length} "
                f"token_ids must be prompt; got {self.response_length}"
            )
        _check_tensor(self, "behavior_log_probs", torch.float32, self.response_length)
        _check_tensor(self, "loss_mask", torch.bool, self.response_length)
        if self.pairing_mask is not None:
            _check_tensor(self, "pairing_mask", torch.bool, self.response_length)
        valid = self.valid_mask
        if self.is_dummy and valid.any():
            raise ValueError(f"sample {self.sample_id!r}: a dummy must have no valid token, got {int(valid.sum())}")
        bad = (valid & ~self.behavior_log_probs.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"sample {self.sample_id!r}: behavior_log_probs must be finite at valid tokens, got "
                f"{self.behavior_log_probs[bad[0]].item()} at response token {bad[0]} ({len(bad)} of "
                f"{self.response_length}); mask these tokens or drop the sample"
            )

    @property
    def valid_mask(self) -> Tensor:
        """[R] bool: ``loss_mask`` and ``pairing_mask``, the tokens that count."""
        return self.loss_mask if self.pairing_mask is None else self.loss_mask & self.pairing_mask

    @property
    def response_ids(self) -> Tensor:
        """[R] int64: counted from the front, since [-0:] would be the whole sequence."""
        return self.token_ids[self.token_ids.numel() - self.response_length :]

    @property
    def weight_versions(self) -> Tensor:
        """[R] int64: version of the weights that sampled each response token; 0 where nothing is recorded."""
        versions = torch.zeros(self.response_length, dtype=torch.int64)
        for version, start, end in self.recording.version_spans if self.recording else ():
            versions[start:end] = version
        return versions

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[int] | Tensor,
        response_length: int,
        behavior_log_probs: Sequence[float | None] | Tensor | None,
        loss_mask: Sequence[int] | Tensor | None = None,
        *,
        pairing_mask: Sequence[int] | Tensor | None = None,
        sample_id: str = "",
        reward: float = 0.0,
        group_id: int = 0,
        recording: Recording | None = None,
    ) -> Sample:
        """A sample from lists, with masks of 0 and 1 or bools. No ``loss_mask``: every response token counts.

        A log-prob of None, as engines return it for a token that was not sampled, is NaN: legal where it is masked.

        Raises:
            ValueError: behavior log-probs that are missing, lengths that differ, a valid token without a finite
                log-prob, a response without a prompt.
        """
        if behavior_log_probs is None:
            raise ValueError(
                f"sample {sample_id!r}: requires behavior log-probs, got None for {response_length} response tokens; "
                "let the rollout engine return the log-prob of every token it samples"
            )
        if not isinstance(behavior_log_probs, Tensor):
            behavior_log_probs = [math.nan if value is None else value for value in behavior_log_probs]
        mask = torch.ones(max(response_length, 0), dtype=torch.bool) if loss_mask is None else loss_mask
        return cls(
            sample_id=sample_id,
            token_ids=torch.as_tensor(token_ids, dtype=torch.int64),
            response_length=response_length,
            behavior_log_probs=torch.as_tensor(behavior_log_probs, dtype=torch.float32),
            loss_mask=torch.as_tensor(mask, dtype=torch.bool),
            pairing_mask=None if pairing_mask is None else torch.as_tensor(pairing_mask, dtype=torch.bool),
            reward=reward,
            group_id=group_id,
            recording=recording,
        )


def _check_tensor(sample: Sample, name: str, dtype: torch.dtype, length: int | None) -> None:
    value = getattr(sample, name)
    if value.dtype != dtype or value.dim() != 1:
        raise ValueError(
            f"sample {sample.sample_id!r}: {name} must be one-dimensional {dtype}, got {tuple(value.shape)} "
            f"{value.dtype}; Sample.from_lists converts"
        )
    if length is not None and value.numel() != length:
        raise ValueError(
            f"sample {sample.sample_id!r}: {name} has length {value.numel()}, but response_length is {length} "
            f"(of {sample.token_ids.numel()} token_ids); one entry per response token is needed"
        )


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch of packed sequences (THD), as one context-parallel rank sees it.

    Row t of the model's output predicts ``labels[t]``: mask, behavior_log_probs and everything else with T entries
    belong to that *next* token.
    """

    tokens: Tensor
    """[T] int64."""
    labels: Tensor
    """[T] int64: the next token of the same sequence; the padding id where there is none."""
    position_ids: Tensor
    """[T] int64: position inside the sequence; padding repeats the last position, so none exceeds the sequence."""
    mask: Tensor
    """[T] bool: the next token is a valid response token."""
    behavior_log_probs: Tensor
    """[T] float32: of the next token; 0 where mask is False."""
    advantages: Tensor
    """[B] float32, one per sequence: looked up with ``local_cu_seqlens``, never expanded to T."""
    local_cu_seqlens: Tensor
    """[B + 1] int32: offsets of the sequences among the T tokens of this rank; what the loss needs."""
    cu_seqlens: Tensor
    """[B + 1] int32: offsets of the whole padded sequences over all context-parallel ranks; what attention needs."""
    cu_seqlens_unpadded: Tensor
    """[B + 1] int32: the same without padding."""
    max_seqlen: int
    """Longest whole padded sequence."""
    num_tokens: int
    """Exact number of valid tokens on this rank: 0 is 0. Their sum over micro-batches and DP x CP ranks counts every
    valid token once."""
    total_lengths: tuple[int, ...]
    """L of every sequence, unpadded."""
    response_lengths: tuple[int, ...]
    """R of every sequence."""
    sample_ids: tuple[str, ...]
    """Names of the samples, in order."""
    layout: ContextLayout
    """How the sequences are padded and which part this rank holds."""
    weight_versions: Tensor
    """[T] int64: of the weights that sampled the next token; 0 where mask is False."""
    kept_token_ids: Tensor | None = None
    """[T, K] int64: which tokens the next one was sampled among, filled up with -1. None: the whole vocabulary."""
    is_dummy: bool = False
    """No sample inside: the batch keeps schedules and collectives in step and must add exact zeros."""

    def __post_init__(self) -> None:
        metadata = ("total_lengths", "response_lengths", "sample_ids")
        sequences = check_equal_lengths({name: getattr(self, name) for name in metadata})
        tokens = sum(map(self.layout.padded_length, self.total_lengths)) // self.layout.cp_size
        expected = dict.fromkeys(("tokens", "labels", "position_ids", "mask", "behavior_log_probs"), tokens)
        expected |= {"weight_versions": tokens}
        expected |= {"advantages": sequences}
        expected |= dict.fromkeys(("local_cu_seqlens", "cu_seqlens", "cu_seqlens_unpadded"), sequences + 1)
        wrong = [
            f"{name} {tuple(getattr(self, name).shape)} instead of ({length},)"
            for name, length in expected.items()
            if getattr(self, name).shape != (length,)
        ]
        if wrong:
            raise ValueError(f"packed batch of samples {self.sample_ids}: {', '.join(wrong)}")
        if self.kept_token_ids is not None and self.kept_token_ids.shape[:-1] != (tokens,):
            shape = tuple(self.kept_token_ids.shape)
            raise ValueError(
                f"packed batch of samples {self.sample_ids}: kept_token_ids {shape} instead of ({tokens}, K)"
            )
        if not 0 <= self.num_tokens <= (0 if self.is_dummy else tokens):
            raise ValueError(f"num_tokens must be a count of {tokens} tokens, 0 in a dummy; got {self.num_tokens}")

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on ``device``."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in tensors.items()}
        return PackedBatch(**fields | moved)


def check_equal_lengths(named: Mapping[str, Sequence[object]]) -> int:
    """The length that per-sample lists share; nothing is cut to the shortest.

    Raises:
        ValueError: lengths that differ, naming every one.
    """
    lengths = {name: len(value) for name, value in named.items()}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{name}={length}" for name, length in lengths.items())
        raise ValueError(f"per-sample metadata lengths must match, one entry per sample; got {text}")
    return next(iter(lengths.values()))
