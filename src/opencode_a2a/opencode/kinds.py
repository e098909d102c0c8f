"""Which kind of OpenCode answers, and why it cannot be used.

Each generation of OpenCode reports its version at a different path, and some serve their web page
at every path that they do not know. ``recognise`` is pure: it judges the responses that ``probe``
collects, or a recording of them. ``opencode.connect`` chooses the driver by that.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from opencode_a2a.errors import UpstreamPayloadError, UpstreamUnreachableError
from opencode_a2a.events import JsonObject
from opencode_a2a.jsonguard import as_object, loads, text_in
from opencode_a2a.net.exchange import HttpResponse
from opencode_a2a.opencode.process import INSTALL, PREVIEW, QUALIFIED
from opencode_a2a.printable import one_line

OLDEST: Final = (1, 1)
"""1.0 has neither a health check nor permissions that can be answered."""
PROBE_SECONDS: Final = 5.0
"""Seconds that one response may take."""
HEALTH: Final = "/global/health"
HEALTH_OF_2: Final = ("/api/info", "/api/status", "/api/health")
"""Where OpenCode 2 tells its version: from 2.0.6 on, in 2.0.4 and 2.0.5, and before that."""
CONTRACT: Final = "/openapi.json"
"""The contract of OpenCode 2: another release may move its health check once more."""
PATHS: Final = "/path"
"""What 1.0 answers as all of 1.x does."""
ASKED: Final = (HEALTH, *HEALTH_OF_2, CONTRACT, PATHS)


class Kind(Enum):
    """What answers at an address."""

    V1 = "OpenCode 1, 1.1 or later"
    V1_0 = "OpenCode 1.0 or earlier"
    V2 = "OpenCode 2 or a preview of it"
    LOCKED = "something that refuses the credentials"
    FAILING = "something that answers with a server error, as OpenCode 2 does while it starts"
    PAGE = "a web page"
    OTHER = "something that is not OpenCode"
    NOTHING = "nothing, or not in time"


@dataclass(frozen=True, slots=True)
class Found:
    """What was found, with its version as far as it says that."""

    kind: Kind
    version: str | None = None
    status: int | None = None
    """The HTTP status that tells this kind, for ``LOCKED`` and ``FAILING``."""
    unnamed: tuple[str, ...] = ()
    """The fields of messages that are read and that the contract of an OpenCode 2 lacks."""
    lacking: tuple[str, ...] = ()
    """The calls that it lacks and that turns can do without, with what is off."""

    @property
    def usable(self) -> bool:
        """Whether this service has a driver for it."""
        return self.kind in (Kind.V1, Kind.V2)

    @property
    def lasting(self) -> bool:
        """Whether it stays unusable until a person changes something."""
        return not self.usable and self.kind not in (Kind.FAILING, Kind.NOTHING)


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why something cannot be used, and the remedy."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


# Versions


def untested(version: str) -> str | None:
    """Return a warning about a version that was not tested: a newer one, or a custom build."""
    number, newest = _number(version), _number(QUALIFIED)
    if version == PREVIEW or (number is not None and newest is not None and number <= newest):
        return None
    return (
        f"OpenCode {version} was not tested with this service; {QUALIFIED} of OpenCode 1 and the "
        f"preview {PREVIEW} of OpenCode 2 were"
    )


def doubts(found: Found) -> list[str]:
    """Return warnings about fields and calls that an OpenCode 2 lacks, or calls otherwise."""
    name, said = f"OpenCode {found.version or 2}", list[str]()
    if found.unnamed:
        said.append(
            f"{name} does not name what is read of its messages: "
            f"{', '.join(found.unnamed)}. It counts as nothing, also for budgets"
        )
    if found.lacking:
        said.append(f"{name} lacks calls that turns can do without: {', '.join(found.lacking)}")
    return said


def of_version(printed: str) -> Found:
    """Judge the version that a health check of 1.x tells, or that a program prints.

    A custom build has a version that says nothing. It counts as one of 1.x, which is not tested.
    """
    # Previews of OpenCode 2 call themselves `opencode2 v0.0.0-next-16350`.
    named = re.fullmatch(r"(?:(opencode\w*) )?v?(.*)", one_line(printed))
    program, version = named.groups() if named else (None, "")
    number = _number(version)
    if program == "opencode2" or (number is not None and number[0] > OLDEST[0]):
        return Found(Kind.V2, version)
    old = number is not None and number[:2] < OLDEST
    return Found(Kind.V1_0 if old else Kind.V1, version)


def _number(version: str) -> tuple[int, ...] | None:
    """Return the three numbers of a version; None for a custom build, and for 0.0.0."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(int(part) for part in found.groups()) if found else ()
    return number if any(number) else None


