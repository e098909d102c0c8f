"""The record of a chaos run, and the rules it has to satisfy.

A run fills a ``History`` with what clients saw, what was done to the cluster and what is stored at
the end; ``violations`` returns every broken rule. Nothing here does I/O, so unit tests can show
with made-up histories that each rule is able to fail.
"""

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import orjson

TERMINAL = frozenset({"completed", "failed", "canceled", "rejected"})
WAITING = frozenset({"input_required", "auth_required"})
TAKE_OVER_SECONDS = 8.0
"""The lease of a replica in these runs, which is 4 seconds, and some for another to go on; seconds
on a machine that does nothing else, see ``History.allowed``."""
MOST_SLOWNESS = 4.0
"""The most by which a slow machine lengthens a limit: 8 seconds never become more than 32."""
AFTERMATH_SECONDS = 10.0
"""Seconds after the restart of an OpenCode in which a task may still fail because of it."""
CLOCK_SECONDS = 0.5
"""Seconds by which the times of two records may be in the wrong order."""
MEMORY_GROWTH = 1.6
MEMORY_SPARE_MB = 60.0
CONNECTIONS_SPARE = 4
CHECKER = 0
"""The number of the client that reads everything once more at the end."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that a client sent, and the task it got in reply, if it got one."""

    at: float
    client: int
    replica: str
    message_id: str
    token: str
    text: str
    """The whole text that the turn will produce."""
    task: str | None
    answers: bool = False
    """Whether the message answers a permission."""

    def __str__(self) -> str:
        return f"client {self.client} sent {self.message_id} to {self.replica}: {self.task}"


@dataclass(frozen=True, slots=True)
class Read:
    """A whole task, as a client received it."""

    began: float
    at: float
    client: int
    replica: str
    task: str
    state: str
    text: str

    def __str__(self) -> str:
        return (
            f"client {self.client} read at {self.replica} (asked {self.at - self.began:.3f} s "
            f"earlier): {self.state}, {len(self.text)} characters"
        )


@dataclass(frozen=True, slots=True)
class Told:
    """An event of a stream, as a client received it."""

    at: float
    client: int
    reading: int
    """The number of the connection; a client that reconnects gets a new one."""
    replica: str
    task: str
    cursor: str
    body: bytes

    def __str__(self) -> str:
        where = f"client {self.client} reading {self.reading} at {self.replica}"
        return f"{where}: {self.cursor} {_brief(self.body)}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that the run caused."""

    at: float
    until: float
    kind: str
    target: str

    def __str__(self) -> str:
        return f"-- {self.kind} {self.target} for {self.until - self.at:.3f} s"


@dataclass(frozen=True, slots=True)
class Unexpected:
    """An error that a client got, or output that a replica should not print, in full."""

    at: float
    who: str
    what: str
    task: str | None = None

    def __str__(self) -> str:
        return f"{self.who}: {self.what}"


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt in the journal of a played OpenCode."""

    at: float
    opencode: str
    session: str
    message: str
    token: str
    again: bool
    """Whether OpenCode knew the message id already, and so ran no further turn."""

    def __str__(self) -> str:
        again = " again" if self.again else ""
        return f"OpenCode {self.opencode} prompted{again}: {self.message}"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a turn in the journal of a played OpenCode."""

    at: float
    opencode: str
    message: str
    token: str
    aborted: bool

    def __str__(self) -> str:
        return f"OpenCode {self.opencode} {'aborted' if self.aborted else 'ended'} the turn"


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """A request to a played OpenCode to stop what a session does."""

    at: float
    opencode: str
    session: str

    def __str__(self) -> str:
        return f"OpenCode {self.opencode} was told to stop {self.session}"


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """A request of a client to cancel a task; it may have been lost."""

    at: float
    client: int
    replica: str
    task: str

    def __str__(self) -> str:
        return f"client {self.client} cancels at {self.replica}"


