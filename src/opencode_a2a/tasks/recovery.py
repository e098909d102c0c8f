"""Recover or end the open tasks of a process that is gone; delete old tasks and logs.

``cluster.ownership`` decides which OpenCodes this process runs, and calls ``Recovery`` when it
begins to run one, at the start or when it takes one over from another replica.
``docs/architecture.md`` follows a restart step by step.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog
from sqlalchemy import ColumnElement
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.cluster.fleet import Fleet, Member
from opencode_a2a.errors import (
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamNotFoundError,
)
from opencode_a2a.events import (
    Emitted,
    Failure,
    FailureType,
    Finished,
    Interrupted,
    Outcome,
    Progressed,
    Resumed,
)
from opencode_a2a.ids import MessageId, Owner, SessionId
from opencode_a2a.log.log import LogWriter, TaskLog, status_change
from opencode_a2a.log.state import (
    TERMINAL,
    Accepted,
    LogEvent,
    Recovered,
    TaskState,
    Unknown,
    dump_entries,
    load_request,
)
from opencode_a2a.log.stored import Replay, load_task, ref_of, state_of
from opencode_a2a.messages import NO_ROUTING, Added, Answered
from opencode_a2a.store import callers, interrupts, replicas, webhooks
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, engine_of
from opencode_a2a.store.interrupts import InterruptRow
from opencode_a2a.store.replicas import LastOwner
from opencode_a2a.store.tasks import Segment, StatusChange, TaskRow
from opencode_a2a.tasks.open import CANCELING, UPSTREAM_LOST, OpenTasks
from opencode_a2a.telemetry import ROUTINE
from opencode_a2a.turns.attempt import AGAIN_SECONDS
from opencode_a2a.turns.interrupt_state import unlogged
from opencode_a2a.turns.job import LoggedTurn
from opencode_a2a.turns.sessions import TurnLock
from opencode_a2a.turns.shared_interrupts import SharedInterrupts, audit_void
from opencode_a2a.turns.snapshot import PAGE, is_overtaken, messages_since

logger = structlog.get_logger(__name__)

IsOurs = Callable[[MessageId], bool]
"""Whether a prompt was given to OpenCode by this service."""

RETRY_SECONDS = 0.5
LOG_SECONDS = 3600
"""How long the log of an ended task is kept; its result stays."""
SWEEP_SECONDS = 600
SWEEP_TASKS = 500

RESTARTED = "The service was restarted; the task goes on."
REQUEST_LOST = Failure(
    FailureType.REQUEST_LOST,
    "The service was restarted and no longer knows the request. Send it again.",
)
UNOWNED = "No replica of the service runs the task any more."
STOP_AGAIN_SECONDS = (1.0, 5.0, 30.0)
"""How long to wait after each attempt to stop the turn of a canceled task."""
UNSTOPPED_SECONDS = 86_400
"""After this long, do not abort the turn of a task that was canceled while it had no owner."""
UNKNOWN_AFTER_SECONDS = 2.0
"""When turns without a task are looked for: the tasks that are recovered come first."""
UNKNOWN_SECONDS = 60.0
"""How long the search for turns without a task may take."""
UNSTOPPED = Finished(
    Outcome.CANCELED,
    failure=Failure(
        FailureType.UPSTREAM_ABORT_UNCONFIRMED,
        "The task is canceled, but no replica of the service runs its OpenCode at the moment, so "
        "that could not be told to stop. It may still be working on the task.",
    ),
)
"""The end of a task that is canceled while it has no owner."""


class Recovery:
    """Continues or ends what runs in an OpenCode when that gets another owner."""

    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        fleet: Fleet,
        tasks: OpenTasks,
        is_ours: IsOurs,
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._tasks = tasks
        self._is_ours = is_ours
        self._storing: asyncio.Future[bool] | None = None
        """Done when what the logs of the tasks lacked that were recovered last is stored."""

    async def recover(self, taken: Mapping[str, LastOwner], members: Collection[Member]) -> int:
        """Continue tasks and errands that the last owners have left; return how many tasks.

        Until the database has all of it: nothing runs in these OpenCodes before, and a task that
        an attempt has recovered is not recovered again by the next.
        """
        # A single process also ends the tasks of OpenCodes that are no longer in its settings.
        all_tasks = self._database.replica is None
        while True:
            try:
                tasks = await self._recover_tasks(taken, all_tasks=all_tasks)
                # For 2.0, until 3.0, which does not note what is due.
                await self._database.write(
                    webhooks.forget_last_changes, None if all_tasks else taken
                )
                self._database.dispatch("w")
                await self._fleet.recover_errands(members)
                await self._writer.commit()
                return tasks
            except StoreUnavailableError:  # what was recovered before that is not recovered again
                await asyncio.sleep(RETRY_SECONDS)

    async def _recover_tasks(self, taken: Mapping[str, LastOwner], *, all_tasks: bool) -> int:
        """Recover the tasks that were open when the process that ran them ended; return how many.

        They are the tasks of the OpenCodes that this process has ``taken``. A single process
        recovers ``all_tasks``, and so ends those whose OpenCode is no longer in its settings.
        """
        database, writer, tasks, fleet = self._database, self._writer, self._tasks, self._fleet
        rows = await database.read_much(task_rows.load_open, None if all_tasks else taken)
        running = {task.log.no for task in tasks.all()}
        for row in rows:
            if row.no in running:  # recovered by an earlier try, which the database cut short
                continue
            member = fleet.members.get(row.upstream)
            try:
                # The table of interrupts is the same for all members.
                state, unlogged_events, logged_turn = await _read_logged_turn(
                    database, row, fleet.first.turns.interrupts
                )
                request = load_request(row.request) if row.request is not None else None
            except StoreUnavailableError:
                raise
            except Exception:  # one task that cannot be read must not end the service
                logger.exception("task could not be read", task_id=row.id)
                log = TaskLog(row.no, await _after_unreadable(database, row), writer, database)
                task = tasks.add(log, member or fleet.first)
                await task.log.append([Recovered(RESTARTED)])
                await task.end(Finished(Outcome.FAILED, failure=REQUEST_LOST))
                continue
            log = TaskLog(row.no, state, writer, database)
            log.seen.recover()
            # A task whose OpenCode is not in the settings is counted with the first until it is
            # ended.
            task = tasks.add(log, member or fleet.first)
            # Unless they were handed over, entries that were shown may be lost, and their numbers
            # are given to others: a reader that has such a number is given the task again.
            handed_over = taken.get(row.upstream) is LastOwner.HANDED_OVER
            new_epoch = [] if handed_over else [Recovered(RESTARTED)]

            # A restart: its OpenCode is no longer in the settings. A take-over: no replica lists
            # it.
            if member is None:
                await task.log.append(new_epoch)
                await task.end(Finished(Outcome.FAILED, failure=UPSTREAM_LOST))
                continue

            # It waits for a sign-in or for the approval of a plan: no turn was running.
            if state.status.between_turns:
                if request is not None:
                    task.routing, task.rights = request.routing, request.rights
                task.wait_for_message()
                continue

            # The turns of a session queue up in the order of the rows, oldest first. One that lacks
            # nothing must not begin before an earlier one that waits for its entries.
            missing = [*new_epoch, *unlogged_events]
            storing = asyncio.ensure_future(_append_after(self._storing, task.log, missing))
            self._storing = storing
            if request is None:
                await storing
                await task.end(Finished(Outcome.FAILED, failure=REQUEST_LOST))
            else:
                # Before anything is awaited: whoever finds the task finds its turn. That waits for
                # the entries, and does not run if they cannot be stored.
                task.start(request, logged_turn, after=storing)
        if self._storing is not None:
            await asyncio.shield(self._storing)
        return len(rows)

    def stop_leftovers(
        self, member: Member, last_owner: LastOwner
    ) -> list[Coroutine[None, None, None]]:
        """Return what stops turns that the last owner has left running and nobody wants."""
        stops = list[Coroutine[None, None, None]]()
        if last_owner is not LastOwner.HANDED_OVER:  # it may have left something running
            stops.append(stop_unknown(self._database, member, self._is_ours))
        if self._database.replica is not None:
            stops.append(stop_canceled(self._database, member))
        return stops

    async def leave(self, member: Member) -> None:
        """Store everything, and run nothing in an OpenCode any more."""
        await member.errands.close()
        await self._tasks.give_up(member)

    def end_reading(self) -> None:
        self._tasks.end_reading()


async def _append_after(
    earlier: asyncio.Future[bool] | None, log: TaskLog, events: Sequence[LogEvent]
) -> bool:
    """Append events at once; return when they are stored, and those of earlier tasks too."""
    stored = await log.append(events)
    if earlier is not None:
        await asyncio.wait([earlier])
    return stored


async def _read_logged_turn(
    database: Database, row: TaskRow, interrupts: SharedInterrupts
) -> tuple[TaskState, list[Interrupted | Answered | Resumed], LoggedTurn]:
    """Return a task as logged, the events that its log lacks, and the turn that was running."""
    replay = Replay(database, row.no, ref_of(row))
    emitted, added, earlier_session, canceled = Emitted(), list[Added](), None, False
    while entries := await replay.next(replay.state.seq):
        for entry in entries:
            match entry.event:
                case Finished() | Interrupted(type="plan"):  # the end of a turn
                    earlier_session = emitted.bound.session_id if emitted.bound else earlier_session
                    emitted, added, canceled = Emitted(), [], False
                case Progressed(CANCELING.type):
                    canceled = True
                case Added():
                    added.append(entry.event)
                case Progressed("message", "refused" | "dropped", message_id) as given_up:
                    # Its sender was told so, and may have sent it anew.
                    added = [one for one in added if one.message.message_id != message_id]
                    emitted.add(given_up)
                case Accepted() | Answered() | Recovered() | Unknown() | Resumed(type="plan"):
                    pass
                case event:
                    emitted.add(event)
    stored = await interrupts.stored(row.id, row.context_id)
    missing = [] if replay.state.status.between_turns else unlogged(emitted, stored)
    for event in missing:
        if not isinstance(event, Answered):
            emitted.add(event)
    return replay.state, missing, LoggedTurn(emitted, added, stored, earlier_session, canceled)


async def _after_unreadable(database: Database, row: TaskRow) -> TaskState:
    """Return a task that cannot be read, so that entries can follow those that it has."""
    state = TaskState(ref_of(row))
    state.status = replace(state.status, state=state_of(row), at=row.updated_at)
    while segments := await database.read(task_rows.load_segments, row.no, state.seq + 1):
        state.seq = segments[-1].last_seq
    return state


async def end_unowned(database: Database, row: TaskRow) -> bool:
    """Cancel a task unless a live replica runs its OpenCode; return whether it has ended now.

    Only the owner of an OpenCode writes the logs of its tasks. While it has no live owner, any
    replica may end one of them for a caller who does not want to wait for the next: the transaction
    locks the row of the OpenCode, so nobody becomes its owner before the end is stored, and the
    next owner finds a task that has ended. OpenCode itself is not asked anything: the request stays
    in the table, and the next owner stops the turn (``stop_canceled``).
    """
    if database.replica is None:
        return False

    void: list[InterruptRow] = []

    def write(connection: Connection, segment: Segment, change: StatusChange) -> bool | None:
        if not replicas.lock_unowned(connection, row.upstream):
            return False
        if task_rows.load_segments(connection, row.no, segment.first_seq, 1):
            return None  # an owner, or another replica like this one, wrote meanwhile
        task_rows.append(connection, [segment], [change])
        webhooks.note_changes(connection, {row.no: segment.last_seq})
        task_rows.set_request(connection, row.no, row.request)
        void[:] = interrupts.void(connection, row.id, now_ms())
        return True

    while True:
        state = await Replay(database, row.no, ref_of(row)).all()
        before, first, now = state.status, state.seq + 1, now_ms()
        if before.state.terminal:
            return True
        # The last owner may have shown entries that it did not store: these numbers begin anew.
        entries = [state.apply(event, now) for event in (Recovered(UNOWNED), UNSTOPPED)]
        segment = Segment(row.no, first, state.seq, dump_entries(entries))
        change = status_change(row.no, before, state.status, state)
        ended = await database.write(write, segment, change)
        if ended:
            ROUTINE.info("task ended without an owner", task_id=row.id, principal=row.principal)
            ref = state.ref
            audit_void(Owner(ref.id, ref.context_id, ref.principal), void)
        if ended is not None:
            return ended


async def stop_canceled(database: Database, member: Member) -> None:
    """Stop the turns of tasks that were canceled while their OpenCode had no owner.

    A session that has been given another prompt since is left alone.
    """
    rows = await database.read_until_available(
        task_rows.unstopped, member.name, now_ms() - UNSTOPPED_SECONDS * 1000
    )
    # One that waits for its session holds up no other.
    await asyncio.gather(*(_stop_canceled_one(database, member, row) for row in rows))


async def _stop_canceled_one(database: Database, member: Member, row: TaskRow) -> None:
    """Stop the turn of a canceled task, and forget its request once that is done.

    If OpenCode or the database cannot be asked, the request stays for the next owner.
    """
    await member.turns.feed.up.wait()
    opencode = member.turns.opencode
    try:
        session_id = load_task(row).status.session_id
        prompts = list[MessageId]()
        if row.request is not None:
            prompts = [load_request(row.request).user_message_id]
            prompts += await _added_prompts(database, row)
    except StoreUnavailableError:
        return
    except Exception:  # as in ``Recovery``
        logger.exception("task could not be read", task_id=row.id)
        session_id, prompts = None, []
    if session_id is not None and prompts:
        lock = member.turns.sessions.turn_locks.setdefault(session_id, TurnLock())
        for seconds in STOP_AGAIN_SECONDS:
            try:
                async with lock:
                    found = await messages_since(opencode, session_id, prompts[0])
                    if not is_overtaken(found, prompts):
                        await opencode.abort_session(session_id)
                break
            except (SessionNotFoundError, UpstreamNotFoundError):
                break
            except (ServiceError, TimeoutError) as error:
                logger.warning("canceled task was not stopped", task_id=row.id, cause=str(error))
            await asyncio.sleep(seconds)
        else:
            return
    await database.write_until_stored(task_rows.set_request, row.no, None)


async def _added_prompts(database: Database, row: TaskRow) -> list[MessageId]:
    """Return what OpenCode may have been given for a task while its turns ran.

    Nothing once the log of the ended task is deleted: then a session with more than the first
    prompt is left alone.
    """
    replay, added = Replay(database, row.no, ref_of(row)), list[MessageId]()
    while entries := await replay.next(replay.state.seq):
        for entry in entries:
            if isinstance(entry.event, Added):
                added.append(entry.event.request.user_message_id)
    return added


async def stop_unknown(database: Database, member: Member, is_ours: IsOurs) -> None:
    """Stop turns that this service began, and of which its database knows nothing.

    A failover to a server without the last commits leaves such turns: nobody reads them, and the
    messages that began them are sent again. A session whose last prompt is not certainly one of
    this service is left alone: a person may be working there. Looks at the default directory only.
    """
    await member.turns.feed.up.wait()
    await asyncio.sleep(UNKNOWN_AFTER_SECONDS)
    opencode, (at, _) = member.turns.opencode, member.turns.sessions.locate(NO_ROUTING)
    stopped = list[SessionId]()
    try:
        async with asyncio.timeout(UNKNOWN_SECONDS):
            busy = await opencode.session_status(at=at)
            # Only now: a task and its session are stored before the prompt is sent.
            known = await _known_sessions(database)
            unknown = [one for one in busy if one not in known and not member.errands.follows(one)]
            parents = dict[SessionId, SessionId | None]()
            for one in unknown:
                with suppress(SessionNotFoundError):  # it may be deleted by now
                    parents[one] = (await opencode.session(one)).parent_id
            # The others are sub-agents.
            roots = [one for one, parent in parents.items() if parent not in busy]
            for root in roots:
                lock = member.turns.sessions.turn_locks.setdefault(root, TurnLock())
                if lock.users:  # its conversation is being continued
                    continue
                async with lock:
                    prompts = list[MessageId]()
                    with suppress(SessionNotFoundError):
                        page = await opencode.messages(root, limit=PAGE)
                        prompts = [one.info.id for one in page.items if one.info.role == "user"]
                    if not prompts or not is_ours(prompts[-1]):
                        continue
                    if root in await _known_sessions(database):
                        continue
                    family = {root, *(one for one, parent in parents.items() if parent == root)}
                    # OpenCode loses an abort that comes before the turn begins.
                    while left := family.intersection(await opencode.session_status(at=at)):
                        for one in left:
                            with suppress(SessionNotFoundError):
                                await opencode.abort_session(one)
                        await asyncio.sleep(AGAIN_SECONDS)
                    stopped.append(root)
    except (ServiceError, TimeoutError) as error:
        logger.warning(
            "the search for turns without a task was not completed",
            upstream=member.name,
            stopped=stopped,
            cause=str(error) or "no answer in time",
        )
        return
    if roots:
        # Somebody who works at OpenCode's own terminal is nothing to be warned of.
        logger.log(
            logging.WARNING if stopped else logging.INFO,
            "OpenCode was at work for no task in the database",
            upstream=member.name,
            count=len(roots),
            stopped=stopped,
            left_alone=[one for one in roots if one not in stopped],
        )


async def _known_sessions(database: Database) -> set[SessionId]:
    """Return the sessions of all tasks that have not ended, whatever OpenCode runs them."""
    found = set[SessionId]()
    for row in await database.read_much(task_rows.load_open, None):
        with suppress(Exception):  # ``Recovery`` has logged that it cannot be read
            session_id = load_task(row).status.session_id
            found |= set() if session_id is None else {session_id}
    return found


async def sweep(database: Database, retention_seconds: float, unread: ColumnElement[bool]) -> None:
    """Delete old tasks and logs every few minutes, except for tasks of which ``unread`` holds.

    One replica does so at a time.
    """
    ended = list(TERMINAL)

    def forget_logs(connection: Connection) -> int:
        oldest = now_ms() - LOG_SECONDS * 1000
        return task_rows.forget_logs(connection, ended, oldest, SWEEP_TASKS, unread)

    def forget_tasks(connection: Connection) -> int:
        oldest = now_ms() - int(retention_seconds * 1000)
        return task_rows.forget_tasks(connection, ended, oldest, SWEEP_TASKS, unread)

    def forget_others(connection: Connection) -> int:
        callers.forget(connection, now_ms())
        if database.replica is not None:
            replicas.forget(connection)
        return 0

    def first_come(connection: Connection, forget: Callable[[Connection], int]) -> int:
        # Two replicas that delete the same tasks would count them twice.
        return forget(connection) if engine_of(connection).try_lock(connection, "sweep") else 0

    while True:
        try:
            await database.write(first_come, forget_others)
            while await database.write(first_come, forget_logs) == SWEEP_TASKS:
                pass
            while retention_seconds > 0 and (
                await database.write(first_come, forget_tasks) == SWEEP_TASKS
            ):
                pass
        except StoreUnavailableError:
            logger.warning("old tasks not removed, trying again later")
        await asyncio.sleep(SWEEP_SECONDS)
