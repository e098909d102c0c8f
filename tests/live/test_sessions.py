"""Which OpenCode session a message ends up in, whose it is, and in which directory."""

import asyncio
import uuid
from typing import Any

import orjson
import pytest

from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.types import SessionDraft
from tests.live.conftest import Serve
from tests.support.answers import RefusedError
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller

pytestmark = pytest.mark.live

PWD = {"tool": "bash", "input": {"command": "pwd", "description": "d"}}
SAY = {"say": "hello"}
SUB_AGENT = {
    "tool": "task",
    "input": {"description": "look", "subagent_type": "general", "prompt": "look"},
    "script": [{"say": "a secret"}],
}


def session(session_id: str) -> Any:
    return {"shared": {"session": {"id": session_id}}}


def directory(path: object) -> Any:
    return {"opencode": {"directory": str(path)}}


@pytest.fixture
def here(backstage: Backstage) -> Location:
    return Location(directory=str(backstage.workspace))


@pytest.fixture
async def ann_and_bob(serve: Serve) -> tuple[Caller, Caller]:
    """Two callers of one service who have nothing to do with each other."""
    tokens = {name: f"token-of-{name}-for-tests" for name in ("ann", "bob")}
    credentials = [
        {"scheme": "bearer", "principal": name, "token": token} for name, token in tokens.items()
    ]
    service = await serve(
        A2A_BEARER_TOKEN="", A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(credentials).decode()
    )
    return Caller(service, token=tokens["ann"]), Caller(service, token=tokens["bob"])


@pytest.mark.both_drivers
async def test_a_context_continues_in_its_session(caller: Caller, opencode: Driver) -> None:
    first = await caller.send(script({"say": "one"}))
    second = await caller.send(script({"say": "two"}), context=first.context_id)
    other = await caller.send(script({"say": "three"}))

    assert second.id != first.id
    assert second.context_id == first.context_id
    assert second.session_id == first.session_id
    assert other.session_id != first.session_id
    assert second.text == "two"
    stored = (await opencode.messages(SessionId(first.session_id))).items
    assert [message.info.role for message in stored] == ["user", "assistant"] * 2


async def test_a_named_session_is_used_and_kept_by_the_context(
    caller: Caller, opencode: Driver, here: Location
) -> None:
    made = await opencode.create_session(SessionDraft(), at=here)

    first = await caller.send(script({"say": "one"}), metadata=session(made.id))
    second = await caller.send(script({"say": "two"}), context=first.context_id)

    assert first.session_id == second.session_id == made.id


