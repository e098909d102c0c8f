"""What a contributor is told to run is there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_hooks_can_be_installed() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config"]

    subprocess.run([*command, ROOT / ".pre-commit-config.yaml"], check=True)  # noqa: S603 - our own
