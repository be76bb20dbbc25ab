"""The list of kernel variants is complete and exact: it is what compile budgets and the report are about."""

import importlib
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from p3o_kernels import ESSContext, P3OOutput, RatioStats, _backend, _launch, p3o_loss, ratio_stats
from p3o_kernels._variants import VARIANTS, Variant

T, B = 40, 3
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


class Launch(NamedTuple):
    """What decides which machine code runs."""

    function: str
    constexprs: frozenset[tuple[str, Any]]
    pointers: tuple[tuple[str, str], ...]
    unaligned: tuple[str, ...]
    threads: int


class Recorder:
    """Stands in for ``_launch._run``: notes what was asked for and launches nothing."""

    def __init__(self) -> None:
        self.launches: set[Launch] = set()
        self.arguments: list[tuple[Any, dict[str, Any], dict[str, Any], int]] = []

    def __call__(self, kernel: Any, programs: int, threads: int, arguments: dict[str, Any], **constexprs: Any) -> None:
        assert programs >= 1
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        self.launches.add(
            Launch(
                kernel.__name__,
                frozenset(constexprs.items()),
                tuple((name, POINTERS[value.dtype]) for name, value in tensors.items()),
                tuple(name for name, value in tensors.items() if value.data_ptr() % 16),
                threads,
            )
        )
        self.arguments.append((kernel, arguments, constexprs, threads))


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(_launch, "_run", recorder)
    monkeypatch.setattr(_backend, "INTERPRETED", True)  # "auto" is triton on the CPU, too
    return recorder


def listed(variant: Variant) -> Launch:
    pointers = tuple((name, kind) for name, kind in variant.signature.items() if kind.startswith("*"))
    unaligned = tuple(name for name, _ in pointers if name not in variant.divisible_by_16)
    return Launch(variant.function, frozenset(variant.constexprs.items()), pointers, unaligned, variant.threads)


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


@pytest.mark.parametrize("layout", ["aligned", "shifted", "strided"])
def test_launches_use_only_listed_variants(recorder, layout):
    run_public_calls(layout)
    assert recorder.launches - set(map(listed, VARIANTS)) == set()


def test_no_token_at_all_uses_only_listed_variants(recorder):
    empty = torch.empty(0)
    for reduction in ("none", "mean"):
        p3o_loss(empty, empty, empty, empty.bool(), reduction=reduction, validate=False)
    assert recorder.launches - set(map(listed, VARIANTS)) == set()


def test_every_listed_variant_is_launched(recorder):
    run_public_calls("aligned")
    assert set(map(listed, VARIANTS)) - recorder.launches == set()


def test_names_are_unique():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_modules_and_arguments_exist():
    for variant in VARIANTS:
        kernel = getattr(importlib.import_module(variant.module), variant.function)
        assert kernel.arg_names == list(variant.signature), variant.name
        assert set(variant.reads + variant.writes) <= variant.signature.keys()


@pytest.mark.host_only
@pytest.mark.skipif(_backend.INTERPRETED, reason="interpreted kernels have no signature")
def test_triton_would_specialise_launches_as_listed(recorder):
    """Asks Triton's own argument binder what it would compile for the recorded arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    run_public_calls("shifted")
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
