"""Shell commands that ask for a permission: what a pattern for later ones may cover. Pure.

OpenCode names a pattern for each command that it finds in a command line, such as ``echo *``. That
says nothing of where the output goes (``echo x > file``), of what is assigned before it
(``PATH=/tmp; git status``), or of what a version of OpenCode does not find. So a pattern covers
only a plain command: one command with its arguments, and nothing that the shell would act on.
Some versions propose the command line itself, in which a star at the end is just a star.
"""

import re
from posixpath import join

from opencode_a2a.events import Interrupted
from opencode_a2a.rights import SHELL

BLANKS = " \t\n"
"""What separates words in a shell. Python's ``strip`` and ``\\s`` also take blanks of Unicode and
some control characters, which in a shell belong to a word."""
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
    """Return the whole command line that a request is for; None if it is for something else.

    As it is: ``exact_command`` grants all of it, and a blank may be escaped.
    """
    if not _is_command(asked):
        return None
    for source in (asked.metadata, asked.tool_input or {}):
        if isinstance(command := source.get("command"), str):
            return command
    return None


def directory_of(asked: Interrupted) -> str | None:
    """Return the directory that a command is to run in; None if it cannot be told."""
    workdir = (asked.tool_input or {}).get("workdir")
    if workdir is None or asked.directory is None:
        return asked.directory
    # Versions of OpenCode disagree about what a relative one is relative to, so that it is never
    # the same as a directory which is named whole.
    return join(asked.directory, ".", workdir) if isinstance(workdir, str) else None


def wider_patterns(asked: Interrupted) -> list[str]:
    """Return the patterns of what a broader answer to a request allows besides the same again.

    One that is the command itself is none, even if it looks like one: ``echo *``.
    """
    if not _is_command(asked):
        return asked.always
    commands = {one.strip(BLANKS) for one in (command_line(asked) or "", *asked.patterns)}
    return [pattern for pattern in asked.always if pattern.strip(BLANKS) not in commands]


def exact_command(asked: Interrupted) -> str | None:
    """Return a command line that no pattern covers, but that can be allowed again as it is."""
    command = command_line(asked)
    if command is None or asked.tool_input is None:  # it may run elsewhere
        return None
    fits = any(covers(pattern, command) for pattern in wider_patterns(asked))
    return None if fits else command


def says_more(asked: Interrupted) -> bool:
    """Whether OpenCode says what a permission is for and what its "always" would allow besides.

    An empty list may be one that could not be read.
    """
    return bool(asked.patterns and asked.always)


def leads_elsewhere(asked: Interrupted) -> bool:
    """Whether a symbolic link leads to a file of a request, or may do so.

    Patterns are of names. What a link leads to may be anywhere, and elsewhere the next time, so
    that such a request is allowed by nothing that was said before, and this once only.
    """
    return bool(asked.links) or asked.links_unknown


def can_be_wider(asked: Interrupted) -> bool:
    """Whether a broader answer to a request would allow anything besides it."""
    more = says_more(asked) and not leads_elsewhere(asked)
    return more and bool(wider_patterns(asked) or exact_command(asked))


def _is_command(asked: Interrupted) -> bool:
    return asked.type == "permission" and asked.permission == SHELL


def is_plain(command: str) -> bool:
    """Whether a command line is one command with arguments: no redirection, pipe, substitution…"""
    return _PLAIN.fullmatch(command) is not None


def covers(pattern: str, command: str) -> bool:
    """Whether a pattern of OpenCode's "always" covers a plain command.

    Only the star at its end stands for something: the rest is text of the command that asked, in
    which a star or a question mark is one.
    """
    command = command.strip(BLANKS)
    if not is_plain(command):
        return False
    begin = pattern.removesuffix(" *")
    return (
        pattern == "*" or command == begin or (begin != pattern and command.startswith(f"{begin} "))
    )
