"""The "compiled" backend: the analytic form through torch.compile, for CPUs with a C++ compiler."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from p3o_kernels import _analytic, _eager
from p3o_kernels._inputs import LossOptions, TokenInputs, TokenLoss

_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _whole(inputs: TokenInputs, options: LossOptions) -> _Outputs:
    ess = inputs.ess
    if ess is None:
        sums = _analytic.ratio_sums(inputs.log_probs, inputs.behavior_log_probs, inputs.mask)
        ess = _analytic.context(_analytic.mark_overflow(sums))[0]
    token_grad, token_values, sums = _analytic.token_terms(inputs, options, ess)
    return token_grad, token_values, *_analytic.finish(inputs, options, sums, ess)


@functools.cache
def _compile() -> Callable[[TokenInputs, LossOptions], _Outputs]:
    # dynamic: one compilation for every T above 1
    return torch.compile(_whole, dynamic=True, fullgraph=True)


def token_loss(inputs: TokenInputs, options: LossOptions) -> TokenLoss:
    if inputs.log_probs.numel() < 2:  # 0 and 1 would each be a compilation of their own
        return _eager.token_loss(inputs, options)
    token_grad, token_values, loss, scale, summary, count = _compile()(inputs, options)
    return TokenLoss(token_values if options.reduction == "none" else loss, token_grad, scale, summary, count)
