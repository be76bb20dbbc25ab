"""The list of kernel variants is complete and exact: it is what compile budgets and the report are about."""

import importlib
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from p3o_kernels import (
    ESSContext,
    P3OOutput,
    RatioStats,
    _backend,
    _launch,
    linear_log_probs,
    p3o_loss,
    p3o_loss_from_hidden,
    p3o_loss_from_logits,
    p3o_loss_per_sequence,
    p4o_loss,
    ratio_stats,
    token_log_probs,
)
from p3o_kernels._variants import VARIANTS, Variant

pytestmark = pytest.mark.host_only  # nothing is launched here, so there is nothing to sanitise

T, B = 40, 3
LONG = 8192  # tokens from which on several programs walk a sequence
ROWS, VOCAB, HIDDEN = 8, 1100, 8
WORKSPACE = 2 * ROWS * 1024  # half precision: two parts of the vocabulary; float32: cut along the rows, too
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
MATRICES = (torch.bfloat16, torch.float16, torch.float32)


class Launch(NamedTuple):
    """What decides which machine code runs."""

    function: str
    constexprs: frozenset[tuple[str, Any]]
    pointers: frozenset[tuple[str, str]]
    threads: int


class Recorder:
    """Stands in for ``_launch.run``: notes what was asked for and launches nothing."""

    def __init__(self) -> None:
        self.launches: set[Launch] = set()
        self.unaligned: set[tuple[str, str]] = set()
        self.arguments: list[tuple[Any, dict[str, Any], dict[str, Any], int]] = []

    def __call__(self, kernel: Any, programs: int, threads: int, arguments: dict[str, Any], **constexprs: Any) -> None:
        assert programs >= 1
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        self.launches.add(
            Launch(
                kernel.__name__,
                frozenset(constexprs.items()),
                frozenset((name, POINTERS[value.dtype]) for name, value in tensors.items()),
                threads,
            )
        )
        self.unaligned |= {(kernel.__name__, name) for name, value in tensors.items() if value.data_ptr() % 16}
        self.arguments.append((kernel, arguments, constexprs, threads))


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(_launch, "run", recorder)
    monkeypatch.setattr(_backend, "INTERPRETED", True)  # "auto" is triton on the CPU, too
    return recorder


def listed(variant: Variant) -> Launch:
    pointers = frozenset((name, kind) for name, kind in variant.signature.items() if kind.startswith("*"))
    return Launch(variant.function, frozenset(variant.constexprs.items()), pointers, variant.threads)


LISTED = set(map(listed, VARIANTS))
ALIGNED = {(variant.function, name) for variant in VARIANTS for name in variant.divisible_by_16}


def layouts(values: Tensor) -> dict[str, Tensor]:
    """The same values aligned, one element off, and with a stride."""
    shifted = values.new_empty(values.numel() + 1)[1:]
    return {"aligned": values, "shifted": shifted.copy_(values), "strided": torch.stack([values, values], 1)[:, 0]}


def scalar(layout: str, dtype: torch.dtype) -> Tensor:
    """One number, in a tensor of its own or as an element of a vector."""
    return torch.ones((), dtype=dtype) if layout == "aligned" else torch.ones(3, dtype=dtype)[1]


def run_loss(layout: str, masked: bool, sequences: bool, given: bool, terms: bool, **options: Any) -> P3OOutput:
    def tokens(size: int = T) -> Tensor:
        return layouts(torch.randn(size))[layout]

    ess = scalar(layout, torch.float64)
    return p3o_loss(
        tokens().requires_grad_(),
        tokens(),
        tokens(B if sequences else T),
        layouts(torch.ones(T, dtype=torch.bool))[layout] if masked else None,
        cu_seqlens=layouts(torch.tensor([0, 7, 7, T], dtype=torch.int32))[layout] if sequences else None,
        context=ESSContext(ess, ess, ess, ess, ess) if given else None,
        ref_log_probs=tokens() if terms else None,
        ref_kl_coef=0.1 * terms,
        entropy=tokens().requires_grad_() if terms else None,
        entropy_coef=0.01 * terms,
        validate=False,
        **options,
    )


def run_backward(loss: Tensor, layout: str) -> None:
    if loss.dim() == 0:
        loss.backward(scalar(layout, torch.float32))
        return
    loss.sum().backward(retain_graph=True)  # arrives with stride 0
    loss.backward(layouts(torch.randn(T))[layout])


