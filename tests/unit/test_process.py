"""The parts of starting OpenCode that need no OpenCode, and starts that fail.

The doubles are small programs in the place of ``opencode``.
"""

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.config import VARIABLES, OpenCodeSettings, Settings, TaskSettings
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.managed import (
    ManagedOpenCode,
    find_command,
    free_port,
    passed_environment,
)
from opencode_a2a.opencode.process import (
    PREVIEW,
    QUALIFIED,
    OpenCodeStartError,
    Record,
    RecordLock,
    birth,
    ends_all,
    listening_url,
    marked_processes,
    recorded_in,
)
from opencode_a2a.opencode.upstream import managed_record, withheld


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("opencode server listening on http://127.0.0.1:4100", "http://127.0.0.1:4100"),
        ("opencode server listening on http://localhost:4100/", "http://localhost:4100"),
        ("opencode server listening on http://0.0.0.0:4100", "http://127.0.0.1:4100"),
        ("opencode server listening on http://[::]:4100", "http://[::1]:4100"),
        ("Warning: OPENCODE_SERVER_PASSWORD is not set; server is unsecured.", None),
        ("listening on nothing", None),
    ],
)
def test_the_url_is_read_from_the_line_about_it(line: str, url: str | None) -> None:
    assert listening_url(line) == url


def test_the_version_to_install_is_the_one_that_is_tested() -> None:
    root = Path(__file__).parents[2]
    pinned = orjson.loads((root / "package.json").read_bytes())
    preview = orjson.loads((root / "tests/opencode2/package.json").read_bytes())

    assert pinned["dependencies"]["opencode-ai"] == QUALIFIED
    assert {*preview["optionalDependencies"].values()} == {PREVIEW}


def test_a_missing_command_is_an_error_with_its_remedy() -> None:
    with pytest.raises(OpenCodeStartError) as caught:
        find_command("no-such-opencode", "/nowhere")

    assert "OPENCODE_COMMAND" in caught.value.reason


def test_a_free_port_can_be_bound() -> None:
    assert 1024 <= free_port("127.0.0.1") < 65536


OURS = st.sampled_from(
    [
        "A2A_BEARER_TOKEN",
        "A2A_PEER_API_KEY",
        "A2A_STATIC_AUTH_CREDENTIALS",
        "OPENCODE_AUTH_PASSWORD",
        "OPENCODE_AUTH_USERNAME",
        "OPENCODE_SERVER_PASSWORD",
        "OPENCODE_BASE_URL",
        "OPENCODE_WORKSPACE_ROOT",
        "OPENCODE_MANAGED_SERVER_PORT",
        "OPENCODE_A2A_INSTANCE",
        "OPENCODE_SERVER_PASSWORD_FILE",
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "LISTEN_FDS",
        "CREDENTIALS_DIRECTORY",
    ]
)
OPENCODES = st.sampled_from(
    [
        "PATH",
        "HOME",
        "LC_ALL",
        "https_proxy",
        "NO_PROXY",
        "NODE_EXTRA_CA_CERTS",
        "ANTHROPIC_API_KEY",
        "WATSONX_AI_APIKEY",
        "SOME_NEW_PROVIDER_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "OPENCODE_API_KEY",
        "OPENCODE_CONFIG",
        "OPENCODE_AUTH_CONTENT",
        "OPENCODE_DISABLE_PROJECT_CONFIG",
        "DATABASE_URL",
        "JAVA_HOME",
        "VIRTUAL_ENV",
        "Anything",
    ]
)


@given(
    ours=st.dictionaries(OURS, st.text()),
    a2a=st.dictionaries(st.text("ABC_1").map("A2A_{}".format), st.text()),
    theirs=st.dictionaries(OPENCODES, st.text()),
)
def test_opencode_sees_its_own_variables_and_none_of_ours(
    ours: dict[str, str], a2a: dict[str, str], theirs: dict[str, str]
) -> None:
    assert passed_environment(ours | a2a | theirs, VARIABLES) == theirs


