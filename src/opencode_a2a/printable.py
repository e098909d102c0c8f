"""Text for a terminal: safe if it comes from outside, and short if it is a figure.

Text from agents reaches terminals, logs and models. It must not move the cursor, set a title,
reverse the direction of writing, or contain words that nobody sees: ``clean`` leaves those out, and
``visible`` names them where a person decides by the text. ``terminal`` and the commands
in ``cli`` print times, tokens, money and paths in few characters.
"""

import json
import re
import shlex
import shutil
import sys
import time
import unicodedata
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
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\xa0\xad"  # controls, blanks and the soft hyphen of Latin 1
    "\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f"
    "\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    "|[ \t]{40,}"
)
"""What is drawn elsewhere, not at all, or as a blank; ``web/console/odd.js`` has the same."""


def clean(text: str) -> str:
    """Remove characters that would control a terminal, or would not be seen."""
    return _HIDDEN.sub("", text)


def visible(text: str) -> str:
    """Name the characters that nobody would see, and long runs of spaces.

    For text that a person is asked to approve: nothing is left out, and nothing moves.
    """

    def name(found: re.Match[str]) -> str:
        run = found[0]
        return f"⟨{len(run)} spaces⟩" if len(run) > 1 else f"⟨U+{ord(run):04X}⟩"

    return _ODD.sub(name, text)


def visible_line(text: str) -> str:
    """The same on one line: a line break is named too."""
    return visible(text).replace("\n", "⟨U+000A⟩")


def one_line(text: str, width: int = 72) -> str:
    """Return text on one line, cut at the width in columns of a terminal."""
    flat = " ".join(clean(text[: 4 * width]).split())
    if columns(flat) <= width:
        return flat
    end, taken = 0, 1  # for the dots
    while (taken := taken + columns(flat[end])) <= width:
        end += 1
    return f"{flat[:end]}…"


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: letters of East Asia take two each."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def indented(text: str) -> str:
    """Indent every line, so that none can be mistaken for a line of this program."""
    return "\n".join(f"  {line}".rstrip() for line in visible(text).strip().splitlines())


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
