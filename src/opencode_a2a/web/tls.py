"""TLS on the service's own port: the certificate and its key, read again while the service runs.

A handshake uses the last valid pair. New files are noticed within a minute, or at once after
SIGHUP; open connections keep the pair that they began with. ``app`` runs
``ServerTls.reload_if_changed`` beside the server.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.config import SettingsError, TlsSettings
from opencode_a2a.signing import read_private_file
from opencode_a2a.telemetry import AUDIT

logger = structlog.get_logger(__name__)

LOOK_SECONDS = 60.0
HANDSHAKE_SECONDS = 10.0
WARNING = timedelta(days=14)
"""How long before a certificate expires the warnings begin."""
CERT_FILE = "A2A_TLS_CERT_FILE"
KEY_FILE = "A2A_TLS_KEY_FILE"
CLIENT_CA_FILE = "A2A_TLS_CLIENT_CA_FILE"
_UTC_TIME = 0x17


class ServerTls:
    """The certificate and key of new connections; a reload replaces both, or neither."""

    def __init__(self, settings: TlsSettings) -> None:
        """Read the files; raise SettingsError with the remedy if one cannot be used."""
        self._settings = settings
        self._loaded = self._state()
        self._refused: object = None
        """The state of files that could not be used, so that the error is logged once."""
        self._asked = asyncio.Event()
        self._warned: datetime | None = None
        self._current, self.expires = read_pair(settings)
        self._since = time.time()
        """When the current pair was read."""
        self.context = self._current
        """The context of the socket, which switches every handshake to the current pair."""
        self.context.sni_callback = self._choose
        self._report_expiry()

    def _choose(
        self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> ssl.AlertDescription | None:
        # Python cannot keep OpenSSL from remembering sessions of TLS 1.2. A resumed session shows
        # no certificate, so it must not be older than the authorities that are trusted now.
        if self._settings.client_ca_file and connection.session_reused:
            session = connection.session
            if session is None or session.time <= self._since:
                return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE
        connection.context = self._current
        return None

    def look(self) -> None:
        """Have the files read again at once."""
        self._asked.set()

    async def reload_if_changed(self) -> None:
        """Reload the files whenever they change, for as long as the service runs."""
        while True:
            asked = await wait(self._asked, LOOK_SECONDS)
            self._asked.clear()
            state = await asyncio.to_thread(self._state)
            if asked or state not in (self._loaded, self._refused):
                try:
                    pair, expires = await asyncio.to_thread(read_pair, self._settings)
                    if expires <= datetime.now(UTC) < self.expires:
                        raise SettingsError.of(CERT_FILE, f"expired at {expires.isoformat()}")
                except SettingsError as error:
                    self._refused = state
                    text = "the new certificate cannot be used; the old one stays"
                    logger.error(text, cause=str(error))
                else:
                    self._current, self.expires = pair, expires
                    self._since = time.time()
                    self._loaded, self._refused, self._warned = state, None, None
                    AUDIT.info("certificate reloaded", expires=self.expires.isoformat())
            self._report_expiry()

    def _report_expiry(self) -> None:
        """Update the metric, and warn once a day before the certificate expires."""
        now, day = datetime.now(UTC), timedelta(days=1)
        left = self.expires - now
        metrics.CERTIFICATE_DAYS.set(round(left / day, 2))
        if left < WARNING and (self._warned is None or now - self._warned >= day):
            self._warned = now
            logger.warning(
                "the certificate has expired" if left < timedelta() else "the certificate expires",
                expires=self.expires.isoformat(),
                file=str(self._settings.cert_file),
            )

    def _state(self) -> object:
        """Return a value that changes when one of the files does."""
        found: list[tuple[int, int, int] | None] = []
        for file in files(self._settings):
            try:
                status = os.stat(file)  # follows links, which renewal tools replace
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                found.append(None)
        return found


def files(settings: TlsSettings) -> Iterator[Path]:
    given = (settings.cert_file, settings.key_file, settings.client_ca_file)
    return filter(None, given)


def read_pair(settings: TlsSettings) -> tuple[ssl.SSLContext, datetime]:
    """Return the TLS context of the server, and when its certificate expires."""
    certificate, ca = settings.cert_file, settings.client_ca_file
    if certificate is None:
        raise SettingsError.of(CERT_FILE, "is not set")
    key = settings.key_file or certificate
    holder = KEY_FILE if settings.key_file else CERT_FILE
    read_private_file(key, holder)
    expires = _expiry(certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    password = settings.key_password.get_secret_value() if settings.key_password else ""
    try:
        # Without a password function OpenSSL would ask for one at the terminal, and wait.
        context.load_cert_chain(certificate, key, lambda: password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError.of(
                holder, f"the key in {key} does not belong to the certificate in {certificate}"
            ) from None
        remedy = "or set A2A_TLS_KEY_PASSWORD" if not password else "or A2A_TLS_KEY_PASSWORD"
        raise SettingsError.of(
            holder, f"{key} holds no private key in PEM that can be read; replace it, {remedy}"
        ) from None
    except (OSError, ValueError) as error:  # the latter for a password that is too long
        raise SettingsError.of(holder, f"{key} cannot be used: {error}") from None
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError:
            raise SettingsError.of(CLIENT_CA_FILE, f"{ca} holds no certificate in PEM") from None
        except OSError as error:
            raise SettingsError.of(CLIENT_CA_FILE, f"cannot read {ca}: {error.strerror}") from None
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session shows no certificate, so it would survive the expiry of the client's
        # certificate and the removal of its authority.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context, expires


def _expiry(file: Path) -> datetime:
    """Return when the first certificate of a file expires."""
    try:
        text = file.read_text("ascii", errors="replace")
    except OSError as error:
        raise SettingsError.of(CERT_FILE, f"cannot read {file}: {error.strerror}") from None
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, found, rest = text.partition(begin)
    body, ended, _ = rest.partition(end)
    try:
        if not found or not ended:
            raise ValueError
        return expiry_of(ssl.PEM_cert_to_DER_cert(begin + body + end))
    except (ValueError, IndexError):
        raise SettingsError.of(CERT_FILE, f"{file} holds no certificate in PEM") from None


def expiry_of(der: bytes) -> datetime:
    """Return when a certificate expires (RFC 5280, 4.1).

    The standard library shows that only for certificates that it has verified.
    """

    def element(at: int) -> tuple[int, int, int]:
        """Return the tag of the element at a position, and where its content begins and ends."""
        length, content = der[at + 1], at + 2
        if length & 0x80:
            content += length & 0x7F
            length = int.from_bytes(der[at + 2 : content])
        return der[at], content, content + length

    _, at, _ = element(0)  # Certificate
    _, at, _ = element(at)  # TBSCertificate
    tag, _, end = element(at)
    if tag == 0xA0:  # the version, which a certificate of version 1 leaves out
        _, _, end = element(end)  # the serial number
    _, _, end = element(end)  # the algorithm
    _, _, end = element(end)  # the issuer
    _, at, _ = element(end)  # the validity
    _, _, end = element(at)  # its beginning
    tag, at, end = element(end)
    text = der[at:end].decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