def test_the_environment_has_its_own_directories_and_merged_configuration(
    tmp_path: Path,
) -> None:
    given: JsonObject = {"model": "a/b", "mcp": {"x": {"enabled": False}}, "plugin": ["theirs"]}
    theirs = orjson.dumps(given).decode()
    managed = ManagedOpenCode(
        OpenCodeSettings(),
        {"PATH": "/bin", "HOME": "/root", "OPENCODE_CONFIG_CONTENT": theirs},
        state=tmp_path,
        config={"share": "disabled", "mcp": {"bridge": {"type": "remote"}}},
    )

    variables = managed.variables()

    config = orjson.loads(variables.pop("OPENCODE_CONFIG_CONTENT"))
    first, withholding = config.pop("plugin")
    assert (first, Path(withholding.removeprefix("file://")).is_file()) == ("theirs", True)
    assert config == {
        "model": "a/b",
        "share": "disabled",
        "mcp": {"x": {"enabled": False}, "bridge": {"type": "remote"}},
    }
    assert variables == {
        "PATH": "/bin",
        "HOME": str(tmp_path / "home"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_SERVER_USERNAME": "opencode",
        "OPENCODE_SERVER_PASSWORD": managed.password,
        "OPENCODE_A2A_INSTANCE": variables["OPENCODE_A2A_INSTANCE"],
    }
    assert variables["OPENCODE_A2A_INSTANCE"].startswith(f"{os.getpid()}.")


def test_a_configuration_that_is_no_json_is_said_so() -> None:
    managed = ManagedOpenCode(OpenCodeSettings(), {"OPENCODE_CONFIG_CONTENT": "{"})

    with pytest.raises(OpenCodeStartError) as caught:
        managed.variables()

    assert caught.value.reason.startswith("OPENCODE_CONFIG_CONTENT is not JSON")


def double(directory: Path, text: str) -> str:
    """Write a program that stands for OpenCode."""
    program = directory / "opencode"
    program.write_text(f"#!{sys.executable}\nimport os, sys, time\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def _marked() -> set[int]:
    return {pid for pid, marker in marked_processes() if marker.startswith(f"{os.getpid()}.")}


_others: set[int] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Leave aside what ran before the test, such as the OpenCode that live tests share."""
    _others.clear()
    _others.update(_marked())


def ours() -> list[int]:
    """Return what is left of the processes that this test program started."""
    return sorted(_marked() - _others)


NO_DATA = {"XDG_DATA_HOME": "/nowhere"}
"""Not that of whoever runs the tests: a program would be asked for its version first."""


async def start(settings: OpenCodeSettings) -> OpenCodeStartError:
    with pytest.raises(OpenCodeStartError) as caught:
        async with ManagedOpenCode(settings, NO_DATA):
            pass
    return caught.value


async def test_an_early_end_shows_the_command_and_the_last_lines(tmp_path: Path) -> None:
    command = double(tmp_path, "for i in range(60): print('line', i)\nsys.exit(1)")

    error = await start(OpenCodeSettings(command=command, managed_server_port=4999))

    assert error.reason == "OpenCode ended at once"
    assert error.command == (command, "serve", "--hostname", "127.0.0.1", "--port", "4999")
    assert error.output == tuple(f"line {i}" for i in range(20, 60))
    assert str(error).splitlines()[-1] == "  line 59"


async def test_a_start_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The program is asked for its version afterwards, and does not tell that either.
    monkeypatch.setattr("opencode_a2a.opencode.managed.VERSION_SECONDS", 0.5)
    child = "if os.fork() == 0: os.setsid()"
    command = double(tmp_path, f"print('hm', flush=True)\n{child}\ntime.sleep(1000)")

    error = await start(OpenCodeSettings(command=command, startup_timeout=2.0))

    assert (error.reason, error.output) == (
        "OpenCode was not ready after 2 s; raise OPENCODE_STARTUP_TIMEOUT",
        ("hm",),
    )
    assert ours() == []


async def test_a_port_that_was_taken_meanwhile_is_replaced_by_another(tmp_path: Path) -> None:
    record = tmp_path / "ports"
    command = double(
        tmp_path,
        f"open({str(record)!r}, 'a').write(sys.argv[-1] + '\\n')\nsys.exit('ServeError')",
    )

    error = await start(OpenCodeSettings(command=command))

    assert error.output == ("ServeError",)
    assert len(record.read_text().split()) == 3


async def test_a_given_port_that_is_taken_is_an_error_at_once(tmp_path: Path) -> None:
    record = tmp_path / "ports"
    command = double(
        tmp_path,
        f"open({str(record)!r}, 'a').write(sys.argv[-1] + '\\n')\nsys.exit('ServeError')",
    )

    await start(OpenCodeSettings(command=command, managed_server_port=4999))

    assert record.read_text().split() == ["4999"]


@pytest.mark.linux_only
async def test_what_a_killed_owner_left_behind_is_ended_at_the_next_start(tmp_path: Path) -> None:
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    orphan = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import time; time.sleep(1000)",
        env={"OPENCODE_A2A_INSTANCE": f"{gone.pid}.abc"},
    )

    await start(OpenCodeSettings(command=double(tmp_path, "sys.exit(1)")))

    async with asyncio.timeout(60):
        assert await orphan.wait() == -signal.SIGKILL


# What an earlier run has written down


async def sleeper(marker: str) -> asyncio.subprocess.Process:
    """A process that could be an OpenCode, and answers nothing."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import time; time.sleep(1000)",
        env={"OPENCODE_A2A_INSTANCE": marker},
        start_new_session=True,
    )


async def start_after(left: Record, directory: Path) -> None:
    """Start an OpenCode, which fails, where an earlier run has left a record."""
    file = directory / "managed" / "opencode.json"
    left.write(file)
    assert file.stat().st_mode & 0o077 == 0
    settings = OpenCodeSettings(command=double(directory, "sys.exit(1)"))
    with pytest.raises(OpenCodeStartError):
        async with ManagedOpenCode(settings, NO_DATA, record=file):
            pass
    assert not file.exists()


@pytest.mark.linux_only
async def test_a_process_that_only_has_the_same_pid_is_neither_trusted_nor_ended(
    tmp_path: Path,
) -> None:
    stranger = await sleeper(f"{os.getpid()}.of-somebody-else")
    known = birth(stranger.pid)
    assert known is not None
    left = Record(marker="1.abc.recorded", password="p", pid=stranger.pid, birth=f"{known}0")  # noqa: S106 - none

    await start_after(left, tmp_path)

    assert birth(stranger.pid) == known
    stranger.kill()
    await stranger.wait()
    assert birth(stranger.pid) is None


@pytest.mark.linux_only
@pytest.mark.parametrize("usable", [True, False], ids=["usable", "killed while it started"])
async def test_an_opencode_that_does_not_answer_is_ended(tmp_path: Path, usable: bool) -> None:
    marker = f"1.{os.getpid()}.recorded"
    old = await sleeper(marker)
    left = Record(marker=marker, password="p")  # noqa: S106 - none
    if usable:
        known = {"pid": old.pid, "birth": birth(old.pid), "url": "http://127.0.0.1:9"}
        left = left.model_copy(update=known)

    await start_after(left, tmp_path)

    async with asyncio.timeout(60):
        assert await old.wait() in (-signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.linux_only
async def test_an_opencode_with_a_record_is_left_to_whom_the_record_belongs(
    tmp_path: Path,
) -> None:
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    kept = await sleeper(f"{gone.pid}.abc.recorded")

    await start(OpenCodeSettings(command=double(tmp_path, "sys.exit(1)")))

    assert birth(kept.pid) is not None
    kept.kill()
    await kept.wait()


@pytest.mark.linux_only
@pytest.mark.parametrize("written", [None, b"{", "of another"], ids=["deleted", "damaged", "other"])
async def test_an_opencode_that_its_record_lost_is_ended_by_the_owner_of_the_record(
    tmp_path: Path, written: bytes | str | None
) -> None:
    file = tmp_path / "managed" / "opencode.json"
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    lost = await sleeper(f"{gone.pid}.abc{recorded_in(file)}")
    others = await sleeper(f"{gone.pid}.abc{recorded_in(tmp_path / 'other.json')}")
    file.parent.mkdir()
    if isinstance(written, bytes):
        file.write_bytes(written)
    elif written is not None:
        Record(marker=f"1.def{recorded_in(file)}", password="p").write(file)  # noqa: S106 - none
    settings = OpenCodeSettings(command=double(tmp_path, "sys.exit(1)"))

    with pytest.raises(OpenCodeStartError):
        async with ManagedOpenCode(settings, {}, record=file):
            pass

    async with asyncio.timeout(60):
        assert await lost.wait() == -signal.SIGKILL
    assert birth(others.pid) is not None
    others.kill()
    await others.wait()


@pytest.mark.linux_only
async def test_the_opencode_of_a_service_that_runs_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "managed" / "opencode.json"
    marker = f"{os.getpid()}.{tmp_path.name}.recorded"
    theirs, claim = await sleeper(marker), RecordLock(file)
    assert claim.take()
    known = {"pid": theirs.pid, "birth": birth(theirs.pid), "url": "http://127.0.0.1:9"}
    Record(marker=marker, password="p").model_copy(update=known).write(file)  # noqa: S106 - none
    written = file.read_bytes()
    settings = OpenCodeSettings(command=double(tmp_path, "sys.exit(1)"))

    with pytest.raises(OpenCodeStartError):
        async with ManagedOpenCode(settings, {}, record=file):
            pass

    assert birth(theirs.pid) is not None
    assert file.read_bytes() == written
    claim.release()
    assert RecordLock(file).take()
    theirs.kill()
    await theirs.wait()


@pytest.mark.parametrize(
    "field",
    [
        {"pid": 2**40},
        {"pid": -1},
        {"url": "http://[::1"},
        {"url": "http://127.0.0.1:999999"},
        {"url": "127.0.0.1"},
    ],
    ids=str,
)
def test_a_record_that_makes_no_sense_is_unreadable(tmp_path: Path, field: JsonObject) -> None:
    file = tmp_path / "opencode.json"
    file.write_bytes(orjson.dumps({"marker": "1.a.recorded", "password": "p", **field}))

    assert Record.read(file) is None


@pytest.mark.parametrize("name", ["managed/opencode.json/x", "managed"], ids=["record", "folder"])
async def test_a_record_that_cannot_be_written_is_an_error_with_its_remedy(
    tmp_path: Path, name: str
) -> None:
    in_the_way = tmp_path / name
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.touch()
    settings = OpenCodeSettings(command=double(tmp_path, "sys.exit(1)"))

    with pytest.raises(
        OpenCodeStartError, match=r"cannot write .*; remove what is there"
    ) as caught:
        async with ManagedOpenCode(settings, {}, record=tmp_path / "managed" / "opencode.json"):
            pass

    assert "\n" not in str(caught.value)


def test_where_the_service_reports_to_is_not_for_a_managed_opencode() -> None:
    given = {"OTEL_EXPORTER_OTLP_HEADERS": "key=secret", "OTELLO": "a play", "HOME": "/root"}

    assert passed_environment(given, withheld(Settings())) == {"OTELLO": "a play", "HOME": "/root"}


@pytest.mark.parametrize(
    ("pid", "parent", "first", "ends"),
    [
        (1, 0, "opencode-a2a", True),
        (7, 1, "tini", True),
        (7, 1, "sh", True),
        (7, 0, "pause", True),
        (7, 1, "systemd", False),
        (7, 1, "supervisord", False),
        (99, 42, "tini", False),
    ],
)
def test_what_ends_with_a_container_is_not_kept(
    pid: int, parent: int, first: str, ends: bool
) -> None:
    assert ends_all(pid, parent, first) is ends


def test_the_password_of_postgresql_is_not_for_the_agent() -> None:
    def names(url: str) -> set[str]:
        return withheld(Settings(tasks=TaskSettings(task_store_database_url=url)))

    assert "PGPASSWORD" in names("postgresql://u@h/d")
    assert "PGPASSWORD" not in names("sqlite:///tasks.db")
    assert "A2A_TASK_STORE_DATABASE_URL" in names("postgresql://u@h/d")
    assert "a2a_task_store_database_url" in names("postgresql://u@h/d")


def test_a_changed_password_is_the_same_database() -> None:
    def record(url: str) -> Path | None:
        return managed_record(Settings(tasks=TaskSettings(task_store_database_url=url)))

    first = record("postgresql://u:one@h/d")
    assert first is not None
    assert first == record("postgresql://u:two@h/d")
    assert first != record("postgresql://u:one@h/e")


def test_one_database_is_one_record_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(url: str) -> Path | None:
        return managed_record(Settings(tasks=TaskSettings(task_store_database_url=url)))

    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    first = record("sqlite:///tasks.db")
    assert first is not None
    assert first == record(f"sqlite:///{tmp_path}/other/../one/tasks.db")
    monkeypatch.chdir(tmp_path / "other")
    assert first != record("sqlite:///tasks.db")
    assert record("sqlite:///:memory:") is None


def test_another_terminal_is_no_other_configuration(tmp_path: Path) -> None:
    command = double(tmp_path, "")
    first, second, third = (
        ManagedOpenCode(OpenCodeSettings(command=command), environment).setup()
        for environment in (
            {"SHLVL": "1", "KEY": "a"},
            {"SHLVL": "2", "KEY": "a", "INVOCATION_ID": "x", "PS1": "$", "LS_COLORS": "y"},
            {"KEY": "b"},
        )
    )
    assert first == second
    assert [name for name in first if first[name] != third.get(name)] == ["KEY"]
    assert "a" not in first.values()


OLD_OPENCODE = """#!{python}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if sys.argv[1:] == ["--version"]:
    sys.exit(print("1.0.185"))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(500)


port = int(sys.argv[sys.argv.index("--port") + 1])
server = HTTPServer(("127.0.0.1", port), Handler)
print(f"opencode server listening on http://127.0.0.1:{{port}}", flush=True)
server.serve_forever()
"""
"""As 1.0 does: it has no health check, and says its version nowhere else."""


async def test_an_old_opencode_is_refused_by_name_when_it_is_started(tmp_path: Path) -> None:
    program = tmp_path / "opencode"
    program.write_text(OLD_OPENCODE.format(python=sys.executable))
    program.chmod(0o755)
    settings = OpenCodeSettings(command=str(program), startup_timeout=30)

    with pytest.raises(
        OpenCodeStartError, match=r"it is OpenCode 1\.0\.185, and this service needs 1\.1"
    ):
        async with ManagedOpenCode(settings, os.environ):
            pass


OPEN_OPENCODE = """
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

answers = json.loads(Path(__file__).with_name("answers.json").read_bytes())
if sys.argv[1:] == ["--version"]:
    sys.exit(print(answers["version"]))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        content = answers.get(self.path.partition("?")[0])
        body = json.dumps(content).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


port = int(sys.argv[sys.argv.index("--port") + 1])
server = HTTPServer(("127.0.0.1", port), Handler)
print(f"opencode server listening on http://127.0.0.1:{port}", flush=True)
server.serve_forever()
"""
"""Answers whoever asks, as a release would that no longer knows OPENCODE_SERVER_PASSWORD."""
CONTRACT = orjson.loads(
    (Path(__file__).parents[1] / "transcripts" / "2-preview" / "openapi.json").read_bytes()
)


@pytest.mark.requirement("I23")
@pytest.mark.parametrize(
    "answers",
    [
        {
            "version": "1.18.33",
            "/global/health": {"healthy": True, "version": "1.18.33"},
            "/config": {},
        },
        {
            "version": "opencode2 v0.0.0-next-16350",
            "/api/health": {"version": "0.0.0-next-16350"},
            "/openapi.json": CONTRACT,
            "/api/model/default": {"data": None},
        },
    ],
    ids=["1", "2"],
)
async def test_an_opencode_that_asks_for_no_password_is_not_used(
    tmp_path: Path, answers: JsonObject
) -> None:
    (tmp_path / "answers.json").write_bytes(orjson.dumps(answers))
    settings = OpenCodeSettings(command=double(tmp_path, OPEN_OPENCODE), startup_timeout=30)

    with pytest.raises(OpenCodeStartError) as caught:
        async with ManagedOpenCode(settings, os.environ):
            pass

    assert caught.value.reason == "OpenCode does not work: it does not ask for its password"
    assert ours() == []
