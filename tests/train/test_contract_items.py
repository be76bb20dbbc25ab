"""Knobs, turns, placeholders, temperatures, policy lag and resuming, with numbers that were worked out by hand."""

from argparse import Namespace

import pytest
import torch

from p3o_kernels import ratio_stats
from p3o_train.arguments import validate_p3o_resume
from p3o_train.checkpoint_files import is_native_checkpoint
from p3o_train.config import TrainConfig
from p3o_train.contract import Contract, ContractViolation, check_sampling
from p3o_train.model import ModelConfig, transformer_config
from p3o_train.policy_lag import policy_age, refresh_after, snapshot_tag
from p3o_train.recording import Sampling
from p3o_train.turns import Turn, accumulate_turns, check_custom_generate, replace_placeholders
from p3o_train.types import Sample
from tests.train.recordings import SCALED, VOCAB, check, refuses, sampled

NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": {"7": 0.0},
    "other": {
        "typical_p": 1.0,
        "top_a": 0.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0,
        "json_schema": None,
        "ignore_eos": True,
        "sampling_seed": 17,
        "skip_special_tokens": False,
    },
}


def test_item_46_neutral_knobs_pass():
    check_sampling(Sampling(8, **NEUTRAL), SCALED, engine="sglang")
    check(sampled(**NEUTRAL))


@pytest.mark.parametrize(
    ("knob", "value", "text"),
    [
        ("frequency_penalty", 0.1, "frequency_penalty is 0.1: SGLang's log-probs are those after it"),
        ("presence_penalty", -0.5, "presence_penalty is -0.5"),
        ("repetition_penalty", 1.05, "repetition_penalty is 1.05"),
        ("min_new_tokens", 4, "min_new_tokens is 4"),
        ("logit_bias", {"7": -100}, "logit_bias is {'7': -100}"),
        ("other", {"min_p_": 0.1}, "other['min_p_'] is 0.1"),
        ("other", {"typical_p": 0.95}, "other['typical_p'] is 0.95: nothing says"),
        ("other", {"top_a": 0.2}, "set 0"),
        ("other", {"epsilon_cutoff": 1e-4}, "epsilon_cutoff"),
        ("other", {"eta_cutoff": 1e-4}, "eta_cutoff"),
        ("other", {"json_schema": "{}"}, "other['json_schema'] is '{}'"),
        ("other", {"custom_logit_processor": "x"}, "leave it out"),
        ("temperature", 0.9, "temperature is 0.9, the contract says 1.0"),
        ("top_p", 0.0, "top_p and min_p must be in (0, 1] and [0, 1], got 0.0 and 0.0"),
        ("top_p", float("nan"), "got nan"),
        ("min_p", 1.5, "got 1.0 and 1.5"),
    ],
)
def test_item_46_others_are_refused_before_and_after(knob, value, text):
    with pytest.raises(ContractViolation) as error:
        check_sampling(Sampling(8, **{knob: value}), SCALED, engine="sglang")
    assert text in str(error.value)
    refuses(text, **{knob: value})


def test_item_46_truncation_is_refused_unless_it_is_recorded():
    for knob in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}):
        with pytest.raises(ContractViolation, match="untruncated rollout distribution; set top_p 1, top_k -1, min_p 0"):
            check_sampling(Sampling(8, **knob), SCALED, engine="sglang")
        check_sampling(Sampling(8, **knob), SCALED, engine="sglang", records_kept_tokens=True)


def test_item_46_the_reason_is_that_of_the_engine():
    for engine, words in (("sglang", "SGLang's log-probs are those after it"), ("vllm", "vLLM's raw"), ("x", "drawn")):
        refuses(words, engine=engine, presence_penalty=1.0)


def test_item_47_a_rollout_function_declares_itself():
    def generate():
        return []

    with pytest.raises(ContractViolation, match=r"generate'.*p3o_behavior_logprob_contract is None"):
        check_custom_generate(generate)
    for value in (False, 1, "yes"):
        generate.p3o_behavior_logprob_contract = value
        with pytest.raises(ContractViolation, match="and say so"):
            check_custom_generate(generate)
    generate.p3o_behavior_logprob_contract = True
    check_custom_generate(generate)


