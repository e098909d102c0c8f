"""Parts as prompt parts, metadata as routing, accepted output modes."""

import base64
from collections.abc import Sequence

import pytest

from opencode_a2a.errors import (
    ContentTypeNotSupportedError,
    InvalidParamsError,
    UnsupportedOperationError,
)
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import ModelRef, Principal
from opencode_a2a.messages import Message, Part, PromptPart, Routing
from opencode_a2a.net.egress import EgressError, Fetched, FetchResult
from opencode_a2a.server.content import read_metadata, read_output_modes, read_prompt

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PAGES = {
    "https://example.org/a/logo.png": Fetched(PNG, "image/png"),
    "https://example.org/notes": Fetched(b"hello", "text/markdown; charset=utf-8"),
}


async def fetch(urls: Sequence[str]) -> list[FetchResult]:
    refused = EgressError("The host is not at a public address")
    return [PAGES.get(url, refused) for url in urls]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def raw(data: bytes, media_type: str | None = None, filename: str | None = None) -> Part:
    return Part("raw", raw=b64(data), media_type=media_type, filename=filename)


async def prompt(*parts: Part) -> tuple[PromptPart, ...]:
    return await read_prompt(Message("m", "user", [*parts]), fetch, Principal("ann"))


async def test_text_stays_text_and_data_becomes_labelled_json() -> None:
    assert await prompt(Part("text", "  hi\n"), Part("data", data={"n": 1})) == (
        PromptPart(text="  hi\n"),
        PromptPart(text='Structured data (JSON):\n{\n  "n": 1\n}'),
    )


async def test_images_and_pdf_keep_their_type_and_textual_files_become_plain_text() -> None:
    assert await prompt(
        raw(PNG, "image/png", "a.png"),
        raw(b"%PDF-1.7\n...", "application/pdf"),
        raw(b'{"a":1}', "application/json", "a.json"),
        raw(b"<svg/>", "image/svg+xml"),
        raw(b"a: 1", "application/yaml; charset=utf-8"),
    ) == (
        PromptPart(media_type="image/png", data=b64(PNG), filename="a.png"),
        PromptPart(media_type="application/pdf", data=b64(b"%PDF-1.7\n...")),
        PromptPart(media_type="text/plain", data=b64(b'{"a":1}'), filename="a.json"),
        PromptPart(media_type="text/plain", data=b64(b"<svg/>")),
        PromptPart(media_type="text/plain", data=b64(b"a: 1")),
    )


async def test_a_file_without_a_type_is_told_by_its_bytes() -> None:
    parts = await prompt(raw(PNG), raw(b"plain"), raw(PNG, "application/octet-stream"))

    assert [part.media_type for part in parts] == ["image/png", "text/plain", "image/png"]


async def test_files_behind_urls_are_fetched_and_sent_on_as_data() -> None:
    assert await prompt(
        Part("url", url="https://example.org/a/logo.png"),
        Part("url", url="https://example.org/notes"),
    ) == (
        PromptPart(media_type="image/png", data=b64(PNG), filename="logo.png"),
        PromptPart(media_type="text/plain", data=b64(b"hello"), filename="notes"),
    )


@pytest.mark.parametrize(
    "part",
    [
        raw(b"\x00\x01\x02\x03", "application/octet-stream"),
        raw(b"PK\x03\x04....", "application/zip"),
        raw(b"RIFF....WAVE", "audio/wav"),
        raw(b"II*\x00", "image/tiff"),
        raw(PNG, "image/jpeg"),
        raw(PNG[:30], "image/png"),
        raw(b"not an image", "image/png"),
        raw(b"\xff\xfe\xfa", "text/plain"),
        raw(b"a\0b", "text/plain"),
        raw(b"", "text/plain"),
        Part("url", url="file:///etc/passwd"),
        Part("url", url="ftp://example.org/x"),
        Part("url", url="data:text/plain,hi"),
        Part("url", url="https:///x"),
    ],
)
@pytest.mark.requirement("A2A-3.1.1")
async def test_what_opencode_would_not_survive_is_refused_by_part(part: Part) -> None:
    with pytest.raises(ContentTypeNotSupportedError) as refused:
        await prompt(Part("text", "look"), part)

    assert [violation.field for violation in refused.value.violations] == ["message.parts[1]"]


