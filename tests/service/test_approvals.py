"""What a person is shown of a request, whatever the agent and its provider send."""

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from opencode_a2a.jsonguard import TOO_DEEP
from opencode_a2a.turns import files
from tests.support.asking import AskingOpenCode, Request
from tests.support.caller import Caller
from tests.support.front import started
from tests.support.ports import free_port
from tests.support.service import TOKEN, serving, settings_for
from tests.support.terminal import Terminal


@asynccontextmanager
async def asked_for(asked: Request, directory: Path) -> AsyncGenerator[Caller]:
    """A caller of a service whose OpenCode asks for something at every prompt."""
    (directory / "workspace").mkdir()
    opencode = AskingOpenCode(directory / "workspace", {"do it": asked})
    async with opencode.running(), started(opencode, directory / "state") as running:
        yield Caller(running)


async def test_a_call_whose_id_was_used_before_is_shown_with_its_own_input(tmp_path: Path) -> None:
    asked = Request(
        "shop_pay",
        tool="shop_pay",
        input={"to": "somebody else", "amount": 1000},
        earlier={"to": "the shop", "amount": 1},
    )
    async with asked_for(asked, tmp_path) as caller:
        waiting = await caller.send("do it")

    assert waiting.interrupt["details"]["tool"]["input"] == asked.input
    assert "to: somebody else" in waiting.said
    assert "the shop" not in waiting.said


@pytest.mark.requirement("I25")
async def test_words_that_lie_too_deep_leave_the_task_readable_and_are_told(tmp_path: Path) -> None:
    listed: Any = "evil"
    held: Any = "evil"
    for _ in range(100):
        listed, held = [listed], {"in": held}
    asked = Request(
        "shop_pay", ("*",), {"of": listed}, tool="shop_pay", input={"to": "me", "x": held}
    )
    async with asked_for(asked, tmp_path) as caller:  # which reads as the SDK does
        waiting = await caller.send("do it")
        ended = await caller.send("yes", task=waiting.id)

    assert waiting.said.count(TOO_DEEP) == 2
    assert "to: me" in waiting.said
    assert ended.state == "completed"


@pytest.mark.requirement("I24")
@pytest.mark.parametrize("within", [".", "packages/" + "./" * 80])
async def test_nothing_is_granted_for_a_task_that_was_not_shown(
    tmp_path: Path, within: str
) -> None:
    always = (*(f"command{number} *" for number in range(28)), "rm *")
    asked = Request(
        "bash", ("command0 x",), {}, always, "bash", {"command": "command0 x", "workdir": within}
    )
    async with asked_for(asked, tmp_path) as caller:
        waiting = await caller.send("do it")
        done = await caller.send("yes for this conversation", task=waiting.id)
        (grant,) = (await caller.method("a2a.interrupt.grants.list"))["items"]

    assert done.state == "completed"
    assert (grant["patterns"], grant["directory"]) == (
        [*always],
        f"{tmp_path}/workspace/./{within}",
    )
    assert ", ".join(always) in waiting.said
    assert grant["directory"] in waiting.said
    assert waiting.said.count("rm *") == 1


@pytest.mark.requirement("I24")
async def test_a_letter_in_chat_names_the_directory_and_the_command_that_it_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A2A_CLIENT_BEARER_TOKEN", TOKEN)
    monkeypatch.setenv("A2A_STATE_DIR", str(tmp_path))
    given = {"command": "make && rm -r out", "workdir": "packages/./."}
    asked = Request("bash", ("make && rm -r out",), {}, ("make *",), "bash", given)
    (tmp_path / "workspace").mkdir()
    opencode, port = AskingOpenCode(tmp_path / "workspace", {"do it": asked}), free_port()

    async with opencode.running():
        settings = settings_for(opencode, tmp_path / "state", A2A_PORT=str(port))
        async with (
            serving(settings, port=port) as service,
            Terminal("chat", service.url) as terminal,
        ):
            await terminal.sees("> ")
            terminal.type("do it\n")
            await terminal.sees("answer> ")
            terminal.type("t\n")
            await terminal.sees("That also allows, without asking again")
            within = await terminal.sees("sure? [y/N]> ")
            terminal.type("\n")
            await terminal.sees("answer> ")
            terminal.type("2 t\n")  # of another request only the text is known
            await terminal.sees("That also allows, without asking again")
            other = await terminal.sees("sure? [y/N]> ")

    place = f"{tmp_path}/workspace/./packages/./."
    plain = f"plain commands in {place} (no redirection, pipe, …) that fit make *"
    assert within.splitlines()[0] == f": exactly this and {plain}"
    assert other.splitlines()[0] == ": what request 2 says"


UNKNOWN = "Where these files really are could not be found out."


@pytest.mark.requirement("I24")
async def test_a_request_tells_that_a_file_system_does_not_say_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()

    def hang(_: object) -> None:
        hangs.wait()

    monkeypatch.setattr(files, "looked_up", hang)
    asked = Request(
        "edit", ("a.py",), {"filepath": "a.py"}, tool="edit", input={"filePath": "a.py"}
    )
    command = Request("bash", ("ls",), {}, ("ls *",), "bash", {"command": "ls"})
    (tmp_path / "workspace").mkdir()
    opencode = AskingOpenCode(tmp_path / "workspace", {"do it": asked, "look": command})
    try:
        async with opencode.running(), started(opencode, tmp_path / "state") as running:
            caller = Caller(running)
            waiting = await caller.send("do it")
            ended = await caller.send("yes", task=waiting.id)
            look = await caller.send("look")
    finally:
        hangs.set()

    assert UNKNOWN in waiting.said
    assert waiting.interrupt["details"]["links_unknown"] is True
    assert ended.state == "completed"
    assert UNKNOWN not in look.said  # it names no file
    assert "links_unknown" not in look.interrupt["details"]


