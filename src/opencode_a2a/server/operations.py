"""The operations of A2A on top of the board, the same for both bindings.

``rpc`` and ``rest`` make a ``Call`` of a request and frame what comes back: a JSON value, or a
``Feed`` of encoded events. What the lines differ in beyond spelling is decided here.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import orjson

from opencode_a2a.a2a import render
from opencode_a2a.a2a.schema import Listing, Send, read_get, read_list, read_send
from opencode_a2a.a2a.versions import Dialect, Version
from opencode_a2a.callers import Caller
from opencode_a2a.errors import (
    InvalidListingError,
    InvalidParamsError,
    PushNotSupportedError,
    UnsupportedOperationError,
    Violation,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.peers.network import Fetch
from opencode_a2a.server.card import Cards
from opencode_a2a.server.content import read_output_modes, read_prompt, read_routing
from opencode_a2a.tasks.log import LogForgottenError, LogReader
from opencode_a2a.tasks.service import SendCommand, Submitted, TaskService
from opencode_a2a.tasks.state import Cursor, Entry, TaskState


@dataclass(frozen=True, slots=True)
class Call:
    """A request for an operation, whichever binding it came by."""

    caller: Caller
    dialect: Dialect
    params: JsonObject
    cursor: str | None = None
    """The last event that a reader has, as it was told to it."""
    hops: int = 0
    """How many agents the request went through, as the last of them says."""


Event = tuple[bytes, bytes]
"""A cursor and an encoded object."""
Write = Callable[[list[Event]], bool]
"""Writes events at once; False when the reader cannot take them now."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The answer of an operation that streams."""

    batches: Callable[[Write], AsyncGenerator[list[Event], None]]
    """The events; growing text may take the short way instead, in order with the others."""


class Operations:
    def __init__(self, board: TaskService, cards: Cards, fetch: Fetch) -> None:
        self._board = board
        self._cards = cards
        self._fetch = fetch

    async def send(self, call: Call) -> Json:
        """Send a message; unless told otherwise, wait until the task stops."""
        send = read_send(call.params, call.dialect)
        submitted = await self._submit(call, send)
        if send.blocking:
            state = await submitted.log.settled(submitted.seq)
        else:
            state = await submitted.log.steady()
        return _result(state, call.dialect, send.history_length)

    async def begin(self, call: Call) -> None:
        """Send a message without waiting for anything: nobody reads the answer."""
        await self._submit(call, read_send(call.params, call.dialect))

    async def stream(self, call: Call) -> Feed:
        """Send a message and follow the task until it stops."""
        send = read_send(call.params, call.dialect)
        submitted = await self._submit(call, send)
        await submitted.log.steady()
        reader = submitted.log.reader(until_asked=True)
        # Encoded now, in the same turn of the loop: later entries are the reader's.
        first = [_snapshot(reader.state, call.dialect, send.history_length)]
        if submitted.log.stopped(submitted.seq):
            return Feed(_Following(None, call.dialect, first).batches)
        return Feed(_Following(reader, call.dialect, first).batches)

    async def _submit(self, call: Call, send: Send) -> Submitted:
        if send.push:
            raise PushNotSupportedError
        order = SendCommand(
            principal=call.caller.principal,
            message=send.message,
            prompt=await read_prompt(send.message, self._fetch),
            task_id=send.task_id,
            context_id=send.context_id,
            routing=replace(read_routing(send.metadata, send.message.metadata), hops=call.hops),
            output_modes=read_output_modes(send.accepted_output_modes),
        )
        return await self._board.submit(order)

    async def get(self, call: Call) -> Json:
        wanted = read_get(call.params)
        state = await self._board.task(call.caller.principal, wanted.task_id)
        return render.task(state, call.dialect, wanted.history_length)

    async def list_tasks(self, call: Call) -> Json:
        try:
            listing = read_list(call.params, call.dialect)
            return await self._page(call, listing)
        except InvalidParamsError as error:
            if call.dialect is Dialect.V1:
                raise
            raise InvalidListingError(error.message, violations=error.violations) from None

    async def _page(self, call: Call, listing: Listing) -> Json:
        query = listing.query
        page = await self._board.page(call.caller.principal, query)
        tasks: list[Json] = [
            render.task(state, call.dialect, listing.history_length, artifacts=query.artifacts)
            for state in page.tasks
        ]
        return {
            "tasks": tasks,
            "nextPageToken": page.next_token,
            "pageSize": page.size,
            "totalSize": page.total,
        }

    async def cancel(self, call: Call) -> Json:
        wanted = read_get(call.params)
        state = await self._board.cancel(call.caller.principal, wanted.task_id)
        return render.task(state, call.dialect)

    async def subscribe(self, call: Call) -> Feed:
        """Follow a task that exists, from now or from where a reader was."""
        wanted = read_get(call.params)
        cursor = _read_cursor(call.cursor)
        modern = call.dialect is Dialect.V1
        reader = await self._board.follow(
            call.caller.principal, wanted.task_id, cursor, until_asked=not modern
        )
        if modern and cursor is None and reader.state.status.state.terminal:
            raise UnsupportedOperationError(
                "The task has ended, there is nothing to subscribe to; get the task instead"
            )
        first = [_snapshot(reader.state, call.dialect)] if reader.resync else []
        return Feed(_Following(reader, call.dialect, first).batches)

    async def push(self, call: Call) -> Json:
        raise PushNotSupportedError

    async def extended_card(self, call: Call) -> Json:
        return self._cards.extended(call.dialect)


