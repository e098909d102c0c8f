"""``chat`` and ``call`` as a person meets them: a real terminal, service and OpenCode."""

import asyncio
import re
import signal
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.copies import add_copies
from tests.support.ports import free_port
from tests.support.service import TOKEN, Running, serving, settings_for
from tests.support.terminal import Terminal

pytestmark = pytest.mark.live

BASH = {"tool": "bash", "input": {"command": "echo ran", "description": "Say it"}}
QUESTION: dict[str, Any] = {
    "tool": "question",
    "input": {"questions": [{"question": "Which colour?", "header": "Colour", "options": []}]},
}
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


@pytest.mark.requirement("I23")
@pytest.mark.parametrize(("asks", "typed"), [(BASH, "yes"), (BASH, "ok"), (QUESTION, "be brief")])
async def test_what_was_typed_before_the_request_was_seen_answers_nothing(
    service: Running, asking_backstage: Backstage, gate: str, asks: Any, typed: str
) -> None:
    async with Terminal("chat", service.url) as terminal:
        await terminal.sees(PROMPT)
        terminal.type(script({"gate": gate}, asks, {"say": "all done"}) + "\n")
        await asking_backstage.reached(gate)
        # The line and the request reach the program in the same moment.
        terminal.signal(signal.SIGSTOP)
        terminal.type(f"{typed}\n")
        await asking_backstage.open(gate)
        async with asyncio.timeout(60):
            while (await tasks(service))[0]["status"]["state"] != "TASK_STATE_INPUT_REQUIRED":  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        terminal.signal(signal.SIGCONT)
        await terminal.sees("Not sent: ")
        await terminal.sees(ANSWER)
        [task] = await tasks(service)
        terminal.type("\x04")
        await terminal.ended()

    assert task["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    assert len(messages(task)) == 1


@pytest.mark.requirement("I23")
async def test_one_letter_allows_more_only_if_the_person_is_sure(service: Running) -> None:
    async with Terminal("chat", service.url) as terminal:
        await terminal.sees(PROMPT)
        terminal.type(script(BASH, {"say": "all done"}) + "\n")
        await terminal.sees(ANSWER)
        terminal.type("c\n")
        await terminal.sees("That also allows, without asking again: ")
        await terminal.sees("sure? [y/N]> ")
        terminal.type("\n")
        await terminal.sees(ANSWER)
        [unsure] = await tasks(service)
        terminal.type("c\n")
        await terminal.sees("sure? [y/N]> ")
        terminal.type("y\n")
        await terminal.sees("all done")
        await terminal.sees(PROMPT)
        [sure] = await tasks(service)
        terminal.type("\x04")
        await terminal.ended()

    assert unsure["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    assert len(messages(unsure)) == 1
    assert re.fullmatch(r"\d+ yes for this conversation", messages(sure)[1])


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


async def test_what_waits_stands_first_and_an_outage_does_not_end_the_watch(
    asking_backstage: Backstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A2A_CLIENT_BEARER_TOKEN", TOKEN)
    monkeypatch.setenv("A2A_STATE_DIR", str(tmp_path))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = settings_for(asking_backstage, tmp_path, A2A_PORT=str(port))
    async with AsyncExitStack() as terminals:
        async with serving(settings, port=port) as service:
            caller = Caller(service)
            old = await caller.send(f"an old one {script({'say': 'the old answer'})}")
            waiting = await caller.send(f"one that waits {script(BASH)}")
            add_copies(tmp_path, old.id, [f"newer {number}" for number in range(500)])
            async with Terminal("tasks", url) as terminal:
                await terminal.ended()
                rows = [line.split() for line in terminal.seen.splitlines() if line.strip()]
            async with Terminal("task", url, old.id[:8]) as terminal:
                await terminal.ended()
                assert "the old answer" in terminal.seen
            watching = await terminals.enter_async_context(Terminal("tasks", url, "--watch"))
            await watching.sees("1 waiting")
            await watching.sees(waiting.id[:8])

        await watching.sees("cannot be reached")
        async with serving(settings, port=port):
            await watching.sees("1 waiting")

    assert rows[1][0] == waiting.id[:8]
    assert [row[-1] == "!" for row in rows[1:]] == [True] + [False] * 19
