"""The systems under test: how each is installed, started, watched and stopped.

``bench.scenarios`` uses them through ``Running``. Every system gets an upstream of its own, a
state directory of its own and a loopback port; its figures come from ``/proc`` and cover the whole
process tree. Limits that are only configuration are lifted, for the existing adapter as for ours.
"""

import atexit
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tests.support.postgres import PostgresServer

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / "bench" / ".env"
ADAPTER = "opencode-a2a==1.4.0"
TOKEN = "bench-token-of-no-value"  # noqa: S105  it guards a loopback port for a few seconds
CARD = "/.well-known/agent-card.json"
START_SECONDS = 30.0
BEFORE = "BENCH_BEFORE"
"""The variable that names the program of an earlier commit, to compare with."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a system runs."""

    port: int
    upstream: int
    state: Path

    @property
    def upstream_url(self) -> str:
        return f"http://127.0.0.1:{self.upstream}"


@dataclass(frozen=True, slots=True)
class System:
    name: str
    label: str
    command: Callable[[Place], list[str]]
    settings: Callable[[Place], dict[str, str]]
    database: str | None = None
    """The file of its database."""
    postgres: bool = False
    replicas: int = 1
    """Processes that serve it. The first runs the upstream; clients talk to the last."""


def _python(environment: str) -> str:
    return str(ENVIRONMENTS / environment / "bin" / "python")


def _ours(place: Place) -> dict[str, str]:
    return {
        "A2A_HOST": "127.0.0.1",
        "A2A_PORT": str(place.port),
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(place.state),
        "A2A_TASK_STORE_DATABASE_URL": f"sqlite:///{place.state}/ours.db",
        "A2A_RATE_LIMIT_ENABLED": "false",
        "A2A_MAX_TASKS_PER_PRINCIPAL": "5000",
        "A2A_MAX_OPEN_TASKS": "5000",
        "A2A_STREAM_MAX_BYTES": "0",
        "A2A_STREAM_MAX_DURATION_SECONDS": "0",
        "A2A_STREAM_IDLE_TIMEOUT_SECONDS": "0",
        "OPENCODE_BASE_URL": place.upstream_url,
        "OPENCODE_MAX_CONCURRENT_REQUESTS": "0",
        "OPENCODE_MAX_CONCURRENT_STREAMS": "0",
    }


def _postgres(place: Place) -> dict[str, str]:
    entry = {"name": "main", "url": place.upstream_url, "shared": True}
    ours = _ours(place)
    del ours["OPENCODE_BASE_URL"]
    return {
        **ours,
        "A2A_REPLICA_NAME": f"bench-{place.port}",
        "A2A_TASK_STORE_DATABASE_URL": database().url(place.state.name.replace("-", "_")),
        "OPENCODE_UPSTREAMS": json.dumps([entry]),
    }


@cache
def database() -> PostgresServer:
    """Return the server of this run; it writes to the disk as one in production does."""
    server = PostgresServer(settings={"fsync": "on", "full_page_writes": "on"})
    server.__enter__()
    atexit.register(server.__exit__)
    return server


def _adapter(place: Place) -> dict[str, str]:
    credential = {"scheme": "bearer", "principal": "bench", "token": TOKEN}
    return {
        "A2A_HOST": "127.0.0.1",
        "A2A_PORT": str(place.port),
        "A2A_STATIC_AUTH_CREDENTIALS": json.dumps([credential]),
        "A2A_TASK_STORE_DATABASE_URL": f"sqlite+aiosqlite:///{place.state}/adapter.db",
        "A2A_RATE_LIMIT_ENABLED": "false",
        "A2A_STREAM_MAX_BYTES": "0",
        "A2A_STREAM_MAX_DURATION_SECONDS": "0",
        "A2A_STREAM_IDLE_TIMEOUT_SECONDS": "0",
        "OPENCODE_BASE_URL": place.upstream_url,
        "OPENCODE_MAX_CONCURRENT_REQUESTS": "0",
        "OPENCODE_MAX_CONCURRENT_STREAMS": "0",
    }


