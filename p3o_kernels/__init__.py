"""Fused kernels for P3O, arXiv 2605.12380: the effective sample size as cap and as pull-back strength.

``p3o_loss`` is the drop-in loss from log-probabilities; ``ratio_stats`` and ``RatioStats`` give a
frozen ``ESSContext`` over micro-batches and ranks; ``reference`` is the same in plain PyTorch.
"""

from p3o_kernels import reference
from p3o_kernels.ess import ESSContext, RatioStats, ratio_stats
from p3o_kernels.hidden import linear_log_probs, p3o_loss_from_hidden
from p3o_kernels.kl import exact_kl
from p3o_kernels.logits import p3o_loss_from_logits, token_log_probs
from p3o_kernels.loss import P3OOutput, p3o_loss
from p3o_kernels.metrics import P3OMetrics
from p3o_kernels.p4o import P4OOutput, p4o_loss
from p3o_kernels.sequences import SequenceESS, SequenceP3OOutput, p3o_loss_per_sequence, sequence_ess

__version__ = "0.1.0"

__all__ = [
    "ESSContext",
    "P3OMetrics",
    "P3OOutput",
    "P4OOutput",
    "RatioStats",
    "SequenceESS",
    "SequenceP3OOutput",
    "exact_kl",
    "linear_log_probs",
    "p3o_loss",
    "p3o_loss_from_hidden",
    "p3o_loss_from_logits",
    "p3o_loss_per_sequence",
    "p4o_loss",
    "ratio_stats",
    "reference",
    "sequence_ess",
    "token_log_probs",
]
