"""Queries of tasks, their messages and logs, and of the sessions and workspaces of their contexts.

Columns of bytes hold encoded values, which only ``log.state`` can read.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.ids import MAIN, ContextId, Principal, SessionId
from opencode_a2a.store.database import Prepared, Totals, engine_of
from opencode_a2a.store.schema import (
    OPEN,
    entries,
    grants,
    interrupts,
    links,
    messages,
    owners,
    places,
    tasks,
    webhooks,
)


class TaskRow(NamedTuple):
    id: str
    principal: str
    context_id: str
    state: str
    created_at: int
    updated_at: int
    status: bytes
    output_modes: bytes | None = None
    request: bytes | None = None
    archive: bytes | None = None
    no: int = 0
    upstream: str = MAIN


class Segment(NamedTuple):
    """A run of entries of one task, in their encoded form."""

    task_no: int
    first_seq: int
    last_seq: int
    data: bytes


class StatusChange(NamedTuple):
    """A new status of a task."""

    task_no: int
    principal: str
    before: str
    """The state that the row has now."""
    state: str
    at: int | None
    """When the task reached the state, in ms; None if it was in that state before."""
    status: bytes
    archive: bytes | None = None


class Key(NamedTuple):
    """The position of a task in a list: newest first, by number if two are equally new."""

    updated_at: int
    no: int


def _select(which: str, *more: str, brief: bool = False) -> Prepared:
    """Return a query of task rows and more columns; brief rows are without their large columns."""
    left_out = ("request", "archive") if brief else ()
    columns = ["NULL" if name in left_out else f"tasks.{name}" for name in TaskRow._fields]
    return Prepared(f"SELECT {', '.join([*columns, *more])} FROM tasks {which}")  # noqa: S608 - constants of this module


_LOAD = _select("WHERE id = :id AND principal = :principal")
_LOAD_BY_NUMBER = _select("WHERE no = :no")
_FIND_MESSAGE = _select(
    "JOIN messages ON messages.task_no = tasks.no WHERE messages.principal = :principal"
    " AND messages.message_id = :message_id AND messages.digest = :digest",
    "messages.refusal",
)
_NEW_MESSAGE = (
    "INSERT INTO messages (principal, message_id, task_no, digest, refusal)"
    " VALUES (:principal, :message_id, :task_no, :digest, :refusal)"
)
_ADD_MESSAGE = Prepared(
    f"{_NEW_MESSAGE} ON CONFLICT (principal, message_id, digest)"
    " DO UPDATE SET refusal = coalesce(messages.refusal, excluded.refusal)"
)
_ADD_FIRST_MESSAGE = Prepared(_NEW_MESSAGE)
_ADD_TASK = Prepared(
    "INSERT INTO tasks (id, principal, context_id, state, created_at, updated_at, output_modes,"
    " status, request, upstream) VALUES (:id, :principal, :context_id, :state, :created_at,"
    " :updated_at, :output_modes, :status, :request, :upstream) RETURNING no"
)
_REQUESTS_IN_CONTEXT = Prepared(
    "SELECT upstream, request FROM tasks"
    " WHERE principal = :principal AND context_id = :context_id AND request IS NOT NULL ORDER BY no"
)
_ADD_ENTRIES = Prepared(
    "INSERT INTO entries (task_no, first_seq, last_seq, data)"
    " VALUES (:task_no, :first_seq, :last_seq, :data)",
    inserts=(
        "entries",
        {"task_no": "int8", "first_seq": "int4", "last_seq": "int4", "data": "bytea"},
    ),
)
_SEGMENTS = Prepared(
    "SELECT task_no, first_seq, last_seq, data FROM entries"
    " WHERE task_no = :task_no AND first_seq >= :first_seq ORDER BY first_seq LIMIT :most"
)
# For a database that several processes share, in PostgreSQL's dialect. Not by entries.no: rows may
# be committed in another order.
_TAILS = Prepared(
    "SELECT e.task_no, e.first_seq, e.last_seq, e.data"
    " FROM unnest(CAST(:numbers AS int8[]), CAST(:after AS int8[])) AS f(no, seq)"
    # LATERAL has it use the index for each task, whatever its statistics say.
    " CROSS JOIN LATERAL (SELECT task_no, first_seq, last_seq, data FROM entries"
    " WHERE task_no = f.no AND first_seq > f.seq ORDER BY first_seq LIMIT :most) AS e"
    " ORDER BY 1, 2 LIMIT :most"
)
_MOVE = Prepared(
    "UPDATE tasks SET state = :state, updated_at = :at, status = :status WHERE no = :task_no"
)
_SET_STATUS = Prepared("UPDATE tasks SET status = :status WHERE no = :task_no")
_END = Prepared(
    "UPDATE tasks SET state = :state, updated_at = :at, status = :status, archive = :archive,"
    " request = NULL WHERE no = :task_no"
)
_SET_REQUEST = Prepared("UPDATE tasks SET request = :request WHERE no = :task_no")
_TALLIES = Totals("tallies", ("principal", "state"), ("n",))


def await_admissions(connection: Connection, principal: str) -> None:
    """Wait for other processes to commit what they admit for a principal, and make them wait.

    This lasts until the transaction ends, so that what it counts, or does not find, is still so
    when it is committed.
    """
    engine_of(connection).lock(connection, principal)


def tally(
    connection: Connection, states: Collection[str] | None, principal: str | None = None
) -> int:
    """Return how many tasks are in these states or in any, of one principal or of all.

    For the open tasks of all, the index ``tallies_open`` leaves out the principals that have none:
    0.4 ms with 10,000 principals of whom 500 have an open task, instead of 10 ms for all rows. It
    makes no row that every process would have to update.
    """
    count = _tally(None if states is None else tuple(states), principal is not None)
    row = count.run(connection, {} if principal is None else {"principal": principal}).fetchone()
    total = int(row[0] or 0)
    for (whose, state), (n,) in _TALLIES.deferred(connection).items():
        if (states is None or state in states) and principal in (None, whose):
            total += int(n)
    return total


@cache
def _tally(states: tuple[str, ...] | None, of_one: bool) -> Prepared:
    conditions = ["n > 0"]
    if states is not None:
        conditions.append(f"state IN ({', '.join(repr(str(state)) for state in states)})")
    if of_one:
        conditions.append("principal = :principal")
    return Prepared(f"SELECT sum(n) FROM tallies WHERE {' AND '.join(conditions)}")  # noqa: S608 - constants


def find_message(
    connection: Connection, principal: str, message_id: str, digest: bytes
) -> tuple[TaskRow, bytes | None] | None:
    """Return the task of a stored message, and the error with which that was refused, if it was."""
    values = {"principal": principal, "message_id": message_id, "digest": digest}
    row = _FIND_MESSAGE.run(connection, values).fetchone()
    return (TaskRow(*row[:-1]), row[-1]) if row else None


def add_message(
    connection: Connection,
    principal: str,
    message_id: str,
    task_no: int,
    digest: bytes,
    refusal: bytes | None = None,
) -> None:
    """Store a message, or the error with which a stored one was refused later."""
    message = {"principal": principal, "message_id": message_id, "refusal": refusal}
    _ADD_MESSAGE.run(connection, {**message, "task_no": task_no, "digest": digest})


def add_task(connection: Connection, row: TaskRow, message: tuple[str, bytes] | None = None) -> int:
    """Add a task, with the id and digest of the message that it is for; return its number.

    If another process stores the same message at the same moment, this fails. The transaction is
    then run again, and finds the other's task.
    """
    # Fetch all rows: SQLite does not finish a statement before its last row was fetched.
    ((no,),) = _ADD_TASK.run(connection, row._asdict()).fetchall()
    _TALLIES.add(connection, {(row.principal, row.state): (1,)})
    if message is not None:
        message_id, digest = message
        new = {"message_id": message_id, "digest": digest, "refusal": None}
        _ADD_FIRST_MESSAGE.run(connection, {"principal": row.principal, "task_no": no, **new})
    return no


def set_request(connection: Connection, task_no: int, request: bytes | None) -> None:
    """Store what the task is to prompt next, for a restart before that is done."""
    _SET_REQUEST.run(connection, {"task_no": task_no, "request": request})


def append(
    connection: Connection, segments: Sequence[Segment], status_changes: Sequence[StatusChange]
) -> None:
    """Append entries to the logs of any number of tasks, and set the statuses they lead to."""
    _ADD_ENTRIES.run(connection, *(segment._asdict() for segment in segments))
    statements: dict[Prepared, list[dict[str, object]]] = {_SET_STATUS: [], _MOVE: [], _END: []}
    changes: Counter[tuple[str, str]] = Counter()
    for one in status_changes:
        last = _END if one.archive is not None else _MOVE
        statements[_SET_STATUS if one.at is None else last].append(one._asdict())
        changes[one.principal, one.before] -= 1
        changes[one.principal, one.state] += 1
    for statement, values in statements.items():
        if values:
            statement.run(connection, *values)
    _TALLIES.add(connection, {key: (change,) for key, change in changes.items() if change})


def exists(connection: Connection, task_id: str) -> bool:
    """Whether any principal has a task of this id."""
    return connection.scalar(sa.select(tasks.c.no).where(tasks.c.id == task_id)) is not None


def any_task(connection: Connection) -> bool:
    return connection.scalar(sa.select(tasks.c.no).limit(1)) is not None


def load(connection: Connection, principal: str, task_id: str) -> TaskRow | None:
    row = _LOAD.run(connection, {"principal": principal, "id": task_id}).fetchone()
    return TaskRow(*row) if row else None


def load_by_number(connection: Connection, no: int) -> TaskRow | None:
    """Return a task of any principal."""
    row = _LOAD_BY_NUMBER.run(connection, {"no": no}).fetchone()
    return TaskRow(*row) if row else None


def load_open(connection: Connection, upstreams: Collection[str] | None = None) -> list[TaskRow]:
    """Return the tasks that have not ended, of all upstreams or of some, oldest first."""
    columns = [tasks.c[name] for name in TaskRow._fields]
    query = sa.select(*columns).where(sa.text(OPEN)).order_by(tasks.c.no)
    if upstreams is not None:
        query = query.where(tasks.c.upstream.in_(upstreams))
    return [TaskRow(*row) for row in connection.execute(query)]


def unstopped(connection: Connection, upstream: str, since: int) -> list[TaskRow]:
    """Return the canceled tasks of an OpenCode that have kept their requests, oldest first.

    Only those have that were canceled while it had no owner. ``since`` is in milliseconds.
    """
    columns = [tasks.c[name] for name in TaskRow._fields]
    canceled = tasks.c.updated_at >= since, tasks.c.state == "canceled"
    mine = tasks.c.upstream == upstream, tasks.c.request.is_not(None)
    # In the order of an index: in that of the numbers, SQLite would look at all tasks.
    query = sa.select(*columns).where(*canceled, *mine).order_by(tasks.c.updated_at)
    return [TaskRow(*row) for row in connection.execute(query)]


def of_principal(
    connection: Connection, principal: str, states: Sequence[str], context_id: str | None
) -> list[TaskRow]:
    """Return the tasks of a principal in these states, of one context or of all, oldest first."""
    columns = [tasks.c[name] for name in TaskRow._fields]
    query = sa.select(*columns).where(tasks.c.principal == principal, tasks.c.state.in_(states))
    if context_id is not None:
        query = query.where(tasks.c.context_id == context_id)
    return [TaskRow(*row) for row in connection.execute(query.order_by(tasks.c.no))]


def requests_in_context(
    connection: Connection, principal: str, context_id: str
) -> list[tuple[str, bytes]]:
    """Return the OpenCode and the request of each open task of a context, oldest first."""
    values = {"principal": principal, "context_id": context_id}
    return [(row[0], row[1]) for row in _REQUESTS_IN_CONTEXT.run(connection, values).fetchall()]


def owner_of_task(connection: Connection, task_id: str) -> str | None:
    """Return the principal of a task."""
    return connection.scalar(sa.select(tasks.c.principal).where(tasks.c.id == task_id))


def load_segments(
    connection: Connection, task_no: int, first_seq: int, limit: int = 200
) -> list[Segment]:
    """Return the next segments of a log, beginning with the one that starts at ``first_seq``."""
    values = {"task_no": task_no, "first_seq": first_seq, "most": limit}
    return [Segment(*row) for row in _SEGMENTS.run(connection, values).fetchall()]


def load_tails(connection: Connection, after: Mapping[int, int], limit: int) -> list[Segment]:
    """Return what follows in several logs; ``after`` has the last known number of each task."""
    if not engine_of(connection).has_unnest:  # then hardly ever more than one is asked for
        tails = (load_segments(connection, no, seq + 1, limit) for no, seq in after.items())
        return list(chain.from_iterable(tails))[:limit]
    values = {"numbers": [*after], "after": [*after.values()], "most": limit}
    return [Segment(*row) for row in _TAILS.run(connection, values).fetchall()]


def page(
    connection: Connection,
    principal: str | None,
    *,
    context_id: str | None = None,
    state: str | None = None,
    since: int | None = None,
    after: Key | None,
    most: int,
    brief: bool,
) -> tuple[list[TaskRow], int]:
    """Return up to ``most`` tasks of a principal or of all, and how many the whole list has."""
    given = {"principal": principal, "context_id": context_id, "state": state, "since": since}
    values = {name: value for name, value in given.items() if value is not None}
    select, count = _listing(tuple(values), after is not None, brief)
    position = after._asdict() if after is not None else {}
    rows = select.run(connection, {**values, **position, "most": most}).fetchall()
    if context_id is None and since is None:  # then the tallies know, at no cost
        total = tally(connection, None if state is None else [state], principal)
    else:
        total = count.run(connection, values).fetchone()[0]
    return [TaskRow(*row) for row in rows], total


_CONDITIONS = {
    "principal": "principal = :principal",
    "context_id": "context_id = :context_id",
    "state": "state = :state",
    "since": "updated_at >= :since",
}


@cache
def _listing(given: tuple[str, ...], continued: bool, brief: bool) -> tuple[Prepared, Prepared]:
    """Return the query of a page of the tasks with these conditions, and that of their number."""
    which = " AND ".join(_CONDITIONS[name] for name in given) or "1 = 1"
    position = "AND (updated_at, no) < (:updated_at, :no)" if continued else ""
    newest = f"WHERE {which} {position} ORDER BY updated_at DESC, no DESC LIMIT :most"
    count = Prepared(f"SELECT count(*) FROM tasks WHERE {which}")  # noqa: S608 - constants
    return _select(newest, brief=brief), count


def forget_logs(
    connection: Connection,
    states: Sequence[str],
    before: int,
    limit: int,
    unread: sa.ColumnElement[bool],
) -> int:
    """Delete the logs of tasks that ended before a time; the tasks themselves stay readable.

    A log is kept while the condition ``unread`` holds for the row of its task.
    """
    # There are far fewer tasks with a log than tasks, and fewer still than rows of logs. So the
    # next task with a log is looked up again and again, and no further than ``limit`` demands: of
    # 20,000 logs of 80 rows, 500 are found in 5 ms, and none in 20 (SQLite) or 85 ms (PostgreSQL),
    # where the index of all rows took 60 or 180 ms each time.
    first = sa.select(sa.func.min(entries.c.task_no).label("no"))
    logged = first.cte("logged", recursive=True)
    following = sa.select(sa.func.min(entries.c.task_no)).where(entries.c.task_no > logged.c.no)
    logged = logged.union_all(
        sa.select(following.scalar_subquery()).where(logged.c.no.is_not(None))
    )
    ended = tasks.c.updated_at < before, tasks.c.state.in_(states)
    # Not a join, nor EXISTS: SQLite would find all of them first, and PostgreSQL read all tasks.
    own = sa.select(tasks.c.no).where(tasks.c.no == logged.c.no, *ended, ~unread)
    found = sa.select(logged.c.no).where(own.scalar_subquery() == logged.c.no).limit(limit)
    numbers = list(connection.scalars(found))
    connection.execute(entries.delete().where(entries.c.task_no.in_(numbers)))
    return len(numbers)


def forget_tasks(
    connection: Connection,
    states: Sequence[str],
    before: int,
    limit: int,
    unread: sa.ColumnElement[bool],
) -> int:
    """Delete tasks that ended before a time, with everything that belongs to them.

    A task is kept while the condition ``unread`` holds for its row.
    """
    rows = connection.execute(
        sa.select(tasks.c.no, tasks.c.id, tasks.c.principal, tasks.c.state, tasks.c.context_id)
        .where(tasks.c.updated_at < before, tasks.c.state.in_(states), ~unread)
        .limit(limit)
    ).all()
    ended = Counter((row.principal, row.state) for row in rows)
    _TALLIES.add(connection, {key: (-n,) for key, n in ended.items()})
    connection.execute(interrupts.delete().where(interrupts.c.task_id.in_([r.id for r in rows])))
    connection.execute(grants.delete().where(grants.c.task_id.in_([r.id for r in rows])))
    connection.execute(  # of work without a task
        interrupts.delete().where(interrupts.c.task_id == "", interrupts.c.settled_at < before)
    )
    numbers = [row.no for row in rows]
    for table in (entries, messages, webhooks):
        connection.execute(table.delete().where(table.c.task_no.in_(numbers)))
    connection.execute(tasks.delete().where(tasks.c.no.in_(numbers)))
    # A grant for a whole context ends with its last task.
    mine = (tasks.c.principal == grants.c.principal, tasks.c.context_id == grants.c.context_id)
    gone = grants.c.context_id.in_({row.context_id for row in rows})
    connection.execute(grants.delete().where(gone, ~sa.exists().where(*mine)))
    return len(rows)


# The sessions and workspaces of contexts. A session that a caller names is at first only *claimed*.
# The claim ends by itself unless the turn that it was made for confirms it.


class LinkedSession(NamedTuple):
    """The session of a context."""

    session_id: SessionId
    upstream: str
    """The OpenCode that has it."""


_LINKED_SESSION = Prepared(
    "SELECT links.session_id, owners.upstream FROM links"
    " JOIN owners ON owners.session_id = links.session_id"
    " WHERE links.principal = :principal AND context_id = :context_id AND place = :place"
)
_LINK_SESSION = Prepared(
    "INSERT INTO links (principal, context_id, place, session_id, updated_at)"
    " VALUES (:principal, :context_id, :place, :session_id, :now)"
    " ON CONFLICT (principal, context_id, place)"
    " DO UPDATE SET session_id = excluded.session_id, updated_at = excluded.updated_at"
)
_OWN_SESSION = Prepared(
    "INSERT INTO owners (session_id, principal, claimed_until, upstream)"
    " VALUES (:session_id, :principal, :until, :upstream)"
    " ON CONFLICT (session_id)"
    " DO UPDATE SET principal = excluded.principal, claimed_until = excluded.claimed_until"
)
_UPSTREAM_OF_SESSION = Prepared("SELECT upstream FROM owners WHERE session_id = :session_id")
_OWNER_OF_SESSION = Prepared(
    "SELECT principal, claimed_until FROM owners WHERE session_id = :session_id"
)


def index_key(connection: Connection, text: str) -> str:
    """Return a text as it is stored in an index: a digest if it is too long for that."""
    data, longest = text.encode(errors="surrogatepass"), engine_of(connection).longest_key
    if longest is None or len(data) <= longest:
        return text
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def linked_session(
    connection: Connection, principal: Principal, context_id: ContextId, place: str
) -> LinkedSession | None:
    """Return the session that a context uses in a place."""
    key = index_key(connection, place)
    values = {"principal": principal, "context_id": context_id, "place": key}
    row = _LINKED_SESSION.run(connection, values).fetchone()
    return LinkedSession(*row) if row else None


def upstream_of_session(connection: Connection, session_id: SessionId) -> str | None:
    """Return the OpenCode that has a session, if the session belongs to anybody."""
    row = _UPSTREAM_OF_SESSION.run(connection, {"session_id": session_id}).fetchone()
    return row[0] if row else None


def link_session(
    connection: Connection,
    principal: Principal,
    context_id: ContextId,
    place: str,
    session_id: SessionId,
    upstream: str,
    now: int,
) -> None:
    """Have a context use a session, and make the principal its owner."""
    key = index_key(connection, place)
    where = {"principal": principal, "context_id": context_id, "place": key}
    _LINK_SESSION.run(connection, {**where, "session_id": session_id, "now": now})
    own_session(connection, principal, session_id, upstream)


def own_session(
    connection: Connection,
    principal: Principal,
    session_id: SessionId,
    upstream: str,
    until: int | None = None,
) -> None:
    """Make a principal the owner of a session, for good or until a time in ms."""
    whose = {"session_id": session_id, "principal": principal, "upstream": upstream}
    _OWN_SESSION.run(connection, {**whose, "until": until})


def owner_of_session(connection: Connection, session_id: SessionId, now: int) -> Principal | None:
    """Return the owner of a session, or the principal that claims it at the moment."""
    row = _OWNER_OF_SESSION.run(connection, {"session_id": session_id}).fetchone()
    if row is None or (row[1] is not None and row[1] <= now):
        return None
    return Principal(row[0])


ASKED_AT_ONCE = 256
"""Of how many sessions the owners are asked for with one statement; a power of two."""


def sessions_of_others(
    connection: Connection, principal: Principal, session_ids: Sequence[SessionId], now: int
) -> set[SessionId]:
    """Return those of the sessions that somebody else owns or claims."""
    found: set[SessionId] = set()
    for start in range(0, len(session_ids), ASKED_AT_ONCE):
        asked = list(session_ids[start : start + ASKED_AT_ONCE])
        # A driver keeps the statement of each length, at 200 bytes for each id in it: the last id
        # is repeated, so that there are few lengths.
        asked += asked[-1:] * ((1 << (len(asked) - 1).bit_length()) - len(asked))
        rows = connection.execute(
            sa.select(owners.c.session_id).where(
                owners.c.session_id.in_(asked),
                owners.c.principal != principal,
                sa.or_(owners.c.claimed_until.is_(None), owners.c.claimed_until > now),
            )
        )
        found.update(SessionId(row.session_id) for row in rows)
    return found


def claim_sessions(
    connection: Connection,
    principal: Principal,
    lineage: Sequence[SessionId],
    upstream: str,
    now: int,
    until: int | None,
) -> bool:
    """Claim a session and its ancestors, for good or until a time, unless somebody else has one.

    They belong together: OpenCode deletes a session with all its descendants.
    """
    if sessions_of_others(connection, principal, lineage, now):
        return False
    for session_id in lineage:
        if until is None or owner_of_session(connection, session_id, now) is None:
            own_session(connection, principal, session_id, upstream, until)
    return True


def release_sessions(
    connection: Connection, principal: Principal, lineage: Sequence[SessionId]
) -> None:
    """Give up claims that were not confirmed."""
    connection.execute(
        owners.delete().where(
            owners.c.session_id.in_(lineage),
            owners.c.principal == principal,
            owners.c.claimed_until.is_not(None),
        )
    )


def forget_session(connection: Connection, session_id: SessionId) -> None:
    """Delete the links and the owner of a session that no longer exists."""
    connection.execute(links.delete().where(links.c.session_id == session_id))
    connection.execute(owners.delete().where(owners.c.session_id == session_id))


def upstream_of_place(connection: Connection, name: str) -> str | None:
    """Return the OpenCode in which a workspace or worktree was made."""
    key = index_key(connection, name)
    return connection.scalar(sa.select(places.c.upstream).where(places.c.name == key))


def own_places(
    connection: Connection, principal: Principal, upstream: str, names: Sequence[str]
) -> None:
    """Make a principal the owner of workspaces (by id) and worktrees (by directory)."""
    forget_places(connection, names)
    for name in names:
        key = index_key(connection, name)
        values = {"name": key, "principal": principal, "upstream": upstream}
        connection.execute(places.insert().values(values))


def visible_places(connection: Connection, principal: Principal, names: Sequence[str]) -> list[str]:
    """Return the places that a principal may see: their own, and those without an owner."""
    keys = {name: index_key(connection, name) for name in names}
    others = sa.select(places.c.name).where(
        places.c.name.in_(keys.values()), places.c.principal != principal
    )
    hidden = {row.name for row in connection.execute(others)}
    return [name for name in names if keys[name] not in hidden]


def forget_places(connection: Connection, names: Sequence[str]) -> None:
    keys = [index_key(connection, name) for name in names]
    connection.execute(places.delete().where(places.c.name.in_(keys)))
