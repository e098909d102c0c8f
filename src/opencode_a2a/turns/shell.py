"""Shell commands that ask for a permission: what a pattern for later ones may cover. Pure.

OpenCode names a pattern for each command that it finds in a command line, such as ``echo *``. That
says nothing of where the output goes (``echo x > file``), of what is assigned before it
(``PATH=/tmp; git status``), or of what a version of OpenCode does not find. So a pattern covers
only a plain command: one command with its arguments, and nothing that the shell would act on.
"""

import re
from posixpath import join

from opencode_a2a.events import Interrupted
from opencode_a2a.rights import SHELL

_PLAIN = re.compile(
    r"""(?: [^\x00-\x1f\x7f'"\\$`;&|<>()]  # an ordinary character
          | \t
          | '[^'\\\r\n\x00]*'  # without a backslash, which is special in quotes of some shells
          | "[^"\\$`\r\n\x00]*"
          | \\[^\r\n\x00]
        )+""",
    re.VERBOSE,
)


def command_line(asked: Interrupted) -> str | None:
    """Return the whole command line that a request is for; None if it is for something else."""
    if asked.type != "permission" or asked.permission != SHELL:
        return None
    for source in (asked.metadata, asked.tool_input or {}):
        if isinstance(command := source.get("command"), str):
            return command.strip()
    return None


def directory_of(asked: Interrupted) -> str | None:
    """Return the directory that a command is to run in; None if it cannot be told."""
    workdir = (asked.tool_input or {}).get("workdir")
    if workdir is None or asked.directory is None:
        return asked.directory
    # Versions of OpenCode disagree about what a relative one is relative to, so that it is never
    # the same as a directory which is named whole.
    return join(asked.directory, ".", workdir) if isinstance(workdir, str) else None


def exact_command(asked: Interrupted) -> str | None:
    """Return a command line that no pattern covers, but that can be allowed again as it is."""
    command = command_line(asked)
    if command is None or is_plain(command) or asked.tool_input is None:
        return None
    return command


def is_plain(command: str) -> bool:
    """Whether a command line is one command with arguments: no redirection, pipe, substitution…"""
    return _PLAIN.fullmatch(command) is not None


def covers(pattern: str, command: str) -> bool:
    """Whether a pattern of OpenCode's "always" covers a plain command.

    Only the star at its end stands for something: the rest is text of the command that asked, in
    which a star or a question mark is one.
    """
    if not is_plain(command):
        return False
    begin = pattern.removesuffix(" *")
    return (
        pattern == "*" or command == begin or (begin != pattern and command.startswith(f"{begin} "))
    )
