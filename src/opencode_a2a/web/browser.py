"""What a browser is served: the console, how people sign in to it, and the headers of its pages.

The pages are answered before authentication, because a browser cannot send a credential when it
opens one; they hold nothing secret. The console uses the public API like any other client. Sign-in
is the one thing that exists for it alone: ``SignIns`` exchanges a code of one use for a credential
of the same caller.
"""

import asyncio
import gzip
import hmac
import math
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope
from structlog.typing import FilteringBoundLogger

from opencode_a2a.config import StateError
from opencode_a2a.errors import LimitExceededError, UnauthenticatedError
from opencode_a2a.ids import SCOPE_KEY, Caller
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
CODE_SECONDS = 60
SESSION_SECONDS = 12 * 3600
MOST_CODES = 100
"""Codes of one credential at a time."""
REFUSES_GZIP = re.compile(r"\bgzip\s*;\s*q=0(\.0*)?\s*(,|$)", re.IGNORECASE)
_FOLDER = Path(__file__).parent / "console"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_REDIRECTS = {"/": "console", "/docs": "console#/docs", f"{CONSOLE}/": "../console"}
"""Where a browser is led; relative, since a proxy may put the service below a path."""


@cache
def files() -> dict[str, tuple[bytes, bytes, str, str]]:
    """Return the console by path: each file, plain and compressed, its type and its tag."""
    found: dict[str, tuple[bytes, bytes, str, str]] = {}
    for file in sorted(_FOLDER.iterdir()):
        if file.suffix in _TYPES:
            path = CONSOLE if file.name == "index.html" else f"{CONSOLE}/{file.name}"
            content = file.read_bytes()
            tag = f'"{sha256(content).hexdigest()[:16]}"'
            # Answers of this size are otherwise sent as they are; together they count.
            packed = gzip.compress(content, mtime=0)
            found[path] = (content, packed, _TYPES[file.suffix], tag)
    return found


def page(scope: Scope) -> Response | None:
    """Return the page that a browser asks for; None for everything else."""
    path, headers = scope["path"], Headers(scope=scope)
    # Whoever is no browser gets what these paths have always answered.
    if path in _REDIRECTS and "text/html" in headers.get("accept", ""):
        # The prefix may have been asked for without a slash, which changes what is relative.
        asked: bytes = scope.get("raw_path") or b"/"
        below = "" if path != "/" or asked.endswith(b"/") else asked.decode().rpartition("/")[2]
        place = f"{below}/{_REDIRECTS[path]}" if below else _REDIRECTS[path]
        return RedirectResponse(place, headers=_HEADERS)
    if path not in files():
        return None
    content, packed, kind, tag = files()[path]
    more = {**_HEADERS, "content-type": kind, "etag": tag, "cache-control": "no-cache"}
    more["vary"] = "Accept-Encoding"
    if headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=more)
    accepted = headers.get("accept-encoding", "")
    if "gzip" in accepted and not REFUSES_GZIP.search(accepted):
        return Response(packed, headers=more | {"content-encoding": "gzip"})
    return Response(content, headers=more)


