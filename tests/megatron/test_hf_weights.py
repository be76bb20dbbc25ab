"""Weights of transformers in Megatron-Core's decoder and back: the same logits, the same bits, in every topology.

Four ranks start once and load, run and export every family in every topology; the tests look at what came back.
"""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers")

from p3o_train.device_shim import megatron_on_cpu
from p3o_train.hf_model import hf_config, transformers, weight_shapes
from p3o_train.hf_weights import export_hf_weights, load_hf_weights
from p3o_train.model import ModelConfig, build_model
from p3o_train.parallel import ParallelGroups
from p3o_train.runtime import OptimizerSettings, Parallelism, build_trainee, megatron_run
from p3o_train.types import ContextLayout
from tests.distributed.ranks import on_all_ranks
from tests.megatron.topologies import (
    CONFIG,
    MICRO_BATCHES,
    NEEDS_MEGATRON,
    Outcome,
    Topology,
    forward_backward,
    groups,
    samples,
)
from tests.megatron.whole import whole

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
# four groups of two query heads: with two tensor-parallel ranks still two groups each
BASE = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=4, rope_base=50_000.0, norm_epsilon=1e-5)
FAMILIES = {
    "llama": BASE,
    "llama-tied": dataclasses.replace(BASE, tie_embeddings=True),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True),
    "qwen2-tied": dataclasses.replace(BASE, qkv_bias=True, tie_embeddings=True),
    # heads that are not hidden_size / num_heads wide
    "qwen3": dataclasses.replace(BASE, qk_norm=True, head_dim=6),
    "qwen3-tied": dataclasses.replace(BASE, qk_norm=True, head_dim=6, tie_embeddings=True),
}
TOPOLOGIES = (Topology(), Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2))


