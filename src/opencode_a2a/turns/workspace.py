"""Which directories a caller may name: the workspace root and what is below it.

Symbolic links are followed before the comparison, so that none leads out. Nothing here tells
a caller where the root is.
"""

import os
from pathlib import Path

from opencode_a2a.errors import InvalidParamsError, Violation


class Workspace:
    """The part of the file system that turns may run in.

    Without a root, everything runs where OpenCode was started, and nothing can be chosen.
    """

    def __init__(self, root: Path | None, *, allow_override: bool) -> None:
        self.root = None if root is None else os.path.realpath(root)
        self._allow_override = allow_override

    def directory(self, named: str | None, field: str) -> str | None:
        """Return the real path of a directory that a request names; the root for none."""
        if named is None or not named.strip():
            return self.root
        if "\0" in named:
            raise _refusal(field, "must be a path")
        if self.root is None:
            raise _refusal(
                field, "cannot be chosen: the service has no OPENCODE_WORKSPACE_ROOT; leave it out"
            )
        path = os.path.realpath(Path(self.root) / named.strip())
        if path != self.root and not self._allow_override:
            raise _refusal(field, "may not be chosen here; leave it out")
        if not self.holds(path):
            raise _refusal(field, "must be inside the workspace")
        # Unlike pathlib, these take a name that is too long for one that does not exist.
        if os.path.isdir(self.root) and not os.path.isdir(path):
            raise _refusal(field, "must be an existing directory")
        return path

    def holds(self, path: str) -> bool:
        """Whether a real path is the root or below it."""
        return self.root is None or Path(path).is_relative_to(self.root)


def _refusal(field: str, description: str) -> InvalidParamsError:
    return InvalidParamsError(
        f"{field} {description}", violations=(Violation(field, description),), field=field
    )