@dataclass(frozen=True, slots=True)
class Replied:
    """An answer to a permission that a played OpenCode was given."""

    at: float
    opencode: str
    session: str
    request: str
    reply: str
    taken: bool = True
    """Whether the permission was still asked for."""

    def __str__(self) -> str:
        took = "took" if self.taken else "refused"
        return f"OpenCode {self.opencode} {took} the answer {self.reply} to {self.request}"


@dataclass(frozen=True, slots=True)
class Written:
    """Entries that a replica stored, as a trigger in the database saw it."""

    at: float
    task_no: int
    first: int
    last: int
    writer: int | None
    """The replica whose commit counter the transaction had moved."""
    writer_gone: bool
    owner: int | None
    """The replica that owned the task's OpenCode at that moment."""
    owner_lives: bool

    def __str__(self) -> str:
        writer = f"replica {self.writer}{' (gone)' if self.writer_gone else ''}"
        return f"stored {self.first}-{self.last} by {writer}, OpenCode owned by {self.owner}"


@dataclass(frozen=True, slots=True)
class Moved:
    """A state that was stored for a task."""

    at: float
    task_no: int
    state: str

    def __str__(self) -> str:
        return f"state stored: {self.state}"


@dataclass(frozen=True, slots=True)
class Owned:
    """A change of the replica that owns an OpenCode."""

    at: float
    upstream: str
    owner: int | None

    def __str__(self) -> str:
        return f"-- OpenCode {self.upstream} owned by replica {self.owner}"


@dataclass(frozen=True, slots=True)
class Registered:
    """A start of a replica: each process gets a number of its own."""

    at: float
    no: int
    name: str

    def __str__(self) -> str:
        return f"-- replica {self.no} is {self.name}"


Record: TypeAlias = (
    Sent
    | Read
    | Told
    | Fault
    | Unexpected
    | Prompted
    | Ended
    | AbortAsked
    | CancelAsked
    | Replied
    | Written
    | Moved
    | Owned
    | Registered
)
"""Something that happened at a time; ``str`` tells it in one line of a task's history."""


@dataclass(frozen=True, slots=True)
class StoredTask:
    no: int
    id: str
    state: str
    upstream: str


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    text: str
    task: str | None = None


