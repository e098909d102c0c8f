"""The operations of A2A, the same for all bindings and versions.

A binding reads the params of a request, runs the operation that ``HANDLERS`` names, and encodes
the result: an object of 1.0, or a ``TaskStream``. Where the versions differ in meaning, and not
only in spelling, the difference is handled here.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from opencode_a2a.a2a import operations as a2a
from opencode_a2a.a2a import render
from opencode_a2a.a2a.encoding import Encoding
from opencode_a2a.a2a.texts import interrupt_text
from opencode_a2a.a2a.types import (
    NoParams,
    PushListParams,
    PushRef,
    PushRequest,
    SendRequest,
    TaskParams,
    Version,
)
from opencode_a2a.errors import (
    InvalidParamsError,
    PushNotSupportedError,
    UnsupportedOperationError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import Caller, Principal
from opencode_a2a.log.log import LogForgottenError, LogReader
from opencode_a2a.log.state import Cursor, Entry, Query, State
from opencode_a2a.messages import NO_ROUTING, MessageIds, PushConfig, TurnRequest
from opencode_a2a.net.egress import Fetch, lookups_of
from opencode_a2a.push.sender import WebhookSender
from opencode_a2a.server.card import Cards
from opencode_a2a.server.content import read_metadata, read_output_modes, read_prompt
from opencode_a2a.tasks.command import AnswerExpectedError, SendCommand
from opencode_a2a.tasks.sending import Submitted
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.telemetry import AUDIT, current_trace

LISTS_AUDITED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class OperationCall:
    """The facts of a request that an operation needs besides the params, in every binding."""

    caller: Caller
    version: Version
    cursor: str | None = None
    """The id of the last event that the reader has received."""
    hops: int = 0
    """The number of agents that the request went through, as the last of them states it."""
    context_id: str | None = None
    """The context of a message that names neither a context nor a task."""


Events = list[tuple[bytes, bytes]]
"""Encoded events of a stream: the cursor of each, and its body."""
WriteEvents = Callable[[Events], bool]
"""Writes events to a client at once; False if the client cannot take them now."""


@dataclass(slots=True)
class TaskStream:
    """The result of an operation that streams: the current task, then the entries that follow.

    Every binding writes what ``next`` returns, until that is nothing. The task has to be rendered
    right after the reader was made, before anything is awaited: entries that are appended later are
    read by the reader.
    """

    reader: LogReader
    task: tuple[bytes, JsonObject] | None
    """The cursor of the current task and the task; None if the reader has it already."""
    follow: bool = True
    """Whether entries may follow the task."""

    async def next(self, encoding: Encoding, write: WriteEvents | None = None) -> Events:
        """Return the next events; none when there are no more.

        While it waits, events go to ``write`` as they come, as in ``LogReader.next``; those that it
        cannot take are returned. Raise the ServiceError by which the stream ends too early.
        """
        if self.task is not None:
            # A task is large, and the wait for what follows may be long: it is not kept.
            (cursor, task), self.task = self.task, None
            return [(cursor, encoding.encode(task))]
        log = self.reader.log

        def write_entries(entries: list[Entry]) -> bool:
            events = encoding.events(entries, log)
            return not events or (write is not None and write(events))

        try:
            waiting = None if write is None else write_entries
            while self.follow and (entries := await self.reader.next(waiting)):
                if events := encoding.events(entries, log):
                    return events
                del entries
        except LogForgottenError:
            self.follow = False
            cursor, task = render.task_event(log.state)
            return [(cursor, encoding.encode(task))]
        return []


class Operations:
    def __init__(
        self,
        tasks: TaskService,
        cards: Cards,
        fetch: Fetch,
        webhooks: Webhooks,
        sender: WebhookSender,
        new_message_id: MessageIds,
    ) -> None:
        self._tasks = tasks
        self._webhooks = webhooks
        self._sender = sender
        self._cards = cards
        self._fetch = fetch
        self._new_message_id = new_message_id
        self._listed: dict[Principal, float] = {}
        """The monotonic time after which a list of a supervisor is audited again."""

    async def send(self, call: OperationCall, request: SendRequest) -> JsonObject:
        """Send a message and return the task: when it stops, or at once if the caller says so."""
        submitted = await self._submit(call, request)
        if request.blocking:
            state = await submitted.log.until_stopped(submitted.seq)
        else:
            state = await submitted.log.firm_state()
        submitted.log.note_seen(state.status)
        return {"task": render.task(state, request.history_length)}

    async def begin(self, call: OperationCall, request: SendRequest) -> JsonObject:
        """Send a message for a caller that wants no answer."""
        await self._submit(call, request)
        return {}

    async def stream(self, call: OperationCall, request: SendRequest) -> TaskStream:
        """Send a message and follow the task until it stops."""
        submitted = await self._submit(call, request)
        await submitted.log.firm_state()
        reader = LogReader(submitted.log, until_asked=True)
        task = render.task_event(reader.state, request.history_length)
        return TaskStream(reader, task, follow=not submitted.log.stopped(submitted.seq))

    async def _submit(self, call: OperationCall, request: SendRequest) -> Submitted:
        push, principal = request.push, call.caller.principal
        if push is not None:
            await self._check_push(push, principal)
        message = request.message
        routing, delivery, sign_in, rights = NO_ROUTING, None, None, call.caller.rights
        if request.metadata or message.metadata:
            routing, delivery, sign_in = read_metadata(request.metadata, message.metadata)
            rights &= routing.rights
            if sign_in is not None and request.task_id is None:
                text = "needs the id of the task that waits for it, as taskId"
                raise InvalidParamsError.of("metadata.opencode.sign_in", text)
        if routing.hops != call.hops:
            routing = replace(routing, hops=call.hops)
        default = call.context_id if request.task_id is None else None
        modes, trace = request.accepted_output_modes, current_trace.get()
        command = SendCommand(
            principal=principal,
            message=message,
            request=TurnRequest(
                await read_prompt(message, self._fetch, principal),
                self._new_message_id(),
                routing,
                rights=rights,
                delivery=delivery,
            ),
            task_id=request.task_id,
            context_id=request.context_id or default,
            output_modes=read_output_modes(modes) if modes else None,
            push=push,
            budget=call.caller.budget,
            trace=trace and trace.stored,
            sign_in=sign_in,
        )
        try:
            submitted = await self._tasks.sending.submit(command)
        except AnswerExpectedError as error:
            raise await self._unanswered(principal, error) from None
        if push is not None and submitted.repeat:
            # A repeat may bring another webhook; one that was stored before keeps its place.
            await self._tasks.put_webhook(principal, submitted.log.ref.id, push, anew=False)
        return submitted

    async def _unanswered(
        self, principal: Principal, error: AnswerExpectedError
    ) -> UnsupportedOperationError:
        """Return the error that says which task waits, and for what.

        The text says it all, since most clients show nothing else of an error.
        """
        states = [(await self._tasks.log(principal, task_id)).state for task_id in error.task_ids]
        waiting = [state for state in states if state.status.state is State.INPUT_REQUIRED]
        instead = "or set metadata.opencode.new_task to true, without taskId, for a new task"
        if not waiting:  # the tasks have been answered meanwhile
            return UnsupportedOperationError(error.message)
        if len(waiting) > 1:
            ids = [state.ref.id for state in waiting]
            return UnsupportedOperationError(
                f"{error} Name one with taskId ({', '.join(ids)}), {instead}", task_ids=[*ids]
            )
        (state,) = waiting
        question = interrupt_text(state.status.pending)
        return UnsupportedOperationError(
            f"This message was not taken as the answer that task {state.ref.id} waits for. {error} "
            f"Answer the task first, {instead}.\n\n{question}",
            task_id=state.ref.id,
            question=question,
        )

    async def get(self, call: OperationCall, params: TaskParams) -> JsonObject:
        whose = await self._whose(call, params.task_id, "GetTask")
        supervised = whose != call.caller.principal
        state = await self._tasks.task(whose, params.task_id, supervised=supervised)
        return render.task(state, params.history_length, reader=call.caller.principal)

    async def _whose(self, call: OperationCall, task_id: str, operation: str) -> Principal:
        """Return the owner of a task for a supervisor, and audit that; else the caller."""
        own = call.caller.principal
        if not call.caller.supervises:
            return own
        owner = await self._tasks.principal_of(task_id)
        if owner is None or owner == own:
            return own
        AUDIT.info("task supervised", by=own, principal=owner, operation=operation, task_id=task_id)
        return owner

    async def list_tasks(self, call: OperationCall, query: Query) -> JsonObject:
        principal, caller = call.caller.principal, call.caller
        if caller.supervises and time.monotonic() >= self._listed.get(principal, 0.0):
            # A console lists every two seconds: one audit record a minute is enough.
            self._listed[principal] = time.monotonic() + LISTS_AUDITED_SECONDS
            AUDIT.info("tasks supervised", by=principal, operation="ListTasks")
        page = await self._tasks.page(None if caller.supervises else principal, query)
        tasks: list[Json] = [
            render.task(state, query.history_length, artifacts=query.artifacts, reader=principal)
            for state in page.tasks
        ]
        return {
            "tasks": tasks,
            "nextPageToken": page.next_token,
            "pageSize": page.size,
            "totalSize": page.total,
        }

    async def cancel(self, call: OperationCall, params: TaskParams) -> JsonObject:
        whose = await self._whose(call, params.task_id, "CancelTask")
        state = await self._tasks.cancel(whose, params.task_id)
        return render.task(state, reader=call.caller.principal)

    async def subscribe(self, call: OperationCall, params: TaskParams) -> TaskStream:
        """Follow an existing task, from now on or from the cursor of the call."""
        try:
            cursor = Cursor.parse(call.cursor) if call.cursor else None
        except ValueError:
            raise InvalidParamsError.of(
                "Last-Event-ID",
                "is not the id of an event of this task",
                "Last-Event-ID (or after) is not the id of an event",
            ) from None
        modern = call.version is Version.V1
        whose = await self._whose(call, params.task_id, "SubscribeToTask")
        reader = await self._tasks.follow(
            whose,
            params.task_id,
            cursor,
            until_asked=not modern,
            supervised=whose != call.caller.principal,
        )
        if modern and cursor is None and reader.state.status.state.terminal:
            raise UnsupportedOperationError(
                "The task has ended, there is nothing to subscribe to; get the task instead"
            )
        return TaskStream(reader, render.task_event(reader.state) if reader.resync else None)

    async def create_push(self, call: OperationCall, request: PushRequest) -> JsonObject:
        """Set a webhook, which is sent the changes of a task's state."""
        whose, task_id = call.caller.principal, request.task_id
        await self._check_push(request.config, whose)
        row = await self._tasks.put_webhook(whose, task_id, request.config)
        return render.push_config(task_id, row)

    async def _check_push(self, config: PushConfig, principal: Principal) -> None:
        """Refuse a webhook that may not be called, before anything else is done."""
        self._require_push()
        with lookups_of(principal):
            await self._sender.vet(config)

    def _require_push(self) -> None:
        if not self._webhooks.settings.enabled:
            raise PushNotSupportedError

    async def get_push(self, call: OperationCall, params: PushRef) -> JsonObject:
        self._require_push()
        log = await self._tasks.log(call.caller.principal, params.task_id)
        return render.push_config(log.ref.id, await self._webhooks.find(log, params.config_id))

    async def list_push(self, call: OperationCall, params: PushListParams) -> JsonObject:
        self._require_push()
        log = await self._tasks.log(call.caller.principal, params.task_id)
        found = await self._webhooks.of_task(log)
        configs: list[Json] = [render.push_config(log.ref.id, row) for row in found]
        return {"configs": configs, "nextPageToken": ""}

    async def delete_push(self, call: OperationCall, params: PushRef) -> JsonObject:
        """Delete a webhook; deleting one that does not exist succeeds too."""
        self._require_push()
        log = await self._tasks.log(call.caller.principal, params.task_id)
        if params.config_id is None:
            raise InvalidParamsError.of("pushNotificationConfigId", "is required")
        await self._webhooks.delete(log, params.config_id)
        return {}

    async def extended_card(self, call: OperationCall, params: NoParams) -> JsonObject:
        await self._cards.refresh()
        return self._cards.extended(call.version)


