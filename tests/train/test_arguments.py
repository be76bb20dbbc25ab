"""Arguments: every refusal, what is accepted beside it, and namespaces of other frameworks."""

from argparse import Namespace
from copy import deepcopy

import pytest

from p3o_train.arguments import validate_p3o_arguments
from p3o_train.refusals import RULES

STEP = {"p3o_ess_scope": "step"}
REUSE = {**STEP, "p3o_context_source": "reuse"}
NAN = float("nan")

# rule -> what to add to arguments that are right, the flag that must be named, and a part of the reason or remedy
BROKEN = {
    "p3o_ess_scope": ({"p3o_ess_scope": "global"}, "--p3o-ess-scope 'global'", "micro-batch, step"),
    "p3o_context_source": ({**STEP, "p3o_context_source": "old"}, "--p3o-context-source 'old'", "prepass, reuse"),
    "p3o_kl_mode": ({"p3o_kl_mode": "exact"}, "--p3o-kl-mode 'exact'", "full-vocabulary behavior logits"),
    "no pull in micro-batch scope": ({"p3o_kl_mode": "off"}, "--p3o-kl-mode 'off'", "set --p3o-ess-scope step, or"),
    "behavior log-probs": ({"use_rollout_logprobs": False}, "--use-rollout-logprobs False", "no importance ratio"),
    "token mean": ({"calculate_per_token_loss": False}, "--calculate-per-token-loss", "per-micro-batch denominator"),
    "rollout_top_p": ({"rollout_top_p": 0.95}, "--rollout-top-p 0.95", "untruncated rollout distribution"),
    "rollout_top_k": ({"rollout_top_k": 50}, "--rollout-top-k 50", "set --rollout-top-k -1"),
    "record_kept_tokens": (
        {"record_kept_tokens": True, "loss_from_hidden": True},
        "--loss-from-hidden True",
        "normalises over all",
    ),
    "temperature_convention": ({"rollout_temperature": 0.6}, "--rollout-temperature 0.6", "scaled (both"),
    "rollout_temperature": ({"rollout_temperature": 0.0}, "--rollout-temperature 0.0", "greedy"),
    "update_weights_interval": ({"update_weights_interval": 0}, "--update-weights-interval 0", "whole number"),
    "clip_low": ({"clip_low": -0.1}, "--clip-low -0.1", ">= 0"),
    "clip_high": ({"clip_high": NAN}, "--clip-high nan", ">= 0"),
    "entropy_coef": ({"entropy_coef": float("inf")}, "--entropy-coef inf", "finite"),
    "kl_loss_coef": ({"kl_loss_coef": "small"}, "--kl-loss-coef 'small'", "finite"),
    "use_tis": ({"use_tis": True}, "--use-tis True", "double-corrects"),
    "use_critic": ({"use_critic": True}, "--use-critic True", "value function"),
    "use_opd": ({"use_opd": True}, "--use-opd True", "mutually exclusive"),
    "get_mismatch_metrics": ({"get_mismatch_metrics": True}, "--get-mismatch-metrics True", "loss masks"),
    "use_opsm": ({"use_opsm": True}, "--use-opsm True", "masks sequences"),
    "custom_pg_loss_reducer_function_path": (
        {"custom_pg_loss_reducer_function_path": "my.reducer"},
        "--custom-pg-loss-reducer-function-path 'my.reducer'",
        "another reduction",
    ),
    "enable_mtp_training": ({"enable_mtp_training": True}, "--enable-mtp-training True", "multi-token"),
    "mtp_num_layers": ({"mtp_num_layers": 1}, "--mtp-num-layers 1", "multi-token"),
    "use_routing_replay": ({"use_routing_replay": True}, "--use-routing-replay True", "expert choices"),
    "moe_enable_routing_replay": ({"moe_enable_routing_replay": True}, "--moe-enable-routing-replay", "expert choices"),
    "use_rollout_routing_replay": ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay", "expert"),
    "overlap_moe_expert_parallel_comm": (
        {"overlap_moe_expert_parallel_comm": True},
        "--overlap-moe-expert-parallel-comm True",
        "combined 1F1B",
    ),
    "normalize_advantages": (
        {"normalize_advantages": True, "data_parallel_size": 1, "context_parallel_size": 2},
        "--normalize-advantages True",
        "part of the ranks",
    ),
    "recompute_loss_function": ({"recompute_loss_function": True}, "--recompute-loss-function True", "collective"),
    "use_kl_loss": ({"kl_loss_coef": 0.1, "use_kl_loss": False}, "--use-kl-loss False", "reference policy"),
    "kl_loss_type": ({"kl_loss_coef": 0.1, "kl_loss_type": "k1"}, "--kl-loss-type 'k1'", "k3"),
    "fp8": ({**STEP, "fp8": "hybrid"}, "--fp8-format 'hybrid'", "--p3o-ess-scope micro-batch"),
    "fp4": ({**STEP, "fp4": "e2m1"}, "--fp4-format 'e2m1'", "--p3o-ess-scope micro-batch"),
    "attention_dropout": ({**STEP, "attention_dropout": 0.1}, "--attention-dropout 0.1", "set --attention-dropout 0"),
    "hidden_dropout": ({**STEP, "hidden_dropout": 0.1}, "--hidden-dropout 0.1", "noise"),
    "moe_input_jitter_eps": ({**STEP, "moe_input_jitter_eps": 0.01}, "--moe-input-jitter-eps 0.01", "noise"),
    "lora_dropout": ({**STEP, "lora_dropout": 0.05, "lora_rank": 8}, "--lora-dropout 0.05, --lora-rank 8", "noise"),
    "fully_async": ({**STEP, "fully_async": True}, "--fully-async True", "read twice"),
    "hybrid": ({**STEP, "hybrid": True}, "--hybrid True", "read twice"),
    "return_schedule_plan": ({**STEP, "return_schedule_plan": True}, "--return-schedule-plan True", "log-probs"),
    "multimodal_keys": ({**STEP, "multimodal_keys": {"image": "images"}}, "--multimodal-keys", "images"),
    "reuse in micro-batch scope": ({"p3o_context_source": "reuse"}, "--p3o-context-source 'reuse'", "scope step"),
    "reuse over several steps": (
        {**REUSE, "num_steps_per_rollout": 2},
        "--p3o-context-source 'reuse', --num-steps-per-rollout 2",
        "prepass",
    ),
    "reuse of old weights": ({**REUSE, "keep_old_actor": True}, "--keep-old-actor True", "old actor"),
}

