"""TLS on the service's own port, met by a process, its commands and a plain client."""

import asyncio
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from opencode_a2a.config import TlsSettings
from opencode_a2a.web.tls import ServerTls
from tests.support.caller import Caller
from tests.support.certificates import Authority
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program, run
from tests.support.running import answer, running
from tests.support.service import TOKEN, variables_for


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncGenerator[FakeOpenCode]:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with FakeOpenCode(workspace).running() as fake:
        yield fake


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def secured(fake: FakeOpenCode, authority: Authority, **changes: str) -> Program:
    certificate, key = authority.issue("first")
    files = {"A2A_TLS_CERT_FILE": str(certificate), "A2A_TLS_KEY_FILE": str(key)}
    state = authority.folder / "state"
    variables = variables_for(fake, state, A2A_LOG_LEVEL="INFO", **files, **changes)
    return Program(variables, tls=authority.trusted())


async def served(program: Program, authority: Authority) -> str:
    """Return the name on the certificate that a new connection gets."""
    tls = authority.trusted()
    _, writer = await asyncio.open_connection("127.0.0.1", program.port, ssl=tls)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    return dict(pair for part in certificate["subject"] for pair in part)["commonName"]


async def test_callers_commands_and_addresses_are_of_https(
    fake: FakeOpenCode, authority: Authority
) -> None:
    async with secured(fake, authority) as program:
        sent = await Caller(program).send("hello")
        assert sent.state == "completed"
        card = (await program.http.get("/.well-known/agent-card.json")).json()
        assert {one["url"] for one in card["supportedInterfaces"]} == {program.url}
        assert card["url"] == program.url
        assert f'"url":"{program.url}"' in "\n".join(program.lines)
        assert "strict-transport-security" not in (await program.http.get("/livez")).headers

        client = {"A2A_CLIENT_BEARER_TOKEN": TOKEN}
        status, said = await run("call", program.url, "hello", **client)
        assert (status, "A2A_CLIENT_CA_FILE" in said) == (1, True), said
        client["A2A_CLIENT_CA_FILE"] = str(authority.file)
        status, said = await run("call", program.url, "hello", **client)
        assert status == 0, said
        status, said = await run("ping", program.url, **client)
        assert status == 0, said
        status, said = await run("console", "--print", program.url, **client)
        assert (status, said.startswith(f"{program.url}/console#code=")) == (0, True), said
        del client["A2A_CLIENT_CA_FILE"]
        status, said = await run(
            "call", program.url, "hi", SSL_CERT_FILE=str(authority.file), **client
        )
        assert status == 0, said

        async with httpx2.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx2.TransportError):
                await plain.get(program.url.replace("https:", "http:"))
        old = authority.trusted()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        async with httpx2.AsyncClient(verify=old, trust_env=False) as older:
            assert (await older.get(f"{program.url}/livez")).status_code == 200


async def test_the_generated_token_is_found_for_a_service_with_tls(
    fake: FakeOpenCode, authority: Authority
) -> None:
    program = secured(fake, authority)
    del program.variables["A2A_BEARER_TOKEN"]
    async with program:
        client = {
            "A2A_CLIENT_CA_FILE": str(authority.file),
            "A2A_STATE_DIR": program.variables["A2A_STATE_DIR"],
        }
        for url in (program.url, f"localhost:{program.port}"):
            status, said = await run("call", url, "hello", **client)
            assert status == 0, said


STREAMS = 100


async def follow(
    program: Program, authority: Authority, task_id: str, opened: asyncio.Event
) -> list[str]:
    """Follow a task on a connection of its own; return the states that it was told."""
    async with (
        asyncio.timeout(120),
        httpx2.AsyncClient(base_url=program.url, verify=authority.trusted(), trust_env=False) as h,
    ):
        caller = Caller(program)
        caller.http = h
        async with caller.subscribe(task_id) as following:
            await following.until_state("working")
            opened.set()
            await following.rest()
        return following.states


async def test_a_renewed_certificate_is_used_and_streams_go_on(
    fake: FakeOpenCode, authority: Authority
) -> None:
    async with secured(fake, authority) as program:
        held = fake.hold()
        task = await Caller(program).begin("hi")
        await held.reached.wait()
        async with asyncio.TaskGroup() as group:
            opened = [asyncio.Event() for _ in range(STREAMS)]
            streams = [group.create_task(follow(program, authority, task.id, o)) for o in opened]
            async with asyncio.timeout(60):
                for one in opened:
                    await one.wait()
            before = len(program.lines)

            for new, old in zip(authority.issue("second"), authority.issue("first"), strict=True):
                shutil.copy(new, old)
            program.signal(signal.SIGHUP)
            await program.printed(lambda line: "certificate reloaded" in line, before)
            assert await served(program, authority) == "second"

            (authority.folder / "first.key").write_text("not a key")
            before = len(program.lines)
            program.signal(signal.SIGHUP)
            said = await program.printed(lambda line: "cannot be used" in line, before)
            assert "A2A_TLS_KEY_FILE" in said
            assert await served(program, authority) == "second"

            fake.release()
        assert [stream.result() for stream in streams] == [["working", "completed"]] * STREAMS
        assert await program.stop() == 0


