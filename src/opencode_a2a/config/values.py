"""The kinds of values that settings have, and how each is read from text.

First the functions that read or check a value, then the types that use them, then the entries of
settings that are lists of objects. ``groups`` declares the settings with these types.
"""

import base64
import binascii
import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime, time, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, cast, get_args
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, available_timezones

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)

from opencode_a2a import databases
from opencode_a2a.rights import CAPABILITIES, Action, Capability, Profile


def loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_loopback(url: str) -> bool:
    """Whether only this machine can reach the host of a URL."""
    return loopback(urlsplit(url).hostname or "")


def _split(value: object) -> object:
    """Accept ``a,b`` as well as ``["a", "b"]``."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _decode(value)
    return [item.strip() for item in value.split(",") if item.strip()]


def _asks(value: object) -> object:
    """Accept ``all``, ``none`` and ``true`` too; a flag without a value means ``true``."""
    if isinstance(value, str) and value.strip().lower() in ("all", "true"):
        return ("bash", "edit", "webfetch")
    asks = () if value == "none" else _split(value)
    # Pydantic's own message would not mention ``all`` and ``none``.
    if isinstance(asks, list):
        known, given = get_args(Ask), cast("list[object]", asks)
        if any(ask not in known for ask in given):
            raise ValueError("should be all, none, or some of bash, edit and webfetch")
        return given
    return asks


def _decode(value: object, kind: Literal["array", "object"] = "array") -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(f"should be a JSON {kind}") from None  # the parser's text quotes the value


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its text quotes the value, which may hold a password
        usable = False
    if not usable:
        raise ValueError("should be an http:// or https:// URL")
    if "@" in urlsplit(value).netloc:
        raise ValueError("should not hold a user name or password; there are settings for these")
    return value.rstrip("/")


def _host(value: str) -> str:
    # The host becomes part of URLs, so it must not change how they are parsed.
    try:
        usable = bool(re.fullmatch(r"[\w.:%-]+", value))
        if ":" in value or "%" in value:
            ipaddress.IPv6Address(value)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("should be an IP address or a host name")
    return value


def _path(value: Path) -> Path:
    if "\0" in str(value):
        raise ValueError("should not contain a null character")
    try:
        return Path(os.path.abspath(value.expanduser()))
    except RuntimeError:
        raise ValueError("begins with the home directory of a user who does not exist") from None
    except FileNotFoundError:
        raise ValueError("should be absolute, since the current directory is gone") from None


def _log_level(value: object) -> object:
    """Treat unknown levels as WARNING, as earlier versions did; ``load`` adds a warning."""
    level = value.upper() if isinstance(value, str) else value
    return level if level in get_args(LogLevel) else "WARNING"


def _path_prefix(value: str) -> str:
    """Return a path without a trailing slash; ``/`` becomes empty."""
    path = value.strip().rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError("should be a path of letters, digits, dots and dashes, such as /agent")
    if {".", "..", ".well-known"} & set(path.split("/")):
        raise ValueError("should not contain ., .. or .well-known")
    return path


PathAlias: TypeAlias = Literal["rpc", "rest"]


# What cards say of the bindings that are served: ``server.contracts.Binding``.
class HttpBinding(StrEnum):
    """A binding of A2A over HTTP, by its name on a card. Our client speaks all of them."""

    alias: PathAlias
    """The root that it has for itself if ``A2A_PATH_ALIASES`` names it."""

    HTTP_JSON = "HTTP+JSON", "rest"
    JSONRPC = "JSONRPC", "rpc"

    def __new__(cls, value: str, alias: PathAlias) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.alias = alias
        return member

    @classmethod
    def spelled(cls, text: str) -> "HttpBinding | None":
        """Return the binding for a spelling such as ``http_json``, ``REST`` or ``json-rpc``."""
        known = {re.sub(r"[^A-Z]", "", one): one for one in cls} | {"REST": cls.HTTP_JSON}
        return known.get(re.sub(r"[^A-Z]", "", text.upper()))

    @classmethod
    def _missing_(cls, value: object) -> "HttpBinding | None":
        return cls.spelled(value) if isinstance(value, str) else None


def _token(value: SecretStr) -> SecretStr:
    """Refuse a token that no caller can send: a header's value is stripped and is one line."""
    plain = value.get_secret_value()
    if plain != plain.strip() or not plain.isprintable():
        raise ValueError("should be one line of printable characters without spaces around it")
    return value


def sendable(value: SecretStr) -> SecretStr:
    """Refuse a secret that cannot be sent in a header."""
    plain = value.get_secret_value().strip()
    if not plain or not plain.isprintable() or not plain.isascii():
        raise ValueError("should be one line of printable ASCII")
    return value