ACCEPTED = {
    "micro-batch scope by default": {"p3o_ess_scope": None},
    "step scope": STEP,
    "reuse": {**REUSE, "num_steps_per_rollout": 1},
    "reuse, one step by its sizes": {
        **REUSE,
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "global_batch_size": 256,
    },
    "reuse, sizes not all known": {**REUSE, "rollout_batch_size": 32, "global_batch_size": 64},
    "several steps with a pre-pass": {**STEP, "num_steps_per_rollout": 4},
    "old actor with a pre-pass": {**STEP, "keep_old_actor": True},
    "proxy": {"p3o_kl_mode": "proxy"},
    "importance": {"p3o_kl_mode": "importance"},
    "no pull in step scope": {**STEP, "p3o_kl_mode": "off"},
    "truncation with its tokens": {"rollout_top_p": 0.9, "rollout_top_k": 50, "record_kept_tokens": True},
    "no truncation, as integers": {"rollout_top_p": 1, "rollout_top_k": -1},
    "a temperature": {"rollout_temperature": 0.6, "temperature_convention": "mismatch"},
    "an interval": {"update_weights_interval": 3},
    "no margins": {"clip_low": 0.0, "clip_high": 0.0},
    "negative entropy weight": {"entropy_coef": -0.01},
    "features that are off": dict.fromkeys(
        ("use_tis", "use_critic", "use_opd", "get_mismatch_metrics", "use_opsm", "enable_mtp_training", "fp8"), False
    ),
    "features that are None": dict.fromkeys(
        ("custom_pg_loss_reducer_function_path", "mtp_num_layers", "fp4", "multimodal_keys", "rollout_top_k"), None
    ),
    "no MTP layers": {"mtp_num_layers": 0},
    "true on-policy": {**STEP, "true_on_policy_mode": True},
    "no deterministic mode": {**STEP, "deterministic_mode": False, "batch_invariant_mode": False},
    "whitening on one rank": {"normalize_advantages": True, "data_parallel_size": 1, "context_parallel_size": 1},
    "whitening, one rank by the world": {
        "normalize_advantages": True,
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    },
    "recomputation in step scope": {**STEP, "recompute_loss_function": True},
    "reference KL": {"kl_loss_coef": 0.1, "use_kl_loss": True, "kl_loss_type": "k3"},
    "reference KL of another kind, without weight": {"kl_loss_coef": 0.0, "use_kl_loss": False, "kl_loss_type": "k1"},
    "no noise": {**STEP, "attention_dropout": 0.0, "hidden_dropout": 0, "moe_input_jitter_eps": None},
    "dropout of LoRA layers that are not there": {**STEP, "lora_dropout": 0.05, "lora_rank": 0},
    "LoRA without dropout": {**STEP, "lora_dropout": 0.0, "lora_rank": 8},
    "images with reused log-probs": {**REUSE, "multimodal_keys": {"image": "images"}},
    "a vision-language model on text": {**STEP, "is_vl_model": True},
    "all of step scope's, in micro-batch scope": {
        "fp8": "hybrid",
        "fp4": "e2m1",
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "moe_input_jitter_eps": 0.01,
        "lora_dropout": 0.1,
        "lora_rank": 8,
        "fully_async": True,
        "hybrid": True,
        "multimodal_keys": {"image": "images"},
    },
}


