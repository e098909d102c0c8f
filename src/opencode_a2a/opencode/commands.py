"""Expands commands as OpenCode does, to refuse arguments that are not safe. Pure.

Both ways to run a command check here first: messages (``turns.sessions``) and the method of
``extensions.sessions``.
"""

import re

_WORD = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s\"']+")
_PLACE = re.compile(r"\$(\d+)")
_SHELL = re.compile(r"!`([^`]+)`")
_FILE = re.compile(r"(?<![\w`])@(\.?[^\s`,.]*(?:\.[^\s`,.]+)*)")
_PLAIN = re.compile(r"[\w./:@=,+][\w./:@=,+-]*")
_JAVASCRIPT = re.compile(r"\$[$&`'<]")
"""The replacement patterns of JavaScript's ``String.replace``."""


def unsafe_arguments(template: str | None, arguments: str) -> str | None:
    """Return why a command must not get these arguments; None if they are safe.

    OpenCode (1.18) puts them into the template of the command. It then runs everything of the form
    ``!`command``` and reads every ``@file`` in the result, both without asking for permission.
    """
    text = expanded(template or "", arguments)
    if template is None:
        foreign = True
    else:
        foreign = not {*_SHELL.findall(text)} <= {*_SHELL.findall(template)} or (
            "`" in template and _JAVASCRIPT.search(arguments) is not None
        )
    if foreign and not all(map(_PLAIN.fullmatch, arguments.split())):
        return (
            "would become part of a shell command that runs without permission; use plain words "
            "that do not begin with a hyphen"
        )
    for file in {*_FILE.findall(text)} - {*_FILE.findall(template or "")}:
        if file.startswith(("/", "~")) or ".." in file.split("/"):
            return "must not name files outside the workspace with @"
    return None


def expanded(template: str, arguments: str) -> str:
    """Return the text that OpenCode makes of a command's template and its arguments."""
    words = [word.strip("\"'") for word in _WORD.findall(arguments)]
    last = max((int(number) for number in _PLACE.findall(template)), default=0)

    def word(place: re.Match[str]) -> str:
        number = int(place[1])
        return (
            " ".join(words[number - 1 :]) if number == last else "".join(words[number - 1 : number])
        )

    text = _PLACE.sub(word, template).replace("$ARGUMENTS", arguments)
    if not last and "$ARGUMENTS" not in template and arguments.strip():
        text += f"\n\n{arguments}"
    return text
