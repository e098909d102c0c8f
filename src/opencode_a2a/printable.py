"""Text from outside, made fit to be printed.

What an agent sends reaches terminals, logs and models. None of it may move the cursor, set a title,
turn the direction of writing around, or carry words that nobody sees.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f"  # what changes lines and directions
    "\u200b\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # what is not seen
    "\ud800-\udfff]"
)


def clean(text: str) -> str:
    """Leave out what would do something to a terminal instead of being seen."""
    return _HIDDEN.sub("", text)


def one_line(text: str, width: int = 72) -> str:
    """Return text on one line that is cut at the width."""
    flat = " ".join(clean(text[: 4 * width]).split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def indented(text: str) -> str:
    """Return lines that cannot be taken for our own: none of them begins at the margin."""
    return "\n".join(f"  {line}".rstrip() for line in clean(text).strip().splitlines())


def escaped(encoded: str) -> str:
    """Return JSON with the same characters escaped."""
    return _HIDDEN.sub(lambda found: json.dumps(found[0])[1:-1], encoded)


def command(*words: str) -> str:
    """Return a command that is safe to paste into a shell, whatever an agent put into it."""
    seen = ("".join(c for c in word if c.isprintable()) for word in words)
    return f"{program()} {shlex.join(seen)}"


def program() -> str:
    """Return what to type for this program: the path it was started by if its name is not found."""
    name, started = "opencode-a2a", sys.argv[0]
    if shutil.which(name) is None and Path(started).name == name:
        return shlex.quote(started)
    return name


def colours(environ: Mapping[str, str]) -> bool:
    """Whether a terminal is to have colours (https://no-color.org)."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
