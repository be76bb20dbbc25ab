"""P3O as the custom loss of Relax.

    --loss-type custom_loss --custom-loss-function-path p3o_train.adapters.relax.p3o_loss_function
    --calculate-per-token-loss

For releases without a P3O of their own, or to compare with it. Relax divides by counts that each context-parallel rank
makes of the tokens that it holds, so nothing is multiplied by the context-parallel size, which may differ between
micro-batches (dynamic_cp_size, dynamic_cp_rank). A dummy micro-batch enters the collective and adds exact zeros.
``__loss_scale__`` belongs to the mean over samples and does nothing here.

Where one rank holds whole samples Relax counts a sample without tokens as one, which the loss cannot undo: refused.

Step scope needs ``publish`` before the training pass and ``withdraw`` after it, on every rank of the last stage.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from p3o_kernels import ESSContext
from p3o_train.adapters._common import Slot
from p3o_train.adapters._slime_family import Outputs, StepState, check_no_phantoms, checked_objective, micro_batch
from p3o_train.objective import Objective
from p3o_train.parallel import ParallelGroups
from p3o_train.types import ContextLayout

_step = Slot("call p3o_train.adapters.relax.publish(context) before training, or set p3o_ess_scope: micro-batch")


def publish(context: ESSContext) -> None:
    """The frozen e of the optimizer step that follows, such as ``ratio_stats(...).all_reduce(group).to_context()``."""
    _step.publish(StepState(context, None))


def withdraw() -> None:
    """After the step: its e is not that of the next."""
    _step.withdraw()


def p3o_loss_function(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, for ``--custom-loss-function-path``.

    Args:
        args, batch, logits, sum_of_sample_mean: as ``p3o_train.adapters.slime.p3o_loss_function``.

    Raises:
        ValueError: arguments or data that P3O cannot be trained with.
        RuntimeError: step scope without a published e.
    """
    objective = checked_objective(args)
    state = _step.require() if objective.needs_context else None
    outputs = _outputs(args, batch, logits, objective)
    if outputs.layout.cp_size == 1:
        check_no_phantoms(batch, "drop such samples from the rollout")
    return micro_batch(args, batch, outputs, objective, state)


def _outputs(args: Any, batch: Mapping[str, Any], logits: Tensor, objective: Objective) -> Outputs:
    from megatron.core import parallel_state

    size, rank = batch.get("dynamic_cp_size"), batch.get("dynamic_cp_rank")
    _, made = importlib.import_module("relax.backends.megatron.loss").get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=bool(objective.entropy_coef),
        max_seq_lens=batch.get("max_seq_lens"),
        padded_total_lengths=batch.get("padded_total_lengths"),
        dynamic_cp_size=size,
        dynamic_cp_rank=rank,
    )
    layout = ContextLayout(
        parallel_state.get_context_parallel_world_size() if size is None else size,
        parallel_state.get_context_parallel_rank() if rank is None else rank,
    )
    return Outputs(made["log_probs"], made.get("entropy"), layout, ParallelGroups.from_megatron().data_context)
