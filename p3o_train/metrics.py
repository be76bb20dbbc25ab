"""Global numbers of an optimizer step, from sums that each rank collects: one collective, one host read.

A mean is formed once, of total sums. A mean of the means of micro-batches or ranks would weigh the tokens of a short
one more: values 1 and 3, 3, 3 have the mean 2.5, their two means 1 and 3 have the mean 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from p3o_kernels import P3OMetrics
from p3o_train.histogram import NUM_BINS, named_counts
from p3o_train.parallel import ParallelGroups, merge_rows

MAX_NAMES = 64
"""Names that ``global_means`` has places for: vectors of one length cannot leave a rank waiting for another."""

Number = float | Tensor

# The vector that crosses ranks: P3O's sums and, last of them, its maximum; whether there are any; which names follow;
# the sum of every name; the weight of every name; how many tokens have which log-ratio.
_NUM_P3O = P3OMetrics.zeros().vector.numel()
_MAXIMUM, _HAS_P3O, _NAMES, _SUMS = _NUM_P3O - 1, _NUM_P3O, _NUM_P3O + 1, _NUM_P3O + 2
_WEIGHTS = _SUMS + MAX_NAMES
_COUNTS = _WEIGHTS + MAX_NAMES


@dataclass(frozen=True, eq=False)
class MetricSums:
    """Sums and weights of this rank, by name; ``+`` adds those of micro-batches.

    Example::

        sums = MetricSums({"train/reward_mean": (sum(rewards), len(rewards) if cp_rank == 0 else 0)})
        log(global_means(sums, metrics_of_the_step, groups, device))

    What several ranks hold alike must be counted once: context-parallel ranks share their samples, so all but
    ``cp_rank`` 0 give the numbers of a sample, such as its reward, the weight 0. Numbers of tokens are cut among them
    and have their own weight on each.
    """

    sums: Mapping[str, tuple[Number, Number]]
    """Name -> (sum of the values, their number or total weight), Python numbers or tensors of one element on one
    device. A pair of weight 0 does not count, whatever its sum."""

    def __post_init__(self) -> None:
        counted = {name: _counted(name, *pair) for name, pair in self.sums.items()}
        object.__setattr__(self, "sums", counted)

    @classmethod
    def of(cls, **sums: tuple[Number, Number]) -> MetricSums:
        """``MetricSums.of(name=(sum, weight))``."""
        return cls(sums)

    def __add__(self, other: MetricSums) -> MetricSums:
        """Sums and weights of both; a name that one of them lacks is taken from the other."""
        if not isinstance(other, MetricSums):
            return NotImplemented
        added = {
            name: (mine[0] + theirs[0], mine[1] + theirs[1])
            for name, mine in self.sums.items()
            if (theirs := other.sums.get(name)) is not None
        }
        return MetricSums({**self.sums, **other.sums, **added})


def _counted(name: str, total: Number, weight: Number) -> tuple[Number, Number]:
    """The pair in float64, and without the sum where nothing was weighed."""
    for value in (total, weight):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{name}: sum and weight must be numbers or tensors of one element, got the shape "
                f"{tuple(value.shape)}; pass the sum of the values and their number"
            )
    if not isinstance(weight, Tensor):
        return (_exact(total) if weight else 0.0), float(weight)
    weight = weight.detach().double().reshape(())
    if not isinstance(total, Tensor):
        total = torch.full_like(weight, total)
    return torch.where(weight == 0, 0.0, _exact(total)), weight


def _exact(value: Number) -> Number:
    return value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value)


def global_means(
    sums: MetricSums,
    p3o: P3OMetrics | None,
    groups: ParallelGroups,
    device: torch.device | str,
    prefix: str = "train/p3o/",
    histogram: Tensor | None = None,
) -> dict[str, float]:
    """Means over all tokens or samples of the step, the same bits on every rank of DP x CP and on every stage.

    Every rank calls, with the same names and prefix. The numbers of stages before the last do not count, and those of
    tensor-parallel ranks are copies. Collectives: one over DP x CP on the last stage, one broadcast over the stages.
    One host read.

    Args:
        sums: of this rank. A name whose weights sum to 0 has no mean and is left out: 0 would be a value.
        p3o: sums of this rank's micro-batches, reported under ``prefix``. None counts as no token; if no rank has
            any, the numbers are left out.
        device: where the collectives of the groups work.
        prefix: of the names of ``P3OMetrics``.
        histogram: [``NUM_BINS``] int64 counts of this rank, whose sums are reported as ``named_counts`` names them.
            None counts as no token.

    Raises:
        ValueError: names that differ between ranks, more than ``MAX_NAMES``, or one that ``prefix`` gives to P3O. On
            all ranks of DP x CP and of the stages before them; if only an earlier stage has other names, there alone.
    """
    names = sorted(sums.sums)
    vector = _packed([sums.sums[name] for name in names[:MAX_NAMES]], p3o, histogram, _digest(names), device)
    total = merge_rows(vector, groups, _merge).cpu()
    if total[_NAMES] != _digest(names):
        raise ValueError(
            f"every rank must pass the same names to global_means, but not every one has those of this rank, {names}; "
            "give a number that a rank does not have the weight 0"
        )
    if len(names) > MAX_NAMES:
        raise ValueError(f"sums must have at most {MAX_NAMES} names, got {len(names)}: {names}")
    weighed = zip(names, total[_SUMS:_WEIGHTS].tolist(), total[_WEIGHTS:_COUNTS].tolist(), strict=False)
    means = {name: value / weight for name, value, weight in weighed if weight}
    named = P3OMetrics(total[:_NUM_P3O]).to_dict(prefix)
    if taken := sorted(named.keys() & set(names)):
        raise ValueError(f"names of sums must not be those of P3O's metrics, got {taken}; choose others")
    return means | (named if total[_HAS_P3O] else {}) | named_counts(total[_COUNTS:].tolist())


def _digest(names: list[str]) -> float:
    """A whole number of 48 bits, exact in float64, that hardly two lists of names share."""
    return float(int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:6], "big"))


def _packed(
    pairs: list[tuple[Number, Number]],
    p3o: P3OMetrics | None,
    histogram: Tensor | None,
    digest: float,
    device: torch.device | str,
) -> Tensor:
    """One float64 vector; Python numbers cross to the device together."""
    numbers: list[Number] = [0.0] * (_COUNTS + NUM_BINS)
    numbers[_HAS_P3O], numbers[_NAMES] = float(p3o is not None), digest
    for place, (total, weight) in enumerate(pairs):
        numbers[_SUMS + place], numbers[_WEIGHTS + place] = total, weight
    known = [0.0 if isinstance(number, Tensor) else number for number in numbers]
    vector = torch.tensor(known, dtype=torch.float64).to(device)
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            vector[place] = number
    if p3o is not None:
        vector[:_NUM_P3O] = p3o.vector
    if histogram is not None:
        vector[_COUNTS:] = histogram
    return vector


def _merge(rows: Tensor) -> Tensor:
    """[ranks, n] -> [n]: sums, but P3O's maximum, and NaN for names that differ."""
    merged = rows.sum(0)
    merged[_MAXIMUM] = rows[:, _MAXIMUM].amax()
    names = rows[:, _NAMES]
    merged[_NAMES] = torch.where((names == names[0]).all(), names[0], torch.nan)
    return merged