def _basic_auth(value: SecretStr) -> SecretStr:
    """Return ``user:password``, decoded if it was given in base64."""
    plain = value.get_secret_value()
    if ":" in plain:
        return value
    try:
        plain = base64.b64decode(plain, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        plain = ""
    if ":" not in plain:
        raise ValueError("should be user:password, or that in base64")
    return SecretStr(plain)


def _secret_url(value: SecretStr) -> SecretStr:
    """Check a URL that is itself a secret, without quoting it."""
    url = value.get_secret_value()
    if urlsplit(_http_url(url)).scheme != "https" and not is_loopback(url):
        raise ValueError("should be an https:// URL")
    return value


def _is_private(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return loopback(host) or "." not in host  # such as a name in a compose file


UNGUESSABLE = 20
"""Minimum length of a secret that cannot be guessed."""


def _must(text: str, holds: Callable[[Any], bool]) -> AfterValidator:
    """Refuse values for which ``holds`` is false; ``text`` says how a value should be."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(text)
        return value

    return AfterValidator(check)


# Numbers. A limit that can be switched off is of a type that ends in OrZero: 0 is no limit, and the
# description of the setting says so ("0 = no limit", "0 = forever"). If it does not mention 0, that
# is a number like any other. None never means "no limit": it is a setting that was not given.
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Hours = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
MoneyOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, Field(min_length=1)]
ReplicaName = Annotated[
    Text,  # it is part of the names of the replica's OpenCodes
    _must(
        "should have at most 100 characters, without spaces",
        lambda name: name.isprintable() and " " not in name and len(name) <= 100,
    ),
]
Secret = Annotated[SecretStr, Field(min_length=1)]
Token = Annotated[Secret, AfterValidator(_token)]
SentToken = Annotated[Secret, AfterValidator(sendable)]
BasicAuth = Annotated[Secret, AfterValidator(_basic_auth), AfterValidator(sendable)]
DatabaseUrl = Annotated[str, AfterValidator(databases.normalize)]
LogLevel: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
Level = Annotated[LogLevel, BeforeValidator(_log_level)]
Host = Annotated[str, AfterValidator(_host)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
SecureUrl = Annotated[
    str,
    _must(
        "should be an https:// URL; http:// is for this machine only",
        lambda url: urlsplit(_http_url(url)).scheme == "https" or is_loopback(url),
    ),
]
SecureOrPrivateUrl = Annotated[
    HttpUrl,
    _must(
        "should be an https:// URL; http:// is for this machine and private addresses",
        lambda url: str(url).startswith("https://") or _is_private(url),
    ),
]
Address = Annotated[
    str,
    _must(
        "should be an e-mail address, such as me@example.org",
        lambda text: bool(re.fullmatch(r"[!-;=?A-~]+@[A-Za-z0-9.-]+", text)),
    ),
]
IssuerUrl = Annotated[
    SecureUrl,
    _must(
        "should be the issuer's URL, without a query or fragment",
        lambda url: "?" not in url and "#" not in url,
    ),
    Field(max_length=512),
]
CardForm: TypeAlias = Literal["hybrid", "1.0", "0.3"]
PathAliases = Annotated[tuple[PathAlias, ...], BeforeValidator(_split)]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,100}$")]
PathPrefix = Annotated[str, AfterValidator(_path_prefix)]
LocalPath = Annotated[Path, AfterValidator(_path)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_split)]
Paths = Annotated[tuple[LocalPath, ...], BeforeValidator(_split)]
ProtocolVersion = Annotated[
    Literal["0.3", "1.0"],
    BeforeValidator(lambda text: ".".join(text.split(".")[:2]) if isinstance(text, str) else text),
]
ProtocolVersions = Annotated[
    tuple[ProtocolVersion, ...], BeforeValidator(_split), Field(min_length=1)
]
Bindings = Annotated[tuple[HttpBinding, ...], BeforeValidator(_split), Field(min_length=1)]
TokenAlgorithm: TypeAlias = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
TokenAlgorithms = Annotated[
    tuple[TokenAlgorithm, ...], BeforeValidator(_split), Field(min_length=1)
]
Granted: TypeAlias = Literal[Capability, "supervise"]
Scopes = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[ !#-\[\]-~]+$")], ...], BeforeValidator(_split)
]
_decode_object = BeforeValidator(partial(_decode, kind="object"))
CapabilityScopes = Annotated[dict[Text, Granted], _decode_object]
ProfileScopes = Annotated[dict[Text, Profile], _decode_object]
Ask: TypeAlias = Literal["bash", "edit", "webfetch"]
Asks = Annotated[tuple[Ask, ...], BeforeValidator(_asks)]

STRICT = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True)


class BudgetEntry(BaseModel):
    """The budget of one credential; a limit that is left out is the general one."""

    model_config = STRICT

    cost_per_day: MoneyOrZero | None = None
    tokens_per_day: CountOrZero | None = None


class CredentialEntry(BaseModel):
    """One entry of ``A2A_STATIC_AUTH_CREDENTIALS``."""

    model_config = STRICT

    scheme: Literal["bearer", "basic", "api_key"]
    credential_id: Text | None = None
    principal: Text | None = None
    token: Token | None = None
    username: (
        Annotated[Text, _must("should not contain a colon", lambda name: ":" not in name)] | None
    ) = None
    password: Secret | None = None
    capabilities: frozenset[Granted] | None = None
    profile: Profile = "auto"
    budget: BudgetEntry | None = None
    enabled: bool = True

    @model_validator(mode="after")
    def _complete(self) -> Self:
        token = (self.principal, self.token)
        basic = (self.username, self.password)
        if self.scheme != "basic" and (None in token or any(basic)):
            raise ValueError(
                f"{self.scheme} needs principal and token, and neither username nor password"
            )
        if self.scheme == "basic" and (None in basic or any(token)):
            raise ValueError("basic needs username and password, and neither principal nor token")
        return self

    @property
    def owner(self) -> str:
        """The principal of the caller: ``principal``, or the user name."""
        return self.principal or self.username or ""

    @property
    def granted(self) -> frozenset[Capability]:
        """The capabilities of the caller, beyond reading and prompting."""
        if self.capabilities is not None:
            return frozenset(one for one in self.capabilities if one != "supervise")
        return CAPABILITIES if self.scheme == "basic" else frozenset()

    @property
    def supervises(self) -> bool:
        """Whether the caller may see and control all tasks; only if ``supervise`` is named."""
        return self.capabilities is not None and "supervise" in self.capabilities


class AnswerRule(BaseModel):
    """One entry of ``A2A_PERMISSION_RULES``; the last rule that matches decides."""

    model_config = STRICT

    permission: Text
    pattern: Text = "*"
    action: Action


class PeerEntry(BaseModel):
    """One entry of ``A2A_PEERS``; ``credential`` names the variable that holds the token."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    url: HttpUrl
    credential: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    card_keys: Text | None = None
    token: Secret | None = None


class UpstreamEntry(BaseModel):
    """One entry of ``OPENCODE_UPSTREAMS``: a running OpenCode, or several to start."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    url: HttpUrl | None = None
    username: Text = "opencode"
    password_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    password: Secret | None = None
    managed: Annotated[int, Field(ge=1, le=16)] | None = None
    """How many to start; if several, their names are this name and a number."""
    shared: bool = False
    """Whether all replicas reach the same OpenCode at the URL, though it is a loopback address."""
    directories: Paths = ()
    """The directories that it serves; empty = all."""
    max_turns: CountOrZero = 0
    drain: bool = False
    """Whether existing conversations continue there while new ones start elsewhere."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.url is None) == (self.managed is None):
            raise ValueError("should have either url or managed")
        if self.managed and (self.password_variable or self.password or self.shared):
            raise ValueError("password_variable and shared are for an entry with a url")
        return self


class NoticeBase(BaseModel):
    """What all entries of ``A2A_NOTIFY`` have."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")] = ""
    """Default: the kind."""
    principals: Texts = ()
    """Whose tasks the messages are about; ``*`` is everybody, and so is nothing if there is only
    one caller."""
    about: Annotated[
        tuple[Literal["waits", "ends"], ...], BeforeValidator(_split), Field(min_length=1)
    ] = ("waits", "ends")

    def concerns(self, principal: str) -> bool:
        """Whether messages about the tasks of a principal go here."""
        return not self.principals or principal in self.principals or "*" in self.principals


class NtfyEntry(NoticeBase):
    kind: Literal["ntfy"]
    url: Annotated[
        SecureOrPrivateUrl,
        _must(
            "should be the URL of a topic, such as https://ntfy.sh/my-topic",
            lambda url: bool(re.fullmatch(r"https?://[^/]+/(.+/)?[A-Za-z0-9_-]{1,64}", url)),
        ),
    ]
    token: SentToken | None = None


class SlackEntry(NoticeBase):
    kind: Literal["slack"]
    url: Annotated[SecretStr, AfterValidator(_secret_url)]
    """Of an incoming webhook, and as good as a password."""


_CHAT = r"^(-?\d+|@\w+)$"


class TelegramEntry(NoticeBase):
    kind: Literal["telegram"]
    token: Annotated[
        SecretStr,
        _must(
            "should be the token of a bot, such as 123456:ABC-DEF",
            lambda token: bool(re.fullmatch(r"\d+:[\w-]+", token.get_secret_value())),
        ),
    ]
    chat: Annotated[
        str,
        BeforeValidator(str),
        _must(
            "should be the id of a chat, such as -1001234, or @name of a channel",
            lambda chat: bool(re.fullmatch(_CHAT, chat)),
        ),
        Field(pattern=_CHAT),
    ]
    api_url: HttpUrl = "https://api.telegram.org"


class EmailEntry(NoticeBase):
    kind: Literal["email"]
    server: Host
    port: Port | None = None
    """Default: 465 with ``tls``, 587 with ``starttls``, 25 with ``none``."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    username: Text | None = None
    password: Secret | None = None
    sender: Address
    to: Annotated[tuple[Address, ...], BeforeValidator(_split), Field(min_length=1)]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.username is None) != (self.password is None):
            raise ValueError("should have both username and password, or neither")
        if self.password is not None and self.security == "none" and not loopback(self.server):
            raise ValueError("would send the password in the clear; use starttls or tls")
        return self


class WebhookEntry(NoticeBase):
    kind: Literal["webhook"]
    url: SecureOrPrivateUrl
    token: SentToken | None = None


class WebPushEntry(NoticeBase):
    """The browsers that callers subscribe in the console."""

    kind: Literal["webpush"]
    contact: Annotated[
        str,
        _must(
            "should be mailto: and an address, or an https:// URL",
            lambda text: str(text).startswith(("mailto:", "https://")),
        ),
    ]
    """Where the push service of a browser can complain."""


NoticeEntry: TypeAlias = Annotated[
    NtfyEntry | SlackEntry | TelegramEntry | EmailEntry | WebhookEntry | WebPushEntry,
    Field(discriminator="kind"),
]


def _named(entries: tuple[NoticeEntry, ...]) -> tuple[NoticeEntry, ...]:
    """Name entries without a name after their kind."""
    return tuple(one if one.name else one.model_copy(update={"name": one.kind}) for one in entries)


_CLOCK = r"([01]\d|2[0-3]):([0-5]\d)"


class QuietHours(BaseModel):
    """The hours of the day in which nobody is disturbed, by the clock of a time zone."""

    model_config = STRICT

    begins: time
    ends: time
    zone: str | None = None
    """None: that of this machine."""

    @classmethod
    def parse(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        found = re.fullmatch(rf"\s*{_CLOCK}\s*-\s*{_CLOCK}(?:\s+(\S+))?\s*", value)
        if found is None or found.group(1, 2) == found.group(3, 4):
            raise ValueError(
                "should be two times of the day and a time zone, such as 22:00-07:00 Europe/Berlin"
            )
        if found[5] is not None and found[5] not in available_timezones():
            raise ValueError(f"{found[5][:64]!r} is not a time zone that this machine knows")
        begins, ends = (time(int(found[i]), int(found[i + 1])) for i in (1, 3))
        return {"begins": begins, "ends": ends, "zone": found[5]}

    def __str__(self) -> str:
        return f"{self.begins:%H:%M}-{self.ends:%H:%M} {self.zone or ''}".rstrip()

    def left(self, at: float) -> float:
        """Return how many seconds of quiet are left at a time in seconds since the epoch."""
        now = (
            datetime.fromtimestamp(at, ZoneInfo(self.zone))
            if self.zone
            else (datetime.fromtimestamp(at).astimezone())
        )
        clock = now.time()
        if self.begins < self.ends:
            quiet = self.begins <= clock < self.ends
        else:
            quiet = clock >= self.begins or clock < self.ends
        if not quiet:
            return 0.0
        end = now.replace(hour=self.ends.hour, minute=self.ends.minute, second=0, microsecond=0)
        if end <= now:
            end += timedelta(days=1)
        return end.timestamp() - at


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_STATE_HOME/opencode-a2a"""
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else home / ".local" / "state") / "opencode-a2a"


Credentials = Annotated[
    tuple[CredentialEntry, ...] | None,
    BeforeValidator(_decode),
    _must("should have an entry; leave it out if there is none", lambda entries: entries != ()),
    Field(min_length=1),
]
PermissionRules = Annotated[tuple[AnswerRule, ...], BeforeValidator(_decode)]
PeerEntries = Annotated[tuple[PeerEntry, ...], BeforeValidator(_decode)]
UpstreamEntries = Annotated[tuple[UpstreamEntry, ...], BeforeValidator(_decode)]
NoticeEntries = Annotated[tuple[NoticeEntry, ...], BeforeValidator(_decode), AfterValidator(_named)]
Quiet = Annotated[QuietHours, BeforeValidator(QuietHours.parse)]
