"""The client against a server that writes down what really came in on the socket."""

import asyncio
import base64
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from opencode_a2a.errors import (
    ServiceError,
    SessionBusyError,
    SessionNotFoundError,
    UpstreamBackpressureError,
    UpstreamError,
    UpstreamHttpError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.opencode.client import Location, OpenCode1, well_formed
from opencode_a2a.opencode.translate import mask_paths
from opencode_a2a.opencode.types import (
    CommandCall,
    OutputFormat,
    Prompt,
    SessionDraft,
    ShellCall,
    StatusBusy,
    StatusRetry,
    TextInput,
    TextPart,
    UnknownPart,
)

SES = SessionId("ses_1aB")
MSG = MessageId("msg_2cD")
JSON = "application/json"
HELLO = Prompt(parts=[TextInput(text="hello")])


@dataclass(frozen=True)
class Seen:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Canned:
    status: int = 200
    body: bytes = b"null"
    media_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict[str, str])
    release: threading.Event | None = None
    """If set, the answer waits for it."""


class Recorder(ThreadingHTTPServer):
    """A server with one answer for everything; it records request lines as they came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        self.seen: list[Seen] = []
        self.answer = Canned()
        self.slow_targets: dict[str, Canned] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay quiet when a client has gone away: some tests have it go."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class RecordingHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Recorder  # pyright: ignore[reportIncompatibleVariableOverride] -- it serves only this one

    def handle_any(self) -> None:
        length = int(self.headers.get("content-length", 0))
        headers = {key.lower(): value for key, value in self.headers.items()}
        body = self.rfile.read(length)
        self.server.seen.append(Seen(self.command, self.path, headers, body))
        answer = self.server.slow_targets.get(self.path, self.server.answer)
        if answer.release is not None:
            answer.release.wait(30)
        self.send_response_only(answer.status)
        if answer.media_type:
            self.send_header("content-type", answer.media_type)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815 -- the base class's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        """Stay quiet."""


@pytest.fixture(scope="module")
def server() -> Iterator[Recorder]:
    with Recorder() as recorder:
        thread = threading.Thread(target=recorder.serve_forever, args=(0.01,))
        thread.start()
        yield recorder
        recorder.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _fresh(server: Recorder) -> None:  # pyright: ignore[reportUnusedFunction] -- a fixture
    server.seen.clear()
    server.answer = Canned()
    server.slow_targets.clear()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def opencode(server: Recorder, runner: asyncio.Runner) -> Iterator[OpenCode1]:
    client = OpenCode1(server.url, timeout=30)
    runner.run(client.__aenter__())
    yield client
    runner.run(client.__aexit__())


Call = Callable[[OpenCode1, str], Awaitable[object]]

CALLS: dict[str, tuple[str, str, Call]] = {
    "get": ("ses", "GET /session/{}", lambda c, i: c.session(SessionId(i))),
    "delete": ("ses", "DELETE /session/{}", lambda c, i: c.delete_session(SessionId(i))),
    "children": (
        "ses",
        "GET /session/{}/children",
        lambda c, i: c.session_children(SessionId(i)),
    ),
    "todo": ("ses", "GET /session/{}/todo", lambda c, i: c.session_todo(SessionId(i))),
    "diff": ("ses", "GET /session/{}/diff", lambda c, i: c.session_diff(SessionId(i))),
    "fork": ("ses", "POST /session/{}/fork", lambda c, i: c.fork_session(SessionId(i))),
    "share": ("ses", "POST /session/{}/share", lambda c, i: c.share_session(SessionId(i))),
    "unshare": ("ses", "DELETE /session/{}/share", lambda c, i: c.unshare_session(SessionId(i))),
    "summarize": (
        "ses",
        "POST /session/{}/summarize",
        lambda c, i: c.summarize_session(SessionId(i), ModelRef("p", "m")),
    ),
    "revert": ("ses", "POST /session/{}/revert", lambda c, i: c.revert_session(SessionId(i), MSG)),
    "unrevert": ("ses", "POST /session/{}/unrevert", lambda c, i: c.unrevert_session(SessionId(i))),
    "abort": ("ses", "POST /session/{}/abort", lambda c, i: c.abort_session(SessionId(i))),
    "messages": ("ses", "GET /session/{}/message", lambda c, i: c.messages(SessionId(i))),
    "message's session": (
        "ses",
        f"GET /session/{{}}/message/{MSG}",
        lambda c, i: c.message(SessionId(i), MSG),
    ),
    "message": (
        "msg",
        f"GET /session/{SES}/message/{{}}",
        lambda c, i: c.message(SES, MessageId(i)),
    ),
    "prompt": ("ses", "POST /session/{}/message", lambda c, i: c.prompt(SessionId(i), HELLO)),
    "prompt_async": (
        "ses",
        "POST /session/{}/prompt_async",
        lambda c, i: c.prompt_async(SessionId(i), HELLO),
    ),
    "command": (
        "ses",
        "POST /session/{}/command",
        lambda c, i: c.run_command(SessionId(i), CommandCall(command="init")),
    ),
    "shell": (
        "ses",
        "POST /session/{}/shell",
        lambda c, i: c.run_shell(SessionId(i), ShellCall(command="ls", agent="build")),
    ),
    "permission": (
        "per",
        "POST /permission/{}/reply",
        lambda c, i: c.reply_permission(RequestId(i), "once"),
    ),
    "question": (
        "que",
        "POST /question/{}/reply",
        lambda c, i: c.reply_question(RequestId(i), [["a"]]),
    ),
    "reject": ("que", "POST /question/{}/reject", lambda c, i: c.reject_question(RequestId(i))),
    "workspace": (
        "wrk",
        "DELETE /experimental/workspace/{}",
        lambda c, i: c.remove_workspace(i),
    ),
}

PREFIXES = ("ses", "msg", "per", "que", "wrk", "prt")
EVIL = st.sampled_from(
    ["/../../global/dispose", "%2F..%2Fglobal", "?directory=/", "#x", "\n", "\x00", "\r\nA: b", "é"]
)
IDS = st.one_of(
    st.text(max_size=20),
    st.builds("{}_{}".format, st.sampled_from(PREFIXES), st.text(max_size=12)),
    st.builds("{}_{}{}".format, st.sampled_from(PREFIXES), st.text(max_size=4), EVIL),
    st.from_regex(r"(ses|msg|per|que|wrk)_[A-Za-z0-9]{1,30}", fullmatch=True),
)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=IDS)
@example(value="ses_abc")
@example(value="ses_a/../../global/dispose")
@example(value="ses_abc\n")
@example(value="status")
@example(value="..")
@example(value="")
def test_an_id_is_one_path_segment_or_not_sent_at_all(
    name: str, value: str, server: Recorder, opencode: OpenCode1, runner: asyncio.Runner
) -> None:
    prefix, template, call = CALLS[name]
    server.seen.clear()

    try:
        runner.run(_awaited(call(opencode, value)))
        refused = None
    except ServiceError as error:
        refused = error

    if well_formed(prefix, value):
        assert [f"{seen.method} {seen.target}" for seen in server.seen] == [template.format(value)]
    else:
        assert server.seen == []
        assert type(refused) is (SessionNotFoundError if prefix == "ses" else UpstreamNotFoundError)


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(directory=st.text(min_size=1), pattern=st.text(min_size=1))
@example(directory="/a b/ü&workspace=wrk_1#x?y=%2F..", pattern="+%20&directory=/etc")
def test_query_values_arrive_as_they_are_and_change_nothing_else(
    directory: str, pattern: str, server: Recorder, opencode: OpenCode1, runner: asyncio.Runner
) -> None:
    server.seen.clear()
    server.answer = Canned(body=b"[]")

    runner.run(opencode.find_text(pattern, at=Location(directory)))

    target = urlsplit(server.seen[0].target)
    assert target.path == "/find"
    assert parse_qs(target.query, keep_blank_values=True) == {
        "directory": [directory],
        "pattern": [pattern],
    }


async def test_a_workspace_takes_the_place_of_the_directory(server: Recorder) -> None:
    server.answer = Canned(body=b"[]")

    async with OpenCode1(server.url) as opencode:
        await opencode.agents(at=Location("/somewhere", "wrk_1"))
        with pytest.raises(UpstreamNotFoundError):
            await opencode.agents(at=Location(workspace="wrk_1&directory=/"))

    assert [seen.target for seen in server.seen] == ["/agent?workspace=wrk_1"]


def body(**fields: object) -> bytes:
    return orjson.dumps(fields)


REFUSALS: list[tuple[int, str, bytes, type[ServiceError], str | None]] = [
    (
        404,
        JSON,
        body(name="NotFoundError", data={"message": "Session not found: ses_1aB"}),
        SessionNotFoundError,
        None,
    ),
    (
        404,
        JSON,
        body(name="NotFoundError", data={"message": "Message not found: msg_2cD"}),
        UpstreamNotFoundError,
        "Message not found: msg_2cD",
    ),
    (
        409,
        JSON,
        body(_tag="SessionBusyError", sessionID="ses_1aB", message="Session is busy: ses_1aB"),
        SessionBusyError,
        "Session is busy: ses_1aB",
    ),
    (
        500,
        JSON,
        body(name="UnknownError", data={"message": "Unexpected server error.", "ref": "err_1"}),
        UpstreamHttpError,
        "Unexpected server error.",
    ),
    (400, JSON, body(_tag="BadRequest"), UpstreamHttpError, "BadRequest"),
    (
        400,
        JSON,
        body(
            name="ConfigInvalidError",
            data={
                "path": "/home/me/opencode.json",
                "issues": [{"path": ["model"], "message": "Expected string, got 5"}],
            },
        ),
        UpstreamHttpError,
        "opencode.json: model: Expected string, got 5",
    ),
    (
        500,
        JSON,
        body(
            name="APIError",
            data={
                "message": "cannot open '/home/me/my key' now",
                "responseHeaders": {"set-cookie": "secret"},
                "responseBody": "secret",
            },
        ),
        UpstreamHttpError,
        "cannot open '<path>' now",
    ),
    (415, "text/plain", b"Unsupported Media Type", UpstreamHttpError, "Unsupported Media Type"),
    (500, "text/plain", b"\xff" * 5000, UpstreamHttpError, "\ufffd" * 512),
    (401, "", b"", UpstreamHttpError, ""),
    (302, "", b"", UpstreamHttpError, ""),
]


@pytest.mark.parametrize(("status", "media_type", "content", "kind", "detail"), REFUSALS)
async def test_a_refusal_becomes_one_error_of_the_tree(
    status: int,
    media_type: str,
    content: bytes,
    kind: type[ServiceError],
    detail: str | None,
    server: Recorder,
) -> None:
    server.answer = Canned(status, content, media_type, {"location": "/elsewhere"})

    async with OpenCode1(server.url) as opencode:
        with pytest.raises(ServiceError) as caught:
            await opencode.message(SES, MSG)

    error = caught.value
    assert type(error) is kind
    if isinstance(error, UpstreamError):
        assert (error.detail, error.data) == (detail, {"upstream_status": status})
    else:
        assert error.data == {"session_id": SES}
    assert len(server.seen) == 1


async def test_an_unknown_permission_is_not_found_and_names_no_session(server: Recorder) -> None:
    server.answer = Canned(404, body(_tag="PermissionNotFoundError", message="gone"))

    async with OpenCode1(server.url) as opencode:
        with pytest.raises(UpstreamNotFoundError) as caught:
            await opencode.reply_permission(RequestId("per_1"), "reject", "no")

    assert caught.value.detail == "gone"
    assert orjson.loads(server.seen[0].body) == {"reply": "reject", "message": "no"}


@pytest.mark.parametrize(
    "answer",
    [
        Canned(body=b"<!doctype html>", media_type="text/html;charset=utf-8"),
        Canned(body=b"{}", media_type=""),
        Canned(body=b'{"id":'),
        Canned(body=b'{"id": "ses_1", "secret": "hunter2"}'),
        Canned(body=b""),
        Canned(body=b'"' + b"x" * 70_000 + b'"'),
    ],
    ids=["html", "no type", "cut", "fields missing", "empty", "too large"],
)
async def test_an_answer_of_another_form_is_a_payload_error(
    answer: Canned, server: Recorder
) -> None:
    server.answer = answer

    async with OpenCode1(server.url, max_response_bytes=65_536) as opencode:
        with pytest.raises(UpstreamPayloadError) as caught:
            await opencode.session(SES)

    assert caught.value.data == {}
    assert "hunter2" not in f"{caught.value.detail}{caught.value}"


async def test_a_closed_port_is_unreachable() -> None:
    async with OpenCode1("http://127.0.0.1:1") as opencode:
        with pytest.raises(UpstreamUnreachableError) as caught:
            await opencode.health()

    assert caught.value.detail == "GET /global/health: ConnectionRefusedError"


async def test_an_ordinary_call_times_out_and_a_turn_does_not(server: Recorder) -> None:
    release = threading.Event()
    server.slow_targets = {
        "/vcs": Canned(body=b"{}", release=release),
        f"/session/{SES}/message": Canned(body=LAST, release=release),
    }

    async with OpenCode1(server.url, timeout=0.05) as opencode, asyncio.TaskGroup() as group:
        turn = group.create_task(opencode.prompt(SES, HELLO))
        with pytest.raises(UpstreamTimeoutError):
            await opencode.vcs()
        release.set()
        async with asyncio.timeout(60):
            message = await turn

    assert message.info.id == "msg_a"


@pytest.mark.requirement("I6")
async def test_a_prompt_is_held_back_if_the_lease_is_lost_while_connecting() -> None:
    loop, held, checked = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    held.set()

    async def wait_for_lease() -> None:
        checked.set()
        await held.wait()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        listening.setblocking(False)
        host, port = listening.getsockname()
        first = socket.create_connection((host, port))  # there is no room for another
        async with OpenCode1(f"http://{host}:{port}") as opencode, asyncio.timeout(60):
            opencode.before_change = wait_for_lease
            sending = asyncio.create_task(opencode.prompt_async(SES, HELLO))
            await checked.wait()
            held.clear()
            (await loop.sock_accept(listening))[0].close()
            first.close()
            connection, _ = await loop.sock_accept(listening)
            with connection:
                reading = asyncio.create_task(loop.sock_recv(connection, 4096))
                written_early, _ = await asyncio.wait([reading], timeout=0.3)
                held.set()
                written = await reading
                await loop.sock_sendall(connection, b"HTTP/1.1 204 No Content\r\n\r\n")
                await sending

    assert not written_early
    assert written.startswith(f"POST /session/{SES}/prompt_async ".encode())


async def test_the_limit_refuses_calls_but_never_those_that_end_a_turn(server: Recorder) -> None:
    release = threading.Event()
    server.answer = Canned(body=b"true")
    server.slow_targets = {f"/session/{SES}/message": Canned(body=LAST, release=release)}

    async with (
        OpenCode1(server.url, max_concurrent_requests=1) as opencode,
        asyncio.TaskGroup() as group,
        asyncio.timeout(60),
    ):
        turn = group.create_task(opencode.prompt(SES, HELLO))
        await asyncio.sleep(0)  # the turn takes its slot
        with pytest.raises(UpstreamBackpressureError):
            await opencode.session(SES)
        await opencode.abort_session(SES)
        server.answer = Canned(body=b"{}")
        assert await opencode.session_status() == {}
        release.set()
        await turn
        with pytest.raises(UpstreamPayloadError):
            await opencode.session(SES)


@pytest.mark.parametrize("in_url", [True, False])
async def test_credentials_go_as_basic_and_stay_out_of_the_url(
    in_url: bool, server: Recorder
) -> None:
    server.answer = Canned(body=body(healthy=True, version="1.18.33"))
    url = server.url.replace("//", "//me:p%20w@") if in_url else server.url
    client = OpenCode1(url) if in_url else OpenCode1(url, username="me", password="p w")  # noqa: S106

    async with client as opencode:
        health = await opencode.health()

    assert (health.healthy, health.version) == (True, "1.18.33")
    expected = base64.b64encode(b"me:p w").decode()
    assert server.seen[0].headers["authorization"] == f"Basic {expected}"
    assert opencode.base_url == server.url


async def test_a_prompt_is_sent_in_opencodes_spelling_with_nulls_kept_in_schemas(
    server: Recorder,
) -> None:
    server.answer = Canned(204, b"", "")
    prompt = Prompt(
        parts=[TextInput(text="hi")],
        message_id=MSG,
        model=ModelRef(provider_id="p", model_id="m"),
        no_reply=True,
        format=OutputFormat(json_schema={"default": None}),
    )

    async with OpenCode1(server.url) as opencode:
        await opencode.prompt_async(SES, prompt)

    assert orjson.loads(server.seen[0].body) == {
        "parts": [{"type": "text", "text": "hi"}],
        "messageID": MSG,
        "model": {"providerID": "p", "modelID": "m"},
        "noReply": True,
        "format": {"type": "json_schema", "schema": {"default": None}},
    }
    assert server.seen[0].headers["content-type"] == JSON


async def test_the_answer_to_prompt_async_has_to_be_empty(server: Recorder) -> None:
    server.answer = Canned(body=b"{}")

    async with OpenCode1(server.url) as opencode:
        with pytest.raises(UpstreamPayloadError):
            await opencode.prompt_async(SES, HELLO)


ASSISTANT = {
    "id": "msg_a",
    "role": "assistant",
    "sessionID": SES,
    "parentID": MSG,
    "time": {"created": 1},
}


LAST = orjson.dumps({"info": ASSISTANT, "parts": list[object]()})


async def test_a_page_of_messages_keeps_unknown_parts_and_the_cursor(server: Recorder) -> None:
    where = {"sessionID": SES, "messageID": "msg_a"}
    parts = [
        {"id": "prt_1", "type": "text", "text": "hi", **where},
        {"id": "prt_2", "type": "hologram", "text": 5, **where},
    ]
    server.answer = Canned(
        body=orjson.dumps([{"info": ASSISTANT, "parts": parts}]), headers={"x-next-cursor": "abc"}
    )

    async with OpenCode1(server.url) as opencode:
        page = await opencode.messages(SES, limit=1, before="c+/=")

    assert server.seen[0].target == f"/session/{SES}/message?limit=1&before=c%2B%2F%3D"
    assert page.next_cursor == "abc"
    assert [type(part) for part in page.items[0].parts] == [TextPart, UnknownPart]


async def test_a_stored_part_that_is_malformed_does_not_hide_the_others(server: Recorder) -> None:
    where = {"sessionID": SES, "messageID": "msg_a"}
    parts = [
        {"id": "prt_1", "type": "text", "text": 5, **where},
        {"id": "prt_2", "type": "text", "text": "hi", **where},
        "no part at all",
    ]
    messages = [{"info": ASSISTANT, "parts": parts}, {"info": ASSISTANT, "parts": parts[1:2]}]
    server.answer = Canned(body=orjson.dumps(messages))

    async with OpenCode1(server.url) as opencode:
        page = await opencode.messages(SES)

    kept = [[part.id for part in message.parts] for message in page.items]
    assert kept == [["prt_2"], ["prt_2"]]


async def test_status_tells_busy_from_retry(server: Recorder) -> None:
    retry = {"type": "retry", "attempt": 1, "message": "Rate limit", "next": 5}
    server.answer = Canned(body=orjson.dumps({"ses_1": {"type": "busy"}, "ses_2": retry}))

    async with OpenCode1(server.url) as opencode:
        status = await opencode.session_status(at=Location("/w"))

    assert status == {
        "ses_1": StatusBusy(),
        "ses_2": StatusRetry(attempt=1, message="Rate limit", next=5),
    }


async def test_provider_lists_lose_their_keys_and_their_malformed_entries(
    server: Recorder,
) -> None:
    model = {"id": "m", "providerID": "p", "name": "M", "headers": {"x": "hunter2"}}
    provider = {
        "id": "p",
        "name": "P",
        "key": "hunter2",
        "options": {"apiKey": "hunter2"},
        "models": {"m": model, "broken": {"id": 5}},
    }
    catalogue = {"all": [provider, {"id": "broken"}], "default": {"p": "m"}, "connected": ["p"]}
    server.answer = Canned(body=orjson.dumps(catalogue))

    async with OpenCode1(server.url) as opencode:
        providers = await opencode.provider_catalogue()

    assert "hunter2" not in providers.model_dump_json()
    assert [(p.id, list(p.models)) for p in providers.all] == [("p", ["m"])]


async def test_a_catalogue_of_another_form_is_a_payload_error(server: Recorder) -> None:
    server.answer = Canned(body=body(all={}, default={}, connected=[]))

    async with OpenCode1(server.url) as opencode:
        with pytest.raises(UpstreamPayloadError):
            await opencode.provider_catalogue()


async def test_a_session_is_created_with_what_was_said_and_nothing_more(server: Recorder) -> None:
    server.answer = Canned(400, b"{}")

    async with OpenCode1(server.url) as opencode:
        with pytest.raises(UpstreamHttpError):
            await opencode.create_session(SessionDraft(title="T"), at=Location("/w s"))

    seen = server.seen[0]
    assert (seen.method, seen.target, orjson.loads(seen.body)) == (
        "POST",
        "/session?directory=%2Fw%20s",
        {"title": "T"},
    )


async def test_events_come_as_bytes_until_the_stream_ends(server: Recorder) -> None:
    server.answer = Canned(body=b"data: {}\n\n", media_type="text/event-stream")

    received = bytearray()
    async with OpenCode1(server.url) as opencode:
        await opencode.events(received.extend)

    assert received == b"data: {}\n\n"
    assert server.seen[0].target == "/global/event"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Canned(401, b"", ""), UpstreamHttpError),
        (Canned(body=b"<html>", media_type="text/html"), UpstreamPayloadError),
    ],
)
async def test_an_event_stream_that_is_none_is_refused(
    answer: Canned, kind: type[UpstreamError], server: Recorder
) -> None:
    server.answer = answer

    async with OpenCode1(server.url) as opencode:
        with pytest.raises(kind):
            await opencode.events(bytearray().extend)


NAMES = st.from_regex(r"[A-Za-z0-9_.~-]{1,12}", fullmatch=True)


@given(
    root=st.sampled_from(["/", "C:\\", "d:/", "\\\\host\\", "file:///"]),
    names=st.lists(NAMES, min_size=1, max_size=5),
    before=st.sampled_from(["", "no such file: ", "(", "at\n", "'", '"']),
)
def test_no_absolute_path_survives_masking(root: str, names: list[str], before: str) -> None:
    separator = "\\" if "\\" in root else "/"
    path = root + separator.join(names)

    assert mask_paths(f"{before}{path}, sorry") in {
        f"{before}<path>, sorry",
        f"{before}<path>",
    }


@pytest.mark.parametrize(
    "text",
    [
        "see https://example.org/a/b?c=d",
        "http://127.0.0.1:4096/session failed",
        "either/or, 1/2, a / b",
        "Model not found: fake/no.",
        "Expected once | always",
    ],
)
def test_urls_and_ordinary_slashes_survive_masking(text: str) -> None:
    assert mask_paths(text) == text
