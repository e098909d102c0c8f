"""The kinds of values that settings have, and how each is read from text.

Used by ``groups``; knows nothing of single settings or of where a value came from.
"""

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias, cast, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)


def _split(value: object) -> object:
    """Take ``a,b`` and ``["a", "b"]`` alike."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _decode(value)
    return [item.strip() for item in value.split(",") if item.strip()]


def _asks(value: object) -> object:
    """Take also ``all``, ``none``, and what a flag without a value stands for."""
    if isinstance(value, str) and value.strip().lower() in ("all", "true"):
        return ("bash", "edit", "webfetch")
    asks = () if value == "none" else _split(value)
    if _holds_unknown(asks):
        raise ValueError("should be all, none, or some of bash, edit and webfetch")
    return asks


def _holds_unknown(asks: object) -> bool:
    known = get_args(Ask)
    return isinstance(asks, list) and any(ask not in known for ask in cast("list[object]", asks))


def _decode(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("should be a JSON array") from None  # the parser's text quotes the value


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


def _database_url(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    if scheme not in ("sqlite", "sqlite+aiosqlite", "sqlite+pysqlite") or not separator:
        raise ValueError("should be a SQLite URL such as sqlite:////var/lib/opencode-a2a/tasks.db")
    if rest.startswith("/file:"):  # a second syntax for paths, which could hide where a file is
        raise ValueError("should name a file as it is, not as file:…")
    return f"sqlite://{rest}"


def database_file(url: str) -> Path | None:
    """Return the file that a SQLite URL names; None for a database in memory."""
    name = url.partition("://")[2].partition("?")[0].removeprefix("/")
    return None if name in ("", ":memory:") else Path(name).absolute()


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
    """Unknown levels mean WARNING, as they always did; ``load`` adds a warning."""
    level = value.upper() if isinstance(value, str) else value
    return level if level in get_args(LogLevel) else "WARNING"


def _protocol_line(value: object) -> object:
    return ".".join(value.split(".")[:2]) if isinstance(value, str) else value


_TRANSPORTS = {"JSONRPC": "JSONRPC", "HTTPJSON": "HTTP+JSON", "REST": "HTTP+JSON", "GRPC": "GRPC"}


def _transport(value: object) -> object:
    return (
        _TRANSPORTS.get(re.sub(r"[^A-Z]", "", value.upper())) if isinstance(value, str) else value
    )


def _token(value: SecretStr) -> SecretStr:
    """Refuse a token that no caller can send: the header's value is stripped and one line."""
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


def _basic_user(value: str) -> str:
    if ":" in value:
        raise ValueError("should not contain a colon")
    return value


def _basic_auth(value: SecretStr) -> SecretStr:
    """Return ``user:password``, also when it came in base64."""
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


UNGUESSABLE = 20
"""Characters from which on a secret cannot be found by trying."""

LogLevel: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrOff = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, Field(min_length=1)]
Secret = Annotated[SecretStr, Field(min_length=1)]
Token = Annotated[Secret, AfterValidator(_token)]
SentToken = Annotated[Secret, AfterValidator(sendable)]
BasicAuth = Annotated[Secret, AfterValidator(_basic_auth), AfterValidator(sendable)]
DatabaseUrl = Annotated[str, AfterValidator(_database_url)]
Level = Annotated[LogLevel, BeforeValidator(_log_level)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
LocalPath = Annotated[Path, AfterValidator(_path)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_split)]
Paths = Annotated[tuple[LocalPath, ...], BeforeValidator(_split)]
ProtocolLine = Annotated[Literal["0.3", "1.0"], BeforeValidator(_protocol_line)]
Transport = Annotated[Literal["JSONRPC", "HTTP+JSON", "GRPC"], BeforeValidator(_transport)]
Lines = Annotated[tuple[ProtocolLine, ...], BeforeValidator(_split), Field(min_length=1)]
Transports = Annotated[tuple[Transport, ...], BeforeValidator(_split), Field(min_length=1)]
Ask: TypeAlias = Literal["bash", "edit", "webfetch"]
Asks = Annotated[tuple[Ask, ...], BeforeValidator(_asks)]
Capability: TypeAlias = Literal["session_shell", "workspace_mutation"]

STRICT = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class CredentialEntry(BaseModel):
    """One entry of ``A2A_STATIC_AUTH_CREDENTIALS``."""

    model_config = STRICT

    scheme: Literal["bearer", "basic"]
    credential_id: Text | None = None
    principal: Text | None = None
    token: Token | None = None
    username: Annotated[Text, AfterValidator(_basic_user)] | None = None
    password: Secret | None = None
    capabilities: frozenset[Capability] | None = None
    enabled: bool = True

    @model_validator(mode="after")
    def _complete(self) -> Self:
        bearer = (self.principal, self.token)
        basic = (self.username, self.password)
        if self.scheme == "bearer" and (None in bearer or any(basic)):
            raise ValueError("bearer needs principal and token, and neither username nor password")
        if self.scheme == "basic" and (None in basic or any(bearer)):
            raise ValueError("basic needs username and password, and neither principal nor token")
        return self

    @property
    def owner(self) -> str:
        """Who the caller is: the principal, or the user name."""
        return self.principal or self.username or ""

    @property
    def granted(self) -> frozenset[Capability]:
        """What the caller may do beyond reading and prompting."""
        if self.capabilities is not None:
            return self.capabilities
        return frozenset(get_args(Capability)) if self.scheme == "basic" else frozenset()


class AnswerRule(BaseModel):
    """One entry of ``A2A_PERMISSION_RULES``; the last rule that fits decides."""

    model_config = STRICT

    permission: Text
    pattern: Text = "*"
    action: Literal["allow", "ask", "deny"]


class PeerEntry(BaseModel):
    """One entry of ``A2A_PEERS``; ``credential`` names the variable that holds the token."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    url: HttpUrl
    credential: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    token: Secret | None = None


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_STATE_HOME/opencode-a2a"""
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else home / ".local" / "state") / "opencode-a2a"


Credentials = Annotated[
    tuple[CredentialEntry, ...] | None, BeforeValidator(_decode), Field(min_length=1)
]
PermissionRules = Annotated[tuple[AnswerRule, ...], BeforeValidator(_decode)]
PeerEntries = Annotated[tuple[PeerEntry, ...], BeforeValidator(_decode)]