class SignIns:
    """Codes of one use, and the credentials of the console that they are exchanged for.

    Such a credential is signed with a secret of the service and the digest of the credential that
    asked for it. So it survives a restart, it ends when that credential is no longer accepted, and
    whoever gets hold of it cannot try guesses of that credential on it.
    """

    def __init__(self, credentials: Iterable[AcceptedCredential], state: Path) -> None:
        """Use a directory for what has to survive a restart: the secret, and who has signed out."""
        self._credentials = tuple(credentials)
        self._folder = state / "console-ended"
        try:
            secret = generate_token(state / "console-key")
        except StateError as error:
            logger.warning("sessions of the console end with the service", cause=str(error))
            secret = secrets.token_urlsafe(32)
        self._keys = {
            one.digest: hmac.digest(secret.encode(), one.digest, "sha256")
            for one in self._credentials
        }
        self._codes: dict[bytes, tuple[float, AcceptedCredential]] = {}
        """By the digest of the code when it ends, and whose it is; oldest first."""
        self._ended: dict[bytes, float] = {}
        """By digest when the sessions end that were signed out, in seconds of the epoch."""
        for file in self._folder.glob("*"):
            with suppress(OSError, ValueError):  # not ours, or gone a moment ago
                ends = file.stat().st_mtime + SESSION_SECONDS
                if ends < time.time():
                    file.unlink()
                else:
                    self._ended[bytes.fromhex(file.name)] = ends

    def routes(self) -> list[BaseRoute]:
        return [
            Route(CODES, self._new_code, methods=["POST"]),
            Route(SESSION, self._begin, methods=["POST"]),
            Route(SESSION, self._end, methods=["DELETE"]),
        ]

    def find(self, secret: bytes, scope: Scope) -> AcceptedCredential | None:
        """Return whose secret this is: a code where one can be exchanged, else a session."""
        digest = sha256(secret).digest()
        if scope["path"] == SESSION and scope["method"] == "POST":
            until, credential = self._codes.get(digest, (0.0, None))
            return credential if time.monotonic() < until else None
        claims, _, signature = secret.rpartition(b".")
        if not claims.startswith(b"console.") or digest in self._ended:
            return None
        for credential in self._credentials:
            if hmac.compare_digest(self._signature(credential, claims), signature):
                # A restart must not end it, hence the time of day.
                ends = int(claims.split(b".")[1], 16)
                alive = replace(credential, scheme="bearer")
                return alive if 0 < ends - time.time() <= SESSION_SECONDS + 1 else None
        return None

    async def _new_code(self, request: Request) -> Response:
        now = time.monotonic()
        self._codes = {key: one for key, one in self._codes.items() if now < one[0]}
        _, _, secret = read_authorization(
            [request.headers.get("authorization", "").encode("latin-1")]
        )
        if secret.startswith(b"console."):
            raise UnauthenticatedError(
                "A session of the console gets no code; use the token or password itself"
            )
        # Callers may be alike: the session has to end with the very secret that it came from.
        credential: AcceptedCredential = request.scope[CREDENTIAL]
        if credential not in self._credentials:
            raise UnauthenticatedError(
                "A token of an identity provider gets no code: the session would outlive it. "
                "Sign in with the token itself."
            )
        if sum(one is credential for _, one in self._codes.values()) >= MOST_CODES:
            raise LimitExceededError(
                "Too many sign-in codes at once; try again in a minute", limit=MOST_CODES
            )
        code = secrets.token_urlsafe(32)
        self._codes[sha256(code.encode()).digest()] = (now + CODE_SECONDS, credential)
        return _json({"code": code, "expires_in": CODE_SECONDS})

    async def _begin(self, request: Request) -> Response:
        sent = request.headers.get("authorization", "").partition(" ")[2].strip()
        _, credential = self._codes.pop(sha256(sent.encode()).digest(), (0.0, None))
        if credential is None:
            raise UnauthenticatedError("Only a code of the command `console` is taken here, once")
        ends = math.ceil(time.time()) + SESSION_SECONDS
        claims = f"console.{ends:x}.{secrets.token_hex(16)}".encode()
        token = (claims + b"." + self._signature(credential, claims)).decode()
        AUDIT.info("console session begun", principal=credential.caller.principal)
        return _json({"token": token, "expires_in": SESSION_SECONDS})

    async def _end(self, request: Request) -> Response:
        sent = request.headers.get("authorization", "").partition(" ")[2].strip()
        now = time.time()
        self._ended = {key: until for key, until in self._ended.items() if now < until}
        if sent.startswith("console."):
            digest = sha256(sent.encode()).digest()
            self._ended[digest] = now + SESSION_SECONDS
            try:
                await asyncio.to_thread(self._remember, digest)
            except OSError as error:
                logger.warning("the end of a session is forgotten at a restart", cause=str(error))
            caller: Caller = request.scope[SCOPE_KEY]
            AUDIT.info("console session ended", principal=caller.principal)
        return Response(status_code=204)

    def _remember(self, digest: bytes) -> None:
        """Note a session that was signed out: by a file for each, since services may share this."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / digest.hex()).touch(0o600)

    def _signature(self, credential: AcceptedCredential, claims: bytes) -> bytes:
        return hmac.new(self._keys[credential.digest], claims, sha256).hexdigest().encode()


def _json(body: dict[str, str | int]) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(orjson.dumps(body), headers=headers, media_type="application/json")
