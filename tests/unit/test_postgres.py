"""PostgreSQL as the database: what is refused at the start, and who may use it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from opencode_a2a.opencode.managed import free_port
from opencode_a2a.store.database import Database, examine
from opencode_a2a.store.engine import DatabaseError
from tests.support import stores
from tests.support.postgres import PASSWORD, ROLE, PostgresServer
from tests.support.program import run
from tests.support.relay import Relay


@pytest.fixture
def server() -> PostgresServer:
    return stores.server()


@pytest.fixture
def url(tmp_path: Path) -> Generator[str]:
    with stores.using("postgresql"):
        yield stores.url(tmp_path)


def variables(url: str) -> dict[str, str]:
    return {
        "A2A_TASK_STORE_DATABASE_URL": url,
        "A2A_BEARER_TOKEN": "x" * 32,
        "A2A_PORT": str(free_port("127.0.0.1")),
        "HOME": "/nowhere",
    }


async def refusal(url: str) -> str:
    """Return why `serve` does not start, after checking that it is one line and status 2."""
    status, output = await run("serve", **variables(url))
    assert status == 2, output
    [line] = output.splitlines()
    assert PASSWORD not in line
    return line


async def test_a_wrong_password_is_told_without_the_password(url: str) -> None:
    wrong = url.replace("a%20pass", "another%20pass")
    assert wrong != url

    line = await refusal(wrong)

    assert line.endswith(
        f'/postgres: password authentication failed for user "{ROLE}"; check the user name and the '
        "password in A2A_TASK_STORE_DATABASE_URL"
    )
    assert "another" not in line


async def test_a_server_that_is_not_there_is_told_with_the_remedy() -> None:
    line = await refusal("postgresql://somebody@127.0.0.1:1/tasks")

    assert line == (
        "opencode-a2a: cannot use postgresql://somebody@127.0.0.1:1/tasks: connection to server at "
        '"127.0.0.1", port 1 failed: Connection refused; check that it runs, and '
        "A2A_TASK_STORE_DATABASE_URL"
    )


async def test_a_database_that_does_not_exist_is_told_with_the_remedy(url: str) -> None:
    line = await refusal(url.replace("/postgres?", "/missing?"))

    assert line.endswith(
        'database "missing" does not exist; create it, or name another in '
        "A2A_TASK_STORE_DATABASE_URL"
    )


@pytest.mark.parametrize(
    "wrong",
    ["postgresql://some:secret%body@host/db", "postgresql://u:secret@[::1/db"],
)
async def test_a_url_that_cannot_be_read_is_not_repeated(wrong: str) -> None:
    line = await refusal(wrong)

    assert "is not a URL of PostgreSQL" in line
    assert "secret" not in line


async def test_an_unknown_parameter_is_named(url: str) -> None:
    line = await refusal(f"{url}&sslmod=require")

    assert '"sslmod"' in line


async def test_another_kind_of_database_is_refused() -> None:
    line = await refusal("mysql://root:secret@localhost/tasks")

    assert line.startswith("A2A_TASK_STORE_DATABASE_URL: should be a URL of SQLite, such as ")
    assert "postgresql://user@host:5432/database" in line


async def test_a_role_that_may_not_create_tables_is_told_what_to_grant(
    server: PostgresServer, url: str
) -> None:
    with server.admin() as admin:
        schema_name = sql.Identifier(f"closed_{os.getpid()}")
        admin.execute(sql.SQL("CREATE SCHEMA {}").format(schema_name))
        admin.execute(
            sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(schema_name, sql.Identifier(ROLE))
        )
    closed = url.partition("options=")[0] + f"options=-csearch_path%3Dclosed_{os.getpid()}"

    line = await refusal(closed)
    with pytest.raises(DatabaseError, match="GRANT USAGE, CREATE ON SCHEMA"):
        examine(closed)

    assert "permission denied for schema closed_" in line
    assert "GRANT USAGE, CREATE ON SCHEMA" in line


async def test_a_version_below_14_is_refused(server: PostgresServer, url: str) -> None:
    def older(data: bytes) -> bytes:
        return data.replace(b"server_version\x0018.4\x00", b"server_version\x0013.9\x00")

    async with Relay(server.port, back=older) as relay:
        with pytest.raises(DatabaseError) as caught:
            async with Database(url.replace(f":{server.port}/", f":{relay.port}/")):
                pass

    assert str(caught.value).endswith("it is PostgreSQL 13; upgrade it to 14 or later")
    assert caught.value.status == 2


async def test_a_missing_driver_is_told_with_the_command_that_installs_it(url: str) -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None; from opencode_a2a.cli import main; "
        "sys.argv = ['opencode-a2a', 'serve']; main()"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        env=variables(url),
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (
        2,
        "opencode-a2a: PostgreSQL needs a driver that is not installed; install this program with "
        "its extra `postgres`, or run `pip install 'psycopg[binary]'`\n",
    )


async def test_tables_of_another_program_are_left_alone(server: PostgresServer, url: str) -> None:
    with psycopg.connect(url) as other:
        other.execute("CREATE TABLE tasks (id integer)")

    line = await refusal(url)

    assert "the table tasks was not made by this program" in line
    with psycopg.connect(url) as other:
        assert other.execute("SELECT to_regclass('schema_version')").fetchone() == (None,)


async def test_doctor_tells_version_and_timeouts_and_changes_nothing(url: str) -> None:
    _, output = await run("doctor", **variables(url))

    [line] = [line for line in output.splitlines() if "database" in line]
    assert line.startswith(f"ok      database: postgresql://{ROLE}@127.0.0.1:")
    assert line.endswith(
        ", PostgreSQL 18.4; statement_timeout 10s, lock_timeout 3s, "
        "idle_in_transaction_session_timeout 4s"
    )
    with psycopg.connect(url) as other:
        assert other.execute("SELECT to_regclass('schema_version')").fetchone() == (None,)
