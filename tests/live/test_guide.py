"""The guide, run as it is written."""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from opencode_a2a_demo.sample import FILES
from tests.support.backstage import Backstage
from tests.support.ports import free_port
from tests.support.service import TOKEN, Running, serving, settings_for

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


@pytest.fixture
async def there(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Running]:
    """A service that is where its card says."""
    port = free_port()
    settings = settings_for(backstage, tmp_path, A2A_PORT=str(port))
    async with serving(settings, port=port) as running:
        yield running


async def test_every_example_of_the_readme_works(there: Running, tmp_path: Path) -> None:
    first, *examples = EXAMPLE.findall(README.read_text())
    assert re.findall(r"^make \w+", first, re.MULTILINE) == ["make serve", "make test"]
    example = "\n".join(["set -e", *examples]).replace("http://127.0.0.1:8000", there.url)
    example = re.sub(r"\$\(cat \S*/token\)", TOKEN, example)
    example = example.replace(".venv/bin/opencode-a2a", f"{sys.executable} -m opencode_a2a")
    bash = shutil.which("bash")
    assert bash
    client = {
        "A2A_CLIENT_URL": there.url,
        "A2A_CLIENT_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(tmp_path),
        "PATH": os.environ["PATH"],
    }

    async with asyncio.timeout(60):
        shell = await asyncio.create_subprocess_exec(
            *(bash, "-c", example),
            cwd=tmp_path,
            env=client,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await shell.communicate()

    printed = said.decode()
    assert shell.returncode == 0
    assert f"{there.url}/console#code=" in printed
    assert "I am the demo model" in printed
    assert "completed" in printed
    assert '"state": "TASK_STATE_COMPLETED"' in printed


def test_where_the_key_goes_is_on_the_first_screen_of_the_readme() -> None:
    assert "ANTHROPIC_API_KEY" in "\n".join(README.read_text().splitlines()[:30])


async def test_every_example_of_the_guide_works(
    service: Running, backstage: Backstage, tmp_path: Path
) -> None:
    hello = backstage.workspace / "hello.py"
    hello.write_text(FILES[hello.name])  # the examples are for the project of the demo
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

    hello.unlink()
    told = said.decode().split(f"{SEPARATOR}\n")
    assert shell.returncode == 0, told[-1]
    assert len(told) == len(steps)
    for example, output in zip(steps, told, strict=True):
        assert '"error":' not in output, f"{example}\n{output}"
    assert (tmp_path / "docs.html").read_text().startswith("<!doctype html>")
