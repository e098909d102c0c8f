"""A secret and the one origin it belongs to.

Commands and ``app`` make these from the environment; ``peers.client`` asks for the headers of
each request. A card can send a caller to another host; the secret does not go along.
"""

import base64
import binascii
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def origin(url: str) -> str:
    """Return scheme, host and port of a URL, the port always written out."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    return f"{parts.scheme}://{host}:{parts.port or _PORTS.get(parts.scheme, 0)}"


@dataclass(frozen=True, slots=True)
class Credential:
    """An ``Authorization`` value that only its origin gets to see."""

    origin: str
    authorization: str = field(repr=False)

    @classmethod
    def bearer(cls, url: str, token: str) -> "Credential":
        return cls(origin(url), f"Bearer {_one_line(token)}")

    @classmethod
    def basic(cls, url: str, value: str) -> "Credential":
        """Take ``user:password``, or the same already in base64."""
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
