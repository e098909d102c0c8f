"""Which versions of OpenCode this service works with.

``opencode.process``, ``app`` and ``doctor`` ask here; ``tools/qualify.py`` tries a version out.
"""

import re
from typing import Final

OLDEST: Final = (1, 1)
"""1.0 has neither a health check nor permissions that can be answered."""
QUALIFIED: Final = "1.18.33"
"""The newest version that the live tests passed with."""
INSTALL: Final = f"`npm install -g opencode-ai@{QUALIFIED}`"


def refusal(version: str) -> str | None:
    """Return why a version cannot be used, with the remedy; None if it can."""
    number = _number(version)
    if number is None or number[:2] >= OLDEST:
        return None
    return f"OpenCode {version} is too old: version 1.1 or later is needed; {INSTALL}"


def doubt(version: str) -> str | None:
    """Return why a version may not work; None for one in the range that was qualified."""
    number, newest = _number(version), _number(QUALIFIED)
    if number is not None and newest is not None and number <= newest:
        return None
    return (
        f"OpenCode {version} was not tested with this service; {QUALIFIED} is the newest that was"
    )


def _number(version: str) -> tuple[int, ...] | None:
    """Return the three numbers of a version; a build of one's own may have any name."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in found.groups()) if found else None
