"""``opencode-a2a doctor``: check what the service needs, in one line each, with the remedy.

Nothing is started or changed, but for a session in an external OpenCode, which is deleted again.
"""

import asyncio
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, TypeVar

import click

from opencode_a2a.announcement import running
from opencode_a2a.cli.serve import SettingsCommand, auto_demo_option, config_option, read_settings
from opencode_a2a.config import (
    Settings,
    SettingsError,
    import_hint,
    is_loopback,
    provider_configured,
)
from opencode_a2a.databases import database_file, is_shared

if TYPE_CHECKING:
    from opencode_a2a.opencode.driver import Driver
    from opencode_a2a.opencode.kinds import Found, Unusable

T = TypeVar("T")

EXPLAINED = "`opencode-a2a serve --help-all` explains every setting"
_SPACE = 1_000_000_000
"""Bytes below which a disk is soon full."""
_CLOCK = 5.0
"""Seconds by which a clock may be off without a warning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; a remedy makes it a failure, unless it is only advice."""

    subject: str
    found: str
    remedy: str | None = None
    advice: bool = False

    @property
    def failed(self) -> bool:
        return self.remedy is not None and not self.advice

    def __str__(self) -> str:
        line = f"{self.mark:<7} {self.subject}: {self.found}"
        return f"{line}\n        {self.remedy}" if self.remedy else line

    @property
    def mark(self) -> str:
        return "failed" if self.failed else "advice" if self.remedy else "ok"


@click.command(cls=SettingsCommand)
@config_option
@auto_demo_option
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def doctor(config: Path | None, auto_demo: bool, as_json: bool, **flags: str | None) -> None:
    """Check what the service needs, and name the remedy for each problem.

    Takes the flags of `serve` and checks what `serve` would do with them. Also checks your running
    service. Exits with status 1 if there is a problem.
    """
    findings = list(examine(flags, config, auto_demo=auto_demo))
    failed = any(finding.failed for finding in findings)
    if as_json:
        listed = [
            {
                "subject": finding.subject,
                "status": finding.mark,
                "found": finding.found,
                "remedy": finding.remedy,
            }
            for finding in findings
        ]
        click.echo(json.dumps({"ok": not failed, "findings": listed}, indent=2))
    else:
        colours = {"failed": "red", "advice": "yellow", "ok": "green"}
        for finding in findings:
            mark, _, rest = str(finding).partition(" ")
            click.echo(click.style(mark, fg=colours[mark]) + f" {rest}")
    sys.exit(failed)


def examine(
    flags: Mapping[str, str | None], config: Path | None, *, auto_demo: bool
) -> Iterator[Finding]:
    """Yield what the checks find; without valid settings there is little to check."""
    yield check_python()
    try:
        settings = read_settings(flags, config, auto_demo=auto_demo)
    except SettingsError as error:
        for problem in error.problems:
            yield Finding("settings", str(problem), EXPLAINED)
        return
    yield from check_settings(settings)
    if settings.opencode.managed_server:
        yield check_command(settings.opencode.command)
    for _, own in settings.fleet:
        if not own.opencode.managed_server:
            reached = check_reachable(own)
            yield reached
            if not reached.failed:
                yield check_password(own)
    yield from check_provider(settings)
    yield check_permissions(settings)
    yield from check_rules(settings)
    yield check_search(settings)
    if settings.notices.notify:
        yield check_notices(settings)
    yield from check_state(settings)
    if is_shared(settings.database_url):
        yield from check_shared_database(settings)
    else:
        yield check_database_file(settings)
    yield check_space(settings)
    yield from check_certificate(settings)
    if settings.oidc.issuer:
        yield check_issuer(settings)
    services = [service.url for service in running(settings.a2a.state_dir)]
    for url in services:
        yield check_service(url)
    if settings.local_url not in services:
        yield check_port(settings)