def _nothing(place: Place) -> dict[str, str]:
    return {}


SYSTEMS = {
    system.name: system
    for system in (
        System(
            "ours",
            "this project",
            lambda place: [str(Path(sys.executable).parent / "opencode-a2a"), "serve"],
            _ours,
            "ours.db",
        ),
        System(
            "postgres",
            "this project, PostgreSQL",
            lambda place: [str(Path(sys.executable).parent / "opencode-a2a"), "serve"],
            _postgres,
            postgres=True,
        ),
        System(
            "other",
            "this project, on another replica than the one that runs the turns",
            lambda place: [str(Path(sys.executable).parent / "opencode-a2a"), "serve"],
            _postgres,
            postgres=True,
            replicas=2,
        ),
        System(
            "before",
            "an earlier state of this project",
            lambda place: [os.environ[BEFORE], "serve"],
            _ours,
            "ours.db",
        ),
        System(
            "adapter",
            "existing adapter 1.4.0",
            lambda place: [str(install_adapter()), "serve"],
            _adapter,
            "adapter.db",
        ),
        System(
            "sdk",
            "bare SDK, SQLite",
            lambda place: [
                *(_python("sdk"), "-m", "bench.sdk_server"),
                *(str(place.port), str(place.upstream), str(place.state / "sdk.db")),
            ],
            _nothing,
            "sdk.db",
        ),
        System(
            "relay",
            "minimal relay",
            lambda place: [
                *(sys.executable, "-m", "bench.relay", str(place.port), str(place.upstream))
            ],
            _nothing,
        ),
        System("direct", "no server", lambda place: [], _nothing),
    )
}


def install() -> None:
    """Create the environments of the systems that do not share ours, once."""
    sdk = f"a2a-sdk[http-server,sqlite]=={version('a2a-sdk')}"
    _environment("sdk", [sdk, "uvicorn", "uvloop", "httptools"])
    install_adapter()


def install_adapter() -> Path:
    """Create the environment of the existing adapter, once; return its program."""
    _environment("adapter", [ADAPTER])
    return ENVIRONMENTS / "adapter" / "bin" / "opencode-a2a"


def _environment(name: str, packages: list[str]) -> None:
    home = ENVIRONMENTS / name
    if (home / "complete").exists():
        return
    shutil.rmtree(home, ignore_errors=True)
    _uv("venv", "--python", f"{sys.version_info.major}.{sys.version_info.minor}", str(home))
    error = _install(name, packages)
    note = ""
    if error:
        note = _relax(name, packages, error)
    (home / "complete").write_text(note)


def _install(name: str, packages: list[str], *options: str) -> str:
    """Install packages into an environment; return why that failed, or nothing."""
    done = _uv("pip", "install", "--python", _python(name), *options, *packages)
    return done.stderr if done.returncode else ""


def _uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)  # noqa: S603  our own words


def installed(name: str) -> list[str]:
    """Return the packages of an environment, with their versions."""
    return _uv("pip", "freeze", "--python", _python(name)).stdout.split()


def _relax(name: str, packages: list[str], reason: str) -> str:
    """Install with any certifi, if that alone stood in the way; return what is to be disclosed.

    An index that lags behind may lack the newest certificate bundle that a package asks for. The
    bench speaks plain HTTP on loopback, so the bundle is never read. Nothing else is relaxed.
    """
    override = ENVIRONMENTS / name / "override.txt"
    override.write_text("certifi\n")
    error = reason if "certifi" not in reason else ""
    error = error or _install(name, packages, "--override", str(override))
    if error:
        raise SystemExit(f"bench/.env/{name} cannot be installed\n{error}")
    listed = installed(name)
    found = next((line for line in listed if line.startswith("certifi==")), "no certifi")
    return (
        f"`{packages[0]}` is not installed exactly as published: the package index had no certifi "
        f"as new as it requires, so `{found}` stands in. It only holds TLS certificates, and the "
        "bench uses plain HTTP on loopback."
    )


