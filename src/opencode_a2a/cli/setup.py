"""``init`` and ``migrate``: write the settings file, and import the tasks of an earlier version.

Every question of ``init`` has a flag, so that a script can answer it; nothing is started or
installed. ``migrate`` never changes its source and can be repeated: it skips what it has imported.
"""

import asyncio
import json
import os
import secrets
import shutil
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NoReturn

import click

from opencode_a2a.cli.serve import config_option, load_settings
from opencode_a2a.config import (
    SETTINGS,
    DatabaseUrl,
    Settings,
    SettingsError,
    default_file,
    load,
    loopback,
    provider_configured,
)
from opencode_a2a.databases import database_file, is_shared, kind_of
from opencode_a2a.printable import command

ASKS = ("all", *SETTINGS["opencode.ask"].choices, "none")
UNIT = """\
[Unit]
Description=OpenCode as an A2A agent

[Service]
Type=notify
NotifyAccess=main
WatchdogSec=60
ExecStart={command} serve --config {config}
WorkingDirectory={workspace}
Environment={path}
# Keys of model providers, a line each, such as ANTHROPIC_API_KEY=…
EnvironmentFile=-%h/.config/opencode-a2a/environment
Restart=on-failure
RestartPreventExitStatus=2
TimeoutStartSec=180
TimeoutStopSec=30
# The service ends what it started, or keeps it for the next start.
KillMode=process
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""


@click.command()
@click.option(
    "--workspace",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="The project that the agent works on.",
)
@click.option("--ask", type=click.Choice(ASKS), help="What the agent asks permission for.")
@click.option("--host", help="Address to listen on; for a public one, a token is generated.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option("--public-url", help="URL that clients use, for example that of a proxy.")
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@click.option("--systemd", is_flag=True, help="Also write a systemd user unit.")
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option("--yes", is_flag=True, help="Ask nothing; use the flags and defaults.")
def init(
    workspace: Path | None,
    ask: str | None,
    host: str | None,
    port: int | None,
    public_url: str | None,
    config: Path | None,
    systemd: bool,
    force: bool,
    yes: bool,
) -> None:
    """Write a settings file, and say what is still missing.

    The default is your own settings file, ~/.config/opencode-a2a/config.toml.
    """
    file = config or default_file(os.environ)
    if file is None:
        raise click.UsageError("HOME is not set; name a file with --config")
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise click.UsageError(
            "the current directory no longer exists; change to another"
        ) from None
    file = file.absolute()
    if file.exists() and not force:
        raise click.UsageError(f"{file} exists; edit it, or replace it with --force")
    if not yes and sys.stdin.isatty():
        kind = click.Path(exists=True, file_okay=False, path_type=Path)
        offered = str(workspace or here)
        workspace = click.prompt("Project that the agent works on", offered, type=kind)
        if ask is None:
            asks = click.confirm("Should it ask before commands, edits and web requests?", True)
            ask = "all" if asks else "none"
        if host is None and click.confirm("Should other machines reach it?", False):
            host = click.prompt("Address to listen on", "0.0.0.0")  # noqa: S104 - the person's choice
            public_url = public_url or click.prompt("URL that they use", "", show_default=False)
    given: dict[str, dict[str, object]] = {"opencode": {}, "a2a": {}, "auth": {}}
    given["opencode"]["workspace_root"] = str((workspace or here).absolute())
    given["opencode"]["ask"] = ask or "all"
    named = {"host": host, "port": port, "public_url": public_url}
    given["a2a"] = {name: value for name, value in named.items() if value}
    reachable = host is not None and not loopback(host)
    if reachable:
        given["auth"]["bearer_token"] = secrets.token_urlsafe(32)
    text = "# Settings of opencode-a2a; `opencode-a2a settings` lists all of them.\n" + "".join(
        f"\n[{group}]\n"
        + "".join(
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in table.items()
        )
        for group, table in given.items()
        if table
    )
    settings = write(file, text)
    click.echo(f"Wrote {file} (mode 0600):\n")
    click.echo("".join(f"  {line}\n" for line in shown(text)))
    if systemd:
        write_unit(file, settings, force=force)
    for advice in missing(settings):
        click.echo(advice)
    option = [] if file == default_file(os.environ) else ["--config", str(file)]
    click.echo(f"Start it with: {command('serve', *option)}")
    if reachable:
        click.echo("Clients need the bearer_token in the file.")


def shown(text: str) -> list[str]:
    """Return the lines of the file without the token."""
    return [
        'bearer_token = "********"' if line.startswith("bearer_token") else line
        for line in text.strip().splitlines()
    ]


def write(file: Path, text: str) -> Settings:
    """Write the settings if `serve` would take them, for the user alone; else say why not."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(
            "w", dir=file.parent, prefix=".config-", delete=False, encoding="utf-8"
        ) as written:
            written.write(text)  # the file has mode 0600 from its beginning
        draft = Path(written.name)
        try:
            settings = load({}, os.environ, draft)
        except SettingsError as error:
            draft.unlink()
            for problem in error.problems:
                click.echo(str(problem).replace(str(draft), str(file)), err=True)
            click.echo("Nothing was written.", err=True)
            sys.exit(2)
        draft.rename(file)
    except UnicodeError:
        text = "the name of a directory is not valid UTF-8; choose another"
        raise click.ClickException(text) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror}") from error
    return settings


