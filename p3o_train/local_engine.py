"""A rollout engine in this process: transformers' ``generate`` with a cache, on weights of its own.

Every token is drawn from the seed of its request alone (``token_sampler``), so a response does not depend on the batch
it is sampled in, but for the last bits of the logits: other shapes add in another order, and a number that close to a
boundary picks the neighbour. No global random stream is used.
"""

from __future__ import annotations

import copy
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from p3o_train.engine import RolloutFailed
from p3o_train.hf_model import check_weights, transformers
from p3o_train.recording import Request, Response, Sampling
from p3o_train.token_sampler import NotFinite, TokenSampler

_NEUTRAL = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias", "other")


class LocalEngine:
    """Samples with a model of transformers; implements ``p3o_train.engine.RolloutEngine``."""

    def __init__(
        self,
        hf_config: Any,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_batch_tokens: int = 16_384,
        records_raw: bool = False,
    ) -> None:
        """Allocates the model; ``update_weights`` fills it.

        Args:
            hf_config: of a Llama, Qwen2 or Qwen3; copied.
            dtype: of weights and activations.
            max_batch_tokens: requests are sampled together up to this many tokens, prompts padded to the longest and
                responses at their full length.
            records_raw: log-probs of softmax(z) are recorded, whatever the temperature is.

        Raises:
            ValueError: ``max_batch_tokens`` below 1.
            ImportError: transformers is not installed.
        """
        if max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens must be at least 1, got {max_batch_tokens}")
        self._model: Any = _empty_model(hf_config, dtype, device)
        self._max_batch_tokens, self._records_raw = max_batch_tokens, records_raw
        self._version: int | None = None
        self._engine_version = importlib.metadata.version("transformers")

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """As ``RolloutEngine.update_weights``; weights are copied and rounded to the engine's dtype.

        Raises:
            ValueError: names that are missing or left over, a wrong shape or dtype, a value that is not finite;
                nothing has changed.
            RuntimeError: the engine is closed.
        """
        parameters = dict(self._open_model().named_parameters())
        check_weights(weights, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
        broken = [name for name in parameters if not weights[name].isfinite().all()]
        if broken:
            raise ValueError(
                f"weights of version {version} must be finite, but {len(broken)} of {len(parameters)} are not, first "
                f"{broken[0]}; look for an optimizer step that diverged"
            )
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        self._version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """As ``RolloutEngine.generate``.

        Raises:
            ValueError: a knob that this engine does not apply or that is out of range; a prompt that is empty, holds
                an id outside the vocabulary, or exceeds ``max_batch_tokens`` with its response.
            RolloutFailed: logits that are not finite.
            RuntimeError: no weights yet, or the engine is closed.
        """
        model = self._open_model()
        if self._version is None:
            raise RuntimeError("the engine has no weights yet: call update_weights() before generate()")
        _check_sampling(sampling, model.config.vocab_size)
        costs = [len(request.prompt_ids) + sampling.max_new_tokens for request in requests]
        for request, cost in zip(requests, costs, strict=True):
            _check_request(request, model.config.vocab_size)
            if cost > self._max_batch_tokens:
                raise ValueError(
                    f"sample {request.sample_id!r}: prompt and max_new_tokens are {cost} tokens, more than "
                    f"max_batch_tokens={self._max_batch_tokens}; raise it or shorten them"
                )
        finished: dict[int, Response] = {}
        for batch in _batches(costs, self._max_batch_tokens):
            sampler = TokenSampler([requests[index] for index in batch], sampling, records_raw=self._records_raw)
            try:
                _generate(model, sampler)
            except NotFinite as error:
                raise RolloutFailed(f"{error}; weights of version {self._version}", finished) from error
            for index, response in zip(batch, sampler.responses(self._version, self._engine_version), strict=True):
                finished[index] = response
        return [finished[index] for index in range(len(requests))]

    def close(self) -> None:
        """Frees the model."""
        self._model = None

    def _open_model(self) -> Any:
        if self._model is None:
            raise RuntimeError("the engine is closed; make another LocalEngine")
        return self._model


def _empty_model(hf_config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A model in eval mode whose weights are allocated but not drawn."""
    config = copy.deepcopy(hf_config)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(config)
    model.to(dtype=dtype).to_empty(device=device)
    model.tie_weights()
    # the one thing beside parameters: frequencies, which are computed when it is made
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    # otherwise special tokens of the configuration would end responses
    model.generation_config = transformers().GenerationConfig()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _generate(model: Any, sampler: TokenSampler) -> None:
    """One batch, prompts padded on the left; what is sampled stays in ``sampler``."""
    prompts, sampling = [request.prompt_ids for request in sampler.requests], sampler.sampling
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    real = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    config = transformers().GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        # the sampler leaves one token possible
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=0,
    )
    model.generate(
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(real, device=model.device),
        generation_config=config,
        logits_processor=[sampler],
    )


def _batches(costs: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of requests that are sampled together, of similar length; each fits alone."""
    batches: list[list[int]] = []
    # longest first: the first of a batch is what all of it is padded to
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        if batches and (len(batches[-1]) + 1) * costs[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    default = {field.name: getattr(Sampling(1), field.name) for field in fields(Sampling)}
    for name in _NEUTRAL:
        if getattr(sampling, name) != default[name]:
            raise ValueError(
                f"sampling.{name} must be {default[name]!r}, got {getattr(sampling, name)!r}: LocalEngine does not "
                "apply it; leave it out or use a server"
            )
    ranges = [
        ("max_new_tokens", sampling.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 < sampling.temperature < math.inf, "positive and finite"),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k == -1 or sampling.top_k >= 1, "-1 (all tokens) or at least 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "in [0, 1]"),
        (
            "stop_token_ids",
            all(0 <= token < vocab_size for token in sampling.stop_token_ids),
            f"in [0, {vocab_size}), the vocabulary",
        ),
    ]
    for name, fine, expected in ranges:
        if not fine:
            raise ValueError(f"sampling.{name} must be {expected}, got {getattr(sampling, name)!r}")


def _check_request(request: Request, vocab_size: int) -> None:
    if not request.prompt_ids:
        raise ValueError(f"sample {request.sample_id!r}: prompt_ids must hold at least one token, got none")
    wrong = [token for token in request.prompt_ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(
            f"sample {request.sample_id!r}: prompt_ids must be in [0, {vocab_size}), the vocabulary, got {wrong[0]}; "
            "was another tokenizer used?"
        )
    if not 0 <= request.seed < 2**63:
        raise ValueError(f"sample {request.sample_id!r}: seed must be in [0, 2^63), got {request.seed}")
