"""What the tests in the browser share: Chromium, and a person who looks at the console with it.

One browser, one service and one event loop serve a whole file; every person has a context of the
browser, hence a storage, of their own. Whoever breaks the policy of the page, calls another host or
fails in a script fails the test.
"""

import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Error,
    Page,
    Request,
    async_playwright,
    expect,
)

from opencode_a2a.events import JsonObject
from tests.conftest import ROOT, Stages
from tests.support.backstage import Backstage
from tests.support.service import TOKEN, Running, serving, settings_for

CHROMIUM = ROOT / "node_modules" / ".chromium"
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
KEY = "opencode-a2a.authorization"
ASKING: JsonObject = {"permission": {"bash": "ask", "edit": "ask", "webfetch": "ask"}}
DESKTOP = (1280, 820)
PHONE = (390, 844)
PATIENCE_MS = 60_000
"""How long a page may take, on a machine that runs three OpenCodes and browsers on two cores."""

expect.set_options(timeout=PATIENCE_MS)

Look = Callable[..., Awaitable[Page]]
"""Opens the console for a new person: ``url``, and what else a context of the browser takes."""


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


@pytest.fixture(scope="session")
def stage(stages: Stages) -> Generator[Backstage]:
    """A real OpenCode that asks before it does anything, and the scripted model."""
    with stages("project", ASKING) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    stage: Backstage, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Running]:
    async with serving(settings_for(stage, tmp_path_factory.mktemp("state"))) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def look(browser: Browser) -> AsyncGenerator[Look]:
    """Open pages as somebody who is signed in, unless told otherwise."""
    wrong: list[str] = []
    async with AsyncExitStack() as stack:

        async def open_page(
            url: str,
            *,
            signed_in: bool = True,
            size: tuple[int, int] = DESKTOP,
            expected: tuple[str, ...] = (),
            clock: bool = False,
            **options: Any,
        ) -> Page:
            """``clock`` lets the test set the clock of the page forward instead of waiting."""
            context = await stack.enter_async_context(
                await browser.new_context(
                    viewport={"width": size[0], "height": size[1]},
                    reduced_motion="reduce",
                    **options,
                )
            )
            if signed_in:
                await context.add_init_script(f"sessionStorage.setItem('{KEY}', 'Bearer {TOKEN}')")
            page = await context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            host = "/".join(url.split("/")[:3])

            def hear(message: ConsoleMessage) -> None:
                # A browser reports every answer that is an error; those a test expects are fine.
                if message.type in ("error", "warning") and not any(
                    word in message.text for word in expected
                ):
                    wrong.append(message.text)

            def watch(request: Request) -> None:
                if not request.url.startswith((host, "blob:", "data:")):
                    wrong.append(f"a request to {request.url}")

            def fail(error: Error) -> None:
                wrong.append(error.message)

            page.on("console", hear)
            page.on("pageerror", fail)
            page.on("request", watch)
            if clock:
                await page.clock.install()
            await page.goto(url)
            return page

        yield open_page
    assert wrong == []


async def check(page: Page, where: str, *sizes: tuple[int, int]) -> None:
    """Have axe look at a page in light and dark, on a phone and on a desktop unless told."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text())
    before = page.viewport_size
    for width, height in sizes or (PHONE, DESKTOP):
        await page.set_viewport_size({"width": width, "height": height})
        await expect(page.get_by_role("main")).to_have_count(1)
        # A card takes no clicks for a moment, and axe takes it for disabled.
        await expect(page.locator("[inert]")).to_have_count(0)
        for scheme, rules in (("light", None), ("dark", ["color-contrast"])):  # they differ in that
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type] # one of its literals
            found = await page.evaluate(
                "(rules) => axe.run({resultTypes: ['violations'], ...(rules && {runOnly: rules})})"
                ".then(({violations}) => violations.map((v) =>"
                " `${v.id}: ${v.nodes.slice(0, 3).map((n) => n.html.slice(0, 200)).join(' | ')}`))",
                rules,
            )
            assert found == [], f"{where} at {width} px, {scheme}"
    if before is not None:
        await page.set_viewport_size(before)
