"""Faults of one rank in a step on real Megatron-Core, and what every rank holds afterwards.

The model draws random numbers in every forward pass, as one with dropout would, so that streams that were not put back
are seen.
"""

import contextlib
import dataclasses
import hashlib
import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy
import torch
import torch.distributed as dist

from p3o_train import passes
from p3o_train.device_shim import megatron_on_cpu
from p3o_train.objective import Objective
from p3o_train.passes import policy_log_probs
from p3o_train.replay import MicroBatches
from p3o_train.types import PackedBatch
from tests.megatron.product import Product, build_product
from tests.megatron.steps import Cut, batches
from tests.megatron.topologies import CONFIG, Topology, groups

STEP = Objective(ess_scope="step")
OBJECTIVES = {
    "step": STEP,
    "micro-batch": Objective(),
    "reuse": dataclasses.replace(STEP, context_source="reuse"),
    "reference": dataclasses.replace(STEP, ref_kl_coef=0.1),
    "GRPO": Objective(advantage_estimator="grpo"),
}


class Case(NamedTuple):
    """What goes wrong where."""

    fault: str
    scope: str
    """A key of ``OBJECTIVES``."""
    rank: int
    """Whose fault it is."""
    overlap: bool = False


class Report(NamedTuple):
    """One rank's view of a case."""

    error: str
    """Type and text; empty if nothing was raised."""
    causes: tuple[str, ...]
    """Types of the errors that this one came from."""
    seconds: float
    changed: list[str]
    """Parts of the rank's state that the failed step has changed."""
    positions: list[int]
    """Of the micro-batch iterators that the failed step has used."""
    healthy: dict[str, str]
    """Digests of the state after a healthy step on the same model and groups."""


def digests(product: Product) -> dict[str, str]:
    """Of everything that a step may move."""
    streams = random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist()
    parts = {
        "weights": [value.detach().numpy().tobytes() for value in product.model.parameters()],
        "optimizer": flat(product.optimizer.state_dict()),
        "scheduler": flat(product.scheduler.state_dict()),
        "streams": streams,
        "finalizer": product.model.config.finalize_model_grads_func.__module__,
    }
    return {name: hashlib.sha256(pickle.dumps(part)).hexdigest() for name, part in parts.items()}


def flat(state: Any) -> Any:
    """Dictionaries and lists with bytes instead of tensors."""
    if isinstance(state, dict):
        return [(str(name), flat(value)) for name, value in state.items()]
    if isinstance(state, list | tuple):
        return [flat(value) for value in state]
    return state.detach().numpy().tobytes() if isinstance(state, torch.Tensor) else state


def draw(*_: Any) -> None:
    random.random()
    numpy.random.random()
    torch.rand(1)


def fresh(overlap: bool) -> Product:
    """After one healthy step, so that the optimizer has a state, and at a known place of all random streams."""
    product = build_product(CONFIG, overlap)
    product.model.module.register_forward_hook(draw)
    return product


class Seen(MicroBatches):
    made: ClassVar[list["Seen"]] = []

    def __init__(self, some: Any) -> None:
        super().__init__(some)
        Seen.made.append(self)


def one_case(cut: Cut, case: Case, last: bool = False) -> Report:
    product = fresh(case.overlap)
    made = batches(cut, product.dp_rank, product.layout)
    healthy_step(product, made, case)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)
    before = digests(product)
    error, began = None, time.monotonic()
    Seen.made = []
    if case.fault:
        with mock.patch.object(passes, "MicroBatches", Seen):
            error = failing_step(product, made, case)
    seconds = time.monotonic() - began
    after = digests(product)
    positions = [iterator.snapshot_position() for iterator in Seen.made]
    if not last:
        healthy_step(product, made, case)
    return Report(
        error="" if error is None else f"{type(error).__name__}: {error}",
        causes=tuple(causes(error)),
        seconds=seconds,
        changed=[name for name in before if before[name] != after[name]],
        positions=positions,
        healthy=digests(product),
    )


def arguments(product: Product, made: list[PackedBatch], case: Case) -> dict[str, Any]:
    """What the objective needs besides micro-batches."""
    objective = OBJECTIVES[case.scope]
    if case.scope == "reuse":
        return {"log_probs": policy_log_probs([product.model], made, objective, product.groups)}
    if case.scope == "reference":
        return {"ref_log_probs": [batch.behavior_log_probs for batch in made]}
    return {}


def healthy_step(product: Product, made: list[PackedBatch], case: Case) -> None:
    product.gradients(made, OBJECTIVES[case.scope], **arguments(product, made, case))
    product.update()


def failing_step(product: Product, made: list[PackedBatch], case: Case) -> Exception | None:
    here = dist.get_rank() == case.rank
    try:
        with FAULTS[case.fault](product, made, here) as broken:
            more = arguments(product, broken, case)
            if here and case.fault == "missing argument":
                more = {}
            product.gradients(broken, OBJECTIVES[case.scope], **more)
            product.update()
    except Exception as error:
        return error
    return None


