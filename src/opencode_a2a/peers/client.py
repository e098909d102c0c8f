"""Call another A2A agent: read its card, send it a message, follow the answer to its end.

The commands and ``peers.tool`` use this. It speaks both versions over JSON-RPC and
HTTP+JSON directly on httpx2: the SDK's client takes most of a second to import, cannot resume a
stream, and sends its headers wherever a card points. ``net.egress`` decides which addresses may
be called. Inside there is only A2A 1.0; ``a2a.v03`` translates for peers of 0.3.

A broken stream is resumed: with ``Last-Event-ID`` if the peer numbers its events, otherwise from
the peer's current task. ``peers.received`` makes sure that no text is reported twice. A message
without an answer is sent again, under its id, to services of this kind: they make one task of it.
"""

import asyncio
import math
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, urlencode

import httpx2
import orjson

from opencode_a2a.a2a import render, v03
from opencode_a2a.a2a.operations import (
    CANCEL_TASK,
    GET_TASK,
    LIST_TASKS,
    PREFIXES,
    SEND_MESSAGE,
    SEND_STREAMING_MESSAGE,
    SUBSCRIBE_TO_TASK,
    Operation,
)
from opencode_a2a.a2a.types import HOPS_HEADER, VERSION_HEADER, SendRequest, Version
from opencode_a2a.a2a.v03 import Spelling
from opencode_a2a.config import ClientSettings, HttpBinding
from opencode_a2a.errors import ParseError, UnsupportedOperationError
from opencode_a2a.events import JsonObject
from opencode_a2a.jsonguard import as_object, decode, items_in, text_in, whole_characters
from opencode_a2a.log.state import State
from opencode_a2a.messages import Message
from opencode_a2a.net.egress import (
    Egress,
    EgressError,
    OriginCredential,
    check,
    origin,
    tls_trouble,
)
from opencode_a2a.net.http import client, media_type, read
from opencode_a2a.peers.proof import KEYS_BYTES, Proof, proven
from opencode_a2a.peers.received import (
    SETTLED,
    ErrorCode,
    LostError,
    MalformedError,
    PeerError,
    PeerEvent,
    PeerTask,
    Received,
    ReceivedTask,
    read_error,
    read_event,
    read_task,
)
from opencode_a2a.telemetry import trace_headers

MAX_HOPS = 3
_RESUMES = 4
"""How many attempts in a row to resume a stream, or to poll, may fail while the peer is there."""
_PROFILE = "#a2a-compatibility-profile-v1"
"""The end of the URI of an extension that only services of this kind list."""
_PAGE = 100
_MOST_PAGES = 1000
_ANSWER_BYTES = 32 * 1024 * 1024
_CARD_BYTES = 1024 * 1024
_EVENT_BYTES = 8 * 1024 * 1024
_STREAM_BYTES = 256 * 1024 * 1024
Report = Callable[[PeerEvent], None]
"""Takes each event of a peer's answer as it arrives."""


# --- cards ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of an agent, with the binding and the version to use there."""

    url: str
    binding: HttpBinding
    version: Version
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class PeerCard:
    name: str
    description: str
    version: str
    streaming: bool
    interfaces: tuple[Interface, ...]
    """The interfaces with a known binding and version, in the agent's order of preference."""
    repeatable: bool = False
    """Whether a message that is sent again, under the same id, leads to the same task."""


def card_urls(url: str, rules: Egress) -> list[str]:
    """Return the possible addresses of the card, the most likely first.

    The URL is either that of the card, or a base to which the well-known path is added.
    """
    parts = _checked(url, rules)
    site = f"{parts.scheme}://{parts.netloc}"
    if "/.well-known/" in parts.path or parts.path.endswith(".json"):
        return [site + parts.path + (f"?{parts.query}" if parts.query else "")]
    base, well_known = site + parts.path.rstrip("/"), "/.well-known/agent-card.json"
    # Agents before 0.3 had their card at agent.json.
    places = [base + well_known, f"{base}/.well-known/agent.json", site + well_known]
    return list(dict.fromkeys(places))


