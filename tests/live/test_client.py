"""Every endpoint that needs no model, against a real OpenCode."""

import asyncio
import os
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.errors import (
    SessionNotFoundError,
    UpstreamHttpError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
)
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.messages import MessageIds
from opencode_a2a.opencode.client import Location, OpenCode1
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a.opencode.types import (
    ArchiveTime,
    McpServer,
    PermissionRule,
    Prompt,
    Session,
    SessionChanges,
    SessionDraft,
    ShellCall,
    TextInput,
    TextPart,
    ToolCompleted,
    ToolPart,
    UserMessage,
)
from tests.support.event_stream import listening

pytestmark = [pytest.mark.live, pytest.mark.asyncio(loop_scope="module")]

new_message_id = MessageIds(b"key")
UNKNOWN = SessionId("ses_0000000000000000000000")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with one file."""
    path = tmp_path_factory.mktemp("repository")
    (path / "hello.txt").write_text("hello world\n")
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "First"]):
        subprocess.run(["git", *command], cwd=path, check=True)  # noqa: S603, S607 -- fixed words
    return path


@pytest.fixture(scope="module")
def here(repository: Path) -> Location:
    return Location(str(repository))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def managed(
    opencode_command: str, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[ManagedOpenCode]:
    managed = ManagedOpenCode(
        OpenCodeSettings(command=opencode_command, startup_timeout=60),
        os.environ,
        config={"share": "disabled", "autoupdate": False},
        state=tmp_path_factory.mktemp("state"),
        directory=repository,
    )
    async with managed:
        yield managed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opencode(managed: ManagedOpenCode) -> AsyncGenerator[OpenCode1]:
    async with OpenCode1(managed.url, password=managed.password) as opencode:
        yield opencode


@pytest_asyncio.fixture(loop_scope="module")
async def session(opencode: OpenCode1, here: Location) -> Session:
    return await opencode.create_session(SessionDraft(title="T"), at=here)


def note(text: str, message_id: MessageId | None = None) -> Prompt:
    return Prompt(parts=[TextInput(text=text)], no_reply=True, message_id=message_id)


async def test_a_session_lives_from_create_to_delete(opencode: OpenCode1, here: Location) -> None:
    rule = PermissionRule(permission="bash", pattern="*", action="ask")
    draft = SessionDraft(title="Life", metadata={"task": "1"}, permission=[rule])
    created = await opencode.create_session(draft, at=here)
    child = await opencode.create_session(
        SessionDraft(title="Child", parent_id=created.id), at=here
    )

    changes = SessionChanges(title="New", metadata={"a": None}, time=ArchiveTime(archived=5))
    updated = await opencode.update_session(created.id, changes)

    assert (created.title, created.directory, created.metadata) == (
        "Life",
        here.directory,
        {"task": "1"},
    )
    assert (updated.title, updated.metadata, updated.time.archived) == ("New", {"a": None}, 5)
    assert (await opencode.session(created.id)) == updated
    assert [s.id for s in await opencode.session_children(created.id)] == [child.id]
    listed = await opencode.sessions(at=here, search="New", roots=True, limit=5)
    assert [s.id for s in listed] == [created.id]
    await opencode.delete_session(created.id)
    with pytest.raises(SessionNotFoundError):
        await opencode.session(created.id)


async def test_unknown_sessions_are_not_found(opencode: OpenCode1) -> None:
    for call in (
        opencode.session(UNKNOWN),
        opencode.session_todo(UNKNOWN),
        opencode.session_children(UNKNOWN),
        opencode.messages(UNKNOWN),
        opencode.prompt(UNKNOWN, note("x")),
        opencode.prompt_async(UNKNOWN, note("x")),
        opencode.fork_session(UNKNOWN),
        opencode.delete_session(UNKNOWN),
        opencode.update_session(UNKNOWN, SessionChanges(title="x")),
    ):
        with pytest.raises(SessionNotFoundError) as caught:
            await call
        assert caught.value.data == {"session_id": UNKNOWN}


async def test_messages_are_paged_from_the_newest_back(
    opencode: OpenCode1, session: Session
) -> None:
    ids = [new_message_id() for _ in range(3)]
    for number, message_id in enumerate(ids):
        stored = await opencode.prompt(session.id, note(f"note {number}", message_id))
        assert (stored.info.id, type(stored.info)) == (message_id, UserMessage)

    newest = await opencode.messages(session.id, limit=2)
    older = await opencode.messages(session.id, limit=2, before=newest.next_cursor)
    everything = await opencode.messages(session.id)
    first = await opencode.message(session.id, ids[0])

    assert [m.info.id for m in newest.items] == ids[1:]
    assert [m.info.id for m in older.items] == ids[:1]
    assert older.next_cursor is None
    assert [m.info.id for m in everything.items] == ids
    assert [part.text for part in first.parts if isinstance(part, TextPart)] == ["note 0"]


async def test_an_unknown_message_is_not_found_in_a_session_that_is_there(
    opencode: OpenCode1, session: Session
) -> None:
    with pytest.raises(UpstreamNotFoundError) as caught:
        await opencode.message(session.id, new_message_id())

    assert caught.value.data == {"upstream_status": 404}


async def test_a_fork_copies_and_an_undone_revert_restores(
    opencode: OpenCode1, session: Session
) -> None:
    message_id = new_message_id()
    await opencode.prompt(session.id, note("first", message_id))

    fork = await opencode.fork_session(session.id)
    reverted = await opencode.revert_session(session.id, message_id)
    restored = await opencode.unrevert_session(session.id)

    assert fork.id != session.id
    assert len((await opencode.messages(fork.id)).items) == 1
    assert reverted.revert is not None
    assert reverted.revert.message_id == message_id
    assert restored.revert is None


async def test_a_shell_command_runs_without_a_model(opencode: OpenCode1, session: Session) -> None:
    async with asyncio.timeout(60):
        answer = await opencode.run_shell(session.id, ShellCall(command="cat *", agent="build"))

    states = [part.state for part in answer.parts if isinstance(part, ToolPart)]
    assert [state.output for state in states if isinstance(state, ToolCompleted)] == [
        "hello world\n"
    ]


async def test_an_idle_session_has_nothing_to_abort_diff_or_do(
    opencode: OpenCode1, session: Session, here: Location
) -> None:
    await opencode.abort_session(session.id)

    assert await opencode.session_diff(session.id) == []
    assert await opencode.session_todo(session.id) == []
    assert session.id not in await opencode.session_status(at=here)


async def test_sharing_that_is_switched_off_is_an_http_error(
    opencode: OpenCode1, session: Session
) -> None:
    with pytest.raises(UpstreamHttpError) as caught:
        await opencode.share_session(session.id)

    assert caught.value.data == {"upstream_status": 500}


async def test_nobody_asks_and_unknown_requests_are_not_found(
    opencode: OpenCode1, here: Location
) -> None:
    assert await opencode.permissions(at=here) == []
    assert await opencode.questions(at=here) == []
    for call in (
        opencode.reply_permission(RequestId("per_0"), "once", at=here),
        opencode.reply_question(RequestId("que_0"), [["a"]], at=here),
        opencode.reject_question(RequestId("que_0"), at=here),
    ):
        with pytest.raises(UpstreamNotFoundError):
            await call


async def test_catalogues_are_readable_and_hold_no_key(opencode: OpenCode1, here: Location) -> None:
    connected = await opencode.connected_providers(at=here)
    catalogue = await opencode.provider_catalogue(at=here)
    agents = await opencode.agents(at=here)
    commands = await opencode.commands(at=here)

    assert set(connected.default) <= set(catalogue.connected)
    assert len(catalogue.all) > 100
    assert "apiKey" not in connected.model_dump_json() + catalogue.model_dump_json()
    assert {agent.name for agent in agents if agent.selectable} == {"build", "plan"}
    assert {"init", "review"} <= {command.name for command in commands}


async def test_the_project_and_its_configuration_are_told(
    opencode: OpenCode1, repository: Path, here: Location
) -> None:
    project = await opencode.current_project(at=here)

    assert (project.worktree, project.vcs) == (str(repository), "git")
    assert project.id in {known.id for known in await opencode.projects(at=here)}
    assert (await opencode.config(at=here)).share == "disabled"
    assert (await opencode.vcs(at=here)).branch is not None
    assert await opencode.workspaces(at=here) == []


async def test_files_are_listed_read_and_compared(
    opencode: OpenCode1, repository: Path, here: Location
) -> None:
    extra = repository / "extra.txt"
    extra.write_text("more\n")
    try:
        nodes = await opencode.list_files(".", at=here)
        content = await opencode.read_file("hello.txt", at=here)
        found = await opencode.find_files("hello", limit=5, at=here)
        changes = await opencode.vcs_diff("git", at=here)
    finally:
        extra.unlink()

    assert {"hello.txt", "extra.txt"} <= {node.name for node in nodes}
    assert content.content.strip() == "hello world"
    assert isinstance(found, list)
    assert [(change.file, change.status, change.additions) for change in changes] == [
        ("extra.txt", "added", 1)
    ]


async def test_text_is_found_with_its_line(opencode: OpenCode1, here: Location) -> None:
    (match,) = await opencode.find_text("wor", at=here)

    assert (match.path.text, match.line_number) == ("hello.txt", 1)


async def test_a_worktree_is_made_reset_and_removed(opencode: OpenCode1, here: Location) -> None:
    async with asyncio.timeout(60), listening(opencode) as heard:
        worktree = await opencode.create_worktree("task one", at=here)
        await heard.until(b"worktree.ready")

    assert worktree.name == "task-one"
    assert (Path(worktree.directory) / "hello.txt").exists()
    assert await opencode.worktrees(at=here) == [worktree.directory]
    assert await opencode.reset_worktree(worktree.directory, at=here)
    assert await opencode.remove_worktree(worktree.directory, at=here)
    assert await opencode.worktrees(at=here) == []


async def test_a_directory_without_git_has_no_worktrees(
    opencode: OpenCode1, tmp_path: Path
) -> None:
    with pytest.raises(UpstreamHttpError) as caught:
        await opencode.create_worktree("x", at=Location(str(tmp_path)))

    assert caught.value.data == {"upstream_status": 400}


async def test_an_mcp_server_that_is_not_there_has_failed(
    opencode: OpenCode1, here: Location
) -> None:
    status = await opencode.add_mcp("down", McpServer(url="http://127.0.0.1:1/mcp"), at=here)

    assert status["down"].status == "failed"
    assert (await opencode.mcp_status(at=here))["down"].status == "failed"


async def test_all_instances_can_be_disposed_and_are_there_again(
    opencode: OpenCode1, here: Location
) -> None:
    await opencode.dispose()

    assert "down" not in await opencode.mcp_status(at=here)
    assert (await opencode.health()).healthy


async def test_a_wrong_password_is_refused_with_a_remedy(managed: ManagedOpenCode) -> None:
    async with OpenCode1(managed.url, password="wrong") as stranger:  # noqa: S106 -- that is the test
        with pytest.raises(UpstreamHttpError) as caught:
            await stranger.health()

    assert caught.value.data == {"upstream_status": 401}
    assert "OPENCODE_AUTH_PASSWORD" in caught.value.message


async def test_a_route_that_opencode_does_not_know_is_a_payload_error(
    managed: ManagedOpenCode,
) -> None:
    async with OpenCode1(f"{managed.url}/nowhere", password=managed.password) as lost:
        with pytest.raises(UpstreamPayloadError):
            await lost.health()
