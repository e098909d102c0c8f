"""Authentication: finds the ``Caller`` behind the credential of a request.

``Authentication`` stands before everything that is not open to all, and puts the caller into the
scope. Its ``Authenticator`` compares what was sent with the credentials of the settings, then asks
``browser`` about tokens of the console, then ``oidc`` about tokens of an identity provider. Secrets
are kept as digests, and what was sent is compared with all of them, so that the time it takes
reveals nothing.
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
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
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
from opencode_a2a.bounds import Recent
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
    # No registered scheme fits, and a 401 needs a challenge.
    "api_key": f'ApiKey realm="opencode-a2a", header="{API_KEY_HEADER}"',
}
_REMEDY = {
    "bearer": "the header Authorization: Bearer <token>",
    "basic": "the header Authorization: Basic with user and password",
    "api_key": f"the header {API_KEY_HEADER}",
}
CREDENTIAL = "credential"
"""In the scope: the ``AcceptedCredential`` of the request."""
_API_KEY = API_KEY_HEADER.lower().encode()
_LONGEST_AUTHORIZATION = 8192
_EVICTION_CANDIDATES = 64
"""Entries of a full table among which the one to evict is chosen."""


Scheme: TypeAlias = Literal["bearer", "basic", "api_key"]
Verify = Callable[[bytes], Awaitable[Caller]]
"""Returns the caller that a token of an identity provider stands for, or raises."""


@dataclass(frozen=True, slots=True)
class AcceptedCredential:
    """One secret that is accepted, and the caller it stands for."""

    scheme: Scheme
    digest: bytes
    caller: Caller
    guessable: bool
    """Whether the secret is short enough to be guessed."""

    @classmethod
    def of_token(cls, token: str, rights: Rights, budget: Budget = UNLIMITED) -> Self:
        """Return the credential of a service that has only one token.

        Its principal is named after the token, and has every capability.
        """
        principal = Principal(f"bearer:{sha256(token.encode()).hexdigest()[:12]}")
        caller = Caller(principal, CAPABILITIES, rights=rights, budget=budget)
        return cls("bearer", sha256(token.encode()).digest(), caller, len(token) < UNGUESSABLE)

    @classmethod
    def of_entry(cls, entry: CredentialEntry, rights: Rights, budget: Budget = UNLIMITED) -> Self:
        """Return one of several credentials, with the capabilities that its entry grants."""
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
    """Return the configured credentials, or a generated one if there is no other way to call."""
    auth, budget = settings.auth, settings.limits.budget
    credentials = [
        AcceptedCredential.of_entry(entry, auth.rights, budget)
        for entry in auth.static_auth_credentials or ()
        if entry.enabled
    ]
    if auth.bearer_token:
        token = auth.bearer_token.get_secret_value()
        credentials.insert(0, AcceptedCredential.of_token(token, auth.rights, budget))
    if not settings.knows_callers:
        token = generate_token(token_file)
        credentials.append(AcceptedCredential.of_token(token, auth.rights, budget))
    return credentials


class Throttle:
    """Counts wrong secrets by credential name and address, in a table of bounded size.

    Guessing one caller's password must not slow down another caller behind the same address, such
    as that of a proxy. The same wrong secret counts once, however often it is sent: repeating it
    reveals nothing, and a client with an old password must not lock its owner out.
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
        """The wrong secrets of each key and the time they are forgotten at; oldest first."""

    def __len__(self) -> int:
        return len(self._guesses)

    def wait(self, key: bytes) -> float:
        """Return the seconds until this key may be tried again; 0 if it may be tried now."""
        if key not in self._guesses:
            return 0.0
        wrong, until = self._guesses[key]
        return max(0.0, until - self._clock()) if len(wrong) >= self._attempts else 0.0

    def failed(self, key: bytes, digest: bytes) -> None:
        """Count a wrong secret."""
        now = self._clock()
        # All entries live equally long, so the oldest expire first.
        while self._guesses and next(iter(self._guesses.values()))[1] <= now:
            self._guesses.popitem(last=False)
        wrong, _ = self._guesses.setdefault(key, (set(), now + self._window))
        wrong.add(digest[:8])
        if len(self._guesses) > self._max_keys:
            # Not simply the oldest: an attacker who makes up names could evict their own entry.
            oldest = itertools.islice(self._guesses, _EVICTION_CANDIDATES)
            del self._guesses[min(oldest, key=lambda old: len(self._guesses[old][0]))]


