"""Credentials in, ``Caller`` out.

``Authentication`` stands before everything that is not open to all and puts the caller into
``scope["caller"]``. It knows which secrets exist and nothing of what a caller may do with
them. Secrets are kept as digests only, and every known one is compared with what was sent, so
that neither the length of the comparison nor its end tells anything.
"""

import base64
import binascii
import hashlib
import hmac
import itertools
import os
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from opencode_a2a import metrics
from opencode_a2a.callers import CAPABILITIES, Caller
from opencode_a2a.config import UNGUESSABLE
from opencode_a2a.errors import TooManyFailuresError, UnauthenticatedError
from opencode_a2a.ids import Principal
from opencode_a2a.web.answers import Header, Refusal, headers_of, refuse

OPEN_PATHS = frozenset(
    {"/.well-known/agent-card.json", "/.well-known/agent.json", "/livez", "/readyz"}
)
_OPEN_METHODS = frozenset({"GET", "HEAD"})
_LONGEST_AUTHORIZATION = 8192
_LOOKED_AT = 64
"""Entries of a full table that are compared for the one to forget."""
Scheme = Literal["bearer", "basic"]


@dataclass(frozen=True, slots=True)
class Credential:
    """One secret that is accepted, and the caller it stands for."""

    scheme: Scheme
    digest: bytes
    caller: Caller
    guessable: bool


def bearer(
    token: str,
    *,
    principal: str | None = None,
    capabilities: frozenset[str] | None = None,
    credential_id: str | None = None,
) -> Credential:
    """Return a bearer credential.

    A token without principal is the only one of a service: it is its own principal and may do
    everything that is switched on. One with a principal may do only what is listed.
    """
    if not token or token != token.strip():
        raise ValueError("a bearer token must not be empty nor begin or end with a space")
    unlisted = CAPABILITIES if principal is None else frozenset[str]()
    caller = Caller(
        Principal(principal or f"bearer:{hashlib.sha256(token.encode()).hexdigest()[:12]}"),
        unlisted if capabilities is None else capabilities,
        credential_id,
    )
    return Credential("bearer", _digest(token.encode()), caller, len(token) < UNGUESSABLE)


def basic(
    username: str,
    password: str,
    *,
    capabilities: frozenset[str] | None = None,
    credential_id: str | None = None,
) -> Credential:
    """Return a Basic credential; its principal is the user name."""
    if not username or ":" in username or not password:
        raise ValueError("basic needs a username without colon, and a password")
    may = CAPABILITIES if capabilities is None else capabilities
    caller = Caller(Principal(username), may, credential_id)
    digest = _digest(f"{username}:{password}".encode())
    return Credential("basic", digest, caller, len(password) < UNGUESSABLE)


