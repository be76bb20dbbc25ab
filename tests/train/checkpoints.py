"""A tiny run whose state says which iteration it belongs to, and what it does to its checkpoints."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from p3o_train import checkpoint
from p3o_train.checkpoint import Loaded, load_checkpoint, save_checkpoint

IDENTITY = {"lr": 0.1, "tensor_model_parallel_size": 1}


class Run:
    """Two weights with torch's Adam, wrapped as Megatron wraps it; ``to`` makes the state of an iteration."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        adam = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.optimizer = SimpleNamespace(optimizer=adam)

    def to(self, iteration: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, iteration)
        self.optimizer.optimizer.step()
        for parameter in self.model.parameters():
            parameter.data.fill_(float(iteration))

    def save(self, directory: Any, iteration: int, **options: Any) -> None:
        self.to(iteration)
        save_checkpoint(
            directory,
            iteration,
            model=[self.model],
            optimizer=self.optimizer,
            scheduler=None,
            progress={"iteration": iteration},
            identity=IDENTITY,
            **options,
        )

    def load(self, directory: Any, iteration: int | None = None, identity: Any = IDENTITY) -> Loaded:
        return load_checkpoint(
            directory,
            model=[self.model],
            optimizer=self.optimizer,
            scheduler=None,
            identity=identity,
            iteration=iteration,
        )

    def state(self) -> list[Any]:
        adam = self.optimizer.optimizer.state_dict()["state"]
        moments = [value.tolist() for state in adam.values() for value in state.values()]
        return [parameter.tolist() for parameter in self.model.parameters()] + moments


def consistent(directory: Any) -> int:
    """The iteration that loads; its weights and progress must be of that iteration."""
    run = Run()
    loaded = run.load(directory)
    assert loaded.progress == {"iteration": loaded.iteration}
    assert all((parameter == loaded.iteration).all() for parameter in run.model.parameters())
    return loaded.iteration


def fails_on_rank_one(rank: int, directory: str) -> Any:
    """What both ranks raise, and what loads afterwards."""
    run = Run()
    run.save(directory, 1)
    broken = mock.patch.object(checkpoint.torch, "save", side_effect=OSError(28, "No space left on device"))
    try:
        with broken if rank == 1 else mock.patch.dict({}):
            run.save(directory, 2)
    except OSError as error:
        return str(error), consistent(directory), dist.get_world_size()
    return "nothing was raised", None, None


if __name__ == "__main__":
    endless = Run()
    for number in range(int(sys.argv[2]), 10**6):
        endless.save(sys.argv[1], number)
        print(number, flush=True)
