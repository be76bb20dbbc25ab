"""``p3o train`` and ``p3o export`` on a Hugging Face checkpoint with a tokenizer, prompts and rewards from files."""

import json
import subprocess
import sys

import pytest
import torch

from p3o_train.rollout_files import read_rollout
from tests.megatron.test_command import ENVIRONMENT
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
CHARACTERS = "0123456789+=\n"
TRAIN = ["--task", "prompts", "--rm-type", "digits", "--num-rollouts", "2", "--rollout-batch-size", "4", "--lr", "1e-2"]
TRAIN += ["--n-samples-per-prompt", "4", "--global-batch-size", "16", "--rollout-max-response-len", "1"]
TRAIN += ["--eval-interval", "1", "--n-eval-prompts", "3", "--save-interval", "2"]
TRAIN += ["--p3o-ess-scope", "step", "--use-rollout-logprobs", "--calculate-per-token-loss"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny random Qwen3 whose tokens are characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("checkpoint")
    tokens = {character: index for index, character in enumerate(CHARACTERS)} | {"<end>": 13}
    made = Tokenizer(models.WordLevel(tokens, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()  # no blanks in between
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 16}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Prompts of training and of evaluation."""
    folder = tmp_path_factory.mktemp("prompts")
    for name, first in (("train", 0), ("eval", 5)):
        sums = [(a, b) for a in range(first, first + 5) for b in range(5)]
        lines = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) for a, b in sums]
        (folder / name).write_text("\n".join(lines))
    return ["--prompt-data", str(folder / "train"), "--eval-prompt-data", str(folder / "eval")]


def p3o(*arguments):
    command = [sys.executable, "-m", "p3o_train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=200)
    return done.returncode, done.stdout + done.stderr


def tensors(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_a_run_from_files_and_back(checkpoint, files, tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["--hf-checkpoint", checkpoint, *files, "--run-dir", run_dir, *TRAIN]
    status, told = p3o("train", *arguments)
    assert status == 0, told
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all("eval/reward_mean" in row for row in rows)
    # transformers' float32 and Megatron's
    assert all(row["train/p3o/log_ratio_abs_max"] < 1e-4 for row in rows)
    for rollout_id, row in enumerate(rows):
        _, samples = read_rollout(run_dir / "rollouts", rollout_id)
        for sample in samples:
            prompt = "".join(CHARACTERS[token] for token in sample.token_ids[: -sample.response_length])
            a, b = prompt[0], prompt[2]
            assert prompt == f"{a}+{b}=" and int(a) < 5
            text = "".join(CHARACTERS[token] for token in sample.response_ids if token < len(CHARACTERS))
            number = text.replace("=", " ").replace("+", " ").split()
            assert sample.reward == float(bool(number) and int(number[0]) == int(a) + int(b)), text
        assert row["train/reward_mean"] == pytest.approx(sum(sample.reward for sample in samples) / len(samples))

    before, after = tmp_path / "before", tmp_path / "after"
    assert p3o("export", *arguments, "--output", before)[0] == 0
    assert p3o("export", *arguments, "--output", after, "--resume")[0] == 0
    original, first, last = (tensors(path) for path in (checkpoint, before, after))
    assert first.keys() == last.keys() == original.keys()
    assert all(torch.equal(first[name], original[name]) for name in original)
    assert [name for name in original if torch.equal(last[name], original[name])] == []

    status, told = p3o("export", *arguments, "--output", after)
    assert status == 2 and f"p3o export: {after} exists already" in told
    status, told = p3o("export", *arguments, "--output", tmp_path / "x", "--resume", "--run-dir", tmp_path / "empty")
    assert status == 2 and "--resume, but there is no checkpoint in --run-dir" in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hf-checkpoint", "nowhere"], "nowhere"),
        (["--prompt-data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--rm-type", "json:nothing"], "nothing"),
        (["--label-key", "solution"], "solution"),
        (["--apply-chat-template"], "chat template"),
        (["--max-staleness", "1", "--update-weights-interval", "3"], "set --max-staleness 2 or -1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_used_is_named_and_nothing_is_written(checkpoint, files, tmp_path, flags, message):
    run_dir = tmp_path / "run"
    status, told = p3o("train", "--hf-checkpoint", checkpoint, *files, "--run-dir", run_dir, *TRAIN, *flags)
    (line,) = [line for line in told.splitlines() if line.startswith("p3o train: ")]
    assert status == 2 and message in told and "Traceback" not in told, line
    assert not (run_dir / "metrics.jsonl").exists() and not (run_dir / "config.json").exists()
