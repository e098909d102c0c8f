"""Ownership and fence as a state machine, run against the statements that PostgreSQL gets.

Replicas register, take OpenCodes, write logs, freeze inside of a transaction, are declared gone, go
on as if nothing had happened, hand over, stop, and are lost by a failover after which another one
gets their number. A model says what each of them may do; the tables have to agree after each step.
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
from opencode_a2a.store.tasks import Segment
from tests.support import stores

LEASE = 60.0
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
    silent: bool = False
    """Its last commit was more than a lease ago."""
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
        self.clean: dict[str, bool] = dict.fromkeys(UPSTREAMS, False)
        """Whether the last owner handed it over."""
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
        engine = make_engine(self.url, Replica(name, LEASE))
        engine.open()
        self.made += 1
        for one in namesakes:
            one.gone = True
        self.processes.append(Process(f"{name} {self.made}", name, engine))

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
        process.silent = False
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
    def fall_silent(self, number: int) -> None:
        """Let more than a lease pass since the last commit of a live replica."""
        process = self.pick(number)
        if process is None or process.gone:
            return  # its number may be that of another by now
        process.silent = True
        self.admin.execute(
            "UPDATE replicas SET seen = seen - interval '1 hour' WHERE no = %s", (process.no,)
        )

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def declare_gone(self, number: int) -> None:
        process = self.pick(number)
        if process is None:
            return
        others = [one for one in self.processes if one is not process and not one.gone]
        result = process.write(
            lambda connection: replicas.declare_gone(connection, [one.no for one in others], LEASE)
        )
        self.committed(process, result)
        if result.error is None:
            gone = [one for one in others if one.silent and not one.frozen]
            assert sorted(result.value) == sorted(one.no for one in gone)
            for one in gone:
                one.gone = True

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def take(self, number: int) -> None:
        """Become the owner of everything that has no live owner."""
        process = self.pick(number)
        if process is None:
            return
        free = {name: self.clean[name] for name in UPSTREAMS if self.owner(name) is None}
        result = process.write(
            lambda connection: replicas.become_owner(connection, process.no, [*UPSTREAMS])
        )
        self.committed(process, result)
        if result.error is None:
            assert result.value == free
            for name in free:
                self.owners[name], self.clean[name] = process, False
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
                self.owners[name], self.clean[name] = None, True
        process.owns = set()

    @precondition(lambda self: self.processes)
    @rule(number=index)
    def stop(self, number: int) -> None:
        if process := self.pick(number):
            process.engine.close()
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
        machine.fall_silent(0)
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