def _checked(url: str, rules: Egress) -> SplitResult:
    try:
        return check(url, rules)
    except EgressError as error:
        raise PeerError(ErrorCode.INVALID_INPUT, f"not called: {error}") from error


def read_card(value: JsonObject) -> PeerCard:
    """Read a card of either version; of a hybrid card the interfaces of 1.0 are used."""
    name = text_in(value, "name")
    if name is None:
        raise PeerError(ErrorCode.INVALID_CARD, "the card has no name")
    listed = items_in(value, "supportedInterfaces")
    if not listed:
        main: JsonObject = {"url": value.get("url"), "transport": value.get("preferredTransport")}
        listed = [main, *items_in(value, "additionalInterfaces")]
    versions = {"1": Version.V1, "0": Version.V03}
    interfaces: dict[Interface, None] = {}
    for item in listed:
        url = text_in(item, "url")
        named = text_in(item, "protocolVersion") or text_in(value, "protocolVersion") or "0.3"
        major, dot, _ = named.partition(".")
        version = versions.get(major) if dot else None
        spelled = text_in(item, "protocolBinding", "transport")
        binding = HttpBinding.spelled(spelled) if spelled else HttpBinding.JSONRPC
        if url and version and binding:
            interfaces[Interface(url, binding, version, text_in(item, "tenant"))] = None
    capabilities = as_object(value.get("capabilities"))
    extensions = items_in(capabilities, "extensions")
    return PeerCard(
        name,
        text_in(value, "description") or "",
        text_in(value, "version") or "",
        capabilities.get("streaming") is True,
        tuple(interfaces),
        any((text_in(one, "uri") or "").endswith(_PROFILE) for one in extensions),
    )


def choose(card: PeerCard, settings: ClientSettings, rules: Egress) -> Interface:
    """Return the first usable interface, in the peer's order or, if so set, in ours."""
    ours = settings.supported_transports
    usable = [
        interface
        for interface in card.interfaces
        if interface.binding in ours and settings.protocol_version in (None, interface.version)
    ]
    if settings.use_client_preference:
        usable.sort(key=lambda interface: ours.index(interface.binding))
    if not usable:
        raise PeerError(
            ErrorCode.INVALID_CARD,
            "the card offers no interface that is spoken here (JSON-RPC or HTTP+JSON, 1.0 or 0.3)",
        )
    _checked(usable[0].url, rules)
    return usable[0]


# --- HTTP -------------------------------------------------------------------------------------


def configured_credential(url: str, settings: ClientSettings) -> OriginCredential | None:
    """Return the configured credential for the origin of a URL; bearer wins over basic."""
    if settings.bearer_token:
        return OriginCredential.bearer(url, settings.bearer_token.get_secret_value())
    if settings.basic_auth:
        return OriginCredential.basic(url, settings.basic_auth.get_secret_value())
    return None


class DroppedError(Exception):
    """A stream broke off; the peer's task may still be running."""


@dataclass(frozen=True, slots=True)
class PeerRequest:
    verb: str
    url: str
    body: bytes | None = None


