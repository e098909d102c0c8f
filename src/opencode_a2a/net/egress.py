"""Outgoing HTTP: which addresses may be called, and which origin gets a credential.

``Egress`` has the rules, which the client of ``http`` obeys. ``Fetcher`` reads the files that a
message names by URL, and ``OriginCredential`` is a secret for one origin. Nothing here knows A2A,
and the libraries for HTTP are imported with the first request: many services never send one.
"""

import asyncio
import base64
import binascii
import re
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from opencode_a2a.config import ClientSettings, ServiceSettings, SettingsError
from opencode_a2a.net.trust import machine_trust

if TYPE_CHECKING:
    import httpx2

Address = IPv4Address | IPv6Address

FILES_AT_ONCE = 4
"""Files of one message that are fetched at the same time."""
MESSAGES_AT_ONCE = 8
"""Messages whose files are fetched at the same time; others wait, which counts as their time."""
MAX_NAME = 253
"""Characters of the name of a host."""
LOOKUPS_AT_ONCE = 2
LOOKUPS_AT_ONCE_PER_CALLER = 1

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Also half a character, which cannot be encoded; but no joiner, which some scripts need."""
_SHARED = ip_network("100.64.0.0/10")
_PRIVATE_V6 = ip_network("fc00::/7")
_TRANSLATED = (ip_network("64:ff9b::/96"), ip_network("::/96"))
"""IPv6 networks whose last 32 bits are an IPv4 address."""
_NEVER_GLOBAL = (
    ip_network("64:ff9b:1::/48"),
    ip_network("fec0::/10"),
    ip_network("192.88.99.0/24"),
    ip_network("192.0.0.0/24"),
    ip_network("5f00::/16"),
)
"""Special networks that the standard library takes for public ones."""


class EgressError(Exception):
    """An address may not be called. The text is for people; it shows no resolved address."""


class FetchError(Exception):
    """A file could not be read; the text is for people."""


class TooManyFilesError(FetchError):
    """A message names more files than may be fetched for one message."""


@dataclass(frozen=True, slots=True)
class Egress:
    """Where requests may go."""

    allowed_hosts: tuple[str, ...] = ()
    """Names, or ``*.suffix``, which does not include ``suffix`` itself; empty allows all."""
    allow_private: bool = False
    """Whether loopback and private networks may be called; link-local addresses never may."""
    lookups: "Lookups | None" = None
    """Bounds the lookups of names that callers chose; None looks names up without a bound."""


@dataclass(frozen=True, slots=True)
class Fetched:
    data: bytes
    media_type: str | None


FetchResult = Fetched | EgressError | FetchError
Fetch = Callable[[Sequence[str]], Awaitable[list[FetchResult]]]
"""Fetches the files of one message, in this order; raises TooManyFilesError."""


_caller: ContextVar[str] = ContextVar("caller", default="")
"""The caller whose share of the lookups is used."""


@contextmanager
def lookups_of(caller: str) -> Generator[None]:
    """Count lookups of names inside the context as those of a caller."""
    before = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(before)


class Lookups:
    """Looks up names that callers chose, a few at a time.

    The process has four threads for lookups. Names whose server never answers must not take them
    all, and those of one caller must not take all that are left to callers.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._shares: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )
        self._running: dict[str, asyncio.Task[tuple[str, ...]]] = {}

    async def find(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a name; concurrent lookups of the same name share one answer."""

        async def look_up(places: AsyncExitStack) -> tuple[str, ...]:
            async with places:
                try:
                    return await _addresses(host)
                finally:
                    del self._running[host]

        if host not in self._running:
            share = self._shares.setdefault(
                _caller.get(), asyncio.Semaphore(LOOKUPS_AT_ONCE_PER_CALLER)
            )
            async with AsyncExitStack() as places:  # one that is cancelled here leaves the queues
                await places.enter_async_context(share)
                await places.enter_async_context(self._room)
                if host not in self._running:
                    # The thread is busy until the system answers, even if nobody waits any more.
                    running = asyncio.create_task(look_up(places.pop_all()), name="lookup")
                    # Nobody may wait for it any more; asyncio would log its error.
                    running.add_done_callback(lambda task: task.cancelled() or task.exception())
                    self._running[host] = running
        return await asyncio.shield(self._running[host])


async def _addresses(host: str) -> tuple[str, ...]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(info[4][0]) for info in found))


class HostNotFoundError(EgressError):
    """A name has no address."""


_PORTS = {"http": 80, "https": 443}


def origin(url: str) -> str:
    """Return scheme, host and port of a URL, the port always written out."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    return f"{parts.scheme}://{host}:{parts.port or _PORTS.get(parts.scheme, 0)}"


@dataclass(frozen=True, slots=True)
class OriginCredential:
    """An ``Authorization`` value that is sent to one origin only.

    A card can point to another host, which must not get the secret.
    """

    origin: str
    authorization: str = field(repr=False)

    @classmethod
    def bearer(cls, url: str, token: str) -> "OriginCredential":
        return cls(origin(url), f"Bearer {_one_line(token)}")

    @classmethod
    def basic(cls, url: str, value: str) -> "OriginCredential":
        """Take ``user:password``, plain or in base64."""
        if ":" not in value:
            try:
                value = base64.b64decode(value, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                value = ""
        if ":" not in value:
            raise ValueError("basic credentials are user:password, plain or in base64")
        return cls(origin(url), "Basic " + base64.b64encode(_one_line(value).encode()).decode())

    def headers(self, url: str) -> dict[str, str]:
        return {"Authorization": self.authorization} if origin(url) == self.origin else {}


def _one_line(secret: str) -> str:
    secret = secret.strip()
    if not secret or not secret.isprintable() or not secret.isascii():
        raise ValueError("a credential is one line of printable ASCII")
    return secret


async def vet(url: str, rules: Egress) -> None:
    """Raise EgressError unless a URL may be called, by its text and by all its addresses."""
    await resolve(check(url, rules).hostname or "", rules)


def check(url: str, rules: Egress) -> SplitResult:
    """Return the parts of a URL; raise EgressError if its text alone shows that it may not be."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a port
    except ValueError:
        raise EgressError("The URL is malformed") from None
    if _CONTROL.search(url):  # ``urlsplit`` leaves some of them out
        raise EgressError("The URL must not have control characters")
    if parts.scheme not in ("http", "https"):
        raise EgressError("Only http and https URLs can be called")
    if parts.username is not None or parts.password is not None:
        raise EgressError("The URL must not hold a user name or password")
    if not parts.hostname:
        raise EgressError("The URL names no host")
    _check_host(parts.hostname, rules)
    check_name(parts.hostname, rules)
    return parts


async def resolve(host: str, rules: Egress) -> tuple[Address, ...]:
    """Return the addresses of a name; raise EgressError unless all of them may be called."""
    try:
        found = await (rules.lookups.find(host) if rules.lookups else _addresses(host))
    except (OSError, UnicodeError):
        raise HostNotFoundError("The host cannot be found") from None
    addresses = tuple(map(ip_address, found))
    if not addresses or not all(permits(address, rules) for address in addresses):
        raise EgressError("The host is not at a public address")
    return addresses


def permits(address: Address, rules: Egress) -> bool:
    """Whether an address may be called."""
    if isinstance(address, IPv6Address) and (inner := _embedded(address)):
        return permits(inner, rules)
    special = (  # never the address of a server
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or (address.is_reserved and not address.is_loopback)
        or any(address in network for network in _NEVER_GLOBAL)
    )
    if isinstance(address, IPv6Address):
        private = address.is_loopback or address in _PRIVATE_V6
    else:
        private = address.is_private or address in _SHARED
    return not special and (address.is_global or (rules.allow_private and private))


def trust(settings: ClientSettings) -> ssl.SSLContext:
    """Return the TLS context for other agents: the authorities trusted, and our certificate.

    Raise SettingsError if a file cannot be used.
    """
    context = machine_trust()
    variable = "A2A_CLIENT_CA_FILE"
    try:
        if settings.ca_file:
            context.load_verify_locations(settings.ca_file)
        variable = "A2A_CLIENT_CERT_FILE"
        if settings.cert_file:
            # Without a password of ours OpenSSL would ask for one at the terminal.
            context.load_cert_chain(settings.cert_file, password="")
    except ssl.SSLError:
        text = "should be a file in PEM with " + (
            "certificates" if variable.endswith("CA_FILE") else "a certificate and its private key"
        )
        raise SettingsError.of(variable, text) from None
    except OSError as error:
        raise SettingsError.of(variable, f"cannot be read: {error.strerror}") from None
    return context


def tls_trouble(error: BaseException) -> str | None:
    """Return what is wrong with a certificate and the remedy, if a call failed because of one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"has a certificate that is not accepted ({cause.verify_message}); if its "
                "authority is your own, name it with A2A_CLIENT_CA_FILE"
            )
        if isinstance(cause, ssl.SSLError) and "CERTIFICATE_REQUIRED" in (cause.reason or ""):
            return "requires a client certificate; name one with A2A_CLIENT_CERT_FILE"
        cause = cause.__cause__ or cause.__context__
    return None


class Fetcher:
    """Reads the files that messages name, within limits for each message."""

    def __init__(self, limits: ServiceSettings, rules: Egress | None = None) -> None:
        self._limits = limits
        self._rules = rules or Egress()
        self._room = asyncio.Semaphore(MESSAGES_AT_ONCE)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        # Kept: reading the certificate authorities takes milliseconds and a megabyte.
        return machine_trust()

    async def __call__(self, urls: Sequence[str]) -> list[FetchResult]:
        """Read the files of one message; return each file, or the error that kept it away.

        Sizes are counted after decompression, which happens in pieces of bounded size.
        """
        import httpx2

        from opencode_a2a.net.http import client

        if not self._limits.fetch_files:
            refusal = EgressError("files are not fetched here; send the bytes instead")
            return [refusal] * len(urls)
        most = self._limits.fetch_files_max_count
        seconds = self._limits.fetch_files_timeout_seconds
        if len(urls) > most:
            raise TooManyFilesError(
                f"names {len(urls)} files by URL, and at most {most} are fetched; "
                "send several messages"
            )
        deadline = asyncio.get_running_loop().time() + seconds
        late = FetchError(f"The files of the message did not arrive within {seconds:g} s")
        try:
            async with asyncio.timeout_at(deadline):
                await self._room.acquire()
        except TimeoutError:
            return [late] * len(urls)
        fetching = _Fetching(self._limits.fetch_files_max_total_bytes)

        async def one(url: str) -> FetchResult:
            try:
                async with asyncio.timeout_at(deadline), fetching.slots:
                    return await self._fetch(http, url, fetching)
            except TimeoutError:
                return late
            except (EgressError, FetchError) as error:
                return error
            except (httpx2.HTTPError, httpx2.InvalidURL):
                return FetchError("The file cannot be fetched")

        try:
            async with client(self._rules, timeout=seconds, tls=self._tls) as http:
                return await asyncio.gather(*map(one, urls))
        finally:
            self._room.release()

    async def _fetch(self, http: "httpx2.AsyncClient", url: str, fetching: "_Fetching") -> Fetched:
        from opencode_a2a.net.http import media_type, read

        check(url, self._rules)
        if fetching.left <= 0:
            raise fetching.exhausted
        headers = {"accept": "*/*", "accept-encoding": "identity"}
        async with http.stream("GET", url, headers=headers) as response:
            if 300 <= response.status_code < 400:
                raise FetchError("The URL redirects elsewhere; give the final one")
            if response.status_code != 200:
                raise FetchError(
                    f"The server of the file answered with status {response.status_code}"
                )
            most = self._limits.fetch_files_max_bytes
            data = await read(response, most, fetching.spend)
            if data is None:
                raise FetchError(f"The file is larger than {most} bytes")
            return Fetched(data, media_type(response) or None)


class _Fetching:
    """The limits that the files of one message share."""

    def __init__(self, most: int) -> None:
        self.slots = asyncio.Semaphore(FILES_AT_ONCE)
        self.left = most
        self.exhausted = FetchError(
            f"The files of the message are larger than {most} bytes together"
        )

    def spend(self, size: int) -> None:
        """Count bytes that have arrived; raise FetchError if they are too many in total."""
        self.left -= size
        if self.left < 0:
            raise self.exhausted


def _check_host(host: str, rules: Egress) -> None:
    """Refuse what is neither an address nor a name that can exist, or can only be this machine."""
    try:
        ip_address(host)
    except ValueError:
        pass
    else:
        return
    try:
        name = host.removesuffix(".").encode("idna").decode("ascii").lower()
    except UnicodeError:  # also for a label that is empty or too long
        name = ""
    try:
        # What ends in a number is an address in an old form, such as 127.1, or nothing.
        exists = not _NUMBER.fullmatch(name.split(".")[-1]) or bool(socket.inet_aton(name))
    except (OSError, ValueError):  # the latter for a zero byte
        exists = False
    if not exists or len(name) > MAX_NAME or not all(map(_LABEL.fullmatch, name.split("."))):
        raise EgressError("The host in the URL is neither an address nor a name that can exist")
    if not rules.allow_private and name.split(".")[-1] == "localhost":  # RFC 6761
        raise EgressError("The host is not at a public address")


def check_name(host: str, rules: Egress) -> None:
    name = host.lower().removesuffix(".")
    for rule in map(str.lower, rules.allowed_hosts):
        if rule.startswith("*."):
            if name.endswith(rule[1:]) and len(name) > len(rule) - 1:
                return
        elif name == rule:
            return
    if rules.allowed_hosts:
        raise EgressError("The host is not in the list of those that may be called")


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that an IPv6 one stands for, if it does."""
    inner = address.ipv4_mapped or address.sixtofour
    # ``::`` and ``::1`` are addresses in their own right.
    if inner is None and int(address) > 1 and any(address in known for known in _TRANSLATED):
        inner = IPv4Address(int(address) & 0xFFFFFFFF)
    return inner
