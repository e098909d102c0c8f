"""The lowest versions that are declared: what `make test-lowest` installs, and a first check.

With two files, print the requirements of the second whose packages are not in the first. Without
any, import every module of the program.
"""

import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path


def missing(given: Path, wanted: Path) -> list[str]:
    """Return the requirements in a file whose packages another file does not have."""
    known = {_name(line) for line in given.read_text().splitlines()}
    return [line for line in wanted.read_text().splitlines() if _name(line) not in known]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")


def import_everything() -> int:
    """Import every module, and return how many there are."""
    names = ["opencode_a2a", "opencode_a2a_demo", "opencode_a2a_import"]
    for name in tuple(names):
        modules = pkgutil.walk_packages(import_module(name).__path__, f"{name}.")
        names += [module.name for module in modules if not module.name.endswith("__main__")]
    for name in names:
        import_module(name)
    return len(names)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print("\n".join(missing(Path(sys.argv[1]), Path(sys.argv[2]))))
    else:
        print(f"{import_everything()} modules imported")
