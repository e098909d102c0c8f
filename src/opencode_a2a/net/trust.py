"""Whom outgoing connections trust: the authorities of this machine, wherever it keeps them."""

import ssl
import sys
from pathlib import Path

import truststore

_ELSEWHERE = (
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch
    "/etc/ssl/cert.pem",  # Alpine
)
"""Lists of authorities that a Python which was built on another system does not look for."""


def machine_trust() -> ssl.SSLContext:
    """Return a new TLS context for connections to other machines. Takes milliseconds."""
    if sys.platform == "darwin":  # they are in the keychain, and only that knows what is revoked
        return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # On Linux truststore reads the same files, but again for every connection.
    context = ssl.create_default_context()
    known = ssl.get_default_verify_paths()
    directory = Path(known.capath) if known.capath else None
    if not known.cafile and not (directory and any(directory.iterdir())):
        for file in filter(Path.is_file, map(Path, _ELSEWHERE)):
            context.load_verify_locations(file)
            break
    return context
