"""How a response was sampled and what its log-probs are log-probs of: what an engine records, and a trainer relies on.

Plain values that check nothing beyond their own shape; ``p3o_train.contract`` decides what may be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LOG_PROB_KINDS = ("raw", "scaled", "truncated")
PAUSE_MODES = ("abort", "retract", "in_place")
FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class Sampling:
    """Every knob of one sampling request; the defaults are neutral: softmax(z / temperature) over the vocabulary."""

    max_new_tokens: int
    """Tokens of a response at most, the stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these, which belongs to it."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    """Token id, as text -> what is added to its logit."""
    other: Mapping[str, Any] = field(default_factory=dict)
    """Knobs without a field here, by the engine's name: typical_p, json_schema, custom_logit_processor."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens of the vocabulary could not be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class VersionSpan(NamedTuple):
    """Response tokens [start, end) were sampled by weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Recording:
    """Where the behavior log-probs of one response come from."""

    engine: str
    """"local", "sglang", "vllm": whose semantics the numbers have."""
    engine_version: str
    sampling: Sampling
    log_prob_kind: str
    """"raw": log_softmax(z), whatever the temperature. "scaled": log_softmax(z / temperature), whole vocabulary.
    "truncated": log_softmax(z / temperature) over the kept tokens of each position."""
    version_spans: tuple[VersionSpan, ...]
    """Together every response token once, in order; none for an empty response."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    pause_mode: str | None = None
    """How generation was paused where weights changed inside the response; None where they did not."""
    kept_token_ids: tuple[tuple[int, ...], ...] | None = None
    """For each response token, which tokens could have been sampled; needed for "truncated"."""
    source: str = "output"
    """"output": recorded when the token was sampled. "input": scored later as part of a prompt."""


class Request(NamedTuple):
    """One response to be sampled."""

    sample_id: str
    """Names it in errors."""
    prompt_ids: tuple[int, ...]
    seed: int
    """In [0, 2^63), another one for every response; of engines that take one."""


@dataclass(frozen=True)
class Response:
    """What an engine sampled for one request."""

    token_ids: Sequence[int]
    """With the stop token, where there is one."""
    log_probs: Sequence[float | None]
    """One for each token, float32; None for a token that was not sampled."""
    recording: Recording
