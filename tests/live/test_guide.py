"""The guide, run as it is written."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from tests.support.service import TOKEN, Running

pytestmark = pytest.mark.live

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs" / "guide.md"
README = ROOT / "README.md"
EXAMPLE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SEPARATOR = "=== next example ==="


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_every_example_makes_its_own_message_id(page: Path) -> None:
    ids = re.findall(r'"messageId": "([^,]*)"', page.read_text())

    assert ids
    assert [one for one in ids if "$" not in one] == []


async def test_the_message_of_the_readme_is_answered(service: Running, tmp_path: Path) -> None:
    (example,) = (one for one in EXAMPLE.findall(README.read_text()) if "message:send" in one)
    example = example.replace("http://127.0.0.1:8000", service.url)
    example = re.sub(r"\$\(cat \S*/token\)", TOKEN, example)
    bash = shutil.which("bash")
    assert bash

    async with asyncio.timeout(60):
        shell = await asyncio.create_subprocess_exec(
            bash, "-c", example, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await shell.communicate()

    assert '"state":"TASK_STATE_COMPLETED"' in said.decode()


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
