"""Loss, e, every gradient and the weights after a step do not depend on how it is cut, on real Megatron-Core."""

import pytest

from tests.megatron.partition_table import MEASURED, PAGE, key, read, table
from tests.megatron.partitions import BOUND, DIFFERENT, ROWS, bounds, measure
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = pytest.mark.host_only


@pytest.fixture(scope="module")
def measured(pytestconfig):
    found = measure()
    pytestconfig.stash[MEASURED] = table(found)
    return found


def over_bound(figures, cut):
    """Figures over their bounds; NaN is over."""
    limits = bounds(cut)
    return {name: figures[name] for name in limits if figures[name] is not None and not figures[name] <= limits[name]}


@NEEDS_MEGATRON
@pytest.mark.parametrize(("name", "cut"), ROWS, ids=lambda part: str(part).replace("Cut", ""))
def test_step_depends_on_the_cut(measured, name, cut):
    found = measured[name, cut]
    assert over_bound(found._asdict(), cut) == {}
    # Adam moves every entry by about lr, so that errors are errors of something
    assert found.moved > 5e-4 > 100 * found.weights


@NEEDS_MEGATRON
def test_comparison_cannot_fail(measured):
    """Micro-batch scope with other micro-batches is another objective."""
    found = measured[DIFFERENT]
    assert min(found.loss, found.ess, found.gradient, found.weights) > 1e-3 > 100 * BOUND


@NEEDS_MEGATRON
def test_counts_are_means_and_not_totals(measured):
    (tokens,) = {found.valid_tokens for found in measured.values()}
    assert tokens > 10


def test_committed_table_is_another_one():
    committed = read(PAGE.read_text(encoding="utf-8"))
    assert list(committed) == [key(name, cut) for name, cut in ROWS]
    for row in ROWS:
        figures = committed[key(*row)]
        assert over_bound(figures, row[1]) == {} and figures["moved"] > 100 * figures["weights"], row
        assert [name for name, value in figures.items() if value is None] == ["ess"] * (row[0] == "GRPO"), row
