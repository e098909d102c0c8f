"""A cluster of processes (three replicas, four played OpenCodes, a PostgreSQL), and its faults.

The replicas reach the database through relays, and the OpenCodes through lines, which delay, stall
and cut connections. A longer run has a standby of the database, which is promoted. One replica may
be of an earlier commit. Triggers in the database record which replica writes what, for the checks
after the run.
"""

import asyncio
import io
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import orjson

from tests.chaos.clocks import Pulse, WrongClock
from tests.chaos.history import (
    AbortAsked,
    Ended,
    Fault,
    History,
    Moved,
    Owned,
    Prompted,
    Registered,
    Replied,
    StoredTask,
    Unexpected,
    Written,
)
from tests.chaos.opencode import OpenCodeProcess
from tests.support.forked import ForkedProgram
from tests.support.forward import Forwarder, Line
from tests.support.postgres import PostgresServer
from tests.support.program import Program
from tests.support.relay import Cut, Relay
from tests.support.service import TOKEN

REPLICAS, OPENCODES = 3, 4
LEASE_SECONDS = 4.0
READ_SECONDS = 6.0
"""Seconds of silence after which a client gives a connection up; comments come every second."""
POLL_SECONDS = 0.1
"""Seconds between two questions whether a replica is ready; nothing announces it."""
UP_SECONDS = 240.0
"""Seconds after which a cluster that does not start ends the run."""
SCHEMA = "chaos"
ROOT = Path(__file__).parents[2]
REPLICA_FAULTS = {
    "kill": 4,
    "stop": 3,
    "term": 3,
    "cut": 5,
    "partition": 2,
    "lag": 2,
    "stall": 2,
    "clock": 2,
}
"""What can happen to a replica, and to its connections to the database, and how often."""
OPENCODE_FAULTS = {"opencode": 2, "line lag": 2, "line stall": 2, "line cut": 2}
"""What can happen to an OpenCode, and to all connections to it."""
DATABASE_FAULTS = {"database": 1, "failover": 1}
MOST_DELAY, MOST_LOSS = 0.15, 0.1
"""Seconds one way, and the share of pieces that are lost at first."""
CLOCK_STEPS = (-86_400.0, -40.0, -3.0, 3.0, 40.0, 86_400.0)
ENDINGS = {0, 1, 2, -signal.SIGKILL}
"""Exit statuses of a replica: stopped, fenced, no database at its start, killed."""

_TRIGGERS = """
CREATE TABLE chaos_log (
    no bigserial PRIMARY KEY, at double precision DEFAULT extract(epoch FROM clock_timestamp()),
    kind text NOT NULL, task_no bigint, first_seq int, last_seq int, writer bigint,
    writer_gone bool, owner bigint, owner_lives bool, what text);

CREATE FUNCTION chaos_fence() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM set_config('chaos.writer', NEW.no::text, true); RETURN NULL; END $$;
CREATE TRIGGER chaos_fence AFTER UPDATE ON replicas FOR EACH ROW
    WHEN (NEW.commits <> OLD.commits) EXECUTE FUNCTION chaos_fence();

CREATE FUNCTION chaos_replica() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = chaos AS $$ BEGIN
    PERFORM set_config('chaos.writer', NEW.no::text, true);
    INSERT INTO chaos_log (kind, owner, what) VALUES ('replica', NEW.no, NEW.name);
    RETURN NULL; END $$;
CREATE TRIGGER chaos_replica AFTER INSERT ON replicas FOR EACH ROW
    EXECUTE FUNCTION chaos_replica();
INSERT INTO chaos_log (kind, owner, what) SELECT 'replica', no, name FROM replicas;

CREATE FUNCTION chaos_entry() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = chaos AS $$
DECLARE me bigint := nullif(current_setting('chaos.writer', true), '');
    runs bigint := (SELECT u.owner FROM upstreams u JOIN tasks t ON t.upstream = u.name
        WHERE t.no = NEW.task_no);
BEGIN
    INSERT INTO chaos_log (kind, task_no, first_seq, last_seq, writer, writer_gone, owner,
        owner_lives) VALUES ('entries', NEW.task_no, NEW.first_seq, NEW.last_seq, me,
        coalesce((SELECT gone IS NOT NULL FROM replicas WHERE no = me), false), runs,
        coalesce((SELECT gone IS NULL FROM replicas WHERE no = runs), false));
    RETURN NULL; END $$;
CREATE TRIGGER chaos_entry AFTER INSERT ON entries FOR EACH ROW EXECUTE FUNCTION chaos_entry();

CREATE FUNCTION chaos_state() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = chaos AS $$ BEGIN
    INSERT INTO chaos_log (kind, task_no, what) VALUES ('state', NEW.no, NEW.state);
    RETURN NULL; END $$;
CREATE TRIGGER chaos_added AFTER INSERT ON tasks FOR EACH ROW EXECUTE FUNCTION chaos_state();
CREATE TRIGGER chaos_moved AFTER UPDATE OF state ON tasks FOR EACH ROW
    EXECUTE FUNCTION chaos_state();

CREATE FUNCTION chaos_owner() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = chaos AS $$ BEGIN
    INSERT INTO chaos_log (kind, owner, what) VALUES ('owner', NEW.owner, NEW.name);
    RETURN NULL; END $$;
CREATE TRIGGER chaos_taken AFTER INSERT ON upstreams FOR EACH ROW EXECUTE FUNCTION chaos_owner();
CREATE TRIGGER chaos_owner AFTER UPDATE OF owner ON upstreams FOR EACH ROW
    WHEN (NEW.owner IS DISTINCT FROM OLD.owner) EXECUTE FUNCTION chaos_owner();
INSERT INTO chaos_log (kind, owner, what) SELECT 'owner', owner, name FROM upstreams;
"""