class Authenticator:
    """Finds the accepted credential of a request, whatever server has received it."""

    def __init__(
        self,
        credentials: Iterable[AcceptedCredential],
        throttle: Throttle | None = None,
        find_issued: Callable[[bytes, str], AcceptedCredential | None] | None = None,
        verify: Verify | None = None,
        metadata_url: str = "",
    ) -> None:
        self._find_issued = find_issued
        """Finds the credential behind a bearer token that the service itself has issued."""
        self._verify = verify
        self._credentials = tuple(credentials)
        self._throttle = Throttle() if throttle is None else throttle
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
            # Tells a client where it can find out who issues tokens (RFC 9728).
            self._challenges[0] += f', resource_metadata="{metadata_url}"'

    async def admit(
        self, headers: Sequence[tuple[bytes, bytes]], address: str, target: str = ""
    ) -> AcceptedCredential:
        """Return the accepted credential among the headers of a request, or raise.

        ``address`` is where the request comes from; ``target``, its method and path, tells whether
        it may come with a one-time code.
        """
        sent = [value for name, value in headers if name == b"authorization"]
        keys = [value for name, value in headers if name == _API_KEY]
        if keys and self._takes_keys:
            # With two credentials it is not clear who the caller is.
            single = len(keys) == 1 and not sent
            scheme, name, secret = (b"api_key" if single else b""), b"", b"".join(keys)
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
        if found is None and scheme == b"bearer" and self._find_issued is not None:
            found = self._find_issued(secret, target)
        wrong = f"The credential is not valid; {self._remedy}"
        if found is None and scheme == b"bearer" and self._verify and secret.count(b".") == 2:
            try:
                caller = await self._verify(secret)
                found = AcceptedCredential("bearer", digest, caller, guessable=False)
            except InvalidTokenError as error:  # not a guess: the provider has signed it
                raise self._refusal(error.message, kind=InvalidTokenError) from None
            except UnauthenticatedError as error:
                wrong = error.message
        # A secret that cannot be guessed is accepted even while others at the same address have to
        # wait: a stranger must not be able to lock the owner out.
        if found is not None and not found.guessable:
            return found
        # Failures are counted by address and name; the digest bounds the size of the key.
        key = sha256(b"\0".join((address.encode(), scheme, name))).digest()
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
        """Return the error that explains how to authenticate.

        ``kind`` is given if a credential was sent, and None if there was none.
        """
        challenges = list(self._challenges)
        if kind is not None and self._verify is not None:
            challenges[0] += f', error="invalid_token", error_description="{message}"'
        return (kind or UnauthenticatedError)(message).with_headers(
            *(("WWW-Authenticate", challenge) for challenge in challenges)
        )


class Authentication:
    """Let requests with an accepted credential pass, with their caller in the scope."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, anonymous: Collection[str] = ()
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._anonymous = anonymous
        """Requests, as method and path, that bring what they need in their body."""
        self._refused = Recent[str, float](10_000)
        """When a refusal of an address was last logged; each is logged once a minute."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = f"{scope['method']} {scope['path']}"
        open_to_all = scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        if not open_to_all and target not in self._anonymous:
            address = peer_address(scope)
            try:
                credential = await self._authenticator.admit(scope["headers"], address, target)
            except ServiceError as error:
                metrics.AUTH_REJECTED.inc()
                now = time.monotonic()
                if now - self._refused.get(address, -math.inf) >= 60.0:
                    self._refused[address] = now
                    ROUTINE.info("credential refused", address=address, outcome=error.reason)
                raise
            scope[CREDENTIAL], scope[SCOPE_KEY] = credential, credential.caller
            structlog.contextvars.bind_contextvars(
                address=address, credential_id=credential.caller.credential_id
            )
        await self._app(scope, receive, send)


def read_authorization(sent: list[bytes]) -> tuple[bytes, bytes, bytes]:
    """Return the scheme, the user name of Basic, and the secret; no scheme if it is malformed.

    ``sent`` holds the values of all Authorization headers.
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
    """Return the address of the other end: an IPv4 address, or the network of an IPv6 one.

    Forwarding headers are ignored: anyone can send them.
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
    """Raise StateError if the state directory cannot be used, before anything is started."""
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
    """Return the token in a file, which is made on first use and readable by its owner only."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return _read_token(path)
        # The file appears with its content, unless another process has just made one.
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
        return _read_token(path)
    except OSError as error:
        raise StateError(f"cannot use the token file {path}: {error.strerror}") from error


def _read_token(path: Path) -> str:
    """Read the token; refuse a file that others can read or that another user owns."""
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
