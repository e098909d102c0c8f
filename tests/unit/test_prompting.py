"""Files of prompts that are named by URL, from a real server through the vetted fetch."""

import base64
from collections.abc import AsyncGenerator

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from opencode_a2a.config import OpenCodeSettings, ServiceSettings
from opencode_a2a.errors import InvalidFieldError, InvalidParamsError
from opencode_a2a.events import JsonObject
from opencode_a2a.extensions.messages import PromptRequest
from opencode_a2a.ids import SessionId
from opencode_a2a.net.egress import Egress, Fetcher
from opencode_a2a.opencode.types import Prompt
from tests.support.running import running

LIMITS = ServiceSettings(fetch_files_max_bytes=1000, fetch_files_max_total_bytes=1500).model_copy(
    update={"fetch_files_max_count": 2}
)
DEFAULTS = OpenCodeSettings()


@pytest.fixture
async def server() -> AsyncGenerator[str]:
    async def notes(_: Request) -> Response:
        return Response("a note", media_type="text/markdown")

    async with running(Starlette(routes=[Route("/notes.md", notes)])) as url:
        yield url


async def prompt(*urls: str, private: bool = True) -> Prompt:
    parts: list[JsonObject] = [{"type": "file", "mime": "text/markdown", "url": u} for u in urls]
    request = PromptRequest.model_validate_json(orjson.dumps({"parts": parts}))
    fetch = Fetcher(LIMITS, Egress(allow_private=private))
    return await request.prompt(SessionId("ses_1"), DEFAULTS, fetch)


async def test_a_file_behind_a_url_is_fetched_and_sent_on_as_data(server: str) -> None:
    inline = base64.b64encode(b"inline").decode()

    made = await prompt(f"{server}/notes.md", f"data:text/plain;base64,{inline}")

    note = base64.b64encode(b"a note").decode()
    assert [part.model_dump(exclude_none=True) for part in made.parts] == [
        {"type": "file", "mime": "text/plain", "url": f"data:text/plain;base64,{data}"}
        for data in (note, inline)
    ]


@pytest.mark.parametrize(
    ("path", "private"), [("/notes.md", False), ("/missing", True), (":0/\x01", True)]
)
async def test_a_url_that_cannot_be_fetched_is_named(server: str, path: str, private: bool) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        await prompt("data:text/plain,ok", server + path, private=private)

    assert [one.field for one in refused.value.violations] == ["request.parts[1].url"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "FILE:/etc/passwd", "ftp://x/", "x"])
async def test_no_other_url_is_passed_on(url: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        await prompt(url)

    assert [one.field for one in refused.value.violations] == ["request.parts[0].url"]


async def test_the_bounds_of_messages_hold_for_prompts(server: str) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        await prompt(*[f"{server}/notes.md"] * 3)

    assert [one.field for one in refused.value.violations] == ["request.parts"]
