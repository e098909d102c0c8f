"""Write the pictures of the console in docs/, light and dark: make screenshots.

A real OpenCode with the scripted model stands behind the service. What the model is to do stands in
the prompts; the pictures leave it out.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
from playwright.async_api import Browser, Page, async_playwright

from opencode_a2a.config import Settings
from tests.browser.conftest import ASKING, CHROMIUM, KEY, chromium
from tests.conftest import ROOT, make_repository
from tests.support.backstage import Backstage, script
from tests.support.ports import free_port
from tests.support.receiver import Receiver, receiving
from tests.support.service import TOKEN, Running, message, serving, settings_for

DOCS = ROOT / "docs"
DESKTOP, PHONE, LINK = (1100, 700), (390, 844), (390, 480)
BEFORE = 'def parse(text):\n    return text.split(",")\n'
AFTER = 'def parse(text):\n    return [part.strip() for part in text.split(",")]\n'
SUMMARY = """The parts kept their spaces, so `" b"` was not `"b"`. `parse` strips them now.

| input | before | now |
|---|---|---|
| `a, b` | `["a", " b"]` | `["a", "b"]` |
"""
TODOS = [
    {"content": "Find the cause", "status": "completed", "priority": "high"},
    {"content": "Strip the parts", "status": "in_progress", "priority": "high"},
    {"content": "Run the tests", "status": "pending", "priority": "medium"},
]
FIX: list[Any] = [
    {"think": "The test compares with a part that has a space in front."},
    {"say": "I found the cause, and change one line."},
    {"tool": "todowrite", "input": {"todos": TODOS}},
    {"tool": "edit", "input": {"filePath": "parser.py", "oldString": BEFORE, "newString": AFTER}},
    {"say": SUMMARY},
]
ASK: list[Any] = [
    {"tool": "bash", "input": {"command": "make test", "description": "Run the tests"}}
]
WITHOUT_SCRIPTS = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(/ @@\\[.*/s, "");
}"""
OTHERS = ("Explain what the parser does", "Rename the module", "Translate the messages")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("project", "opencode", "state"):
            (place / name).mkdir()
        (place / "project" / "parser.py").write_text(BEFORE)
        make_repository(place / "project")
        command = str(ROOT / "node_modules" / ".bin" / "opencode")
        with Backstage(command, place / "opencode", place / "project", ASKING) as stage:
            port = free_port()
            async with (
                receiving() as receiver,
                serving(_settings(stage, place / "state", receiver, port), port=port) as service,
                async_playwright() as playwright,
            ):
                browser = await playwright.chromium.launch(
                    executable_path=chromium(),
                    env={**os.environ, "LD_LIBRARY_PATH": str(CHROMIUM / "al2023" / "lib")},
                    args=["--no-sandbox", "--no-zygote", "--disable-gpu"],
                )
                await _pictures(browser, service, receiver)
                await browser.close()


def _settings(stage: Backstage, state: Path, receiver: Receiver, port: int) -> Settings:
    """Return settings by which links to requests reach us."""
    told = [{"kind": "webhook", "url": receiver.url, "about": ["waits"]}]
    url = f"http://127.0.0.1:{port}"
    changes = {"A2A_NOTIFY": orjson.dumps(told).decode(), "A2A_PUBLIC_URL": url}
    return settings_for(stage, state, A2A_PROJECT="shop", **changes)


async def _pictures(browser: Browser, service: Running, receiver: Receiver) -> None:
    for title in OTHERS:
        await _send(service, title, blocking=True)
    await _send(service, f"Run the tests {script(*ASK)}")
    (asked,) = await receiver.until(lambda it: len(it.received) == 1)
    for scheme in ("light", "dark"):
        page = await _open(browser, service, scheme, LINK)
        await page.goto(asked.content["url"])
        await page.get_by_role("button", name="Allow once").wait_for()
        await _picture(page, f"link-{scheme}")
    fixed = await _send(service, f"Fix the flaky parser test {script(*FIX)}")
    for scheme in ("light", "dark"):
        page = await _open(browser, service, scheme, DESKTOP)
        await page.goto(f"{service.url}/console#/task/{fixed}")
        await page.get_by_role("button", name="Allow once").wait_for()
        await _picture(page, f"console-permission-{scheme}")
    for scheme in ("light", "dark"):
        page = await _open(browser, service, scheme, PHONE)
        await page.goto(f"{service.url}/console#/task/{fixed}")
        await page.get_by_role("button", name="Allow once").wait_for()
        await _picture(page, f"console-phone-{scheme}")
    await page.get_by_role("button", name="Allow once").click()
    await page.locator(".bar .state.completed").wait_for()
    for scheme in ("light", "dark"):
        page = await _open(browser, service, scheme, DESKTOP)
        await page.goto(f"{service.url}/console#/task/{fixed}")
        await page.locator(".changes").wait_for()
        await page.locator(".scroller").evaluate("(one) => (one.scrollTop = 170)")
        await _picture(page, f"console-task-{scheme}")


async def _send(service: Running, text: str, *, blocking: bool = False) -> str:
    params = message(text, configuration={"returnImmediately": not blocking})
    answer = await service.http.post("/message:send", json=params, headers={"A2A-Version": "1.0"})
    return answer.raise_for_status().json()["task"]["id"]


async def _open(browser: Browser, service: Running, scheme: Any, size: tuple[int, int]) -> Page:
    context = await browser.new_context(
        color_scheme=scheme, viewport={"width": size[0], "height": size[1]}, locale="en-GB"
    )
    await context.add_init_script(f"sessionStorage.setItem('{KEY}', 'Bearer {TOKEN}')")
    page = await context.new_page()
    page.set_default_timeout(120_000)  # for a busy machine
    return page


async def _picture(page: Page, name: str) -> None:
    await asyncio.sleep(1)  # the list, and what says how OpenCode is, come a moment later
    await page.evaluate(WITHOUT_SCRIPTS)
    path = DOCS / f"{name}.png"
    await page.screenshot(path=path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} kB", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