@dataclass
class History:
    seed: int
    earlier: str | None = None
    """The name of the replica that runs an earlier version, if one does."""
    pulses: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Times, and how much longer than its CPU time some work took then: what the machine gives to
    one process among all others."""
    sent: list[Sent] = field(default_factory=list[Sent])
    reads: list[Read] = field(default_factory=list[Read])
    told: list[Told] = field(default_factory=list[Told])
    faults: list[Fault] = field(default_factory=list[Fault])
    unexpected: list[Unexpected] = field(default_factory=list[Unexpected])
    refused: list[Unexpected] = field(default_factory=list[Unexpected])
    """Errors that a failure of the cluster explains."""
    prompted: list[Prompted] = field(default_factory=list[Prompted])
    ended: list[Ended] = field(default_factory=list[Ended])
    aborts: list[AbortAsked] = field(default_factory=list[AbortAsked])
    cancels: list[CancelAsked] = field(default_factory=list[CancelAsked])
    replied: list[Replied] = field(default_factory=list[Replied])
    written: list[Written] = field(default_factory=list[Written])
    moved: list[Moved] = field(default_factory=list[Moved])
    owned: list[Owned] = field(default_factory=list[Owned])
    registered: list[Registered] = field(default_factory=list[Registered])
    tasks: list[StoredTask] = field(default_factory=list[StoredTask])
    logs: dict[str, list[Told]] = field(default_factory=dict[str, list[Told]])
    """The stored log of each task, as a replica replayed it at the end."""
    tallies: dict[str, int] = field(default_factory=dict[str, int])
    """The number of tasks in each state, from the counters that the service keeps."""
    memory: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])
    """The name of each replica, and its megabytes after the first start and at the end."""
    connections: tuple[int, int] = (0, 0)
    """Connections to the database: the most there should be, and those open at the end."""

    @cached_property
    def token_of(self) -> dict[str, str]:
        """The token in the prompt of each task."""
        return {one.task: one.token for one in self.sent if one.task is not None}

    @cached_property
    def text_of(self) -> dict[str, str]:
        """The whole text that each task's turn produces."""
        return {one.task: one.text for one in self.sent if one.task is not None}

    @cached_property
    def written_for(self) -> dict[int, list[Written]]:
        """What was stored for each task."""
        found: defaultdict[int, list[Written]] = defaultdict(list)
        for one in sorted(self.written, key=lambda one: one.at):
            found[one.task_no].append(one)
        return found

    @cached_property
    def states_of(self) -> dict[int, list[tuple[float, str]]]:
        """The states that were stored for each task, with their times."""
        found: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)
        for one in sorted(self.moved, key=lambda one: one.at):
            found[one.task_no].append((one.at, one.state))
        return found

    def slowness(self, since: float, until: float) -> float:
        """Return the factor by which the machine was slower than an idle one, on average."""
        found = [factor for at, factor in self.pulses if since <= at <= until]
        return sum(found) / len(found) if found else 1.0

    def allowed(self, seconds: float, since: float, until: float) -> float:
        """Return how long something may take that takes ``seconds`` on an idle machine.

        It is lengthened by what the machine did in the meantime, up to ``MOST_SLOWNESS``.
        """
        return seconds * min(max(1.0, self.slowness(since, until)), MOST_SLOWNESS)

    def about(self, task: str) -> list[str]:
        """Return everything about a task in the order of time, to look for a cause."""
        row = next((one for one in self.tasks if one.id == task), None)
        no = row.no if row else None
        token = self.token_of.get(task)
        sessions = {one.session for one in self.prompted if one.token == token}
        related: list[Record] = [
            *(one for one in self.sent if one.task == task or one.token == token),
            *(one for one in self.reads if one.task == task),
            *(one for one in self.told if one.task == task and one.client != CHECKER),
            *(one for one in self.prompted if one.token == token),
            *(one for one in self.ended if one.token == token),
            *(one for one in self.aborts if one.session in sessions),
            *(one for one in self.cancels if one.task == task),
            *(one for one in self.replied if one.session in sessions),
            *(one for one in self.written if one.task_no == no),
            *(one for one in self.moved if one.task_no == no),
            *(one for one in [*self.unexpected, *self.refused] if one.task == task),
        ]
        if related:
            # Add what happened to the cluster around that time, if it may concern the task.
            first = min(one.at for one in related) - 10
            last = max(one.at for one in related) + 10
            changes = [one for one in self.owned if row and one.upstream == row.upstream]
            around = (*changes, *self.registered)
            related += [one for one in around if first <= one.at <= last]
            related += [one for one in self.faults if one.until >= first and one.at <= last]
        begin = min((one.at for one in self.registered), default=0.0)
        # A traceback keeps all its lines, below its time.
        return [
            f"{one.at - begin:8.3f} {one}".replace("\n", f"\n{'':9}")
            for one in sorted(related, key=lambda one: one.at)
        ]


def violations(history: History) -> list[Violation]:
    """Return every violation, rule by rule."""
    rules = (
        _one_task,
        _one_end,
        _one_prompt,
        _one_reply,
        _ended_for_a_reason,
        _stopped,
        _same_bytes,
        _no_gap,
        _same_text,
        _asked_first,
        _not_fenced,
        _tallied,
        _taken_over,
        _back_at_the_start,
        _nothing_unexpected,
    )
    return [violation for rule in rules for violation in rule(history)]


