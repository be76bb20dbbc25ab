"""Every variant of every kernel that can be launched: what a compiler needs to build it without a GPU.

Nothing here runs in a training step. Compile budgets and the kernel report read the list, and a test records
launches and compares. Integers are never specialised, so one variant serves every T and every vocabulary.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from p3o_kernels import (
    _anchored_kernels,
    _anchored_launch,
    _launch,
    _row_kernels,
    _row_launch,
    _row_loss_kernels,
)
from p3o_kernels._math_kernels import BLOCK, COLUMNS, MAX_PROGRAMS

_ARGUMENTS = {
    "*fp32": "log_probs_ptr behavior_ptr proximal_ptr advantages_ptr reference_ptr entropy_ptr grad_ptr loss_ptr "
    "token_grad_ptr grad_output_ptr log_probs_grad_ptr entropy_grad_ptr temperature_ptr partial_ptr merged_ptr "
    "normalizer_ptr factor_ptr",
    "*fp64": "partials_ptr out_ptr sums_ptr ess_ptr ratio_partials_ptr num_tokens_ptr summary_ptr scale_ptr "
    "proximal_ess_ptr cap_ptr",
    "*fp16": "low_ptr",
    "*u8": "mask_ptr",
    "*i32": "cu_seqlens_ptr",
    "*i64": "count_ptr labels_ptr",
    "i64": "num_tokens num_rows vocab_start stride out_stride grad_stride entropy_grad_stride row_length factor_stride",
    "i32": "num_sequences num_partials kl_mode has_entropy write_loss columns divide vocab misaligned has_mask per_row "
    "finish num_parts per_sequence has_reference chunks field_distance distance",
    "fp32": "log_clip_low log_clip_high entropy_coef reference_coef temperature softcap",
}
_TYPES = {name: kind for kind, names in _ARGUMENTS.items() for name in names.split()}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with one choice of its constexprs."""

    role: str
    """Which budget it falls under."""
    name: str
    module: str
    function: str
    signature: Mapping[str, str]
    """Type of each argument, in order."""
    constexprs: Mapping[str, int | bool]
    threads: int
    reads: tuple[str, ...] = ()
    """The arguments that it reads whole, [T] or logits; like ``writes``, none in a launch that sees sums only."""
    writes: tuple[str, ...] = ()
    """The arguments that it writes whole."""
    block: int = 0
    """Tokens, or logits of a row, of one program in one step; 0 where ``reads`` is empty."""
    sweeps: int = 0
    """How often a program walks the whole blocks of a row of logits; 0 in a kernel over tokens."""
    num_stages: int = 1
    dtype: str = "float32"
    """Of the token tensors, or of the logits."""
    any_address: bool = False
    """Whether the machine code is the same for every alignment of its pointers."""

    @property
    def divisible_by_16(self) -> list[str]:
        """Pointers whose address is: all but logits and what goes with them, because operators copy and allocate so."""
        pointers = [name for name, kind in self.signature.items() if kind.startswith("*")]
        return [] if self.any_address else pointers

    def launch(self, arch: int | str) -> dict[str, Any]:
        """What is launched on ``arch`` (80, 90, 100 or "gfx942"), as plain values."""
        return {
            "role": self.role,
            "variant": self.name,
            "module": self.module,
            "function": self.function,
            "signature": dict(self.signature),
            "constexprs": dict(self.constexprs),
            "divisible_by_16": self.divisible_by_16,
            "num_warps": _launch.warps(self.threads, 64 if isinstance(arch, str) else 32),
            "num_stages": self.num_stages,
            "arch": arch,
            "dtype": self.dtype,
            "reads": list(self.reads),
            "writes": list(self.writes),
            "block": self.block,
            "sweeps": self.sweeps,
        }


def _variant(
    function: str,
    arguments: str,
    threads: int,
    constexprs: Mapping[str, int | bool],
    *,
    module: str = "_token_kernels",
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
) -> Variant:
    flags = ", ".join(name.lower() for name, value in constexprs.items() if value is True)
    return Variant(
        role="K2",
        name=function.removesuffix("_kernel") + (f" {flags}" if flags else ""),
        module=f"p3o_kernels.{module}",
        function=function,
        signature={name: _TYPES[name] for name in arguments.split()} | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        threads=threads,
        reads=reads,
        writes=writes,
        block=constexprs.get("BLOCK", 0),
    )


