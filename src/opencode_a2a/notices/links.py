"""Links that are bound to one request and its caller.

A link names the request and is signed. The signature also covers the principal and a time that is
stored with the request, which are looked up, so that a link made for one request, caller or
deadline fits no other. Replicas share the secret (``stored_secret``), and nothing that is signed
depends on the settings, so that a link that one of them has sent fits at all of them. What becomes
of a link that fits is decided by the state of its request alone: nothing has to be stored for it,
and it ends with the request. The name and the signature stand behind a ``#``: browsers do not send
that, so that it is in no log of a proxy, and whoever looks ahead at the link sees the same page for
all.
"""

import base64
import hmac
import re
import secrets
from dataclasses import dataclass
from urllib.parse import quote

from opencode_a2a.config import Settings
from opencode_a2a.store import callers
from opencode_a2a.store.database import Database
from opencode_a2a.web.auth import generate_token

PAGE = "/link"
_BYTES = 24
"""Size of a signature."""


async def stored_secret(name: str, settings: Settings, database: Database) -> bytes:
    """Return a secret of the service, made on first use.

    It is a file in the state directory; replicas keep it in the database that they share.
    """
    if database.replica is not None:
        proposed = secrets.token_bytes(32)
        return await database.write(callers.shared_secret, proposed, name.encode())
    return generate_token(settings.a2a.state_dir / f"{name}-key").encode()


@dataclass(frozen=True, slots=True)
class Subject:
    """What a link is bound to: a request, or a sign-in that a task waits for."""

    id: str
    principal: str
    at: int
    """The deadline of a request, or since when a sign-in is waited for; in milliseconds since the
    epoch."""


SIGN_IN = "in_"
"""The beginning of the id of a sign-in, which has no request: then the task, and since when."""
_SIGN_IN_ID = re.compile(rf"{SIGN_IN}(.+)_([0-9a-f]{{1,12}})")


def sign_in_id(task_id: str, since: int) -> str:
    return f"{SIGN_IN}{task_id}_{since:x}"


def load_sign_in_id(text: str) -> tuple[str, int] | None:
    """Return the task and the time that ``sign_in_id`` was given; None if it made no such text."""
    found = _SIGN_IN_ID.fullmatch(text)
    return None if found is None else (found[1], int(found[2], 16))


def sign_in_deadline(since: int, seconds: float) -> int:
    """Return until when a sign-in is waited for, in milliseconds."""
    return since + int(seconds * 1000)


class Signer:
    """Makes links and recognises them."""

    def __init__(self, secret: bytes, public_url: str) -> None:
        self._key = hmac.digest(secret, b"links of requests", "sha256")
        self._public_url = public_url

    def link(self, subject: Subject) -> str:
        """Return the URL at which a person can answer a request."""
        token = f"{quote(subject.id, safe='')}.{self._sign('link', subject)}"
        return f"{self._public_url}{PAGE}#{token}"

    def task_url(self, task_id: str) -> str:
        """Return the URL of a task in the console, which asks for a sign-in."""
        return f"{self._public_url}/console#/task/{quote(task_id, safe='')}"

    def fits(self, signature: str, subject: Subject) -> bool:
        return hmac.compare_digest(self._sign("link", subject).encode(), signature.encode())

    def page_token(self, subject: Subject, *shown: str) -> str:
        """Return what a page gets with the request that it shows, and sends with the answer.

        ``shown`` is what of the request may change while it waits.
        """
        return self._sign("page", subject, *shown)

    def fits_page(self, token: str, subject: Subject, *shown: str) -> bool:
        return hmac.compare_digest(self._sign("page", subject, *shown).encode(), token.encode())

    def _sign(self, purpose: str, subject: Subject, *more: str) -> str:
        parts = (purpose, subject.id, subject.principal, str(subject.at), *more)
        # No part can run into the next one.
        signed = b"".join(b"%d:%b" % (len(raw := part.encode()), raw) for part in parts)
        digest = hmac.digest(self._key, signed, "sha256")[:_BYTES]
        return base64.urlsafe_b64encode(digest).decode()
