"""Formats times, tokens, money and paths in few characters, for a line of a terminal.

``terminal``, for the service's own output, and the commands in ``cli`` use it.
"""

import time
from collections.abc import Mapping
from pathlib import Path

SHORT_ID = 8
"""Characters of an id that are shown; commands accept them in place of the whole id."""


def span(seconds: float) -> str:
    """Return a duration: ``7.2 s``, ``75 s``, ``12 min``, ``3 h 5 min``."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def tokens(count: int) -> str:
    """Return a number of tokens: ``279``, ``5.2k``, ``1.3M``."""
    if count < 1000:
        return str(count)
    if count < 999_500:
        return f"{count / 1000:.1f}k" if count < 99_950 else f"{count / 1000:.0f}k"
    return f"{count / 1_000_000:.1f}M"


def money(dollars: float) -> str:
    """Return an amount with at least two significant digits: ``$1.24``, ``$0.0058``."""
    return f"${dollars:.2f}" if dollars >= 0.095 or not dollars else f"${dollars:.2g}"


def spent(seconds: float | None, used_in: int, used_out: int, cost: float) -> str:
    """Return what a turn used: ``7.2 s · 5.2k in · 279 out · $0.0058``; zeros are left out."""
    parts = [
        None if seconds is None else span(seconds),
        f"{tokens(used_in)} in" if used_in else None,
        f"{tokens(used_out)} out" if used_out else None,
        money(cost) if cost else None,
    ]
    return " · ".join(filter(None, parts))


def short_path(path: Path | str, environ: Mapping[str, str]) -> str:
    """Return a path with ``~`` for the home directory."""
    home = environ.get("HOME")
    if not home or home == "/":
        return str(path)
    whole = Path(path)
    return f"~/{whole.relative_to(home)}" if whole.is_relative_to(home) else str(path)


def clock(milliseconds: int) -> str:
    """Return the local time of day: ``16:09``."""
    return time.strftime("%H:%M", time.localtime(milliseconds / 1000))