class PeerConnection:
    """Sends requests to one peer, with one credential and limits on what it answers.

    It follows no redirect, and accepts no compressed answer, whose size would be unknown.
    """

    def __init__(
        self,
        rules: Egress,
        credential: OriginCredential | None,
        *,
        timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._credential = credential
        self._timeout = timeout
        self._http = client(rules, timeout=timeout, tls=tls)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def fetch(
        self,
        request: PeerRequest,
        headers: dict[str, str],
        limit: int = _ANSWER_BYTES,
        *,
        endless: bool = False,
    ) -> JsonObject:
        """Return the result in the peer's answer, or raise its error.

        With ``endless`` the answer may take as long as it likes.
        """
        async with self._send(request, headers, endless=endless) as response:
            return _read_result(await _read_body(response, limit), response.status_code)

    async def stream(
        self, request: PeerRequest, headers: dict[str, str]
    ) -> AsyncGenerator[tuple[JsonObject, str | None]]:
        """Yield the results of a stream with their ids; raise DroppedError where it breaks off.

        A peer that answers with a plain document gives one result.
        """
        async with self._send(request, headers | {"Accept": "text/event-stream"}) as response:
            if response.status_code != 200 or media_type(response) != "text/event-stream":
                body = await _read_body(response, _ANSWER_BYTES)
                yield _read_result(body, response.status_code), None
                return
            size = 0
            try:
                async for frame in httpx2.EventSource(response, _EVENT_BYTES):
                    size += len(frame.data)
                    if size > _STREAM_BYTES:
                        raise PeerError(ErrorCode.UNEXPECTED, "the agent's stream is too long")
                    if frame.data:
                        yield _read_result(frame.data.encode(), 200), frame.id or None
            except httpx2.SSEError as error:
                raise PeerError(
                    ErrorCode.UNEXPECTED, "an event of the agent's stream is too large"
                ) from error
            except httpx2.TransportError as error:
                raise DroppedError from error
        raise DroppedError  # it ended before its task: otherwise the reader would have left

    @asynccontextmanager
    async def _send(
        self, request: PeerRequest, headers: dict[str, str], *, endless: bool = False
    ) -> AsyncGenerator[httpx2.Response]:
        """Send a request and yield the response; raise PeerError if its head shows a failure."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"} | headers
        headers |= trace_headers()
        if request.body is not None:
            headers["Content-Type"] = "application/json"
        if self._credential:
            headers |= self._credential.headers(request.url)
        timeout = httpx2.Timeout(self._timeout, read=None if endless else self._timeout)
        sending = self._http.stream(
            request.verb, request.url, headers=headers, content=request.body, timeout=timeout
        )
        try:
            async with sending as response:
                if response.is_redirect:
                    raise PeerError(
                        ErrorCode.UNEXPECTED,
                        "the agent redirects, which is not followed; call the new address instead",
                        http_status=response.status_code,
                    )
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise PeerError(
                        ErrorCode.UNEXPECTED, "the agent compressed its answer, unasked"
                    )
                if response.status_code == 401:
                    if self._credential is None:
                        remedy = "and none is configured for it"
                    elif self._credential.headers(request.url):
                        remedy = "and refuses the one it got"
                    else:
                        remedy = f"and the one given belongs to {self._credential.origin}"
                    message = f"{origin(request.url)} wants a credential, {remedy}"
                    raise PeerError(ErrorCode.AUTH_FAILED, message, http_status=401)
                yield response
        except httpx2.TimeoutException as error:
            message = f"{origin(request.url)} did not answer in time"
            raise PeerError(ErrorCode.TIMEOUT, message, away=True) from error
        except EgressError as error:
            raise PeerError(ErrorCode.INVALID_INPUT, f"not called: {error}") from error
        except httpx2.InvalidURL as error:
            raise PeerError(ErrorCode.INVALID_INPUT, "not called: the URL is malformed") from error
        except httpx2.TransportError as error:
            if trouble := tls_trouble(error):
                message = f"{origin(request.url)} {trouble}"
                raise PeerError(ErrorCode.CALL_FAILED, message) from error
            message = f"{origin(request.url)} cannot be reached"
            if isinstance(error, httpx2.RemoteProtocolError) and request.url.startswith("https:"):
                # This is all that httpx2 shows of the TLS 1.3 alert that asks for one.
                message += "; it may require a client certificate (A2A_CLIENT_CERT_FILE)"
            raise PeerError(ErrorCode.RETRYABLE, message, away=True) from error


async def _read_body(response: httpx2.Response, limit: int) -> bytes:
    try:
        body = await read(response, limit)
    except httpx2.TimeoutException as error:
        raise PeerError(ErrorCode.TIMEOUT, "the agent stopped in mid-answer", away=True) from error
    except httpx2.TransportError as error:
        message = "the connection broke in mid-answer"
        raise PeerError(ErrorCode.RETRYABLE, message, away=True) from error
    if body is None:
        raise PeerError(ErrorCode.UNEXPECTED, f"the answer is larger than {limit} bytes")
    return body


def _read_result(body: bytes, status: int) -> JsonObject:
    """Return the result in an answer of either binding, or raise its error."""
    try:
        value = read_json(body)
    except MalformedError:
        if status < 400:
            raise
        value = JsonObject()  # such as the page of a proxy: only the status is known
    if error := read_error(status, value):
        raise error
    result = value.get("result") if "jsonrpc" in value else value
    if not isinstance(result, dict):
        raise PeerError(ErrorCode.PROTOCOL, "the agent's answer holds no result")
    return result


def read_json(data: bytes) -> JsonObject:
    """Parse one JSON object from a peer; refuse documents made to do harm."""
    try:
        value = decode(whole_characters(data))
    except ParseError as error:
        raise MalformedError(error.message) from error
    if not isinstance(value, dict):
        raise MalformedError("not a JSON object")
    return value


# --- requests ---------------------------------------------------------------------------------


def send_params(
    message: Message, task_id: str | None, context_id: str | None, *, waits: bool
) -> JsonObject:
    """Return the params of a send; with ``waits`` the peer answers when its task stops."""
    body: JsonObject = {
        "messageId": message.message_id,
        "role": "ROLE_USER",
        "parts": [render.part(part) for part in message.parts],
    }
    body |= render.compact(taskId=task_id, contextId=context_id, metadata=message.metadata)
    return {"message": body, "configuration": {"returnImmediately": not waits}}


def build_request(at: Interface, operation: Operation, params: JsonObject) -> PeerRequest:
    """Return the HTTP request for an operation; ``params["id"]`` names the task, if any."""
    if at.version is Version.V03 and operation.takes is SendRequest:
        # The 0.3 servers that exist read ProtoJSON on HTTP, and the specification's JSON on RPC.
        http = at.binding is HttpBinding.HTTP_JSON
        params = v03.downgrade_send(params, Spelling.PROTO if http else Spelling.JSON)
    match at.binding:
        case HttpBinding.JSONRPC:
            body: JsonObject = {
                "jsonrpc": "2.0",
                "id": 1,
                "method": operation.named(at.version) or _LIST_TASKS_03,
                "params": render.compact(tenant=at.tenant) | params,
            }
            return PeerRequest("POST", at.url, orjson.dumps(body))
        case HttpBinding.HTTP_JSON:
            prefix = PREFIXES[at.version]
            base = at.url.rstrip("/").removesuffix(prefix) + prefix
            if at.tenant and at.version is Version.V1:
                base += f"/{quote(at.tenant, safe='')}"
            rest = {key: value for key, value in params.items() if key != "id"}
            url = base + operation.path.replace("{id}", quote(str(params.get("id", "")), safe=""))
            verb = operation.verbs[-1]  # older servers subscribe by POST only
            if verb == "GET":
                return PeerRequest(verb, f"{url}?{urlencode(rest)}" if rest else url)
            return PeerRequest(verb, url, orjson.dumps(rest) if rest else None)


_LIST_TASKS_03 = "tasks/list"
"""Not in the specification of 0.3, but some of its servers know it; the others refuse it."""


# --- the peer ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Following:
    """A task that is being followed, and the place in its stream."""

    task: PeerTask
    report: Report
    received: bool = False
    """Whether the current or last stream has brought an event."""
    last_id: str | None = None
    """The id of the last event, if the peer numbers them."""

    def take(self, received: Received) -> bool:
        """Report what is new; return whether the task has ended or waits for somebody."""
        for event in self.task.take(received):
            self.report(event)
        return self.task.settled


@dataclass(slots=True)
class _Absence:
    """How long the peer has been away."""

    limit: float
    since: float | None = None

    def too_long(self) -> bool:
        """Note that the peer cannot be reached; return whether for longer than the limit."""
        now = asyncio.get_running_loop().time()
        if self.since is None:
            self.since = now
        return now - self.since > self.limit


class Peer:
    """One agent, reached through an interface of its card that both sides support."""

    def __init__(
        self,
        connection: PeerConnection,
        card: PeerCard,
        interface: Interface,
        settings: ClientSettings,
    ) -> None:
        self.card = card
        self.interface = interface
        self._connection = connection
        self._settings = settings

    @classmethod
    async def open(
        cls,
        url: str,
        rules: Egress,
        credential: OriginCredential | None,
        settings: ClientSettings,
        tls: ssl.SSLContext | None = None,
        proof: Proof | None = None,
    ) -> "Peer":
        """Read the card at a base URL or card URL and choose one of its interfaces.

        With ``proof`` the card has to be signed, and the credential is not sent before that is
        checked.
        """
        places = card_urls(url, rules)
        connection = PeerConnection(rules, credential, timeout=settings.timeout_seconds, tls=tls)
        seconds = settings.card_fetch_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                if proof is None:
                    document, _ = await _find_card(connection, places)
                else:
                    document = await _proven_card(rules, places, proof, settings, tls)
                card = read_card(document)
            return cls(connection, card, choose(card, settings, rules), settings)
        except TimeoutError as error:
            await connection.aclose()
            raise PeerError(ErrorCode.TIMEOUT, f"no agent card within {seconds:g} s") from error
        except BaseException:
            await connection.aclose()
            raise

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def ask(
        self,
        message: Message,
        report: Report,
        *,
        task_id: str | None = None,
        context_id: str | None = None,
        task: PeerTask | None = None,
        stream: bool = True,
        hops: int = 0,
    ) -> None:
        """Send a message and report what is new until the peer's task ends or waits.

        To continue a task, give its id, and its ``PeerTask`` if it was followed before, so that
        nothing is reported twice. ``hops`` is the number of agents that the request behind this
        message went through.
        """
        if hops >= MAX_HOPS:
            raise PeerError(
                ErrorCode.CALL_FAILED,
                f"not asked: the request already went through {hops} agents, which seem to call "
                "each other in a circle",
            )
        task = task or PeerTask()
        if task_id and task_id != task.task_id:
            task.prime(await self.task(task_id))
        task.begin()
        # Without polling, the answer has to come at the end of the task. Streams ignore this.
        polls = self._settings.polling_fallback_enabled
        params = send_params(message, task_id, context_id, waits=not polls)
        following, absence = _Following(task, report), _Absence(self._settings.timeout_seconds)
        while True:
            try:
                if stream and self.card.streaming:
                    await self._send_streaming(params, following, hops)
                if not following.received:
                    following.take(read_event(await self._call(SEND_MESSAGE, params, hops)))
                break
            except PeerError as error:
                # Another peer may have the message, and could do the work twice.
                repeats = error.away and self.card.repeatable and not following.received
                if not repeats or absence.too_long():
                    raise
                await asyncio.sleep(self._settings.polling_fallback_initial_interval_seconds)
        seconds = self._settings.polling_fallback_timeout_seconds if polls else 0.0
        await self._finish(following, seconds)

    async def add(self, message: Message, task_id: str) -> None:
        """Send a message to a task that works and is followed elsewhere."""
        await self._call(SEND_MESSAGE, send_params(message, task_id, None, waits=False))

    async def follow(self, task_id: str, report: Report, task: PeerTask | None = None) -> None:
        """Report a task from its beginning until it ends or waits for somebody.

        A peer that does not stream is polled for as long as that takes.
        """
        following = _Following(task or PeerTask(), report, received=True)
        following.take(await self.task(task_id))
        await self._finish(following, math.inf)

    async def task(self, task_id: str, history: int = 0) -> ReceivedTask:
        # For 0.3 servers a length of zero means all messages.
        length = history if self.interface.version is Version.V1 else max(history, 1)
        params: JsonObject = {"id": task_id, "historyLength": length}
        return read_task(await self._call(GET_TASK, params))

    async def tasks(
        self,
        context_id: str | None = None,
        limit: int | None = 50,
        state: State | None = None,
    ) -> list[ReceivedTask]:
        """Return the newest tasks, of all states or of one; without a limit all, page by page.

        Not every agent heeds the context and the state.
        """
        params: JsonObject = {"pageSize": limit or _PAGE, "historyLength": 1}
        if context_id:
            params["contextId"] = context_id
        if state:
            params["status"] = f"TASK_STATE_{state.name}"
        found: list[ReceivedTask] = []
        for _ in range(_MOST_PAGES):
            listed = await self._call(LIST_TASKS, params)
            page = [read_task(item) for item in items_in(listed, "tasks")]
            found += page
            token = text_in(listed, "nextPageToken")
            if limit is not None or not token or not page:
                return found
            params["pageToken"] = token
        raise PeerError(ErrorCode.UNEXPECTED, "the agent's list of tasks does not end")

    async def invoke(self, method: str, params: JsonObject) -> JsonObject:
        """Call a method beyond A2A by JSON-RPC; other services of this kind offer some."""
        at = next((one for one in self.card.interfaces if one.binding is HttpBinding.JSONRPC), None)
        if at is None:
            raise PeerError(ErrorCode.UNSUPPORTED, f"the agent does not offer {method}")
        body: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        request = PeerRequest("POST", at.url, orjson.dumps(body))
        return await self._connection.fetch(request, {VERSION_HEADER: at.version.value})

    async def cancel(self, task_id: str) -> ReceivedTask:
        return read_task(await self._call(CANCEL_TASK, {"id": task_id}))

    async def _send_streaming(self, params: JsonObject, following: _Following, hops: int) -> None:
        """Send a message by stream.

        If the peer turns out not to stream, nothing has been received afterwards, and the message
        has to be sent without a stream.
        """
        try:
            async with aclosing(
                self._stream(SEND_STREAMING_MESSAGE, params, following, hops)
            ) as events:
                async for event in events:
                    if following.take(event):
                        return
        except DroppedError as error:
            if not following.received:
                message = "the connection broke before the agent answered"
                raise PeerError(ErrorCode.RETRYABLE, message, away=True) from error
        except PeerError as error:
            if following.received:
                expected = error.retryable
            else:
                # Since the card says that it streams, UnsupportedOperationError is about the
                # message; any other error of this kind says that it does not stream after all.
                about_message = error.rpc_code == UnsupportedOperationError.code
                expected = error.code is ErrorCode.UNSUPPORTED and not about_message
            if not expected:
                raise

    async def _finish(self, following: _Following, seconds: float) -> None:
        """Follow the task to its end: resume the stream, then poll for at most so many seconds.

        Without a stream, or when it cannot be resumed, the task is only polled.
        """
        task, absence = following.task, _Absence(self._settings.timeout_seconds)
        failures, pause = 0 if following.received else _RESUMES, 0.0
        while task.task_id and not task.settled and failures < _RESUMES:
            await asyncio.sleep(pause)
            following.received = False
            try:
                await self._subscribe(task.task_id, following)
            except (DroppedError, PeerError) as error:
                if following.received:
                    failures, absence.since = 0, None
                elif isinstance(error, DroppedError):
                    failures += 1
                elif not error.away or absence.too_long():
                    break
                first = self._settings.polling_fallback_initial_interval_seconds
                pause = first * (failures + 1)
        await self._poll(following, seconds, absence)

    async def _subscribe(self, task_id: str, following: _Following) -> None:
        """Subscribe again: after the id of the last event, or else from the current task."""
        exact, aligned = following.last_id is not None, False
        stream = self._stream(SUBSCRIBE_TO_TASK, {"id": task_id}, following)
        async with aclosing(stream) as events:
            async for event in events:
                aligned = aligned or exact or isinstance(event, ReceivedTask)
                if not aligned:
                    # A 0.3 server may continue without sending what was missed.
                    raise PeerError(ErrorCode.UNEXPECTED, "the stream cannot be resumed")
                settles = event.status and event.status.state in SETTLED
                if settles and not exact and not isinstance(event, ReceivedTask):
                    # Between task and stream some servers leave a gap; the task has everything.
                    event = await self.task(task_id)
                if following.take(event):
                    return

    async def _poll(self, following: _Following, seconds: float, absence: _Absence) -> None:
        """Read the task, at least once, until it is settled or the time has run out."""
        settings, task, pause, failures = self._settings, following.task, 0.0, 0
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while task.task_id and not task.settled:
            if clock() + pause > deadline and pause and not failures:
                waited = f"the agent had not finished after {seconds:g} s of polling"
                if not seconds:
                    off = "A2A_CLIENT_POLLING_FALLBACK_ENABLED is off"
                    waited = f"the agent has not finished, and {off}"
                raise PeerError(ErrorCode.TIMEOUT, waited)
            await asyncio.sleep(pause)
            try:
                following.take(await self.task(task.task_id))
                failures, absence.since = 0, None
            except PeerError as error:
                failures += 1
                if error.away and absence.too_long():
                    message = "the connection to the agent was lost"
                    raise LostError(ErrorCode.TIMEOUT, message) from error
                if not error.retryable or (failures > _RESUMES and not error.away):
                    raise
            longer = pause * settings.polling_fallback_backoff_multiplier
            pause = min(
                max(longer, settings.polling_fallback_initial_interval_seconds),
                settings.polling_fallback_max_interval_seconds,
            )

    async def _call(
        self, operation: Operation, params: JsonObject, hops: int | None = None
    ) -> JsonObject:
        request = build_request(self.interface, operation, params)
        # The answer to a message may take as long as the work; callers have limits of their own.
        sends = operation is SEND_MESSAGE
        result = await self._connection.fetch(request, self._headers(hops), endless=sends)
        if self.interface.version is Version.V1:
            return result
        return v03.upgrade_event(result) if sends else v03.upgrade(result)

    async def _stream(
        self,
        operation: Operation,
        params: JsonObject,
        following: _Following,
        hops: int | None = None,
    ) -> AsyncGenerator[Received]:
        resume = {"Last-Event-ID": following.last_id} if following.last_id else {}
        request = build_request(self.interface, operation, params)
        results = self._connection.stream(request, self._headers(hops) | resume)
        async with aclosing(results):
            async for value, following.last_id in results:
                following.received = True
                is_v1 = self.interface.version is Version.V1
                yield read_event(value if is_v1 else v03.upgrade_event(value))

    def _headers(self, hops: int | None) -> dict[str, str]:
        version = {VERSION_HEADER: self.interface.version.value}
        return version if hops is None else version | {HOPS_HEADER: str(hops + 1)}


async def _proven_card(
    rules: Egress,
    places: list[str],
    proof: Proof,
    settings: ClientSettings,
    tls: ssl.SSLContext | None,
) -> JsonObject:
    connection = PeerConnection(rules, None, timeout=settings.timeout_seconds, tls=tls)
    async with aclosing(connection):  # without the credential

        async def fetch(url: str) -> JsonObject:
            return await connection.fetch(PeerRequest("GET", url), {}, KEYS_BYTES)

        card, place = await _find_card(connection, places)
        return await proven(card, place, proof, fetch)


async def _find_card(connection: PeerConnection, places: list[str]) -> tuple[JsonObject, str]:
    """Return the card at the first address that has one, and that address."""
    for place in places:
        try:
            return await connection.fetch(PeerRequest("GET", place), {}, _CARD_BYTES), place
        except PeerError as error:
            status = error.http_status
            if status == 404 and place != places[-1]:
                continue
            if status == 404:
                message = f"there is no agent card at {place}"
            elif error.code in (ErrorCode.PROTOCOL, ErrorCode.UNEXPECTED):
                message = f"no agent card: {error.message}"
            else:
                raise
            raise PeerError(ErrorCode.INVALID_CARD, message, http_status=status) from error
    raise AssertionError("a card has at least one place")
