"""``opencode-a2a opencode``: start an OpenCode that runs by itself, as ``serve`` starts its own.

The process becomes OpenCode. What a service in front of it must not share with the agent is not
in its environment: the password, which the agent could use to answer its own permissions, and the
settings and secrets of a service.
"""

import os
import shutil
import stat
import sys
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from opencode_a2a.cli.serve import config_option
from opencode_a2a.config import VARIABLES, SettingsError, load_for_opencode

PASSWORD_FILE = "OPENCODE_SERVER_PASSWORD_FILE"  # noqa: S105 - the name of a variable


@click.command()
@config_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def opencode(config: Path | None, arguments: tuple[str, ...]) -> None:
    """Start an OpenCode for a service that does not start it itself.

    The arguments after `--` are OpenCode's; without any it is `serve`. The password is in
    OPENCODE_SERVER_PASSWORD, or in the file that OPENCODE_SERVER_PASSWORD_FILE names. The agent's
    tools do not get it, so that the agent cannot answer its own permissions, nor any setting or
    secret of a service.

    \b
      opencode-a2a opencode -- serve --hostname 127.0.0.1 --port 4096
      OPENCODE_BASE_URL=http://127.0.0.1:4096 OPENCODE_AUTH_PASSWORD=… opencode-a2a serve
    """
    # OpenCode's client takes a moment to import.
    from opencode_a2a.opencode.managed import find_command, install_nothing, passed_environment
    from opencode_a2a.opencode.process import OpenCodeStartError
    from opencode_a2a.opencode.upstream import TELEMETRY, withheld
    from opencode_a2a.opencode.withholding import PASSWORD, withholding

    try:
        settings = load_for_opencode(os.environ, config)
    except SettingsError as error:
        _fail(*map(str, error.problems))
    if os.environ.get("OPENCODE_PURE") or "--pure" in arguments:
        _fail("OPENCODE_PURE, --pure: OpenCode needs the plugin that withholds its password")
    password = _password(os.environ)
    own = settings.opencode
    # Its telemetry is its own here: no service shares this environment.
    hidden = withheld(settings) - {TELEMETRY}
    passed = passed_environment(os.environ, hidden, own.env_passthrough)
    try:
        executable = find_command(own.command, passed.get("PATH"))
        variables = withholding(passed) | {PASSWORD: password}
    except OpenCodeStartError as error:
        _fail(str(error))
    if username := os.environ.get("OPENCODE_SERVER_USERNAME"):
        variables["OPENCODE_SERVER_USERNAME"] = username
    with suppress(OSError, RuntimeError):  # no home, or not ours to write to
        install_nothing(Path(passed.get("XDG_CONFIG_HOME") or Path.home() / ".config"))
    _warn(executable, password)
    sys.stdout.flush()
    if os.getpid() == 1 and (init := shutil.which("tini")):
        _start_behind(init, password, hidden)
    os.execve(executable, [executable, *(arguments or ("serve",))], variables)  # noqa: S606 - the operator's own command


def _start_behind(init: str, password: str, hidden: Set[str]) -> NoReturn:
    """Start again as the child of an init, which gets neither the password nor another secret.

    The first process of a container is sent no signal that it does not ask for, and has to reap
    what the agent's commands leave behind; OpenCode does neither. The agent's tools can read the
    environment of the init. So the password goes through a pipe, which is empty once it was read.
    """
    reading, writing = os.pipe()
    os.write(writing, password.encode())
    os.close(writing)
    os.set_inheritable(reading, True)
    secret = {name for name in hidden if name not in VARIABLES or VARIABLES[name].secret}
    passed = {name: value for name, value in os.environ.items() if name not in secret}
    passed.pop("OPENCODE_SERVER_PASSWORD", None)
    passed[PASSWORD_FILE] = f"/dev/fd/{reading}"
    os.execve(init, [init, "--", sys.executable, *sys.orig_argv[1:]], passed)  # noqa: S606 - found on the path


def _password(environ: Mapping[str, str]) -> str:
    """Return OpenCode's password; exit if there is none."""
    given, file = environ.get("OPENCODE_SERVER_PASSWORD"), environ.get(PASSWORD_FILE)
    if given and file:
        _fail(f"{PASSWORD_FILE}: OPENCODE_SERVER_PASSWORD is set too; set one of them")
    if file:
        try:
            given = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            _fail(f"{PASSWORD_FILE}: cannot read {file}: {why}")
        if not given:
            _fail(f"{PASSWORD_FILE}: {file} is empty")
    if not given:
        _fail(
            f"OPENCODE_SERVER_PASSWORD: set it, or {PASSWORD_FILE}; without a password the agent "
            "could answer its own permissions"
        )
    if "\0" in given or "\n" in given:
        _fail(f"{PASSWORD_FILE}: {file} has more than one line")
    return given


def _warn(executable: str, password: str) -> None:
    """Say where the agent's tools can read the password nevertheless, since they are this user."""
    from opencode_a2a.opencode.withholding import processes_showing

    seen: list[str] = []
    file = os.environ.get(PASSWORD_FILE)
    if file and os.path.exists(file) and stat.S_ISREG(os.stat(file).st_mode):
        remedy = "have it readable by root alone, and give it as OPENCODE_SERVER_PASSWORD"
        seen.append(f"{file}, which this user can read; {remedy}")
    seen += [
        f"the environment of {process}; start this command without it"
        for process in processes_showing(password)
    ]
    with open(executable, "rb") as program:
        if program.read(2) == b"#!":
            remedy = "set OPENCODE_COMMAND to the OpenCode program itself"
            seen.append(f"the environment of {executable}, if that launches OpenCode; {remedy}")
    for place in seen:
        click.echo(f"warning: the agent's tools can read OpenCode's password in {place}", err=True)


def _fail(*problems: str) -> NoReturn:
    for problem in problems:
        click.echo(problem, err=True)
    sys.exit(2)
