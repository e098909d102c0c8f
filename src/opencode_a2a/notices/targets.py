"""The places that messages go to: ntfy, Slack, Telegram, e-mail and plain webhooks.

A message has a title, a sentence and a link, and nothing that an agent, a provider or a caller
wrote: it passes through servers of others. Secrets of a target are sent to that target alone, and
never logged: neither are its URL and the text of its response.
"""

import asyncio
import smtplib
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import orjson
from pydantic import SecretStr

from opencode_a2a import __version__
from opencode_a2a.bounds import DaemonThreads, Recent
from opencode_a2a.config import (
    EmailEntry,
    NoticeEntry,
    NtfyEntry,
    SlackEntry,
    TelegramEntry,
    WebhookEntry,
    WebPushEntry,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.net.egress import Egress
from opencode_a2a.net.trust import machine_trust
from opencode_a2a.push.notification import Away, Failed, Receipt, Taken
from opencode_a2a.push.sender import post

if TYPE_CHECKING:
    import httpx2
    from _typeshed import ReadableBuffer

_PORTS = {"tls": 465, "starttls": 587, "none": 25}
SMTP_LIMITS = 4
"""How long a mail may take in all, as a multiple of the time limit for one step."""
SMTP_THREADS = 2
"""Mails that are being sent at once; one that was given up counts until its thread ends."""
UNCONFIRMED = 1000
"""Mails of which is remembered that their server did not say that it has taken them."""


@dataclass(frozen=True, slots=True)
class Note:
    """A message to a person."""

    title: str
    text: str
    url: str
    """Where a tap leads."""
    label: str
    """What the button for that says."""
    urgent: bool
    """Whether somebody is waited for."""
    key: str
    """The same for every attempt to send it."""


class Target(Protocol):
    async def send(self, principal: str, note: Note) -> Receipt:
        """Make one attempt, within a time limit."""
        ...


class HttpTarget:
    """A target that is told by an HTTP request with JSON."""

    def __init__(self, entry: NoticeEntry, http: "Http") -> None:
        self._entry = entry
        self._http = http

    async def send(self, principal: str, note: Note) -> Receipt:
        match self._entry:
            case NtfyEntry(url=url, token=token):
                base, _, topic = url.rpartition("/")
                return await self._http.post(base, _ntfy(topic, note), token)
            case SlackEntry(url=url):
                return await self._http.post(url.get_secret_value(), _slack(note))
            case TelegramEntry(token=token, chat=chat, api_url=api):
                url = f"{api}/bot{token.get_secret_value()}/sendMessage"
                return await self._http.post(url, _telegram(chat, note))
            case WebhookEntry(url=url, token=token):
                headers = {"webhook-id": note.key}
                return await self._http.post(url, _plain(principal, note), token, headers)
            case EmailEntry() | WebPushEntry():
                raise TypeError(f"{self._entry.kind} has a class of its own")


def _ntfy(topic: str, note: Note) -> JsonObject:
    return {
        "topic": topic,
        "title": note.title,
        "message": note.text,
        "click": note.url,
        "priority": 4 if note.urgent else 3,
        "tags": ["raised_hand" if note.urgent else "checkered_flag"],
        "actions": [{"action": "view", "label": note.label, "url": note.url, "clear": True}],
    }


def _slack(note: Note) -> JsonObject:
    link = f"<{note.url}|{note.label}>"
    return {
        "text": f"*{_escaped(note.title)}*\n{_escaped(note.text)}\n{link}",
        # A preview would have Slack fetch the page.
        "unfurl_links": False,
        "unfurl_media": False,
    }


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _telegram(chat: str, note: Note) -> JsonObject:
    button: Json = {"text": note.label, "url": note.url}
    return {
        "chat_id": chat,
        "text": f"{note.title}\n{note.text}",
        "link_preview_options": {"is_disabled": True},
        "reply_markup": {"inline_keyboard": [[button]]},
    }


def _plain(principal: str, note: Note) -> JsonObject:
    return {
        "title": note.title,
        "text": note.text,
        "url": note.url,
        "urgent": note.urgent,
        "principal": principal,
    }


class Http:
    """Makes requests to places; those that the operator named may be on a private network."""

    def __init__(self, seconds: float, rules: Egress | None = None) -> None:
        self._seconds = seconds
        self._rules = rules or Egress(allow_private=True)
        self._client: httpx2.AsyncClient | None = None

    async def post(
        self,
        url: str,
        content: JsonObject | bytes,
        token: SecretStr | None = None,
        headers: dict[str, str] | None = None,
    ) -> Receipt:
        from opencode_a2a.net.http import client

        if self._client is None:
            self._client = client(self._rules, timeout=self._seconds)
        sent = {"User-Agent": f"opencode-a2a/{__version__}", **(headers or {})}
        if not isinstance(content, bytes):
            sent["Content-Type"], content = "application/json", orjson.dumps(content)
        if token is not None:
            sent["Authorization"] = f"Bearer {token.get_secret_value()}"
        return await post(self._client, url, content, sent, self._seconds)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()


class _Stage(Enum):
    """How far a mail has come."""

    QUEUED = auto()
    CONNECTING = auto()
    """Until the login: nothing about this mail has been said."""
    OFFERED = auto()
    SENT = auto()
    """The server has all of it, and has not said yet that it takes it."""
    TAKEN = auto()


@dataclass(eq=False, slots=True)
class _Mail:
    content: EmailMessage
    stage: _Stage = _Stage.QUEUED
    """Set by its thread."""


class EmailTarget:
    """Sends e-mail by SMTP, in threads: the library of Python waits."""

    def __init__(self, entry: EmailEntry, seconds: float) -> None:
        self._entry = entry
        self._seconds = seconds
        """How long one step may take."""
        self._threads = DaemonThreads("smtp", SMTP_THREADS)
        self._unconfirmed: Recent[str, None] = Recent(UNCONFIRMED)
        """The keys of their notes."""

    async def send(self, principal: str, note: Note) -> Receipt:
        entry, content = self._entry, EmailMessage()
        content["Subject"], content["From"] = note.title, entry.sender
        content["To"] = ", ".join(entry.to)
        content["Date"] = formatdate()
        content["Message-ID"] = f"<{note.key}@{entry.sender.rpartition('@')[2]}>"
        content["Auto-Submitted"] = "auto-generated"
        content.set_content(f"{note.text}\n\n{note.label}: {note.url}\n")
        mail = _Mail(content)
        try:
            async with asyncio.timeout(SMTP_LIMITS * self._seconds):
                await self._threads.run(lambda: self._deliver(mail))
        except (OSError, UnicodeEncodeError) as error:  # those of ``smtplib`` are an OSError
            return self._receipt_of(error, mail.stage, note.key)
        return Taken()

    def _receipt_of(self, error: OSError | UnicodeEncodeError, stage: _Stage, key: str) -> Receipt:
        if stage is _Stage.TAKEN:  # only the parting failed
            return Taken()
        match error:
            case smtplib.SMTPAuthenticationError() | UnicodeEncodeError():  # a login is ASCII
                return Failed("login_refused")
            case smtplib.SMTPResponseException():
                return Failed(f"smtp_{error.smtp_code}")
            case smtplib.SMTPRecipientsRefused():
                return Failed("recipient_refused")
            case _:  # no answer, or none in time
                name = "timeout" if isinstance(error, TimeoutError) else "unreachable"
        if stage is _Stage.CONNECTING:
            return Away(name)
        if stage is not _Stage.SENT:
            return Failed(name)
        # Most likely it was taken: a server that checks each mail for longer than we wait would
        # get it again and again. One that was restarted meanwhile may have lost it.
        if key in self._unconfirmed:
            return Taken()
        self._unconfirmed[key] = None
        return Failed("timeout")

    def _deliver(self, mail: _Mail) -> None:
        mail.stage = _Stage.CONNECTING
        entry, trust = self._entry, machine_trust()
        port = entry.port or _PORTS[entry.security]
        if entry.security == "tls":
            server = smtplib.SMTP_SSL(entry.server, port, timeout=self._seconds, context=trust)
        else:
            server = smtplib.SMTP(entry.server, port, timeout=self._seconds)
        with server:
            if entry.security == "starttls":
                server.starttls(context=trust)
            if entry.username is not None and entry.password is not None:
                server.login(entry.username, entry.password.get_secret_value())
            server.ehlo_or_helo_if_needed()
            mail.stage, send = _Stage.OFFERED, server.send

            def send_and_note(s: "ReadableBuffer | str") -> None:
                send(s)
                if isinstance(s, bytes):  # the whole mail; a command is a str
                    mail.stage = _Stage.SENT

            server.send = send_and_note
            server.send_message(mail.content)
            mail.stage = _Stage.TAKEN


def made_of(entry: NoticeEntry, http: Http, seconds: float) -> Target:
    """Return the target of an entry of ``A2A_NOTIFY``."""
    return EmailTarget(entry, seconds) if isinstance(entry, EmailEntry) else HttpTarget(entry, http)
