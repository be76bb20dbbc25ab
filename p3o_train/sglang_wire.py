"""What goes to SGLang's /generate and what its answers mean, token ids in and token ids out; no network here.

The server ignores top-level keys it does not know and fills sampling knobs that are absent with defaults of the
model: so every knob is sent, under names that are constants below. Since 0.4.7 its output log-probs are
log_softmax(z / temperature) over the whole vocabulary, after penalties and biases, whatever top_p and top_k are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from p3o_train.recording import Recording, Request, Response, Sampling, VersionSpan

SCALED_SINCE = (0, 4, 7)
MASKS_SINCE = (0, 5, 16)
# spans of weight versions, and the salt that keeps old keys and values from new requests
SPANS_SINCE = (0, 5, 19)
# below it the server samples greedily and returns log-probs of temperature 1
GREEDY_BELOW = 1e-6
# log-probs below stand for minus infinity: the server clamps it to the smallest float32
LOG_PROB_FLOOR = -1e4
# knobs of one request that the server reads beside sampling_params, not in it
TOP_LEVEL_KNOBS = ("custom_logit_processor",)
# a second response in one answer, which has no request here
RESERVED_KNOBS = ("n", "beam_width", "sampling_seed")


class ServerFacts(NamedTuple):
    """What one server says of itself."""

    url: str
    version: str
    max_tokens: int | None
    """Prompt and response together at most; None where the server does not say."""
    max_kept_tokens: int
    """Tokens that a mask of truncated sampling can hold."""
    is_deterministic: bool
    """Whether it samples from the seed of the request, which it otherwise ignores."""
    returns_original: bool
    """Whether it returns log-probs without the temperature. The server does not say; whoever started it knows."""

    @property
    def release(self) -> tuple[int, ...]:
        """Version as numbers, without suffixes."""
        return _release(self.version)


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def parse_server_info(url: str, info: Any, *, returns_original: bool = False) -> ServerFacts:
    """Facts from the answer of /server_info, and one that it does not hold.

    Raises:
        ValueError: not an SGLang server, or one whose log-probs have another meaning.
    """
    version = info.get("version") if isinstance(info, dict) else None
    if not isinstance(version, str) or not _release(version):
        raise ValueError(
            f"{url}: the answer of /server_info has no version, so what its log-probs mean is unknown; "
            "urls must name SGLang servers themselves, not a router before them"
        )
    if _release(version) < SCALED_SINCE:
        raise ValueError(
            f"{url}: SGLang {version} returns log-probs without the temperature (before 0.4.1.post4) or renormalised "
            "for top_p alone (until 0.4.6.post5), which are not those of the behavior policy; use 0.4.7 or later, "
            "0.5.19 to change weights while responses are sampled"
        )
    return ServerFacts(
        url=url,
        version=version,
        max_tokens=info.get("max_req_input_len"),
        max_kept_tokens=info.get("sampling_mask_max_tokens") or 4096,
        is_deterministic=bool(info.get("enable_deterministic_inference")),
        returns_original=returns_original,
    )


def log_prob_kind(sampling: Sampling, returns_original: bool) -> str:
    """Which kind of ``Recording.log_prob_kind`` the server returns for this sampling."""
    if sampling.temperature < GREEDY_BELOW:
        return "raw"
    if sampling.is_truncated:
        return "truncated"
    return "raw" if returns_original else "scaled"


def _needs_mask(sampling: Sampling) -> bool:
    return sampling.is_truncated and sampling.temperature >= GREEDY_BELOW


def check_sampling(sampling: Sampling, facts: ServerFacts) -> None:
    """Raises ValueError for sampling whose behavior log-probs this server cannot return."""
    collisions = sorted(set(sampling.other) & (set(_knobs(sampling)) | set(RESERVED_KNOBS)))
    if collisions:
        raise ValueError(
            f"sampling.other must not hold {', '.join(collisions)}: use the fields of Sampling for knobs that have "
            "one; every request gets one response, and seeds come from Request.seed"
        )
    if not _needs_mask(sampling):
        return
    if facts.release < MASKS_SINCE:
        raise ValueError(
            f"{facts.url}: SGLang {facts.version} returns log-probs over the whole vocabulary although top_p "
            f"{sampling.top_p}, top_k {sampling.top_k} and min_p {sampling.min_p} exclude tokens; use 0.5.16 or "
            "later, which returns the kept tokens, or sample with top_p 1, top_k -1 and min_p 0"
        )
    if not 1 < sampling.top_k <= facts.max_kept_tokens:
        raise ValueError(
            f"{facts.url}: with top_p {sampling.top_p} and min_p {sampling.min_p}, top_k must be in "
            f"[2, {facts.max_kept_tokens}], got {sampling.top_k}: the server returns the kept tokens, without which "
            "log-probs are not those of the behavior policy, only for a finite top_k. Set top_k, raise "
            "--sampling-mask-max-tokens, or sample with top_p 1, top_k -1 and min_p 0"
        )


def check_request(request: Request, sampling: Sampling, vocab_size: int, facts: ServerFacts) -> None:
    """Raises ValueError for a request that the server would refuse, cut short or die of."""
    name, prompt = f"request {request.sample_id!r}", request.prompt_ids
    if not prompt:
        raise ValueError(f"{name}: prompt_ids must not be empty")
    bad = [(place, token) for place, token in enumerate(prompt) if not 0 <= token < vocab_size]
    if bad:
        raise ValueError(
            f"{name}: prompt_ids must be in [0, {vocab_size}), got {bad[0][1]} at position {bad[0][0]} ({len(bad)} of "
            f"{len(prompt)}); such an id ends the server process. Use the tokenizer of the served model"
        )
    total = len(prompt) + sampling.max_new_tokens
    if facts.max_tokens is not None and total > facts.max_tokens:
        raise ValueError(
            f"{name}: {len(prompt)} prompt tokens and max_new_tokens {sampling.max_new_tokens} are {total}, but "
            f"{facts.url} holds {facts.max_tokens} and would cut the response silently; lower max_new_tokens or raise "
            "--context-length or --max-total-tokens of the server"
        )


def _knobs(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        # true would ignore stop_token_ids too; false also stops at the end tokens of the served model
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        # the stop token belongs to the response
        "no_stop_trim": True,
    }


def generate_body(
    request: Request, sampling: Sampling, *, rid: str, send_seed: bool = False, cache_salt: str | None = None
) -> dict[str, Any]:
    """Body of POST /generate for one request, which ``check_sampling`` and ``check_request`` have passed.

    Args:
        rid: names the request for /abort_request; another one for every attempt.
        send_seed: sends ``request.seed``, which only a deterministic server obeys.
        cache_salt: requests with different salts share no keys and values.
    """
    other = dict(sampling.other)
    top_level = {name: other.pop(name) for name in TOP_LEVEL_KNOBS if name in other}
    seed = {"sampling_seed": request.seed} if send_seed else {}
    return {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "sampling_params": _knobs(sampling) | other | seed,
        "stream": False,
        "return_logprob": True,
        # log-probs of prompt tokens ignore the temperature, and asking for them defeats the prefix cache
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_sampling_mask": _needs_mask(sampling),
        "cache_salt": cache_salt,
        **top_level,
    }


def parse_response(
    answer: Any, request: Request, sampling: Sampling, facts: ServerFacts, *, pause_mode: str, swapped: bool
) -> Response | None:
    """The response in one answer of /generate; None for one that was aborted before it had tokens with log-probs.

    Args:
        answer: the parsed JSON.
        pause_mode: how generation pauses while weights change; recorded where a response spans versions.
        swapped: weights may have changed between sending and answer.

    Raises:
        ValueError: a log-prob that is missing, not finite or belongs to another token; fields that are missing, or of
            another type.
    """
    where = f"{facts.url}, request {request.sample_id!r}"
    try:
        return _parsed(where, answer, sampling, facts, pause_mode, swapped)
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{where}: a field of the answer is not of the engine's type ({type(error).__name__}: {error}); "
            f"check what lies between here and the engine at {facts.url}"
        ) from error


def _parsed(
    where: str, answer: Any, sampling: Sampling, facts: ServerFacts, pause_mode: str, swapped: bool
) -> Response | None:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("finish_reason"), dict):
        raise ValueError(
            f"{where}: the answer has no meta_info with a finish_reason, got {_fields(answer)}; something between "
            f"here and the engine at {facts.url} drops it: let urls name the engine itself or pass meta_info on"
        )
    finish = meta["finish_reason"]
    aborted = finish.get("type") == "abort"
    triples = meta.get("output_token_logprobs")
    if aborted and not (answer.get("output_ids") and triples and _version_fields(meta)):
        return None
    if "output_ids" not in answer or triples is None:
        missing = "output_ids" if "output_ids" not in answer else "meta_info.output_token_logprobs"
        raise ValueError(
            f"{where}: the answer has no {missing}, got {_fields(answer)} and in meta_info {_fields(meta)}; "
            f"check what lies between here and the engine at {facts.url}, or speculative decoding of the server"
        )
    token_ids = _ids(answer["output_ids"])
    _check_finish(where, finish, token_ids, sampling)
    _check_lengths(where, token_ids, triples, meta.get("completion_tokens", len(token_ids) if aborted else None))
    log_probs = _chosen_log_probs(where, triples, token_ids)
    kind, kept = log_prob_kind(sampling, facts.returns_original), None
    if kind == "truncated":
        log_probs, kept = _truncated(where, meta, token_ids)
    spans = _version_spans(where, meta, len(token_ids), facts, swapped)
    recording = Recording(
        engine="sglang",
        engine_version=facts.version,
        sampling=sampling,
        log_prob_kind=kind,
        version_spans=spans,
        finish_reason=finish["type"],
        # in place, even a response of one version may rest on keys and values of the one before
        pause_mode=pause_mode if len(spans) > 1 or (swapped and pause_mode == "in_place") else None,
        kept_token_ids=kept,
    )
    return Response(token_ids, log_probs, recording)


def _ids(values: Any) -> tuple[int, ...]:
    """Raises TypeError for anything but a list of token ids."""
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TypeError(f"a list of token ids is expected, got {str(values)[:80]}")
    return tuple(values)


def _fields(value: Any) -> str:
    return ", ".join(sorted(value)) or "nothing" if isinstance(value, dict) else type(value).__name__


def _version_fields(meta: Mapping[str, Any]) -> bool:
    return bool(meta.get("weight_versions") or meta.get("weight_version"))


def _check_finish(where: str, finish: Mapping[str, Any], token_ids: Sequence[int], sampling: Sampling) -> None:
    if finish.get("type") not in ("stop", "length", "abort"):
        raise ValueError(f"{where}: finish_reason must be of type stop, length or abort, got {dict(finish)}")
    if finish["type"] == "length" and len(token_ids) < sampling.max_new_tokens:
        raise ValueError(
            f"{where}: the server cut the response at {len(token_ids)} tokens, max_new_tokens is "
            f"{sampling.max_new_tokens}; raise its --context-length, --max-total-tokens or "
            "SGLANG_MAX_NEW_TOKENS_LIMIT"
        )
    matched = finish.get("matched")
    if isinstance(matched, int) and token_ids[-1:] != (matched,):
        raise ValueError(f"{where}: the response stopped at token {matched} but ends with {token_ids[-1:]}")


def _check_lengths(where: str, token_ids: Sequence[int], triples: Sequence[Any], completion_tokens: int | None) -> None:
    if not len(token_ids) == len(triples) == completion_tokens:
        raise ValueError(
            f"{where}: {len(token_ids)} output_ids, {len(triples)} output_token_logprobs and completion_tokens "
            f"{completion_tokens} must be the same number; nothing is padded or cut"
        )


def _chosen_log_probs(where: str, triples: Sequence[Sequence[Any]], token_ids: Sequence[int]) -> list[float]:
    for index, (triple, token) in enumerate(zip(triples, token_ids, strict=True)):
        if triple[1] != token:
            raise ValueError(
                f"{where}: response token {index} is {token}, but its log-prob is that of token {triple[1]}"
            )
    return _checked(where, "output_token_logprobs", [triple[0] for triple in triples])


def _checked(where: str, name: str, values: Sequence[float | None]) -> list[float]:
    for index, value in enumerate(values):
        if value is None or not math.isfinite(value) or value < LOG_PROB_FLOOR:
            raise ValueError(
                f"{where}: {name} must be finite and above {LOG_PROB_FLOOR:g}, got {value} at response token {index} "
                f"of {len(values)}; the sampler of the server is at fault, drop the sample"
            )
    return [float(value) for value in values if value is not None]


def _truncated(
    where: str, meta: Mapping[str, Any], token_ids: Sequence[int]
) -> tuple[list[float], tuple[tuple[int, ...], ...]]:
    """Log-probs over the kept tokens of each position, and these tokens."""
    values, masks = meta.get("output_token_sampling_logprobs"), meta.get("output_token_sampling_mask")
    if values is None or masks is None or not len(values) == len(masks) == len(token_ids):
        sizes = [None if found is None else len(found) for found in (values, masks)]
        raise ValueError(
            f"{where}: sampling was truncated, so {len(token_ids)} output_token_sampling_logprobs and "
            f"output_token_sampling_mask are needed, got {sizes[0]} and {sizes[1]}"
        )
    kept = tuple(map(_ids, masks))
    for index, (mask, token) in enumerate(zip(kept, token_ids, strict=True)):
        if token not in mask:
            raise ValueError(f"{where}: response token {index} is {token}, which is not among its kept tokens")
    return _checked(where, "output_token_sampling_logprobs", values), kept


def _version_spans(
    where: str, meta: Mapping[str, Any], length: int, facts: ServerFacts, swapped: bool
) -> tuple[VersionSpan, ...]:
    listed, scalar = meta.get("weight_versions"), meta.get("weight_version")
    if listed is None and swapped:
        raise ValueError(
            f"{where}: weights changed while it was sampled, and SGLang {facts.version} does not say which token has "
            "which version; use 0.5.19 or later, or change weights between calls of generate"
        )
    if listed is None and scalar is None:
        raise ValueError(
            f"{where}: meta_info has no weight_versions and no weight_version; use SGLang 0.5.1 or later, and check "
            f"what lies between here and the engine at {facts.url}"
        )
    if not length:
        return ()
    if listed is None:
        listed = [{"version": scalar, "start": 0, "end": length}]
    spans = tuple(VersionSpan(_version(where, span["version"]), span["start"], span["end"]) for span in listed)
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), length]
    if ends != starts or any(span.start >= span.end for span in spans):
        raise ValueError(f"{where}: weight_versions must cover [0, {length}) once and in order, got {listed}")
    return spans


def _version(where: str, text: Any) -> int:
    if not re.fullmatch(r"\d+", str(text)):
        raise ValueError(
            f"{where}: weight versions must be whole numbers, got {text!r}; call update_weights before generate, or "
            "start the server with --weight-version 0"
        )
    return int(text)
