"""The site of the documentation: built, and read as a visitor does."""

import re
import subprocess
import sys
import threading
from collections.abc import Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.async_api import expect

from tests.browser.conftest import PHONE, Look
from tests.conftest import ROOT
from tools.site import SITE, VERSION

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - its name


@pytest.fixture(scope="module")
def site() -> Generator[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tools.site"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


async def test_a_visitor_finds_a_page_and_no_other_host_hears_of_it(site: str, look: Look) -> None:
    page = await look(site, signed_in=False, color_scheme="dark")
    await page.wait_for_url(f"{site}{VERSION}/")

    await expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    await expect(page.locator(".md-tabs__link")).to_have_text(
        ["Start", "Use", "Run", "Extend", "Understand", "Reference"]
    )
    await expect(page.locator(".md-version")).to_contain_text(VERSION)
    await page.keyboard.press("/")
    await page.keyboard.insert_text("lease")  # at once: each letter would have results of its own
    await expect(page.get_by_text(re.compile(r"\d+ results"))).to_be_visible()
    await page.keyboard.press("Enter")
    await expect(page).not_to_have_url(f"{site}{VERSION}/")
    await expect(page.locator("article")).to_contain_text("lease", ignore_case=True)


async def test_a_phone_shows_wide_tables_in_its_own_colours(site: str, look: Look) -> None:
    page = await look(f"{site}{VERSION}/settings/", signed_in=False, size=PHONE)

    await expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "default")
    assert await page.evaluate(WIDER) is False


async def test_the_site_shows_the_files_to_deploy_as_they_are(site: str, look: Look) -> None:
    page = await look(f"{site}{VERSION}/deployment/", signed_in=False)
    await page.get_by_role("link", name="deploy/compose.yaml").click()

    await page.wait_for_url(f"{site}{VERSION}/files/#compose-yaml")
    blocks = await page.locator("pre > code").all_text_contents()
    assert (ROOT / "deploy" / "compose.yaml").read_text().strip() in [one.strip() for one in blocks]
    listed = re.findall(
        rf"\(https://\S+?/({re.escape(VERSION)}/\S+)\)", (SITE / "llms.txt").read_text()
    )
    assert len(listed) > 20
    assert [path for path in listed if not (SITE / path).is_file()] == []