def _one_task(history: History) -> Iterator[Violation]:
    """One message id leads to one task, which exists at the end."""
    stored = {task.id for task in history.tasks}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for sent in history.sent:
        if sent.task is not None:
            found[sent.message_id].add(sent.task)
            if sent.task not in stored:
                yield Violation("one task", "was given to a client and is not stored", sent.task)
    for message_id, tasks in found.items():
        if len(tasks) > 1:
            text = f"message {message_id} led to {len(tasks)} tasks: {', '.join(sorted(tasks))}"
            yield Violation("one task", text, min(tasks))


def _one_end(history: History) -> Iterator[Violation]:
    """Every task ends in one state, and every later read shows that state."""
    ends: defaultdict[str, list[tuple[float, float, str, str]]] = defaultdict(list)
    for read in history.reads:
        ends[read.task].append((read.began, read.at, read.state, read.replica))
    for told in history.told:
        if (state := _state_in(told.body)) in TERMINAL:
            ends[told.task].append((told.at, told.at, str(state), told.replica))
    for task in history.tasks:
        if task.state not in TERMINAL:
            yield Violation("one end", f"is still {task.state}", task.id)
        seen = ends[task.id]
        different = {state for _, _, state, _ in seen if state in TERMINAL} - {task.state}
        if different:
            text = f"ended {task.state}, and {', '.join(sorted(different))} was told"
            yield Violation("one end", text, task.id)
        known = min((at for _, at, state, _ in seen if state in TERMINAL), default=None)
        for began, _, state, replica in seen:
            if known is not None and began > known and state not in TERMINAL:
                text = f"was {state} at {replica} after its end had been told"
                yield Violation("one end", text, task.id)


def _one_prompt(history: History) -> Iterator[Violation]:
    """A message starts one turn; a task that completed had one."""
    turns: Counter[str] = Counter(one.token for one in history.prompted if not one.again)
    state_of = {task.id: task.state for task in history.tasks}
    for task, token in history.token_of.items():
        if turns[token] > 1:
            yield Violation("one prompt", f"started {turns[token]} turns", task)
        if state_of.get(task) == "completed" and not turns[token]:
            yield Violation("one prompt", "completed without a turn", task)


def _one_reply(history: History) -> Iterator[Violation]:
    """OpenCode is given one answer to a request.

    It is given once more only if a fault may have taken it away: another replica owns the OpenCode
    since, or the OpenCode could not be reached.
    """
    given: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in sorted(history.replied, key=lambda one: one.at):
        given[one.opencode, one.request].append(one.at)
    for (opencode, request), times in given.items():
        for first, second in pairwise(times):
            moved = any(
                one.upstream == opencode and first - CLOCK_SECONDS <= one.at <= second
                for one in history.owned
            )
            if not moved and not _disturbed(history, opencode, first, second):
                text = f"{request} of OpenCode {opencode} was answered again after {first:.3f}"
                yield Violation("one reply", text)


def _disturbed(history: History, opencode: str, since: float, until: float) -> bool:
    """Whether an OpenCode was away, or hard to reach, at some time in between."""
    return any(
        one.target == opencode and one.at <= until and one.until + AFTERMATH_SECONDS >= since
        for one in history.faults
    )


def _ended_for_a_reason(history: History) -> Iterator[Violation]:
    """A task fails only if its OpenCode died, and is canceled only if a client wanted that.

    All other faults are the service's to survive: a turn that a dead replica ran is continued.
    """
    canceled = {one.task for one in history.cancels}
    for task in history.tasks:
        times = [at for at, _ in history.states_of.get(task.no, [])]
        if task.state == "canceled" and task.id not in canceled:
            yield Violation("a reason", "was canceled, and no client wanted that", task.id)
        elif task.state == "rejected":
            yield Violation("a reason", "was rejected, and no client refused anything", task.id)
        elif task.state == "failed" and not any(
            one.kind == "opencode"
            and one.target == task.upstream
            and one.at <= times[-1]
            and one.until + AFTERMATH_SECONDS >= times[0]
            for one in history.faults
            if times
        ):
            yield Violation("a reason", "failed, though its OpenCode did not", task.id)