def deviations() -> list[str]:
    notes = [(ENVIRONMENTS / name / "complete").read_text() for name in ("adapter", "sdk")]
    return [note for note in notes if note]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a process tree has used so far, and holds now."""

    cpu: float
    """Seconds."""
    resident: int
    written: int

    @staticmethod
    def of(leader: int) -> "Figures":
        cpu = resident = written = 0
        for pid, stat in _processes():
            # The session, which the leader of the tree opened; PostgreSQL's own open further ones.
            if leader not in (int(stat[3]), int(stat[1])):
                continue
            cpu += sum(int(ticks) for ticks in stat[11:15])
            resident += int(stat[21]) * os.sysconf("SC_PAGE_SIZE")
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                written += int(dict(line.split(": ") for line in lines)["write_bytes"])
        return Figures(cpu / os.sysconf("SC_CLK_TCK"), resident, written)


def _processes() -> Iterator[tuple[str, list[str]]]:
    """Every process with the fields of its stat line that follow the command."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            yield pid, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def environment() -> dict[str, str]:
    """Return the variables of every process of the bench: nobody's settings, everybody's bytecode.

    Where Python is told not to write bytecode, a start would compile all that it imports, which is
    no property of the system. The cache is the bench's own.
    """
    foreign = ("A2A_", "OPENCODE_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    cache = str(ENVIRONMENTS / "bytecode")
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Running:
    """A started system with its upstream; a context manager."""

    def __init__(self, system: System, state: Path | None = None) -> None:
        self.system = system
        self.state = state or Path(tempfile.mkdtemp(prefix="bench-"))
        self.keeps_state = state is not None
        self.start_seconds = 0.0
        self.server: subprocess.Popen[bytes] | None = None
        self.first: subprocess.Popen[bytes] | None = None
        """The replica that runs the upstream, where clients talk to another one."""
        self.first_port = 0
        self.upstream = self._spawn([sys.executable, "-m", "bench.upstream"])
        try:
            if self.upstream.stdout is None:
                raise RuntimeError("the upstream has no output")
            self.place = Place(free_port(), int(self.upstream.stdout.readline()), self.state)
            command = system.command(self.place)
            if system.replicas > 1:
                self._start(command)
                self.first, self.first_port = self.server, self.place.port
                self.place = replace(self.place, port=free_port())
            if command:
                self._start(command)
        except BaseException:  # nobody else can stop what a constructor has started
            self.__exit__()
            raise

    @property
    def port(self) -> int:
        return self.place.port if self.server else self.place.upstream

    def _start(self, command: list[str]) -> None:
        started = time.monotonic()
        self.server = self._spawn(command, self.system.settings(self.place))
        while not self._answers():
            if self.server.poll() is not None or time.monotonic() - started > START_SECONDS:
                raise RuntimeError(f"{self.system.label} did not start: {self.output()}")
            time.sleep(0.002)
        self.start_seconds = time.monotonic() - started

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url(CARD), timeout=5) as response:  # noqa: S310
                return response.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _spawn(
        self, command: list[str], settings: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.state / "output.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603  commands of this module
                command,
                cwd=ROOT if settings is None or not settings else self.state,
                env={**environment(), **(settings or {})},
                stdout=subprocess.PIPE if settings is None else log,
                stderr=log,
                start_new_session=True,
            )

    def output(self) -> str:
        return (self.state / "output.log").read_text()[-2000:]

    def figures(self) -> Figures:
        return Figures.of(self.server.pid if self.server else self.upstream.pid)

    def others(self) -> dict[str, Figures]:
        """Return what the processes beside the server have used: database and running replica."""
        found: dict[str, Figures] = {}
        if self.system.postgres:
            found["database"] = Figures.of(database().pid)
        if self.first is not None:
            found["running"] = Figures.of(self.first.pid)
        return found

    def stop(self) -> None:
        for process in (self.server, self.first, self.upstream):
            if process and process.poll() is None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        if not self.keeps_state:
            shutil.rmtree(self.state, ignore_errors=True)
