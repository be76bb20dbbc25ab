"""Megatron-Core's cross entropy over a cut vocabulary, computed by the kernels of this package.

    apply_p3o_kernels_to_megatron()
    ...                                  # GPTModel(labels=...) and everything else that asks Megatron for the loss
    remove_p3o_kernels_from_megatron()

Replaced are ``vocab_parallel_cross_entropy`` and ``fused_vocab_parallel_cross_entropy``, in the modules that define
them and in every loaded module that imported them. Megatron looks these names up at each call, so a model that is
built already is served as well; a function that was stored elsewhere (an attribute of an object, a partial) is not.
Modules that are imported later get the replacement. Not replaced is transformer-engine's fused cross entropy.

    loss = -log_prob of the label, [s, b] float32

Values are Megatron's up to float32 rounding. Other than there, the logits are left as they were, gradients have the
dtype of the logits in the fused variant too, a label below 0 (an ignored token) gives loss 0 and no gradient, and a
label beyond the vocabulary gives inf.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import token_log_probs

_log = logging.getLogger(__name__)

_PLAIN = ("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy")
_FUSED = ("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy")

# ours -> Megatron's, while they are replaced
_replaced: dict[Callable[..., Any], Callable[..., Any]] = {}


def apply_p3o_kernels_to_megatron() -> None:
    """Replaces Megatron's functions by ours, with the signature that the installed release has. Again does nothing.

    Every replacement is logged.

    Raises:
        ImportError: no megatron-core.
        RuntimeError: a function whose signature is not one of those known here; nothing is replaced then.
    """
    if _replaced:
        return
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for (module, name), replacements in ((_PLAIN, (_cross_entropy, _cross_entropy_in_group)), (_FUSED, (_fused,))):
        original = getattr(importlib.import_module(module), name)
        found[_alike(original, replacements)] = original
    for replacement, original in found.items():
        _exchange(original, replacement)
    _replaced.update(found)


def remove_p3o_kernels_from_megatron() -> None:
    """Puts Megatron's own functions back, the very objects, wherever ours are now. Again does nothing."""
    for replacement, original in _replaced.items():
        _exchange(replacement, original)
    _replaced.clear()


def _alike(original: Callable[..., Any], replacements: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    """The replacement that takes what ``original`` takes."""
    wanted = _parameters(original)
    for replacement in replacements:
        if _parameters(replacement) == wanted:
            return replacement
    raise RuntimeError(
        f"{original.__module__}.{original.__name__} has the signature {inspect.signature(original)}, which is none of "
        f"{', '.join(str(tuple(name for name, *_ in _parameters(known))) for known in replacements)}: this release of "
        "megatron-core is not known here; leave apply_p3o_kernels_to_megatron() out, or install megatron-core<0.20"
    )


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each; releases differ in their annotations."""
    return [(part.name, part.kind, part.default) for part in inspect.signature(function).parameters.values()]


def _exchange(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """``new`` for ``old`` under every name that a loaded module, other than this one, has for it."""
    for module_name, module in list(sys.modules.items()):
        if module_name == __name__ or not isinstance(module, types.ModuleType):
            continue
        # vars, not dir: asking a lazy module for a name would import something
        for name in [name for name, value in vars(module).items() if value is old]:
            setattr(module, name, new)
            _log.info("%s.%s is now %s.%s", module_name, name, new.__module__, new.__qualname__)


def _cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Up to megatron-core 0.18: over the tensor-parallel group of ``parallel_state``."""
    return _cross_entropy_in_group(vocab_parallel_logits, target, label_smoothing)


def _cross_entropy_in_group(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """From megatron-core 0.19: over ``tp_group``, None for that of ``parallel_state``."""
    if label_smoothing != 0:
        raise ValueError(
            f"label_smoothing must be 0 with the kernels of p3o_kernels, which have none, got {label_smoothing}; pass "
            "label_smoothing=0.0, or call remove_p3o_kernels_from_megatron() before"
        )
    if tp_group is None:
        from megatron.core import parallel_state

        tp_group = parallel_state.get_tensor_model_parallel_group()
    return _fused(vocab_parallel_logits, target, tp_group)


def _fused(vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup) -> Tensor:
    """[s, b] float32 from [s, b, V / tp] logits and [s, b] labels over the whole vocabulary."""
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target must have the shape of the logits without their last dimension, got {tuple(target.shape)} and "
            f"{tuple(vocab_parallel_logits.shape)}"
        )
    labels = target.flatten()
    log_probs = token_log_probs(
        vocab_parallel_logits.reshape(-1, vocab_parallel_logits.shape[-1]),
        labels,
        mask=labels >= 0,
        process_group=None if tp_group.size() == 1 else tp_group,
    )
    if isinstance(log_probs, tuple):
        raise TypeError("token_log_probs returned an entropy that was not asked for")
    return -log_probs.view(target.shape)
