"""Rollouts: responses of the current policy with the log-prob of every token, recorded while it is sampled.

``EmbeddedEngine`` samples with the trainer's own model, on its parallel groups. It has no cache of keys and values:
every new token costs a forward pass over the whole sequences, which suits small models and tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from p3o_train.batching import token_budget_batches
from p3o_train.layout import owned_positions
from p3o_train.packing import pack
from p3o_train.parallel import ParallelGroups, copy_from_last_stage, join_vocabulary, sum_over_context
from p3o_train.replay import MicroBatches
from p3o_train.schedule import run_schedule
from p3o_train.types import ContextLayout, PackedBatch, Sample


class Response(NamedTuple):
    """What was sampled for one prompt."""

    token_ids: list[int]
    """With the end token, where there is one."""
    log_probs: list[float]
    """Of each token under the distribution that it was sampled from: float32, after the temperature."""


class RolloutEngine(Protocol):
    """Samples one response for each prompt."""

    def generate(self, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> list[Response]: ...


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled: from the whole distribution, softmax(z / temperature)."""

    max_response_len: int
    """Tokens of a response at most, the end token included."""
    end_token_id: int
    temperature: float = 1.0
    max_tokens: int = 16384
    """Tokens of one forward pass at most, on one rank."""


class EmbeddedEngine:
    """Samples with the trainer's model. All ranks of a model-parallel group call together and get the same."""

    def __init__(self, model: Sequence[Any], groups: ParallelGroups, layout: ContextLayout, sampling: Sampling) -> None:
        self._model, self._groups, self._layout, self._sampling = model, groups, layout, sampling
        self._device = next(model[0].parameters()).device

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> list[Response]:
        """One response for each prompt, by inverting the cumulative distribution at the given numbers.

        Args:
            prompts: token ids, at least one each.
            uniforms: [prompts, max_response_len] float64 in [0, 1); the same on all ranks of the group.

        Raises:
            ValueError: ``uniforms`` of another shape.
        """
        expected = (len(prompts), self._sampling.max_response_len)
        if tuple(uniforms.shape) != expected:
            raise ValueError(
                f"uniforms must be {expected}, one for each token that may be sampled; got {tuple(uniforms.shape)}"
            )
        responses = [Response([], []) for _ in prompts]
        open_ones = list(range(len(prompts)))
        for position in range(self._sampling.max_response_len):
            if not open_ones:
                break
            sequences = [[*prompts[index], *responses[index].token_ids] for index in open_ones]
            chosen, log_probs = self._next_tokens(sequences, uniforms[open_ones, position])
            for index, token, log_prob in zip(open_ones, chosen, log_probs, strict=True):
                responses[index].token_ids.append(token)
                responses[index].log_probs.append(log_prob)
            end = self._sampling.end_token_id
            open_ones = [index for index, token in zip(open_ones, chosen, strict=True) if token != end]
        return responses

    def _next_tokens(self, sequences: list[list[int]], uniforms: Tensor) -> tuple[list[int], list[float]]:
        """The next token of each sequence and its log-prob, the same on all ranks of the group."""
        costs = [self._layout.padded_length(len(sequence)) // self._layout.cp_size for sequence in sequences]
        plan = token_budget_batches(costs, self._sampling.max_tokens)
        samples = [_unanswered(sequence) for sequence in sequences]
        batches = [
            pack([samples[index] for index in part], [0.0] * len(part), self._layout).to(self._device) for part in plan
        ]
        made: list[Tensor] = []

        def sample(rows: Tensor, batch: PackedBatch, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
            logits = self._last_logits(rows, batch)
            drawn = uniforms[plan[len(made)]].to(rows.device)
            made.append(draw(logits / self._sampling.temperature, drawn))
            return rows.new_zeros(()), {}

        run_schedule(self._model, MicroBatches(batches), sample)
        results = torch.cat(made) if made else torch.empty(len(sequences), 2, dtype=torch.float64, device=self._device)
        results = copy_from_last_stage(results, self._groups).cpu()
        order = torch.tensor([index for part in plan for index in part]).argsort()
        tokens, log_probs = results[order].unbind(1)
        return tokens.long().tolist(), log_probs.float().tolist()

    def _last_logits(self, rows: Tensor, batch: PackedBatch) -> Tensor:
        """[B, V] float64 of the last token of each sequence; each lies on one context-parallel rank."""
        padded = [batch.layout.padded_length(length) for length in batch.total_lengths]
        begins = batch.cu_seqlens.tolist()
        last = torch.tensor([begin + total - 1 for begin, total in zip(begins, batch.total_lengths, strict=False)])
        owned = owned_positions(padded, batch.layout)
        place = torch.searchsorted(owned, last).clamp(max=max(len(owned) - 1, 0))
        here = (owned[place] == last).to(rows.device)
        logits = torch.where(here[:, None], rows[place.to(rows.device)], 0.0).float()
        return sum_over_context(join_vocabulary(logits, self._groups), self._groups).double()


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """[n, 2] float64: for each row of [n, V] logits the entry where its cumulative distribution passes the uniform
    number, and the log-prob of that entry."""
    log_probs = logits.log_softmax(-1)
    cumulative = log_probs.exp().cumsum(-1)
    # the last sum is 1 but for rounding, and no number may fall behind it
    chosen = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).clamp(
        max=logits.shape[-1] - 1
    )
    return torch.cat([chosen.double(), log_probs.gather(-1, chosen)], -1)


def _unanswered(token_ids: Sequence[int]) -> Sample:
    nothing = torch.zeros(0)
    return Sample("", torch.tensor(token_ids), 0, nothing, nothing.bool())


@torch.no_grad()
def copy_weights(model: Sequence[Any]) -> dict[str, Tensor]:
    """Name -> copy of each parameter of this rank."""
    return {name: parameter.detach().clone() for name, parameter in _parameters(model)}


@contextlib.contextmanager
def swapped_weights(model: Sequence[Any], weights: Mapping[str, Tensor] | None) -> Iterator[None]:
    """While entered, the model has other weights, as ``copy_weights`` returned them; None changes nothing."""
    if weights is None:
        yield
        return
    current = copy_weights(model)
    try:
        _set_weights(model, weights)
        yield
    finally:
        _set_weights(model, current)


@torch.no_grad()
def _set_weights(model: Sequence[Any], weights: Mapping[str, Tensor]) -> None:
    for name, parameter in _parameters(model):
        parameter.copy_(weights[name])


def _parameters(model: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            yield f"{index}.{name}", parameter
