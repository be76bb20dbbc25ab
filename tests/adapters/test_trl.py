"""P3O in TRL's trainer, on the real package: each step's gradient is that of the reference over the step's tokens."""

import copy
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from p3o_train.adapters.trl_settings import check_generation, check_vllm_server
from tests.distributed.ranks import on_all_ranks

pytest.importorskip("trl")
peft = pytest.importorskip("peft")
import trl  # noqa: E402
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM  # noqa: E402

from p3o_train.adapters import trl as adapter  # noqa: E402
from p3o_train.adapters.trl import P3OConfig, P3OTrainer  # noqa: E402
from tests.adapters import trl_runs as runs  # noqa: E402

pytestmark = [pytest.mark.host_only, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]
# float32 log-probs of logits near 10, against float64: some 1e-6 for each token, and gradients cancel in part
CLOSE = 2e-5
QUARTERS = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
STALE = {
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "rollout_func": None,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Several threads are slower on so small a model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def distance(gradients, want):
    """Relative, over all parameters together."""
    missed = sum((gradients[name].double() - value).square().sum() for name, value in want.items())
    return math.sqrt(missed / sum(value.square().sum() for value in want.values()))


def check_steps(seen, steps):
    """Loss, e, count and every gradient of each step are the reference's."""
    assert len(seen.want) == steps
    losses = [entry["loss"] for entry in seen.trainer.state.log_history if "loss" in entry]
    for gradients, want, metrics, loss in zip(seen.gradients, seen.want, seen.metrics, losses, strict=True):
        assert distance(gradients, want["gradients"]) < CLOSE
        assert metrics["p3o/total_loss"] == pytest.approx(want["loss"], rel=CLOSE, abs=1e-6)
        assert loss == pytest.approx(want["loss"], rel=CLOSE, abs=1e-6)
        assert metrics["p3o/normalized_ess"] == pytest.approx(want["ess"], rel=CLOSE)
        assert metrics["p3o/valid_tokens"] == want["tokens"]


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize("cut", [{}, QUARTERS], ids=["whole", "quarters"])
def test_a_step_on_recorded_log_probs_is_the_reference(tmp_path, cut, scope):
    seen = runs.train(tmp_path, p3o_ess_scope=scope, p3o_kl_mode="importance", **cut)
    check_steps(seen, 1)
    window = seen.windows[0]
    assert seen.want[0]["ess"] < 0.9 and any(each["sampling_per_token_logps"].isnan().any() for each in window)


def test_only_step_scope_is_the_same_however_a_step_is_cut(tmp_path):
    whole = runs.train(tmp_path, p3o_ess_scope="step").gradients[0]
    assert distance(runs.train(tmp_path, p3o_ess_scope="step", **QUARTERS).gradients[0], whole) < CLOSE
    # e of two responses is not e of eight
    assert distance(runs.train(tmp_path, **QUARTERS).gradients[0], whole) > 0.01


@pytest.mark.parametrize("rollouts", [None, runs.recorded], ids=["generated", "recorded"])
@pytest.mark.parametrize("scope", ["micro-batch", "step"])
def test_every_step_on_a_stale_generation_is_the_reference(tmp_path, scope, rollouts):
    """A generation serves two optimizer steps, twice: each divides by its own tokens, not by their mean."""
    options = STALE | {"p3o_ess_scope": scope, "rollout_func": rollouts}
    seen = runs.train(tmp_path, max_steps=5, entropy_coef=0.01, **options)
    check_steps(seen, 5)
    ess = [want["ess"] for want in seen.want]
    assert max(ess[1:4]) < 0.99
    if rollouts is None:  # then the first step of a generation is on-policy: e is 1 up to the epsilon
        assert ess[0] == pytest.approx(1.0, abs=1e-6) == ess[4]
    assert len({want["tokens"] for want in seen.want[:2]}) == 2


def test_fresh_data_has_ratio_one_and_needs_no_other_pass(tmp_path):
    class Counting(P3OTrainer):
        passes = 0

        def _log_probs(self, *args):
            self.passes += 1
            return super()._log_probs(*args)

    options = QUARTERS | {"rollout_func": None, "p3o_ess_scope": "step", "max_steps": 2}
    seen = runs.train(tmp_path, trainer_class=Counting, **options)
    check_steps(seen, 2)
    assert seen.trainer.passes == 2 * 4 and "old_per_token_logps" not in seen.windows[0][0]
    assert [metrics["p3o/ratio_std"] for metrics in seen.metrics] == [0.0, 0.0]


def test_step_scope_reads_the_pass_that_trl_made_and_repeats_it_for_stale_weights(tmp_path):
    class Counting(P3OTrainer):
        passes = 0

        def _log_probs(self, *args):
            self.passes += not torch.is_grad_enabled()
            return super()._log_probs(*args)

    seen = runs.train(tmp_path, trainer_class=Counting, max_steps=4, p3o_ess_scope="step", **STALE)
    assert seen.trainer.passes == 3 * 2  # none for the first of four steps


def test_the_kl_to_the_reference_model(tmp_path):
    runs.tiny_model(seed=1).save_pretrained(tmp_path / "other")
    model = runs.tiny_model()
    model.config._name_or_path = str(tmp_path / "other")  # TRL loads the reference from there
    seen = runs.train(tmp_path, model, beta=0.3, **QUARTERS)
    check_steps(seen, 1)
    assert seen.metrics[0]["kl"] == seen.metrics[0]["p3o/reference_kl"] > 0.01


def test_an_adapter_trains_and_its_base_does_not(tmp_path):
    model = runs.tiny_model()
    before = copy.deepcopy(model.state_dict())
    trainer = P3OTrainer(
        model,
        runs.odd_tokens,
        runs.config(tmp_path, max_steps=3, beta=0.1, p3o_ess_scope="step", num_iterations=2, entropy_coef=0.01),
        runs.prompts(),
        processing_class=runs.tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    named = dict(trainer.model.named_parameters())
    trained = [weight for name, weight in named.items() if "lora_B" in name]
    assert trained and all(weight.isfinite().all() and weight.any() for weight in trained)
    for name, value in before.items():
        kept = next(weight for other, weight in named.items() if other.replace(".base_layer", "").endswith(name))
        assert torch.equal(kept, value)
    assert trainer.state.log_history[1]["p3o/normalized_ess"] < 1 - 1e-6


def test_an_evaluation_reports_under_its_own_names_between_two_halves_of_training(tmp_path):
    trainer = P3OTrainer(
        runs.tiny_model(),
        runs.odd_tokens,
        runs.config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8),
        runs.prompts(),
        runs.prompts(2),
        processing_class=runs.tokenizer(),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(logged) == 2
    for entry in logged:
        assert entry["eval_loss"] == pytest.approx(entry["eval_p3o/total_loss"], rel=CLOSE, abs=1e-6)
        assert entry["eval_p3o/normalized_ess"] == pytest.approx(1.0, abs=1e-6) and entry["eval_entropy"] > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (P3OConfig, {}),
        (P3OConfig, {"steps_per_generation": 4, "p3o_ess_scope": "step", "per_device_train_batch_size": 4}),
        (P3OConfig, {"num_iterations": 2, "gradient_checkpointing": True, "mask_truncated_completions": False}),
        (trl.GRPOConfig, {"vllm_importance_sampling_correction": False}),
    ],
    ids=["fresh", "stale", "twice", "grpo"],
)
def test_twenty_steps_stay_finite(tmp_path, kind, options):
    trainer_class = P3OTrainer if kind is P3OConfig else trl.GRPOTrainer
    arguments = runs.config(tmp_path, kind, max_steps=20, learning_rate=1e-3, **options)
    trainer = trainer_class(
        runs.tiny_model(), runs.odd_tokens, arguments, runs.prompts(), processing_class=runs.tokenizer()
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 20 and all(math.isfinite(entry["loss"]) for entry in logged)
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    if kind is P3OConfig:
        assert all(0 < entry["p3o/normalized_ess"] <= 1 for entry in logged)


def half(rank, folder):
    """One of two processes: its gradient before the step, averaged over both, and what it saw."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody connects: the group exists already
    seen = {}
    for scope in ("step", "micro-batch"):
        options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "p3o_ess_scope": scope}
        made = runs.train(folder, ddp_backend="gloo", **options)
        assert made.trainer.accelerator.num_processes == 2
        names = {name.removeprefix("module."): value for name, value in made.gradients[0].items()}
        seen[scope] = names, made.windows[0], made.metrics[0]
    return seen


def test_two_processes_make_the_step_of_one(tmp_path):
    left, right = on_all_ranks(half, 2, str(tmp_path))
    arguments, model = runs.config(tmp_path), runs.tiny_model()
    for scope in ("step", "micro-batch"):
        arguments.p3o_ess_scope = scope
        window = [runs.joined(parts) for parts in zip(left[scope][1], right[scope][1], strict=True)]
        want = runs.expected(arguments, model, window)
        for gradients, _, metrics in (left[scope], right[scope]):
            assert distance(gradients, want["gradients"]) < CLOSE
            assert metrics["p3o/total_loss"] == pytest.approx(want["loss"], rel=CLOSE)
            assert metrics["p3o/normalized_ess"] == pytest.approx(want["ess"], rel=CLOSE)
            assert metrics["p3o/valid_tokens"] == want["tokens"]


def spoiled(change):
    def rollouts(prompts, trainer):
        return change(runs.recorded(prompts, trainer))

    return rollouts


def without_a_log_prob(made):
    made["logprobs"][3][0] = None  # the first token is always the policy's
    return made


def all_of_a_tool(made):
    return made | {"env_mask": [[0] * len(ids) for ids in made["completion_ids"]]}


@pytest.mark.parametrize("cut", [{}, QUARTERS | {"p3o_ess_scope": "step"}], ids=["whole", "quarters"])
def test_data_without_a_loss_stops_before_the_weights_move(tmp_path, cut):
    for change, error, text in (
        (without_a_log_prob, ValueError, r"1 of \d+ tokens of this step have .* no finite number"),
        (all_of_a_tool, RuntimeError, "without valid completion tokens"),
    ):
        model = runs.tiny_model()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(error, match=text):
            runs.train(tmp_path, model, rollout_func=spoiled(change), **cut)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "setting",
    [
        {"loss_type": "grpo"},
        {"importance_sampling_level": "sequence"},
        {"delta": 2.0},
        {"off_policy_mask_threshold": 0.5},
        {"top_entropy_quantile": 0.2},
        {"vllm_importance_sampling_correction": True},
        {"use_adaptive_entropy": True},
        {"use_liger_kernel": True},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"vllm_structured_outputs_regex": "[0-9]+"},
        {"generation_kwargs": {"presence_penalty": 0.5}},
        {"generation_kwargs": {"temperature": 0.5}},
        {"temperature": 0.0},
        {"temperature": math.inf},
        {"p3o_ess_scope": "epoch"},
        {"p3o_kl_mode": "exact"},
        {"use_bias_correction_kl": True, "beta": 0.1},
        {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_a_setting_that_would_train_something_else(tmp_path, setting):
    with pytest.raises(ValueError, match=f"P3O cannot be trained with these settings:\n- {next(iter(setting))}"):
        runs.config(tmp_path, **setting)


def test_all_wrong_settings_come_in_one_error_and_neutral_ones_pass(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)loss_type='bnpo'.*delta=1\.5.*top_p=0\.5.*set it to 1\.0"):
        runs.config(tmp_path, top_p=0.5, delta=1.5, loss_type="bnpo")
    neutral = {"top_k": -1, "min_p": 0.0, "use_bias_correction_kl": True, "generation_kwargs": {"max_new_tokens": 4}}
    assert runs.config(tmp_path, **neutral).p3o_kl_mode == "proxy_safe"


def trainer_of(arguments, **options):
    model = options.pop("model", None) or runs.tiny_model()
    return P3OTrainer(model, runs.odd_tokens, arguments, runs.prompts(), processing_class=runs.tokenizer(), **options)


def test_what_only_the_trainer_can_refuse(tmp_path):
    for arguments in (None, runs.config(tmp_path, trl.GRPOConfig)):
        with pytest.raises(TypeError, match="args must be a P3OConfig"):
            trainer_of(arguments)
    changed = runs.config(tmp_path)
    changed.top_p = 0.7
    with pytest.raises(ValueError, match=r"top_p=0\.7"):
        trainer_of(changed)
    step = runs.config(tmp_path, p3o_ess_scope="step")
    noisy = runs.tiny_model(attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout 0\.1 in .*self_attn"):
        trainer_of(step, model=noisy)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2)
    with pytest.raises(ValueError, match=r"dropout 0\.2 in .*lora_dropout"):
        trainer_of(step, peft_config=lora)
    trainer_of(runs.config(tmp_path), peft_config=lora)
    model = runs.tiny_model()
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="no_repeat_ngram_size=2"):
        trainer_of(runs.config(tmp_path), model=model)


def test_what_stands_in_for_vllm_and_a_processor_of_images(tmp_path):
    trainer = trainer_of(runs.config(tmp_path))
    trainer.use_vllm, trainer.vllm_mode, info = True, "server", {"logprobs_mode": "processed_logprobs"}
    client = SimpleNamespace(get_server_info=lambda: {"model_config": info})
    trainer.vllm_generation = SimpleNamespace(vllm_client=client)
    adapter._check_model(trainer)
    info["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ValueError, match=r"'raw_logprobs'.*processed_logprobs"):
        adapter._check_model(trainer)
    trainer._is_vlm = True
    with pytest.raises(ValueError, match="multimodal processor"):
        adapter._check_model(trainer)


def test_a_mixture_of_experts_needs_its_balancing_loss_off(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    shape |= {"shared_expert_intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"vocab_size": runs.V, "num_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0, "eos_token_id": 1}
    with pytest.raises(ValueError, match=r"set router_aux_loss_coef=0\.0"):
        trainer_of(runs.config(tmp_path), model=Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape)))
    arguments = runs.config(tmp_path, router_aux_loss_coef=0.0)
    trainer_of(arguments, model=Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape))).train()


def test_sampling_knobs_of_a_model_and_a_server():
    check_generation({"bos_token_id": 1, "min_length": 0, "typical_p": 1.0, "min_p": 0.3}, ["min_p"])
    for name, value in {"min_p": 0.3, "min_length": 1, "suppress_tokens": [3], "forced_eos_token_id": 0}.items():
        with pytest.raises(ValueError, match=f"generation_config.{name}="):
            check_generation({name: value}, ["top_p"])
    check_vllm_server("processed_logprobs")
    with pytest.raises(ValueError, match="'raw_logprobs'"):
        check_vllm_server("raw_logprobs")


def test_a_micro_batch_of_another_kind(tmp_path):
    trainer = trainer_of(runs.config(tmp_path))
    with pytest.raises(ValueError, match="holds importance_sampling_ratio, which P3O does not know"):
        trainer._compute_loss(trainer.model, {"importance_sampling_ratio": torch.ones(1)})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 3
    with pytest.raises(RuntimeError, match="has 3 micro-batches instead of gradient_accumulation_steps=1"):
        trainer._compute_loss(trainer.model, {})


def test_mixed_precision_stays_close(tmp_path):
    seen = runs.train(tmp_path, bf16=True, p3o_ess_scope="step", **QUARTERS)
    # bfloat16 keeps 8 bits of every activation: log-probs are off by some percent, and so are ratios
    assert distance(seen.gradients[0], seen.want[0]["gradients"]) < 0.2
    assert seen.metrics[0]["p3o/normalized_ess"] == pytest.approx(seen.want[0]["ess"], rel=0.1)


def test_the_package_of_adapters_imports_no_framework():
    code = "import sys, p3o_train, p3o_train.adapters, p3o_train.adapters.trl_settings\n"
    code += "assert not {'trl', 'transformers', 'accelerate'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
