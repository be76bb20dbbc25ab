"""Checks of the vocabulary arguments that need no tensor to be read; all run before anything is launched."""

import math
from typing import Any

import torch
from torch import Tensor

from p3o_kernels._checks import LOG_PROB_DTYPES, check_devices


def check_matrix(name: str, value: Any, columns: str) -> None:
    """A [T, columns] floating point tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if type(value).__module__.startswith("torch.distributed"):
        raise TypeError(
            f"{name} is a {type(value).__name__}: pass the local shard, {name}.to_local(), with the process_group "
            "that the vocabulary is cut over, or gather it first, as FSDP does inside a module's forward"
        )
    if value.dtype not in LOG_PROB_DTYPES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {value.dtype}")
    if value.dim() != 2:
        hint = f"; flatten the batch: {name}.reshape(-1, {name}.shape[-1])" if value.dim() > 2 else ""
        raise ValueError(f"{name} must be {columns}, got {tuple(value.shape)}{hint}")


def check_logits(logits: Any, labels: Any, mask: Any) -> None:
    check_matrix("logits", logits, "[T, V]")
    if logits.shape[1] == 0:
        raise ValueError(f"logits must have at least one vocabulary entry, got {tuple(logits.shape)}")
    _check_rows("logits", logits, labels, mask)


def check_layer(hidden: Any, weight: Any, bias: Any, labels: Any, mask: Any) -> None:
    check_matrix("hidden", hidden, "[T, H]")
    check_matrix("weight", weight, "[V, H]")
    if hidden.shape[1] != weight.shape[1]:
        hint = ""
        if hidden.shape[1] == weight.shape[0]:
            hint = "; hidden has as many columns as weight has rows: these look like logits, or weight is transposed"
        raise ValueError(
            f"hidden [T, H] and weight [V, H] must agree in H, got hidden {tuple(hidden.shape)} and weight "
            f"{tuple(weight.shape)}{hint}"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"weight must have at least one vocabulary entry, got {tuple(weight.shape)}")
    layer = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        shape = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias must be [V] = [{weight.shape[0]}], got {shape}")
    if len({value.dtype for value in layer.values()}) > 1:
        dtypes = ", ".join(f"{name} {value.dtype}" for name, value in layer.items())
        raise TypeError(f"the projection needs one dtype, nothing is cast; got {dtypes}")
    check_devices(layer)
    _check_rows("hidden", hidden, labels, mask)


def _check_rows(name: str, matrix: Tensor, labels: Any, mask: Any) -> None:
    tokens = matrix.shape[0]
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32):
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be an int64 or int32 tensor of token ids, got {kind}")
    if labels.shape != (tokens,):
        raise ValueError(f"labels must be [T] = [{tokens}], one for each row of {name}; got {tuple(labels.shape)}")
    named = {name: matrix, "labels": labels}
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be torch.bool, got {kind}; pass mask.bool()")
        if mask.shape != (tokens,):
            raise ValueError(f"mask must be [T] = [{tokens}], one for each row of {name}; got {tuple(mask.shape)}")
        named["mask"] = mask
    check_devices(named)


def check_row_options(matrix: Tensor, temperature: Any, softcap: Any) -> None:
    if isinstance(temperature, Tensor):
        if temperature.shape != matrix.shape[:1] or not temperature.is_floating_point():
            raise ValueError(
                f"temperature must be a number or [T] = [{matrix.shape[0]}] floats, got "
                f"{tuple(temperature.shape)} {temperature.dtype}"
            )
        check_devices({"logits or hidden": matrix, "temperature": temperature})
    else:
        _check_positive("temperature", temperature)
    if softcap is not None:
        _check_positive("softcap", softcap)


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value}")


def check_in_place(logits: Tensor, inplace_backward: bool) -> None:
    if not inplace_backward:
        return
    if torch.compiler.is_compiling():
        raise ValueError(
            "inplace_backward=True is for eager mode: torch.compile decides itself which memory to reuse; leave it out"
        )
    if logits.stride(1) != 1 or (logits.stride(0) < logits.shape[1] and logits.shape[0] > 1):
        raise ValueError(
            f"inplace_backward=True needs logits whose rows do not overlap and lie along the vocabulary, got strides "
            f"{logits.stride()}; pass logits.contiguous() or leave it out"
        )


def check_workspace(workspace_bytes: Any) -> None:
    if isinstance(workspace_bytes, bool) or not isinstance(workspace_bytes, int) or workspace_bytes < 1:
        raise ValueError(f"workspace_bytes must be an int >= 1, got {workspace_bytes!r}")


def check_valid_tokens(valid_tokens: Any, mask: Any, num_rows: int) -> None:
    if valid_tokens is None:
        return
    if mask is None:
        raise ValueError("valid_tokens counts the True entries of mask, and there is no mask; leave it out")
    if isinstance(valid_tokens, bool) or not isinstance(valid_tokens, int) or not 0 <= valid_tokens <= num_rows:
        raise ValueError(f"valid_tokens must be an int between 0 and T = {num_rows}, got {valid_tokens!r}")


def check_main_grad(main_grad: Any, weight: Tensor) -> None:
    if main_grad is None:
        return
    if not isinstance(main_grad, Tensor) or main_grad.shape != weight.shape or main_grad.dtype != torch.float32:
        got = f"{tuple(main_grad.shape)} {main_grad.dtype}" if isinstance(main_grad, Tensor) else type(main_grad)
        raise ValueError(f"main_grad must be float32 in the shape of weight {tuple(weight.shape)}, got {got}")
    if not weight.requires_grad:
        raise ValueError("main_grad takes the gradient of weight, but weight.requires_grad is False; leave it out")
    check_devices({"weight": weight, "main_grad": main_grad})
    if torch.compiler.is_compiling():
        raise ValueError("main_grad is for eager mode: torch.compile cannot see a buffer change across its graphs")
