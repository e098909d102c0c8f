"""``chat`` and ``call`` as a person meets them: a real terminal, service and OpenCode."""

import re
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.ports import free_port
from tests.support.service import TOKEN, Running, serving, settings_for
from tests.support.terminal import Terminal

pytestmark = pytest.mark.live

BASH = {"tool": "bash", "input": {"command": "echo ran", "description": "Say it"}}
PROMPT, ANSWER = "\x1b[?2004h> ", "\x1b[?2004hanswer> "
"""What the command shows when it reads a line; the sequence asks for pastes to be marked."""
PASTE, END = "\x1b[200~", "\x1b[201~"
"""How a terminal marks what is pasted."""


@pytest.fixture
async def service(
    asking_backstage: Backstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Running]:
    """A service that asks before it does anything, and our credential for it."""
    monkeypatch.setenv("A2A_CLIENT_BEARER_TOKEN", TOKEN)
    monkeypatch.setenv("A2A_STATE_DIR", str(tmp_path))
    port = free_port()
    settings = settings_for(asking_backstage, tmp_path, A2A_PORT=str(port))
    async with serving(settings, port=port) as running:
        yield running


@pytest.fixture
def gate() -> str:
    return uuid.uuid4().hex


async def tasks(service: Running) -> list[Any]:
    answer: Any = await Caller(service).answer("ListTasks", {"historyLength": 10})
    return answer["result"]["tasks"]


def messages(task: Any) -> list[str]:
    """Return what the person said in a task."""
    sent = [message for message in task["history"] if message["role"] == "ROLE_USER"]
    return ["\n".join(part["text"] for part in message["parts"]) for message in sent]


async def test_a_question_stays_until_it_is_settled(service: Running) -> None:
    async with Terminal("chat", service.url) as terminal:
        await terminal.sees(PROMPT)
        terminal.type(script(BASH, {"say": "all done"}) + "\n")
        await terminal.sees(ANSWER)
        terminal.type("maybe later\n")
        explained = await terminal.sees(ANSWER)
        terminal.type("/new\n")
        await terminal.sees(ANSWER)
        terminal.type("yes\n")
        await terminal.sees("all done")
        await terminal.sees(PROMPT)
        terminal.type("/quit\n")
        status = await terminal.ended()

    [task] = await tasks(service)
    assert 'Answer "once"' in " ".join(explained.split())
    assert task["status"]["state"] == "TASK_STATE_COMPLETED"
    assert status == 0


async def test_what_is_typed_while_the_agent_works_steers_it_and_answers_nothing(
    service: Running, asking_backstage: Backstage, gate: str
) -> None:
    async with Terminal("chat", service.url) as terminal:
        await terminal.sees(PROMPT)
        terminal.type(script({"gate": gate}, BASH, {"say": "all done"}) + "\n")
        await asking_backstage.reached(gate)
        terminal.type("yes\n")
        await terminal.sees("Not sent: ")
        terminal.type("be brief\n")
        await terminal.sees("(be brief)")
        await asking_backstage.open(gate)
        await terminal.sees(ANSWER)
        [waiting] = await tasks(service)
        terminal.type("no\n")
        await terminal.sees(PROMPT)
        terminal.type("\x04")
        await terminal.ended()

    [task] = await tasks(service)
    assert waiting["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    [steered, answer] = messages(task)[1:]
    assert steered == "be brief"
    assert re.fullmatch(r"\d+ no", answer)  # it names what was asked


@pytest.mark.parametrize("marked", [True, False])
async def test_a_paste_is_one_message_and_answers_nothing(service: Running, marked: bool) -> None:
    text = "please\n" + script(BASH, {"say": "all done"}) + "\nyes"

    async with Terminal("chat", service.url) as terminal:
        await terminal.sees(PROMPT)
        terminal.type(f"{PASTE}{text}{END}\n" if marked else f"{text}\n")
        await terminal.sees(ANSWER)
        [waiting] = await tasks(service)
        terminal.type("\x04")
        await terminal.sees("The agent still waits; answer with: opencode-a2a call ")
        status = await terminal.ended()

    assert waiting["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    assert messages(waiting) == [text]
    assert status == 3


async def test_ctrl_c_at_a_question_cancels_the_task(service: Running) -> None:
    async with Terminal("chat", service.url) as terminal:
        await terminal.sees(PROMPT)
        terminal.type(script(BASH, {"say": "all done"}) + "\n")
        await terminal.sees(ANSWER)
        await terminal.interrupt()
        await terminal.sees("canceled; Ctrl-C again leaves")
        await terminal.interrupt()
        status = await terminal.ended()

    [task] = await tasks(service)
    assert task["status"]["state"] == "TASK_STATE_CANCELED"
    assert status == 130


async def test_a_canceled_answer_decides_the_exit_status(
    service: Running, asking_backstage: Backstage, gate: str
) -> None:
    async with Terminal("chat", service.url) as terminal:
        await terminal.sees(PROMPT)
        terminal.type(script({"gate": gate}, {"say": "all done"}) + "\n")
        await asking_backstage.reached(gate)
        await terminal.interrupt()
        await terminal.sees("canceled; Ctrl-C again leaves")
        terminal.type("/quit\n")
        status = await terminal.ended()

    assert status == 130


async def test_a_person_sees_why_nothing_comes_and_for_how_long(service: Running) -> None:
    failure = {"error": 503, "times": 1, "retry_after": 3, "message": "Cannot connect to API"}

    async with Terminal("call", service.url, script(failure, {"say": "yes"})) as terminal:
        await terminal.sees("Retrying: ")
        told = await terminal.sees("attempt 1 (")
        first = shown = int(await terminal.sees(" s)"))
        while shown == first:
            await terminal.sees("attempt 1 (")
            shown = int(await terminal.sees(" s)"))
        answered = await terminal.sees("yes")
        status = await terminal.ended()

    assert "Cannot connect to API" in told
    assert shown > first
    assert answered.endswith("\r\x1b[2K")  # the line is gone before the answer comes
    assert status == 0
