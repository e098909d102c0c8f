"""The console for browsers: its files, their headers, and how people sign in to it.

The files are served before authentication, because a browser cannot send a credential when it
opens a page; they hold nothing secret. The console uses the public API like any other client. Only
signing in exists for it alone: ``SignIns`` exchanges a one-time code for a session, a token of the
same caller.
"""

import asyncio
import gzip
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Protocol

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope
from structlog.typing import FilteringBoundLogger

from opencode_a2a.clock import now_ms
from opencode_a2a.config import StateError
from opencode_a2a.errors import LimitExceededError, StoreUnavailableError, UnauthenticatedError
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.server.http import OrjsonResponse
from opencode_a2a.store import callers
from opencode_a2a.store.database import Database
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.web.auth import (
    CREDENTIAL,
    AcceptedCredential,
    generate_token,
    read_authorization,
)

logger: FilteringBoundLogger = structlog.get_logger()

CONSOLE = "/console"
CODES = f"{CONSOLE}/codes"
SESSION = f"{CONSOLE}/session"
_EXCHANGE = f"POST {SESSION}"
"""The request that exchanges a code for a session."""
CODE_SECONDS = 60
SESSION_SECONDS = 12 * 3600
LOOK_SECONDS = 2.0
"""How often a replica reads the sign-outs of the others."""
MOST_CODES = 100
"""Codes that one credential may have at a time."""
REFUSES_GZIP = re.compile(r"\bgzip\s*;\s*q=0(\.0*)?\s*(,|$)", re.IGNORECASE)
_FOLDER = Path(__file__).parent / "console"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_UNSTORED = {"cache-control": "no-store"}
_REDIRECTS = {"/": "console", "/docs": "console#/docs", f"{CONSOLE}/": "../console"}
"""Where a browser is redirected to; relative, since a proxy may put the service below a path."""


class StaticFile(NamedTuple):
    content: bytes
    packed: bytes
    """Compressed. Each is too small for ``Compression``, but together they are large."""
    media_type: str
    tag: str
    policy: str = POLICY
    """What its page may load and do."""


@cache
def static_files(folder: Path = _FOLDER, root: str = CONSOLE) -> dict[str, StaticFile]:
    """Return the files of a folder by their paths; ``root`` is that of its index."""
    found: dict[str, StaticFile] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in _TYPES:
            path = root if file.name == "index.html" else f"{root}/{file.name}"
            content = file.read_bytes()
            tag = f'"{sha256(content).hexdigest()[:16]}"'
            packed = gzip.compress(content, mtime=0)
            found[path] = StaticFile(content, packed, _TYPES[file.suffix], tag)
    return found


def page(scope: Scope, files: Mapping[str, StaticFile]) -> Response | None:
    """Return the file or redirect that a browser asks for; None for everything else."""
    path, headers = scope["path"], Headers(scope=scope)
    # Other programs get what these paths have always answered.
    if path in _REDIRECTS and "text/html" in headers.get("accept", ""):
        # A prefix that was requested without its slash changes what the redirect is relative to.
        asked: bytes = scope.get("raw_path") or b"/"
        below = "" if path != "/" or asked.endswith(b"/") else asked.decode().rpartition("/")[2]
        place = f"{below}/{_REDIRECTS[path]}" if below else _REDIRECTS[path]
        return RedirectResponse(place, headers=_HEADERS)
    if path not in files:
        return None
    content, packed, kind, tag, policy = files[path]
    more = {**_HEADERS, "content-type": kind, "etag": tag, "cache-control": "no-cache"}
    more["content-security-policy"] = policy
    more["vary"] = "Accept-Encoding"
    if headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=more)
    accepted = headers.get("accept-encoding", "")
    if "gzip" in accepted and not REFUSES_GZIP.search(accepted):
        return Response(packed, headers=more | {"content-encoding": "gzip"})
    return Response(content, headers=more)


class SignInRecords(Protocol):
    """Stores sign-ins for a restart and for other processes."""

    async def secret(self) -> bytes:
        """Return the secret that codes and sessions are signed with."""
        ...

    async def ended(self) -> dict[bytes, int]:
        """Return the digests of ended codes and sessions, and when (ms) each can be forgotten."""
        ...

    async def end(self, digest: bytes, until: int) -> bool:
        """Store that a code or session has ended; return False if that was stored already."""
        ...


