"""Random recordings, valid and then damaged in one place: taken as they were, or refused by name, and nothing else.

What may come of a damaged one: an error of the documented kind; the same value as without the damage, where it hit
what is not read; or another recording that is itself valid, which no rule can tell from a sampled one. Any other error
is a finding, and so is a valid recording that is refused.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

from p3o_train.contract import Contract, check_response, check_samples
from p3o_train.engine import EngineError
from p3o_train.recording import Recording, Request, Response, Sampling, VersionSpan
from p3o_train.turns import Turn, accumulate_turns
from p3o_train.types import Sample
from tests.soak.trials import Finding

VOCAB, NOW = 50, 9
CONTRACT = Contract("scaled", 0.7, VOCAB)
REFUSALS = (ValueError, EngineError)
"""ContractViolation is a ValueError."""
REFUSED, HARMLESS = "refused by name", "without effect"
VALID = "valid and taken"


def attempt(what: str, call: Callable[[], Any], name: str, example: Any) -> tuple[bool, Any]:
    """(whether it was taken, what came of it); refusals must say ``name``.

    Raises:
        Finding: another error, or one without the name.
    """
    try:
        return True, call()
    except REFUSALS as error:
        if name not in str(error):
            raise Finding(f"{what}: the error does not name {name!r}", f"{example} -> {error}") from error
        return False, None
    except Exception as error:
        text = f"{what}: {type(error).__name__} leaks"
        raise Finding(text, f"{example} -> {error}") from error


def log_probs_of(generator: random.Random, length: int) -> list[float]:
    return [-generator.uniform(0.01, 12.0) for _ in range(length)]


def _spans(generator: random.Random, length: int) -> tuple[VersionSpan, ...]:
    if not length:
        return ()
    cut = generator.randint(0, length)
    version = generator.randint(0, NOW - 1)
    spans = (VersionSpan(version, 0, cut), VersionSpan(version + 1, cut, length))
    return tuple(span for span in spans if span.start < span.end)


def recording(generator: random.Random, tokens: list[int]) -> Recording:
    """A valid one of these response tokens under ``CONTRACT``."""
    spans = _spans(generator, len(tokens))
    truncated = generator.random() < 0.3
    others = [generator.sample([i for i in range(VOCAB) if i != token], 3) for token in tokens]
    kept = tuple((token, *more) for token, more in zip(tokens, others, strict=True)) if truncated else None
    return Recording(
        engine=generator.choice(["sglang", "vllm", "local"]),
        engine_version="1.0",
        sampling=Sampling(64, (2,), 0.7, top_k=4 if truncated else -1),
        log_prob_kind="truncated" if truncated else "scaled",
        version_spans=spans,
        finish_reason=generator.choice(["stop", "length", "abort"]),
        pause_mode=generator.choice(["abort", "retract", "in_place"]) if len(spans) > 1 else None,
        kept_token_ids=kept,
    )


def parts(generator: random.Random, name: str) -> dict[str, Any]:
    """The arguments of ``Sample.from_lists`` for a valid sample."""
    prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 4))]
    response = [generator.randrange(VOCAB) for _ in range(generator.randint(0, 6))]
    made: dict[str, Any] = {
        "token_ids": prompt + response,
        "response_length": len(response),
        "behavior_log_probs": log_probs_of(generator, len(response)),
        "loss_mask": [generator.random() < 0.9 for _ in response],
        "sample_id": name,
        "group_id": generator.randrange(3),
        "recording": recording(generator, response),
    }
    for place, counts in enumerate(made["loss_mask"]):
        if not counts:
            made["behavior_log_probs"][place] = generator.choice([None, math.nan, math.inf, 3.0])
    return made


def check_sample(generator: random.Random) -> str:
    """Two valid samples; then one field of the second is another."""
    both = [parts(generator, f"sample-{index}") for index in range(2)]
    fine = [Sample.from_lists(**one) for one in both]
    taken, _ = attempt("valid samples", lambda: check_samples(fine, CONTRACT, weight_version=NOW), "", both)
    if not taken:
        raise Finding("valid samples are refused", str(both))
    if generator.random() < 0.3:
        return VALID
    broken = copy.copy(both[1])
    what, must = damage_sample(generator, broken)

    def call() -> None:
        made = Sample.from_lists(**broken)
        check_samples([fine[0], made], CONTRACT, weight_version=NOW)

    taken, _ = attempt(what, call, "sample-1", broken)
    if taken and must:
        raise Finding(f"{what}: accepted", str(broken))
    if taken:  # nothing is left out of a list without entries
        return HARMLESS
    return REFUSED


def damage_sample(generator: random.Random, made: dict[str, Any]) -> tuple[str, bool]:
    """Changes one thing; what it is, and whether it has to be refused."""
    length = made["response_length"]
    valid = [place for place in range(length) if made["loss_mask"][place]]
    kind = generator.choice(
        ["length", "log-prob", "recording", "temperature", "spans", "version", "token", "kind", "kept"]
    )
    if kind == "length":
        name = generator.choice(["behavior_log_probs", "loss_mask"])
        made[name] = made[name] + made[name][:1] if made[name] and generator.random() < 0.5 else made[name][1:]
        return f"{name} of another length", bool(length)
    if kind == "log-prob" and valid:
        value = generator.choice([None, math.nan, math.inf, -math.inf, 1.0, -65504.0, -3.4e38, -200.0])
        made["behavior_log_probs"] = list(made["behavior_log_probs"])
        made["behavior_log_probs"][generator.choice(valid)] = value
        return f"a log-prob of {value}", True
    if kind == "token":
        made["token_ids"] = list(made["token_ids"])
        made["token_ids"][generator.randrange(len(made["token_ids"]))] = generator.choice([-1, VOCAB, 2**40])
        return "a token outside the vocabulary", True
    if kind == "recording" or not length:
        made["recording"] = None
        return "a recording that is missing", True
    fields = dict(vars(made["recording"]))
    spans, sampling = fields["version_spans"], fields["sampling"]
    changes: dict[str, tuple[str, Any]] = {
        "temperature": ("sampling", Sampling(64, (2,), generator.choice([1.0, 0.6, 0.0]), top_k=sampling.top_k)),
        "spans": (
            "version_spans",
            generator.choice([spans[1:], (*spans, spans[-1]), (VersionSpan(0, 0, length + 1),)]),
        ),
        "version": ("version_spans", (VersionSpan(generator.choice([-1, NOW + 1]), 0, length),)),
        "kind": ("log_prob_kind", generator.choice(["raw", "other", None])),
        "kept": (
            "kept_token_ids",
            generator.choice([((1, 2),) * (length + 1), ((1, 1),) * length, ((-1, VOCAB),) * length]),
        ),
        "log-prob": ("finish_reason", generator.choice(["", None, "tool"])),
    }
    name, value = changes[kind]
    made["recording"] = Recording(**fields | {name: value})
    return f"another {name}", True


def check_answer(generator: random.Random) -> str:
    """A valid response; then one thing about it is another."""
    tokens = [generator.randrange(VOCAB) for _ in range(generator.randint(0, 6))]
    values: list[Any] = list(log_probs_of(generator, len(tokens)))
    request, mask = Request("sample-1", (1, 2), 0), None
    made = recording(generator, tokens)
    taken, _ = attempt(
        "a valid response", lambda: check_response(request, Response(tokens, values, made), CONTRACT), "", values
    )
    if not taken:
        raise Finding("a valid response is refused", f"{tokens} {values}")
    if not tokens or generator.random() < 0.3:
        return VALID
    kind, place = generator.choice(["short", "long", "value", "token", "mask"]), generator.randrange(len(tokens))
    if kind == "value":
        values[place] = generator.choice([None, math.nan, math.inf, -math.inf])
    elif kind == "token":
        tokens[place] = generator.choice([-1, VOCAB, 2**70])
    elif kind == "mask":
        mask = [1] * (len(tokens) + generator.choice([-1, 1]))
    else:
        values = values[1:] if kind == "short" else [*values, -1.0]
    taken, _ = attempt(
        kind,
        lambda: check_response(request, Response(tokens, values, made), CONTRACT, mask),
        "sample-1",
        (tokens, values, mask),
    )
    if taken:
        raise Finding(f"{kind}: accepted", str((tokens, values, mask)))
    return REFUSED


def check_turn(generator: random.Random) -> str:
    """A conversation of some turns; then one list of one turn is another."""
    whole, turns = [generator.randrange(VOCAB) for _ in range(2)], []
    for _ in range(generator.randint(1, 3)):
        tokens = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 4))]
        turns.append(Turn(list(whole), tokens, log_probs_of(generator, len(tokens))))
        whole += [*tokens, *(generator.randrange(VOCAB) for _ in range(generator.randint(0, 3)))]
    taken, made = attempt("a valid conversation", lambda: accumulate_turns(turns), "", turns)
    values = [value for turn in turns for value in turn.log_probs or ()]
    if not taken or [v for v, m in zip(made.log_probs, made.loss_mask, strict=True) if m] != values:
        raise Finding("a valid conversation is not taken as it was", str(turns))
    if generator.random() < 0.3:
        return VALID
    number = generator.randrange(len(turns))
    turn = turns[number]
    turns[number] = generator.choice(
        [
            turn._replace(log_probs=None),
            turn._replace(log_probs=[*turn.log_probs, -1.0]),
            turn._replace(log_probs=turn.log_probs[1:]),
            turn._replace(pairing_mask=[True] * (len(turn.token_ids) + 1)),
        ]
    )
    taken, _ = attempt("a turn", lambda: accumulate_turns(turns), f"turn {number}", turns)
    if taken:
        raise Finding("a damaged turn is accepted", str(turns))
    return REFUSED
