"""Which versions of OpenCode this service can work with.

``opencode.managed``, ``opencode.inspection`` and the command ``doctor`` ask here.
"""

import re
from typing import Final

OLDEST: Final = (1, 1)
"""1.0 has neither a health check nor permissions that can be answered."""
QUALIFIED: Final = "1.18.33"
"""The newest version that has passed the live tests; see ``tools/qualify.py``."""
INSTALL: Final = f"`npm install -g opencode-ai@{QUALIFIED}`"


def unusable(version: str) -> str | None:
    """Return why a version cannot be used, and the remedy; None if it can be used."""
    number = _number(version)
    if number is None:
        return None
    if number[:2] < OLDEST:
        return f"OpenCode {version} is too old: version 1.1 or later is needed; {INSTALL}"
    return another_api(version) if number[0] > OLDEST[0] else None


def another_api(version: str) -> str:
    """Return the reason for refusing an OpenCode with the API of 2, whatever its number is."""
    why = "has the API of OpenCode 2, which this service does not speak"
    return f"OpenCode {version} {why}; {INSTALL}"


def untested(version: str) -> str | None:
    """Return a warning about a version that was not tested: a newer one, or a custom build."""
    number, newest = _number(version), _number(QUALIFIED)
    if number is not None and newest is not None and number <= newest:
        return None
    return (
        f"OpenCode {version} was not tested with this service; {QUALIFIED} is the newest that was"
    )


def _number(version: str) -> tuple[int, ...] | None:
    """Return the three numbers of a version; None for a custom build with another name."""
    number = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in number.groups()) if number else None
