"""Which OpenCode answers: the kinds are told apart by their recorded answers."""

import asyncio
import socket

import pytest

from opencode_a2a.net.exchange import HttpResponse
from opencode_a2a.opencode.client import OpenCode1
from opencode_a2a.opencode.kinds import (
    ASKED,
    Found,
    Kind,
    of_version,
    probe,
    problem_of,
    recognise,
    untested,
)
from opencode_a2a.opencode.process import INSTALL, PREVIEW, QUALIFIED
from tests.support.kinds import KINDS, answer_of, answering


@pytest.mark.parametrize("name", KINDS)
def test_all_answers_together_tell_the_kind(name: str) -> None:
    found = recognise({path: answer_of(name, path) for path in ASKED})

    kind, version = KINDS[name]["found"]
    assert (found.kind.name, found.version) == (kind, version)


@pytest.mark.parametrize("name", KINDS)
async def test_a_server_is_asked_until_its_kind_is_known(name: str) -> None:
    asked: list[str] = []

    async def answer(path: str) -> HttpResponse:
        asked.append(path)
        return answer_of(name, path)

    found = await probe(answer)

    kind, version = KINDS[name]["found"]
    assert (found.kind.name, found.version) == (kind, version)
    assert tuple(asked) == ASKED[: len(asked)]
    if found.kind in (Kind.V1, Kind.LOCKED):
        assert len(asked) == 1


@pytest.mark.parametrize("name", ["1.18.33", "preview 16350", "2.0.5", "2.2.6", "a web page"])
async def test_a_kind_is_told_over_a_socket(name: str) -> None:
    with answering(name) as url:
        async with OpenCode1(url) as opencode:
            found = await probe(opencode.raw_response)

    assert [found.kind.name, found.version] == KINDS[name]["found"]


async def test_nothing_and_something_that_speaks_no_http_are_told_apart() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with OpenCode1(f"http://127.0.0.1:{port}") as opencode:
            other = await probe(opencode.raw_response)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with OpenCode1(f"http://127.0.0.1:{unused.getsockname()[1]}") as opencode:
            nothing = await probe(opencode.raw_response)

    assert (other, nothing) == (Found(Kind.OTHER), Found(Kind.NOTHING))
    assert (other.lasting, nothing.lasting) == (True, False)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            Found(Kind.V1_0),
            f"it is OpenCode before 1.1, and this service needs 1.1 or later; {INSTALL}",
        ),
        (Found(Kind.FAILING, status=503), "it answers with status 503; look at what it printed"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_with_the_remedy(found: Found, sentence: str) -> None:
    assert str(problem_of(found)) == sentence


def test_a_missing_password_is_not_a_wrong_one() -> None:
    found = Found(Kind.LOCKED, status=401)

    missing, wrong = problem_of(found, password=False), problem_of(found, password=True)

    assert missing is not None
    assert wrong is not None
    assert missing.what == "it asks for a password (status 401)"
    assert wrong.what == "it refuses the user name or the password (status 401)"
    assert "OPENCODE_AUTH_PASSWORD" in missing.remedy
    assert missing.remedy == wrong.remedy


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("0.18.1\n", Found(Kind.V1_0, "0.18.1")),
        ("v1.0.185", Found(Kind.V1_0, "1.0.185")),
        ("1.18.33\n", Found(Kind.V1, "1.18.33")),
        ("local", Found(Kind.V1, "local")),
        ("0.0.0-dev-202611", Found(Kind.V1, "0.0.0-dev-202611")),
        ("", Found(Kind.V1, "")),
        ("2.0.12", Found(Kind.V2, "2.0.12")),
        ("opencode v2.2.6", Found(Kind.V2, "2.2.6")),
        ("opencode2 v0.0.0-next-16350\n", Found(Kind.V2, "0.0.0-next-16350")),
        ("v3.1.0", Found(Kind.V2, "3.1.0")),
    ],
)
def test_a_program_tells_its_kind_by_its_version(printed: str, found: Found) -> None:
    assert of_version(printed) == found


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("1.1.0", True),
        ("1.9.10", True),
        (QUALIFIED, True),
        (PREVIEW, True),
        ("2.2.6", False),
        ("1.18.34", False),
        ("1.100.0", False),
        ("local", False),
        ("0.0.0-dev-202611", False),
    ],
)
def test_a_version_newer_than_the_last_qualified_is_doubted(version: str, known: bool) -> None:
    assert problem_of(of_version(version)) is None
    assert (untested(version) is None) is known