def _stopped(history: History) -> Iterator[Violation]:
    """A turn whose task is canceled is stopped in OpenCode, unless it had ended by itself."""
    prompts = {one.token: one for one in history.prompted if not one.again}
    asked = {(one.opencode, one.session) for one in history.aborts}
    for task in history.tasks:
        prompt = prompts.get(history.token_of.get(task.id, ""))
        if task.state != "canceled" or prompt is None:
            continue
        end = max((at for at, _ in history.states_of.get(task.no, [])), default=0.0)
        over = any(
            one.token == prompt.token and not one.aborted and one.at <= end + CLOCK_SECONDS
            for one in history.ended
        )
        stopped = (prompt.opencode, prompt.session) in asked
        if not over and not stopped and not _disturbed(history, prompt.opencode, prompt.at, end):
            yield Violation("stopped", "was canceled, and OpenCode was not told to stop", task.id)


def _same_bytes(history: History) -> Iterator[Violation]:
    """A cursor stands for the same bytes on every replica and at any time.

    Versions may word differently what a status says to a person, since that is not stored.
    """
    bodies: dict[tuple[str, str, bool], Told] = {}
    every = [*(one for log in history.logs.values() for one in log), *history.told]
    for told in every:
        if _is_snapshot(told.body):
            continue
        old = told.replica == history.earlier
        first = bodies.setdefault((told.task, told.cursor, old), told)
        other = bodies.get((told.task, told.cursor, not old), told)
        if first.body != told.body or _unworded(other.body) != _unworded(told.body):
            wrong = first if first.body != told.body else other
            text = (
                f"{told.cursor} is {told.body.decode()} at {told.replica}"
                f" and {wrong.body.decode()} at {wrong.replica}"
            )
            yield Violation("same bytes", text, told.task)


def _no_gap(history: History) -> Iterator[Violation]:
    """Each reader gets every entry after its first one, until its connection ends.

    The stored log says which numbers exist. It lacks the entries that a killed replica sent to
    readers before it stored them: those may only be the last ones before the task was recovered.
    """
    readings: defaultdict[tuple[str, int], list[Told]] = defaultdict(list)
    for told in history.told:
        readings[told.task, told.reading].append(told)
    for (task, reading), events in readings.items():
        order = [one.cursor for one in history.logs.get(task, [])]
        place = {cursor: number for number, cursor in enumerate(order)}
        numbers = [_seq(cursor) for cursor in order]
        for before, after in pairwise(events):
            if _is_snapshot(after.body):
                continue  # the reader starts again from the whole task
            where = f"reading {reading} at {after.replica}"
            if _epoch(before.cursor) == _epoch(after.cursor) and _seq(after.cursor) <= _seq(
                before.cursor
            ):
                text = f"{where}: {after.cursor} after {before.cursor}"
                yield Violation("no gap", text, task)
            elif after.cursor in place:
                if _is_snapshot(before.body) or before.cursor not in place:
                    expected = bisect_right(numbers, _seq(before.cursor))
                    if before.cursor not in place and not _is_snapshot(before.body):
                        text = f"{where}: {after.cursor} is stored, {before.cursor} before it not"
                        yield Violation("no gap", text, task)
                        continue
                else:
                    expected = place[before.cursor] + 1
                if place[after.cursor] > expected:
                    text = f"{where}: {order[expected]} is missing before {after.cursor}"
                    yield Violation("no gap", text, task)


def _same_text(history: History) -> Iterator[Violation]:
    """An answer holds what OpenCode said, and all of it once the task is completed."""
    for read in history.reads:
        text = history.text_of.get(read.task)
        if text is None:
            continue
        if not text.startswith(read.text):
            wrong = _first_difference(text, read.text)
            yield Violation("same text", f"at {read.replica} {wrong}", read.task)
        elif read.state == "completed" and read.text != text:
            said = f"completed with {len(read.text)} of {len(text)} characters at {read.replica}"
            yield Violation("same text", said, read.task)


