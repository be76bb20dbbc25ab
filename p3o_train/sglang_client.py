"""JSON over HTTP to one or several servers: timeouts, and retries of what another attempt can mend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from p3o_train.engine import EngineError

# the text of an error names everything that matters within
SHOWN_CHARACTERS = 2000


class ServerError(EngineError):
    """A server that cannot be reached or refuses; the message names it and quotes its answer."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.reason = url, reason

    def __reduce__(self) -> tuple[type[ServerError], tuple[str, str]]:
        return type(self), (self.url, self.reason)


def _is_transient(error: BaseException) -> bool:
    """Broken connections and 5xx. Not a 4xx, which stays one, nor a slow answer, which another attempt doubles."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout))


class Session:
    """Open connections, inside one ``asyncio.run``: ``async with Session(...) as session``.

    Args:
        timeout_s: seconds that one answer may take.
        attempts: how often a request is sent at most, >= 1; the wait between them doubles from half a second to 8.
    """

    def __init__(self, timeout_s: float, attempts: int) -> None:
        self._timeout_s, self._attempts = timeout_s, attempts
        # how many requests run is the caller's choice; servers are reached directly, whatever proxy is set
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def __aenter__(self) -> Session:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._http.__aexit__(*exception)

    async def get(self, url: str, paths: Sequence[str]) -> Any:
        """The answer of the first of these paths that the server knows: names changed between versions."""
        for path in paths[:-1]:
            response = await self._send(partial(self._http.get, url + path), url, path, allowed=(404,))
            if response.status_code != 404:
                return _parsed(response, url, path)
        return _parsed(await self._send(partial(self._http.get, url + paths[-1]), url, paths[-1]), url, paths[-1])

    async def post(self, url: str, path: str, body: Callable[[], Mapping[str, Any]], *, json: bool = True) -> Any:
        """The answer; ``body`` is called again for every attempt. With ``json`` False the answer has no content.

        Raises:
            ServerError: no answer after all attempts, or one that refuses.
        """
        response = await self._send(lambda: self._http.post(url + path, json=body()), url, path)
        return _parsed(response, url, path) if json else None

    async def _send(
        self, send: Callable[[], Awaitable[httpx.Response]], url: str, path: str, allowed: tuple[int, ...] = ()
    ) -> httpx.Response:
        async def attempt() -> httpx.Response:
            # httpx's own limit is for each read, and an answer that trickles in never meets it
            response = await asyncio.wait_for(send(), self._timeout_s)
            if response.status_code not in allowed:
                response.raise_for_status()
            return response

        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_attempt(self._attempts),
            wait=wait_exponential(multiplier=0.5, max=8),
            reraise=True,
        )
        try:
            return await retrying(attempt)
        except httpx.HTTPStatusError as error:
            text = error.response.text[:SHOWN_CHARACTERS]
            raise ServerError(url, f"{path} answered {error.response.status_code}: {text}") from error
        except (httpx.ReadTimeout, asyncio.TimeoutError) as error:
            raise ServerError(
                url, f"{path} did not answer within {self._timeout_s:g} s; raise timeout_s, or look at the server"
            ) from error
        except httpx.HTTPError as error:
            # some connection errors have no text of their own
            text = f"{type(error).__name__} {error}".strip()
            raise ServerError(
                url, f"{path} failed with {text}, attempts allowed: {self._attempts}; is the server running?"
            ) from error


def _parsed(response: httpx.Response, url: str, path: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        text = response.text[:SHOWN_CHARACTERS]
        raise ServerError(url, f"{path} did not answer with JSON but with {text!r}") from error
