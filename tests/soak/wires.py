"""Random rollout files and answers of SGLang, valid and then damaged in one place (see ``tests.soak.recordings``)."""

from __future__ import annotations

import copy
import json
import math
import random
import tempfile
from typing import Any

from p3o_train.contract import check_response, check_samples
from p3o_train.recording import Request, Response, Sampling
from p3o_train.rollout_files import read_rollout, rollout_path, write_rollout
from p3o_train.sglang_wire import parse_response, parse_server_info
from p3o_train.types import Sample
from tests.soak.recordings import (
    CONTRACT,
    HARMLESS,
    NOW,
    REFUSALS,
    REFUSED,
    VALID,
    VOCAB,
    attempt,
    log_probs_of,
    parts,
)
from tests.soak.trials import OTHER, Finding

URL = "http://engine:30000"
STRANGE = (None, True, -1, 0, 3, 2**70, 0.5, -0.25, -1e9, math.nan, math.inf, "", "x", "7", [], [None], {}, {"a": 1})


def check_file(generator: random.Random) -> str:
    """A rollout file; then one of its bytes, its end, or one value of a line is another."""
    with tempfile.TemporaryDirectory() as folder:
        samples = [Sample.from_lists(**parts(generator, f"sample-{index}")) for index in range(2)]
        path = write_rollout(folder, 3, samples, {"identity": "a run"})
        content = path.read_bytes()
        before = describe(read_rollout(folder, 3))
        if before != describe(({**before_header(content)}, samples)):
            raise Finding("a file does not come back as it was written", content.decode()[:200])
        changed, what = damage_file(generator, content)
        rollout_path(folder, 3).write_bytes(changed)
        taken, found = attempt(what, lambda: read_rollout(folder, 3), path.name, differing(content, changed))
        if not taken:
            return REFUSED
        if describe(found) == before:
            return HARMLESS
        _check_taken(what, found[1], differing(content, changed))
        return OTHER


def before_header(content: bytes) -> dict[str, Any]:
    """The first line of a rollout file."""
    made: dict[str, Any] = json.loads(content.split(b"\n")[0])
    return made


def damage_file(generator: random.Random, content: bytes) -> tuple[bytes, str]:
    """Other bytes, and what is wrong with them."""
    kind = generator.choice(["flip", "cut", "value"])
    place = generator.randrange(len(content))
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ 1 << generator.randrange(8)]) + content[
            place + 1 :
        ], "a flipped bit"
    if kind == "cut":
        return content[:place], "a file that is cut"
    lines = content.splitlines()
    number = generator.randrange(len(lines))
    lines[number] = json.dumps(mutated(generator, json.loads(lines[number]))).encode()
    return b"\n".join([*lines, b""]), "another JSON value"


def _check_taken(what: str, samples: Any, example: Any) -> None:
    """Whatever a reader takes, the contract must be able to judge."""
    try:
        check_samples(samples, CONTRACT, weight_version=NOW)
    except REFUSALS:
        pass
    except Exception as error:
        raise Finding(
            f"{what}: taken, then {type(error).__name__} in check_samples", f"{example} -> {error}"
        ) from error


def describe(found: tuple[dict[str, Any], list[Sample]]) -> str:
    """Everything that a rollout file holds, so that NaN equals NaN."""
    header, samples = found
    fields = [
        [str(value.tolist() if hasattr(value, "tolist") else value) for value in vars(sample).values()]
        for sample in samples
    ]
    return str((header, fields))


def differing(one: bytes, two: bytes) -> str:
    """The neighbourhood of the first difference."""
    place = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    begin = max(0, place - 40)
    return f"...{two[begin : place + 40]!r} was {one[begin : place + 40]!r}"


def mutated(generator: random.Random, value: Any) -> Any:
    """A JSON value in which one value, at any depth, is another one or not there."""
    if isinstance(value, dict | list) and value and generator.random() < 0.85:
        place = generator.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = copy.copy(value)
        if generator.random() < 0.15:
            del changed[place]
        else:
            changed[place] = mutated(generator, value[place])
        return changed
    return generator.choice(STRANGE)


def answer(generator: random.Random) -> tuple[dict[str, Any], Request, Sampling]:
    """A valid answer of /generate, as SGLang gives it."""
    tokens = [generator.randrange(VOCAB) for _ in range(4)]
    truncated = generator.random() < 0.4
    values = log_probs_of(generator, 4)
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": {"type": "length", "length": 4},
        "output_token_logprobs": [[value, token, None] for value, token in zip(values, tokens, strict=True)],
        "completion_tokens": 4,
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": 4}],
    }
    if generator.random() < 0.3:
        meta["finish_reason"] = {"type": "stop", "matched": tokens[-1]}
    if generator.random() < 0.3:
        meta["weight_versions"] = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    if truncated:
        meta["output_token_sampling_logprobs"] = log_probs_of(generator, 4)
        meta["output_token_sampling_mask"] = [[token, (token + 1) % VOCAB] for token in tokens]
    sampling = Sampling(4, temperature=0.7, top_k=2 if truncated else -1)
    return {"output_ids": tokens, "meta_info": meta}, Request("sample-1", (1, 2), 0), sampling


def check_sglang(generator: random.Random) -> str:
    """An answer of a server, or what it says of itself, in which one value is another."""
    info = {
        "version": "0.5.23",
        "max_req_input_len": 90,
        "sampling_mask_max_tokens": 64,
        "enable_deterministic_inference": False,
    }
    facts = parse_server_info(URL, info)
    if generator.random() < 0.1:
        strange = mutated(generator, info)
        taken, found = attempt("/server_info", lambda: parse_server_info(URL, strange), URL, strange)
        return (HARMLESS if found == facts else OTHER) if taken else REFUSED
    content, request, sampling = answer(generator)

    def parse(some: Any) -> Response | None:
        return parse_response(some, request, sampling, facts, pause_mode="retract", swapped=False)

    taken, fine = attempt("a valid answer", lambda: parse(content), "", content)
    if not taken or fine is None or fine.token_ids != tuple(content["output_ids"]):
        raise Finding("a valid answer is not taken as it was", str(content))
    if generator.random() < 0.2:
        return VALID
    strange = mutated(generator, content)
    taken, found = attempt("/generate", lambda: parse(strange), "sample-1", difference(content, strange))
    if not taken:
        return REFUSED
    if found is None or found == fine:
        return HARMLESS

    def through() -> None:
        check_response(request, found, CONTRACT)
        made = Sample.from_lists(
            [1, 2, *found.token_ids],
            len(found.token_ids),
            found.log_probs,
            sample_id="sample-1",
            recording=found.recording,
        )
        check_samples([made], CONTRACT, weight_version=NOW)

    taken, _ = attempt("/generate, taken, then judged", through, "sample-1", difference(content, strange))
    return OTHER if taken else REFUSED


def difference(one: Any, two: Any, where: str = "answer") -> str:
    """Where two JSON values differ."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return next(
            (difference(one[n], two[n], f"{where}[{n!r}]") for n in one if _json(one[n]) != _json(two[n])), where
        )
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        places = (i for i in range(len(one)) if _json(one[i]) != _json(two[i]))
        return next((difference(one[i], two[i], f"{where}[{i}]") for i in places), where)
    return f"{where} = {two!r}, was {one!r}"


def _json(value: Any) -> str:
    return json.dumps(value)
