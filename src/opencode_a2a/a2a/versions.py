"""Which protocol line a request speaks.

Both bindings ask here; the answer decides how params are read and results are spelled. Knows
neither methods nor routes: the caller names what it compares.
"""

import re
from collections.abc import Collection
from enum import StrEnum

from opencode_a2a.errors import VersionNotSupportedError

HEADER = "A2A-Version"
DEFAULT_LINE = "default_line"
"""In the scope of a request: the version of those that name none."""
_VERSION = re.compile(r"(\d{1,4}\.\d{1,4})(?:\.\d{1,9})?")


class Version(StrEnum):
    """A protocol line: what Major.Minor of ``A2A-Version`` chooses."""

    V1 = "1.0"
    V03 = "0.3"


class Dialect(StrEnum):
    """A spelling of the objects of a line.

    The 0.3 line has two: the JSON of its text (JSON-RPC), and the ProtoJSON that the clients of
    its REST binding send and expect.
    """

    V1 = "1.0"
    V03 = "0.3"
    PROTO03 = "0.3-proto"

    # That of an enum is written in Python; this one is asked for each delta of a stream.
    __hash__ = str.__hash__

    @property
    def line(self) -> Version:
        return Version.V1 if self is Dialect.V1 else Version.V03


EVERY = tuple(Version)


def negotiate(
    header: str | None, query: str | None, default: Version, supported: Collection[Version] = EVERY
) -> Version:
    """Return the line asked for by header, else by query parameter, else the default one."""
    asked = (header or "").strip() or (query or "").strip()
    if not asked:
        return default
    found = _VERSION.fullmatch(asked)
    for line in supported:
        if found and found[1] == line.value:
            return line
    raise VersionNotSupportedError(
        f"A2A version {asked[:32]} is not supported; "
        f"send the header {HEADER}: {' or '.join(supported)}",
        requested_version=asked[:32],
        supported_protocol_versions=[line.value for line in supported],
        default_protocol_version=default.value,
        header=HEADER,
    )


def require(
    needed: Version, line: Version, what: str, supported: Collection[Version] = EVERY
) -> None:
    """Refuse a method or route that belongs to another line than the negotiated one."""
    if needed is line:
        return
    remedy = f"send the header {HEADER}: {needed}"
    if needed not in supported:
        remedy = f"only {' and '.join(supported)} is spoken here"
    raise VersionNotSupportedError(
        f"{what} belongs to A2A {needed}, this request speaks {line}; {remedy}",
        requested_version=line.value,
        required_version=needed.value,
        supported_protocol_versions=[line.value for line in supported],
        header=HEADER,
    )
