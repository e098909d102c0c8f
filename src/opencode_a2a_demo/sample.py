"""A small project for the demo to work on, so that nobody's own files are tried on."""

import shutil
import subprocess
from pathlib import Path

FILES = {
    "README.md": """\
# Sample project

The demo works in this directory, so that none of your own files is touched. Start the service with
`--opencode-workspace-root DIRECTORY` to let it work elsewhere.
""",
    "hello.py": '''\
"""Says hello."""


def greeting(name: str) -> str:
    return f"Hello, {name}!"


if __name__ == "__main__":
    print(greeting("world"))
''',
    "test_hello.py": """\
import unittest

from hello import greeting


class GreetingTest(unittest.TestCase):
    def test_names_the_person(self) -> None:
        self.assertEqual(greeting("Ada"), "Hello, Ada!")
""",
    "Makefile": """\
test:
\tpython3 -m unittest --verbose
""",
    ".gitignore": "__pycache__/\n",
}


def make_sample(directory: Path) -> None:
    """Write the project into a directory that is not there yet; what is there stays as it is."""
    if directory.exists():
        return
    directory.mkdir(mode=0o700, parents=True)
    for name, text in FILES.items():
        (directory / name).write_text(text)
    git = shutil.which("git")
    if git is None:
        return  # OpenCode works without, but shows no changes
    identity = ("-c", "user.name=Demo", "-c", "user.email=demo@localhost")
    commands = (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "-m", "First"))
    for command in commands:
        finished = subprocess.run(  # noqa: S603 - git, with arguments of our own
            [git, *identity, "-c", "commit.gpgSign=false", *command],
            cwd=directory,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if finished.returncode:
            return