def _choices(*names: str) -> Iterator[dict[str, int | bool]]:
    for values in itertools.product((False, True), repeat=len(names)):
        yield dict(zip(names, values, strict=True))


def _ratio_sums() -> Iterator[Variant]:
    arguments = "log_probs_ptr behavior_ptr mask_ptr partials_ptr num_tokens"
    for flags in _choices("HAS_MASK"):
        reads = ("log_probs_ptr", "behavior_ptr") + ("mask_ptr",) * flags["HAS_MASK"]
        constexprs = flags | {"BLOCK": BLOCK}
        yield _variant("ratio_sums_kernel", arguments, _launch.THREADS, constexprs, reads=reads)


def _token_loss() -> Iterator[Variant]:
    arguments = (
        "log_probs_ptr behavior_ptr advantages_ptr mask_ptr cu_seqlens_ptr reference_ptr entropy_ptr ess_ptr "
        "ratio_partials_ptr grad_ptr loss_ptr partials_ptr num_tokens num_sequences num_partials kl_mode log_clip_low "
        "log_clip_high entropy_coef reference_coef has_entropy write_loss"
    )
    for flags in _choices("HAS_MASK", "PER_SEQUENCE", "HAS_CONTEXT", "GENERAL"):
        reads = ("log_probs_ptr", "behavior_ptr") + ("mask_ptr",) * flags["HAS_MASK"]
        reads += () if flags["PER_SEQUENCE"] else ("advantages_ptr",)
        reads += ("reference_ptr", "entropy_ptr") if flags["GENERAL"] else ()
        writes = ("grad_ptr", "loss_ptr") if flags["GENERAL"] else ("grad_ptr",)
        constexprs = flags | {"BLOCK": BLOCK, "MAX_PROGRAMS": MAX_PROGRAMS, "COLUMNS": COLUMNS}
        yield _variant("token_loss_kernel", arguments, _launch.THREADS, constexprs, reads=reads, writes=writes)


def _scale_grad() -> Iterator[Variant]:
    arguments = (
        "token_grad_ptr mask_ptr scale_ptr grad_output_ptr log_probs_grad_ptr entropy_grad_ptr num_tokens entropy_coef"
    )
    for flags in _choices("PER_TOKEN", "HAS_ENTROPY", "HAS_MASK"):
        if flags["HAS_MASK"] and not flags["HAS_ENTROPY"]:
            continue  # the gradient of a masked token is 0 already
        reads = ("token_grad_ptr",) + ("grad_output_ptr",) * flags["PER_TOKEN"] + ("mask_ptr",) * flags["HAS_MASK"]
        writes = ("log_probs_grad_ptr",) + ("entropy_grad_ptr",) * flags["HAS_ENTROPY"]
        constexprs = flags | {"BLOCK": _launch.SCALE_BLOCK}
        yield _variant("scale_grad_kernel", arguments, _launch.SCALE_THREADS, constexprs, reads=reads, writes=writes)


def _finish() -> Iterator[Variant]:
    arguments = "partials_ptr out_ptr num_partials"
    constexprs: dict[str, int | bool] = {"MAX_PROGRAMS": MAX_PROGRAMS}
    threads = _launch.FINISH_THREADS
    yield _variant("finish_ratio_kernel", arguments, threads, constexprs, module="_finish_kernels")
    yield _variant("context_kernel", "sums_ptr out_ptr", 32, {}, module="_finish_kernels")
    arguments = (
        "partials_ptr ess_ptr num_tokens_ptr summary_ptr loss_ptr scale_ptr count_ptr num_partials columns divide "
        "num_tokens entropy_coef reference_coef"
    )
    for flags in _choices("ANCHORED"):
        more = constexprs | {"COLUMNS": COLUMNS} | flags
        yield _variant("finish_loss_kernel", arguments, threads, more, module="_finish_kernels")


