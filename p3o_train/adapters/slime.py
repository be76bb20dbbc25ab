"""P3O as the custom loss of slime and miles.

    --loss-type custom_loss --custom-loss-function-path p3o_train.adapters.slime.p3o_loss_function
    --rollout-data-postprocess-path p3o_train.adapters.slime.collect_step_statistics
    --calculate-per-token-loss
    --custom-config-path p3o.yaml          # p3o_ess_scope: step, p3o_kl_mode: proxy_safe, ...

The behavior log-probs are rollout_log_probs. In step scope e comes from the log_probs that slime recomputes anyway,
before its one optimizer step of the rollout, so --use-rollout-logprobs, which leaves them out, must not be set.

slime multiplies the token sum by the context-parallel size and divides by a count over data- and context-parallel ranks
that has every sample once for each context-parallel rank: together the mean over tokens, but for samples whose loss
mask is empty, which it counts as one token. The hook knows both counts and the loss is rescaled; without it, or with
several optimizer steps for each rollout, such samples are refused. Metrics are divided by the same count.

miles calls the hook without the rollout's data: micro-batch scope only there, without the hook.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import RatioStats, ratio_stats
from p3o_train.adapters._common import Slot, freeze, joined
from p3o_train.adapters._slime_family import (
    Outputs,
    StepState,
    check_no_phantoms,
    checked_objective,
    local_mask,
    micro_batch,
)
from p3o_train.objective import Objective
from p3o_train.parallel import ParallelGroups, reduce_counts, together
from p3o_train.step import NO_TOKENS
from p3o_train.types import ContextLayout

_HOOK = "--rollout-data-postprocess-path p3o_train.adapters.slime.collect_step_statistics"
_MILES = "miles.backends.training_utils.parallel"
_DROP = f"set {_HOOK}, with one optimizer step for each rollout, or drop such samples from the rollout"
_step = Slot(f"set {_HOOK}, or p3o_ess_scope: micro-batch")


def p3o_loss_function(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, for ``--custom-loss-function-path``.

    Args:
        args: of the framework; see ``checked_objective`` for those of P3O.
        batch: lists with one entry a sample.
        logits: [1, T, V / tp] float32 of this rank, before the temperature.
        sum_of_sample_mean: the framework's reducer; not used, since it knows no invalid tokens.

    Returns:
        [] float32, a token sum, and 0-d sums for the metrics.

    Raises:
        ValueError: arguments or data that P3O cannot be trained with.
        RuntimeError: step scope, and the hook has not run for this rollout.
    """
    objective = checked_objective(args)
    state: StepState | None = _step.require() if objective.needs_context else _step.get()
    if state is None or state.scale is None:
        check_no_phantoms(batch, _DROP)
    outputs = (
        _miles(args, batch, logits, objective) if _MILES in sys.modules else _slime(args, batch, logits, objective)
    )
    return micro_batch(args, batch, outputs, objective, state)


def collect_step_statistics(args: Any, rollout_id: int | None = None, rollout_data: Any = None) -> None:
    """Publishes what the loss must know of the step, for ``--rollout-data-postprocess-path``; no forward pass.

    Runs on every rank, after the framework's log-prob pass and before training. What an earlier rollout has published
    is withdrawn first, also when this raises. One collective over DP x CP, one broadcast over the pipeline stages.

    Raises:
        ValueError: on every rank: invalid data, several optimizer steps in step scope, log-probs that were not
            recomputed, samples without tokens where they cannot be corrected.
        RuntimeError: no valid token in the whole step.
    """
    _step.withdraw()
    objective = checked_objective(args)
    if rollout_data is None:
        raise ValueError(
            "this framework calls --rollout-data-postprocess-path without the data of the rollout, as miles does: "
            "leave the hook out and set p3o_ess_scope: micro-batch"
        )
    steps = len(rollout_data["num_microbatches"])
    if steps > 1 and objective.needs_context:
        raise ValueError(
            f"rollout {rollout_id} feeds {steps} optimizer steps, but its log-probs are those of the weights before "
            "the first: set --num-steps-per-rollout 1, or p3o_ess_scope: micro-batch"
        )
    groups = ParallelGroups.from_megatron()
    if steps > 1:
        with together(groups, _device()):
            check_no_phantoms(rollout_data, "set one optimizer step for each rollout, or drop such samples")
        return
    layout = _megatron_layout()
    counts = torch.zeros(5, dtype=torch.float64, device=_device())
    with together(groups, _device()):
        if groups.is_last_stage:
            counts = _counts(rollout_data, objective, layout).to(counts)
    counts = reduce_counts(counts, groups)
    stats = RatioStats.from_vector(counts[:4])
    context = freeze(stats) if objective.needs_context else None
    if counts[2] == 0:
        raise RuntimeError(NO_TOKENS)
    # every context-parallel rank has counted whole samples
    _step.publish(StepState(context, counts[4] / layout.cp_size / counts[2]))


def _counts(rollout_data: Mapping[str, Any], objective: Objective, layout: ContextLayout) -> Tensor:
    """[5] of this rank: S1, S2, N, invalid and the tokens that the framework counts."""
    mask = local_mask(rollout_data, layout)
    theirs = sum(max(int(mask.sum()), 1) for mask in rollout_data["loss_masks"])
    if not objective.needs_context:
        return torch.tensor([0.0, 0.0, float(mask.sum()), 0.0, theirs], dtype=torch.float64)
    if rollout_data.get("log_probs") is None:
        raise ValueError(
            "the rollout has no log_probs of the weights that the step starts from, which step scope needs: leave "
            "--use-rollout-logprobs out (the loss takes the recorded ones anyway), or set p3o_ess_scope: micro-batch"
        )
    rows = joined({name: rollout_data.get(name) for name in ("log_probs", "rollout_log_probs")}, mask.numel())
    behavior = rows["rollout_log_probs"].to(rows["log_probs"].device)
    vector = ratio_stats(rows["log_probs"], behavior, mask.to(behavior.device)).as_vector()
    return torch.cat([vector, vector.new_tensor([theirs])])


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _megatron_layout() -> ContextLayout:
    from megatron.core import parallel_state

    return ContextLayout(parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank())


def _slime(args: Any, batch: Mapping[str, Any], logits: Tensor, objective: Objective) -> Outputs:
    theirs = importlib.import_module("slime.backends.megatron_utils.loss")
    _, made = theirs.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=bool(objective.entropy_coef),
        **theirs.get_rollout_top_p_logprob_kwargs(args, batch),
    )
    return Outputs(
        made["log_probs"], made.get("entropy"), _megatron_layout(), ParallelGroups.from_megatron().data_context
    )


def _miles(args: Any, batch: Mapping[str, Any], logits: Tensor, objective: Objective) -> Outputs:
    state = importlib.import_module(_MILES).get_parallel_state()
    for wrong, what, repair in (
        (state.is_ulysses_cp, "--cp-comm-type a2a", "use ring context parallelism"),
        (state.indep_dp.size > 1, "independent data-parallel groups", "use one data-parallel group"),
    ):
        if wrong:
            raise ValueError(f"{what} holds tokens that the adapter cannot attribute to ranks; {repair}")
    processors = importlib.import_module("miles.backends.training_utils.loss_hub.logit_processors")
    made = processors.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=bool(objective.entropy_coef),
        max_seq_lens=batch.get("max_seq_lens"),
    )
    group = state.intra_dp_cp.group if state.intra_dp_cp.size > 1 else None
    return Outputs(made["log_probs"], made.get("entropy"), ContextLayout(state.cp.size, state.cp.rank), group)
