"""Send notifications to webhooks: the body, the headers that prove its origin, and the request.

``push.loop`` decides what is sent and when, and what follows from the outcome. A receiver is a
stranger: the connection goes to the very address that was checked, no redirect is followed, no
cookie is kept, and only the status of its response counts.
"""

import asyncio
import base64
import hashlib
import hmac
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import orjson

from opencode_a2a import __version__
from opencode_a2a.a2a import render
from opencode_a2a.a2a.encoding import V03
from opencode_a2a.a2a.types import SIGNING_KEY, VERSION_HEADER, Version
from opencode_a2a.config import PushSettings
from opencode_a2a.errors import InvalidParamsError
from opencode_a2a.events import JsonObject
from opencode_a2a.log.state import Entry, TaskState
from opencode_a2a.messages import PushConfig
from opencode_a2a.net.egress import (
    Egress,
    EgressError,
    HostNotFoundError,
    Lookups,
    check,
    lookups_of,
    resolve,
)
from opencode_a2a.push.notification import Away, Failed, Gone, Notification, Receipt, Taken
from opencode_a2a.signing import SigningKey
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.telemetry import trace_headers

if TYPE_CHECKING:
    import httpx2  # else imported with the first webhook: many services have none

LOOKUP_SECONDS = 2.0
"""Time limit for resolving the host of a new webhook; it is checked again for each attempt."""
RESPONSE_BYTES = 4096
RESPONSE_SECONDS = 1.0
"""How much of a response is read, and for how long, so that the connection can be used again."""
TASK_BYTES = 2**20
"""A larger task is sent to a receiver of 0.3 without artifacts and history."""
TOKEN_HEADERS = ("X-A2A-Notification-Token", "A2A-Notification-Token")
"""Receivers look for one or the other."""
TOKEN_SECONDS = 300
"""How long a token that we sign is valid."""
CONNECTED = "http11."
"""How the client's names begin for all that happens once it has a connection."""
WRITTEN = "http11.send_request_body.complete"
"""What the client calls the moment in which the whole request was written to the connection."""
_CONTENT_TYPES = {Version.V1: "application/a2a+json", Version.V03: "application/json"}


class WebhookSender:
    """Sends notifications; one for the whole service."""

    def __init__(self, settings: PushSettings, issuer: str, key: SigningKey | None = None) -> None:
        """``key`` signs for the ``issuer``, our own URL, where a receiver asks for it."""
        self._issuer = issuer
        self._key = key
        self._seconds = settings.timeout_seconds
        self.lookups = Lookups()
        """Shared with everything else that resolves hosts that callers name."""
        rules = (settings.allowed_hosts, settings.allow_private_hosts)
        self._rules = Egress(*rules, self.lookups)
        self._http: httpx2.AsyncClient | None = None

    async def vet(self, config: PushConfig) -> None:
        """Raise InvalidParamsError if nothing may be sent to the URL of a configuration.

        A name that cannot be found now may be found later.
        """
        import httpx2

        try:
            parts = check(config.url, self._rules)
            if parts.scheme != "https" and not self._rules.allow_private:
                raise EgressError("Notifications are sent over https only")
            if parts.fragment or parts.port == 0:
                raise EgressError("The URL must not have a fragment, nor the port 0")
            if any(map(str.isspace, config.url)) or "\\" in config.url:
                raise EgressError("The URL must not have spaces or backslashes; write %20 or %5C")
            _ = httpx2.URL(config.url).host  # as it will be called
            async with asyncio.timeout(LOOKUP_SECONDS):
                await resolve(parts.hostname or "", self._rules)
        except (HostNotFoundError, TimeoutError):
            pass
        except (EgressError, httpx2.InvalidURL, UnicodeError) as error:
            text = f"cannot be used: {error}; give the https URL of a public host"
            raise InvalidParamsError.of(f"{config.within}url", text) from None

    async def send(
        self, row: HookRow, notification: Notification, shown: Callable[[], None]
    ) -> Receipt:
        from opencode_a2a.net.http import client

        if self._http is None:  # reading the certificate authorities takes milliseconds
            self._http = client(self._rules, timeout=self._seconds)
        version, body = Version(row.version), _body(notification)
        headers = {
            "Content-Type": _CONTENT_TYPES[version],
            VERSION_HEADER: version.value,
            **self._proof(row, notification, int(time.time()), body),
            **trace_headers(),
            "User-Agent": f"opencode-a2a/{__version__}",
            "Accept-Encoding": "identity",
        }

        with lookups_of(row.principal):
            return await post(self._http, row.url, body, headers, self._seconds, shown)

    def _proof(
        self, row: HookRow, notification: Notification, at: int, body: bytes
    ) -> dict[str, str]:
        """Return the headers that identify a notification and prove who sent it."""
        name = f"{row.key}-{notification.seq}"
        headers = {"webhook-id": name, "webhook-timestamp": str(at)}
        if row.scheme and row.credentials:
            headers["Authorization"] = f"{row.scheme} {row.credentials}"
        elif (row.scheme or "").lower() == "bearer" and self._key is not None:
            claims: JsonObject = {
                "iss": self._issuer,
                "aud": row.url,
                "iat": at,
                "exp": at + TOKEN_SECONDS,
                "jti": name,
                "taskId": notification.ref.id,
                "request_body_sha256": hashlib.sha256(body).hexdigest(),
            }
            headers["Authorization"] = f"Bearer {self._key.jwt(claims)}"
        if row.token and row.token.startswith(SIGNING_KEY):
            key = base64.b64decode(row.token.removeprefix(SIGNING_KEY))
            signed = b"%b.%d.%b" % (name.encode(), at, body)
            digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest())
            headers["webhook-signature"] = f"v1,{digest.decode()}"
        elif row.token:
            headers |= dict.fromkeys(TOKEN_HEADERS, row.token)
        return headers

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()