def _asked_first(history: History) -> Iterator[Violation]:
    """No permission is granted that no client approved."""
    approved = {one.token for one in history.sent if one.answers}
    token_of = {(one.opencode, one.session): one.token for one in history.prompted}
    for one in history.replied:
        token = token_of.get((one.opencode, one.session))
        if one.taken and one.reply != "reject" and token not in approved:
            yield Violation("asked first", f"{one.request} was approved by nobody ({token})")


def _not_fenced(history: History) -> Iterator[Violation]:
    """Only the live replica that owns the task's OpenCode stores entries."""
    id_of = {task.no: task.id for task in history.tasks}
    for one in history.written:
        task = id_of.get(one.task_no)
        where = f"entries {one.first} to {one.last}"
        if one.writer is None:
            yield Violation("not fenced", f"{where} were stored without a fence", task)
        elif one.writer_gone:
            yield Violation("not fenced", f"{where} by replica {one.writer}, which is gone", task)
        elif one.owner_lives and one.owner != one.writer:
            text = f"{where} by replica {one.writer}, while {one.owner} owned the OpenCode"
            yield Violation("not fenced", text, task)


def _tallied(history: History) -> Iterator[Violation]:
    counted = Counter(task.state for task in history.tasks)
    for state in sorted({*counted, *history.tallies}):
        if counted[state] != history.tallies.get(state, 0):
            text = f"{history.tallies.get(state, 0)} {state} by the tallies, {counted[state]} are"
            yield Violation("tallies", text)


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A task whose replica died while it worked, and how long it then stood still."""

    task: StoredTask
    fault: Fault
    seconds: float
    """Until another process stored something for it; infinite if none did."""
    limit: float

    def __str__(self) -> str:
        late = "never" if self.seconds == math.inf else f"only {self.seconds:.1f} s"
        return (
            f"went on {late} after {self.fault.kind} of {self.fault.target} at "
            f"{self.fault.at:.3f}; {self.limit:.1f} s are allowed"
        )


def take_overs(history: History) -> Iterator[TakeOver]:
    """Yield every take-over of a task.

    A further fault gives more time: a dead database stops every replica, and the replica that has
    just taken over may die too. How long the ended replica itself stays away does not matter.
    """
    upstreams = sorted({one.upstream for one in history.owned})
    faults = sorted(history.faults, key=lambda one: one.at)
    for fault in (one for one in faults if one.kind in ("kill", "term")):
        number = max(
            (
                one.no
                for one in history.registered
                if one.name == fault.target and one.at < fault.at
            ),
            default=None,
        )
        limit = history.allowed(
            TAKE_OVER_SECONDS, fault.at, fault.at + TAKE_OVER_SECONDS * MOST_SLOWNESS
        )
        for upstream in upstreams:
            changes = [one for one in history.owned if one.upstream == upstream]
            before = [one for one in changes if one.at <= fault.at]
            if number is None or not before or before[-1].owner != number:
                continue
            since = fault.at
            for other in faults:
                hinders = other.target not in upstreams or other.target == upstream
                if other is fault or not hinders:
                    continue
                if other.at < since + limit and other.until > since:
                    since = other.until
            for task in history.tasks:
                if task.upstream == upstream:
                    yield from _goes_on(history, task, fault, number, since, limit)


def _goes_on(
    history: History, task: StoredTask, fault: Fault, replica: int, free: float, limit: float
) -> Iterator[TakeOver]:
    """Yield the take-over of a task, which nothing else hindered from ``free`` on."""
    written = history.written_for.get(task.no, [])
    # A replica that is stopped in order goes on until it has handed over.
    own = [one.at for one in written if one.writer == replica]
    since = max(fault.at, *own) if own else fault.at
    after = min((one.at for one in written if one.at > since), default=math.inf)
    # The state is stored in the same transaction as the entries, but a moment later.
    states = [(at, state) for at, state in history.states_of.get(task.no, []) if at < after]
    if not states or states[0][0] > fault.at or states[-1][1] in TERMINAL | WAITING:
        return
    yield TakeOver(task, fault, after - since, max(free - since, 0.0) + limit)


def _taken_over(history: History) -> Iterator[Violation]:
    """Tasks of a dead replica continue, end, or wait for a person, in time."""
    for one in take_overs(history):
        if one.seconds > one.limit:
            yield Violation("taken over", str(one), one.task.id)


def silences(history: History) -> Iterator[tuple[str, float, float]]:
    """Yield every pause in a text, as its client saw it: the task, and from when to when."""
    shown: dict[str, tuple[float, str]] = {}
    for told in sorted(history.told, key=lambda one: one.at):
        event = orjson.loads(told.body)
        since, before = shown.get(told.task, (told.at, ""))
        update = event.get("artifactUpdate", {"artifact": {"artifactId": ""}})
        text = before
        if "task" in event:
            text = text_of(event["task"])
        elif update["artifact"]["artifactId"].endswith(":stream:text"):
            said = "".join(part.get("text", "") for part in update["artifact"]["parts"])
            text = before + said if update.get("append") else said
        if len(text) > len(before):
            if before:
                yield told.task, since, told.at
            shown[told.task] = told.at, text


def _back_at_the_start(history: History) -> Iterator[Violation]:
    for name, before, after in history.memory:
        if after > before * MEMORY_GROWTH + MEMORY_SPARE_MB:
            text = f"{name} takes {after:.0f} MB, after its start {before:.0f}"
            yield Violation("back at the start", text)
    before, after = history.connections
    if after > before + CONNECTIONS_SPARE:
        text = f"{after} connections to the database, not {before}"
        yield Violation("back at the start", text)


def _nothing_unexpected(history: History) -> Iterator[Violation]:
    counted = Counter((one.who, one.what, one.task) for one in history.unexpected)
    for (who, what, task), count in counted.items():
        times = f" ({count} times)" if count > 1 else ""
        yield Violation("nothing unexpected", f"{who}: {what}{times}", task)


# Reading bodies


def text_of(task: Any) -> str:
    """Return the answer text in a task as clients receive it."""
    streams = [a for a in task.get("artifacts", []) if a["artifactId"].endswith(":stream:text")]
    return "".join(part.get("text", "") for one in streams for part in one["parts"])


def state_of(status: Any) -> str:
    return status["state"].removeprefix("TASK_STATE_").lower()


def _state_in(body: bytes) -> str | None:
    if b'"statusUpdate"' not in body:
        return None
    event = orjson.loads(body)
    update = event.get("statusUpdate")
    return state_of(update["status"]) if update else None


def _is_snapshot(body: bytes) -> bool:
    return body.startswith(b'{"task":')


def _unworded(body: bytes) -> Any:
    """Return an event without what its status says to a person."""
    event = orjson.loads(body)
    event.get("statusUpdate", {}).get("status", {}).pop("message", None)
    return event


def _seq(cursor: str) -> int:
    return int(cursor.partition(".")[0])


def _epoch(cursor: str) -> int:
    return int(cursor.partition(".")[2] or 0)


def _brief(body: bytes) -> str:
    text = re.sub(r'"(taskId|contextId|artifactId|timestamp)":"[^"]*",?', "", body.decode())
    return text if len(text) <= 160 else f"{text[:100]} … {text[-55:]}"


def _first_difference(expected: str, found: str) -> str:
    place = next(
        (n for n, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(found)),
    )
    said, wanted = found[max(0, place - 20) : place + 20], expected[place : place + 20]
    return f"says {said!r} at {place}, not {wanted!r}"
