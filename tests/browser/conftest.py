"""What the tests in the browser share: Chromium, pages of it, and services to open.

One browser and one event loop serve a whole file; every page has a context of its own, hence a
storage of its own.
"""

import os
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from tests.conftest import ROOT

CHROMIUM = ROOT / "node_modules" / ".chromium"


def chromium() -> Path:
    """Return the browser to use: the one named, else the one of the npm package, else another."""
    named = os.environ.get("CHROMIUM")
    ours = CHROMIUM / "chromium"
    installed = shutil.which("chromium") or shutil.which("google-chrome")
    found = named or (str(ours) if ours.exists() else installed)
    if found is None:
        pytest.fail("there is no Chromium: run `make test`, which installs one", pytrace=False)
    return Path(found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncGenerator[Browser]:
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(
            executable_path=chromium(),
            # The libraries beside it, for a machine that lacks them.
            env={**os.environ, "LD_LIBRARY_PATH": str(CHROMIUM / "al2023" / "lib")},
            # Its sandbox needs rights that a container rarely gives.
            args=["--no-sandbox", "--no-zygote", "--disable-gpu"],
        )
        yield running
        await running.close()
