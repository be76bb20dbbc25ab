"""A reward of the user's that raises, hangs, gives NaN or ends its process: named, and nothing is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.soak.runs import Campaign, finished, last_line, lines, saved_step, state, train_flags
from tests.soak.trials import Trial

CHARACTERS = "0123456789+=\n"
ROLLOUTS = 6
FAULTS = ("raises", "hangs", "gives NaN", "ends its process")
LIMIT_S = 3.0
"""For one reward."""


def rewards(campaign: Campaign, times: int) -> list[Trial]:
    """Each fault in a run of its own, after the first rollout."""
    folder = campaign.directory("text")
    _write_inputs(folder)
    whole_dir = campaign.directory("whole-reward")
    statuses, text, _ = finished(_flags(whole_dir, folder))
    if statuses != [0]:
        raise RuntimeError(f"the undisturbed run with rewards ended with {statuses}: {last_line(text)}")
    whole = state(whole_dir)
    trials = []
    for number in range(times):
        for fault in FAULTS:
            run_dir = campaign.directory(f"reward-{number}")
            flags = _flags(run_dir, folder)
            (status,), text, _ = finished(flags, 120, environment={"P3O_SOAK_REWARD": fault})
            wrong = (
                "" if status == 1 and "tests.soak.scores:score" in text else f"ended with {status}: {last_line(text)}"
            )
            if "Traceback" in last_line(text) or not lines(run_dir):
                wrong = wrong or f"no step before the fault: {last_line(text)}"
            lost = len(lines(run_dir)) - saved_step(run_dir)
            statuses, text, _ = finished(flags)
            if statuses != [0] or state(run_dir) != whole:
                wrong = wrong or f"went on to {statuses}, another end than undisturbed: {last_line(text)}"
            how = "a reward of the user's, in a worker process, from the second rollout on"
            trials.append(campaign.told(Trial(f"reward that {fault}", how, not wrong, lost, None, wrong)))
    return trials


def _flags(run_dir: Path, folder: Path) -> list[str]:
    more = ["--task", "prompts", "--rm-type", "tests.soak.scores:score", "--prompt-data", str(folder / "prompts.jsonl")]
    more += ["--hf-checkpoint", str(folder), "--reward-time-limit-s", str(LIMIT_S), "--rollout-max-response-len", "2"]
    return train_flags(run_dir, ROLLOUTS, *more)


def _write_inputs(folder: Path) -> None:
    """Prompts, and a random model whose tokens are characters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokens = {character: index for index, character in enumerate(CHARACTERS)} | {"<end>": len(CHARACTERS)}
    made = Tokenizer(models.WordLevel(tokens, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    folder.mkdir(parents=True)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 16}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    rows = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) for a in range(5) for b in range(5)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + os.linesep)
