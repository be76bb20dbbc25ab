"""Effective sample size of the token ratios, from four additive numbers.

    rho_i = exp(lp_i - blp_i)      S1 = sum rho      S2 = sum rho^2      N = number of valid tokens
    e = clamp(S1^2 / (N (S2 + 1e-8)), 0, 1)              (arXiv 2605.12380, Eq. 11)

The sums add over micro-batches and ranks; e does not. They are float64, because rho^2 leaves the
float32 range at a log-ratio of 44.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import _backend, _checks, _ops, _verdict
from p3o_kernels._collectives import gather_ranks


@dataclass(frozen=True)
class ESSContext:
    """A frozen e and what belongs beside it in a log. All fields are 0-d float64 on the device.

    e cannot see a uniform shift (rho = c everywhere gives 1): watch ``ratio_mean`` beside it.
    """

    ess: Tensor
    """e in [1 / N, 1], but for the 1e-8; 1 without tokens; NaN on invalid data that was not validated."""
    cap: Tensor
    """The largest policy-gradient weight: e itself."""
    num_tokens: Tensor
    """N, over everything that was reduced."""
    ratio_mean: Tensor
    """S1 / N; 1 without tokens."""
    ratio_std: Tensor
    """Population standard deviation of rho; 0 without tokens."""

    @staticmethod
    def _from_vector(vector: Tensor) -> ESSContext:
        ess, num_tokens, ratio_mean, ratio_std = vector.unbind()
        return ESSContext(ess, ess, num_tokens, ratio_mean, ratio_std)


@dataclass(frozen=True)
class RatioStats:
    """S1, S2, N and the number of invalid tokens, as 0-d float64 tensors on one device.

    Example::

        stats = RatioStats.zeros(device)
        for batch in micro_batches:
            stats = stats + ratio_stats(batch.log_probs, batch.behavior_log_probs, batch.mask)
        context = stats.all_reduce(dp_cp_group).to_context()
    """

    sum_ratio: Tensor
    sum_ratio_sq: Tensor
    num_tokens: Tensor
    invalid: Tensor
    """Valid tokens with an l, rho or rho^2 that is not finite (or rho^2 = 0), plus 1 when a sum overflowed."""

    @staticmethod
    def zeros(device: torch.device | str | None = None) -> RatioStats:
        """Statistics of no token."""
        return RatioStats.from_vector(torch.zeros(4, dtype=torch.float64, device=device))

    @staticmethod
    def from_vector(vector: Tensor) -> RatioStats:
        """Views of ``vector`` [4] float64: S1, S2, N, invalid.

        Raises:
            ValueError: another shape.
            TypeError: another dtype.
        """
        if vector.shape != (4,):
            raise ValueError(f"vector must have shape (4,): S1, S2, N, invalid; got {tuple(vector.shape)}")
        if vector.dtype != torch.float64:
            raise TypeError(f"vector must be torch.float64, got {vector.dtype}; float32 sums lose tokens and range")
        return RatioStats(*vector.unbind())

    def as_vector(self) -> Tensor:
        """[4] float64: S1, S2, N, invalid. What a collective carries."""
        return torch.stack([self.sum_ratio, self.sum_ratio_sq, self.num_tokens, self.invalid])

    def __add__(self, other: RatioStats) -> RatioStats:
        if not isinstance(other, RatioStats):
            return NotImplemented
        return RatioStats.from_vector(self.as_vector() + other.as_vector())

    def all_reduce(self, process_group: ProcessGroup) -> RatioStats:
        """Sums over ``process_group``: one collective of 32 bytes, the same bits on every rank."""
        return RatioStats.from_vector(gather_ranks(self.as_vector(), process_group).sum(0))

    def to_context(self, validate: bool = True) -> ESSContext:
        """e and its companions, on the device.

        Args:
            validate: read the verdict back to the host (one read) and raise on invalid data. False
                reads nothing; e is NaN then.

        Raises:
            ValueError: invalid data, or a sum that is not finite. After ``all_reduce`` every rank raises.
        """
        vector = self.as_vector()
        if validate:
            _verdict.raise_on_invalid_sums(vector)
        backend = _backend.resolve("auto", vector)
        return ESSContext._from_vector(_ops.context(vector, backend))


def ratio_stats(
    log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None = None, *, backend: str = "auto"
) -> RatioStats:
    """S1, S2, N and the invalid count of a batch of tokens; detached, nothing is read back to the host.

    Args:
        log_probs: lp, any shape, float32, float16 or bfloat16: log-probabilities under the current policy, in nats.
        behavior_log_probs: blp, same shape: log-probabilities under the policy that sampled the tokens.
        mask: bool, same shape; False positions may hold anything, NaN included. None: every token is valid.
        backend: "auto" (triton on CUDA tensors, else eager), "triton", "eager" or "compiled" (same as eager here).

    Raises:
        ValueError: shapes or devices that differ, an unknown or unusable backend.
        TypeError: a dtype other than the ones above.
    """
    _checks.check_tensors({"log_probs": log_probs, "behavior_log_probs": behavior_log_probs}, mask)
    resolved = _backend.resolve(backend, log_probs)
    with torch.no_grad():
        flat = (tensor.detach().reshape(-1).float() for tensor in (log_probs, behavior_log_probs))
        vector = _ops.ratio_sums(*flat, None if mask is None else mask.reshape(-1), resolved)
    return RatioStats.from_vector(vector)
