"""Responses of one model under several topologies, as one rank samples them."""

import dataclasses
from typing import Any

import torch

from p3o_train.device_shim import megatron_on_cpu
from p3o_train.model import build_model
from p3o_train.objective import Objective
from p3o_train.packing import pack
from p3o_train.parallel import ParallelGroups
from p3o_train.passes import policy_log_probs
from p3o_train.rollout import EmbeddedEngine, Response, Sampling, copy_weights, swapped_weights
from p3o_train.types import ContextLayout, Sample
from tests.megatron.topologies import CONFIG, Topology, groups

TEMPERATURE, LIMIT, END = 0.7, 6, 3
PROMPTS = ((5,), (9, 1, 4), (7, 7, 2, 8, 30), (60, 3), (11, 12))


def uniforms() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(len(PROMPTS), LIMIT, dtype=torch.float64, generator=generator)


def sampled(sizes: Topology) -> tuple[list[Response], list[torch.Tensor]]:
    """Responses, and on the last stage the log-probs that a forward pass over prompt and response gives them."""
    with groups(sizes) as place:
        model: Any = build_model(dataclasses.replace(CONFIG, tie_embeddings=sizes.tied))
        layout = ContextLayout(cp_size=sizes.cp, cp_rank=place.cp)
        made = ParallelGroups.from_megatron()
        # a budget of 12 tokens, so that sequences of different length come in several forward passes
        sampling = Sampling(LIMIT, END, TEMPERATURE, max_tokens=12)
        responses = EmbeddedEngine([model], made, layout, sampling).generate(PROMPTS, uniforms())
        samples = [
            Sample.from_lists([*prompt, *response.token_ids], len(response.token_ids), response.log_probs)
            for prompt, response in zip(PROMPTS, responses, strict=True)
        ]
        batch = pack(samples, [0.0] * len(samples), layout, pad_token_id=1)
        values = policy_log_probs([model], [batch], Objective(temperature=TEMPERATURE), made).values
        return responses, [value[batch.mask] - batch.behavior_log_probs[batch.mask] for value in values]


def every_rollout(rank: int, topologies: tuple[Topology, ...]) -> Any:
    with megatron_on_cpu():
        return {sizes: sampled(sizes) for sizes in topologies}


def with_other_weights(rank: int) -> Any:
    """Responses of zero weights while swapped in, and whether the own ones are back, after an error too."""
    with megatron_on_cpu(), groups(Topology()):
        model: Any = build_model(CONFIG)
        engine = EmbeddedEngine([model], ParallelGroups(), ContextLayout(), Sampling(2, END))
        before = copy_weights([model])
        nothing = {name: torch.zeros_like(value) for name, value in before.items()}
        try:
            with swapped_weights([model], nothing):
                responses = engine.generate(PROMPTS, uniforms()[:, :2])
                raise KeyError("in the middle")
        except KeyError:
            after = copy_weights([model])
        return responses, all(torch.equal(before[name], after[name]) for name in before)