def causes(error: BaseException | None) -> Iterator[str]:
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
        yield type(error).__name__


def every_case(rank: int, todo: dict[Cut, tuple[Case, ...]]) -> dict[tuple[Cut, Case], Report]:
    """Of this rank; cases without a fault are what the others are compared with."""
    found = {}
    with megatron_on_cpu():
        for cut, cases in todo.items():
            with groups(Topology(cut.tp, cut.pp, cut.cp)):
                found |= {(cut, case): one_case(cut, case) for case in cases}
    return found


def several(rank: int, jobs: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]) -> list[Any]:
    """Tasks of ``on_all_ranks`` one after the other, since starting processes takes longer than most."""
    return [task(rank, *arguments) for task, arguments in jobs]


def abandoned(rank: int, cases: tuple[tuple[Cut, Case], ...], timeout_minutes: float) -> list[Report]:
    """Of cases after which the groups are of no use: without a healthy step."""
    found = []
    with megatron_on_cpu():
        for cut, case in cases:
            with groups(Topology(cut.tp, cut.pp, cut.cp), timeout_minutes):
                found.append(one_case(cut, case, last=True))
    return found


Fault = Callable[[Product, list[PackedBatch], bool], contextlib.AbstractContextManager[Any]]


def of_data(change: Callable[[list[PackedBatch]], list[PackedBatch]], everywhere: bool = False) -> Fault:
    @contextlib.contextmanager
    def fault(product: Product, made: list[PackedBatch], here: bool) -> Iterator[Any]:
        yield change(made) if here or everywhere else made

    return fault


def shifted(log_ratio: float) -> Fault:
    """A policy log-prob is about -4, so this is the log-ratio of one token to within 10."""

    def change(made: list[PackedBatch]) -> list[PackedBatch]:
        behavior = made[1].behavior_log_probs.clone()
        behavior[made[1].mask.nonzero()[0]] = -log_ratio
        return [made[0], dataclasses.replace(made[1], behavior_log_probs=behavior), *made[2:]]

    return of_data(change)


def masked(made: list[PackedBatch]) -> list[PackedBatch]:
    return [dataclasses.replace(batch, mask=torch.zeros_like(batch.mask), num_tokens=0) for batch in made]


class ChangedLater(list):
    """Other tokens in the second micro-batch as soon as gradients are wanted."""

    def __getitem__(self, index: Any) -> Any:
        batch = super().__getitem__(index)
        if index != 1 or not torch.is_grad_enabled():
            return batch
        return dataclasses.replace(batch, tokens=batch.tokens.flip(0))


def second_call(raises: bool, grad: bool | None = None) -> Callable[..., None]:
    """Raises in its second call, counting only those with (without) gradients."""
    calls = []

    def call(*_: Any, **__: Any) -> None:
        if grad in (None, torch.is_grad_enabled()):
            calls.append(None)
        if raises and len(calls) == 2:
            raise KeyError("out of order")

    return call


def of_model(training: bool) -> Fault:
    @contextlib.contextmanager
    def fault(product: Product, made: list[PackedBatch], here: bool) -> Iterator[Any]:
        handle = product.model.module.register_forward_pre_hook(second_call(here, training))
        try:
            yield made
        finally:
            handle.remove()

    return fault


def of_loss(name: str) -> Fault:
    """``name``: of the function that the loss callback of the pass calls."""

    @contextlib.contextmanager
    def fault(product: Product, made: list[PackedBatch], here: bool) -> Iterator[Any]:
        original, check = getattr(passes, name), second_call(here)

        def called(*given: Any, **named: Any) -> Any:
            check()
            return original(*given, **named)

        with mock.patch.object(passes, name, called):
            yield made

    return fault


@contextlib.contextmanager
def nan_output(product: Product, made: list[PackedBatch], here: bool) -> Iterator[Any]:
    handle = product.model.module.register_forward_hook(lambda *given: given[-1] * torch.nan if here else given[-1])
    try:
        yield made
    finally:
        handle.remove()


FAULTS: dict[str, Fault] = {
    "NaN output": nan_output,
    "log-ratio 500": shifted(500.0),
    "log-ratio -500": shifted(-500.0),
    "no token": of_data(masked, everywhere=True),
    "fewer micro-batches": of_data(lambda made: made[:-1]),
    "no micro-batches": of_data(lambda made: []),
    "other tokens": of_data(ChangedLater),
    "model in pre-pass": of_model(training=False),
    "model in training": of_model(training=True),
    "loss in pre-pass": of_loss("micro_batch_log_probs"),
    "loss in training": of_loss("micro_batch_loss"),
    "missing argument": of_data(list),  # the step itself is called without it
}
