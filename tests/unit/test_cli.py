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
from opencode_a2a.cli.doctor import check_database_file, check_issuer, check_port, judge_version
from opencode_a2a.cli.screen import Screen
from opencode_a2a.config import SETTINGS, ServiceSettings, Settings, TaskSettings, load
from opencode_a2a.peers.received import PeerProgress, TaskStatusChanged
from opencode_a2a.tasks.state import State
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


@pytest.mark.parametrize("arguments", [("--version",), ("-v",), ("version",)])
def test_the_version_is_printed(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).output == f"{__version__}\n"


@pytest.mark.parametrize("name", ["nothing", "init-release-system", "deploy-release"])
def test_an_unknown_command_is_wrong_usage(name: str) -> None:
    assert invoke(name).exit_code == 2


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(argument: str) -> None:
    code = (
        "import sys\nfrom opencode_a2a.cli import main\n"
        f"main(['{argument}'], standalone_mode=False)\n"
        "heavy = {'pydantic', 'structlog', 'starlette', 'sqlalchemy', 'httpx2', 'a2a'}\n"
        "sys.exit(bool(heavy & sys.modules.keys()))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603 - our own


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
        "A2A_PORT (--a2a-port)",
        "A2A_HOTS",
        "OPENCODE_MODEL_ID",
    ]


def test_settings_are_printed_with_their_sources_and_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[a2a]\ntitle = "Mine"\n')

    result = invoke("settings", "--config", str(file), A2A_BEARER_TOKEN="geheim")  # noqa: S106 - the case under test

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert f"A2A_TITLE=Mine\t{file}" in lines
    assert "A2A_BEARER_TOKEN=********\tA2A_BEARER_TOKEN" in lines
    assert "A2A_PORT=8000\tdefault" in lines
    assert "geheim" not in result.output


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
    assert "failed  opencode: no-such-program not found\n        npm install" in result.stdout


def test_the_doctor_names_an_opencode_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        result = invoke("doctor", OPENCODE_BASE_URL=url)

    assert result.exit_code == 1
    assert f"failed  opencode: no OpenCode at {url}\n        run " in result.stdout


def test_the_doctor_takes_the_flags_of_serve_and_answers_programs() -> None:
    result = invoke("doctor", "--demo", "--port", "1", "--json", PATH="/nowhere", HOME="/nowhere")

    told = json.loads(result.stdout)
    found = {one["subject"]: one for one in told["findings"]}
    assert (result.exit_code, told["ok"]) == (1, False)
    assert found["model"]["found"] == "demo, a scripted one"
    assert found["permissions"]["found"] == "asks before bash, edit, webfetch"
    assert found["opencode"]["status"] == "failed"
    assert found["opencode"]["remedy"].startswith("npm install -g opencode-ai")
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
    old, known, new = (judge_version(v, "opencode") for v in ("1.0.185", "1.18.33", "1.19.0"))

    assert old.failed
    assert str(old).startswith(
        "failed  opencode: 1.0.185 (opencode)\n        OpenCode 1.0.185 is too old"
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
