"""The help of every command, and what wrong usage leads to, as people see them."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from opencode_a2a.cli import COMMANDS, main
from tests.support.screens import compare, settled

WRONG = {
    "call-nothing": ("call",),
    "call-no-service": ("call", "hello"),
    "call-unreachable": ("call", "http://127.0.0.1:9", "hello"),
    "call-bad-url": ("call", "ftp://example.org", "hello"),
    "task-nothing": ("task",),
    "console-no-service": ("console",),
    "ping-unreachable": ("ping", "http://127.0.0.1:9"),
    "serve-wrong-settings": ("serve", "--port", "many", "--ask=rm"),
    "serve-unknown-flag": ("serve", "--prot", "1"),
    "init-no-such-directory": ("init", "--yes", "--workspace", "/nowhere"),
    "migrate-nothing": ("migrate", "--from", "sqlite:////nowhere/x.db"),
    "completion-unknown": ("completion", "tcsh"),
    "unknown-command": ("sevre",),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and a directory to work in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "A2A_CLIENT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def shown(home: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments, prog_name="opencode-a2a", terminal_width=100)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, settled(result.output, (home, "~"))


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_the_help_is_as_it_was(home: Path, name: str) -> None:
    status, text = shown(home, *filter(None, [name]), "--help")

    compare(f"help-{name}" if name else "help", text)
    assert status == 0


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_says_why_and_what_to_do(home: Path, name: str) -> None:
    status, text = shown(home, *WRONG[name])

    compare(name, text)
    assert status in (1, 2)


def test_the_questions_of_init_have_flags(home: Path) -> None:
    status, text = shown(
        home, "init", "--yes", "--ask", "bash", "--port", "9000", "--host", "::", "--systemd"
    )

    compare("init", text)
    file = home / ".config" / "opencode-a2a" / "config.toml"
    assert (status, file.stat().st_mode & 0o777) == (0, 0o600)
    assert "********" in text
    assert shown(home, "settings")[0] == 0
    assert shown(home, "init", "--yes")[0] == 2
    unit = (home / ".config" / "systemd" / "user" / "opencode-a2a.service").read_text()
    assert f'serve --config "{file}"' in unit