# Responses


def recognise(responses: Mapping[str, HttpResponse]) -> Found:
    """Judge what a server answered at some of the paths in ``ASKED``."""
    for response in responses.values():
        if response.status in (401, 403):
            return Found(Kind.LOCKED, status=response.status)
    told = {path: _json(response) for path, response in responses.items()}
    if version := text_in(told.get(HEALTH, {}), "version"):
        return of_version(version)
    for path in HEALTH_OF_2:
        if version := text_in(told.get(path, {}), "version"):
            return Found(Kind.V2, one_line(version))
    if "/api/session" in as_object(told.get(CONTRACT, {}).get("paths")):
        return Found(Kind.V2)
    if text_in(told.get(PATHS, {}), "worktree"):
        return Found(Kind.V1_0)
    for response in responses.values():
        if response.status >= 500:
            return Found(Kind.FAILING, status=response.status)
    pages = (_media_type(response) == "text/html" for response in responses.values())
    return Found(Kind.PAGE if any(pages) else Kind.OTHER)


def _media_type(response: HttpResponse) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def _json(response: HttpResponse) -> JsonObject:
    """Return the JSON object that a response holds; an empty one if it holds anything else."""
    if response.status != 200 or _media_type(response) != "application/json":
        return {}
    try:
        return as_object(loads(response.body))
    except ValueError:
        return {}


RawResponse = Callable[[str], Awaitable[HttpResponse]]
"""Returns what is at a path: ``Driver.raw_response``."""


async def probe(raw_response: RawResponse, *, seconds: float = PROBE_SECONDS) -> Found:
    """Find out what answers, in up to six requests; stop at the first that settles it."""
    responses: dict[str, HttpResponse] = {}
    for path in ASKED:
        response = await response_at(path, raw_response, seconds)
        if isinstance(response, Found):
            return response
        responses[path] = response
        found = recognise(responses)
        if found.kind in (Kind.V1, Kind.V1_0, Kind.V2, Kind.LOCKED):
            return found
    return recognise(responses)


async def response_at(path: str, raw_response: RawResponse, seconds: float) -> HttpResponse | Found:
    """Return the response at a path, or what its absence tells."""
    try:
        async with asyncio.timeout(seconds):
            return await raw_response(path)
    except (TimeoutError, UpstreamUnreachableError):
        return Found(Kind.NOTHING)
    except UpstreamPayloadError:
        return Found(Kind.OTHER)


# Sentences


def problem_of(found: Found, *, password: bool = True) -> Unusable | None:
    """Return why this service cannot use what was found; None if it can.

    ``password`` says whether one was sent.
    """
    another = "set OPENCODE_BASE_URL to the address of an OpenCode"
    match found.kind:
        case Kind.V1 | Kind.V2:
            return None
        case Kind.V1_0:
            what = f"it is OpenCode {found.version or 'before 1.1'}"
            return Unusable(f"{what}, and this service needs 1.1 or later", INSTALL)
        case Kind.LOCKED:
            what = "refuses the user name or the password" if password else "asks for a password"
            remedy = (
                "set OPENCODE_AUTH_PASSWORD to the OPENCODE_SERVER_PASSWORD that it was started "
                "with, and OPENCODE_AUTH_USERNAME if its user is not `opencode`"
            )
            return Unusable(f"it {what} (status {found.status})", remedy)
        case Kind.FAILING:
            return Unusable(f"it answers with status {found.status}", "look at what it printed")
        case Kind.PAGE:
            what = "it answers with a web page where OpenCode tells its version"
            return Unusable(what, another)
        case Kind.OTHER:
            return Unusable("it is not an OpenCode that this service knows", another)
        case Kind.NOTHING:
            remedy = (
                "start it with `opencode-a2a opencode`, set OPENCODE_BASE_URL, or let this program "
                "start one with --managed"
            )
            return Unusable("it does not answer", remedy)