class StateRecords:
    """Keeps the records as files in the state directory."""

    def __init__(self, state: Path) -> None:
        self._key = state / "console-key"
        self._folder = state / "console-ended"

    async def secret(self) -> bytes:
        try:
            return generate_token(self._key).encode()
        except StateError as error:
            logger.warning("console sessions will end with the service", cause=str(error))
            return secrets.token_bytes(32)

    async def ended(self) -> dict[bytes, int]:
        def read() -> dict[bytes, int]:
            """Read what has ended, and remove what has expired since."""
            found: dict[bytes, int] = {}
            for file in self._folder.glob("*"):
                with suppress(OSError, ValueError):  # not ours, or just removed by another process
                    ends = int((file.stat().st_mtime + SESSION_SECONDS) * 1000)
                    if ends < now_ms():
                        file.unlink()
                    else:
                        found[bytes.fromhex(file.name)] = ends
            return found

        return await asyncio.to_thread(read)

    async def end(self, digest: bytes, until: int) -> bool:
        def write() -> bool:
            """Make a file for each: that is atomic, and services may share the directory."""
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file, noted = self._folder / digest.hex(), until / 1000 - SESSION_SECONDS
            try:
                file.touch(0o600, exist_ok=False)
            except FileExistsError:
                return False
            os.utime(file, (noted, noted))
            return True

        try:
            return await asyncio.to_thread(write)
        except OSError as error:
            logger.warning("the end of a session could not be stored", cause=str(error))
            return True


