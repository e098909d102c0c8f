"""Screens as files: what a person sees, compared with what was seen last.

The files are in ``tests/screens``. ``make screens`` writes them anew; read the difference before it
is committed. What changes from run to run (ids, times, ports, figures) is replaced first.
"""

import difflib
import os
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "screens"
WRITES = "OPENCODE_A2A_WRITE_SCREENS"
_CHANGING = (
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "ID"),
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME"),
    (r"answers by (\d{4}-\d\d-\d\d )?\d\d:\d\d(.*?) +│", r"answers by 12:34\2 │"),
    (r"\b\d\d:\d\d:\d\d\b", "12:34:56"),
    (r"\buntil \d\d:\d\d\b", "until 12:34"),
    (r"bearer:[0-9a-f]{12}", "bearer:ID"),
    (r"(?<=task )[0-9a-f]{8}\b", "ID"),
    (r"(?m)^(12:34:56  )[0-9a-f]{8}\b", r"\1ID      "),
    (r"(?m)^[0-9a-f]{8}(?=  )", "ID      "),
    (r"-[0-9a-f]{8}\.db", "-ID.db"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r" +\d+(\.\d)? (s|ms|min)\b", r" N s"),
    (r"\(\d+ m?s\)", "(N s)"),
    (r"\d+(\.\d)?k? in · \d+ out", "N in · N out"),
    (r" *\$\d+\.\d+", " $N"),
    (r"\d+\.\d GB free below \S+", "N GB free below DIRECTORY"),
    (r"\(pid \d+\)|kill \d+", "PID"),
    (r"OpenCode \d+\.\d+\.\d+", "OpenCode VERSION"),
    (r"(python|opencode): \d+\.\d+\.\d+", r"\1: VERSION"),
    (r"(?m)^(ok|advice)( +rg: ).*\n( {8}.*\n)?", r"ok\2RG\n"),
)


def settled(text: str, *places: tuple[Path | str, str]) -> str:
    """Return a screen without what changes from run to run; places are paths and their names."""
    for place, name in places:
        text = text.replace(str(place), name)
    for pattern, name in _CHANGING:
        text = re.sub(pattern, name, text)
    # The columns of a table are as wide as the widest of what changes.
    lines = [
        " ".join(line.split()) if line.startswith("ID ") else line for line in text.splitlines()
    ]
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def compare(name: str, text: str) -> None:
    """Fail unless a screen is as it was seen last."""
    file = FOLDER / f"{name}.txt"
    if os.environ.get(WRITES):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return
    known = file.read_text() if file.exists() else ""
    if text != known:
        changed = difflib.unified_diff(
            known.splitlines(), text.splitlines(), "known", "seen", lineterm=""
        )
        pytest.fail("\n".join([f"{file.name} has changed; see `make screens`", *changed]))
