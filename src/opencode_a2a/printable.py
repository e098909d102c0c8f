"""Text for a terminal: safe if it comes from outside, and short if it is a figure.

Text from agents reaches terminals, logs and models. It must not move the cursor, set a title,
reverse the direction of writing, or contain words that nobody sees. ``terminal`` and the commands
in ``cli`` print times, tokens, money and paths in few characters.
"""

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

SHORT_ID = 8
"""Characters of an id that are shown; commands accept them in place of the whole id."""
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f"  # breaks lines, changes directions
    "\u200b\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible
    "\ud800-\udfff]"
)


def clean(text: str) -> str:
    """Remove characters that would control a terminal, or would not be seen."""
    return _HIDDEN.sub("", text)


def one_line(text: str, width: int = 72) -> str:
    """Return text on one line, cut at the width."""
    flat = " ".join(clean(text[: 4 * width]).split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def indented(text: str) -> str:
    """Indent every line, so that none can be mistaken for a line of this program."""
    return "\n".join(f"  {line}".rstrip() for line in clean(text).strip().splitlines())


def escaped(encoded: str) -> str:
    """Return JSON in which the characters that ``clean`` removes are escaped."""
    return _HIDDEN.sub(lambda found: json.dumps(found[0])[1:-1], encoded)


def joined(words: list[str]) -> str:
    """Join words for a sentence: ``commands, edits and web requests``."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if words[1:] else words[0]


def command(*words: str) -> str:
    """Return a command of this program, safe to paste into a shell whatever its words are."""
    seen = ("".join(c for c in word if c.isprintable()) for word in words)
    return f"{program()} {shlex.join(seen)}"


def program() -> str:
    """Return the name to type for this program, or its path if the name is not on PATH."""
    name, started = "opencode-a2a", sys.argv[0]
    if shutil.which(name) is None and Path(started).name == name:
        return shlex.quote(started)
    return name


def colours(environ: Mapping[str, str]) -> bool:
    """Whether the output may have colours (https://no-color.org)."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


# --- figures ----------------------------------------------------------------------------------


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
