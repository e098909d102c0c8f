"""The guide, run as it is written."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from tests.support.service import TOKEN, Running

pytestmark = pytest.mark.live

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide.md"
EXAMPLE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SEPARATOR = "=== next example ==="


async def test_every_example_of_the_guide_works(service: Running, tmp_path: Path) -> None:
    where, *examples = EXAMPLE.findall(GUIDE.read_text())
    assert where.startswith("URL=")
    steps = [f"URL={service.url}\nTOKEN={TOKEN}\nset -e\n", *examples]
    bash = shutil.which("bash")
    assert bash

    async with asyncio.timeout(120):
        shell = await asyncio.create_subprocess_exec(
            bash,
            "-c",
            f"\necho '{SEPARATOR}'\n".join(steps),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await shell.communicate()

    told = said.decode().split(f"{SEPARATOR}\n")
    assert shell.returncode == 0, told[-1]
    assert len(told) == len(steps)
    for example, output in zip(steps, told, strict=True):
        assert '"error":' not in output, f"{example}\n{output}"
    assert (tmp_path / "docs.html").read_text().startswith("<!doctype html>")