def check_notices(settings: Settings) -> Finding:
    """Say where people are told of tasks, and whether a link can be opened there safely."""
    notices, quiet = settings.notices, settings.notices.notify_quiet
    found = ", ".join(entry.name for entry in notices.notify)
    if quiet is not None:
        zone = "" if quiet.zone else f" {datetime.now().astimezone():%Z} (this machine's clock)"
        found += f"; quiet {quiet}{zone}"
    url = settings.public_url
    if url.startswith("http://") and not is_loopback(url):
        remedy = "Links can be read on the way: use an https:// URL for A2A_PUBLIC_URL"
        return Finding("notifications", found, remedy, advice=True)
    if is_loopback(url):
        remedy = f"A phone cannot reach {url}: set A2A_PUBLIC_URL to an address that it can"
        return Finding("notifications", found, remedy, advice=True)
    return Finding("notifications", f"{found}; try `opencode-a2a notify --test`")


def check_python() -> Finding:
    running = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info < (3, 11)
    return Finding("python", running, "install Python 3.11 or later" if old else None)


def check_settings(settings: Settings) -> Iterator[Finding]:
    for warning in settings.warnings:
        yield Finding("settings", warning, EXPLAINED, advice=True)
    yield Finding("settings", f"valid, {len(settings.sources)} given")


