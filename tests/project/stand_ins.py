"""What a block of code in a page takes for granted: data of its stack, modules of packages that are not installed."""

import enum
import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.project.pages import Block

Names = dict[str, Any]


def prepared(block: Block, monkeypatch: pytest.MonkeyPatch) -> Names:
    """The namespace for a block; skips where it needs a package that cannot stand in."""
    for (page, mark), make in NEEDS.items():
        if block.page == page and mark in block.text:
            return make(monkeypatch)
    return {}


def _logprobs(*shape: int) -> torch.Tensor:
    return -torch.rand(*shape, generator=torch.Generator().manual_seed(0)) - 0.1


def _verl_registry(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Its registry of losses; the loss itself is tested in tests/adapters."""
    module = types.ModuleType("verl.trainer.ppo.core_algos")
    module.register_policy_loss = lambda name: lambda function: function
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return {}


def _verl_batch(monkeypatch: pytest.MonkeyPatch) -> Names:
    shape = {"rollout_log_probs": _logprobs(2, 3), "old_log_probs": torch.zeros(2, 3)}
    return {"batch": shape | {"response_mask": torch.ones(2, 3)}}


def _nemo_rl(monkeypatch: pytest.MonkeyPatch) -> Names:
    """The enums of its protocol, and two sequences of four tokens."""
    module = types.ModuleType("nemo_rl.algorithms.loss.interfaces")
    module.LossType = enum.Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")
    module.LossInputType = enum.Enum("LossInputType", "LOGIT LOGPROB")
    module.MetricNormalizer = enum.Enum("MetricNormalizer", "TOKENS SEQUENCES NONE")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    named = {"prev_logprobs": _logprobs(2, 4), "generation_logprobs": _logprobs(2, 4) - 0.1}
    return {"train_data": named | {"token_mask": torch.ones(2, 4), "sample_mask": torch.ones(2)}}


def _samples(monkeypatch: pytest.MonkeyPatch) -> Names:
    return {"samples": [(_logprobs(5), _logprobs(5), torch.ones(5, dtype=torch.bool)) for _ in range(2)]}


def _areal(monkeypatch: pytest.MonkeyPatch) -> Names:
    batch = {"logprobs": _logprobs(2, 3), "prox_logp": _logprobs(2, 3) - 0.1, "loss_mask": torch.ones(2, 3)}
    settings = types.SimpleNamespace(use_decoupled_loss=True, recompute_logprob=True, ppo_n_minibatches=1)
    return {"batch": batch, "config": settings}


def _installed(package: str) -> Callable[[pytest.MonkeyPatch], Names]:
    def need(monkeypatch: pytest.MonkeyPatch) -> Names:
        # not find_spec: the folders of tests have the names of packages
        if not any(importlib.metadata.distributions(name=package)):
            pytest.skip(f"{package} is not installed")
        return {}

    return need


NEEDS: dict[tuple[str, str], Callable[[pytest.MonkeyPatch], Names]] = {
    ("examples/verl_p3o.md", "register("): _verl_registry,
    ("examples/verl_p3o.md", "use_rollout_log_probs(batch)"): _verl_batch,
    ("docs/adapters.md", "adapters.trl"): _installed("trl"),
    ("docs/adapters.md", "adapters.nemo_rl"): _nemo_rl,
    ("docs/adapters.md", "prime_rl"): _samples,
    ("docs/adapters.md", "adapters.areal"): _areal,
    ("docs/adapters.md", "apply_p3o_kernels_to_megatron"): _installed("megatron-core"),
}
"""(page, text in the block) -> what to prepare; a block that is not here needs nothing."""
