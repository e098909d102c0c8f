"""Authentication: credentials in, ``Caller`` out.

``Authentication`` stands before everything that is not open to all and puts the caller into
the scope. It knows which secrets exist and nothing of what a caller may do with
them. Secrets are kept as digests only, and every known one is compared with what was sent, so
that neither the length of the comparison nor its end tells anything.
"""

import base64
import binascii
import hmac
import itertools
import math
import os
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal, Self, TypeAlias

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from opencode_a2a import metrics
from opencode_a2a.config import UNGUESSABLE, CredentialEntry, Settings, StateError
from opencode_a2a.errors import (
    InvalidTokenError,
    ServiceError,
    TooManyFailuresError,
    UnauthenticatedError,
)
from opencode_a2a.ids import SCOPE_KEY, Caller, Principal
from opencode_a2a.rights import CAPABILITIES, PROFILES, UNLIMITED, Budget, Rights
from opencode_a2a.server.contracts import API_KEY_HEADER, DISCOVERY, PROBES
from opencode_a2a.telemetry import ROUTINE

OPEN_PATHS = frozenset({*DISCOVERY, *PROBES})
_CHALLENGES = {
    "bearer": 'Bearer realm="opencode-a2a"',
    "basic": 'Basic realm="opencode-a2a", charset="UTF-8"',
    # Nothing registered fits, and an answer with 401 needs a challenge.
    "api_key": f'ApiKey realm="opencode-a2a", header="{API_KEY_HEADER}"',
}
_REMEDY = {
    "bearer": "the header Authorization: Bearer <token>",
    "basic": "the header Authorization: Basic with user and password",
    "api_key": f"the header {API_KEY_HEADER}",
}
CREDENTIAL = "credential"
"""In the scope: the ``AcceptedCredential`` that the caller sent."""
_API_KEY = API_KEY_HEADER.lower().encode()
_LONGEST_AUTHORIZATION = 8192
_LOOKED_AT = 64
"""Entries of a full table that are compared for the one to forget."""


Scheme: TypeAlias = Literal["bearer", "basic", "api_key"]
Verify = Callable[[bytes], Awaitable[Caller]]
"""Says whose a token of an identity provider is, or raises."""


@dataclass(frozen=True, slots=True)
class AcceptedCredential:
    """One secret that is accepted, and the caller it stands for."""

    scheme: Scheme
    digest: bytes
    caller: Caller
    guessable: bool

    @classmethod
    def of_token(cls, token: str, rights: Rights, budget: Budget = UNLIMITED) -> Self:
        """Return the only credential of a service.

        It is its own principal and may do everything that is switched on.
        """
        principal = Principal(f"bearer:{sha256(token.encode()).hexdigest()[:12]}")
        caller = Caller(principal, CAPABILITIES, rights=rights, budget=budget)
        return cls("bearer", sha256(token.encode()).digest(), caller, len(token) < UNGUESSABLE)

    @classmethod
    def of_entry(cls, entry: CredentialEntry, rights: Rights, budget: Budget = UNLIMITED) -> Self:
        """Return one of several credentials; it may do only what its entry grants."""
        given = entry.password if entry.scheme == "basic" else entry.token
        secret = given.get_secret_value() if given else ""
        guessable = len(secret) < UNGUESSABLE
        if entry.scheme == "basic":
            secret = f"{entry.username}:{secret}"
        caller = Caller(
            Principal(entry.owner),
            entry.granted,
            entry.credential_id,
            rights & PROFILES[entry.profile],
            entry.supervises,
            replace(budget, **(entry.budget.model_dump(exclude_none=True) if entry.budget else {})),
        )
        return cls(entry.scheme, sha256(secret.encode()).digest(), caller, guessable)


def accepted_credentials(settings: Settings, token_file: Path) -> list[AcceptedCredential]:
    """Return the credentials that were configured; the generated one if nobody could call."""
    auth, budget = settings.auth, settings.limits.budget
    found = [
        AcceptedCredential.of_entry(entry, auth.rights, budget)
        for entry in auth.static_auth_credentials or ()
        if entry.enabled
    ]
    if auth.bearer_token:
        token = auth.bearer_token.get_secret_value()
        found.insert(0, AcceptedCredential.of_token(token, auth.rights, budget))
    if not settings.knows_callers:
        token = generate_token(token_file)
        found.append(AcceptedCredential.of_token(token, auth.rights, budget))
    return found


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
        """Count a wrong secret."""
        now = self._clock()
        # Every entry lives equally long, so the oldest ones are those that end first.
        while self._guesses and next(iter(self._guesses.values()))[1] <= now:
            self._guesses.popitem(last=False)
        wrong, _ = self._guesses.setdefault(key, (set(), now + self._window))
        wrong.add(digest[:8])
        if len(self._guesses) > self._max_keys:
            # Not simply the oldest: whoever makes up names could push out what counts against them.
            oldest = itertools.islice(self._guesses, _LOOKED_AT)
            del self._guesses[min(oldest, key=lambda old: len(self._guesses[old][0]))]


class _RefusedLately:
    """Which addresses were refused within a minute: one audit record is enough for each."""

    def __init__(self, seconds: float = 60.0, most: int = 10_000) -> None:
        self._seconds = seconds
        self._most = most
        self._until: OrderedDict[str, float] = OrderedDict()

    def first(self, address: str) -> bool:
        now = time.monotonic()
        if self._until.get(address, now) > now:
            return False
        self._until.pop(address, None)
        self._until[address] = now + self._seconds
        if len(self._until) > self._most:
            self._until.popitem(last=False)
        return True