async def test_a_file_that_is_refused_is_named() -> None:
    file = Part("raw", raw=base64.b64encode(b"a\0b").decode(), filename="core\u202e.bin")

    with pytest.raises(ContentTypeNotSupportedError) as refused:
        await prompt(file)

    [violation] = refused.value.violations
    assert violation.description.startswith("(core⟨U+202E⟩.bin) is not text/plain")


@pytest.mark.parametrize("url", ["https://10.0.0.1/x", "http://[::1"])
async def test_a_url_that_may_not_be_fetched_is_a_wrong_parameter(url: str) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        await prompt(Part("url", url=url))

    assert [violation.field for violation in refused.value.violations] == ["message.parts[0]"]


async def test_a_blank_message_is_refused() -> None:
    with pytest.raises(InvalidParamsError):
        await prompt(Part("text", " \n"), Part("text", ""))


def test_routing_is_looked_up_in_the_params_first_and_then_in_the_message() -> None:
    params: JsonObject = {"shared": {"session": {"id": "  "}}, "opencode": {"directory": "a"}}
    message: JsonObject = {
        "shared": {
            "session": {"id": " ses_1 "},
            "model": {"providerID": "p", "modelID": "m"},
        },
        "opencode": {"directory": "b", "workspace": {"id": "w"}},
        "mine": 5,
    }

    routing = Routing("ses_1", "a", "w", ModelRef("p", "m"))
    assert read_metadata(params, message) == (routing, None, None)
    assert read_metadata(None, None) == (Routing(), None, None)
    tried: JsonObject = {"opencode": {"sign_in": "2026-11-18T10:00:00.004Z"}}
    assert read_metadata(None, tried) == (Routing(), None, 1_794_996_000_004)


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"shared": 5}, "metadata.shared"),
        ({"shared": {"session": "ses_1"}}, "metadata.shared.session"),
        ({"shared": {"session": {"id": 1}}}, "metadata.shared.session.id"),
        ({"shared": {"model": {"providerID": "p"}}}, "metadata.shared.model.modelID"),
        (
            {"shared": {"model": {"providerID": " ", "modelID": "m"}}},
            "metadata.shared.model.providerID",
        ),
        ({"opencode": {"directory": ["/"]}}, "metadata.opencode.directory"),
        ({"opencode": {"sign_in": "now"}}, "metadata.opencode.sign_in"),
        ({"opencode": {"sign_in": "2026-11-18T10:00:00"}}, "metadata.opencode.sign_in"),
    ],
)
def test_metadata_of_a_wrong_shape_are_named(metadata: JsonObject, field: str) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        read_metadata(metadata, None)

    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize(
    ("accepted", "modes"),
    [
        ([], None),
        (["*/*"], None),
        (["image/png", "*"], None),
        ([" Text/Plain ", "text/plain; charset=utf-8"], ("text/plain",)),
        (["text/plain", "application/JSON"], ("application/json", "text/plain")),
        (["text"], ("text/plain",)),
        (["text/*"], ("text/*",)),
        (["application/json"], ("application/json",)),
        (["text/markdown", "text/html"], ("text/html", "text/markdown")),
    ],
)
def test_output_modes_are_normalised(accepted: list[str], modes: tuple[str, ...] | None) -> None:
    assert read_output_modes(accepted) == modes


def test_a_caller_that_takes_none_of_the_types_is_refused_with_what_there_is() -> None:
    with pytest.raises(UnsupportedOperationError) as refused:
        read_output_modes(["image/png"])

    assert refused.value.code == -32004
    assert refused.value.data["accepted_output_modes"] == ["image/png"]
    assert refused.value.data["required_output_modes"] == ["text/plain"]