def missing(settings: Settings) -> list[str]:
    """Return what else has to be there, with the remedy."""
    found: list[str] = []
    if settings.opencode.managed_server and not shutil.which(settings.opencode.command):
        from opencode_a2a.opencode.process import INSTALL  # half a second to import

        found.append(f"OpenCode is not installed: {INSTALL}")
    if not provider_configured(settings, os.environ):
        found.append(
            "No model provider is set up: run `opencode auth login`, or set its key, such as "
            "ANTHROPIC_API_KEY, where you start the service. To try it without one, use --demo"
        )
    return found


def write_unit(file: Path, settings: Settings, *, force: bool) -> None:
    """Write a unit that starts the service with this file when the user logs in."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    unit = Path(base) / "systemd" / "user" / "opencode-a2a.service"
    if unit.exists() and not force:
        raise click.ClickException(f"{unit} exists; replace it with --force")
    found = shutil.which("opencode-a2a")
    started = [found] if found else [sys.executable, "-m", "opencode_a2a"]
    text = UNIT.format(
        command=" ".join(map(_quoted, started)),
        config=_quoted(str(file)),
        workspace=str(settings.workspace or Path.home()).replace("%", "%%"),
        path=_quoted(f"PATH={os.environ.get('PATH', os.defpath)}"),
    )
    try:
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
    except OSError as error:
        raise click.ClickException(f"cannot write {unit}: {error.strerror}") from error
    click.echo(f"Wrote {unit}. Start it with:")
    click.echo("  systemctl --user daemon-reload && systemctl --user enable --now opencode-a2a")
    click.echo("Keys of model providers belong in ~/.config/opencode-a2a/environment (mode 0600).")
    click.echo("To have it run while you are logged out: loginctl enable-linger\n")


def _quoted(word: str) -> str:
    """Return a word as systemd reads it: in quotes, without specifiers."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


class DatabaseUrlType(click.ParamType[str]):
    """The URL of a database, checked as the setting is."""

    name = "URL"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter[str](DatabaseUrl).validate_python(value)
        except ValidationError as error:
            text = error.errors()[0]["msg"].removeprefix("Value error, ")
            self.fail(text, param, ctx)


@click.command()
@click.option(
    "--from", "source", type=DatabaseUrlType(), required=True, help="The database to import."
)
@click.option(
    "--to",
    "target",
    type=DatabaseUrlType(),
    help="The database to fill.  [the configured one]",
)
@config_option
def migrate(source: str, target: str | None, config: Path | None) -> None:
    """Import finished tasks, the sessions of contexts and their owners from an earlier version.

    Stop this service and the earlier one first. Nothing is written to the source.
    """
    settings = load_settings({}, config)
    file, url = database_file(source), target or settings.database_url
    into = database_file(url)
    if is_shared(source):
        kind = kind_of(source)
        fail(f"only SQLite can be imported; to move a {kind.name} database, use {kind.copied_by}")
    if file is None or not file.is_file():
        fail(f"there is no database {file or 'in memory'}")
    if into is None and not is_shared(url):
        fail("the settings keep tasks in memory; name a database with --to")
    if into is not None and into.exists() and into.samefile(file):
        fail("source and target are the same file; name another target with --to")

    from opencode_a2a.store.engine import DatabaseError  # half a second to import
    from opencode_a2a_import import ImportFailedError, import_database

    days = settings.tasks.task_retention_days
    try:
        report = asyncio.run(import_database(file, url, days))
    except (DatabaseError, ImportFailedError) as error:
        fail(str(error))
    for kind, number in report.taken.items():
        click.echo(f"{kind}: {number} taken")
    for kind, number in report.left.items():
        click.echo(f"{kind}: {number} left")
    click.echo(f"{file} is unchanged; the tasks are in {into or report.target}")


def fail(text: str) -> NoReturn:
    """Say why nothing was imported, and exit as for wrong usage."""
    click.echo(f"opencode-a2a: {text}", err=True)
    sys.exit(2)
