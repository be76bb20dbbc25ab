"""A tiny model for TRL's trainers, rollouts with recorded log-probs, and the gradient that a step should have."""

import copy
import random

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from p3o_kernels import reference
from p3o_train.adapters.trl import P3OConfig, P3OTrainer

V, EOS = 48, 1


def tokenizer():
    words = {"<pad>": 0, "<eos>": EOS} | {f"w{index}": index for index in range(2, V)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def tiny_model(seed=0, **changes):
    transformers.set_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "vocab_size": V, "pad_token_id": 0, "eos_token_id": EOS}
    # wide enough that the tokens differ in probability
    return Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=64, initializer_range=0.2, **changes))


def prompts(count=8):
    """Of one and of two words, so that batches hold padding."""
    return datasets.Dataset.from_dict({"prompt": [f"w{2 + place}" + " w30" * (place % 2) for place in range(count)]})


def odd_tokens(completion_ids, **_):
    """The reward: how many tokens are odd, and more of them in a long response."""
    return [sum(token % 2 for token in ids) + 0.1 * len(ids) for ids in completion_ids]


def recorded(prompts, trainer):
    """Rollouts of an older policy: any tokens, with log-probs as an engine records them and tokens of a tool.

    The responses to a prompt are the same in every run, whatever a generation is cut into. What the tool says has no
    log-prob.
    """
    made = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for place, prompt in enumerate(prompts):
        draw = random.Random(f"{prompt} {place % 4}")
        length = draw.randint(2, 6)
        sampled = [int(position == 0 or draw.random() < 0.8) for position in range(length)]
        made["prompt_ids"].append(trainer.processing_class(prompt)["input_ids"])
        made["completion_ids"].append([draw.randrange(2, V) for _ in range(length)])
        made["logprobs"].append([draw.gauss(-4.0, 0.5) if own else None for own in sampled])
        made["env_mask"].append(sampled)
    return made


def config(folder, kind=P3OConfig, **changes):
    base = {"output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1}
    base |= {"max_completion_length": 6, "temperature": 0.8, "learning_rate": 5e-3, "lr_scheduler_type": "constant"}
    base |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_grad_norm": 0.0}
    base |= {"report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    return kind(**base | changes)


class Steps(TrainerCallback):
    """Looks at each optimizer step before it is taken: the gradients, and what they should be."""

    def __init__(self):
        self.trainer, self.gradients, self.want, self.windows, self.metrics = None, [], [], [], []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        trainer = self.trainer
        first = (trainer._step - args.gradient_accumulation_steps) % args.steps_per_generation
        window = copy.deepcopy(trainer._buffered_inputs[first : first + args.gradient_accumulation_steps])
        self.windows.append(window)
        self.gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        self.metrics.append({name: values[-1] for name, values in trainer._metrics["train"].items()})
        self.want.append(expected(args, model, window))


def log_probs_and_entropies(model, inputs, temperature):
    """Plain PyTorch on the logits, in the dtype of the model."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    kept = inputs["completion_ids"].size(1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -kept - 1 : -1] / temperature
    table = logits.log_softmax(-1)
    return table.gather(2, ids[:, -kept:, None])[..., 0], -(table.exp() * table).sum(-1)


def joined(parts):
    """What processes hold of one micro-batch, as one: padded as TRL pads, prompts on the left."""
    made = {}
    for key in (key for key, value in parts[0].items() if value.dim()):
        width = max(part[key].size(-1) for part in parts)
        rows = []
        for part in parts:
            missing = width - part[key].size(-1) if part[key].dim() == 2 else 0
            rows.append(torch.nn.functional.pad(part[key], (missing, 0) if key.startswith("prompt") else (0, missing)))
        made[key] = torch.cat(rows)
    return made


def expected(args, model, window):
    """In float64, by the reference: loss, e and gradients of a window, cut where e is cut."""
    twin = Qwen2ForCausalLM(model.config).double()
    twin.load_state_dict(model.state_dict())
    parts = window
    if args.p3o_ess_scope == "step":
        parts = [joined(window)]
    masks = [(part["completion_mask"] * part.get("tool_mask", 1)).bool() for part in parts]
    tokens, loss, ess = sum(int(mask.sum()) for mask in masks), 0.0, 0.0
    for part, mask in zip(parts, masks, strict=True):
        log_probs, entropy = log_probs_and_entropies(twin, part, args.temperature)
        behavior = part.get("sampling_per_token_logps", part.get("old_per_token_logps", log_probs.detach()))
        made = reference.p3o_loss(
            log_probs,
            behavior.double(),
            part["advantages"].double()[:, None].expand_as(log_probs),
            mask,
            num_tokens=tokens,
            kl_mode=args.p3o_kl_mode,
            entropy=entropy,
            entropy_coef=args.entropy_coef,
            ref_log_probs=part["ref_per_token_logps"].double() if args.beta else None,
            ref_kl_coef=args.beta,
        )
        loss = loss + made.loss
        ess += made.context.ess.item() * int(mask.sum()) / tokens
    loss.backward()
    gradients = {name: weight.grad for name, weight in twin.named_parameters()}
    return {"loss": loss.item(), "ess": ess, "tokens": tokens, "gradients": gradients}


def train(folder, model=None, rollout_func=recorded, trainer_class=P3OTrainer, **changes):
    """Train and look at each step; the trainer and what was seen."""
    steps = Steps()
    steps.trainer = trainer_class(
        model=model or tiny_model(),
        reward_funcs=odd_tokens,
        args=config(folder, **changes),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        rollout_func=rollout_func,
        callbacks=[steps],
    )
    steps.trainer.train()
    return steps
