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
_TWINS = (
    "\u0391\u0392\u0395-\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03b1"
    "\u03b9\u03ba\u03bd\u03bf\u03c1\u03c5\u03f2\u03f3\u0405\u0406\u0408\u0410\u0412\u0415"
    "\u041a\u041c-\u041e\u0420-\u0423\u0425\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455"
    "\u0456\u0458\u0474\u0475\u04ae\u04af\u04bb\u04c0\u04cf\u0501\u051b\u051d\u054d\u0555"
    "\u0570\u0578\u057d\u0581\u0585\u0589\u13a0-\u13f5\ua4d0-\ua4ff"
)
"""Letters of Greek, Cyrillic, Armenian, Cherokee and Lisu that look like those of Latin."""
_ODD = re.compile(
    r"(?P<lines>\n(?:[ \t]{0,39}\n){19,})"
    r"|(?P<spaces>[ \t]{40,})"
    # Marks above letters would cover the lines before them.
    "|(?P<marks>[\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0610-\u061a\u064b-\u065f\u0e31"
    "\u0e34-\u0e3a\u0e47-\u0e4e\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]{5,})"
    "|[\x00-\x08\x0b-\x1f\x7f-\xa0\xad"  # controls, blanks and the soft hyphen of Latin 1
    "\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f"
    "\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    # Like | ! g ` ; : - . / and letters of Latin
    "\u01c0\u01c3\u0251\u0261\u037e\u05c3\u1fef\u2010\u2011\u2024\u2044\u212a\u2160-\u217f"
    "\u2215\u2223\u2236\u29f8\ua4f8\ua789\ufe50-\ufe6b\U0001d400-\U0001d7ff]"
    # Words of these letters alone, also in the name of a host, beside letters of Latin.
    rf"|(?:(?<=[A-Za-z0-9])|(?<=[A-Za-z0-9][./:@_-])|(?<=//))[{_TWINS}]+(?![\u0370-\u058f])"
    rf"|(?<![\u0370-\u058f\u13a0-\u13f5\ua4d0-\ua4ff])[{_TWINS}]+(?=[./:@_-]?[A-Za-z0-9])"
)
"""What is drawn elsewhere, not at all, as a blank, or like something else; ``web/console/odd.js``
has the same."""


def clean(text: str) -> str:
    """Remove characters that would control a terminal, or would not be seen."""
    return _HIDDEN.sub("", text)


def visible(text: str) -> str:
    """Name the characters that nobody would see, or take for others, and long runs of blanks.

    For text that a person is asked to approve: nothing is left out, and nothing moves.
    """
    return _ODD.sub(_name, text)


def _name(found: re.Match[str]) -> str:
    run = found[0]
    match found.lastgroup:
        case "lines":
            return f"\n⟨{len(run.splitlines()) - 1} empty lines⟩\n"
        case "spaces" | "marks" as kind:
            return f"⟨{len(run)} {kind}⟩"
        case _:
            return "".join(f"⟨U+{ord(one):04X}⟩" for one in run)


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
