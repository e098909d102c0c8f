"""Where requests may go, and that they go nowhere else."""

import asyncio
import gzip
import socket
import ssl
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from opencode_a2a.config import ServiceSettings
from opencode_a2a.net.egress import (
    Egress,
    EgressError,
    Fetched,
    Fetcher,
    FetchError,
    Lookups,
    TooManyFilesError,
    check,
    lookups_of,
    permits,
    resolve,
    vet,
)
from opencode_a2a.net.http import client
from opencode_a2a.push.notification import Failed, Receipt, Taken
from opencode_a2a.push.sender import post
from tests.support.certificates import Authority, breaking_tls
from tests.support.running import answer, running

LOCAL = Egress(allow_private=True)
LIMITS = ServiceSettings(fetch_files_max_bytes=1000, fetch_files_max_total_bytes=10_000).model_copy(
    update={"fetch_files_max_count": 3, "fetch_files_timeout_seconds": 5}
)


@pytest.mark.requirement("I11")
@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("8.8.8.8", True, True),
        ("2606:4700::1111", True, True),
        ("127.0.0.1", False, True),
        ("127.9.9.9", False, True),
        ("::1", False, True),
        ("10.0.0.1", False, True),
        ("172.16.0.1", False, True),
        ("192.168.1.1", False, True),
        ("100.64.0.1", False, True),
        ("fd00::1", False, True),
        ("::ffff:127.0.0.1", False, True),
        ("::ffff:8.8.8.8", True, True),
        ("64:ff9b::7f00:1", False, True),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:7f00:1::", False, True),
        ("::7f00:1", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("fe80::1", False, False),
        ("0.0.0.0", False, False),  # noqa: S104 # not bound
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("ff02::1", False, False),
        ("240.0.0.1", False, False),
        ("255.255.255.255", False, False),
        ("192.0.0.8", False, False),
        ("fec0::1", False, False),
        ("64:ff9b:1::1", False, False),
    ],
)
def test_addresses_are_told_apart(address: str, public: bool, private: bool) -> None:
    found = ip_address(address)

    assert (permits(found, Egress()), permits(found, LOCAL)) == (public, private)


@pytest.mark.requirement("I11")
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/",
        "gopher://example.com",
        "//example.com",
        "example.com",
        "http://",
        "http:///x",
        "http://user@example.com/",
        "http://user:pw@example.com/",
        "http://@example.com/",
        "http://example.com:99999/",
        "http://[::1/",
        "http://127.0.0.1 /",
        "http://%31%32%37.0.0.1/",
        "http://" + "a" * 300 + "/",
        "http://" + "a." * 130 + "example/",
        "http://a..example/",
        "http://-a.example/",
        "http://a!b.example/",
        "http://a%\0.1/",
        "http://example.com/\0",
        "http://example\n.com/",
        "http://localhost/",
        "http://LOCALHOST./",
        "http://x.localhost/",
        "",
    ],
)
def test_urls_that_are_no_plain_web_addresses_are_refused(url: str) -> None:
    with pytest.raises(EgressError):
        check(url, Egress())


@pytest.mark.parametrize(
    "path",
    ["a%20b", "ä", "\u0645\u06cc\u200c\u062e\u0648", "\U0001f469\u200d\U0001f52c", "a\u3000b"],
)
def test_letters_of_any_script_may_stand_in_a_path(path: str) -> None:
    assert check(f"https://example.com/{path}", Egress()).path == f"/{path}"


@pytest.mark.requirement("I11")
@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "[::1]", "0", "[::]",
     "[::ffff:7f00:1]", "10.0.0.1", "169.254.169.254", "localhost."],
)  # fmt: skip
async def test_no_spelling_of_a_private_address_passes(host: str) -> None:
    with pytest.raises(EgressError):
        await vet(f"http://{host}/", Egress())
    async with client(Egress()) as http:
        with pytest.raises((EgressError, httpx2.HTTPError, httpx2.InvalidURL)):
            await http.get(f"http://{host}/")


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("a.example", True),
        ("A.EXAMPLE.", True),
        ("b.a.example", False),
        ("x.wild.example", True),
        ("y.x.wild.example", True),
        ("wild.example", False),
        ("evilwild.example", False),
        ("wild.example.evil", False),
        (".wild.example", False),
    ],
)
def test_the_allow_list_means_what_it_says(host: str, passes: bool) -> None:
    rules = Egress(("a.example", "*.wild.example"))
    try:
        check(f"https://{host}/", rules)
    except EgressError:
        assert not passes
    else:
        assert passes


