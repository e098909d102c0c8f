"""The pages of the service open in a real browser."""

from pathlib import Path

import pytest
from playwright.async_api import Browser

from tests.support.opencode import FakeOpenCode
from tests.support.service import TOKEN, serving, settings_for

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_the_page_of_the_methods_opens(browser: Browser, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with (
        FakeOpenCode(workspace).running() as opencode,
        serving(settings_for(opencode, tmp_path)) as service,
        await browser.new_context(extra_http_headers=headers) as context,
    ):
        page = await context.new_page()

        await page.goto(f"{service.url}/docs")

        assert await page.get_by_role("heading", name="Methods").is_visible()