def right(**changes):
    given = {"advantage_estimator": "p3o", "use_rollout_logprobs": True, "calculate_per_token_loss": True}
    return Namespace(**given | changes)


def refusal(args):
    with pytest.raises(ValueError, match="do not go with") as caught:
        validate_p3o_arguments(args)
    return str(caught.value)


def test_every_rule_has_a_case():
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert set(names) == set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_refused(name):
    changes, flag, part = BROKEN[name]
    args = right(**deepcopy(changes))
    before = deepcopy(vars(args))
    (line,) = refusal(args).splitlines()[1:]
    assert flag in line
    assert part in line
    assert repr(vars(args)) == repr(before)  # NaN equals nothing


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    args = right(**ACCEPTED[name])
    before = deepcopy(vars(args))
    validate_p3o_arguments(args)
    assert vars(args) == before


@pytest.mark.parametrize("value", [0, -1.0, NAN, float("inf"), "0.6", True])
def test_temperature_is_a_positive_number(value):
    assert "--rollout-temperature" in refusal(right(rollout_temperature=value))


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_interval_is_a_positive_whole_number(value):
    assert "--update-weights-interval" in refusal(right(update_weights_interval=value))


@pytest.mark.parametrize("world_size", [2, 8])
def test_whitening_over_a_world_of_several_data_ranks(world_size):
    args = right(normalize_advantages=True, world_size=world_size, tensor_model_parallel_size=1)
    assert "--normalize-advantages" in refusal(args)


def test_whitening_over_unknown_ranks():
    assert "--normalize-advantages" in refusal(right(normalize_advantages=True))


def test_several_steps_by_their_sizes():
    sizes = {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 64}
    assert "--global-batch-size 64" in refusal(right(**REUSE, **sizes))


def test_all_violations_at_once():
    args = Namespace(
        advantage_estimator="p3o",
        p3o_ess_scope="step",
        rollout_top_p=0.9,
        rollout_top_k=20,
        use_tis=True,
        attention_dropout=0.1,
        clip_low=-1.0,
        update_weights_interval=0,
    )
    lines = refusal(args).splitlines()[1:]
    flags = ("use-rollout-logprobs", "calculate-per-token-loss", "rollout-top-p", "rollout-top-k", "use-tis")
    flags += ("attention-dropout", "clip-low", "update-weights-interval")
    assert len(lines) == len(flags)
    assert all(sum(f"--{flag} " in line.split(":")[0] for line in lines) == 1 for flag in flags)


@pytest.mark.parametrize("estimator", ["grpo", "cispo", "pg"])
def test_rules_of_p3o_are_not_those_of_others(estimator):
    everything = {name: value for changes, _, _ in BROKEN.values() for name, value in changes.items()}
    both = {"record_kept_tokens", "loss_from_hidden"}
    both |= {"clip_low", "clip_high", "entropy_coef", "kl_loss_coef", "rollout_temperature", "update_weights_interval"}
    others = {name: value for name, value in everything.items() if name not in both}
    validate_p3o_arguments(Namespace(advantage_estimator=estimator, **others))


@pytest.mark.parametrize(
    "changes", [{"clip_high": -0.1}, {"rollout_temperature": 0}, {"update_weights_interval": 0}, {"entropy_coef": NAN}]
)
def test_rules_of_both(changes):
    assert "estimator grpo" in refusal(Namespace(advantage_estimator="grpo", **changes))


@pytest.mark.parametrize(
    "args", [Namespace(), Namespace(advantage_estimator="ppo", rollout_temperature=0, clip_low=-1)]
)
def test_other_estimators_are_not_ours(args):
    validate_p3o_arguments(args)


def test_a_namespace_of_megatron():
    """Megatron's own defaults: no rollout arguments at all, dropout on, several data-parallel ranks."""
    megatron = Namespace(
        world_size=8,
        data_parallel_size=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        fp8=None,
        fp4=None,
        mtp_num_layers=None,
        calculate_per_token_loss=True,
        overlap_moe_expert_parallel_comm=False,
        moe_enable_routing_replay=False,
        moe_input_jitter_eps=None,
        global_batch_size=64,
        deterministic_mode=False,
        load=None,
        finetune=False,
    )
    validate_p3o_arguments(megatron)
    ours = {"advantage_estimator": "p3o", "use_rollout_logprobs": True}
    validate_p3o_arguments(Namespace(**vars(megatron), **ours))
    lines = refusal(Namespace(**vars(megatron), **ours, **STEP)).splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["--attention-dropout", "--hidden-dropout"]