class Authentication:
    """Let a request with a good credential pass, with its caller in the scope."""

    def __init__(
        self,
        app: ASGIApp,
        credentials: Iterable[AcceptedCredential],
        throttle: Throttle | None = None,
        also: Callable[[bytes, Scope], AcceptedCredential | None] | None = None,
        verify: Verify | None = None,
        metadata_url: str = "",
    ) -> None:
        self._app = app
        self._also = also
        """Finds whose a bearer token is that was given out while the service runs."""
        self._verify = verify
        self._credentials = tuple(credentials)
        self._throttle = Throttle() if throttle is None else throttle
        self._refused_lately = _RefusedLately()
        schemes = {credential.scheme for credential in self._credentials}
        if verify is not None:
            schemes.add("bearer")
        if not schemes:
            raise ValueError("at least one credential must be enabled")
        self._takes_keys = "api_key" in schemes
        offered = sorted(schemes, key=list(_CHALLENGES).index)
        self._remedy = f"send {', or '.join(_REMEDY[scheme] for scheme in offered)}"
        self._challenges = [_CHALLENGES[scheme] for scheme in offered]
        if verify is not None:
            # Where a client finds out by itself from whom to get a token (RFC 9728).
            self._challenges[0] += f', resource_metadata="{metadata_url}"'

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS or scope["method"] not in ("GET", "HEAD"):
            address = peer_address(scope)
            try:
                found = await self.admit(scope)
            except ServiceError as error:
                metrics.AUTH_REJECTED.inc()
                if self._refused_lately.first(address):
                    ROUTINE.info("credential refused", address=address, outcome=error.reason)
                raise
            scope[CREDENTIAL], scope[SCOPE_KEY] = found, found.caller
            structlog.contextvars.bind_contextvars(
                address=address, credential_id=found.caller.credential_id
            )
        await self._app(scope, receive, send)

    async def admit(self, scope: Scope) -> AcceptedCredential:
        """Return the credential that a request was sent with; raise if it is not a good one."""
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == _API_KEY]
        if keys and self._takes_keys:
            # Two credentials are two callers.
            one = len(keys) == 1 and not sent
            scheme, name, secret = (b"api_key" if one else b""), b"", b"".join(keys)
        elif sent:
            scheme, name, secret = read_authorization(sent)
        else:
            raise self._refusal(f"No credential was sent; {self._remedy}")
        digest = sha256(secret).digest()
        found: AcceptedCredential | None = None
        for credential in self._credentials:
            same = hmac.compare_digest(credential.digest, digest)
            if same & (credential.scheme.encode() == scheme):
                found = credential
        if found is None and scheme == b"bearer" and self._also is not None:
            found = self._also(secret, scope)
        wrong = f"The credential is not valid; {self._remedy}"
        if found is None and scheme == b"bearer" and self._verify and secret.count(b".") == 2:
            try:
                caller = await self._verify(secret)
                found = AcceptedCredential("bearer", digest, caller, guessable=False)
            except InvalidTokenError as error:  # not a guess: the provider did sign it
                raise self._refusal(error.message, kind=InvalidTokenError) from None
            except UnauthenticatedError as error:
                wrong = error.message
        # Whoever holds a secret that cannot be guessed is let in even while others behind the
        # same address are made to wait: a stranger must not be able to lock the owner out.
        if found is not None and not found.guessable:
            return found
        # Failures count for an address and a name, in a form of fixed size.
        key = sha256(b"\0".join((peer_address(scope).encode(), scheme, name))).digest()
        if wait := self._throttle.wait(key):
            seconds = math.ceil(wait)
            raise TooManyFailuresError(
                f"Too many failed attempts with this name from this address; wait {seconds} s",
                retry_after_seconds=seconds,
            ).with_headers(("Retry-After", str(seconds)))
        if found is None:
            self._throttle.failed(key, digest)
            raise self._refusal(wrong, kind=UnauthenticatedError)
        return found

    def _refusal(
        self, message: str, kind: type[UnauthenticatedError] | None = None
    ) -> UnauthenticatedError:
        """Return the error that says how to call; ``kind`` is given if a credential was sent."""
        challenges = list(self._challenges)
        if kind is not None and self._verify is not None:
            challenges[0] += f', error="invalid_token", error_description="{message}"'
        return (kind or UnauthenticatedError)(message).with_headers(
            *(("WWW-Authenticate", challenge) for challenge in challenges)
        )


def read_authorization(sent: list[bytes]) -> tuple[bytes, bytes, bytes]:
    """Return the scheme, the user that Basic names, and the secret; no scheme when malformed.

    ``sent`` are the values of the Authorization headers.
    """
    if len(sent) > 1 or len(sent[0]) > _LONGEST_AUTHORIZATION:
        return b"", b"", b"".join(sent)
    scheme, _, rest = sent[0].partition(b" ")
    if scheme.lower() == b"bearer":
        return b"bearer", b"", rest.strip()
    if scheme.lower() != b"basic":
        return b"", b"", sent[0]
    try:
        secret = base64.b64decode(rest.strip(), validate=True)
    except binascii.Error:
        secret = b""  # no credential is empty
    return b"basic", secret.partition(b":")[0], secret


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


def check_state(settings: Settings) -> None:
    """Raise StateError if the state directory cannot serve, before anything is started."""
    directory = settings.a2a.state_dir
    if settings.knows_callers and not settings.opencode.managed_server:
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StateError(
            f"cannot write to the state directory {directory}: {error.strerror}; "
            "set A2A_STATE_DIR to one that can be written"
        ) from error
    if not settings.knows_callers:
        generate_token(directory / "token")


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