@pytest.mark.requirement("I24")
@pytest.mark.parametrize("by_method", [True, False])
@pytest.mark.parametrize("there", [True, False])
async def test_a_file_that_becomes_a_link_while_its_request_waits_is_shown_before_it_is_written(
    tmp_path: Path, by_method: bool, there: bool
) -> None:
    note, victim = tmp_path / "workspace" / "note.txt", tmp_path / "victim.txt"
    given = {"filePath": str(note), "content": "x"}
    asked = Request("edit", ("note.txt",), {"filepath": str(note)}, tool="write", input=given)
    async with asked_for(asked, tmp_path) as caller:
        if there:
            note.touch()

        async def answer() -> str:
            if not by_method:
                message = caller.message("1: yes", taskId=waiting.id)
                return (
                    orjson.loads((await caller.ask("send", message)).content)
                    .get("error", {})
                    .get("message", "")
                )
            params = {"request_id": waiting.interrupt["request_id"], "reply": "once"}
            told = await caller.answer("a2a.interrupt.permission.reply", params)
            return told.get("error", {}).get("message", "")

        waiting = await caller.send("do it")
        note.unlink(missing_ok=True)
        note.symlink_to(victim)
        first = await answer()
        # The same again, before anybody can have read what is new, answers nothing.
        message = caller.message("yes", taskId=waiting.id)
        doubled = orjson.loads((await caller.ask("send", message)).content)
        shown = await caller.get(waiting.id)
        note.unlink()
        note.symlink_to(tmp_path / "other.txt")
        second = await answer()
        again = await caller.get(waiting.id)
        await answer()
        ended = await caller.ended(waiting.id)

    link = f"A symbolic link leads from {note} to "
    assert link not in waiting.said
    assert f"{note} now leads to {victim}" in first
    assert "error" in doubled
    assert shown.state == "input_required"
    assert f"{link}{victim}" in shown.said
    assert shown.interrupt["details"]["links"] == {str(note): str(victim)}
    assert shown.interrupt["number"] == 1
    assert f"{note} now leads to {tmp_path}/other.txt" in second
    assert "requests wait" not in again.said
    assert f"{link}{tmp_path}/other.txt" in again.said
    assert ended.state == "completed"


@pytest.mark.requirement("I24")
async def test_what_was_allowed_for_a_conversation_is_asked_again_where_a_link_leads_elsewhere(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    (out / "in").mkdir(parents=True)
    (out / "l").symlink_to("/etc")

    def read(name: str) -> Request:
        path = out / name
        inside = (f"{path.parent}/*",)
        record = {"filepath": str(path), "parentDir": str(path.parent)}
        given = {"filePath": str(path)}
        return Request("external_directory", inside, record, inside, "read", given)

    cat = Request(
        "external_directory",
        (f"{out}/l/*",),
        {"directories": [f"{out}/l"]},
        (f"{out}/l/*",),
        "bash",
        {"command": f"cat {out}/l/hostname"},
    )
    requests = {
        "secret": read("secret.txt"),
        "deeper": read("in/x"),
        "host": read("l/hostname"),
        "cat": cat,
    }
    (tmp_path / "workspace").mkdir()
    opencode = AskingOpenCode(tmp_path / "workspace", requests)
    async with opencode.running(), started(opencode, tmp_path / "state") as running:
        caller = Caller(running)
        first = await caller.send("secret")
        await caller.send("yes for this conversation", task=first.id)
        same = await caller.send("secret", context=first.context_id)
        deeper = await caller.send("deeper", context=first.context_id)
        host = await caller.send("host", context=first.context_id)
        ended = await caller.send("yes", task=host.id)
        command = await caller.send("cat", context=first.context_id)
        message = caller.message("yes for this task", taskId=command.id)
        refused = await caller.ask("send", message)
        once = await caller.send("yes", task=command.id)

    assert [same.state, deeper.state] == ["completed", "completed"]
    assert host.state == command.state == "input_required"
    assert f"A symbolic link leads from {out}/l/hostname to /etc/hostname" in host.said
    assert f"A symbolic link leads from {out}/l to /etc" in command.said
    assert "for this task" not in command.said  # the link may lead elsewhere by then
    assert "scopes" not in command.interrupt["details"]
    assert b"a symbolic link" in refused.content
    assert [ended.state, once.state] == ["completed", "completed"]


@pytest.mark.requirement("I24")
@pytest.mark.parametrize(
    ("line", "always", "allowed"),
    [
        (
            "sh run.sh; reset_everything now",
            ("sh *", "reset_everything *"),
            "exactly this and plain commands (no redirection, pipe, …) that fit "
            "sh *, reset_everything *",
        ),
        (
            "echo * | cat",
            ("echo *", "cat *"),
            "exactly this and plain commands (no redirection, pipe, …) that fit cat *",
        ),
        ("echo *", ("echo *",), "exactly this command"),
    ],
)
async def test_a_request_tells_programs_what_a_scope_allows_in_the_words_of_its_text(
    tmp_path: Path, line: str, always: tuple[str, ...], allowed: str
) -> None:
    parts = tuple(line.replace(";", "|").split(" | "))
    async with asked_for(
        Request("bash", parts, {}, always, "bash", {"command": line}), tmp_path
    ) as caller:
        waiting = await caller.send("do it")

    assert waiting.interrupt["details"]["scope_text"] == allowed
    assert f'"yes for this conversation" to allow {allowed} without being asked' in waiting.said
