"""``opencode.sessions.*`` against a real OpenCode."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from structlog.testing import capture_logs

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions import EXTENSIONS
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.managed import USERNAME
from opencode_a2a.opencode.types import SessionDraft
from tests.support.answers import Task
from tests.support.backstage import Backstage, past_service, script
from tests.support.caller import Caller
from tests.support.service import Running, serving, settings_for

pytestmark = pytest.mark.live

ANN, BOB = "ann-" + "a" * 28, "bob-" + "b" * 28
CREDENTIALS = orjson.dumps(
    [
        {
            "scheme": "bearer",
            "principal": "ann",
            "token": ANN,
            "credential_id": "ann-1",
            "capabilities": ["session_shell", "workspace_mutation"],
        },
        {"scheme": "bearer", "principal": "bob", "token": BOB, "credential_id": "bob-1"},
    ]
).decode()
PNG = base64.b64encode(
    base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
        "rkJggg=="
    )
).decode()


@pytest.fixture
def backstage(tracking_backstage: Backstage) -> Backstage:
    return tracking_backstage


@pytest.fixture
async def shared(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Running]:
    """A service with two callers, and everything switched on."""
    settings = settings_for(
        backstage,
        tmp_path,
        A2A_STATIC_AUTH_CREDENTIALS=CREDENTIALS,
        A2A_ENABLE_SESSION_SHELL="true",
        A2A_ENABLE_WORKSPACE_MUTATIONS="true",
    )
    async with serving(settings) as running:
        yield running


@pytest.fixture
def ann(shared: Running) -> Caller:
    return Caller(shared, token=ANN)


@pytest.fixture
def bob(shared: Running) -> Caller:
    return Caller(shared, token=BOB)


async def make(caller: Caller, title: str = "A session") -> str:
    made = await caller.method("opencode.sessions.create", {"request": {"title": title}})
    return made["item"]["id"]


async def note(caller: Caller, session_id: str, *parts: Json, **fields: Json) -> None:
    """Put a message into a session without asking a model."""
    request: JsonObject = {"parts": [*parts], "noReply": True, **fields}
    params: JsonObject = {"session_id": session_id, "request": request}
    await caller.method("opencode.sessions.prompt_async", params)


def ids(result: Any) -> list[str]:
    return [item["id"] for item in result["items"]]


def item(result: Any) -> Any:
    return result["item"]


async def test_a_session_is_a_completed_task_in_the_spelling_of_the_line(ann: Caller) -> None:
    session_id = await make(ann, "Spelled")

    modern = item(await ann.method("opencode.sessions.get", {"session_id": session_id}))
    old = item(await ann.method("opencode.sessions.get", {"session_id": session_id}, "0.3"))

    assert modern["id"] == old["id"] == session_id
    assert modern["contextId"] == old["contextId"] == f"ctx:opencode-session:{session_id}"
    assert modern["status"]["state"] == "TASK_STATE_COMPLETED"
    assert (old["kind"], old["status"]["state"]) == ("task", "completed")
    assert modern["metadata"]["shared"] == {"session": {"id": session_id, "title": "Spelled"}}
    assert isinstance(modern["metadata"]["opencode"]["created"], int)


async def test_lists_have_a_limit_and_filters(ann: Caller) -> None:
    first, second = await make(ann, "needle one"), await make(ann, "needle two")

    listed = await ann.method("opencode.sessions.list", {"search": "needle"})
    newest = await ann.method("opencode.sessions.list", {"search": "needle", "limit": "1"})
    old = await ann.method(
        "opencode.sessions.list", {"query": {"search": "needle", "limit": 1}, "limit": 1}, "0.3"
    )

    assert ids(listed) == [second, first]
    assert ids(newest) == [second]
    assert ids(old) == [second]
    later = {"search": "needle", "start": 2**52}
    assert await ann.method("opencode.sessions.list", later) == {"items": []}
    roots = await ann.method("opencode.sessions.list", {"search": "needle", "roots": "true"})
    assert ids(roots) == [second, first]


@pytest.mark.parametrize(
    ("params", "reason", "fields"),
    [
        ({"limit": 0}, "INVALID_FIELD", ("limit",)),
        ({"limit": 101}, "INVALID_FIELD", ("limit",)),
        ({"limit": True}, "INVALID_FIELD", ("limit",)),
        ({"limit": "many"}, "INVALID_FIELD", ("limit",)),
        ({"start": -1}, "INVALID_FIELD", ("start",)),
        ({"roots": "perhaps"}, "INVALID_FIELD", ("roots",)),
        ({"search": "x" * 257}, "INVALID_FIELD", ("search",)),
        ({"zebra": 1, "apple": 2}, "INVALID_FIELD", ("zebra", "apple")),
        ({"query": {"limit": 1}}, "INVALID_FIELD", ("query",)),
        ({"cursor": "x"}, "INVALID_PAGINATION_MODE", ("cursor",)),
        ({"page": 2, "size": 5}, "INVALID_PAGINATION_MODE", ("page", "size")),
        ({"directory": "/etc"}, "INVALID_FIELD", ("directory",)),
        ({"directory": 5}, "INVALID_FIELD", ("directory",)),
        ({"metadata": {"directory": "x"}}, "INVALID_FIELD", ("metadata.directory",)),
        (
            {"metadata": {"opencode": {"directory": "../.."}}},
            "INVALID_FIELD",
            ("metadata.opencode.directory",),
        ),
        (
            {"metadata": {"opencode": {"workspace": {"id": "../config"}}}},
            "INVALID_FIELD",
            ("metadata.opencode.workspace.id",),
        ),
    ],
)
async def test_wrong_params_of_a_list_are_named(
    ann: Caller, params: JsonObject, reason: str, fields: tuple[str, ...]
) -> None:
    refused = await ann.refused("opencode.sessions.list", params)

    assert (refused.code, refused.reason, refused.fields) == (-32602, reason, fields)


async def test_the_0_3_line_names_wrong_fields_in_its_data(ann: Caller) -> None:
    missing = await ann.answer("opencode.sessions.get", {}, "0.3")
    large = await ann.answer("opencode.sessions.list", {"limit": 500, "b": 1, "a": 1}, "0.3")
    mixed = await ann.answer("opencode.sessions.list", {"query": {"limit": 1}, "limit": 2}, "0.3")

    assert missing["error"]["data"]["type"] == "MISSING_FIELD"
    assert missing["error"]["data"]["field"] == "session_id"
    assert large["error"]["data"]["type"] == "INVALID_FIELD"
    assert large["error"]["data"]["fields"] == ["a", "b", "limit"]
    assert large["error"]["data"]["max"] == 100
    assert mixed["error"]["data"]["field"] == "limit"


@pytest.mark.parametrize(
    "hostile",
    [
        "{}?x=",
        "x/../{}",
        "../config",
        "./{}",
        "{}%2F..%2Fconfig",
        "ses_1%2f..%2f{}",
        "{}/share",
        ".",
    ],
)
@pytest.mark.parametrize(
    "method",
    [
        "opencode.sessions.get",
        "opencode.sessions.children",
        "opencode.sessions.todo",
        "opencode.sessions.diff",
        "opencode.sessions.messages.list",
        "opencode.sessions.unshare",
        "opencode.sessions.abort",
        "opencode.sessions.delete",
    ],
)
async def test_no_id_reaches_another_endpoint(ann: Caller, hostile: str, method: str) -> None:
    session_id = await make(ann)

    refused = await ann.refused(method, {"session_id": hostile.format(session_id)})

    assert (refused.code, refused.reason) == (-31001, "SESSION_NOT_FOUND")
    await ann.method("opencode.sessions.get", {"session_id": session_id})


async def test_ids_of_messages_and_parts_have_to_look_like_some(ann: Caller) -> None:
    session_id = await make(ann)

    for hostile in ("../config", "msg_1?x=", "msg_1%2f.."):
        for method in ("opencode.sessions.messages.get", "opencode.sessions.diff"):
            params: JsonObject = {"session_id": session_id, "message_id": hostile}
            refused = await ann.refused(method, params)
            assert (refused.reason, refused.fields) == ("INVALID_FIELD", ("message_id",))
        params = {"session_id": session_id, "request": {"messageID": hostile}}
        for method in ("opencode.sessions.revert", "opencode.sessions.fork"):
            refused = await ann.refused(method, params)
            assert refused.fields == ("request.messageID",)


SESSION_METHODS: dict[str, JsonObject] = {
    name: {field: value for field, value in method.example.items() if field != "session_id"}
    for extension in EXTENSIONS
    for name, method in extension.methods.items()
    if "session_id" in method.params.model_fields
}
"""Every method that names a session, with what its example says besides."""
NOT_IN_2 = {f"opencode.sessions.{name}" for name in ("todo", "share", "unshare")}


async def test_a_session_of_another_caller_does_not_exist(ann: Caller, bob: Caller) -> None:
    theirs = await make(bob, "secret needle")
    served = (await ann.answer("opencode.none", {}, "0.3"))["error"]["data"]["supported_methods"]
    assert SESSION_METHODS.keys() - {*served} <= NOT_IN_2

    for method, params in SESSION_METHODS.items():
        if method not in served:
            continue
        told = await ann.refused(method, {"session_id": theirs, **params})
        missing = await ann.refused(method, {"session_id": "ses_none", **params})
        assert (told.code, told.reason) == (missing.code, missing.reason), method
        assert (told.code, told.data) == (-31001, {"sessionId": theirs}), method

    assert await ann.method("opencode.sessions.list", {"search": "secret needle"}) == {"items": []}
    parent: JsonObject = {"request": {"parentID": theirs}}
    assert (await ann.refused("opencode.sessions.create", parent)).code == -31001
    kept = item(await bob.method("opencode.sessions.get", {"session_id": theirs}))
    assert kept["metadata"]["shared"]["session"]["title"] == "secret needle"


async def test_a_sub_agents_session_belongs_to_its_parents_owner(ann: Caller, bob: Caller) -> None:
    parent = await make(bob)
    request: JsonObject = {"request": {"parentID": parent, "title": "child needle"}}
    child = item(await bob.method("opencode.sessions.create", request))["id"]

    children = await bob.method("opencode.sessions.children", {"session_id": parent})

    assert ids(children) == [child]
    assert (
        item(await bob.method("opencode.sessions.get", {"session_id": child}))["metadata"][
            "opencode"
        ]["parent_id"]
        == parent
    )
    assert (await ann.refused("opencode.sessions.get", {"session_id": child})).code == -31001


async def test_a_session_of_nobody_becomes_the_callers_by_a_change(
    ann: Caller, bob: Caller, backstage: Backstage
) -> None:
    async with past_service(backstage.url, backstage.password) as opencode:
        at = Location(directory=str(backstage.workspace))
        nobodys = (await opencode.create_session(SessionDraft(title="Nobody's"), at=at)).id

    await bob.method("opencode.sessions.get", {"session_id": nobodys})
    await ann.method(
        "opencode.sessions.update", {"session_id": nobodys, "request": {"title": "Ann's"}}
    )

    assert (await bob.refused("opencode.sessions.get", {"session_id": nobodys})).code == -31001
    await ann.method("opencode.sessions.get", {"session_id": nobodys})


async def test_whoever_has_a_session_has_what_it_would_be_deleted_with(
    ann: Caller, bob: Caller, backstage: Backstage
) -> None:
    """OpenCode deletes the sessions of sub-agents together with their parent."""
    async with past_service(backstage.url, backstage.password) as opencode:
        at = Location(directory=str(backstage.workspace))
        parents = [(await opencode.create_session(SessionDraft(), at=at)).id for _ in range(3)]
        children = [
            (await opencode.create_session(SessionDraft(parent_id=parent), at=at)).id
            for parent in parents[:2]
        ]

    change: JsonObject = {"session_id": children[0], "request": {"title": "Bob's"}}
    await bob.method("opencode.sessions.update", change)
    named = {"shared": {"session": {"id": children[1]}}}
    await bob.send(script({"say": "here"}), metadata=named)
    await bob.method("opencode.sessions.create", {"request": {"parentID": parents[2]}})

    for parent in parents:
        refused = await ann.refused("opencode.sessions.delete", {"session_id": parent})
        assert refused.reason == "SESSION_NOT_FOUND"
        await bob.method("opencode.sessions.get", {"session_id": parent})


async def test_messages_keep_files_and_tools_and_are_paged(ann: Caller) -> None:
    session_id = await make(ann)
    await note(ann, session_id, {"type": "text", "text": "first"})
    image: JsonObject = {"type": "file", "mime": "image/png", "url": f"data:image/png;base64,{PNG}"}
    await note(ann, session_id, {"type": "text", "text": "second"}, {**image, "filename": "a.png"})
    shell: JsonObject = {"command": "echo hi", "agent": "build"}
    await ann.method("opencode.sessions.shell", {"session_id": session_id, "request": shell})

    whole = await ann.method("opencode.sessions.messages.list", {"session_id": session_id})
    page = await ann.method(
        "opencode.sessions.messages.list", {"session_id": session_id, "limit": 1}
    )
    before: JsonObject = {"session_id": session_id, "limit": 1, "before": page["next_cursor"]}
    earlier = await ann.method("opencode.sessions.messages.list", before)

    messages = whole["items"]
    assert whole["next_cursor"] is None
    assert [m["role"] for m in messages] == ["ROLE_USER"] * 3 + ["ROLE_AGENT"]
    assert messages[0]["parts"] == [{"text": "first"}]
    assert messages[1]["parts"] == [
        {"text": "second"},
        {"raw": PNG, "mediaType": "image/png", "filename": "a.png"},
    ]
    call = messages[3]["parts"][0]["data"]
    assert (call["tool"], call["status"], call["output"]) == ("bash", "completed", "hi\n")
    assert page["items"] == messages[-1:]
    assert earlier["items"] == messages[-2:-1]
    named: JsonObject = {"session_id": session_id, "message_id": messages[0]["messageId"]}
    assert item(await ann.method("opencode.sessions.messages.get", named)) == messages[0]
    old = item(await ann.method("opencode.sessions.messages.get", named, "0.3"))
    assert (old["kind"], old["role"], old["parts"][0]["kind"]) == ("message", "user", "text")
    lost = {"session_id": session_id, "message_id": "msg_none"}
    refused = await ann.refused("opencode.sessions.messages.get", lost)
    assert (refused.code, refused.data["upstreamStatus"]) == (-31003, "404")
    junk: JsonObject = {"session_id": session_id, "before": "junk"}
    assert (await ann.refused("opencode.sessions.messages.list", junk)).fields == ("before",)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        ({}, ("request.parts",)),
        ({"parts": []}, ("request.parts",)),
        ({"parts": [{"type": "text"}]}, ("request.parts[0].text",)),
        ({"parts": [{"type": "nope"}]}, ("request.parts[0].type",)),
        ({"parts": [{"type": "agent"}]}, ("request.parts[0].name",)),
        (
            {"parts": [{"type": "subtask", "prompt": "p"}]},
            ("request.parts[0].description", "request.parts[0].agent"),
        ),
        ({"parts": [{"type": "text", "text": "x"}], "extra": 1}, ("request.extra",)),
        ({"parts": [{"type": "text", "text": "x"}], "messageID": "x"}, ("request.messageID",)),
        (
            {"parts": [{"type": "text", "text": "x"}], "model": {"providerID": "demo"}},
            ("request.model.modelID",),
        ),
        # OpenCode would take them, and neither run anything nor say why.
        ({"parts": [{"type": "text", "text": "x"}], "agent": "nobody"}, ("request.agent",)),
        (
            {
                "parts": [{"type": "text", "text": "x"}],
                "model": {"providerID": "demo", "modelID": "none"},
            },
            ("request.model",),
        ),
        (
            {"parts": [{"type": "text", "text": "x"}], "tools": {"bash": "no"}},
            ("request.tools.bash",),
        ),
        ({"parts": [{"type": "text", "text": "x"}], "noReply": "yes"}, ("request.noReply",)),
        (
            {"parts": [{"type": "text", "text": "x"}], "format": {"type": "xml"}},
            ("request.format.type",),
        ),
        (
            {"parts": [{"type": "text", "text": "x"}], "format": {"type": "json_schema"}},
            ("request.format",),
        ),
        (
            {
                "parts": [
                    {"type": "file", "mime": "text/plain", "url": "file:///etc/passwd"},
                    {"type": "text", "text": "x"},
                    {"type": "file", "mime": "text/plain", "url": "http://127.0.0.1:9/x"},
                    {"type": "file", "mime": "application/zip", "url": "data:application/zip,PK"},
                ]
            },
            ("request.parts[0].url", "request.parts[2].url", "request.parts[3].url"),
        ),
        (
            {"parts": [{"type": "file", "mime": "image/png", "url": "data:image/png;base64,aGk="}]},
            ("request.parts[0].url",),
        ),
    ],
)
async def test_a_prompt_is_checked_before_it_is_sent(
    ann: Caller, request_: JsonObject, fields: tuple[str, ...]
) -> None:
    session_id = await make(ann)

    refused = await ann.refused(
        "opencode.sessions.prompt_async", {"session_id": session_id, "request": request_}
    )

    assert (refused.code, refused.fields) == (-32602, fields)
    told = await ann.method("opencode.sessions.messages.list", {"session_id": session_id})
    assert told["items"] == []


async def test_a_prompt_runs_and_can_be_aborted(ann: Caller, backstage: Backstage) -> None:
    session_id = await make(ann)
    prompt = script({"say": "half "}, {"gate": "abort-me"}, {"say": "whole"})
    parts: list[Json] = [{"type": "text", "text": prompt}]
    await ann.method(
        "opencode.sessions.prompt_async", {"session_id": session_id, "request": {"parts": parts}}
    )
    async with asyncio.timeout(60):
        await backstage.reached("abort-me")

    busy = await ann.method("opencode.sessions.status")
    done = await ann.method("opencode.sessions.abort", {"session_id": session_id})
    idle = await ann.method("opencode.sessions.status")

    assert {"session_id": session_id, "type": "busy"} in busy["items"]
    assert done == {"ok": True, "session_id": session_id}
    assert session_id not in [one["session_id"] for one in idle["items"]]


async def test_work_in_a_session_with_a_running_task_is_refused_until_it_is_stopped(
    ann: Caller, backstage: Backstage
) -> None:
    session_id = await make(ann)
    prompt = script({"say": "half "}, {"gate": "busy-task"}, {"say": "whole"})
    task = await ann.send(
        prompt,
        metadata={"shared": {"session": {"id": session_id}}},
        blocking=False,
    )
    async with asyncio.timeout(60):
        await backstage.reached("busy-task")

    for method in ("command", "shell", "summarize", "unrevert"):
        name = f"opencode.sessions.{method}"
        refused = await ann.refused(name, {"session_id": session_id, **SESSION_METHODS[name]})
        assert (refused.code, refused.reason) == (-31006, "SESSION_BUSY"), method
        assert refused.data["sessionId"] == session_id
    await ann.method("opencode.sessions.delete", {"session_id": session_id})

    ended = await ann.method("GetTask", {"id": task.id})
    assert ended["status"]["state"] == "TASK_STATE_CANCELED"
    gone = await ann.refused("opencode.sessions.get", {"session_id": session_id})
    assert gone.reason == "SESSION_NOT_FOUND"


async def test_work_in_a_session_with_a_running_prompt_is_refused_until_it_has_ended(
    ann: Caller, backstage: Backstage, gate: str
) -> None:
    session_id = await make(ann)
    named: JsonObject = {"session_id": session_id}
    prompt = script({"say": "half "}, {"gate": gate}, {"say": "whole"})
    parts: JsonObject = {"request": {"parts": [{"type": "text", "text": prompt}]}}
    await ann.method("opencode.sessions.prompt_async", named | parts)
    await backstage.reached(gate)

    for method in ("command", "shell", "summarize"):
        name = f"opencode.sessions.{method}"
        async with asyncio.timeout(30):
            refused = await ann.refused(name, named | SESSION_METHODS[name])
        assert (refused.code, refused.reason) == (-31006, "SESSION_BUSY"), method
    await backstage.open(gate)
    async with asyncio.timeout(60):
        while session_id in str(await ann.method("opencode.sessions.status")):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.1)

    messages = (await ann.method("opencode.sessions.messages.list", named))["items"]
    assert [one["parts"][0]["text"] for one in messages] == [prompt, "half whole"]


async def test_work_in_a_session_may_follow_the_text_of_an_answer_at_once(ann: Caller) -> None:
    named: JsonObject = {"session_id": await make(ann)}
    parts: JsonObject = {"request": {"parts": [{"type": "text", "text": script({"say": "whole"})}]}}

    await ann.method("opencode.sessions.prompt_async", named | parts)
    async with asyncio.timeout(60):
        while "'whole'" not in str(await ann.method("opencode.sessions.messages.list", named)):
            pass  # OpenCode is still busy when the text is there

    assert (await ann.method("opencode.sessions.summarize", named))["ok"]


async def test_a_prompt_joins_a_running_task(
    shared: Running, ann: Caller, backstage: Backstage
) -> None:
    session_id = await make(ann)
    named: JsonObject = {"session_id": session_id}
    prompt = script({"say": "half "}, {"gate": "join-task"}, {"say": "whole"})
    task = await ann.send(
        prompt,
        metadata={"shared": {"session": {"id": session_id}}},
        blocking=False,
    )
    await backstage.reached("join-task")

    await note(ann, session_id, {"type": "text", "text": script({"say": "and more"})})
    await backstage.open("join-task")
    ended = await Caller(shared, token=ANN).ended(task.id)

    assert ended.state == "completed"
    messages = (await ann.method("opencode.sessions.messages.list", named))["items"]
    said = [part["text"] for message in messages for part in message["parts"] if "text" in part]
    assert "half whole" in said
    assert script({"say": "and more"}) in said


async def test_a_prompt_keeps_opencodes_optional_fields(ann: Caller, backstage: Backstage) -> None:
    session_id = await make(ann)
    mention: JsonObject = {"value": "@a.txt", "start": 0, "end": 6}
    source: JsonObject = {"type": "file", "path": "/etc/passwd", "text": mention}
    file: JsonObject = {"type": "file", "mime": "text/plain", "url": "data:text/plain;base64,aGk="}
    parts: list[JsonObject] = [
        {"type": "text", "text": "seen"},
        {"type": "text", "text": "hidden", "synthetic": True, "metadata": {"a": [None], "b": None}},
        {"type": "agent", "name": "general", "source": {**mention, "value": "@gener"}},
        {"type": "subtask", "prompt": "p", "description": "d", "agent": "general"},
        {**file, "filename": "a.txt", "source": source},
    ]
    names = [f"prt_{letter}" for letter in "VWXYZ"]
    named: list[Json] = [{**part, "id": n} for part, n in zip(parts, names, strict=True)]
    request: JsonObject = {"parts": named, "noReply": True, "messageID": "msg_mine"}
    params: JsonObject = {"session_id": session_id, "request": request}

    first = await ann.method("opencode.sessions.prompt_async", params)
    again = await ann.method("opencode.sessions.prompt_async", params)

    assert again == first
    raw = await stored(backstage, session_id)
    where: JsonObject = {"sessionID": session_id, "messageID": first["message_id"]}
    # What OpenCode adds has ids of its own, which begin with the time.
    kept = [part for part in raw[0]["parts"] if part["id"][:5] in names]
    assert [message["info"]["id"] for message in raw] == [first["message_id"]]
    assert [{**part, "id": ""} for part in kept] == [{**part, **where, "id": ""} for part in parts]
    assert "root:" not in str(raw)
    messages = await ann.method("opencode.sessions.messages.list", {"session_id": session_id})
    data = [part["data"] for part in messages["items"][0]["parts"] if "data" in part]
    assert data == [
        {"type": "agent", "name": "general"},
        {"type": "subtask", "prompt": "p", "description": "d", "agent": "general"},
    ]


async def test_a_prompt_cannot_change_a_message_of_another_session(
    ann: Caller, bob: Caller, backstage: Backstage
) -> None:
    """OpenCode stores a message or part over the one that has its id, in any session."""
    theirs, mine = await make(bob), await make(ann)
    await note(bob, theirs, {"type": "text", "text": "Bob's own words"})
    before = await stored(backstage, theirs)
    message_id, part_id = before[0]["info"]["id"], before[0]["parts"][0]["id"]
    text: JsonObject = {"type": "text", "text": "something else"}
    command: JsonObject = {"command": "review", "arguments": script({"say": "seen"})}

    await note(ann, mine, text, messageID=message_id)
    await note(ann, mine, {**text, "id": part_id})
    await ann.method(
        "opencode.sessions.command",
        {"session_id": mine, "request": {**command, "messageID": message_id}},
    )

    assert await stored(backstage, theirs) == before
    await note(bob, theirs, {"type": "text", "text": "more of it"}, messageID=message_id)
    (after,) = await stored(backstage, theirs)
    assert [part["text"] for part in after["parts"]] == ["Bob's own words", "more of it"]


async def stored(backstage: Backstage, session_id: str) -> Any:
    """Return the messages of a session exactly as OpenCode has them."""
    async with httpx2.AsyncClient(auth=(USERNAME, backstage.password), trust_env=False) as http:
        return (await http.get(f"{backstage.url}/session/{session_id}/message")).json()


NO_MODEL: JsonObject = {"providerID": "demo", "modelID": "none"}
SUBTASK: JsonObject = {"type": "subtask", "prompt": "x", "description": "x", "agent": "general"}


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("create", {"agent": "none"}, "agent"),
        ("create", {"model": NO_MODEL}, "model"),
        ("prompt_async", {"agent": "none"}, "agent"),
        ("prompt_async", {"model": NO_MODEL}, "model"),
        ("prompt_async", {"model": {"providerID": "none", "modelID": "demo"}}, "model"),
        ("prompt_async", {"parts": [SUBTASK | {"agent": "none"}]}, "parts[0].agent"),
        ("prompt_async", {"parts": [SUBTASK | {"model": NO_MODEL}]}, "parts[0].model"),
        ("command", {"command": "init", "agent": "none"}, "agent"),
        ("command", {"command": "init", "model": NO_MODEL}, "model"),
        ("shell", {"agent": "none"}, "agent"),
        ("shell", {"model": NO_MODEL}, "model"),
        ("summarize", NO_MODEL, "modelID"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_agent_or_a_model_that_opencode_does_not_have_is_refused(
    ann: Caller, method: str, request_: JsonObject, field: str
) -> None:
    name, session_id = f"opencode.sessions.{method}", await make(ann)
    example: Any = SESSION_METHODS.get(name, {}).get("request", {})
    named: JsonObject = {} if method == "create" else {"session_id": session_id}

    refused = await ann.refused(name, named | {"request": example | request_})

    messages = await ann.method("opencode.sessions.messages.list", {"session_id": session_id})
    assert (refused.code, refused.fields) == (-32602, (f"request.{field}",))
    assert messages["items"] == []


async def test_changes_of_others_are_not_told_as_those_of_a_turn_that_made_none(
    ann: Caller, bob: Caller, backstage: Backstage, gate: str
) -> None:
    file = backstage.workspace / "of-bob.txt"
    file.write_text("one\n")
    edit = {"filePath": str(file), "oldString": "one", "newString": "two"}
    read = {"tool": "read", "input": {"filePath": str(file)}}
    command = {"tool": "bash", "input": {"command": "echo ran", "description": "Say it"}}
    asking = {"opencode": {"profile": "ask"}}

    talks = await ann.begin(script({"say": "before "}, {"gate": gate}, {"say": "after"}))
    await backstage.reached(gate)
    asks = await ann.send(script(command, {"say": "done"}), metadata=asking)
    edits = await bob.send(script([read], [{"tool": "edit", "input": edit}], [{"say": "done"}]))
    await backstage.open(gate)
    refused = await ann.send("no", task=asks.id)
    talked = await ann.ended(talks.id)

    assert (talked.state, refused.state, file.read_text()) == ("completed", "rejected", "two\n")
    assert (talked.diff, refused.diff) == (None, None)
    for task in (talked, refused):
        named: JsonObject = {"session_id": task.session_id}
        messages = (await ann.method("opencode.sessions.messages.list", named))["items"]
        for which in ({}, {"message_id": messages[0]["messageId"]}):
            assert await ann.method("opencode.sessions.diff", named | which) == {"items": []}
    told = await bob.method("opencode.sessions.diff", {"session_id": edits.session_id})
    assert [one["file"] for one in told["items"]] == ["of-bob.txt"]
    file.unlink()


async def test_plan_diff_and_revert_tell_what_a_turn_did(ann: Caller, backstage: Backstage) -> None:
    todos: list[Json] = [{"content": "one", "status": "pending", "priority": "high"}]
    task = await ann.send(
        script(
            {"tool": "todowrite", "input": {"todos": todos}},
            {"tool": "write", "input": {"filePath": "made.txt", "content": "made\n"}},
            {"say": "done"},
        )
    )
    session_id = task.session_id
    named: JsonObject = {"session_id": session_id}

    plan = await ann.method("opencode.sessions.todo", named)
    diff = await ann.method("opencode.sessions.diff", named)
    messages = (await ann.method("opencode.sessions.messages.list", named))["items"]
    user = messages[0]["messageId"]
    same = await ann.method("opencode.sessions.diff", {**named, "message_id": user})
    request: JsonObject = {**named, "request": {"messageID": user}}
    reverted = item(await ann.method("opencode.sessions.revert", request))

    planned = {"id": "1", "content": "one", "status": "pending", "priority": "high"}
    assert plan["items"] == [planned]
    assert diff["items"][0]["file"] == "made.txt"
    assert (diff["items"][0]["status"], diff["items"][0]["additions"]) == ("added", 1)
    assert "+made" in diff["items"][0]["patch"]
    assert same == diff
    assert reverted["revert"]["message_id"] == user
    assert not (backstage.workspace / "made.txt").exists()
    restored = item(await ann.method("opencode.sessions.unrevert", named))
    assert "revert" not in restored
    assert (backstage.workspace / "made.txt").read_text() == "made\n"
    (backstage.workspace / "made.txt").unlink()
    lost: JsonObject = {**named, "request": {"messageID": "msg_none"}}
    assert (await ann.refused("opencode.sessions.revert", lost)).data["upstreamStatus"] == "404"


async def test_sessions_are_made_changed_copied_and_deleted(ann: Caller, bob: Caller) -> None:
    session_id = await make(ann, "Before")
    named: JsonObject = {"session_id": session_id}

    changed = item(
        await ann.method("opencode.sessions.update", {**named, "request": {"title": "After"}})
    )
    copy = item(await ann.method("opencode.sessions.fork", named))

    assert (changed["id"], changed["title"]) == (session_id, "After")
    assert copy["id"] != session_id
    assert (await bob.refused("opencode.sessions.get", {"session_id": copy["id"]})).code == -31001
    nothing: JsonObject = {**named, "request": {}}
    assert (await ann.refused("opencode.sessions.update", nothing)).fields == ("request",)
    assert await ann.method("opencode.sessions.delete", named) == {"ok": True, **named}
    assert (await ann.refused("opencode.sessions.delete", named)).reason == "SESSION_NOT_FOUND"


async def test_a_session_is_archived_and_no_longer_shared(ann: Caller) -> None:
    named: JsonObject = {"session_id": await make(ann)}

    await ann.method("opencode.sessions.update", {**named, "request": {"archived": True}})
    unshared = item(await ann.method("opencode.sessions.unshare", named))
    share = await ann.refused("opencode.sessions.share", named)

    assert "share_url" not in unshared
    assert (share.code, share.data["method"]) == (-31003, "opencode.sessions.share")


async def test_a_command_and_a_summary_are_run_by_the_model(ann: Caller) -> None:
    session_id = await make(ann)
    named: JsonObject = {"session_id": session_id}
    request: JsonObject = {"command": "init", "arguments": script({"say": "initialised"})}

    answer = item(await ann.method("opencode.sessions.command", {**named, "request": request}))
    before = await ann.method("opencode.budget.get")
    summary = await ann.method("opencode.sessions.summarize", named)
    async with asyncio.timeout(60):
        while (after := await ann.method("opencode.budget.get"))["running"]:
            pass

    assert before["running"] <= 1  # the command, for as long as it is not known to be done
    assert after["cost"] > before["cost"]
    assert answer["role"] == "ROLE_AGENT"
    assert [part["text"] for part in answer["parts"]] == ["initialised"]
    assert summary == {"ok": True, **named}
    unknown: JsonObject = {**named, "request": {"command": "nope", "arguments": ""}}
    refused = await ann.refused("opencode.sessions.command", unknown)
    assert refused.fields == ("request.command",)
    half: JsonObject = {**named, "request": {"providerID": "demo"}}
    assert (await ann.refused("opencode.sessions.summarize", half)).fields == ("request",)


async def test_the_shell_needs_a_capability_and_leaves_an_audit_record(
    ann: Caller, bob: Caller
) -> None:
    mine, theirs = await make(ann), await make(bob)
    request: JsonObject = {"command": "echo hi", "agent": "build"}

    with capture_logs() as logs:
        await ann.method("opencode.sessions.shell", {"session_id": mine, "request": request})
        refused = await bob.refused(
            "opencode.sessions.shell", {"session_id": theirs, "request": request}
        )
        await ann.refused("opencode.sessions.shell", {"session_id": theirs, "request": request})

    assert (refused.code, refused.data) == (
        -31007,
        {
            "method": "opencode.sessions.shell",
            "capability": "session_shell",
            "credentialId": "bob-1",
        },
    )
    records = [entry for entry in logs if entry["event"] == "session_shell_audit"]
    assert [(r["identity"], r["session_id"], r["outcome"]) for r in records] == [
        ("ann", mine, "success"),
        ("bob", theirs, "authorization_forbidden"),
        ("ann", theirs, "upstream_404"),
    ]
    assert records[0]["context_id"] == f"ctx:opencode-session:{mine}"


@pytest.mark.parametrize(
    ("variables", "disabled"),
    [
        ({}, "disabled_by_configuration"),
        (
            {"A2A_ENABLE_SESSION_SHELL": "true", "A2A_SANDBOX_MODE": "read-only"},
            "disabled_by_policy",
        ),
        (
            {"A2A_ENABLE_SESSION_SHELL": "true", "A2A_WRITE_ACCESS_SCOPE": "none"},
            "disabled_by_policy",
        ),
    ],
)
async def test_a_switched_off_method_says_so_and_lists_what_there_is(
    backstage: Backstage, tmp_path: Path, variables: dict[str, str], disabled: str
) -> None:
    async with serving(settings_for(backstage, tmp_path, **variables)) as running:
        answer = await Caller(running).answer("opencode.sessions.shell", {}, "0.3")

    error = answer["error"]
    assert (error["code"], error["data"]["type"]) == (-32601, "METHOD_NOT_SUPPORTED")
    assert error["data"]["conditional"] is True
    assert error["data"]["toggle"] == "A2A_ENABLE_SESSION_SHELL"
    assert error["data"]["disabled"] == disabled
    assert "opencode.sessions.list" in error["data"]["supported_methods"]
    assert "opencode.sessions.shell" not in error["data"]["supported_methods"]


async def test_a_call_without_id_is_executed_and_answered_with_nothing(
    shared: Running, ann: Caller
) -> None:
    session_id = await make(ann)
    body = {
        "jsonrpc": "2.0",
        "method": "opencode.sessions.update",
        "params": {"session_id": session_id, "request": {"title": "told in passing"}},
    }

    answer = await shared.http.post("/", json=body, headers=ann.headers)

    assert (answer.status_code, answer.content) == (204, b"")
    told = item(await ann.method("opencode.sessions.get", {"session_id": session_id}))
    assert told["metadata"]["shared"]["session"]["title"] == "told in passing"


async def test_a_listed_context_continues_its_session(ann: Caller) -> None:
    session_id = await make(ann)

    sent = await ann.method(
        "SendMessage",
        {
            "message": {
                "messageId": "continue",
                "role": "ROLE_USER",
                "contextId": f"ctx:opencode-session:{session_id}",
                "parts": [{"text": script({"say": "here"})}],
            }
        },
    )

    assert Task(sent["task"]).session_id == session_id
