"""Samples with a recording, as an engine at temperature 1 would give them, but for what a test changes."""

import pytest

from p3o_train.contract import Contract, ContractViolation, check_samples
from p3o_train.recording import Recording, Request, Response, Sampling, VersionSpan
from p3o_train.types import Sample

VOCAB = 50
SCALED = Contract("scaled", 1.0, VOCAB)
COOL = Contract("scaled", 0.6, VOCAB)


def recording(length, *, version=0, engine="sglang", **fields):
    """Fields of ``Sampling`` and ``Recording`` by their names."""
    knobs = {name: fields.pop(name) for name in list(fields) if name in Sampling.__dataclass_fields__}
    spans = (VersionSpan(version, 0, length),) if length else ()
    values = {"log_prob_kind": "scaled", "version_spans": spans, "finish_reason": "stop", **fields}
    return Recording(engine, "0.5.23", Sampling(64, **knobs), **values)


def sampled(response=(7, 8, 9), log_probs=None, mask=None, *, pairing_mask=None, sample_id="a", group_id=0, **fields):
    """A sample with prompt (1, 2); a log-prob of every token is -1 where none are given."""
    log_probs = [-1.1] * len(response) if log_probs is None else log_probs
    return Sample.from_lists(
        [1, 2, *response],
        len(response),
        log_probs,
        mask,
        pairing_mask=pairing_mask,
        sample_id=sample_id,
        group_id=group_id,
        recording=recording(len(response), **fields),
    )


def answer(tokens=(7, 8, 9), log_probs=(-1.0, -1.0, -1.0), **fields):
    """A request and the response to it."""
    return Request("a", (1, 2), 0), Response(tokens, log_probs, recording(len(tokens), **fields))


def check(*samples, contract=SCALED, version=9):
    return check_samples(samples, contract, weight_version=version)


def refuses(*texts, **fields):
    """The sample that the fields make is refused with all of these texts."""
    contract = fields.pop("contract", SCALED)
    with pytest.raises(ContractViolation) as error:
        check(sampled(**fields), contract=contract)
    assert [text for text in ("sample 'a'", *texts) if text not in str(error.value)] == []