class Replica:
    """A replica that is restarted whenever it ends, with an HTTP client for it."""

    def __init__(self, name: str, program: Program, relay: Relay, clock: WrongClock) -> None:
        self.name = name
        self.program = program
        self.relay = relay
        self.clock = clock
        self.up = asyncio.Event()
        self.memory = 0.0
        """Megabytes after the first start."""
        self.endings: list[int] = []
        self.http = httpx2.AsyncClient(
            base_url=program.url,
            headers={"Authorization": f"Bearer {TOKEN}", "A2A-Version": "1.0"},
            timeout=httpx2.Timeout(READ_SECONDS, connect=3.0, pool=30.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
            trust_env=False,
        )

    async def supervise(self, history: History, rng: Random) -> None:
        while True:
            since = len(self.program.lines)
            await self.program.spawn()
            with suppress(AssertionError):  # it has ended
                await self._started(since)
                self.up.set()
            status = await self.program.ended(patience=None)
            self.up.clear()
            self.endings.append(status)
            printed = self.program.lines[since:]
            now = time.time()
            for text, task in tracebacks(printed):
                history.unexpected.append(Unexpected(now, self.name, text, task))
            if status not in ENDINGS:
                text = "\n".join([f"ended with status {status}:", *printed[-20:]])
                history.unexpected.append(Unexpected(now, self.name, text))
            await asyncio.sleep(rng.uniform(0.1, 1.5))

    async def _started(self, since: int) -> None:
        """Wait until it has started, however slow the machine is."""
        while True:
            with suppress(TimeoutError):
                await self.program.record("started", since)
                return

    async def ready(self) -> bool:
        """Wait until it listens, and say whether it is ready, as a load balancer would ask."""
        await self.up.wait()
        with suppress(httpx2.HTTPError):
            return (await self.http.get("/readyz")).status_code == 200
        return False

    def resident(self) -> float:
        """Return the megabytes of memory that it holds now."""
        # Linux has /proc but, in a small image, perhaps no `ps`; macOS has only `ps`.
        if (status := Path(f"/proc/{self.program.pid}/status")).exists():
            lines = status.read_text().splitlines()
            kilobytes = next(line for line in lines if line.startswith("VmRSS:")).split()[1]
        else:
            command = ["ps", "-o", "rss=", "-p", str(self.program.pid)]
            kilobytes = subprocess.check_output(command, text=True)  # noqa: S603 - a fixed command
        return int(kilobytes) / 1024


def tracebacks(printed: list[str]) -> list[tuple[str, str | None]]:
    """Return every traceback in the output of a program, whole, and the task it names.

    One that was logged is a line of JSON; one that the interpreter printed goes on until the next
    log record, since exceptions may be chained and their texts may have several lines.
    """
    found: list[tuple[str, str | None]] = []
    plain = False
    for line in printed:
        if line.startswith("{"):
            plain = False
            if "Traceback" in line:
                record: dict[str, Any] = orjson.loads(line)
                text = "\n".join(f"{key}: {value}" for key, value in record.items())
                found.append((text, record.get("task_id")))
        elif plain:
            found[-1] = f"{found[-1][0]}\n{line}", None
        elif "Traceback" in line:
            found.append((line, None))
            plain = True
    return found


class Cluster:
    def __init__(
        self,
        history: History,
        directory: Path,
        *,
        standby: bool = False,
        earlier: str | None = None,
    ) -> None:
        """``earlier`` is the commit whose program the first replica runs."""
        self.history = history
        self.directory = directory
        self._pulse = Pulse(history, directory)
        self._with_standby = standby
        self._standby: PostgresServer | None = None
        self._earlier = earlier
        self.workspace = directory / "workspace"
        self.workspace.mkdir()
        self.server = PostgresServer()
        self.replicas: list[Replica] = []
        self.opencodes = [
            OpenCodeProcess(f"oc-{number}", directory, self.workspace)
            for number in range(1, OPENCODES + 1)
        ]
        self.lines: dict[str, list[Line]] = {one.name: [] for one in self.opencodes}
        """The connections of all replicas to each OpenCode."""
        self._busy: set[str] = set()
        """The names of the parts that a fault is hitting now."""
        self.waits: set[asyncio.Task[None]] = set()
        self.tormented = False
        """Whether faults are being caused."""

    @asynccontextmanager
    async def running(self, rng: Random) -> AsyncGenerator["Cluster"]:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._pulse)
            await asyncio.to_thread(self.server.__enter__)
            stack.callback(self.server.__exit__)
            if self._with_standby:
                self._standby = await asyncio.to_thread(self.server.standby)
                stack.callback(self._standby.__exit__)
            for opencode in self.opencodes:
                opencode.start()
                stack.callback(opencode.kill)
            url = self.server.url(SCHEMA)
            for number in range(1, REPLICAS + 1):
                relay = await stack.enter_async_context(Relay(self.server.port))
                name, lines = f"r{number}", dict[str, str]()
                for opencode in self.opencodes:
                    line = await stack.enter_async_context(Line("127.0.0.1", opencode.port))
                    self.lines[opencode.name].append(line)
                    lines[opencode.name] = f"http://127.0.0.1:{line.port}"
                clock = WrongClock(self.directory / f"{name}.clock")
                variables = self._variables(name, relay.url(url), lines)
                if number == 1 and self._earlier is not None:
                    sources = await asyncio.to_thread(self._checked_out, self._earlier)
                    program = Program({**variables, "PYTHONPATH": str(sources)})
                    self.history.earlier = name
                else:
                    program = ForkedProgram(variables)
                    program.prepare = clock.prepare
                self.replicas.append(Replica(name, program, relay, clock))
            supervised: list[asyncio.Task[None]] = []
            stack.push_async_callback(self._end, supervised)
            # The first one creates the tables, so that the triggers see the others start.
            for place, replica in enumerate(self.replicas):
                task = asyncio.create_task(replica.supervise(self.history, Random(rng.random())))  # noqa: S311 - a game
                supervised.append(task)
                if place == 0:
                    await self._up([replica])
                    with self.server.admin() as admin:
                        admin.execute("SET search_path = chaos")
                        admin.execute(_TRIGGERS)
            await self.all_up()
            for replica in self.replicas:
                replica.memory = replica.resident()
            yield self

    def _checked_out(self, commit: str) -> Path:
        """Return the sources of an earlier commit, which the clone has to have."""
        command = ["git", "archive", commit, "src"]
        packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # noqa: S603 - our own
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(self.directory / "earlier", filter="data")
        return self.directory / "earlier" / "src"

    def allowed(self, seconds: float, since: float) -> float:
        """Return how long something may take that began then; see ``History.allowed``."""
        self._pulse.read()
        return self.history.allowed(seconds, since, time.time())

    def _variables(self, name: str, database: str, lines: dict[str, str]) -> dict[str, str]:
        entries = [{"name": one, "url": url, "shared": True} for one, url in lines.items()]
        return {
            "A2A_BEARER_TOKEN": TOKEN,
            "A2A_STATE_DIR": str(self.directory / name),
            "A2A_TASK_STORE_DATABASE_URL": database,
            "A2A_REPLICA_NAME": name,
            "A2A_REPLICA_LEASE_SECONDS": str(LEASE_SECONDS),
            "A2A_RATE_LIMIT_ENABLED": "false",
            "A2A_STREAM_KEEPALIVE_SECONDS": "1",
            "A2A_SHUTDOWN_GRACE_SECONDS": "3",
            "OPENCODE_UPSTREAMS": orjson.dumps(entries).decode(),
            "OPENCODE_WORKSPACE_ROOT": str(self.workspace),
        }

    async def _end(self, supervised: list[asyncio.Task[None]]) -> None:
        for task in [*supervised, *self.waits]:
            task.cancel()
        await asyncio.gather(*supervised, *self.waits, return_exceptions=True)
        for replica in self.replicas:
            with suppress(ProcessLookupError, AssertionError):
                replica.program.signal(signal.SIGKILL)
                await replica.program.ended()
            await replica.http.aclose()
            await replica.program.http.aclose()

    async def _up(self, replicas: list[Replica]) -> None:
        async with asyncio.timeout(UP_SECONDS):
            for replica in replicas:
                while not await replica.ready():  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(POLL_SECONDS)

    async def all_up(self) -> None:
        """Wait until every replica is ready."""
        await self._up(self.replicas)

    async def connections(self) -> int:
        def count() -> int:
            with self.server.admin() as admin:
                query = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'tester'"
                found = admin.execute(query).fetchone()
                return found[0] if found else 0

        return await asyncio.to_thread(count)

    # Faults

    async def torment(self, rng: Random, seconds: float, *, calm: bool) -> None:
        """Cause one fault after another; some last while the next begins."""
        begin = time.time()
        end, failover = begin + seconds, begin + seconds / 2
        kinds = {**REPLICA_FAULTS, **OPENCODE_FAULTS, "database": DATABASE_FAULTS["database"]}
        count = 0
        self.tormented = True
        while time.time() < end:
            count += 1
            await asyncio.sleep(rng.uniform(0.3, 3.0))
            if calm and count % 8 == 0:
                # Long enough for every task to be taken over while nothing else happens.
                await asyncio.sleep(20)
            kind = rng.choices([*kinds], [*kinds.values()])[0]
            target = rng.choice(self.opencodes if kind in OPENCODE_FAULTS else self.replicas)
            lasting, how = rng.random(), rng.choice(list(Cut))
            if self._standby is not None and time.time() > failover:
                kind = "failover"
            name = "postgresql" if kind in DATABASE_FAULTS else target.name
            if name in self._busy or time.time() >= end:
                continue
            self._busy.add(name)
            work = self._do(kind, name, target, lasting, how)
            task = asyncio.create_task(work)
            self.waits.add(task)
            task.add_done_callback(self.waits.discard)
        await asyncio.gather(*self.waits)
        self.tormented = False

    async def _do(
        self,
        kind: str,
        name: str,
        target: Replica | OpenCodeProcess,
        lasting: float,
        how: Cut,
    ) -> None:
        began = time.time()
        try:
            if kind in DATABASE_FAULTS:
                await self._do_to_database(kind, lasting)
            elif isinstance(target, OpenCodeProcess):
                await self._do_to_opencode(kind, target, lasting)
            else:
                await self._do_to_replica(kind, target, lasting, how)
        finally:
            self._busy.discard(name)
        self.history.faults.append(Fault(began, time.time(), kind, name))

    async def cause(self, kind: str, replica: Replica) -> None:
        """Cause one fault, and wait until it is over."""
        await self._do(kind, replica.name, replica, 0.0, Cut.BEFORE)

    async def _do_to_database(self, kind: str, lasting: float) -> None:
        await asyncio.to_thread(self.server.kill)
        if kind == "database":
            await asyncio.sleep(lasting * 2)
            await asyncio.to_thread(self.server.start)
            return
        assert self._standby is not None
        self.server, self._standby = self._standby, None
        await asyncio.to_thread(self.server.promote)
        for replica in self.replicas:
            replica.relay.lead_to(self.server.port)

    async def _do_to_opencode(self, kind: str, opencode: OpenCodeProcess, lasting: float) -> None:
        if kind == "opencode":
            await asyncio.to_thread(opencode.kill)
            await asyncio.sleep(lasting * 3)
            opencode.start()
            return
        await self._disturb(kind.removeprefix("line "), self.lines[opencode.name], lasting)

    async def _disturb(self, kind: str, connections: Sequence[Forwarder], lasting: float) -> None:
        """Make connections slow, silent or broken, for up to two leases."""
        for one in connections:
            if kind == "lag":
                one.delay, one.loss = lasting * MOST_DELAY, MOST_LOSS
            elif kind == "stall":
                one.passing.clear()
            else:
                one.down = True
                one.break_off()
        await asyncio.sleep(lasting * 2 * LEASE_SECONDS)
        for one in connections:
            one.delay = one.loss = 0.0
            one.passing.set()
            one.down = False

    async def _do_to_replica(self, kind: str, replica: Replica, lasting: float, how: Cut) -> None:
        if kind == "cut":
            replica.relay.cut = how
            await asyncio.sleep(1)
            replica.relay.cut = None
            return
        if kind in ("partition", "lag", "stall"):
            await self._disturb(kind, [replica.relay], lasting)
            return
        if kind == "clock":
            replica.clock.set(CLOCK_STEPS[int(lasting * len(CLOCK_STEPS))])
            await asyncio.sleep(2 * LEASE_SECONDS)
            replica.clock.set(0.0)
            return
        if not replica.up.is_set():
            return
        pid = replica.program.pid
        with suppress(ProcessLookupError):
            if kind == "stop":
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(lasting * 2 * LEASE_SECONDS)
                os.kill(pid, signal.SIGCONT)
                return
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            replica.up.clear()
        await replica.up.wait()

    # Results

    def collect(self) -> None:
        """Read the tables and the journals of the OpenCodes into the history."""
        history = self.history
        with self.server.admin() as admin:
            admin.execute("SET search_path = chaos")
            for at, kind, no, first, last, writer, gone, owner, lives, what in admin.execute(
                "SELECT at, kind, task_no, first_seq, last_seq, writer, writer_gone, owner,"
                " owner_lives, what FROM chaos_log ORDER BY no"
            ):
                match kind:
                    case "entries":
                        history.written.append(
                            Written(at, no, first, last, writer, gone, owner, lives)
                        )
                    case "state":
                        history.moved.append(Moved(at, no, what))
                    case "owner":
                        history.owned.append(Owned(at, what, owner))
                    case _:
                        history.registered.append(Registered(at, owner, what))
            history.tasks = [
                StoredTask(no, task_id, state, upstream)
                for no, task_id, state, upstream in admin.execute(
                    "SELECT no, id, state, upstream FROM tasks ORDER BY no"
                )
            ]
            history.tallies = {
                state: int(n)
                for state, n in admin.execute("SELECT state, sum(n) FROM tallies GROUP BY state")
            }
            waiting = admin.execute(
                "SELECT count(*) FROM mail WHERE at < now() - interval '1 minute'"
            ).fetchone()
        if waiting and waiting[0]:
            text = f"{waiting[0]} calls of a minute ago are left in the table `mail`"
            history.unexpected.append(Unexpected(time.time(), "database", text))
        for opencode in self.opencodes:
            for record in opencode.records():
                if "prompt" in record:
                    history.prompted.append(
                        Prompted(record["at"], opencode.name, **record["prompt"])
                    )
                elif "reply" in record:
                    told = record["reply"]
                    history.replied.append(
                        Replied(
                            record["at"],
                            opencode.name,
                            told["session"],
                            told["request"],
                            told["reply"],
                            told["taken"],
                        )
                    )
                elif "ended" in record:
                    history.ended.append(Ended(record["at"], opencode.name, **record["ended"]))
                elif "abort" in record:
                    history.aborts.append(
                        AbortAsked(record["at"], opencode.name, **record["abort"])
                    )
