"""Which sample goes to which rank and micro-batch: pure functions of lengths, so that every rank finds the same plan.

Balancing gives the longest remaining sample to the lightest part, ties to the lowest index. That is no optimum (which
is NP-hard to find), but no part exceeds the mean by more than the longest sample.
"""

from collections.abc import Sequence

Plan = list[list[list[int]]]
"""plan[dp_rank][micro_batch]: indices of samples; an empty micro-batch is a dummy."""


def balanced_split(costs: Sequence[int], parts: int, max_items: int | None = None) -> list[list[int]]:
    """Indices of ``costs`` dealt to ``parts`` lists of similar total cost, every index once, each list ascending.

    Args:
        costs: tokens of every sample.
        parts: number of lists; some stay empty where there are fewer samples.
        max_items: longest list that is allowed; None: any.

    Raises:
        ValueError: no parts, or not enough places for all samples.
    """
    places = len(costs) if max_items is None else max_items
    if parts < 1 or parts * places < len(costs):
        raise ValueError(f"{len(costs)} samples do not fit into {parts} parts of at most {places}; use more parts")
    loads = [0] * parts
    split: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        lightest = min((part for part in range(parts) if len(split[part]) < places), key=lambda part: loads[part])
        loads[lightest] += costs[index]
        split[lightest].append(index)
    return [sorted(indices) for indices in split]


def token_budget_batches(costs: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Balanced micro-batches of at most ``max_tokens`` each, as few as balancing finds; indices as in ``costs``.

    Raises:
        ValueError: a sample that exceeds the budget alone: as a batch of its own it would not fit in memory either.
    """
    _check_budget(costs, max_tokens)
    if not costs:
        return []
    # as many parts as samples always fit, so that this ends
    for parts in range(max(1, -(-sum(costs) // max_tokens)), len(costs) + 1):
        split = balanced_split(costs, parts)
        if all(sum(costs[index] for index in indices) <= max_tokens for indices in split):
            break
    return split


def plan_micro_batches(
    costs: Sequence[int],
    dp_size: int = 1,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    count_multiple: int = 1,
) -> Plan:
    """Deals the samples of one optimizer step to data-parallel ranks and cuts each rank's share into micro-batches.

    Every sample appears exactly once, and every rank gets the same number of micro-batches, at least one: pipeline
    schedules and collectives need that. Missing ones are empty lists, to be filled with dummies.

    Args:
        costs: tokens of every sample of the step on one rank: its padded length over the context-parallel size.
        dp_size: data-parallel ranks.
        micro_batch_size: samples per micro-batch; ranks then get equally many samples, if the number allows. Or
        max_tokens: tokens per micro-batch on one rank; ranks then get equally many tokens, roughly.
        count_multiple: the number of micro-batches is a multiple of it (interleaved pipelines need that).

    Raises:
        ValueError: neither or both ways to cut, a size below 1, a sample longer than ``max_tokens``.
    """
    sizes = {"micro_batch_size": micro_batch_size, "max_tokens": max_tokens}
    given = {name: size for name, size in sizes.items() if size is not None}
    if len(given) != 1:
        raise ValueError(f"give either micro_batch_size or max_tokens, got {sizes}")
    for name, size in {"dp_size": dp_size, "count_multiple": count_multiple, **given}.items():
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")
    if max_tokens is None:
        plan = _cut_by_number(costs, dp_size, given["micro_batch_size"])
    else:
        plan = _cut_by_tokens(costs, dp_size, max_tokens)
    count = max(1, *map(len, plan))
    count = -(-count // count_multiple) * count_multiple
    return [batches + [[] for _ in range(count - len(batches))] for batches in plan]


def _cut_by_number(costs: Sequence[int], dp_size: int, size: int) -> Plan:
    ranks = balanced_split(costs, dp_size, -(-len(costs) // dp_size))
    return [[indices[place : place + size] for place in range(0, len(indices), size)] for indices in ranks]


def _cut_by_tokens(costs: Sequence[int], dp_size: int, max_tokens: int) -> Plan:
    _check_budget(costs, max_tokens)  # before the samples are dealt, so that the error has the caller's index
    plan: Plan = []
    for indices in balanced_split(costs, dp_size):
        batches = token_budget_batches([costs[index] for index in indices], max_tokens)
        plan.append([[indices[place] for place in batch] for batch in batches])
    return plan


def _check_budget(costs: Sequence[int], max_tokens: int) -> None:
    for index, cost in enumerate(costs):
        if cost > max_tokens:
            raise ValueError(
                f"the sample at index {index} has {cost} padded tokens per rank, more than max_tokens {max_tokens}; "
                "raise max_tokens, use more context-parallel ranks, or drop the sample"
            )
