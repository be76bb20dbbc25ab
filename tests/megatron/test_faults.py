"""One error on every rank, soon, and nothing moved: faults of one rank in a step on real Megatron-Core over Gloo.

Every case starts from a model that has taken a step, fails, and takes a healthy step on the same model and groups. That
must give the same bits as without the fault.

What cannot work: a rank that leaves its tensor, context or pipeline group in the middle of a layer. The others wait for
it inside Megatron, until the timeout of that group; and so do replicas that wait in the loss of micro-batch scope for a
rank whose loss itself raised.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.distributed.ranks import on_all_ranks
from tests.megatron.faults import Case, abandoned, every_case, several
from tests.megatron.partitions import BOUND, errors
from tests.megatron.steps import Cut, empty_shards
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
BOTH = ("step", "micro-batch")
SECONDS = 60.0
GIVEN_UP = "this optimizer step was given up before anything moved: rank {} raised "
INVALID = "ValueError: invalid data on "
NO_TOKENS = "RuntimeError: no valid response tokens globally"
COUNTS = "ValueError: every rank needs the same number of micro-batches, but one has 2 and another 3;"
EMPTY = f"ValueError: {GIVEN_UP}ValueError: batches is empty"
RAISED = f"RuntimeError: {GIVEN_UP}KeyError: 'out of order'"
OTHER_TOKENS = f"RuntimeError: {GIVEN_UP}RuntimeError: micro-batch 1 of the training pass holds other tokens"
NO_LOG_PROBS = f'ValueError: {GIVEN_UP}ValueError: context_source="reuse" needs log_probs'
NO_REFERENCE = f"ValueError: {GIVEN_UP}ValueError: ref_kl_coef=0.1 needs ref_log_probs, one [T] for each of 3"

# three micro-batches on every rank, and a fault in the second
DP = Cut(dp=2, micro_batch_size=1)
CP = Cut(cp=2, micro_batch_size=2)
PP = Cut(pp=2, micro_batch_size=2)
TP = Cut(tp=2, micro_batch_size=2)
DP_PP = Cut(dp=2, pp=2, micro_batch_size=1)


class Expected(NamedTuple):
    """A case, and how the error begins."""

    cut: Cut
    case: Case
    error: str


def expected() -> Iterator[Expected]:
    for cut in (DP, CP, PP):
        for scope in BOTH:
            for fault in ("NaN output", "log-ratio 500", "log-ratio -500"):
                yield Expected(cut, Case(fault, scope, 1), INVALID)
            yield Expected(cut, Case("no token", scope, 1), NO_TOKENS)
            yield Expected(cut, Case("fewer micro-batches", scope, 1), COUNTS)
        for fault in ("loss in pre-pass", "loss in training"):
            yield Expected(cut, Case(fault, "step", 1), RAISED)
        yield Expected(cut, Case("other tokens", "step", 0), OTHER_TOKENS)
        yield Expected(cut, Case("missing argument", "reuse", 1), NO_LOG_PROBS)
        yield Expected(cut, Case("missing argument", "reference", 1), NO_REFERENCE)
    for rank, scope in enumerate(BOTH):
        yield Expected(DP, Case("no micro-batches", scope, rank), EMPTY)
    for scope in ("step", "reuse"):
        yield Expected(DP, Case("model in pre-pass", scope, 1), RAISED)
    for rank, scope in enumerate((*BOTH, "GRPO")):
        yield Expected(DP, Case("model in training", scope, rank % 2), RAISED)
    # gradients are being summed when the error comes
    yield Expected(DP, Case("NaN output", "micro-batch", 1, overlap=True), INVALID)
    yield Expected(DP, Case("loss in training", "step", 1, overlap=True), RAISED)
    # no replica waits in the loss of micro-batch scope where there is none
    yield Expected(PP, Case("loss in training", "micro-batch", 1), RAISED)
    yield Expected(PP, Case("loss in pre-pass", "reuse", 1), RAISED)
    yield Expected(PP, Case("loss in training", "GRPO", 1), RAISED)
    yield Expected(PP, Case("other tokens", "step", 1), OTHER_TOKENS)
    yield Expected(PP, Case("other tokens", "reuse", 0), OTHER_TOKENS)
    yield Expected(PP, Case("NaN output", "step", 0), INVALID)
    yield Expected(TP, Case("other tokens", "step", 1), OTHER_TOKENS)
    for fault in ("loss in pre-pass", "loss in training"):
        yield Expected(DP_PP, Case(fault, "step", 3), RAISED)
    for rank in (0, 3):
        yield Expected(DP_PP, Case("other tokens", "step", rank), OTHER_TOKENS)
    yield Expected(DP_PP, Case("missing argument", "reference", 2), NO_REFERENCE)
    yield Expected(DP_PP, Case("NaN output", "micro-batch", 1), INVALID)


EXPECTED = tuple(expected())


ABANDONED = (CP, Case("model in pre-pass", "step", 1)), (DP, Case("loss in training", "micro-batch", 1))


@pytest.fixture(scope="module")
def collected():
    """{ranks: [of every rank, [cases, steps with empty shards, abandoned cases]]}."""
    todo: dict[Cut, list[Case]] = {}
    for cut, case, _ in EXPECTED:
        todo.setdefault(cut, []).append(case)
    for cases in todo.values():
        cases += dict.fromkeys(case._replace(fault="", rank=-1) for case in cases)
    found = {}
    for ranks in (1, 2, 4):
        some = {cut: tuple(cases) for cut, cases in todo.items() if cut.ranks == ranks}
        jobs = [(every_case, (some,))]
        if ranks < 4:
            jobs.append((empty_shards, (BOTH,)))
        if ranks == 2:
            jobs.append((abandoned, (ABANDONED, 0.1)))
        found[ranks] = on_all_ranks(several, ranks, tuple(jobs))
    return found


@pytest.fixture(scope="module")
def reports(collected):
    """{(cut, case): reports of the ranks}, with a case without a fault for every scope."""
    return {key: [of_rank[0][key] for of_rank in ranks] for ranks in collected.values() for key in ranks[0][0]}


def named(part):
    return "-".join(str(value) for value in part if value) if isinstance(part, Case) else None


@pytest.mark.parametrize(("cut", "case", "error"), EXPECTED, ids=lambda part: named(part) or str(part)[:40])
def test_fault_of_one_rank(reports, cut, case, error):
    ranks = reports[cut, case]
    assert len({report.error for report in ranks}) == 1
    assert ranks[0].error.startswith(error.format(case.rank))
    assert max(report.seconds for report in ranks) < SECONDS
    assert [report.changed for report in ranks] == [[]] * cut.ranks
    assert {position for report in ranks for position in report.positions} <= {0}
    # the rank that failed chains its own error, the others have none to chain
    own = [bool(report.causes) for report in ranks]
    assert own == [rank == case.rank and "rank {}" in error for rank in range(cut.ranks)]
    never_failed = reports[cut, case._replace(fault="", rank=-1)]
    assert [report.healthy for report in ranks] == [report.healthy for report in never_failed]


def test_digests_see_nothing(reports):
    """So that equal ones mean something: cases without a fault succeed, and those of other objectives end elsewhere."""
    clean = {key: ranks for key, ranks in reports.items() if not key[1].fault}
    assert {report.error for ranks in clean.values() for report in ranks} == {""}
    for part in ("weights", "optimizer"):
        ends = {scope: clean[PP, Case("", scope, -1)][0].healthy[part] for scope in (*BOTH, "reference", "GRPO")}
        assert len(set(ends.values())) == len(ends)


@pytest.mark.parametrize("scope", BOTH)
@pytest.mark.parametrize("cp", [1, 2], ids=["dp", "cp"])
def test_empty_shard_changes_the_step(collected, cp, scope):
    alone, ranks = ([of_rank[1][cp, scope] for of_rank in collected[number]] for number in (1, 2))
    found = errors(scope, ranks, alone)
    # zeros of another replica change no bit; with CP attention is cut as well
    bound = BOUND if cp > 1 else 0.0
    assert max(found.loss, found.ess, found.gradient, found.weights) <= bound and found.moved > 5e-4


def test_rank_that_leaves_a_layer_is_waited_for_forever(collected):
    """The timeout of the groups ends the wait: on both ranks, with the error itself on the one that has it."""
    for waiting, failed in zip(*(of_rank[2] for of_rank in collected[2]), strict=True):
        assert waiting.seconds < SECONDS and failed.seconds < SECONDS
        assert "out of order" in failed.error and "out of order" not in waiting.error
        assert waiting.error.startswith("RuntimeError"), waiting.error
        assert waiting.changed == failed.changed == []
