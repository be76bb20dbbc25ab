"""Hugging Face configurations and weight names of the models that ``ModelConfig`` describes: Llama, Qwen2 and Qwen3.

Whatever these families have and ours has not is refused by name: weights that load into another architecture would
train without an error and mean nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from p3o_train.model import ModelConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""model_type -> class in transformers."""


def transformers() -> Any:
    """The package, loaded when it is needed: that takes seconds.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ImportError("Hugging Face models need transformers: pip install 'transformers>=4.55,<6'") from error


def hf_config(config: ModelConfig, max_position_embeddings: int = 32_768) -> Any:
    """The transformers configuration of the same model, without any special token.

    Args:
        max_position_embeddings: longest sequence that an inference server should take; no number depends on it.

    Raises:
        ValueError: both ``qkv_bias`` and ``qk_norm``, which no model of transformers has.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError(
            "qkv_bias and qk_norm cannot both be True: Qwen2 has the one and Qwen3 the other; drop one of them"
        )
    family = "Qwen2Config" if config.qkv_bias else "Qwen3Config" if config.qk_norm else "LlamaConfig"
    made = getattr(transformers(), family)(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        hidden_act="silu",
        rms_norm_eps=config.norm_epsilon,
        rope_theta=float(config.rope_base),
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=max_position_embeddings,
        initializer_range=config.init_std,
        # a family's own special tokens belong to its tokenizer, which need not be ours
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        torch_dtype=config.dtype,
    )
    made.architectures = [ARCHITECTURES[made.model_type]]
    return made


def model_config_from_hf(hf_config: Any, *, dtype: torch.dtype, seed: int) -> ModelConfig:
    """Our configuration of a transformers model.

    Args:
        dtype: of parameters and activations.
        seed: of weights that are drawn; none is used once weights are loaded.

    Raises:
        ValueError: a model that ``ModelConfig`` cannot express, naming field, value and reason.
    """
    kind = getattr(hf_config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model_type must be one of {sorted(ARCHITECTURES)}, got {kind!r}: other architectures are not built here"
        )
    _refuse_unknown_parts(hf_config)
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None)
    return ModelConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_heads=heads,
        num_kv_heads=hf_config.num_key_value_heads or heads,
        ffn_size=hf_config.intermediate_size,
        vocab_size=hf_config.vocab_size,
        head_dim=None if head_dim is None or head_dim * heads == hf_config.hidden_size else head_dim,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        rope_base=_rope_base(hf_config),
        norm_epsilon=hf_config.rms_norm_eps,
        tie_embeddings=hf_config.tie_word_embeddings,
        dtype=dtype,
        seed=seed,
    )


def _refuse_unknown_parts(hf_config: Any) -> None:
    layers = set(getattr(hf_config, "layer_types", None) or ())
    window = getattr(hf_config, "sliding_window", None) if getattr(hf_config, "use_sliding_window", False) else None
    refused = [
        ("hidden_act", "silu", "the feed-forward layer is SwiGLU"),
        ("attention_bias", False, "the output projection of attention has no bias"),
        ("mlp_bias", False, "the feed-forward layer has no bias"),
        ("attention_dropout", 0.0, "there is no dropout"),
        ("quantization_config", None, "weights are trained as floating-point numbers"),
    ]
    for name, expected, reason in refused:
        value = getattr(hf_config, name, expected)
        if value not in (expected, None):
            raise ValueError(f"{name} must be {expected!r}, got {value!r}: {reason}")
    # where every layer names its type, the window counts in those that name it
    if layers - {"full_attention"} or (not layers and window is not None):
        raise ValueError(
            f"sliding_window must be unused, got sliding_window={getattr(hf_config, 'sliding_window', None)} and "
            f"layer_types {sorted(layers)}: attention reaches back to the first token"
        )


def _rope_base(hf_config: Any) -> float:
    # transformers 5 keeps everything in rope_parameters; before, there were rope_theta and rope_scaling
    old = {"rope_theta": getattr(hf_config, "rope_theta", None)} | (getattr(hf_config, "rope_scaling", None) or {})
    name = "rope_parameters" if getattr(hf_config, "rope_parameters", None) else "rope_scaling"
    rope: dict[str, Any] = dict(getattr(hf_config, "rope_parameters", None) or old)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{name} must be of type 'default', got {kind!r} in {rope}: positions are not rescaled")
    part = rope.get("partial_rotary_factor") or getattr(hf_config, "partial_rotary_factor", None) or 1.0
    if part != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1.0, got {part}: the whole head is rotated")
    base = rope.get("rope_theta")
    if base is None:
        raise ValueError(f"rope_theta must be a number, got None in {type(hf_config).__name__}; set it there")
    return float(base)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every full weight; a tied model has no ``lm_head.weight``."""
    width, ffn = config.hidden_size, config.ffn_size
    query, key = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
        "mlp.gate_proj.weight": (ffn, width),
        "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
    }
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (key,), "self_attn.v_proj.bias": (key,)}
    if config.qk_norm:
        layer |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (config.head_size,))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (width,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """That there is every weight, in its shape, and no other.

    Raises:
        ValueError: names that are missing or left over; a shape or dtype that does not fit.
    """
    missing = [name for name in shapes if name not in weights]
    left_over = [name for name in weights if name not in shapes]
    if missing or left_over:
        raise ValueError(
            f"weights must have the model's names exactly: {_some(missing)} missing, {_some(left_over)} left over; "
            "a tied model has no lm_head.weight. Take the weights of the same configuration"
        )
    for name, shape in shapes.items():
        weight = weights[name]
        if tuple(weight.shape) != tuple(shape) or not weight.is_floating_point():
            raise ValueError(
                f"weight {name} must be floating-point of shape {tuple(shape)}, got {weight.dtype} of shape "
                f"{tuple(weight.shape)}; take the weights of the same configuration"
            )


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "none"
