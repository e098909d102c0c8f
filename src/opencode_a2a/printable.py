"""Makes text from outside safe to print.

Text from agents reaches terminals, logs and models. It must not move the cursor, set a title,
reverse the direction of writing, or contain words that nobody sees.
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