def run_public_calls(layout: str) -> None:
    flags = itertools.product((False, True), repeat=4)
    for (masked, sequences, given, terms), reduction in itertools.product(list(flags), ("none", "mean", "sum")):
        run_backward(run_loss(layout, masked, sequences, given, terms, reduction=reduction).loss, layout)
    for kl_mode, masked in itertools.product(("proxy", "importance"), (False, True)):
        run_backward(run_loss(layout, masked, False, False, False, kl_mode=kl_mode).loss, layout)
    for num_tokens in (1, 1 << 40, scalar(layout, torch.float64), scalar(layout, torch.int64)):
        run_backward(run_loss(layout, True, False, True, False, num_tokens=num_tokens).loss, layout)
    values = layouts(torch.randn(T))[layout]
    ratio_stats(values, values)
    ratio_stats(values, values, layouts(torch.ones(T, dtype=torch.bool))[layout])
    vector = layouts(torch.ones(4, dtype=torch.float64))[layout]
    RatioStats.from_vector(vector).to_context(validate=False)


def run_anchored_calls(layout: str) -> None:
    """Two anchors, and an e for each sequence of many and of few long ones."""
    flags = itertools.product((False, True), repeat=3)
    for (masked, sequences, given), reduction in itertools.product(list(flags), ("none", "mean")):
        run_anchored(layout, T, [7, 0, T - 7], masked, sequences, given, reduction)
    for masked in (False, True):
        run_anchored(layout, LONG, [LONG], masked, False, False, "sum")
    run_anchored(layout, 0, [], True, True, True, "mean")


def run_anchored(
    layout: str, tokens: int, lengths: list[int], masked: bool, sequences: bool, given: bool, reduction: str
) -> None:
    log_probs, behavior, proximal, token_advantages = (layouts(torch.randn(tokens))[layout] for _ in range(4))
    advantages = layouts(torch.randn(len(lengths)))[layout] if sequences else token_advantages
    mask = layouts(torch.ones(tokens, dtype=torch.bool))[layout] if masked else None
    cu_seqlens = layouts(torch.tensor([0, *lengths]).cumsum(0).int())[layout]
    ess = scalar(layout, torch.float64)
    context = ESSContext(ess, ess, ess, ess, ess) if given else None
    options = {"cu_seqlens": cu_seqlens, "reduction": reduction, "validate": False}
    log_probs.requires_grad_()
    contexts = {"context": context, "proximal_context": context}
    for output in (
        p3o_loss_per_sequence(log_probs, behavior, advantages, mask, **options),
        p4o_loss(log_probs, behavior, proximal, advantages, mask, **options, **contexts),
    ):
        loss = output.loss
        if loss.dim() == 0:
            loss.backward(scalar(layout, torch.float32))
        else:
            loss.backward(layouts(torch.randn(tokens))[layout])


