"""The policies that the runs of a study start from: one for each seed, right about half of the time.

From random weights most of a short run would pass before there is a reward to compare methods by. A language model that
is trained by reinforcement brings some skill, too.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import torch

from p3o_train.study.design import SEEDS, Cell, cells, flags_of, resolved

SMOOTHING = 0.5
"""Share of the target that is spread evenly over the vocabulary: what is learned is unsure by design."""
STEPS, RATE = 300, 1e-2


def start_cells(seeds: tuple[int, ...] | list[int] = SEEDS) -> list[Cell]:
    """One for each seed, which ``make_start`` runs."""
    return [Cell("start", "supervised", seed) for seed in seeds]


def start_path(directory: Path, seed: int) -> Path:
    """Of the weights, in Hugging Face form."""
    return directory / "start" / str(seed)


def make_start(cell: Cell, scratch: Path, size: str, directory: Path) -> dict[str, Any]:
    """Trains on all questions at once, with smoothed labels, and saves the weights under ``directory``.

    Returns:
        The mean probability of a right token, given right ones before it.
    """
    from p3o_train.hf_files import save_hf
    from p3o_train.hf_model import hf_config, transformers
    from p3o_train.tasks import ReverseDigits

    torch.set_num_threads(1)
    torch.manual_seed(cell.seed)
    task = ReverseDigits(seed=cell.seed)
    config = resolved(flags_of(cells(size)[0]._replace(seed=cell.seed), size))[0]
    described = hf_config(config.model_config(task.vocab_size))
    model: Any = transformers().AutoModelForCausalLM.from_config(described)
    pairs = itertools.product(range(10), repeat=task.digits)
    rows = torch.tensor([[*pair, 10, *reversed(pair), task.end_token_id] for pair in pairs])
    targets = rows[:, task.digits + 1 :]
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    right = 0.0
    for _ in range(STEPS):
        logits = model(rows).logits[:, task.digits : -1]
        loss: Any = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), label_smoothing=SMOOTHING
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        right = logits.detach().softmax(-1).gather(-1, targets[..., None]).mean().item()
    final = start_path(directory, cell.seed)
    shutil.rmtree(final, ignore_errors=True)  # of a process that ended before its result was written
    save_hf(final, described, model.state_dict())
    return {"cell": list(cell), "right": right, "loss": loss.item()}
