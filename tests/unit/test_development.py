"""What a contributor is told to run is there."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.postgres import PostgresServer
from tools import cluster

ROOT = Path(__file__).parents[2]


def test_the_hooks_can_be_installed() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config"]

    subprocess.run([*command, ROOT / ".pre-commit-config.yaml"], check=True)  # noqa: S603 - our own


def test_what_is_missing_is_named_with_the_remedy_before_anything_is_installed() -> None:
    checked = subprocess.run(
        ["/bin/sh", "tools/needed", "--opencode"],
        cwd=ROOT,
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 1
    assert "Python 3.11 or later is needed; there is no Python." in checked.stderr
    assert "apt install python3 python3-venv" in checked.stderr
    assert "OpenCode is needed" in checked.stderr
    assert "apt install nodejs npm" in checked.stderr


def test_a_step_of_the_installation_shows_its_output_only_when_it_fails() -> None:
    def step(command: str) -> tuple[int, str, str]:
        done = subprocess.run(  # noqa: S603 - commands of this test
            ["/bin/sh", "tools/step", "Packages", "sh", "-c", command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    status, shown, hidden = step("echo noise")
    assert (status, hidden) == (0, "")
    assert re.fullmatch(r"Packages … \d+ s\n", shown)
    assert step("echo why >&2; exit 3") == (3, "Packages … failed\n", "why\n")


def test_the_walk_ends_when_nobody_reads_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tools.walk"], cwd=ROOT, stdout=subprocess.PIPE
    ) as walk:
        assert walk.stdout is not None
        walk.stdout.close()
        status = walk.wait(60)

    assert status == -signal.SIGPIPE


def test_a_stream_reaches_opencode_by_few_functions_in_few_files() -> None:
    command = [sys.executable, "-m", "tools.walk"]

    def walked() -> tuple[int, int]:
        walk = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - our own
        counted = re.search(r"down to the prompt: (\d+) functions in (\d+) files", walk.stdout)
        assert counted is not None
        assert re.match(r"[a-z_0-9]+/[a-z_0-9]+\.py:\d+  \S+\n", walk.stdout)
        return int(counted[1]), int(counted[2])

    # On a busy machine the timers of the service run during a walk, and are counted with it.
    counts = (walked() for _ in range(3))
    assert any(functions <= 165 and files <= 38 for functions, files in counts)


async def test_a_killed_database_of_the_cluster_to_try_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "DATABASE_RESTART_SECONDS", 0.0)
    with PostgresServer() as database:
        killed = database.pid
        watching = asyncio.create_task(cluster.keep_running(database))
        os.kill(killed, signal.SIGKILL)

        async with asyncio.timeout(60):
            while "runs again" not in (told := capsys.readouterr().out):
                print(told, end="")
                await asyncio.sleep(0.05)

        watching.cancel()
        assert "ended (SIGKILL); restarting in 0 s" in told
        assert f"kill it with: kill -9 {database.pid}" in told
        assert database.pid != killed
        with database.admin() as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
