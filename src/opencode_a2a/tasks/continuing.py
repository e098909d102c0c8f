"""Continuing: what becomes of a message on a task that exists.

``Sending.handle`` has found the task. By the state of that, the message is an answer to what the
task asks, a decision about its plan, another try after a sign-in, or a further prompt.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NoReturn
from weakref import WeakValueDictionary

from sqlalchemy.engine import Connection

from opencode_a2a.cluster.fleet import MovedError
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InterruptChangedError,
    InterruptNotFoundError,
    InvalidParamsError,
    ServiceError,
    UnsupportedOperationError,
)
from opencode_a2a.events import Interrupted
from opencode_a2a.ids import Principal
from opencode_a2a.log.log import TaskLog
from opencode_a2a.log.state import State
from opencode_a2a.log.stored import state_of
from opencode_a2a.messages import NO_ROUTING, Added, PromptPart, Routing, TurnRequest
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.store.webhooks import HookRow, Replaced
from opencode_a2a.tasks.budget import Budgets
from opencode_a2a.tasks.command import (
    FINAL_REFUSALS,
    AnswerExpectedError,
    Handled,
    SendCommand,
    check_attended,
    check_prompt,
    earlier_task,
    message_write,
)
from opencode_a2a.tasks.open import ENDED, WORKING, OpenTask, OpenTasks
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.turns.answers import (
    Answer,
    ContradictionError,
    Meaning,
    NotUnderstoodError,
    OutdatedAnswerError,
    PlanDecision,
    only_an_answer,
    understand,
    understand_plan_answer,
)
from opencode_a2a.turns.sessions import (
    COMMAND_FIELD,
    DEFAULT_AGENT,
    DIRECTORY_FIELD,
    PLAN_FIELD,
    SESSION_FIELD,
    WORKSPACE_FIELD,
)

SETTLED = "The request was settled before this answer came"
APPROVED = "The plan is approved. Carry it out."
"""The prompt for an approved plan; a remark follows."""
NOT_ALLOWED = (
    "The plan cannot be carried out with this credential and profile, which allow no changes; it "
    "can be changed, or the task be canceled"
)
NOT_AN_ANSWER = "With {}, the message says that it is not an answer."
NEW_TASK_FIELD = "metadata.opencode.new_task"
NOT_NEW = "contradicts taskId; leave one of the two out"
ALREADY_AT_WORK = "comes too late for a task that works; send the message without taskId"
SEEN_SECONDS = 0.5
"""How long to wait for the notification that another replica has shown a request of the task."""


class Continuing:
    """Handles messages on the open tasks of this replica."""

    def __init__(
        self, database: Database, webhooks: Webhooks, open_tasks: OpenTasks, budgets: Budgets
    ) -> None:
        self._database = database
        self._webhooks = webhooks
        self._open = open_tasks
        self._budgets = budgets
        self.message_locks: WeakValueDictionary[tuple[Principal, str], asyncio.Lock] = (
            WeakValueDictionary()
        )
        """Held while a message on a task, or the reply to an interrupt, is handled: a copy of it
        waits, and is then known as a copy. Only of this replica: across replicas the id of the
        message, which is stored, makes one of two. A lock exists while somebody refers to it."""

    async def handle(self, command: SendCommand, task_id: str) -> Handled:
        """Handle a message that is for a task; raise MovedError if that does not run here."""
        copies, came = (command.principal, command.message.message_id), time.monotonic()
        async with self.message_locks.setdefault(copies, asyncio.Lock()):
            earlier = await earlier_task(self._database, command, task_id)
            row = earlier or await self._open.row(command.principal, task_id)
            task = self._open.get(row.id)
            if task is None and not state_of(row).terminal:
                raise MovedError(row.upstream)
            if earlier is not None:
                return await self._repeat(command, earlier, task)
            if task is None:
                raise UnsupportedOperationError(ENDED)
            await task.member.turns.check_reachable()
            # Before the state is read: it may change while this waits.
            last_seen = await self._last_seen(command, task.log, came)
            return await self._continue(command, task, last_seen)

    async def _repeat(self, command: SendCommand, row: TaskRow, task: OpenTask | None) -> Handled:
        """Return what a message led to that was here before, once that is done."""
        if task is not None and task.interrupts is not None:
            await task.interrupts.repeat(command.message)
        log = await self._open.log_of(row)
        if command.message not in log.state.history:
            raise InterruptNotFoundError(SETTLED)
        return Handled(log.ref.id, 0, repeat=True)

    async def _last_seen(self, command: SendCommand, log: TaskLog, came: float) -> int:
        """Return the highest request that was shown to readers in time for a plain answer.

        Wait a moment if nobody was shown the latest request of the task, here or at the sender: the
        notification that another replica has shown it may be on its way. The state of the log is
        firm then, until the next await.
        """
        at_sender, by_context = command.seen_at_sender.get(log.ref.id, 0), command.task_id is None
        if by_context:
            # Noted as seen here, so that the rule for late answers applies to it: only this replica
            # knows whether the answer may be late for another request of the context.
            log.note_seen_number(at_sender)
            at_sender = 0
        newest = max((one.number or 0 for one in log.state.status.pending), default=0)
        until = time.monotonic() + SEEN_SECONDS
        while max(log.seen.newest, at_sender) < newest:
            if not self._database.census.has_others or time.monotonic() > until:
                break
            await asyncio.sleep(SEEN_SECONDS / 20)
        await log.firm_state()
        return max(log.seen.newest_in_time(came, by_context=by_context), at_sender)

    async def _continue(self, command: SendCommand, task: OpenTask, last_seen: int) -> Handled:
        """Take a message as what the state of its task calls for."""
        status = task.log.state.status
        if command.sign_in is not None and status.sign_in != command.sign_in:
            refusal = InterruptNotFoundError(SETTLED)
            await self._database.write(message_write(command, task.log, refusal=refusal))
            raise refusal
        match status.state:
            case State.INPUT_REQUIRED:
                return await self._take_as_answer(command, task, last_seen)
            case _ if command.request.routing.new_task:
                raise InvalidParamsError.of(NEW_TASK_FIELD, NOT_NEW)
            case State.AUTH_REQUIRED:
                return await self._try_again(command, task)
            case _:
                return await self._add(command, task)

    async def _take_as_answer(
        self, command: SendCommand, task: OpenTask, last_seen: int
    ) -> Handled:
        """Take a message as the answer to what a task asks: its interrupts, or its plan."""
        log, status, request = task.log, task.log.state.status, command.request
        # What is declared to be work for the agent is no consent, whatever its words are. It stays
        # unrecorded: later, when the task works or without the task, it may well be taken.
        declared = {
            "metadata.shared.delivery": request.delivery is not None,
            NEW_TASK_FIELD: request.routing.new_task,
            COMMAND_FIELD: request.routing.command is not None,
        }
        if named := [name for name, is_set in declared.items() if is_set]:
            log.note_seen(status)  # the refusal shows it
            text = NOT_AN_ANSWER.format(" and ".join(named))
            raise AnswerExpectedError(text, task_ids=[log.ref.id])
        try:
            if (plan := status.plan) is not None:
                decision = understand_plan_answer(command.message, plan, last_seen)
                return await self._act_on_plan(command, task, plan, decision)
            meaning = understand(command.message, status.pending, last_seen)
        except NotUnderstoodError as error:
            await self._refuse_unclear(command, log, error)
        return await self._answer_interrupts(command, task, meaning)

    async def _refuse_unclear(
        self, command: SendCommand, log: TaskLog, error: NotUnderstoodError
    ) -> NoReturn:
        """Refuse a message that does not clearly answer what its task asks."""
        log.note_seen(log.state.status)  # the refusal shows it
        outdated, text = isinstance(error, OutdatedAnswerError), str(error)
        refusal: ServiceError = AnswerExpectedError(text, task_ids=[log.ref.id])
        meant_as_answer = outdated or isinstance(error, ContradictionError)
        if command.task_id is not None and not meant_as_answer:
            refusal = InvalidParamsError.of("message.parts", text, text)
        # Sent again, it must not answer a request that comes later. A message that names no task,
        # and could be something else than an answer, may yet start one.
        if command.task_id is not None or meant_as_answer or only_an_answer(command.message):
            await self._database.write(message_write(command, log, refusal=refusal))
        raise refusal from None

    async def _answer_interrupts(
        self, command: SendCommand, task: OpenTask, meaning: Meaning
    ) -> Handled:
        """Answer the permissions or the question that a message is for."""
        log, seq = task.log, task.log.state.seq
        answer = Answer(meaning.reply, command.principal, command.message, command.request.rights)
        requests = [asked.request_id for asked in meaning.asked]
        try:
            async with self._recording(command, task) as in_same_commit:
                if task.interrupts is None:
                    raise InterruptNotFoundError(request_id=requests[0])
                await task.interrupts.answer(requests, answer, in_same_commit)
        except InterruptChangedError as changed:
            await self._refuse_unclear(command, log, OutdatedAnswerError(changed.message))
        except ServiceError as refused:
            if isinstance(refused, FINAL_REFUSALS):
                await self._database.write(message_write(command, log, refusal=refused))
            raise
        return Handled(log.ref.id, seq)

    async def _act_on_plan(
        self, command: SendCommand, task: OpenTask, plan: Interrupted, decision: PlanDecision
    ) -> Handled:
        """Cancel a task, have its plan carried out, or have the plan changed."""
        routing, planned = command.request.routing, task.routing
        if decision.wanted == "cancel":
            seq = task.log.state.seq
            async with self._recording(command, task) as in_same_commit:
                await task.cancel_plan(command.message, in_same_commit, plan)
            return Handled(task.log.ref.id, seq)
        self._check_place(routing, task)
        go, following = decision.wanted == "go", _next_routing(routing, planned)
        agent = following.agent
        if routing.agent is not None:
            named = replace(planned, session_id=None, agent=routing.agent)
            await task.member.turns.sessions.check(command.principal, named)
        if go and agent is None:
            # OpenCode would go on with the agent that planned.
            agent = task.member.turns.settings.opencode.agent or DEFAULT_AGENT
        request = replace(
            command.request,
            routing=replace(following, agent=agent, command=None, plan=not go),
            # A profile that was named for the plan also limits the turn that carries it out.
            rights=command.request.rights & planned.rights,
            delivery=None,
        )
        if go:
            if (request.rights & task.member.turns.rights).changes == "deny":
                raise AuthorizationForbiddenError(NOT_ALLOWED)
            text = "\n\n".join(filter(None, (APPROVED, decision.remark)))
            request = replace(request, prompt=(PromptPart(text=text),))
        check_attended(request)
        return await self._resume(command, task, request, plan)

    async def _try_again(self, command: SendCommand, task: OpenTask) -> Handled:
        """Run another turn of a task that waits for a sign-in."""
        named = command.request.routing
        self._check_place(named, task)
        # Work that was to be planned first is still planned first, and another try gives nobody
        # more rights.
        routing = replace(_next_routing(named, task.routing), plan=named.plan or task.routing.plan)
        rights = command.request.rights & task.rights
        request = replace(command.request, routing=routing, rights=rights)
        if routing != NO_ROUTING:
            await check_prompt(command.principal, request, task.member.turns)
        return await self._resume(command, task, request, None)

    async def _resume(
        self,
        command: SendCommand,
        task: OpenTask,
        request: TurnRequest,
        plan: Interrupted | None,
    ) -> Handled:
        """Begin the next turn of a task, if the caller's budget allows one more."""
        await self._budgets.check(command.principal, command.budget, begins_turn=True)
        seq = task.log.state.seq
        async with self._recording(command, task, request) as in_same_commit:
            await task.begin_next_turn(command.message, request, in_same_commit, plan)
        return Handled(task.log.ref.id, seq)

    async def _add(self, command: SendCommand, task: OpenTask) -> Handled:
        """Hand a message to the turn that runs."""
        state, routing = task.log.state.status.state, command.request.routing
        late = command.request.delivery is None and only_an_answer(command.message)
        if command.task_id is None or late or state.terminal:
            refusal = UnsupportedOperationError(ENDED if state.terminal else WORKING)
            if late:  # sent again, it must not answer the next request
                await self._database.write(message_write(command, task.log, refusal=refusal))
            raise refusal
        self._check_place(routing, task)
        if routing.plan and not task.routing.plan:
            raise InvalidParamsError.of(PLAN_FIELD, ALREADY_AT_WORK)
        if routing.command is not None:
            raise InvalidParamsError.of(COMMAND_FIELD, ALREADY_AT_WORK)
        await self._budgets.check(command.principal, command.budget, begins_turn=False)
        added = Added(command.message, command.request)
        seq = task.log.state.seq
        async with self._recording(command, task) as in_same_commit:
            await task.add(added, in_same_commit)
        return Handled(task.log.ref.id, seq)

    @asynccontextmanager
    async def _recording(
        self, command: SendCommand, task: OpenTask, request: TurnRequest | None = None
    ) -> AsyncGenerator[Write]:
        """Yield the write that records a message, for the transaction in which a task accepts it.

        That also stores the webhook that the message brings: a message whose webhook cannot be
        stored is not accepted. ``request`` is that of the turn that the message begins.
        """
        log, push = task.log, command.push
        record_message = message_write(command, log, request)
        if push is None:
            yield record_message
            return
        await self._webhooks.check_limits(log, push)
        store_webhook = self._webhooks.write_with_message(log, push)
        stored: list[tuple[HookRow, Replaced | None] | None] = []

        def in_same_commit(connection: Connection) -> None:
            record_message(connection)
            stored[:] = [store_webhook(connection)]  # again, if the first transaction fails

        try:
            yield in_same_commit
        finally:  # it is stored, too, with an answer that OpenCode does not take now
            for webhook, replaced in filter(None, stored):
                await self._webhooks.note_if_stored(webhook, replaced, log)

    def _check_place(self, routing: Routing, task: OpenTask) -> None:
        """Refuse a message that names another place than its task runs in."""
        field, named = None, routing.workspace_id or routing.directory
        if routing.session_id not in (None, task.log.state.status.session_id):
            field = SESSION_FIELD
        elif named and not task.member.turns.sessions.same_place(routing, task.routing):
            field = WORKSPACE_FIELD if routing.workspace_id else DIRECTORY_FIELD
        if field is not None:
            raise InvalidParamsError.of(field, "is not where this task runs; leave it out")


def _next_routing(named: Routing, earlier: Routing) -> Routing:
    """Return where the next turn of a task runs: as the one before it, unless the message says."""
    return replace(
        earlier,
        model=named.model or earlier.model,
        agent=named.agent or earlier.agent,
        command=named.command,
        rights=named.rights & earlier.rights,
        output_schema=named.output_schema or earlier.output_schema,
        hops=named.hops,
    )