async def test_a_client_certificate_is_required_where_an_authority_is_named(
    fake: FakeOpenCode, authority: Authority
) -> None:
    callers = Authority(authority.folder, "callers")
    certificate, key = callers.issue("ann")
    both = authority.folder / "ann.pem"
    both.write_text(certificate.read_text() + key.read_text())
    foreign, foreign_key = authority.issue("foreign")
    async with secured(fake, authority, A2A_TLS_CLIENT_CA_FILE=str(callers.file)) as program:
        known, stranger = authority.trusted(), authority.trusted()
        known.load_cert_chain(both)
        stranger.load_cert_chain(foreign, foreign_key)
        late = authority.trusted()
        late.load_cert_chain(*callers.issue("late", days=-1))
        for tls in (authority.trusted(), stranger, late):
            async with httpx2.AsyncClient(verify=tls, trust_env=False) as http:
                with pytest.raises(httpx2.TransportError):
                    await http.get(f"{program.url}/livez")
        async with httpx2.AsyncClient(verify=known, trust_env=False) as http:
            assert (await http.get(f"{program.url}/livez")).status_code == 200
            assert (await http.get(f"{program.url}/health")).status_code == 401

        client = {"A2A_CLIENT_BEARER_TOKEN": TOKEN, "A2A_CLIENT_CA_FILE": str(authority.file)}
        status, said = await run("call", program.url, "hello", **client)
        assert (status, "A2A_CLIENT_CERT_FILE" in said) == (1, True), said
        status, said = await run(
            "call", program.url, "hi", A2A_CLIENT_CERT_FILE=str(both), **client
        )
        assert status == 0, said

        sessions = [await asyncio.to_thread(visit, program, tls) for tls in versions(known)]
        before = len(program.lines)
        shutil.copy(authority.file, callers.file)  # the callers' own is not trusted any more
        program.signal(signal.SIGHUP)
        await program.printed(lambda line: "certificate reloaded" in line, before)
        for tls, session in zip(versions(known), sessions, strict=True):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(visit, program, tls, session)
        await asyncio.to_thread(visit, program, stranger)


def versions(tls: ssl.SSLContext) -> Iterator[ssl.SSLContext]:
    """Let a client use each version of TLS in turn."""
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        tls.maximum_version = version
        yield tls


def visit(
    program: Program, tls: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> ssl.SSLSession | None:
    """Get an answer on a connection of its own, and return the session to resume it with."""
    address = ("127.0.0.1", program.port)
    with (
        socket.create_connection(address, timeout=30) as plain,
        tls.wrap_socket(plain, server_hostname="localhost", session=session) as secure,
    ):
        secure.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = secure.recv(1000)
        if not answer:  # with TLS 1.3 a client is refused after its part of the handshake
            raise ConnectionResetError
        assert answer.startswith(b"HTTP/1.1 200")
        return secure.session


async def test_a_wrong_file_ends_the_start_with_one_line(
    fake: FakeOpenCode, authority: Authority
) -> None:
    certificate, _ = authority.issue("first")
    _, other = authority.issue("other")
    files = {"A2A_TLS_CERT_FILE": str(certificate), "A2A_TLS_KEY_FILE": str(other)}

    status, said = await run("serve", **variables_for(fake, authority.folder / "state", **files))

    assert (status, said.count("\n")) == (2, 1), said
    assert "does not belong to the certificate" in said


async def test_a_handshake_that_stalls_is_ended(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = authority.issue("first")
    tls = ServerTls(TlsSettings(cert_file=certificate, key_file=key))
    monkeypatch.setattr("opencode_a2a.web.socket.HANDSHAKE_SECONDS", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, b"", b"text/plain")

    async with running(app, tls=tls) as url:
        async with httpx2.AsyncClient(verify=authority.trusted(), trust_env=False) as http:
            assert (await http.get(url)).status_code == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_doctor_looks_at_the_certificate(fake: FakeOpenCode, authority: Authority) -> None:
    soon, key = map(str, authority.issue("soon", days=5))
    files = {"A2A_TLS_CERT_FILE": soon, "A2A_TLS_KEY_FILE": key}

    _, said = await run("doctor", **variables_for(fake, authority.folder / "state", **files))

    assert "advice  certificate: " in said
    assert "renew it" in said
