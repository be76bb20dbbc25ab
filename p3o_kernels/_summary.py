"""The layout of the summary vector that every backend returns: one float64 number per field.

The first ``NUM_SUMS`` fields are sums over valid tokens and add over micro-batches and ranks, the
next one is a maximum, the rest is the ESS context of the call.
"""

SUM_FIELDS = (
    "sum_ratio",
    "sum_ratio_sq",
    "num_tokens",
    "invalid",
    "log_ratio_abs",
    "cap_hits",
    "clip_hits",
    "capped_ratio",
    "score_loss",
    "behavior_kl",
    "reference_kl",
    "entropy",
    "adaptive_kl_loss",
    "total_loss",
    "weighted_ess",  # e * N: its mean is right when micro-batches have different e
)
NUM_SUMS = len(SUM_FIELDS)
LOG_RATIO_ABS_MAX = NUM_SUMS
NUM_METRICS = NUM_SUMS + 1
CONTEXT_FIELDS = ("ess", "num_tokens", "ratio_mean", "ratio_std")
SUMMARY_SIZE = NUM_METRICS + len(CONTEXT_FIELDS)
ANCHOR_SIZE = 4 + len(CONTEXT_FIELDS)  # S1, S2, N, invalid, and the context that follows from them

EPSILON = 1e-8  # e = S1^2 / (N (S2 + EPSILON))
EXPONENT_LIMIT = 10.0  # K clamps its exponent to +-EXPONENT_LIMIT
EXP_LIMIT = 22026.465794806718  # exp(EXPONENT_LIMIT)
# rho^2 is a positive finite float64 for l between these (exclusive)
LOG_RATIO_MIN, LOG_RATIO_MAX = -372.566, 354.891

KL_MODES = ("proxy", "proxy_safe", "importance")  # the index is what kernels see
REDUCTIONS = ("none", "sum", "mean")