async def names(scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(scope["headers"])
    await answer(send, 200, headers[b"host"], b"text/plain; charset=utf-8")


async def test_a_vetted_name_is_called_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point(monkeypatch, {"peer.test": ["127.0.0.1"]})
    async with running(names) as url:
        port = url.rpartition(":")[2]
        async with client(LOCAL) as http:
            answered = await http.get(f"http://peer.test:{port}/")

    assert answered.text == f"peer.test:{port}"


@pytest.mark.requirement("I11")
async def test_a_name_that_moves_to_a_private_address_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = point(monkeypatch, {"rebind.test": ["8.8.8.8"], "mixed.test": ["8.8.8.8", "127.0.0.1"]})
    await vet("http://rebind.test/", Egress())
    asked["rebind.test"] = ["127.0.0.1"]

    async with running(names) as url:
        port = url.rpartition(":")[2]
        for name in ("rebind.test", "mixed.test"):
            async with client(Egress()) as http:
                with pytest.raises(EgressError, match="public"):
                    await http.get(f"http://{name}:{port}/")


async def test_tls_is_checked_against_the_name_not_the_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str | None] = []
    certificate = self_signed(tmp_path, "peer.test")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)

    def note(connection: object, name: str | None, context: object) -> None:
        asked.append(name)

    serving.sni_callback = note
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    point(monkeypatch, {"peer.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]})
    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=serving)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with client(LOCAL, timeout=5) as http:
            good = await http.get(f"https://peer.test:{port}/")
            with pytest.raises(httpx2.ConnectError):
                await http.get(f"https://other.test:{port}/")

    assert (good.text, asked) == ("hi", ["peer.test", "other.test"])


async def file_server(scope: Scope, receive: Receive, send: Send) -> None:
    match scope["path"]:
        case "/plain":
            await answer(send, 200, b"x" * 1000, b"image/PNG; q=1")
        case "/bomb":
            bomb = gzip.compress(gzip.compress(b"\0" * 200_000_000, 9), 9)
            await answer(send, 200, bomb, b"text/plain", ((b"content-encoding", b"gzip, gzip"),))
        case "/gzip":
            body = gzip.compress(b"y" * 1000)
            await answer(send, 200, body, b"text/plain", ((b"content-encoding", b"gzip"),))
        case "/large":
            await answer(send, 200, b"word " * 1_800_000, b"text/plain")
        case "/redirect":
            await answer(send, 302, b"", b"text/plain", ((b"location", b"/plain"),))
        case "/slow":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await receive())["type"] != "http.disconnect":
                pass
        case "/misnamed":
            await answer(send, 302, b"", b"text/plain", ((b"location", b"http://_xn--a/"),))
        case "/nowhere":
            await answer(send, 302, b"", b"text/plain", ((b"location", b"//:1/"),))
        case "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"z" * 999, "more_body": True})
        case _:
            await answer(send, 404, b"no", b"text/plain")


async def test_a_file_is_fetched_with_its_type() -> None:
    async with running(file_server) as url:
        plain, packed = await Fetcher(LIMITS, LOCAL)([f"{url}/plain", f"{url}/gzip"])

    assert plain == Fetched(b"x" * 1000, "image/png")
    assert packed == Fetched(b"y" * 1000, "text/plain")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/bomb", "larger"),
        ("/endless", "larger"),
        ("/redirect", "redirects"),
        ("/misnamed", "cannot be fetched"),
        ("/nowhere", "cannot be fetched"),
        ("/missing", "404"),
        ("/slow", "within"),
    ],
)
async def test_a_file_that_keeps_to_no_limit_is_given_up(path: str, message: str) -> None:
    limits = LIMITS.model_copy(update={"fetch_files_timeout_seconds": 2 if path == "/slow" else 30})
    async with running(file_server) as url:
        plain, given_up = await Fetcher(limits, LOCAL)([f"{url}/plain", f"{url}{path}"])

    assert isinstance(plain, Fetched)
    assert isinstance(given_up, FetchError)
    assert message in str(given_up)


@pytest.mark.requirement("I9")
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc"])
async def test_a_server_that_breaks_tls_keeps_only_its_own_file_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: bytes
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with running(file_server) as url, breaking_tls(authority, said) as breaking:
        plain, broken = await Fetcher(LIMITS, LOCAL)([f"{url}/plain", f"{breaking}/file"])

    assert isinstance(plain, Fetched)
    assert isinstance(broken, FetchError)