def check_command(command: str) -> Finding:
    from opencode_a2a.opencode.kinds import of_version, problem_of  # heavy, as below
    from opencode_a2a.opencode.process import INSTALL

    program = shutil.which(command)
    if not program:
        remedy = f"{INSTALL}, or set OPENCODE_COMMAND"
        return Finding("opencode", f"{command} not found", remedy)
    try:
        answer = subprocess.run(  # noqa: S603 - the operator's own command, as `serve` runs it
            [program, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return Finding("opencode", f"{program} --version fails", f"reinstall it: {INSTALL}")
    found = of_version(answer.stdout)
    return judge(found, problem_of(found), program)


def judge(found: "Found", why: "Unusable | None", where: str) -> Finding:
    from opencode_a2a.opencode.kinds import doubts, untested  # heavy, as below

    if why is not None:
        return Finding("opencode", f"{where}: {why.what}", why.remedy)
    version = found.version or "an unknown version"
    advice = [*doubts(found), untested(version)]
    remedy = ". ".join(filter(None, advice)) or None
    return Finding("opencode", f"{version} ({where})", remedy, advice=True)


def _ask(settings: Settings, question: Callable[["Driver"], Awaitable[T]], timeout: float = 5) -> T:
    """Ask the external OpenCode of these settings; raise UpstreamError."""
    from opencode_a2a.errors import UpstreamError
    from opencode_a2a.opencode.connect import OpenCodeConnection  # heavy, as below

    own = settings.opencode
    password = own.auth_password.get_secret_value() if own.auth_password else None

    async def ask() -> T:
        async with OpenCodeConnection(
            own.base_url, username=own.auth_username, password=password, timeout=timeout
        ) as opencode:
            with suppress(UpstreamError):  # the question finds out what is wrong
                await opencode.choose(seconds=timeout)
            return await question(opencode.driver)

    return asyncio.run(ask())


def check_reachable(settings: Settings) -> Finding:
    from opencode_a2a.opencode.connect import examine
    from opencode_a2a.telemetry import mask_url

    async def look(opencode: "Driver") -> Finding:
        where = mask_url(settings.opencode.base_url)
        found, why = await examine(opencode.raw_response, password=opencode.has_password)
        return judge(found, why, where)

    return _ask(settings, look)


def check_password(settings: Settings) -> Finding:
    """Find out whether the agent could answer its own permissions at an external OpenCode."""
    from opencode_a2a.errors import ServiceError
    from opencode_a2a.opencode.driver import Location
    from opencode_a2a.opencode.withholding import LOOK_SECONDS, STARTED_BY_US, password_exposed
    from opencode_a2a.telemetry import mask_url

    where = mask_url(settings.opencode.base_url)
    password = settings.opencode.auth_password
    if password is None:
        found = f"{where} has none, so the agent could answer its own permissions"
        return Finding("password", found, STARTED_BY_US, advice=True)
    at = Location.of(settings.workspace)
    try:
        # A first session makes OpenCode read the whole workspace.
        place = _ask(
            settings,
            lambda opencode: password_exposed(opencode, at, password.get_secret_value()),
            LOOK_SECONDS,
        )
    except (TimeoutError, ServiceError):
        return Finding("password", f"{where}: could not find out whether the agent sees it")
    if place is not None:
        found = f"the agent's tools see that of {where} {place}, and could answer its permissions"
        return Finding("password", found, STARTED_BY_US, advice=True)
    return Finding("password", f"that of {where} is withheld from the agent's tools")


def check_rules(settings: Settings) -> Iterator[Finding]:
    """Name the rules that settle nothing, as far as that was not known from the settings alone."""
    from opencode_a2a.errors import ServiceError
    from opencode_a2a.opencode.driver import Location
    from opencode_a2a.rights import never_asked, outside, unmatched

    rules = [rule.permission for rule in settings.interrupts.permission_rules]
    found = [name for name, meant in unmatched(rules) if meant is None]
    if not found:
        return
    remedy = "check A2A_PERMISSION_RULES"
    if settings.opencode.managed_server:
        for name in found:
            unknown = f"{name} is not a permission of OpenCode's own"
            yield Finding("rules", unknown, f"{remedy}, unless a tool is called so", advice=True)
        return
    at = Location.of(settings.workspace)
    own = settings.fleet[0][1]  # any of several has the same tools
    try:
        tools = _ask(own, lambda opencode: opencode.tool_ids(at=at))
        servers = _ask(own, lambda opencode: opencode.mcp_status(at=at))
    except ServiceError:
        return  # it has no list of its tools, or the check of OpenCode itself has failed
    for name, meant in unmatched(found, outside(tools, servers)):
        yield Finding("rules", never_asked(name, meant), remedy, advice=True)


def check_provider(settings: Settings) -> Iterator[Finding]:
    """Say which model would answer, as far as that is known without starting anything."""
    opencode, key = settings.opencode, "set its key where the service is started"
    if settings.a2a.demo:
        yield Finding("model", "demo, a scripted one")
        return
    if opencode.model is not None:
        yield Finding("model", str(opencode.model))
    if not opencode.managed_server:
        return  # its providers are its own business, and it says so itself
    if provider_configured(settings, os.environ):
        yield Finding("provider", "one is set up for OpenCode")
    else:
        remedy = f"run `opencode auth login`, or {key}, such as ANTHROPIC_API_KEY; or use --demo"
        found = "none is set up; OpenCode would use its hosted models"
        yield Finding("provider", found, remedy, advice=True)


def check_permissions(settings: Settings) -> Finding:
    if settings.asked_for:
        return Finding("permissions", f"asks before {', '.join(settings.asked_for)}")
    if settings.auth.profile != "auto":
        return Finding("permissions", f"the profile {settings.auth.profile}")
    remedy = (
        "start with --ask to be asked"
        if settings.opencode.managed_server
        else "set permission in OpenCode's own configuration"
    )
    found = "OpenCode's own configuration decides; by default it allows everything"
    return Finding("permissions", found, remedy, advice=True)


def check_space(settings: Settings) -> Finding:
    """Name the room for the database and the data of OpenCode."""
    directory = settings.a2a.state_dir
    place = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free below {place}"
    if free >= _SPACE:
        return Finding("disk", found)
    remedy = "make room, or set A2A_STATE_DIR to another disk"
    return Finding("disk", found, remedy, advice=free >= _SPACE // 10)


def check_service(url: str) -> Finding:
    """Ask a service that runs whether it can do its work."""
    import httpx2

    try:
        # It is on this machine; whether others may trust its certificate is another question.
        with httpx2.Client(timeout=5, trust_env=False, verify=False) as client:
            answer = client.get(f"{url}/readyz")
            checks = answer.json()["checks"]
        failed = [name for name, state in checks.items() if state != "ok"]
    except (httpx2.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return Finding("service", f"{url} runs but does not answer", "look at what it printed")
    if failed:
        return Finding("service", f"{url} runs, but {', '.join(failed)} fails", "see its output")
    return Finding("service", f"{url} runs and is ready")


def check_search(settings: Settings) -> Finding:
    """OpenCode downloads ripgrep at first use, which fails without a network."""
    program = shutil.which("rg")
    if program or not settings.opencode.managed_server:
        return Finding("rg", program or "left to the external OpenCode")
    remedy = "install ripgrep, or OpenCode will try to download it"
    return Finding("rg", "not found", remedy, advice=True)


def check_state(settings: Settings) -> Iterator[Finding]:
    """Try to write where `serve` will: permissions alone say little, and nothing to root."""
    if settings.knows_callers and not settings.opencode.managed_server:
        return  # nothing is kept there
    directory = settings.a2a.state_dir
    try:
        place = next(path for path in (directory, *directory.parents) if os.path.exists(path))
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        found = f"cannot write to {directory}: {error.strerror}"
        yield Finding("state", found, "set A2A_STATE_DIR to one that can be written")
    else:
        yield Finding("state", str(directory))


def check_database_file(settings: Settings) -> Finding:
    from opencode_a2a.store.authorship import Author, author_of

    file = database_file(settings.database_url)
    another = "set A2A_TASK_STORE_DATABASE_URL to another file"
    if file is None:
        return Finding("database", "in memory, tasks end with the service")
    try:
        author = author_of(file)
    except (OSError, sqlite3.Error) as error:
        return Finding("database", f"{file} cannot be read: {error}", another)
    if author is Author.EARLIER:
        return Finding(
            "database", f"{file} was written by {author.value}", import_hint(settings, file)
        )
    if author is Author.FOREIGN:
        return Finding("database", f"{file} was written by {author.value}", another)
    place = next(path for path in (file, *file.parents) if os.path.exists(path))
    if os.access(place, os.W_OK) and (place == file or place.is_dir()):
        return Finding("database", str(file))
    return Finding("database", f"{place} cannot be written", another)


def check_shared_database(settings: Settings) -> Iterator[Finding]:
    from opencode_a2a.store.database import make_engine
    from opencode_a2a.store.engine import ConnectionOptions, DatabaseError

    tasks = settings.tasks
    options = ConnectionOptions(tasks.task_store_pooled, tasks.task_store_listen_url)
    try:
        found = make_engine(settings.database_url, options=options).examine()
    except DatabaseError as error:
        problem, _, remedy = str(error).rpartition("; ")
        yield Finding("database", problem, remedy)
        return
    yield Finding("database", found.about)
    apart = f"{abs(found.ahead):.1f} s {'behind' if found.ahead > 0 else 'ahead of'} the database's"
    remedy = "set the clock of this machine; what is stored has the database's time"
    yield Finding("clock", apart, remedy if abs(found.ahead) > _CLOCK else None, advice=True)
    if found.hears:
        yield Finding("notifications", "replicas hear each other")
    else:
        remedy = "set A2A_TASK_STORE_LISTEN_URL to an address of the server, past a pooler"
        often = f"not heard; replicas look every {settings.replica.poll_seconds:g} s instead"
        yield Finding("notifications", often, remedy, advice=True)
    live = {one.no: one for one in found.live}
    listed = ", ".join(f"{one.name} ({one.version})" for one in live.values())
    yield Finding("replicas", listed or "none runs")
    for row in found.upstreams:
        owner = live.get(row.owner or 0)
        runs = f"run by {owner.name}, {row.state}" if owner else f"run by nobody, {row.state}"
        yield Finding("upstream", f"{row.name} {runs}")


def check_certificate(settings: Settings) -> Iterator[Finding]:
    if settings.tls.cert_file is None:
        return
    from opencode_a2a.web.tls import WARNING, read_pair

    try:
        _, expires = read_pair(settings.tls)
    except SettingsError as error:
        yield Finding("certificate", str(error), "renew the files, or correct A2A_TLS_*")
        return
    now = datetime.now(UTC)
    found = f"{settings.tls.cert_file} expires on {expires:%Y-%m-%d}"
    if expires < now:
        found = f"{settings.tls.cert_file} expired on {expires:%Y-%m-%d}"
    remedy = "renew it" if expires - now < WARNING else None
    yield Finding("certificate", found, remedy, advice=expires > now)


def check_issuer(settings: Settings) -> Finding:
    from opencode_a2a.web.oidc import Issuer, KeysError

    try:
        found = asyncio.run(Issuer(settings.oidc, settings.auth.rights).examine())
    except KeysError as error:
        return Finding("issuer", str(error), "check A2A_OIDC_ISSUER and A2A_OIDC_JWKS_URL")
    return Finding("issuer", found)


def check_port(settings: Settings) -> Finding:
    host, port = settings.a2a.host, settings.a2a.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = "stop what uses it, or set A2A_HOST and A2A_PORT"
            return Finding("port", f"{host}:{port}: {error.strerror}", remedy)
    return Finding("port", f"{host}:{port} is free")
