"""A private certificate authority, and what it signs."""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates for this machine's addresses, and for clients."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(self._name, self._key.public_key(), timedelta(days=3650))
        whole = x509.BasicConstraints(ca=True, path_length=None)
        signed = made.add_extension(whole, critical=True).sign(self._key, SHA256())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(signed.public_bytes(Encoding.PEM))

    def issue(
        self, name: str, *, days: float = 365, password: str | None = None
    ) -> tuple[Path, Path]:
        """Write a certificate and its key, and return the two files."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(_named(name), key.public_key(), timedelta(days=days))
        places = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        signed = made.add_extension(x509.SubjectAlternativeName(places), critical=False).sign(
            self._key, SHA256()
        )
        locked = BestAvailableEncryption(password.encode()) if password else NoEncryption()
        certificate, secret = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        secret.touch(0o600)
        secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
        return certificate, secret

    def trusted(self) -> ssl.SSLContext:
        """Return the context of a client that trusts this authority alone."""
        return ssl.create_default_context(cafile=self.file)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lasts: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + lasts)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def private_key(file: Path) -> Path:
    """Write a key of P-256 that only its owner can read."""
    key = ec.generate_private_key(ec.SECP256R1())
    file.touch(0o600)
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return file


@asynccontextmanager
async def breaking_tls(authority: Authority, said: bytes = b"") -> AsyncGenerator[str]:
    """Yield the URL of a server that answers with these bytes, and then with what is no TLS."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*authority.issue("breaking"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        os.write(writer.get_extra_info("socket").fileno(), b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()  # until the client has gone
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=serving) as server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"