@pytest.mark.parametrize(
    ("said", "receipt"),
    [(b"", Failed("tls")), (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", Taken())],
)
async def test_a_receiver_that_breaks_tls_has_taken_what_it_said_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: bytes, receipt: Receipt
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with breaking_tls(authority, said) as url, client(LOCAL) as http:
        assert await post(http, url, b"{}", {}, 5.0) == receipt


@pytest.mark.requirement("I9")
@pytest.mark.parametrize("url", ["https://_xn--a/", "https://xn--a[v1.a]/", "https://a%\0.1/"])
async def test_a_url_whose_host_cannot_be_read_keeps_only_its_own_file_away(url: str) -> None:
    async with running(file_server) as served:
        plain, unreadable = await Fetcher(LIMITS, LOCAL)([f"{served}/plain", url])

    assert isinstance(plain, Fetched)
    assert isinstance(unreadable, FetchError | EgressError)


async def test_more_files_than_are_fetched_for_a_message_are_not_even_tried() -> None:
    with pytest.raises(TooManyFilesError, match="at most 3"):
        await Fetcher(LIMITS, LOCAL)(["http://127.0.0.1:9/"] * 4)


async def test_the_files_of_a_message_have_one_size_together() -> None:
    limits = LIMITS.model_copy(update={"fetch_files_max_total_bytes": 2500})
    async with running(file_server) as url:
        files = await Fetcher(limits, LOCAL)([f"{url}/plain"] * 3)

    refused = [file for file in files if isinstance(file, FetchError)]
    assert len(refused) == 1
    assert "2500 bytes together" in str(refused[0])


async def test_files_that_drip_hold_a_message_no_longer_than_one_would() -> None:
    limits = LIMITS.model_copy(
        update={"fetch_files_max_count": 40, "fetch_files_timeout_seconds": 0.4}
    )
    loop = asyncio.get_running_loop()
    async with running(file_server) as url:
        began = loop.time()
        files = await Fetcher(limits, LOCAL)([f"{url}/slow"] * 40)
        took = loop.time() - began

    assert {str(file) for file in files} == {"The files of the message did not arrive within 0.4 s"}
    assert took < 8  # one after the other they would take 16 s


async def test_few_files_of_a_message_are_fetched_at_once() -> None:
    limits = LIMITS.model_copy(update={"fetch_files_max_count": 12})
    open_now, most, four = 0, 0, asyncio.Event()

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 4:
            four.set()
        async with asyncio.timeout(60):
            await four.wait()
        open_now -= 1
        await answer(send, 200, b"x", b"text/plain")

    async with running(counting) as url:
        files = await Fetcher(limits, LOCAL)([f"{url}/{number}" for number in range(12)])

    assert files == [Fetched(b"x", "text/plain")] * 12
    assert most == 4


MEMORY = """
import asyncio, resource, sys
from opencode_a2a.config import ServiceSettings
from opencode_a2a.messages import Message, Part
from opencode_a2a.net.egress import Egress, Fetcher
from opencode_a2a.server.content import read_prompt

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

ServiceSettings.fetch_files_max_count = 60
fetcher = Fetcher(ServiceSettings(), Egress(allow_private=True))
before = peak()
parts = [Part("url", url=sys.argv[1] + "/large")] * 60
try:
    asyncio.run(read_prompt(Message("m", "user", parts), fetcher, "ann"))
except Exception as error:
    print(type(error).__name__, peak() - before)
"""


@pytest.mark.requirement("I8")
async def test_sixty_files_of_9_megabytes_do_not_fill_the_memory() -> None:
    async with running(file_server) as url, asyncio.timeout(60):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MEMORY, url, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()

    refused, megabytes = output.split()
    assert refused == b"InvalidParamsError"
    assert int(megabytes) < 100


@pytest.mark.requirement("I11")
async def test_files_come_from_public_addresses_only() -> None:
    async with running(file_server) as url:
        (file,) = await Fetcher(LIMITS)([f"{url}/plain"])

    assert isinstance(file, EgressError)


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi")
    writer.close()


def point(monkeypatch: pytest.MonkeyPatch, where: dict[str, list[str]]) -> dict[str, list[str]]:
    """Let names of the test point to addresses, and nothing else be resolved."""
    real = socket.getaddrinfo

    def lookup(
        host: str,
        port: int,
        family: int = 0,
        type: int = 0,  # noqa: A002 # the signature of the original
        proto: int = 0,
        flags: int = 0,
    ) -> Sequence[object]:
        addresses = where.get(host, [host])
        found = (real(address, port, family, type, proto, flags) for address in addresses)
        return [info for infos in found for info in infos]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return where


def self_signed(folder: Path, name: str) -> Path:
    """Make a certificate for one name; key and certificate in one file."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "peer.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    return path


async def test_a_handshake_that_is_cut_off_leaves_no_connection_behind() -> None:
    closed = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side closes
        closed.set()
        writer.close()

    async with await asyncio.start_server(stall, "127.0.0.1") as server, asyncio.timeout(60):
        port = server.sockets[0].getsockname()[1]
        async with client(Egress(allow_private=True), timeout=30) as http:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await http.get(f"https://127.0.0.1:{port}/")
            await closed.wait()


@pytest.mark.requirement("I11")
async def test_names_that_nobody_answers_hold_up_their_own_caller_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[str]()
    begun, answered = asyncio.Event(), asyncio.Event()

    async def found(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        if host.endswith(".tarpit"):
            begun.set()
            await answered.wait()
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    rules = Egress(allow_private=True, lookups=Lookups())

    async def look(caller: str, host: str) -> object:
        with lookups_of(caller):
            return await resolve(host, rules)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        slow = [group.create_task(look("eve", f"{number}.tarpit")) for number in range(5)]
        await begun.wait()
        for number in range(3):
            await look("ann", f"{number}.example")
        assert asked == ["0.tarpit", "0.example", "1.example", "2.example"]
        slow[1].cancel()
        answered.set()
    assert [one.cancelled() for one in slow] == [False, True, False, False, False]
    assert asked[4:] == ["2.tarpit", "3.tarpit", "4.tarpit"]
