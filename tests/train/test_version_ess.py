"""e of the tokens of each weight version: real processes over Gloo, two data-parallel ranks."""

import pytest
import torch

from p3o_train.packing import pack
from p3o_train.parallel import ParallelGroups
from p3o_train.recording import Recording, Sampling, VersionSpan
from p3o_train.step import VersionStatistics
from p3o_train.types import Sample
from tests.distributed.ranks import on_all_ranks

# version 0 is also what masked tokens have
RATIOS = {0: (1.0, 2.0, 0.5, 4.0), 7: (1.0, 3.0)}


def batch_of(ratios, versions, mask=None):
    """One sample whose response tokens have these ratios against a policy with log-probs of 0, and these versions."""
    spans = tuple(VersionSpan(version, place, place + 1) for place, version in enumerate(versions))
    recording = Recording("local", "1", Sampling(8), "scaled", spans, "stop")
    behavior = (-torch.tensor(ratios).log()).tolist()
    return pack([Sample.from_lists(range(len(ratios) + 1), len(ratios), behavior, mask, recording=recording)], [0.0])


def ess(ratios):
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))


def collected(batches, versions):
    statistics = VersionStatistics(versions)
    for batch in batches:
        statistics.add(torch.zeros(batch.tokens.shape), batch)
    return statistics


def test_each_version_has_its_own_e():
    # mixed in one response, and a masked token that would change either
    batches = [
        batch_of((1.0, 1.0, 2.0, 99.0), (0, 7, 0, 7), (1, 1, 1, 0)),
        batch_of((0.5, 4.0, 3.0), (0, 0, 7)),
    ]
    made = collected(batches, (0, 7, 11)).ess(ParallelGroups(), "cpu")
    assert made == pytest.approx({0: 0.6617647055709343, 7: ess(RATIOS[7])}, rel=1e-8)  # the epsilon beside S2
    assert collected(batches, ()).ess(ParallelGroups(), "cpu") == {}


def a_rank(rank):
    groups = ParallelGroups(data_context=torch.distributed.group.WORLD)
    batches = [batch_of(RATIOS[0][:2], (0, 0)), batch_of(RATIOS[7], (7, 7))] if rank == 0 else []
    if rank == 1:
        batches = [batch_of(RATIOS[0][2:], (0, 0))]
    return collected(batches, (0, 7)).ess(groups, "cpu")


@pytest.mark.host_only
def test_ranks_add_up():
    first, second = on_all_ranks(a_rank, 2)
    assert first == second == pytest.approx({0: 0.6617647055709343, 7: ess(RATIOS[7])}, rel=1e-8)