class SharedRecords:
    """Keeps the records in the database that several replicas share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def secret(self) -> bytes:
        proposed = secrets.token_bytes(32)
        return await self._database.write(callers.shared_secret, proposed)

    async def ended(self) -> dict[bytes, int]:
        return await self._database.read(callers.ended_sign_ins)

    async def end(self, digest: bytes, until: int) -> bool:
        return await self._database.write(callers.end_sign_in, digest, until)


class SignIns:
    """One-time codes, and the sessions of the console that they are exchanged for.

    Both are tokens, signed with a secret of the service and the digest of the credential that they
    came from. So a session survives a restart, it ends when that credential is no longer accepted,
    and it does not help anybody who has it to guess that credential.
    """

    def __init__(self, credentials: Iterable[AcceptedCredential], records: SignInRecords) -> None:
        self._credentials = tuple(credentials)
        self._records = records
        self._keys: dict[bytes, bytes] = {}
        """The signing key of each credential, by the digest of the credential."""
        self._issued_codes: list[tuple[int, AcceptedCredential]] = []
        """When each code that was issued here expires (ms), and its credential; oldest first."""
        self._ended: dict[bytes, int] = {}
        """The digests of ended codes and sessions, and when (ms) each can be forgotten."""

    async def start(self) -> None:
        secret = await self._records.secret()
        self._keys = {
            one.digest: hmac.digest(secret, one.digest, "sha256") for one in self._credentials
        }
        self._ended = await self._records.ended()

    async def run(self) -> None:
        """Keep reading which sessions were signed out at other replicas."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(StoreUnavailableError):
                self._ended |= await self._records.ended()
            self._ended = {key: until for key, until in self._ended.items() if now_ms() < until}

    def routes(self) -> list[BaseRoute]:
        return [
            Route(CODES, self._new_code, methods=["POST"]),
            Route(SESSION, self._show, methods=["GET"]),
            Route(SESSION, self._begin, methods=["POST"]),
            Route(SESSION, self._end, methods=["DELETE"]),
        ]

    def find(self, secret: bytes, target: str) -> AcceptedCredential | None:
        """Return the credential behind a token of ours, or None.

        For the request that exchanges a code that is a code, for every other one a session.
        """
        exchanges = target == _EXCHANGE
        kind, longest = (_CODE, CODE_SECONDS) if exchanges else (_SESSION, SESSION_SECONDS)
        claims, _, signature = secret.rpartition(kind.mark)
        if not claims.startswith(kind.name) or sha256(secret).digest() in self._ended:
            return None
        for credential in self._credentials:
            if hmac.compare_digest(self._signature(credential, kind, claims), signature):
                # By the wall clock, since it has to survive a restart.
                left = kind.end_of(secret) - now_ms() / 1000
                return replace(credential, scheme="bearer") if 0 < left <= longest + 1 else None
        return None

    async def _new_code(self, request: Request) -> Response:
        now = now_ms()
        _, _, secret = read_authorization(
            [request.headers.get("authorization", "").encode("latin-1")]
        )
        if secret.startswith(b"console."):
            raise UnauthenticatedError(
                "A session of the console gets no code; use the token or password itself"
            )
        # Not the caller, which several secrets may stand for: the session ends with its secret.
        credential: AcceptedCredential = request.scope[CREDENTIAL]
        if credential not in self._credentials:
            raise UnauthenticatedError(
                "A token of an identity provider gets no code: the session would outlive it. "
                "Sign in with the token itself."
            )
        self._issued_codes = [one for one in self._issued_codes if now < one[0]]
        if sum(one is credential for _, one in self._issued_codes) >= MOST_CODES:
            raise LimitExceededError(
                "Too many sign-in codes at once; try again in a minute", limit=MOST_CODES
            )
        self._issued_codes.append((now + CODE_SECONDS * 1000, credential))
        code = self._sign(credential, _CODE, CODE_SECONDS)
        return OrjsonResponse({"code": code, "expires_in": CODE_SECONDS}, headers=_UNSTORED)

    async def _show(self, request: Request) -> Response:
        """Say who is signed in, with whatever credential."""
        caller: Caller = request.scope[SCOPE_KEY]
        return OrjsonResponse({"principal": caller.principal}, headers=_UNSTORED)

    async def _begin(self, request: Request) -> Response:
        code = request.headers.get("authorization", "").partition(" ")[2].strip()
        credential = self.find(code.encode(), _EXCHANGE)
        if credential is None or not await self._use_up(_CODE, code):
            raise UnauthenticatedError("Expected a one-time code from `opencode-a2a console`")
        token = self._sign(credential, _SESSION, SESSION_SECONDS)
        AUDIT.info("console session begun", principal=credential.caller.principal)
        return OrjsonResponse({"token": token, "expires_in": SESSION_SECONDS}, headers=_UNSTORED)

    async def _end(self, request: Request) -> Response:
        session = request.headers.get("authorization", "").partition(" ")[2].strip()
        if self.find(session.encode(), f"DELETE {SESSION}") is not None:
            await self._use_up(_SESSION, session)
            caller: Caller = request.scope[SCOPE_KEY]
            AUDIT.info("console session ended", principal=caller.principal)
        return Response(status_code=204)

    async def _use_up(self, kind: "_Kind", secret: str) -> bool:
        """End a code or session; return False if it had ended already."""
        now, digest = now_ms(), sha256(secret.encode()).digest()
        self._ended = {key: until for key, until in self._ended.items() if now < until}
        if digest in self._ended:
            return False
        until = self._ended[digest] = kind.end_of(secret.encode()) * 1000
        return await self._records.end(digest, until)

    def _sign(self, credential: AcceptedCredential, kind: "_Kind", seconds: int) -> str:
        ends, nonce = now_ms() // 1000 + seconds, secrets.token_hex(kind.size // 4)
        claims = kind.name + kind.mark.join((b"%x" % ends, nonce.encode()))
        return (claims + kind.mark + self._signature(credential, kind, claims)).decode()

    def _signature(self, credential: AcceptedCredential, kind: "_Kind", claims: bytes) -> bytes:
        key = self._keys[credential.digest]
        return hmac.new(key, claims, sha256).hexdigest().encode()[: kind.size]


class _Kind(NamedTuple):
    """The form of a token of the console: name, expiry, nonce, signature."""

    name: bytes
    mark: bytes
    """The separator of the parts."""
    size: int
    """The number of hexadecimal digits of the signature."""

    def end_of(self, secret: bytes) -> int:
        """Return when a token that was signed here expires, in seconds since the epoch."""
        return int(secret.split(self.mark)[1], 16)


_CODE = _Kind(b"code-", b"-", 32)
"""Short, since it is part of a link and a QR code, and valid for a minute only."""
_SESSION = _Kind(b"console.", b".", 64)