class Throttle:
    """Guesses by credential name and address, in a table of bounded size.

    Whoever guesses one caller's password does not slow down another caller behind the same address,
    such as that of a proxy. A secret that is wrong again and again counts once: nothing is learned
    from repeating it, and a client with an old password must not lock its owner out.
    """

    def __init__(
        self,
        attempts: int = 20,
        window: float = 60.0,
        *,
        max_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempts = attempts
        self._window = window
        self._max_keys = max_keys
        self._clock = clock
        self._guesses: OrderedDict[bytes, tuple[set[bytes], float]] = OrderedDict()
        """By key the wrong secrets and the moment they are forgotten; oldest first."""

    def __len__(self) -> int:
        return len(self._guesses)

    def wait(self, key: bytes) -> float:
        """Return the seconds until this key may be tried again; 0 when it may be now."""
        if key not in self._guesses:
            return 0.0
        wrong, until = self._guesses[key]
        return max(0.0, until - self._clock()) if len(wrong) >= self._attempts else 0.0

    def failed(self, key: bytes, digest: bytes) -> None:
        now = self._clock()
        self._forget(now)
        wrong, _ = self._guesses.setdefault(key, (set(), now + self._window))
        wrong.add(digest[:8])
        if len(self._guesses) > self._max_keys:
            # Not simply the oldest: whoever makes up names could push out what counts against them.
            oldest = itertools.islice(self._guesses, _LOOKED_AT)
            del self._guesses[min(oldest, key=lambda old: len(self._guesses[old][0]))]

    def _forget(self, now: float) -> None:
        # Every entry lives equally long, so the oldest ones are those that end first.
        while self._guesses and next(iter(self._guesses.values()))[1] <= now:
            self._guesses.popitem(last=False)


class Authentication:
    """Let a request with a good credential pass, with its caller in the scope."""

    def __init__(
        self, app: ASGIApp, credentials: Iterable[Credential], throttle: Throttle | None = None
    ) -> None:
        self._app = app
        self._credentials = tuple(credentials)
        self._throttle = Throttle() if throttle is None else throttle
        self._challenges = _challenges({credential.scheme for credential in self._credentials})
        if not self._credentials:
            raise ValueError("at least one credential must be enabled")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        refusal = self.refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        metrics.AUTH_REJECTED.inc()
        await refuse(scope, send, refusal)

    def refusal(self, scope: Scope) -> Refusal | None:
        """Put the caller into the scope, or say why not."""
        sent = headers_of(scope, b"authorization")
        if not sent:
            return self._unauthenticated("No credential was sent")
        attempt = _read(sent)
        key = attempt.key(peer_address(scope))
        found = self._match(attempt)
        wait = self._throttle.wait(key)
        # Whoever holds a secret that cannot be guessed is let in even while others behind the
        # same address are made to wait: a stranger must not be able to lock the owner out.
        if wait and (found is None or found.guessable):
            return _too_many_failures(wait)
        if found is None:
            self._throttle.failed(key, attempt.digest)
            return self._unauthenticated("The credential is not valid")
        scope["caller"] = found.caller
        return None

    def _match(self, attempt: "_Attempt") -> Credential | None:
        found: Credential | None = None
        for credential in self._credentials:
            same = hmac.compare_digest(credential.digest, attempt.digest)
            if same & (credential.scheme.encode() == attempt.scheme):
                found = credential
        return found

    def _unauthenticated(self, what: str) -> Refusal:
        remedy = "send the header Authorization: Bearer <token>, or Basic if that is offered"
        return Refusal(UnauthenticatedError(f"{what}; {remedy}"), self._challenges)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What a request sent as its credential."""

    scheme: bytes
    name: bytes
    """Whom it names: a user, if it is Basic; a bearer token names nobody."""
    digest: bytes

    def key(self, address: str) -> bytes:
        """Return what its failure counts for, in a form of fixed size."""
        return _digest(b"\0".join((address.encode(), self.scheme, self.name)))


def _read(sent: list[bytes]) -> _Attempt:
    if len(sent) > 1 or len(sent[0]) > _LONGEST_AUTHORIZATION:
        return _Attempt(b"", b"", _digest(b"".join(sent)))
    scheme, _, rest = sent[0].partition(b" ")
    if scheme.lower() == b"bearer":
        return _Attempt(b"bearer", b"", _digest(rest.strip()))
    if scheme.lower() != b"basic":
        return _Attempt(b"", b"", _digest(sent[0]))
    secret = _decoded(rest.strip())
    return _Attempt(b"basic", secret.partition(b":")[0], _digest(secret))


def peer_address(scope: Scope) -> str:
    """Return who is connected: an IPv4 address, or the network of an IPv6 one.

    Forwarding headers are not looked at: anyone can send them.
    """
    client: tuple[str, int] | None = scope.get("client")
    return "local" if client is None else _network_of(client[0])


@lru_cache(maxsize=4096)
def _network_of(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        # One host commonly owns a whole /64.
        return str(address.ipv4_mapped or ip_network((int(address) >> 64 << 64, 64)))
    return str(address)


class StateError(Exception):
    """A file of the state directory cannot be used; the text says which, and what to do."""


def generate_token(path: Path) -> str:
    """Return the token kept in ``path``, made on first use and readable by its owner only."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(2):
            try:
                return _read_token(path)
            except FileNotFoundError:
                _write_token(path, secrets.token_urlsafe(32))
        return _read_token(path)
    except OSError as error:
        raise StateError(f"cannot use the token file {path}: {error.strerror}") from error


def _read_token(path: Path) -> str:
    """Read the token; refuse a file that others may read or that is not plainly ours."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "r", encoding="ascii", errors="replace") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise StateError(f"{path} is not a file of this user; remove it")
        if status.st_mode & 0o077:
            raise StateError(f"others can read {path}; run chmod 600 on it, or remove it")
        token = file.read(1024).strip()
    if len(token) < UNGUESSABLE:
        raise StateError(f"{path} holds no token; remove it to have a new one made")
    return token


def _write_token(path: Path, token: str) -> None:
    """Create the file complete, or leave the one that another process made meanwhile."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _decoded(value: bytes) -> bytes:
    """Return what a Basic value stands for; nothing, which no credential is, when malformed."""
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        return b""


def _is_open(scope: Scope) -> bool:
    return (
        scope["type"] == "http" and scope["path"] in OPEN_PATHS and scope["method"] in _OPEN_METHODS
    )


def _challenges(schemes: set[Scheme]) -> tuple[Header, ...]:
    offers = {
        "bearer": b'Bearer realm="opencode-a2a"',
        "basic": b'Basic realm="opencode-a2a", charset="UTF-8"',
    }
    return tuple((b"www-authenticate", offers[scheme]) for scheme in sorted(schemes, reverse=True))


def _too_many_failures(wait: float) -> Refusal:
    seconds = str(max(1, round(wait + 0.5)))
    error = TooManyFailuresError(
        f"Too many failed attempts with this name from this address; wait {seconds} s",
        retry_after_seconds=int(seconds),
    )
    return Refusal(error, ((b"retry-after", seconds.encode()),))