FIRST = Turn([1, 2], [7, 8], [-1.0, -2.0])


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([Turn([1, 2], [7, 8], [-1.0])], "turn 0: log_probs has 1 entries for 2 sampled tokens after 2 of prompt"),
        ([FIRST, Turn([1, 2, 7, 8], [9], None)], "turn 1 requires .* got none for 1 tokens, though turn 0 has 2"),
        ([Turn([1, 2], [7, 8], None), FIRST], "turn 0 requires behavior log-probs, got none for 2 tokens; let"),
        ([FIRST._replace(pairing_mask=[True])], "turn 0: pairing_mask has 1 entries for 2 sampled tokens"),
        ([FIRST, Turn([1, 2, 7, 8], [9], [-1.0], [True] * 2)], "turn 1: pairing_mask has 2 entries for 1"),
        ([], "turns are missing"),
    ],
)
def test_item_48_every_turn_has_its_log_probs(turns, text):
    with pytest.raises(ContractViolation, match=text):
        accumulate_turns(turns)


def test_item_48_no_mask_means_that_all_are_paired():
    later = Turn([1, 2, 7, 8, 30], [9, 10], [-3.0, -4.0], [False, True])
    assert accumulate_turns([FIRST, later]).pairing_mask == [True, True, True, False, True]


def test_item_49_both_masks_count():
    sample = Sample.from_lists([1, 2, 3, 4], 3, [-1.0] * 3, [1, 1, 0], pairing_mask=[True, False, True])
    assert sample.valid_mask.tolist() == [True, False, False]
    assert Sample.from_lists([1, 2, 3, 4], 3, [-1.0] * 3).valid_mask.tolist() == [True] * 3
    for values, masks, text in (
        ([-1.0] * 2, {}, "behavior_log_probs has length 2, but response_length is 3"),
        ([-1.0] * 3, {"pairing_mask": [1]}, "pairing_mask has length 1"),
        (None, {}, "requires behavior log-probs"),
    ):
        with pytest.raises(ValueError, match=text):
            Sample.from_lists([1, 2, 3, 4], 3, values, **masks)


def test_item_50_placeholders():
    ids, pairing, counts = replace_placeholders([5, 40, 6, 41, 40], {40, 41, 42}, 3)
    assert ids.tolist() == [5, 3, 6, 3, 3] and ids.dtype == torch.int64
    assert pairing.tolist() == [True, False, True, False, False]
    assert counts == {40: 2, 41: 1}
    # what follows was sampled after the placeholder
    suffix = replace_placeholders([5, 40, 6, 7], {40}, 3, mask_suffix=True)
    assert suffix[0].tolist() == [5, 3, 6, 7] and suffix[1].tolist() == [True, False, False, False]
    assert suffix[2] == {40: 1}


def test_item_50_ids_that_a_tokenizer_lacks():
    for none in ((), (None, None)):
        ids, pairing, counts = replace_placeholders([5, 40], none, 3)
        assert (ids.tolist(), pairing.tolist(), counts) == ([5, 40], [True, True], {})
    # 0 is an id
    assert replace_placeholders([0, 5], [0, None], 3)[0].tolist() == [3, 5]
    assert replace_placeholders([], [4], 3)[0].shape == (0,)
    with pytest.raises(ValueError, match=r"pad_token_id 4 is one of placeholder_ids \[4\]"):
        replace_placeholders([1], [4], 4)


PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


@pytest.mark.parametrize(("temperature", "ess"), [(0.6, 0.8489), (1.2, 0.9901), (1.0, 1.0)])
def test_item_51_a_behavior_temperature_and_a_trainer_at_one(temperature, ess):
    contract = Contract("mismatch", temperature, VOCAB)
    assert contract.trainer_temperature == 1 and contract.log_prob_kind == "scaled"
    scaled = PROBABILITIES.log() / temperature
    behavior = scaled.log_softmax(-1)
    policy = (PROBABILITIES.log() / contract.trainer_temperature).log_softmax(-1)
    ratio, weight = (policy - behavior).exp(), behavior.exp()
    population = (weight * ratio).sum() ** 2 / (weight * ratio**2).sum()
    assert abs(float(population) - ess) < 5e-5  # four digits are given
    # as many of each token as there are in a sample of 2e5; counts round by 2.5e-6 of it, log-probs by 6e-8
    counts = (weight * 200_000).round().long()
    tokens = torch.arange(4).repeat_interleave(counts)
    context = ratio_stats(policy.float()[tokens], behavior.float()[tokens]).to_context()
    assert abs(float(context.ess) - float(population)) < 2e-5
    # and with the trainer at the same temperature nothing is lost
    own = (PROBABILITIES.log() / Contract("scaled", temperature, VOCAB).trainer_temperature).log_softmax(-1)
    assert float(ratio_stats(own.float()[tokens], behavior.float()[tokens]).to_context().ess) > 1 - 1e-6


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_item_51_temperatures_that_are_refused(text):
    for value in (text, float(text)):
        with pytest.raises(ValueError, match="temperature must be a finite number > 0"):
            Contract("mismatch", value, VOCAB)