Run = Callable[[Operations, OperationCall, Any], Awaitable[JsonObject | TaskStream]]
"""Runs an operation; the params are of the type in ``Operation.takes``."""

HANDLERS: dict[a2a.Operation, Run] = {
    a2a.SEND_MESSAGE: Operations.send,
    a2a.SEND_STREAMING_MESSAGE: Operations.stream,
    a2a.GET_TASK: Operations.get,
    a2a.LIST_TASKS: Operations.list_tasks,
    a2a.CANCEL_TASK: Operations.cancel,
    a2a.SUBSCRIBE_TO_TASK: Operations.subscribe,
    a2a.CREATE_PUSH_CONFIG: Operations.create_push,
    a2a.GET_PUSH_CONFIG: Operations.get_push,
    a2a.LIST_PUSH_CONFIGS: Operations.list_push,
    a2a.DELETE_PUSH_CONFIG: Operations.delete_push,
    a2a.GET_EXTENDED_CARD: Operations.extended_card,
}
NOTIFIED: dict[a2a.Operation, Run] = HANDLERS | {
    a2a.SEND_MESSAGE: Operations.begin,
    a2a.SEND_STREAMING_MESSAGE: Operations.begin,
    a2a.SUBSCRIBE_TO_TASK: Operations.get,
}
"""The same for JSON-RPC notifications, whose callers want no answer."""