Run = Callable[[Operations, Call], Awaitable[Json | Feed]]


@dataclass(frozen=True, slots=True)
class Method:
    """An operation by its names in JSON-RPC."""

    v03: str | None
    v1: str
    run: Run
    notified: Run | None = None
    """What is done instead when the caller wants no answer."""

    def name(self, line: Version) -> str | None:
        return self.v1 if line is Version.V1 else self.v03


METHODS = (
    Method("message/send", "SendMessage", Operations.send, Operations.begin),
    Method("message/stream", "SendStreamingMessage", Operations.stream, Operations.begin),
    Method("tasks/get", "GetTask", Operations.get),
    Method(None, "ListTasks", Operations.list_tasks),
    Method("tasks/cancel", "CancelTask", Operations.cancel),
    Method("tasks/resubscribe", "SubscribeToTask", Operations.subscribe, Operations.get),
    Method("tasks/pushNotificationConfig/set", "CreateTaskPushNotificationConfig", Operations.push),
    Method("tasks/pushNotificationConfig/get", "GetTaskPushNotificationConfig", Operations.push),
    Method("tasks/pushNotificationConfig/list", "ListTaskPushNotificationConfigs", Operations.push),
    Method(
        "tasks/pushNotificationConfig/delete", "DeleteTaskPushNotificationConfig", Operations.push
    ),
    Method("agent/getAuthenticatedExtendedCard", "GetExtendedAgentCard", Operations.extended_card),
)


def _read_cursor(text: str | None) -> Cursor | None:
    if not text:
        return None
    try:
        return Cursor.parse(text)
    except ValueError:
        wrong = Violation("Last-Event-ID", "is not the id of an event of this task")
        raise InvalidParamsError(
            "Last-Event-ID (or after) is not the id of an event", violations=(wrong,)
        ) from None


def _result(state: TaskState, dialect: Dialect, history_length: int | None) -> JsonObject:
    """Return a task as an answer to a message: in 0.3 JSON bare, else by its kind."""
    task = render.task(state, dialect, history_length)
    return task if dialect is Dialect.V03 else {"task": task}


def _snapshot(state: TaskState, dialect: Dialect, history_length: int | None = None) -> Event:
    return render.cursor(state.seq, state), orjson.dumps(_result(state, dialect, history_length))


class _Following:
    """A reader of a task: first what the task is, then what happens to it."""

    def __init__(self, reader: LogReader | None, dialect: Dialect, first: list[Event]) -> None:
        self._reader = reader
        self._dialect = dialect
        self._first = first

    async def batches(self, write: Write) -> AsyncGenerator[list[Event], None]:
        first, self._first = self._first, []  # the task is large, and the stream may be long
        if first:
            yield first
        del first
        reader, dialect = self._reader, self._dialect
        if reader is None:
            return

        def push(entries: list[Entry]) -> bool:
            return write(_encode(reader, entries, dialect))

        try:
            while entries := await reader.next(push):
                events = _encode(reader, entries, dialect)
                del entries  # not to be kept while waiting for the next ones
                if events:
                    yield events
                del events
        except LogForgottenError:
            yield [_snapshot(reader.state, dialect)]


def _encode(reader: LogReader, entries: Sequence[Entry], dialect: Dialect) -> list[Event]:
    """Encode entries, once for all readers that get them at the same time."""
    log, state = reader.log, reader.state
    which = (entries[0].seq, len(entries), dialect) if entries else None
    if log.encoded is not None and log.encoded[0] == which:
        return log.encoded[1]
    events: list[Event] = []
    for entry in entries:
        body = render.entry(entry, state.ref, dialect)
        if body is not None:
            events.append((render.cursor(entry.seq, state), body))
    log.encoded = (which, events) if which and len(log.readers) > 1 else None
    return events