def matrix(layout: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A leaf's view: rows on 16-byte boundaries; rows anywhere; entries of a row apart."""
    leaf = torch.randn(rows + 1, columns + 4).to(dtype).requires_grad_()
    if layout == "aligned":
        return leaf.flatten()[: rows * columns].view(rows, columns)
    if layout == "shifted":
        return leaf[1:, 1 : columns + 1]
    return leaf.flatten()[: rows * columns].view(columns, rows).t()


def row_options(layout: str, everything: bool, softcap: bool) -> dict[str, Any]:
    return {
        "mask": layouts(torch.arange(ROWS) != 2)[layout] if everything else None,
        "temperature": layouts(torch.full((ROWS,), 0.7))[layout] if everything else 0.7,
        "softcap": 30.0 if softcap else None,
    }


def run_log_probs(layout: str, function: Any, matrices: Any, **options: Any) -> None:
    """With gradients of stride 0, as a sum sends them, and others; of the log-probs, of the entropy and of both."""
    labels = layouts(torch.arange(ROWS))[layout]
    function(*matrices(), labels.int(), **options).sum().backward()
    log_probs, entropy = function(*matrices(), labels, return_entropy=True, **options)
    entropy.sum().backward(retain_graph=True)
    grads = [layouts(torch.randn(ROWS))[layout] for _ in range(2)]
    torch.autograd.backward([log_probs, entropy], grads)


def token_arguments(layout: str, sequences: bool, terms: bool) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and named arguments of a loss, of ROWS tokens."""
    behavior, advantages, reference = (layouts(torch.randn(ROWS))[layout] for _ in range(3))
    if sequences:
        advantages = layouts(torch.randn(B))[layout]
    cu_seqlens = layouts(torch.tensor([0, 3, 3, ROWS], dtype=torch.int32))[layout]
    named = {"cu_seqlens": cu_seqlens if sequences else None, "ref_log_probs": reference if terms else None}
    return (behavior, advantages), named | {"ref_kl_coef": 0.1 * terms, "entropy_coef": 0.01 * terms}


def run_row_loss(layout: str, function: Any, matrices: list[Tensor], given: bool, terms: bool, **options: Any) -> None:
    ess = scalar(layout, torch.float64)
    tensors, named = token_arguments(layout, sequences=given, terms=terms)
    labels = layouts(torch.arange(ROWS))[layout]
    loss = function(
        *matrices,
        labels,
        *tensors,
        **named,
        context=ESSContext(ess, ess, ess, ess, ess) if given else None,
        validate=False,
        **options,
    ).loss
    loss.backward()


def run_row_calls(layout: str) -> None:
    """Everything that takes logits or makes them; with little workspace, partials of the vocabulary are joined."""
    for dtype, softcap, everything in itertools.product(MATRICES, (False, True), (False, True)):
        options = row_options(layout, everything, softcap)
        in_place = {"inplace_backward": everything and layout != "strided"}
        workspace = {"workspace_bytes": WORKSPACE} if everything else {}

        def logits(dtype: torch.dtype = dtype) -> list[Tensor]:
            return [matrix(layout, ROWS, VOCAB, dtype)]

        def layer(dtype: torch.dtype = dtype) -> list[Tensor]:
            return [matrix(layout, ROWS, HIDDEN, dtype), matrix(layout, VOCAB, HIDDEN, dtype)]

        run_log_probs(layout, token_log_probs, logits, **options)
        run_log_probs(layout, linear_log_probs, layer, **options, **workspace)
        for given, terms in itertools.product((False, True), repeat=2):
            run_row_loss(layout, p3o_loss_from_logits, logits(), given, terms, **options, **in_place)
            run_row_loss(layout, p3o_loss_from_hidden, layer(), given, terms, **options, **workspace)


@pytest.mark.parametrize("layout", ["shifted", "strided"])
@pytest.mark.parametrize("run", [run_public_calls, run_row_calls, run_anchored_calls])
def test_launches_use_only_listed_variants(recorder, layout, run):
    run(layout)
    assert recorder.launches - LISTED == set()
    assert recorder.unaligned & ALIGNED == set()


def test_no_token_at_all_uses_only_listed_variants(recorder):
    empty = torch.empty(0)
    for reduction in ("none", "mean"):
        p3o_loss(empty, empty, empty, empty.bool(), reduction=reduction, validate=False)
    token_log_probs(torch.empty(0, VOCAB), torch.empty(0, dtype=torch.long))
    assert recorder.launches - LISTED == set()


def test_shards_of_a_process_group_use_only_listed_variants(recorder):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        options = {"process_group": torch.distributed.group.WORLD, "workspace_bytes": WORKSPACE}
        layer = [matrix("aligned", size, HIDDEN, torch.float32) for size in (ROWS, VOCAB)]
        linear_log_probs(*layer, torch.arange(ROWS), **options).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert len({arguments["finish"] for _, arguments, _, _ in recorder.arguments if "finish" in arguments}) == 2
    assert recorder.launches - LISTED == set()
    assert recorder.unaligned & ALIGNED == set()


def test_every_listed_variant_is_launched_and_no_other(recorder):
    run_public_calls("aligned")
    run_row_calls("aligned")
    run_anchored_calls("aligned")
    assert LISTED ^ recorder.launches == set()
    assert recorder.unaligned & ALIGNED == set()


def test_names_are_unique():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_modules_and_arguments_exist():
    for variant in VARIANTS:
        kernel = getattr(importlib.import_module(variant.module), variant.function)
        assert kernel.arg_names == list(variant.signature), variant.name
        assert set(variant.reads + variant.writes) <= variant.signature.keys()


@pytest.mark.skipif(_backend.INTERPRETED, reason="interpreted kernels have no signature")
def test_triton_would_specialise_launches_as_listed(recorder):
    """Asks Triton's own argument binder what it would compile for the recorded arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    run_public_calls("shifted")
    run_row_calls("shifted")
    run_anchored_calls("shifted")
    assert {("row_stats_kernel", "logits_ptr"), ("row_grad_kernel", "out_ptr")} <= recorder.unaligned
    backend = make_backend(GPUTarget("cuda", 90, 32))
    wanted = {
        (v.function, tuple((kind, "D" * (name in v.divisible_by_16)) for name, kind in v.signature.items()))
        for v in VARIANTS
    }
    binders = {}
    for kernel, arguments, constexprs, _ in recorder.arguments:
        if kernel not in binders:
            binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, types, _ = binders[kernel](**arguments, **constexprs)
        got = tuple((kind, "" if kind == "constexpr" else detail or "") for kind, detail in types)
        assert (kernel.__name__, got) in wanted