@pytest.mark.parametrize("name", ["ses_0000000000000000000000", "../config", "ses_x?y="])
async def test_a_session_that_does_not_exist_is_refused_before_there_is_a_task(
    caller: Caller, name: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        await caller.send(script(SAY), metadata=session(name))

    assert refused.value.code == -32602


async def test_a_session_of_somebody_else_looks_like_none(
    ann_and_bob: tuple[Caller, Caller], opencode: Driver, here: Location
) -> None:
    ann, bob = ann_and_bob
    made = await opencode.create_session(SessionDraft(), at=here)
    own = await ann.send(script(SAY))
    named = await ann.send(script(SAY), metadata=session(made.id))

    errors: list[Any] = []
    for name in (own.session_id, named.session_id, "ses_0000000000000000000000"):
        with pytest.raises(RefusedError) as refused:
            await bob.send(script(SAY), metadata=session(name))
        errors.append(refused.value.error)

    assert errors[0] == errors[1] == errors[2]
    same_context = await bob.send(script(SAY), context=own.context_id)
    assert same_context.session_id != own.session_id


async def test_a_sub_agents_session_of_somebody_else_looks_like_none(
    ann_and_bob: tuple[Caller, Caller], opencode: Driver
) -> None:
    ann, bob = ann_and_bob
    task = await ann.send(script(SUB_AGENT, {"say": "done"}))
    (child,) = await opencode.session_children(SessionId(task.session_id))
    before = (await opencode.messages(child.id)).items

    with pytest.raises(RefusedError) as foreign:
        await bob.send(script(SAY), metadata=session(child.id))
    with pytest.raises(RefusedError) as missing:
        await bob.send(script(SAY), metadata=session("ses_0000000000000000000000"))
    in_its_context = await bob.send(script(SAY), context=f"ctx:opencode-session:{child.id}")

    assert foreign.value.error == missing.value.error
    assert (in_its_context.state, in_its_context.text) == ("failed", "")
    assert (await opencode.messages(child.id)).items == before
    own = await ann.send(script({"say": "still mine"}), metadata=session(child.id))
    assert (own.session_id, own.text) == (child.id, "still mine")


async def test_tasks_of_somebody_else_look_like_none(ann_and_bob: tuple[Caller, Caller]) -> None:
    ann, bob = ann_and_bob
    task = await ann.send(script(SAY))

    for ask in (bob.get, bob.cancel):
        with pytest.raises(RefusedError) as foreign:
            await ask(task.id)
        with pytest.raises(RefusedError) as missing:
            await ask(str(uuid.uuid4()))
        assert foreign.value.error == missing.value.error


# Directories


async def test_a_directory_inside_the_workspace_can_be_chosen(
    caller: Caller, backstage: Backstage
) -> None:
    inside = backstage.workspace / str(uuid.uuid4())
    inside.mkdir()

    there = await caller.send(script(PWD, SAY), metadata=directory(inside))
    relative = await caller.send(
        script(PWD, SAY), context=there.context_id, metadata=directory(inside.name)
    )
    root = await caller.send(script(PWD, SAY), context=there.context_id)

    assert there.tools[0]["output"] == f"{inside.resolve()}\n"
    assert relative.session_id == there.session_id
    assert root.session_id != there.session_id
    assert root.tools[0]["output"] == f"{backstage.workspace.resolve()}\n"


async def test_no_directory_outside_the_workspace_can_be_chosen(
    caller: Caller, backstage: Backstage
) -> None:
    link = backstage.workspace / str(uuid.uuid4())
    link.symlink_to("/etc")

    for named in ("/", "..", f"{backstage.workspace}-other", link, f"{link.name}/..", "nowhere"):
        with pytest.raises(RefusedError) as refused:
            await caller.send(script(SAY), metadata=directory(named))
        assert refused.value.code == -32602
        assert str(backstage.workspace) not in refused.value.message


async def test_no_directory_can_be_chosen_where_it_is_switched_off(
    serve: Serve, backstage: Backstage
) -> None:
    inside = backstage.workspace / str(uuid.uuid4())
    inside.mkdir()
    caller = Caller(await serve(A2A_ALLOW_DIRECTORY_OVERRIDE="false"))

    with pytest.raises(RefusedError) as refused:
        await caller.send(script(SAY), metadata=directory(inside))

    assert refused.value.code == -32602
    assert (await caller.send(script(SAY))).state == "completed"


async def test_a_session_outside_the_workspace_looks_like_none(
    serve: Serve, backstage: Backstage, opencode: Driver, here: Location
) -> None:
    inside = backstage.workspace / str(uuid.uuid4())
    inside.mkdir()
    outside = await opencode.create_session(SessionDraft(), at=here)
    caller = Caller(await serve(OPENCODE_WORKSPACE_ROOT=str(inside)))

    with pytest.raises(RefusedError) as refused:
        await caller.send(script(SAY), metadata=session(outside.id))

    assert refused.value.code == -32602


# One turn at a time


@pytest.mark.both_drivers
async def test_a_second_turn_waits_visibly_for_the_first(
    caller: Caller, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())
    first = await caller.begin(script({"say": "one "}, {"gate": gate}, {"say": "two"}))
    await backstage.reached(gate)

    async with caller.stream(script({"say": "three"}), context=first.context_id) as second:
        await second.until(lambda u: bool(u.progress) and u.progress["type"] == "queue")
        await backstage.open(gate)
        await second.rest()

    assert (await caller.ended(first.id)).text == "one two"
    assert second.task.text == "three"
    assert second.task.session_id == (await caller.get(first.id)).session_id


async def test_first_messages_that_come_together_share_one_session(
    caller: Caller, opencode: Driver, here: Location
) -> None:
    context = str(uuid.uuid4())
    before = len(await opencode.sessions(at=here, limit=1000))

    tasks = await asyncio.gather(
        *(caller.send(script({"say": f"{n}"}), context=context) for n in range(4))
    )

    assert sorted(task.text for task in tasks) == ["0", "1", "2", "3"]
    assert len({task.session_id for task in tasks}) == 1
    assert len(await opencode.sessions(at=here, limit=1000)) == before + 1


async def test_the_same_message_sent_twice_is_prompted_once(
    caller: Caller, opencode: Driver
) -> None:
    message_id = str(uuid.uuid4())

    tasks = await asyncio.gather(
        *(caller.send(script(SAY), message_id=message_id) for _ in range(3))
    )

    assert len({task.id for task in tasks}) == 1
    assert {task.text for task in tasks} == {"hello"}
    stored = (await opencode.messages(SessionId(tasks[0].session_id))).items
    assert [message.info.role for message in stored] == ["user", "assistant"]


async def test_a_context_whose_session_was_deleted_goes_on_in_a_new_one(
    caller: Caller, opencode: Driver
) -> None:
    first = await caller.send(script({"say": "one"}))
    await opencode.delete_session(SessionId(first.session_id))

    second = await caller.send(script({"say": "two"}), context=first.context_id)

    assert second.state == "completed"
    assert second.text == "two"
    assert second.session_id != first.session_id


@pytest.mark.both_drivers
async def test_a_session_deleted_under_a_turn_fails_it(
    caller: Caller, opencode: Driver, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())
    begun = await caller.begin(script({"say": "one "}, {"gate": gate}, {"say": "two"}))
    await backstage.reached(gate)
    session_id = (await caller.get(begun.id)).session_id

    await opencode.delete_session(SessionId(session_id))
    await backstage.open(gate)
    ended = await caller.ended(begun.id)

    assert ended.state == "failed"
    assert "again" in ended.said


@pytest.mark.both_drivers
async def test_the_plan_agent_changes_no_file(caller: Caller, backstage: Backstage) -> None:
    """The agent that a message chooses works on it: what build may write, plan may not."""
    paths = {name: backstage.workspace / f"{name}.txt" for name in ("plan", "build")}

    tasks = {
        name: await caller.send(
            script({"tool": "write", "input": {"filePath": str(path), "content": name}}, SAY),
            metadata={"opencode": {"agent": name}},
        )
        for name, path in paths.items()
    }

    assert {name: path.exists() for name, path in paths.items()} == {"plan": False, "build": True}
    assert [task.raw["metadata"]["opencode"]["agent"] for task in tasks.values()] == [*tasks]