class Found(NamedTuple):
    """What one rank found for one family in one topology."""

    outcome: Outcome
    exported: dict[str, torch.Tensor]


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Nothing is 0 or 1, so that no gain and no bias can be forgotten or exchanged."""
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = (1 + 0.3 * noise if "norm" in name else 0.3 * noise).to(config.dtype)
    return weights


def every_family(rank: int, weights: dict[str, dict[str, torch.Tensor]]) -> Any:
    """{(family, topology): what this rank found}."""
    found = {}
    with megatron_on_cpu():
        for sizes in TOPOLOGIES:
            with groups(sizes) as place:
                for family, config in FAMILIES.items():
                    model = build_model(config)
                    load_hf_weights([model], weights[family])
                    logits, losses = forward_backward(model, ContextLayout())
                    exported = export_hf_weights([model], ParallelGroups.from_megatron())
                    found[family, sizes] = Found(Outcome(place, logits, losses, {}), exported)
    return found


@pytest.fixture(scope="module")
def found():
    weights = {family: random_weights(config) for family, config in FAMILIES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # the same test on a machine with a GPU
        ranks = on_all_ranks(every_family, 4, weights)
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


@torch.no_grad()
def hf_logits(config: ModelConfig, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """[sum of lengths, V] of every micro-batch, by transformers, one sequence at a time."""
    with torch.random.fork_rng():
        model = transformers().AutoModelForCausalLM.from_config(hf_config(config)).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set()) and not unexpected
    return [
        torch.cat([model(sample.token_ids[None]).logits[0] for sample in samples(lengths)]) for lengths in MICRO_BATCHES
    ]


@pytest.mark.parametrize("sizes", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(found, family, sizes):
    config = FAMILIES[family]
    value = whole([rank.outcome for rank in found[family, sizes]], sizes).logits
    for logits, truth in zip(value, hf_logits(config, random_weights(config)), strict=True):
        # float32 sums of some 50 terms in another order, two layers deep: some ten roundings of 6e-8
        assert ((logits - truth).norm() / truth.norm()).item() <= 1e-6
        assert (logits - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("sizes", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_exports_what_was_loaded_bit_for_bit(found, family, sizes):
    truth = random_weights(FAMILIES[family])
    for rank in found[family, sizes]:
        assert list(rank.exported) == list(truth)
        assert all(torch.equal(rank.exported[name], weight) for name, weight in truth.items())


@pytest.fixture
def model():
    with megatron_run(Parallelism()):
        yield build_model(FAMILIES["qwen2"])


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_drawn_biases_are_zero_and_gains_one(model):
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            expected = torch.zeros_like if name.endswith("linear_qkv.bias") else torch.ones_like
            assert torch.equal(parameter, expected(parameter)), name


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.layers.1.self_attn.k_proj.bias": None}, r"1 \(model.layers.1.self_attn.k_proj.bias\) missing, none"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}, r"none missing, 1 \(model.layers.2.mlp.up_proj"),
        (
            {"model.layers.1.mlp.down_proj.weight": torch.zeros(48, 32)},
            r"model.layers.1.mlp.down_proj.weight must be .*shape \(32, 48\), got torch.float32 of shape \(48, 32\)",
        ),
        ({"lm_head.weight": torch.zeros(64, 32, dtype=torch.int32)}, r"lm_head.weight must be .*got torch.int32"),
    ],
)
def test_wrong_weights_are_refused_and_nothing_changes(model, change, message):
    before = state(model)
    weights = random_weights(FAMILIES["qwen2"]) | change
    with pytest.raises(ValueError, match=message):
        load_hf_weights([model], {name: weight for name, weight in weights.items() if weight is not None})
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())


def test_a_tied_model_takes_no_second_head():
    with megatron_run(Parallelism()):
        tied = build_model(FAMILIES["llama-tied"])
        with pytest.raises(ValueError, match=r"a tied model has no lm_head.weight"):
            load_hf_weights([tied], random_weights(FAMILIES["llama"]))


def test_exports_are_copies(model):
    exported = export_hf_weights([model], ParallelGroups())
    before = state(model)
    for weight in exported.values():
        assert weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
        weight.zero_()
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())


def test_ddp_and_bfloat16():
    config = dataclasses.replace(FAMILIES["qwen3"], dtype=torch.bfloat16)
    weights = random_weights(FAMILIES["qwen3"])
    with megatron_run(Parallelism()):
        trainee = build_trainee(config, OptimizerSettings(lr=0.1, total_steps=1))
        load_hf_weights(trainee.model, weights)
        exported = export_hf_weights(trainee.model, trainee.groups)
    assert all(torch.equal(exported[name], weight.bfloat16()) for name, weight in weights.items())
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}


class Fused:
    """The model with the names that transformer-engine's layers would give its parameters."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def named_parameters(self) -> Any:
        for name, parameter in self.inner.named_parameters():
            name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
            yield name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"), parameter


def test_names_of_transformer_engine_are_known(model):
    fused, weights = Fused(model), random_weights(FAMILIES["qwen2"])
    assert any("layer_norm_weight" in name for name, _ in fused.named_parameters())
    load_hf_weights([fused], weights)
    for exported in (export_hf_weights([fused], ParallelGroups()), export_hf_weights([model], ParallelGroups())):
        assert all(torch.equal(exported[name], weight) for name, weight in weights.items())


class Foreign(Fused):
    """With a parameter that no Hugging Face model of these families has."""

    def named_parameters(self) -> Any:
        yield from self.inner.named_parameters()
        yield "decoder.layers.0.mlp.linear_fc2.bias", torch.zeros(32)


def test_foreign_models_are_refused(model):
    before = state(model)
    for call in (
        lambda: export_hf_weights([Foreign(model)], ParallelGroups()),
        lambda: load_hf_weights([Foreign(model)], random_weights(FAMILIES["qwen2"])),
    ):
        with pytest.raises(ValueError, match=r"decoder.layers.0.mlp.linear_fc2.bias has no Hugging Face name"):
            call()
    with pytest.raises(ValueError, match=r"one chunk.*got 2"):
        export_hf_weights([model, model], ParallelGroups())
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())
