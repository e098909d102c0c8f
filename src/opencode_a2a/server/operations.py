"""What the service does for each operation of A2A, the same for all bindings.

A binding reads the params of a request, runs the operation, and encodes what comes back: an
object of 1.0, or a ``TaskStream``. What the versions mean differently, beyond how they write it,
is decided here.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from opencode_a2a.a2a import operations as a2a
from opencode_a2a.a2a import render
from opencode_a2a.a2a.texts import interrupt_text
from opencode_a2a.a2a.types import NoParams, SendRequest, TaskParams, Version
from opencode_a2a.errors import (
    InvalidParamsError,
    PushNotSupportedError,
    UnsupportedOperationError,
    Violation,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import Caller
from opencode_a2a.peers.network import Fetch
from opencode_a2a.server.card import Cards
from opencode_a2a.server.content import read_output_modes, read_prompt, read_routing
from opencode_a2a.tasks.log import LogReader
from opencode_a2a.tasks.service import AnswerExpectedError, SendCommand, Submitted, TaskService
from opencode_a2a.tasks.state import Cursor, Query


@dataclass(frozen=True, slots=True)
class OperationCall:
    """A request for an operation, whichever binding it came by."""

    caller: Caller
    version: Version
    cursor: str | None = None
    """The last event that a reader has, as it was given to it."""
    hops: int = 0
    """How many agents the request went through, as the last of them says."""


class TaskStream:
    """The answer of an operation that streams: the task as it is, then the entries that follow."""

    def __init__(
        self, reader: LogReader, *, history_length: int | None = None, follow: bool = True
    ) -> None:
        self.reader = reader
        self.follow = follow
        # Rendered now, before the next await: what is appended later follows as entries.
        self.task = render.snapshot(reader.state, history_length) if reader.resync else None


class Operations:
    def __init__(self, tasks: TaskService, cards: Cards, fetch: Fetch) -> None:
        self._tasks = tasks
        self._cards = cards
        self._fetch = fetch

    async def send(self, call: OperationCall, request: SendRequest) -> JsonObject:
        """Send a message; unless the caller wants otherwise, wait until the task stops."""
        submitted = await self._submit(call, request)
        if request.blocking:
            state = await submitted.log.settled(submitted.seq)
        else:
            state = await submitted.log.steady()
        return {"task": render.task(state, request.history_length)}

    async def begin(self, call: OperationCall, request: SendRequest) -> JsonObject:
        """Send a message without waiting for anything: nobody reads the answer."""
        await self._submit(call, request)
        return {}

    async def stream(self, call: OperationCall, request: SendRequest) -> TaskStream:
        """Send a message and follow the task until it stops."""
        submitted = await self._submit(call, request)
        await submitted.log.steady()
        return TaskStream(
            LogReader(submitted.log, until_asked=True),
            history_length=request.history_length,
            follow=not submitted.log.stopped(submitted.seq),
        )

    async def _submit(self, call: OperationCall, request: SendRequest) -> Submitted:
        if request.push:
            raise PushNotSupportedError
        message = request.message
        routing = read_routing(request.metadata, message.metadata)
        command = SendCommand(
            principal=call.caller.principal,
            message=message,
            prompt=await read_prompt(message, self._fetch),
            task_id=request.task_id,
            context_id=request.context_id,
            routing=replace(routing, hops=call.hops),
            output_modes=read_output_modes(request.accepted_output_modes),
        )
        try:
            return await self._tasks.submit(command)
        except AnswerExpectedError as error:
            raise _unanswered(error) from None

    async def get(self, call: OperationCall, params: TaskParams) -> JsonObject:
        state = await self._tasks.task(call.caller.principal, params.task_id)
        return render.task(state, params.history_length)

    async def list_tasks(self, call: OperationCall, query: Query) -> JsonObject:
        page = await self._tasks.page(call.caller.principal, query)
        tasks: list[Json] = [
            render.task(state, query.history_length, artifacts=query.artifacts)
            for state in page.tasks
        ]
        return {
            "tasks": tasks,
            "nextPageToken": page.next_token,
            "pageSize": page.size,
            "totalSize": page.total,
        }

    async def cancel(self, call: OperationCall, params: TaskParams) -> JsonObject:
        return render.task(await self._tasks.cancel(call.caller.principal, params.task_id))

    async def subscribe(self, call: OperationCall, params: TaskParams) -> TaskStream:
        """Follow a task that exists, from now or from where a reader was."""
        try:
            cursor = Cursor.parse(call.cursor) if call.cursor else None
        except ValueError:
            wrong = Violation("Last-Event-ID", "is not the id of an event of this task")
            raise InvalidParamsError(
                "Last-Event-ID (or after) is not the id of an event", violations=(wrong,)
            ) from None
        modern = call.version is Version.V1
        reader = await self._tasks.follow(
            call.caller.principal, params.task_id, cursor, until_asked=not modern
        )
        if modern and cursor is None and reader.state.status.state.terminal:
            raise UnsupportedOperationError(
                "The task has ended, there is nothing to subscribe to; get the task instead"
            )
        return TaskStream(reader)

    async def push(self, call: OperationCall, params: NoParams) -> JsonObject:
        raise PushNotSupportedError

    async def extended_card(self, call: OperationCall, params: NoParams) -> JsonObject:
        return self._cards.extended(call.version)


def _unanswered(error: AnswerExpectedError) -> UnsupportedOperationError:
    """Say which task waits, and for what. Clients show the text of an error, if anything of it."""
    instead = "or set metadata.opencode.new_task to true for a new task"
    if len(error.waiting) > 1:
        ids = [state.ref.id for state in error.waiting]
        return UnsupportedOperationError(
            f"{error} Name one with taskId, {instead}: {', '.join(ids)}", task_ids=[*ids]
        )
    (state,) = error.waiting
    question = interrupt_text(state.status.pending)
    return UnsupportedOperationError(
        f"Task {state.ref.id} waits for an answer, and this message is not one. {error} "
        f"Answer it first, {instead}.\n\n{question}",
        task_id=state.ref.id,
        question=question,
    )


Run = Callable[[Operations, OperationCall, Any], Awaitable[JsonObject | TaskStream]]
"""What runs; the params are what the operation takes."""

HANDLERS: dict[a2a.Operation, Run] = {
    a2a.SEND_MESSAGE: Operations.send,
    a2a.SEND_STREAMING_MESSAGE: Operations.stream,
    a2a.GET_TASK: Operations.get,
    a2a.LIST_TASKS: Operations.list_tasks,
    a2a.CANCEL_TASK: Operations.cancel,
    a2a.SUBSCRIBE_TO_TASK: Operations.subscribe,
    **dict.fromkeys(a2a.PUSH_OPERATIONS, Operations.push),
    a2a.GET_EXTENDED_CARD: Operations.extended_card,
}
NOTIFIED: dict[a2a.Operation, Run] = HANDLERS | {
    a2a.SEND_MESSAGE: Operations.begin,
    a2a.SEND_STREAMING_MESSAGE: Operations.begin,
    a2a.SUBSCRIBE_TO_TASK: Operations.get,
}
"""What is done for a caller that wants no answer."""
