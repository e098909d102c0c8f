"""Ownership and fence as a state machine, run against the statements that PostgreSQL gets.

Replicas register, take OpenCodes, write logs, freeze inside of a transaction, take and lose their
locks, are declared gone, go on as if nothing had happened, hand over, stop, and are lost by a
failover after which another one gets their number. A model says what each of them may do; the
tables have to agree after each step.
"""

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.engine import Connection

from opencode_a2a.store import replicas
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import make_engine
from opencode_a2a.store.engine import Engine, PendingWrite, Replica, WriteResult
from opencode_a2a.store.replicas import LastOwner
from opencode_a2a.store.tasks import Segment
from tests.support import stores

TAKE_LOCK = f"SELECT pg_advisory_lock_shared({replicas.LIFE_LOCK.format('%s')})".encode()
UPSTREAMS = {"x": 1, "y": 2}
"""The OpenCodes, and the number of the task that runs in each."""
NAMES = ("one", "two", "three")
index = st.integers(0, 5)


@dataclass(eq=False)
class Process:
    """A replica, and what the model knows of it."""

    id: str
    name: str
    engine: Engine
    gone: bool = False
    """It may change nothing any more, whether it knows that or not."""
    commits: int = 0
    looked: "dict[Process, int]" = field(default_factory=dict["Process", int])
    """How often others had committed a lease ago."""
    lock: psycopg.Connection[Any] | None = None
    """The connection that holds its lock."""
    owns: set[str] = field(default_factory=set[str])
    """What it believes to own."""
    frozen: "Frozen | None" = None

    @property
    def no(self) -> int:
        assert self.engine.replica is not None
        return self.engine.replica

    def write(self, fn: Callable[[Connection], Any]) -> WriteResult:
        loop_future: asyncio.Future[Any] = asyncio.Future(loop=LOOP)
        [result] = self.engine.write([PendingWrite(fn, (), {}, loop_future)])
        return result

    def disconnect(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def silent(self, others: "list[Process]") -> "list[Process]":
        """Return those that have not committed since this one looked, as the model knows it."""
        return [one for one in others if self.looked.get(one) == one.commits and not one.frozen]


LOOP = asyncio.new_event_loop()
"""Never runs: an engine leaves futures to ``Database``."""


class Frozen:
    """A transaction that has written something, and goes on only when it is told to."""

    def __init__(self, process: Process, upstream: str, seq: int) -> None:
        self.upstream, self.seq = upstream, seq
        self._inside, self._go = threading.Event(), threading.Event()
        self._results = list[WriteResult]()

        def fn(connection: Connection) -> None:
            append(connection, process, upstream, seq)
            self._inside.set()
            assert self._go.wait(60)

        def run() -> None:
            self._results.append(process.write(fn))
            self._inside.set()  # it may have been refused

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert self._inside.wait(60)

    def thaw(self) -> WriteResult:
        self._go.set()
        self._thread.join()
        return self._results[0]


def append(connection: Connection, process: Process, upstream: str, seq: int) -> None:
    """Write the next entry of a log, as the owner of its OpenCode does."""
    segment = Segment(UPSTREAMS[upstream], seq, seq, process.id.encode())
    task_rows.append(connection, [segment], [])


class Replicas(RuleBasedStateMachine):
    url: str
    """Of the schema; set by the test."""

    def __init__(self) -> None:
        super().__init__()
        # A lock that the model does not expect is a failure, not a wait.
        self.admin = psycopg.connect(self.url, autocommit=True)
        self.processes: list[Process] = []
        self.made = 0
        self.owners: dict[str, Process | None] = dict.fromkeys(UPSTREAMS)
        self.last_owners = dict.fromkeys(UPSTREAMS, LastOwner.NONE)
        """What the next owner is told of the one before."""
        self.logs: dict[str, list[str]] = {name: [] for name in UPSTREAMS}

    @initialize()
    def empty(self) -> None:
        self.admin.execute("TRUNCATE replicas, upstreams, entries RESTART IDENTITY")
        for name in UPSTREAMS:
            self.admin.execute(
                "INSERT INTO upstreams (name, owner, state, drain, room, tasks, changed)"
                " VALUES (%s, 0, 'up', 0, 0, 0, now())",
                (name,),
            )

    def teardown(self) -> None:
        # First of all: whoever is closed may wait for a lock that a frozen one holds.
        for process in self.processes:
            if process.frozen is not None:
                process.frozen.thaw()
        for process in self.processes:
            process.engine.close()
            process.disconnect()
        self.admin.close()

    def pick(self, number: int, *, awake: bool = True) -> Process | None:
        found = [one for one in self.processes if not (awake and one.frozen)]
        return found[number % len(found)] if found else None

    def owner(self, upstream: str) -> Process | None:
        """Return the live owner of an OpenCode."""
        owner = self.owners[upstream]
        return None if owner is None or owner.gone else owner

    # What replicas do

    @rule(name=st.sampled_from(NAMES))
    def register(self, name: str) -> None:
        """Start a replica; an earlier one of the same name is declared gone."""
        namesakes = [one for one in self.processes if one.name == name]
        if any(one.frozen for one in namesakes) or len(self.processes) > 5:
            return  # it would wait until the transaction is ended
        engine = make_engine(self.url, Replica(name, 60.0))
        engine.open()
        self.made += 1
        for one in namesakes:
            one.gone = True
        self.processes.append(Process(f"{name} {self.made}", name, engine))
        self.connect(len(self.processes) - 1)

    @precondition(lambda self: self.processes)
    @rule(number=index, upstream=st.sampled_from([*UPSTREAMS]))
    def write(self, number: int, upstream: str) -> None:
        """Write to a log as somebody who believes to be the owner."""
        process = self.pick(number)
        if process is None or upstream not in process.owns:
            return
        seq = len(self.logs[upstream]) + 1

        result = process.write(lambda connection: append(connection, process, upstream, seq))

        self.committed(process, result, upstream)

    def committed(self, process: Process, result: WriteResult, upstream: str | None = None) -> None:
        """Check that a transaction of a live replica took effect, and no other did."""
        assert (result.error is None) == (not process.gone), (process, result.error)
        if process.gone:
            assert process.engine.fenced is not None
            return
        process.commits += 1
        if upstream is not None:
            self.logs[upstream].append(process.id)

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def beat(self, number: int) -> None:
        if process := self.pick(number):
            self.committed(process, process.write(lambda _: None))

    @precondition(lambda self: self.processes)
    @rule(number=index, upstream=st.sampled_from([*UPSTREAMS]))
    def freeze(self, number: int, upstream: str) -> None:
        """Stop inside of a transaction."""
        process = self.pick(number)
        if process is None or process.gone or self.owner(upstream) is not process:
            return
        process.frozen = Frozen(process, upstream, len(self.logs[upstream]) + 1)

    @precondition(lambda self: any(one.frozen for one in self.processes))
    @rule()
    def thaw(self) -> None:
        process = next(one for one in self.processes if one.frozen)
        frozen, process.frozen = process.frozen, None
        assert frozen is not None
        self.committed(process, frozen.thaw(), frozen.upstream)

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def look(self, number: int) -> None:
        """Note how often the others have committed, and let more than a lease pass."""
        if process := self.pick(number):
            process.looked = {one: one.commits for one in self.processes if one is not process}

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def connect(self, number: int) -> None:
        """Take the lock of a replica by a connection of its own, if it has none."""
        process = self.pick(number, awake=False)
        if process is not None and process.lock is None:
            process.lock = psycopg.connect(self.url, autocommit=True)
            process.lock.execute(TAKE_LOCK, (str(process.no),))

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def disconnect(self, number: int) -> None:
        """Break the connection with the lock; the replica itself may go on."""
        process = self.pick(number, awake=False)
        if process is None or process.lock is None:
            return
        backend = process.lock.info.backend_pid
        process.disconnect()
        left = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        while self.admin.execute(left, (backend,)).fetchone() != (0,):
            pass

    @precondition(lambda self: self.processes)
    @rule(number=index, by_lock=st.booleans(), meanwhile=st.none() | index)
    def declare_gone(
        self, number: int, by_lock: bool = False, meanwhile: int | None = None
    ) -> None:
        """Declare those gone that have not committed since this one looked.

        ``meanwhile`` has it look now, and another one commit something after that.
        """
        process = self.pick(number)
        if process is None:
            return
        if meanwhile is not None:
            self.look(number)
            self.beat(meanwhile)
        others = [one for one in self.processes if one is not process and not one.gone]
        counted = {one.no: process.looked[one] for one in others if one in process.looked}
        if by_lock:
            result = process.write(
                lambda c: replicas.declare_gone_if_unlocked(c, process.no, counted)
            )
        else:
            result = process.write(lambda c: replicas.declare_gone(c, counted))
        self.committed(process, result)
        if result.error is None:
            gone = process.silent(others)
            if by_lock:
                gone = [one for one in gone if not self.locked(one) and self.locked(process)]
            assert sorted(result.value) == sorted(one.no for one in gone)
            for one in gone:
                one.gone = True

    def locked(self, process: Process) -> bool:
        """Whether the lock of a number is held; a process that was lost may have had it before."""
        return any(one.no == process.no and one.lock for one in self.processes)

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def take(self, number: int) -> None:
        """Become the owner of everything that has no live owner."""
        process = self.pick(number)
        if process is None:
            return
        free = {name: self.last_owners[name] for name in UPSTREAMS if self.owner(name) is None}
        result = process.write(
            lambda connection: replicas.become_owner(connection, process.no, [*UPSTREAMS])
        )
        self.committed(process, result)
        if result.error is None:
            assert result.value == free
            for name in free:
                self.owners[name], self.last_owners[name] = process, LastOwner.GONE
                process.owns.add(name)

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def hand_over(self, number: int) -> None:
        process = self.pick(number)
        if process is None or not process.owns:
            return
        result = process.write(
            lambda connection: replicas.hand_over(connection, process.no, [*process.owns])
        )
        self.committed(process, result)
        if result.error is None:
            for name in process.owns:
                self.owners[name], self.last_owners[name] = None, LastOwner.HANDED_OVER
        process.owns = set()

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def stop(self, number: int) -> None:
        if process := self.pick(number):
            process.engine.close()
            process.disconnect()
            self.processes.remove(process)
            process.gone = True

    @precondition(lambda self: self.processes)
    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        """Fail over to a server that lacks the newest replica; a new one gets its number."""
        process = self.processes[-1]
        if process.frozen or process.gone:
            return
        # Later numbers were given to replicas that have stopped.
        self.admin.execute("DELETE FROM replicas WHERE no >= %s", (process.no,))
        self.admin.execute("UPDATE upstreams SET owner = 0 WHERE owner >= %s", (process.no,))
        self.admin.execute(
            "SELECT setval(pg_get_serial_sequence('replicas', 'no'), %s, false)", (process.no,)
        )
        for upstream, owner in self.owners.items():
            if owner is not None and owner.no >= process.no:
                self.last_owners[upstream] = LastOwner.NONE
            if owner is process:
                self.owners[upstream] = None
        process.gone = True
        self.register(name)

    # What has to hold after each step

    @invariant()
    def logs_are_those_of_their_owners(self) -> None:
        """Nobody who was declared gone has written, and no number is missing or given twice."""
        found: dict[str, list[str]] = {}
        for name, task in UPSTREAMS.items():
            rows = self.admin.execute(
                "SELECT first_seq, data FROM entries WHERE task_no = %s ORDER BY 1", (task,)
            ).fetchall()
            assert [row[0] for row in rows] == [*range(1, len(rows) + 1)]
            found[name] = [bytes(row[1]).decode() for row in rows]
        assert found == self.logs

    @invariant()
    def each_has_at_most_one_live_owner(self) -> None:
        rows = self.admin.execute(
            "SELECT u.name, r.key FROM upstreams u JOIN replicas r ON r.no = u.owner"
            " WHERE r.gone IS NULL"
        ).fetchall()
        live = {name: owner for name in UPSTREAMS if (owner := self.owner(name))}
        assert {name for name, _ in rows} == {*live}
        assert len({key for _, key in rows}) == len({*live.values()})


@contextmanager
def closing_machine(kind: type[Replicas]) -> Generator[Replicas]:
    machine = kind()
    machine.empty()
    try:
        yield machine
    finally:
        machine.teardown()


@pytest.fixture
def replicas_on_postgres(tmp_path: Path) -> type[Replicas]:
    with stores.using("postgresql"):
        url = stores.url(tmp_path)
    engine = make_engine(url)
    engine.open()
    engine.close()
    # In the model nobody waits for a lock. A frozen transaction lasts as long as the model says,
    # however slow the machine is.
    waits = quote(" -c lock_timeout=1s -c idle_in_transaction_session_timeout=0")
    Replicas.url = url + waits
    return Replicas


@pytest.mark.requirement("I18")
@pytest.mark.requirement("I19")
@pytest.mark.requirement("I20")
def test_replicas_do_what_they_may_and_nothing_else(
    replicas_on_postgres: type[Replicas],
) -> None:
    run_state_machine_as_test(
        replicas_on_postgres,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            print_blob=True,
            # A failing run of 20 steps can be read as it is; to shorten it takes minutes.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.requirement("I18")
def test_replica_that_was_declared_gone_writes_nothing(
    replicas_on_postgres: type[Replicas],
) -> None:
    with closing_machine(replicas_on_postgres) as machine:
        machine.register("one")
        machine.take(0)
        machine.write(0, "x")
        machine.register("two")
        machine.look(1)
        machine.declare_gone(1)
        machine.take(1)

        machine.write(0, "x")
        machine.write(1, "x")

        machine.logs_are_those_of_their_owners()


@pytest.mark.requirement("I18")
def test_replica_whose_number_was_given_again_writes_nothing(
    replicas_on_postgres: type[Replicas],
) -> None:
    with closing_machine(replicas_on_postgres) as machine:
        machine.register("one")
        machine.take(0)
        machine.lose("two")
        machine.take(1)

        machine.write(0, "x")
        machine.write(1, "x")

        machine.logs_are_those_of_their_owners()


@pytest.mark.requirement("I18")
def test_replica_with_a_lock_is_not_taken_for_ended_and_one_without_writes_nothing(
    replicas_on_postgres: type[Replicas],
) -> None:
    with closing_machine(replicas_on_postgres) as machine:
        machine.register("one")
        machine.take(0)
        machine.register("two")
        machine.look(1)
        machine.declare_gone(1, by_lock=True)
        machine.disconnect(0)
        machine.disconnect(1)
        machine.declare_gone(1, by_lock=True)
        machine.connect(1)
        machine.declare_gone(1, by_lock=True, meanwhile=0)
        before = machine.processes[0].gone
        machine.look(1)
        machine.declare_gone(1, by_lock=True)
        machine.take(1)

        machine.write(0, "x")
        machine.write(1, "x")

        assert (before, machine.processes[0].gone) == (False, True)
        machine.logs_are_those_of_their_owners()