def _anchored() -> Iterator[Variant]:
    """The losses with two anchors or an e for each sequence, and their sums."""
    two, sequence = _anchored_kernels.two_anchor_loss_kernel, _anchored_kernels.sequence_loss_kernel
    tokens: dict[str, int | bool] = {"BLOCK": BLOCK, "COLUMNS": COLUMNS}
    for flags in _choices("HAS_MASK"):
        pair = ("log_probs_ptr", "behavior_ptr") + ("mask_ptr",) * flags["HAS_MASK"]
        yield _anchored_variant(_anchored_kernels.anchor_sums_kernel, flags | {"BLOCK": BLOCK}, (*pair, "proximal_ptr"))
        for per_sequence in _choices("PER_SEQUENCE"):
            reads = pair if per_sequence["PER_SEQUENCE"] else (*pair, "advantages_ptr")
            given = flags | per_sequence | tokens
            yield _anchored_variant(sequence, given, reads, ("grad_ptr", "loss_ptr"))
            yield _anchored_variant(two, given, (*reads, "proximal_ptr"), ("grad_ptr", "loss_ptr"))
        for chunked in _choices("IN_CHUNKS"):
            constexprs = flags | chunked | {"BLOCK": _anchored_launch.SEQUENCE_BLOCK}
            threads = _anchored_launch.SEQUENCE_THREADS
            yield _anchored_variant(_anchored_kernels.sequence_sums_kernel, constexprs, pair, threads=threads)
    constexprs = {"MAX_PROGRAMS": MAX_PROGRAMS}
    yield _anchored_variant(_anchored_kernels.join_sums_kernel, constexprs, threads=_launch.FINISH_THREADS)


def _anchored_variant(
    kernel: Any,
    constexprs: Mapping[str, int | bool],
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    threads: int = _launch.THREADS,
) -> Variant:
    arguments = " ".join(name for name in kernel.arg_names if name not in constexprs)
    return _variant(
        kernel.__name__, arguments, threads, constexprs, module="_anchored_kernels", reads=reads, writes=writes
    )


def _row_variant(
    role: str,
    kernel: Any,
    threads: int,
    constexprs: Mapping[str, int | bool],
    dtype: str,
    matrices: tuple[str, ...],
    **fields: Any,
) -> Variant:
    """``matrices`` are the pointers to ``dtype``."""
    function = kernel.__name__
    flags = [dtype] + [name.lower() for name, value in constexprs.items() if value is True]
    types = _TYPES | dict.fromkeys(matrices, f"*{dtype}") | dict.fromkeys(constexprs, "constexpr")
    return Variant(
        role=role,
        name=f"{function.removesuffix('_kernel')} {', '.join(flags)}",
        module=kernel.fn.__module__,
        function=function,
        signature={name: types[name] for name in kernel.arg_names},
        constexprs=constexprs,
        threads=threads,
        dtype=str(_DTYPES[dtype]).removeprefix("torch."),
        **fields,
    )


def _sweeps() -> Iterator[Variant]:
    threads, loss_threads = _row_launch.THREADS, _row_launch.LOSS_THREADS
    kernels = {
        "K1": (_row_kernels.row_stats_kernel, threads, 1, ()),
        "K3": (_row_kernels.row_grad_kernel, threads, 1, ("out_ptr",)),
        "K1K3": (_row_loss_kernels.row_loss_kernel, loss_threads, 2, ("out_ptr",)),
    }
    for (role, (kernel, threads, sweeps, writes)), dtype in itertools.product(kernels.items(), _DTYPES):
        for flags in _choices("HAS_ENTROPY", "HAS_SOFTCAP"):
            block = _row_launch.loss_block(bool(flags["HAS_SOFTCAP"])) if role == "K1K3" else _row_launch.BLOCK
            constexprs = flags | {"VEC": _row_launch.vector(_DTYPES[dtype]), "BLOCK": block}
            yield _row_variant(
                role,
                kernel,
                threads,
                constexprs,
                dtype,
                ("logits_ptr", *writes),
                reads=("logits_ptr",),
                writes=writes,
                block=block,
                sweeps=sweeps,
                any_address=True,
            )


def _around_sweeps() -> Iterator[Variant]:
    """What joins the partials of K1, and what scales a gradient that was formed with the loss."""
    merge, scale = _row_kernels.row_merge_kernel, _row_loss_kernels.scale_rows_kernel
    for flags in _choices("HAS_ENTROPY"):
        constexprs = flags | {"BLOCK": _row_launch.MERGE_BLOCK}
        yield _row_variant("K1", merge, _row_launch.MERGE_THREADS, constexprs, "fp32", ("partials_ptr",))
    for dtype in _DTYPES:
        constexprs = {"BLOCK": _row_launch.SCALE_BLOCK}
        threads = _row_launch.SCALE_THREADS
        yield _row_variant("K3", scale, threads, constexprs, dtype, ("grad_ptr",), any_address=True)


VARIANTS: tuple[Variant, ...] = (
    *_ratio_sums(),
    *_token_loss(),
    *_scale_grad(),
    *_finish(),
    *_anchored(),
    *_sweeps(),
    *_around_sweeps(),
)
