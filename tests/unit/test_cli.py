"""The program: what it prints and how it exits."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opencode_a2a import __version__
from opencode_a2a.cli import COMMANDS, main
from opencode_a2a.cli.doctor import check_database_file, check_issuer, check_port, judge
from opencode_a2a.cli.screen import Screen
from opencode_a2a.config import SETTINGS, ServiceSettings, Settings, TaskSettings, load
from opencode_a2a.log.state import State
from opencode_a2a.opencode.kinds import of_version, problem_of
from opencode_a2a.peers.received import PeerProgress, TaskStatusChanged
from opencode_a2a.printable import one_line
from tests.support.issuer import local_issuer


@pytest.fixture(autouse=True)
def _plain_environment(  # pyright: ignore[reportUnusedFunction] - used by pytest
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [n for n in os.environ if n.startswith(("A2A_", "OPENCODE"))]:
        monkeypatch.delenv(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def invoke(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environ)


def test_without_a_command_the_help_is_printed() -> None:
    result = invoke()

    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = invoke(name, "--help")

    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")


@pytest.mark.parametrize("name", ["card", "methods", "settings"])
def test_what_needs_no_service_is_shown_in_the_home_directory_too(name: str) -> None:
    """Where no service would start: its own files would be in the workspace."""
    home = {"HOME": os.getcwd(), "XDG_STATE_HOME": ""}

    assert "A2A_STATE_DIR" in invoke("serve", **home).output
    assert invoke(name, **home).exit_code == 0
    assert invoke(name, **home, A2A_PROT="1").exit_code == 2


@pytest.mark.parametrize("arguments", [("--version",), ("-v",), ("version",)])
def test_the_version_is_printed(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).output == f"{__version__}\n"


@pytest.mark.parametrize("name", ["nothing", "init-release-system", "deploy-release"])
def test_an_unknown_command_is_wrong_usage(name: str) -> None:
    assert invoke(name).exit_code == 2


def test_a_mistyped_command_is_answered_with_the_one_that_is_meant_or_with_all() -> None:
    assert "did you mean serve?" in invoke("sevre").output
    told = " ".join(invoke("bogus").output.split())
    assert f"No such command 'bogus'; there are {', '.join(COMMANDS)}." in told


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        ("--port", "many", "A2A_PORT (--port)"),
        ("--a2a-port", "many", "A2A_PORT (--a2a-port)"),
        ("--ask=rm", None, "OPENCODE_ASK (--ask)"),
    ],
)
def test_an_error_names_the_flag_that_was_typed(flag: str, value: str | None, name: str) -> None:
    for command in ("serve", "doctor"):
        assert name in invoke(command, flag, *filter(None, [value])).output


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("plain", 5, "plain"),
        ("longer", 5, "long…"),
        ("\u65e5\u672c\u8a9e", 6, "\u65e5\u672c\u8a9e"),
        ("\u65e5\u672c\u8a9e", 5, "\u65e5\u672c…"),
        ("e\u0301t\u00e9", 3, "e\u0301t\u00e9"),
        ("two\n lines", 40, "two lines"),
    ],
)
def test_a_line_is_cut_by_the_columns_that_it_takes(text: str, width: int, shown: str) -> None:
    assert one_line(text, width) == shown


def imported(code: str, *unwanted: str, **environ: str) -> set[str]:
    """Run code in a process of its own, and return what it imported of all that is unwanted."""
    told = f"{code}\nimport sys\nprint(*sorted({set(unwanted)} & sys.modules.keys()))"
    done = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", told],
        env={"PATH": os.environ["PATH"], **environ}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument: str) -> None:
    code = f"from opencode_a2a.cli import main\nmain(['{argument}'], standalone_mode=False)"
    heavy = ("asyncio", "httpx2", "pydantic", "rich", "sqlalchemy", "starlette", "structlog")

    assert imported(code, *heavy, "opencode_a2a.config") == set()


def test_a_start_with_sqlite_imports_only_what_every_service_needs(tmp_path: Path) -> None:
    code = """
import asyncio, os
from opencode_a2a.app import Service
from opencode_a2a.config import load

async def start():
    async with Service(load({}, os.environ)).running():
        pass

