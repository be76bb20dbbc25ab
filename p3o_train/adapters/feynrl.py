"""The policy loss of FeynRL's P3O with our arithmetic, to put in its place:

    from p3o_train.adapters.feynrl import compute_policy_loss

    class P3O(feynrl_p3o.__ray_metadata__.modified_class):
        def compute_policy_loss(self, *tensors, **named):
            return compute_policy_loss(
                *tensors, **named, kl_coeff=self.kl_coeff, ent_coeff=self.ent_coeff,
                clip_low=self.clip_low, clip_high=self.clip_high, process_group=torch.distributed.group.WORLD,
            )

Different on purpose: squares of ratios in float64 instead of float32, invalid data an error instead of e = 1, the
gradient of the pull back right below a log-ratio of -10 (kl_mode="proxy" for FeynRL's), masked slots without influence.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import p3o_loss
from p3o_train.adapters._common import check_same_shape


def compute_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropies: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    *,
    kl_coeff: float = 0.0,
    ent_coeff: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_mode: str = "proxy_safe",
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Token sum of the loss, the local divisor and FeynRL's metrics. One host read, two with metrics.

    Args:
        logprobs, old_logprobs, advantages, mask, entropies, ref_logprobs: [B, T - 1]; old_logprobs are those of the
            behavior policy, and a token is valid where the mask is above 0.5.
        kl_coeff, ent_coeff: weights of the reference KL and of the entropy bonus.
        clip_low, clip_high: of a metric.
        process_group: every rank of it calls, and e is that of all of them, as FeynRL's is over all ranks.

    Returns:
        (loss sum [] float32, number of valid tokens here or 1 [], metrics).

    Raises:
        ValueError: shapes that differ, a coefficient without its tensor, invalid data on any rank.
    """
    valid = mask > 0.5
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=valid)
    made = p3o_loss(
        logprobs,
        old_logprobs,
        advantages,
        valid,
        process_group=process_group,
        reduction="sum",
        kl_mode=kl_mode,
        clip_low=clip_low,
        clip_high=clip_high,
        ref_log_probs=ref_logprobs if kl_coeff else None,
        ref_kl_coef=kl_coeff,
        entropy=entropies if ent_coeff else None,
        entropy_coef=ent_coeff,
    )
    # what FeynRL calls ent_mc is minus the mean log-prob
    count = made.num_tokens.clamp_min(1)
    drawn = -logprobs.detach().where(valid, 0.0).double().sum() / count
    named = made.metrics.to_dict("")
    metrics = {
        "clipfrac": named["clip_fraction"],
        "approx_kl": named["behavior_kl_proxy"],
        "ent_mc": drawn.item(),
        "pi_loss": named["score_loss"],
        "loss_total": named["total_loss"],
        "kl_ref": named["reference_kl"],
        "kl_behavioral": named["behavior_kl_proxy"],
        "ess_factor": named["normalized_ess"],
    }
    return made.loss, count.to(logprobs.dtype), metrics
