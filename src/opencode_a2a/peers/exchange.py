"""One HTTP exchange with a peer: bounded, credentialed for one origin, errors mapped.

``peers.discovery`` and ``peers.client`` send through this. It follows no redirect, takes no
compressed answer (it would hide the size), and calls only what ``peers.network`` permits. It
knows neither cards nor tasks.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx2

from opencode_a2a.events import JsonObject
from opencode_a2a.peers import wire
from opencode_a2a.peers.credential import Credential, origin
from opencode_a2a.peers.errors import ErrorCode, PeerError, from_status, in_answer
from opencode_a2a.peers.network import Egress, EgressError, client, media_type, read

_ANSWER_BYTES = 32 * 1024 * 1024
_EVENT_BYTES = 8 * 1024 * 1024
_STREAM_BYTES = 256 * 1024 * 1024


class DroppedError(Exception):
    """A stream broke off; what it told of may well go on."""


class Exchange:
    """Requests to one peer, with one credential, under one set of rules."""

    def __init__(self, rules: Egress, credential: Credential | None, *, patience: float) -> None:
        self.rules = rules
        self._credential = credential
        self._patience = patience
        self._http = client(rules, timeout=patience)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def fetch(
        self,
        request: wire.Request,
        headers: dict[str, str],
        limit: int = _ANSWER_BYTES,
        *,
        endless: bool = False,
    ) -> JsonObject:
        """Return the result that the peer answers with, or raise the error it answers with."""
        async with self._sent(request, headers, endless=endless) as response:
            return _result(await _body(response, limit), response.status_code)

    async def stream(
        self, request: wire.Request, headers: dict[str, str]
    ) -> AsyncGenerator[tuple[JsonObject, str | None]]:
        """Yield the results of a stream with their ids; raise DroppedError where it breaks off.

        A peer that answers with a plain document gives one result.
        """
        async with self._sent(request, headers | {"Accept": "text/event-stream"}) as response:
            if response.status_code != 200 or media_type(response) != "text/event-stream":
                yield _result(await _body(response, _ANSWER_BYTES), response.status_code), None
                return
            size = 0
            try:
                async for frame in httpx2.EventSource(response, _EVENT_BYTES):
                    size += len(frame.data)
                    if size > _STREAM_BYTES:
                        raise PeerError(ErrorCode.UNEXPECTED, "the agent's stream is too long")
                    if frame.data:
                        yield _result(frame.data.encode(), 200), frame.id or None
            except httpx2.SSEError as error:
                raise PeerError(
                    ErrorCode.UNEXPECTED, "an event of the agent's stream is too large"
                ) from error
            except httpx2.TransportError as error:
                raise DroppedError from error
        raise DroppedError  # a stream ends with its task, and then its reader has left

    @asynccontextmanager
    async def _sent(
        self, request: wire.Request, headers: dict[str, str], *, endless: bool = False
    ) -> AsyncGenerator[httpx2.Response]:
        """Open an answer; what can still go wrong with it is named by who reads it."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"} | headers
        if request.body is not None:
            headers["Content-Type"] = "application/json"
        if self._credential:
            headers |= self._credential.headers(request.url)
        timeout = httpx2.Timeout(self._patience, read=None if endless else self._patience)
        sending = self._http.stream(
            request.verb, request.url, headers=headers, content=request.body, timeout=timeout
        )
        try:
            async with sending as response:
                self._check(response, request.url)
                yield response
        except httpx2.TimeoutException as error:
            message = f"{origin(request.url)} did not answer in time"
            raise PeerError(ErrorCode.TIMEOUT, message) from error
        except EgressError as error:
            raise PeerError(ErrorCode.INVALID_INPUT, f"not called: {error}") from error
        except httpx2.InvalidURL as error:
            raise PeerError(ErrorCode.INVALID_INPUT, "not called: the URL is malformed") from error
        except httpx2.TransportError as error:
            message = f"{origin(request.url)} cannot be reached"
            raise PeerError(ErrorCode.RETRYABLE, message) from error

    def _check(self, response: httpx2.Response, url: str) -> None:
        if response.is_redirect:
            raise PeerError(
                ErrorCode.UNEXPECTED,
                "the agent redirects, which is not followed; call the new address instead",
                http_status=response.status_code,
            )
        if response.headers.get("content-encoding", "identity") != "identity":
            raise PeerError(ErrorCode.UNEXPECTED, "the agent answered compressed, unasked")
        if response.status_code != 401:
            return
        if self._credential is None:
            remedy = "and none is configured for it"
        elif self._credential.headers(url):
            remedy = "and refuses the one it got"
        else:
            remedy = f"and the one given belongs to {self._credential.origin}"
        message = f"{origin(url)} wants a credential, {remedy}"
        raise PeerError(ErrorCode.AUTH_FAILED, message, http_status=401)


async def _body(response: httpx2.Response, limit: int) -> bytes:
    try:
        body = await read(response, limit)
    except httpx2.TimeoutException as error:
        raise PeerError(ErrorCode.TIMEOUT, "the agent stopped in mid-answer") from error
    except httpx2.TransportError as error:
        raise PeerError(ErrorCode.RETRYABLE, "the connection broke in mid-answer") from error
    if body is None:
        raise PeerError(ErrorCode.UNEXPECTED, f"the answer is larger than {limit} bytes")
    return body


def _result(body: bytes, status: int) -> JsonObject:
    """Return the result in an answer of either binding, or raise its error."""
    try:
        value = wire.read_json(body)
    except wire.MalformedError as error:
        if status >= 400:
            raise from_status(status, None) from error
        raise
    if error := in_answer(status, value):
        raise error
    result = value.get("result") if "jsonrpc" in value else value
    if not isinstance(result, dict):
        raise PeerError(ErrorCode.PROTOCOL, "the agent's answer holds no result")
    return result