def _body(notification: Notification) -> bytes:
    """Return a stream event for a receiver of 1.0, and the whole task for one of 0.3."""
    match notification.what:
        case Entry() as entry:
            return orjson.dumps(render.update(entry, notification.ref))
        case TaskState() as state if notification.whole:
            body = orjson.dumps(V03.result(render.task(state)))
            if len(body) > TASK_BYTES:
                body = orjson.dumps(V03.result(render.task(state, 0, artifacts=False)))
            return body
        case state:
            return orjson.dumps(render.status_event(state))


async def post(
    http: "httpx2.AsyncClient",
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    seconds: float,
    written: Callable[[], None] = lambda: None,
) -> Receipt:
    """Make one request; ``written`` is called as soon as the receiver may have all of it."""
    import httpx2

    from opencode_a2a.net.http import read

    reached, receipt = False, None

    async def trace(step: str, _: object) -> None:
        nonlocal reached
        reached = reached or step.startswith(CONNECTED)
        if step == WRITTEN:
            written()

    sent = http.stream("POST", url, content=body, headers=headers, extensions={"trace": trace})
    try:
        async with asyncio.timeout(seconds), sent as response:
            receipt = _receipt_of(response)  # whatever becomes of the rest
            if response.is_success:
                with suppress(TimeoutError, httpx2.HTTPError):
                    async with asyncio.timeout(RESPONSE_SECONDS):
                        await read(response, RESPONSE_BYTES)
            return receipt
    # A host that is slow, or breaks off, is not away: the next notification may well arrive.
    except (TimeoutError, httpx2.TimeoutException):
        return receipt or (Failed if reached else Away)("timeout")
    except HostNotFoundError:
        return Away("unknown_host")
    except EgressError:
        return Away("refused_address")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        cause: BaseException | None = error  # the client wraps the errors of TLS
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        return receipt or (Failed if reached else Away)("unreachable" if cause is None else "tls")


def _receipt_of(response: "httpx2.Response") -> Receipt:
    """Return what the response of a receiver means."""
    name = f"http_{response.status_code}"
    if response.is_success:
        return Taken()
    if response.status_code == 410:
        return Gone(name)
    asked, after = response.headers.get("retry-after", "").strip(), None
    with suppress(ValueError, TypeError, OverflowError):
        if asked.isascii() and asked.isdecimal():
            after = float(asked[:9])
        elif asked:
            after = parsedate_to_datetime(asked).timestamp() - time.time()
    return Failed(name, after)
