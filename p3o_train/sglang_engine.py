"""Responses and weight changes by SGLang servers over HTTP: the trainer's process needs no sglang, only httpx."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from p3o_train.engine import RolloutFailed
from p3o_train.recording import PAUSE_MODES, Request, Response, Sampling
from p3o_train.sglang_client import ServerError, Session
from p3o_train.sglang_wire import (
    SPANS_SINCE,
    ServerFacts,
    check_request,
    check_sampling,
    generate_body,
    parse_response,
    parse_server_info,
)

SERVER_INFO = ("/server_info", "/get_server_info")
MODEL_INFO = ("/model_info", "/get_model_info")
ABORT_INTERVAL_S = 0.2


class SGLangEngine:
    """A ``RolloutEngine`` over servers of the same model: request i goes to server i modulo their number.

    One thread at a time calls ``generate`` and one ``update_weights``; they may be two threads, and ``abort`` may be
    called from any. What the log-probs of a server mean cannot be seen from here in full: probe an engine before
    training on it.

    Args:
        urls: "http://host:port" of each server.
        vocab_size: of the served model; a larger id would end a server.
        weights_dir: new weights pass through it, under the same path here and on every server. Of this engine alone.
        save: writes full parameters, by their Hugging Face names, as safetensors into a directory that it makes.
        pause_mode: what a weight change does to responses in flight. "retract": they go on with new weights, and keys
            and values are computed again. "in_place": they go on with the old keys and values. "abort": they end.
        max_concurrency: requests in flight at most, over all servers.
        timeout_s: seconds that one response or one weight change may take.
        attempts: how often a request is sent at most, where the connection breaks or the server answers 5xx.
        send_seeds: sends ``Request.seed``, for servers with --enable-deterministic-inference and only for these.
        returns_original: the servers were started with SGLANG_RETURN_ORIGINAL_LOGPROB=1, so that log-probs are "raw".

    Raises:
        ValueError: arguments out of range, or a server that does not fit them.
        ServerError: a server that does not answer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        vocab_size: int,
        *,
        weights_dir: Path,
        save: Callable[[Path, Mapping[str, Tensor]], None],
        pause_mode: str = "retract",
        max_concurrency: int = 256,
        timeout_s: float = 1800.0,
        attempts: int = 4,
        send_seeds: bool = False,
        returns_original: bool = False,
    ) -> None:
        _check_arguments(
            urls, pause_mode, timeout_s, vocab_size=vocab_size, max_concurrency=max_concurrency, attempts=attempts
        )
        self.dropped = 0
        """Requests so far that were aborted before they had tokens with log-probs."""
        self._vocab_size, self._pause_mode, self._send_seeds = vocab_size, pause_mode, send_seeds
        self._weights_dir, self._save = Path(weights_dir).resolve(), save
        self._max_concurrency, self._timeout_s, self._attempts = max_concurrency, timeout_s, attempts
        self._returns_original = returns_original
        self._lock, self._updating = threading.Lock(), threading.Lock()
        self._in_flight: dict[str, str] = {}
        self._aborts = 0
        # odd while a change is under way, so that a request sent meanwhile sees another number at its end
        self._changes = 0
        self._name = uuid.uuid4().hex
        self._servers = asyncio.run(self._ask_servers([url.rstrip("/") for url in urls]))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """One response for each request, in their order. Blocks; Ctrl-C closes the connections, which ends the work.

        Raises:
            ValueError: requests or sampling that a server would refuse, cut or die of; nothing was sent.
            RolloutFailed: what was in flight at the first failure has been waited for, the rest was not sent.
        """
        for facts in self._servers:
            check_sampling(sampling, facts)
        for index, request in enumerate(requests):
            check_request(request, sampling, self._vocab_size, self._server_of(index))
        finished, failures = asyncio.run(self._generate(requests, sampling))
        if len(finished) < len(requests):
            first = next(index for index in range(len(requests)) if index not in finished)
            # the first failures: those that follow mostly repeat them
            reasons = "; ".join(failures[:3]) or "they were aborted before they had tokens with log-probs"
            raise RolloutFailed(
                f"{len(requests) - len(finished)} of {len(requests)} requests were not answered, the first is "
                f"{requests[first].sample_id!r}: {reasons}",
                finished,
            )
        return [finished[index] for index in range(len(requests))]

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Every server samples with these from now on; responses in flight are treated as ``pause_mode`` says.

        Args:
            weights: full parameters of the whole model by their Hugging Face names.
            version: >= 0.

        Raises:
            ServerError: servers that refused; the message says which hold the new weights. All of them go on sampling.
        """
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version must be a whole number >= 0, got {version!r}")
        with self._updating:
            directory = self._write(weights, version)
            asyncio.run(self._change_weights(directory, version))
            for old in self._weights_dir.glob("version-*"):
                if old != directory:
                    shutil.rmtree(old)

    def abort(self) -> None:
        """Ends the responses in flight and waits for it; those with tokens are kept, with finish_reason "abort"."""
        with self._lock:
            self._aborts += 1
            in_flight = dict(self._in_flight)
        asyncio.run(self._abort(in_flight))

    def close(self) -> None:
        """Nothing to give back: connections last as long as a call, and servers belong to whoever started them."""

    def _server_of(self, index: int) -> ServerFacts:
        return self._servers[index % len(self._servers)]

    def _session(self) -> Session:
        return Session(self._timeout_s, self._attempts)

    async def _ask_servers(self, urls: Sequence[str]) -> list[ServerFacts]:
        async with self._session() as session:
            infos = await asyncio.gather(*(session.get(url, SERVER_INFO) for url in urls))
        servers = [
            parse_server_info(url, info, returns_original=self._returns_original)
            for url, info in zip(urls, infos, strict=True)
        ]
        for facts in servers:
            self._check_server(facts)
        return servers

    def _check_server(self, facts: ServerFacts) -> None:
        if self._send_seeds and not facts.is_deterministic:
            raise ValueError(
                f"{facts.url} ignores seeds: start it with --enable-deterministic-inference, or leave send_seeds False"
            )
        if facts.is_deterministic and not self._send_seeds:
            raise ValueError(
                f"{facts.url} samples deterministically and takes one seed for all requests without a seed, so the "
                "responses to one prompt would be copies of each other: pass send_seeds=True"
            )
        if self._pause_mode == "in_place" and facts.release < SPANS_SINCE:
            raise ValueError(
                f"{facts.url}: SGLang {facts.version} would reuse keys and values of old weights for new requests "
                "after pause_mode 'in_place'; use 'retract', or SGLang 0.5.19 or later"
            )

    async def _generate(self, requests: Sequence[Request], sampling: Sampling) -> tuple[dict[int, Response], list[str]]:
        finished: dict[int, Response] = {}
        failures: list[str] = []
        slots, aborts = asyncio.Semaphore(self._max_concurrency), self._aborts

        async def answer(index: int) -> None:
            async with slots:
                if failures:
                    return
                try:
                    response = await self._sample(session, requests[index], sampling, self._server_of(index), aborts)
                except (ServerError, ValueError) as error:
                    failures.append(str(error))
                    return
            if response is None:
                self.dropped += 1
            else:
                finished[index] = response

        async with self._session() as session:
            await asyncio.gather(*(answer(index) for index in range(len(requests))))
        return finished, failures

    async def _sample(
        self, session: Session, request: Request, sampling: Sampling, facts: ServerFacts, aborts: int
    ) -> Response | None:
        changes, rids = self._changes, list[str]()

        def body() -> dict[str, Any]:
            # the server may still hold the attempt before, and refuses a second request of the same name
            rid = uuid.uuid4().hex
            with self._lock:
                if self._aborts != aborts:
                    raise ServerError(facts.url, f"request {request.sample_id!r} was aborted before it was sent")
                self._in_flight[rid] = facts.url
            rids.append(rid)
            return generate_body(request, sampling, rid=rid, send_seed=self._send_seeds, cache_salt=self._salt())

        try:
            answer = await session.post(facts.url, "/generate", body)
        finally:
            with self._lock:
                for rid in rids:
                    self._in_flight.pop(rid)
        swapped = changes % 2 == 1 or changes != self._changes
        return parse_response(answer, request, sampling, facts, pause_mode=self._pause_mode, swapped=swapped)

    def _salt(self) -> str | None:
        """Where pauses leave old keys and values in the prefix cache, requests of other weights must not meet them."""
        if self._pause_mode != "in_place":
            return None
        # while weights change, nobody knows which a request will meet
        return f"{self._name}-{self._changes if self._changes % 2 == 0 else uuid.uuid4().hex}"

    async def _abort(self, in_flight: Mapping[str, str]) -> None:
        async with self._session() as session:
            # again and again: a server ignores the name of a request that is still on its way
            while in_flight:
                calls = [
                    session.post(url, "/abort_request", partial(dict, rid=rid, abort_all=False), json=False)
                    for rid, url in in_flight.items()
                ]
                await asyncio.gather(*calls)
                await asyncio.sleep(ABORT_INTERVAL_S)
                with self._lock:
                    in_flight = {rid: url for rid, url in in_flight.items() if rid in self._in_flight}

    def _write(self, weights: Mapping[str, Tensor], version: int) -> Path:
        directory = self._weights_dir / f"version-{version}"
        if directory.exists():  # of a run that was broken off
            shutil.rmtree(directory)
        self._weights_dir.mkdir(parents=True, exist_ok=True)
        self._save(directory, weights)
        return directory

    async def _change_weights(self, directory: Path, version: int) -> None:
        failures: list[ServerError] = []
        self._changes += 1
        try:
            async with self._session() as session:
                try:
                    await self._everywhere("pause", partial(self._pause, session))
                    load = partial(self._load, session, directory, version)
                    await self._everywhere(f"change to weight version {version}", load)
                except ServerError as error:
                    failures.append(error)
                finally:
                    # after Ctrl-C too: nobody else would end the pause
                    try:
                        await self._everywhere("go on sampling", partial(self._continue, session))
                    except ServerError as error:
                        failures.append(error)
        finally:
            self._changes += 1
        if failures:
            raise ServerError(failures[0].url, "; then ".join(error.reason for error in failures))

    async def _everywhere(self, what: str, call: Callable[[ServerFacts], Awaitable[None]]) -> None:
        """All servers at once; one error for those that failed, after all are done."""
        outcomes = await asyncio.gather(*(call(facts) for facts in self._servers), return_exceptions=True)
        failed = {
            facts.url: outcome
            for facts, outcome in zip(self._servers, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        }
        for outcome in failed.values():
            if not isinstance(outcome, ServerError):
                raise outcome
        if failed:
            others = [facts.url for facts in self._servers if facts.url not in failed]
            reasons = "; ".join(map(str, failed.values()))
            raise ServerError(
                next(iter(failed)), f"did not {what}; those that did: {', '.join(others) or 'none'}. {reasons}"
            )

    async def _pause(self, session: Session, facts: ServerFacts) -> None:
        await session.post(facts.url, "/pause_generation", lambda: {"mode": self._pause_mode})

    async def _continue(self, session: Session, facts: ServerFacts) -> None:
        await session.post(facts.url, "/continue_generation", dict)

    async def _load(self, session: Session, directory: Path, version: int, facts: ServerFacts) -> None:
        body = {
            "model_path": str(directory),
            "weight_version": str(version),
            # in place the cache is in use and cannot be flushed: the salt of new requests keeps them from it
            "flush_cache": self._pause_mode != "in_place",
            "abort_all_requests": False,
        }
        answer = await session.post(facts.url, "/update_weights_from_disk", lambda: body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise ServerError(facts.url, f"/update_weights_from_disk did not confirm: {answer}")
        held = (await session.get(facts.url, MODEL_INFO)).get("weight_version")
        if held != str(version):
            raise ServerError(
                facts.url, f"reports weight version {held!r} after the change to {version}; use SGLang 0.5.1 or later"
            )


def _check_arguments(urls: Sequence[str], pause_mode: str, timeout_s: float, **counts: int) -> None:
    if isinstance(urls, str) or not urls or not all(re.match(r"https?://[^/]", url) for url in urls):
        raise ValueError(f"urls must be a sequence of http://host:port, got {urls!r}")
    _check_distinct(urls)
    if pause_mode not in PAUSE_MODES:
        raise ValueError(f"pause_mode must be one of {PAUSE_MODES}, got {pause_mode!r}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


def _check_distinct(urls: Iterable[str]) -> None:
    bare = [url.rstrip("/") for url in urls]
    if len(set(bare)) < len(bare):
        raise ValueError(f"urls must differ, got {bare}")
