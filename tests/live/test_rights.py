"""Profiles: what the agent may do for a caller, checked on disk with a real OpenCode."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import orjson
import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.types import Prompt, TextInput, TextPart
from tests.conftest import UNTRACKED, Stages
from tests.live.conftest import ECHO
from tests.support.backstage import Backstage, on_disk, past_service, script
from tests.support.caller import PATIENCE, Caller
from tests.support.service import Running, serving, settings_for

pytestmark = pytest.mark.live

ASK: JsonObject = {"profile": "ask"}
TOKENS = {
    name: f"{name}-" + "x" * 28 for name in ("auto", "read-only", "ask", "unattended", "other")
}
CREDENTIALS: list[JsonObject] = [
    {
        "scheme": "bearer",
        "principal": "other" if name == "other" else "ann",  # one person, several credentials
        "token": token,
        "credential_id": name,
        "capabilities": ["session_shell", "workspace_mutation"],
        **({} if name == "other" else {"profile": name}),
    }
    for name, token in TOKENS.items()
]


@pytest.fixture(scope="module")
def free(stages: Stages) -> Generator[Backstage]:
    """An OpenCode that does everything unasked, but for what looks like a removal."""
    config: JsonObject = {
        "permission": {"bash": {"*": "allow", "rm *": "deny", "echo *": "ask"}},
        "mcp": {"echo": {"type": "local", "command": [sys.executable, ECHO]}},
        "command": {
            "note": {"template": "Note: $ARGUMENTS"},
            "show": {"template": "Show !`cat $1`"},
        },
        **UNTRACKED,
    }
    with stages("free", config) as running:
        yield running


@pytest.fixture
async def service(free: Backstage, tmp_path: Path) -> AsyncGenerator[Running]:
    settings = settings_for(
        free,
        tmp_path,
        A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(CREDENTIALS).decode(),
        A2A_ENABLE_SESSION_SHELL="true",
        A2A_ENABLE_WORKSPACE_MUTATIONS="true",
        A2A_FETCH_FILES="false",
    )
    async with serving(settings) as running:
        yield running


def calling(service: Running, profile: str) -> Caller:
    return Caller(service, token=TOKENS[profile])


def mischief(workspace: Path, *, resume: str | None = None) -> str:
    """Return a prompt that tries to change the disk in every way that the model has."""
    inner = script(
        [{"tool": "bash", "input": {"command": "touch by-child", "description": "d"}}],
        [{"tool": "write", "input": {"filePath": str(workspace / "by-child"), "content": "x"}}],
        [{"say": "done"}],
    )
    task: dict[str, Any] = {"description": "d", "prompt": inner, "subagent_type": "general"}
    if resume is not None:
        task["task_id"] = resume
    hello = str(workspace / "hello.txt")
    edit = {"filePath": hello, "oldString": "hello", "newString": "bye"}
    return script(
        [{"tool": "bash", "input": {"command": "touch by-bash", "description": "d"}}],
        [{"tool": "read", "input": {"filePath": hello}}],
        [{"tool": "edit", "input": edit}],
        [{"tool": "write", "input": {"filePath": str(workspace / "by-write"), "content": "x"}}],
        [{"tool": "task", "input": task}],
        [{"tool": "echo_say", "input": {"word": "hi"}}],
        [{"say": "tried"}],
    )


def profile(name: str) -> JsonObject:
    return {"opencode": {"profile": name}}


async def new_session(caller: Caller) -> str:
    made = await caller.method("opencode.sessions.create", {"request": {"title": "t"}})
    return made["item"]["id"]


async def idle(free: Backstage, session_id: str) -> None:
    """Wait until what was begun by method has ended."""
    async with asyncio.timeout(PATIENCE), past_service(free.url, free.password) as opencode:
        at = Location(directory=str(free.workspace))
        while True:
            messages = (await opencode.messages(SessionId(session_id), at=at)).items
            busy = session_id in await opencode.session_status(at=at)
            if not busy and any(message.info.role == "assistant" for message in messages):
                return
            await asyncio.sleep(0.1)


# Messages


@pytest.mark.requirement("I23")
@pytest.mark.parametrize("by", ["credential", "message", "deployment"])
async def test_read_only_leaves_the_disk_as_it_is_whatever_the_model_tries(
    free: Backstage, service: Running, tmp_path: Path, by: str
) -> None:
    before = on_disk(free.workspace)
    if by == "deployment":
        settings = settings_for(free, tmp_path / "own", A2A_PROFILE="read-only")
        async with serving(settings) as limited:
            task = await Caller(limited).send(mischief(free.workspace))
    elif by == "message":
        caller = calling(service, "auto")
        task = await caller.send(mischief(free.workspace), metadata=profile("read-only"))
    else:
        caller = calling(service, "read-only")
        task = await caller.send(mischief(free.workspace), metadata=profile("auto"))

    assert (task.state, task.text) == ("completed", "tried")
    assert on_disk(free.workspace) == before


async def test_a_session_follows_the_rights_of_each_message(
    free: Backstage, service: Running
) -> None:
    caller, file = calling(service, "auto"), free.workspace / "turn"
    write = script(
        [{"tool": "write", "input": {"filePath": str(file), "content": "x"}}], [{"say": "done"}]
    )
    child = script(
        [
            {
                "tool": "task",
                "input": {"description": "d", "prompt": write, "subagent_type": "general"},
            }
        ],
        [{"say": "done"}],
    )
    wide = await caller.send(child)
    assert file.exists()
    file.unlink()

    # A sub-agent that was begun with more rights is not taken up again with them.
    sub = await caller.method("opencode.sessions.children", {"session_id": wide.session_id})
    resume = sub["items"][0]["id"]
    before = on_disk(free.workspace)
    narrow = await caller.send(
        mischief(free.workspace, resume=resume),
        context=wide.context_id,
        metadata=profile("read-only"),
    )
    assert (narrow.state, narrow.session_id) == ("completed", wide.session_id)
    assert on_disk(free.workspace) == before

    # Afterwards the context is as free as it was, and so are its sub-agents.
    again = await caller.send(child, context=wide.context_id)
    assert (again.session_id, file.exists()) == (wide.session_id, True)
    file.unlink()


async def test_ask_has_every_change_approved_and_denies_what_the_deployment_denies(
    free: Backstage, service: Running
) -> None:
    caller = calling(service, "ask")
    prompt = script(
        [{"tool": "bash", "input": {"command": "rm hello.txt", "description": "d"}}],
        [{"tool": "bash", "input": {"command": "touch asked", "description": "d"}}],
        [{"say": "done"}],
    )
    asked = await caller.send(prompt)
    assert asked.state == "input_required"
    assert not (free.workspace / "asked").exists()
    assert (free.workspace / "hello.txt").exists()

    done = await caller.send("yes", task=asked.id)
    assert done.state == "completed"
    assert (free.workspace / "asked").exists()
    assert (free.workspace / "hello.txt").exists()
    (free.workspace / "asked").unlink()


@pytest.mark.requirement("I23")
async def test_unattended_never_waits(free: Backstage, service: Running) -> None:
    question = {"question": "Which?", "header": "h", "options": [{"label": "a", "description": ""}]}
    echo = {"command": "echo one > by-echo", "description": "d"}
    inner = script([{"tool": "bash", "input": echo}], [{"say": "x"}])
    prompt = script(
        [{"tool": "bash", "input": echo}, {"tool": "bash", "input": echo}],
        [{"tool": "question", "input": {"questions": [question]}}],
        [
            {
                "tool": "task",
                "input": {"description": "d", "prompt": inner, "subagent_type": "general"},
            }
        ],
        [{"tool": "bash", "input": {"command": "touch free", "description": "d"}}],
        [{"say": "done"}],
    )
    caller = calling(service, "unattended")
    async with caller.stream(prompt) as following:
        await following.rest()

    assert "input_required" not in following.states
    assert (following.task.state, following.task.text) == ("completed", "done")
    assert not (free.workspace / "by-echo").exists()
    (free.workspace / "free").unlink()


async def test_a_credential_cannot_approve_what_it_may_not_do(
    free: Backstage, service: Running
) -> None:
    prompt = script(
        [{"tool": "bash", "input": {"command": "echo one > by-echo", "description": "d"}}],
        [{"say": "done"}],
    )
    asked = await calling(service, "auto").send(prompt)
    assert asked.state == "input_required"

    reader = calling(service, "read-only")
    refused = await reader.refused("SendMessage", reader.message("yes", taskId=asked.id))
    assert refused.reason == "AUTHORIZATION_FORBIDDEN"
    pending = await reader.method("opencode.permissions.list", {})
    request_id = pending["items"][0]["request_id"]
    refused = await reader.refused(
        "a2a.interrupt.permission.reply", {"request_id": request_id, "reply": "once"}
    )
    assert refused.reason == "AUTHORIZATION_FORBIDDEN"
    assert not (free.workspace / "by-echo").exists()

    refused_task = await reader.send("no", task=asked.id)
    assert refused_task.state in ("completed", "rejected")
    assert not (free.workspace / "by-echo").exists()


async def test_a_profile_that_does_not_exist_is_refused(service: Running) -> None:
    caller = calling(service, "auto")
    params = {**caller.message("hello"), "metadata": profile("root")}

    refused = await caller.refused("SendMessage", params)

    assert refused.fields == ("metadata.opencode.profile",)


# Methods


@pytest.mark.requirement("I23")
async def test_methods_leave_the_disk_as_it_is_for_a_reader(
    free: Backstage, service: Running
) -> None:
    reader = calling(service, "read-only")
    session_id = await new_session(calling(service, "auto"))
    before = on_disk(free.workspace)
    shell = {"agent": "build", "command": "touch by-shell"}
    requests: list[tuple[str, Any]] = [
        ("opencode.sessions.shell", shell),
        ("opencode.sessions.command", {"command": "note", "arguments": "x"}),
        ("opencode.sessions.revert", {"messageID": "msg_1deb3fc6b000iKn0wo4MZ7ksDZ"}),
        ("opencode.sessions.unrevert", None),
    ]
    for method, request in requests:
        params = {"session_id": session_id, **({"request": request} if request else {})}
        refused = await reader.refused(method, params)
        assert refused.reason == "AUTHORIZATION_FORBIDDEN", method
    refused = await reader.refused("opencode.worktrees.create", {"request": {"name": "x"}})
    assert refused.reason == "AUTHORIZATION_FORBIDDEN"
    limited = {"session_id": session_id, "request": shell, "metadata": profile("read-only")}
    refused = await calling(service, "auto").refused("opencode.sessions.shell", limited)
    assert refused.reason == "AUTHORIZATION_FORBIDDEN"

    # Tools that are asked for by name allow nothing.
    prompt: JsonObject = {
        "parts": [{"type": "text", "text": mischief(free.workspace)}],
        "tools": {"bash": True, "write": True, "edit": True, "task": True, "*": True},
    }
    await reader.method(
        "opencode.sessions.prompt_async", {"session_id": session_id, "request": prompt}
    )
    await idle(free, session_id)
    assert on_disk(free.workspace) == before


async def test_tools_that_are_named_do_not_get_past_a_permission(
    free: Backstage, service: Running
) -> None:
    caller = calling(service, "auto")
    session_id = await new_session(caller)
    echo = {"command": "echo one > by-echo", "description": "d"}
    request: JsonObject = {
        "parts": [
            {"type": "text", "text": script([{"tool": "bash", "input": echo}], [{"say": "x"}])}
        ],
        "tools": {"bash": True},
    }
    await caller.method(
        "opencode.sessions.prompt_async", {"session_id": session_id, "request": request}
    )
    async with asyncio.timeout(PATIENCE):
        while True:
            if (await caller.method("opencode.permissions.list", {}))["items"]:
                break
            await asyncio.sleep(0.1)

    assert not (free.workspace / "by-echo").exists()
    await caller.method("opencode.sessions.abort", {"session_id": session_id})


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("note", "x !`touch by-argument`"),
        ("show", "hello.txt; touch by-argument"),
        ("show", "$(touch by-argument)"),
        ("note", "@/etc/hostname"),
        ("note", "look at @../secret"),
    ],
)
async def test_arguments_of_a_command_run_nothing_and_read_nothing_outside(
    free: Backstage, service: Running, command: str, arguments: str
) -> None:
    caller = calling(service, "auto")
    session_id = await new_session(caller)
    before = on_disk(free.workspace)

    refused = await caller.refused(
        "opencode.sessions.command",
        {"session_id": session_id, "request": {"command": command, "arguments": arguments}},
    )

    assert refused.fields == ("request.arguments",)
    assert on_disk(free.workspace) == before


async def test_a_command_takes_plain_arguments(service: Running) -> None:
    caller = calling(service, "auto")
    for command, arguments in [("note", "a `code` word @hello.txt"), ("show", "hello.txt")]:
        session_id = await new_session(caller)
        await caller.method(
            "opencode.sessions.command",
            {"session_id": session_id, "request": {"command": command, "arguments": arguments}},
        )


async def test_a_narrower_prompt_does_not_join_work_with_wider_rights(
    free: Backstage, service: Running
) -> None:
    wide, reader = calling(service, "auto"), calling(service, "read-only")
    session_id = await new_session(wide)
    slow = script([{"gate": "rights"}, {"say": "done"}])
    parts: list[Any] = [{"type": "text", "text": slow}]
    params = {"session_id": session_id, "request": {"parts": parts}}
    await wide.method("opencode.sessions.prompt_async", params)
    await free.reached("rights")

    refused = await reader.refused("opencode.sessions.prompt_async", params)

    assert refused.reason == "SESSION_BUSY"
    await free.open("rights")
    await idle(free, session_id)


# What this service does not know of, or no longer


ALLOWED = orjson.dumps([{"permission": "bash", "pattern": "*", "action": "allow"}]).decode()


@pytest.mark.requirement("I23")
async def test_a_restart_does_not_widen_what_was_begun_by_method(
    free: Backstage, tmp_path: Path
) -> None:
    settings = settings_for(
        free,
        tmp_path,
        A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(CREDENTIALS).decode(),
        A2A_PERMISSION_RULES=ALLOWED,
    )
    commands = [f"touch {name}-after-restart" for name in ("first", "second")]
    calls = [[{"tool": "bash", "input": {"command": c, "description": "d"}}] for c in commands]
    parts: list[Any] = [{"type": "text", "text": script(*calls, [{"say": "done"}])}]

    async with serving(settings) as before:
        session_id = await new_session(calling(before, "ask"))
        params = {"session_id": session_id, "request": {"parts": parts}}
        await calling(before, "ask").method("opencode.sessions.prompt_async", params)
        first = await waiting(calling(before, "ask"), commands[0])
    async with serving(settings) as after:
        caller = calling(after, "ask")
        reply = {"request_id": first, "reply": "once"}
        await caller.method("a2a.interrupt.permission.reply", reply)
        second = await waiting(caller, commands[1])
        reply = {"request_id": second, "reply": "reject"}
        await caller.method("a2a.interrupt.permission.reply", reply)

    assert (free.workspace / "first-after-restart").exists()
    assert not (free.workspace / "second-after-restart").exists()


async def waiting(caller: Caller, command: str) -> str:
    """Wait until a command is asked for; return the id of the request."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for item in (await caller.method("opencode.permissions.list"))["items"]:
                if item["details"]["patterns"] == [command] and "expires_at" in item:
                    return item["request_id"]
            await asyncio.sleep(0.1)


