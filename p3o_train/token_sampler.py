"""Draws tokens by inverting the cumulative distribution, inside transformers' ``generate``.

The token at position t of a response is where the cumulative distribution, in the order of token ids, passes u_t:

    p_v = softmax(z / temperature)_v                          over the vocabulary, float64               (1)
    q_v = p_v / sum of p over the kept tokens                 0 for the others                           (2)
    token = the first v with q_0 + ... + q_v > u_t            its log-prob is log q_v, or log softmax(z)_v  (3)

    v is kept when it is one of the ``top_k`` most probable tokens, when all more probable ones have together less
    than ``top_p``, and when p_v >= ``min_p`` times the largest p; each condition is on (1) by itself.

u_t comes from the seed of the request alone, and no global random stream is used.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from p3o_train.recording import Recording, Request, Response, Sampling, VersionSpan


class NotFinite(ArithmeticError):
    """Logits that nothing can be sampled from."""


class TokenSampler:
    """A logits processor that draws the next token of each row and leaves no other possible."""

    def __init__(self, requests: Sequence[Request], sampling: Sampling, *, records_raw: bool = False) -> None:
        """``records_raw``: log-probs of softmax(z) are recorded, not of what is sampled from."""
        self.requests, self.sampling, self._records_raw = requests, sampling, records_raw
        # Python's generator: torch's on the CPU takes 32 bits of a seed and drops the rest
        self._streams = [random.Random(request.seed) for request in requests]
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._log_probs: list[list[float]] = [[] for _ in requests]
        self._kept: list[list[tuple[int, ...]]] = [[] for _ in requests]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[n, V] float32 logits to 0 for the token that was drawn and -inf for the others."""
        forced = torch.full_like(scores, -math.inf)
        forced[:, 0] = 0  # of rows that have ended
        rows = [row for row in range(len(self.requests)) if not self._has_stopped(row)]
        logits = scores[rows].double()
        finite = logits.isfinite().all(-1).tolist()
        for row, fine in zip(rows, finite, strict=True):
            if not fine:
                raise NotFinite(
                    f"sample {self.requests[row].sample_id!r}: the logits of response token {len(self._tokens[row])} "
                    "are not finite"
                )
        log_probs, kept = distribution(logits / self.sampling.temperature, self.sampling)
        uniforms = torch.tensor([self._streams[row].random() for row in rows], dtype=torch.float64)
        tokens = invert(log_probs, uniforms.to(scores.device))
        forced[rows, 0] = -math.inf
        forced[rows, tokens] = 0
        recorded = logits.log_softmax(-1) if self._records_raw else log_probs
        chosen = recorded.gather(-1, tokens[:, None])[:, 0].float().tolist()
        for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            self._tokens[row].append(token)
            self._log_probs[row].append(chosen[index])
            if kept is not None:
                self._kept[row].append(tuple(kept[index].nonzero()[:, 0].tolist()))
        return forced

    def _has_stopped(self, row: int) -> bool:
        return bool(self._tokens[row]) and self._tokens[row][-1] in self.sampling.stop_token_ids

    def responses(self, version: int, engine_version: str) -> list[Response]:
        """What was sampled, in the order of the requests."""
        return [self._response(row, version, engine_version) for row in range(len(self.requests))]

    def _response(self, row: int, version: int, engine_version: str) -> Response:
        truncated = self.sampling.is_truncated
        kind = "raw" if self._records_raw else "truncated" if truncated else "scaled"
        recording = Recording(
            engine="local",
            engine_version=engine_version,
            sampling=self.sampling,
            log_prob_kind=kind,
            version_spans=(VersionSpan(version, 0, len(self._tokens[row])),),
            finish_reason="stop" if self._has_stopped(row) else "length",
            kept_token_ids=tuple(self._kept[row]) if truncated else None,
        )
        return Response(self._tokens[row], self._log_probs[row], recording)


def distribution(scaled: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """[n, V] float64 log q of (2), and which tokens are kept; None: all."""
    log_probs = scaled.log_softmax(-1)
    if not sampling.is_truncated:
        return log_probs, None
    # of equally probable tokens the lower id comes first
    ordered, order = log_probs.exp().sort(dim=-1, descending=True, stable=True)
    keep = ordered.cumsum(-1) - ordered < sampling.top_p
    keep &= ordered >= sampling.min_p * ordered[:, :1]
    if sampling.top_k > 0:
        keep[:, sampling.top_k :] = False
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter(-1, order, keep)
    return scaled.masked_fill(~kept, -math.inf).log_softmax(-1), kept


def invert(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """[n] int64, equation (3), for [n, V] float64 log-probs and [n] float64 numbers in [0, 1)."""
    cumulative = log_probs.exp().cumsum(-1)
    # the sum is 1 but for rounding; a number below 1 times it is below it, so that one token always qualifies
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