def test_item_52_what_engines_return():
    """At 0.6, raw log-probs, vLLM's default and SGLang's with RETURN_ORIGINAL_LOGPROB, are not SGLang's scaled ones."""
    cool = Contract("scaled", 0.6, VOCAB)
    check(sampled(temperature=0.6, engine="sglang"), contract=cool)
    for engine in ("vllm", "sglang"):
        refuses("'raw' at temperature 0.6", engine=engine, log_prob_kind="raw", temperature=0.6, contract=cool)
    refuses("ignore the temperature", source="input", temperature=0.6, contract=cool)
    # the ratio that such a trainer would see on unchanged weights
    scaled = (PROBABILITIES.log() / 0.6).log_softmax(-1)
    mass = sum(p ** (1 / 0.6) for p in (0.5, 0.3, 0.15, 0.05))
    assert float((scaled - PROBABILITIES.log()).exp()[0]) == pytest.approx(0.5 ** (1 / 0.6) / mass / 0.5, rel=1e-12)
    assert 0.5 ** (1 / 0.6) / mass / 0.5 > 1.25


def test_item_53_the_snapshot_is_replaced_on_schedule():
    assert (snapshot_tag(1), snapshot_tag(2), snapshot_tag(3)) == ("actor", "rollout_policy", "rollout_policy")
    assert [refresh_after(rollout, 3, 8) for rollout in range(8)] == [False, False, True] * 2 + [False, True]
    assert all(refresh_after(rollout, 1, 4) for rollout in range(4))
    for function in (lambda: snapshot_tag(0), lambda: refresh_after(0, 0, 3), lambda: snapshot_tag(-1)):
        with pytest.raises(ValueError, match="interval must be >= 1 rollouts"):
            function()
    for rollout in (-1, 3):
        with pytest.raises(ValueError, match=rf"rollout_id must be in \[0, 3\), got {rollout}"):
            refresh_after(rollout, 1, 3)


def test_item_54_age_is_in_rollouts_before_the_refresh():
    snapshot, ages = 0, []
    for rollout in range(6):
        ages.append(policy_age(rollout, snapshot))
        if refresh_after(rollout, 3, 8):
            snapshot = rollout + 1
    assert ages == [0, 1, 2, 0, 1, 2]
    for current, taken in ((2, 3), (2, -1), (-1, -1)):
        with pytest.raises(ValueError, match=rf"snapshot_rollout_id must be in \[0, {current}\].*got {taken}"):
            policy_age(current, taken)


def test_item_55_a_run_from_given_weights_has_the_snapshot_of_rollout_0():
    assert policy_age(0, 0) == 0
    with pytest.raises(ValueError, match="a run that starts from given weights has the snapshot of rollout 0"):
        policy_age(0, 1)  # a backend counts its first step as 1
    assert policy_age(5, 3) == 2  # a run that goes on has that of its checkpoint


@pytest.fixture
def native(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    return tmp_path


def test_item_56_a_snapshot_that_is_not_in_the_checkpoint(native, tmp_path):
    def resume(estimator, interval, load):
        args = Namespace(advantage_estimator=estimator, update_weights_interval=interval, load=load)
        validate_p3o_resume(args, snapshot_in_checkpoint=False)

    with pytest.raises(ValueError, match=r"cannot resume exactly.*snapshot is not checkpointed"):
        resume("p3o", 3, native)
    for accepted in (("p3o", 1, native), ("p3o", 3, tmp_path / "fresh"), ("grpo", 3, native)):
        resume(*accepted)


def test_item_57_what_is_a_native_checkpoint(native, tmp_path):
    assert is_native_checkpoint(native)
    full, empty, foreign = (tmp_path / name for name in ("iter_0000004", "iter_0000008", "hf"))
    for folder in (full, empty, foreign):
        folder.mkdir()
    (full / "common.pt").write_bytes(b"0")
    (foreign / "config.json").write_text("{}")
    assert is_native_checkpoint(full)
    assert not any(map(is_native_checkpoint, (empty, foreign, tmp_path / "absent", None)))


def test_item_58_no_precision_flag_means_float32(monkeypatch):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 8, "vocab_size": 8}
    assert ModelConfig(**sizes).dtype == torch.float32
    assert TrainConfig().model_config(16).dtype == torch.float32
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    for kind in ("tensor_model", "pipeline_model", "context"):  # of a process without groups
        monkeypatch.setattr(parallel_state, f"get_{kind}_parallel_world_size", lambda: 1)
    megatron = transformer_config(ModelConfig(**sizes))
    assert megatron.params_dtype == torch.float32 and not megatron.bf16 and not megatron.fp16