asyncio.run(start())
"""
    settings = {
        "A2A_BEARER_TOKEN": "a-token-of-some-length-for-this-test",
        "A2A_STATE_DIR": str(tmp_path / "state"),
        "OPENCODE_BASE_URL": "http://127.0.0.1:9",
        "OPENCODE_WORKSPACE_ROOT": str(tmp_path / "work"),
    }
    databases = ("psycopg", "sqlalchemy.dialects.postgresql", "opencode_a2a.store.postgres")
    requests = ("h11", "httpcore2", "httpx2", "opencode_a2a.net.http")
    peers = ("opencode_a2a.peers.client", "opencode_a2a.peers.tool", "opencode_a2a.peers.mcp")
    security = ("cryptography", "jwt", "opencode_a2a.web.oidc")
    traces = ("opentelemetry", "opencode_a2a.otel")
    other = ("jsonschema_rs", "markdown_it", "rich", "segno", "opencode_a2a_import")

    found = imported(code, *databases, *requests, *peers, *security, *traces, *other, **settings)

    assert found == set()


def test_every_setting_but_a_secret_is_a_flag_of_serve() -> None:
    words = set(invoke("serve", "--help-all").output.replace(",", " ").split())

    assert {s.flag for s in SETTINGS.values() if s.flag in words} == {
        s.flag for s in SETTINGS.values() if not s.secret
    }
    assert {"--config", "--managed", "--demo", "--port"} <= words


def test_the_help_of_serve_fits_a_screen_and_names_what_people_need() -> None:
    shown = invoke("serve", "--help").output

    assert len(shown.splitlines()) < 60
    common = ["--workspace", "--port", "--demo", "--ask", "--open", "--config", "--help-all"]
    assert [flag for flag in common if flag not in shown] == []


def test_serve_lists_all_that_is_wrong_and_exits_as_for_wrong_usage() -> None:
    result = invoke("serve", "--port", "x", "--demo", A2A_HOTS="1", OPENCODE_MODEL_ID="m")

    assert result.exit_code == 2
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == [
        "A2A_PORT (--port)",
        "A2A_HOTS",
        "OPENCODE_MODEL_ID",
    ]


def test_settings_are_printed_with_their_sources_and_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[a2a]\ntitle = "Mine"\n')

    result = invoke("settings", "--config", str(file), A2A_BEARER_TOKEN="geheim")  # noqa: S106 - the case under test

    whole = invoke("settings", "--all", "--config", str(file), A2A_BEARER_TOKEN="geheim")  # noqa: S106 - as above
    given = [f"A2A_TITLE=Mine\t{file}", "A2A_BEARER_TOKEN=********\tA2A_BEARER_TOKEN"]
    assert result.exit_code == 0
    assert sorted(result.stdout.splitlines()) == sorted(given)
    assert {*given, "A2A_PORT=8000\tdefault"} <= {*whole.stdout.splitlines()}
    assert "geheim" not in result.output + whole.output


def test_settings_tells_what_is_wrong() -> None:
    result = invoke("settings", A2A_PORT="x")

    assert (result.exit_code, result.stdout) == (2, "")


def test_the_doctor_names_what_is_wrong_with_the_settings() -> None:
    result = invoke("doctor", A2A_PORT="x")

    assert result.exit_code == 1
    assert "failed  settings: A2A_PORT" in result.stdout


def test_the_doctor_refuses_a_state_directory_that_serve_refuses() -> None:
    result = invoke("doctor", OPENCODE_MANAGED_SERVER="1", A2A_STATE_DIR="/proc/x")

    assert result.exit_code == 1
    assert "failed  state: cannot write to /proc/x: " in result.stdout


def test_a_host_that_cannot_be_found_is_named_and_no_wrong_usage() -> None:
    result = invoke("call", "http://nowhere.invalid", "hi")

    assert result.exit_code == 1
    assert "the host nowhere.invalid cannot be found" in result.stderr


def test_the_doctor_names_rules_that_settle_nothing() -> None:
    names = ("write", "zzz_tool", "bash")
    rules = json.dumps([{"permission": name, "action": "deny"} for name in names])

    result = invoke("doctor", OPENCODE_MANAGED_SERVER="1", A2A_PERMISSION_RULES=rules)

    assert "advice  settings: A2A_PERMISSION_RULES: OpenCode never asks for write" in result.stdout
    assert (
        "advice  rules: zzz_tool is not a permission of OpenCode's own\n        check"
        in result.stdout
    )
    assert "rules: bash" not in result.stdout


async def test_the_doctor_asks_the_identity_provider() -> None:
    async with local_issuer() as provider:
        settings = load({}, {"A2A_OIDC_ISSUER": provider.url, "A2A_OIDC_AUDIENCE": "x"})
        well = await asyncio.to_thread(check_issuer, settings)
        provider.mode = "another"
        ill = await asyncio.to_thread(check_issuer, settings)

    assert (well.failed, well.found) == (False, f"{provider.url}: 1 keys")
    assert ill.failed
    assert "calls itself 'https://another.example'" in ill.found


def test_the_doctor_names_a_missing_opencode() -> None:
    result = invoke("doctor", OPENCODE_MANAGED_SERVER="1", OPENCODE_COMMAND="no-such-program")

    assert result.exit_code == 1
    assert "failed  opencode: no-such-program not found\n        `npm install" in result.stdout


PROGRAM = """#!/bin/sh
echo "$@"
env
"""
"""Stands for OpenCode: prints what it was started with."""


def launch(tmp_path: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    """Run the command that becomes OpenCode, with a program that tells what it got."""
    program = tmp_path / "opencode"
    program.write_text(PROGRAM)
    program.chmod(0o700)
    given = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OPENCODE_COMMAND": str(program)}
    done = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-m", "opencode_a2a", "opencode", *arguments],
        env=given | environ, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_an_opencode_of_its_own_gets_its_password_and_no_setting_of_a_service(
    tmp_path: Path,
) -> None:
    entry = '{"name": "a", "url": "http://h:1", "password_variable": "OC_A"}'
    status, told, warned = launch(
        tmp_path, "--", "serve", "--port", "4096",
        OPENCODE_SERVER_PASSWORD="sesame", OPENCODE_SERVER_USERNAME="me",  # noqa: S106 - not one
        OPENCODE_CONFIG_CONTENT='{"plugin": ["theirs"], "model": "a/b"}',
        A2A_BEARER_TOKEN="t" * 30, OPENCODE_UPSTREAMS=f"[{entry}]", OC_A="secret",
        OTEL_SERVICE_NAME="opencode", NOTIFY_SOCKET="/run/n", ANTHROPIC_API_KEY="key",
    )  # fmt: skip

    assert status == 0
    assert told.startswith("serve --port 4096\n")
    seen = dict(line.split("=", 1) for line in told.splitlines()[1:] if "=" in line)
    assert seen["OPENCODE_SERVER_PASSWORD"] == "sesame"  # noqa: S105 - not a secret
    assert seen["OPENCODE_SERVER_USERNAME"] == "me"
    assert (seen["OTEL_SERVICE_NAME"], seen["ANTHROPIC_API_KEY"]) == ("opencode", "key")
    config = json.loads(seen["OPENCODE_CONFIG_CONTENT"])
    assert (config["model"], config["plugin"][0]) == ("a/b", "theirs")
    assert config["plugin"][1].endswith("/withhold.js")
    assert not {"A2A_BEARER_TOKEN", "OPENCODE_UPSTREAMS", "OC_A", "NOTIFY_SOCKET"} & seen.keys()
    assert "set OPENCODE_COMMAND to the OpenCode program itself" in warned  # it is a script


def test_a_password_file_is_read_and_named_as_readable_by_the_agent(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("sesame\n")

    status, told, warned = launch(tmp_path, OPENCODE_SERVER_PASSWORD_FILE=str(file))

    assert status == 0
    assert told.startswith("serve\n")
    assert "OPENCODE_SERVER_PASSWORD=sesame\n" in told
    assert f"can read OpenCode's password in {file}" in warned


@pytest.mark.linux_only
def test_a_process_that_keeps_the_password_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], env={"KEPT": "sesame-8f3a1"}) as init:  # noqa: S607 - any program
        _, _, warned = launch(tmp_path, OPENCODE_SERVER_PASSWORD="sesame-8f3a1")  # noqa: S106 - not one
        init.kill()

    assert f"in the environment of sleep ({init.pid})" in warned


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({}, "OPENCODE_SERVER_PASSWORD: set it, or OPENCODE_SERVER_PASSWORD_FILE"),
        ({"OPENCODE_SERVER_PASSWORD": "a", "OPENCODE_SERVER_PASSWORD_FILE": "b"}, "set one"),
        ({"OPENCODE_SERVER_PASSWORD_FILE": "/nowhere"}, "cannot read /nowhere: No such file"),
        ({"OPENCODE_SERVER_PASSWORD_FILE": "/dev/null"}, "/dev/null is empty"),
        ({"OPENCODE_SERVER_PASSWORD": "a", "OPENCODE_PURE": "1"}, "needs the plugin"),
        ({"OPENCODE_SERVER_PASSWORD": "a", "OPENCODE_CONFIG_CONTENT": "{"}, "is not JSON"),
        ({"OPENCODE_SERVER_PASSWORD": "a", "OPENCODE_COMMAND": "/nowhere"}, "was not found"),
        ({"OPENCODE_SERVER_PASSWORD": "a", "OPENCODE_UPSTREAMS": "{"}, "OPENCODE_UPSTREAMS: "),
    ],
)
def test_an_opencode_that_would_not_be_safe_is_not_started(
    tmp_path: Path, environ: dict[str, str], problem: str
) -> None:
    status, told, said = launch(tmp_path, **environ)

    assert (status, told) == (2, "")
    assert problem in said
    assert "Traceback" not in said


def test_the_doctor_names_an_opencode_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        result = invoke("doctor", OPENCODE_BASE_URL=url)

    assert result.exit_code == 1
    assert f"failed  opencode: {url}: it does not answer\n        start it " in result.stdout


def test_the_doctor_takes_the_flags_of_serve_and_answers_programs() -> None:
    result = invoke("doctor", "--demo", "--port", "1", "--json", PATH="/nowhere", HOME="/nowhere")

    told = json.loads(result.stdout)
    found = {one["subject"]: one for one in told["findings"]}
    assert (result.exit_code, told["ok"]) == (1, False)
    assert found["model"]["found"] == "demo, a scripted one"
    assert found["permissions"]["found"] == "asks before bash, edit, webfetch"
    assert found["opencode"]["status"] == "failed"
    assert found["opencode"]["remedy"].startswith("`npm install -g opencode-ai@")
    assert found["port"]["found"].startswith("127.0.0.1:1")


def test_a_port_in_use_is_found() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        settings = Settings(a2a=ServiceSettings(port=busy.getsockname()[1]))

        assert check_port(settings).failed
    assert not check_port(settings).failed


def test_a_database_that_cannot_be_made_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def check(name: str) -> bool:
        url = f"sqlite:///{tmp_path}/{name}"
        return check_database_file(Settings(tasks=TaskSettings(task_store_database_url=url))).failed

    assert check("file/x.db")
    assert not check("x.db")
    assert not check("a/directory/that/serve/makes/x.db")


def test_an_old_opencode_fails_and_an_unknown_one_is_advised_against() -> None:
    found = map(of_version, ("1.0.185", "1.18.33", "1.19.0"))
    old, known, new = (judge(one, problem_of(one), "opencode") for one in found)

    assert old.failed
    assert str(old).startswith(
        "failed  opencode: opencode: it is OpenCode 1.0.185, and this service needs 1.1 or later"
    )
    assert str(known) == "ok      opencode: 1.18.33 (opencode)"
    assert str(new).startswith(
        "advice  opencode: 1.19.0 (opencode)\n        OpenCode 1.19.0 was not "
    )


def test_a_title_that_is_found_meanwhile_does_not_hide_why_nothing_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen = Screen()

    screen.show(TaskStatusChanged(State.WORKING, None, PeerProgress("retry", "waiting")))
    drawn = capsys.readouterr().err
    screen.show(TaskStatusChanged(State.WORKING, None))  # as a stream tells a title

    assert "Retrying" in drawn
    assert capsys.readouterr().err == ""