@pytest.mark.requirement("I23")
async def test_a_narrower_prompt_does_not_join_work_that_the_service_does_not_know(
    free: Backstage, service: Running
) -> None:
    reader = calling(service, "read-only")
    session_id = await new_session(calling(service, "auto"))
    steps = [[{"gate": "terminal"}, {"say": "one"}], [{"say": "two"}]]
    before = on_disk(free.workspace)
    parts: list[Any] = [{"type": "text", "text": mischief(free.workspace)}]
    prompt = {"session_id": session_id, "request": {"parts": parts}}

    # As from OpenCode's own terminal, or by a service that was killed since.
    async with past_service(free.url, free.password) as terminal:
        told = Prompt(parts=[TextInput(text=script(*steps))])
        await terminal.prompt_async(SessionId(session_id), told)
        await free.reached("terminal")
        refused = await reader.refused("opencode.sessions.prompt_async", prompt)
        place = {"shared": {"session": {"id": session_id}}}
        async with reader.stream(mischief(free.workspace), metadata=place) as following:
            await following.until(lambda update: "wider rights" in str(update.progress))
            await free.open("terminal")
            await following.rest()

    assert refused.reason == "SESSION_BUSY"
    assert following.task.text == "tried"
    assert on_disk(free.workspace) == before


async def test_the_shell_is_refused_where_changes_have_to_be_asked_for(
    free: Backstage, service: Running
) -> None:
    session_id = await new_session(calling(service, "auto"))
    shell = {"agent": "build", "command": "touch by-shell"}
    params = {"session_id": session_id, "request": shell}

    refused = await calling(service, "ask").refused("opencode.sessions.shell", params)

    assert refused.reason == "AUTHORIZATION_FORBIDDEN"
    assert not (free.workspace / "by-shell").exists()


# Commands


async def test_a_message_runs_a_command_with_its_text_as_arguments(
    free: Backstage, service: Running
) -> None:
    caller = calling(service, "auto")
    said = script([{"say": "noted"}])
    by_name: JsonObject = {"opencode": {"command": "opencode.command.note"}}

    done = await caller.send(said, metadata=by_name, message_id="note")
    again = await caller.send(said, metadata=by_name, message_id="note")
    asking = await caller.ask(
        "send", caller.message("hello.txt", metadata={"opencode": {"command": "show", **ASK}})
    )

    assert (done.state, done.text, done.history) == ("completed", "noted", [said])
    assert again.raw == done.raw
    async with past_service(free.url, free.password) as opencode:
        messages = (await opencode.messages(SessionId(done.session_id))).items
    (prompt,) = [message for message in messages if message.info.role == "user"]
    (text, *_) = [part.text for part in prompt.parts if isinstance(part, TextPart)]
    assert text == f"Note: {said}"
    assert b"AUTHORIZATION_FORBIDDEN" in asking.content
