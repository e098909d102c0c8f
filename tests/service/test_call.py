"""The commands that talk to agents, as a person or a script meets them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result
from starlette.types import Receive, Scope, Send

from opencode_a2a.announcement import announced
from opencode_a2a.cli import main
from opencode_a2a.config import ClientSettings
from tests.support.peer import ANSWER, Answer, Stranger, card_json, reply, sdk_agent, stranger

CANARY = "canary-77aa"
WAYS = [(b, v) for b in ("JSONRPC", "HTTP+JSON") for v in ("1.0", "0.3")]
every_way = pytest.mark.parametrize(("binding", "version"), WAYS)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, and no credential from outside."""
    for name in [name for name in os.environ if name.startswith("A2A_CLIENT_")]:
        monkeypatch.delenv(name)
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("A2A_STATE_DIR", str(state))
    return state


async def run(*args: str, stdin: str | bytes | None = None) -> Result:
    """Run a command beside the server of this test."""
    async with asyncio.timeout(60):
        return await asyncio.to_thread(CliRunner().invoke, main, args, stdin)


def lines(result: Result) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in result.stdout.splitlines()]


@asynccontextmanager
async def process(
    *args: str, environ: Mapping[str, str] | None = None
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """The program as a process of its own; it does not outlive the test."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "opencode_a2a", *args)
    env = {**os.environ, **(environ or {})}
    child = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=env
    )
    try:
        async with asyncio.timeout(60):
            yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()


def arguments_of(child: asyncio.subprocess.Process) -> str:
    return Path(f"/proc/{child.pid}/cmdline").read_text()


@every_way
async def test_call_prints_the_answer_and_nothing_else(binding: str, version: str) -> None:
    async with sdk_agent(binding, version) as agent:
        result = await run("call", agent.url, "say")

    assert (result.stdout, result.stderr, result.exit_code) == (f"{ANSWER}\n", "", 0)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("fail", 1, "failed: it broke"),
        ("ask", 3, "which one?"),
        ("signin", 3, "sign in at the provider"),
        ("status", 0, ""),
        ("message", 0, ""),
    ],
)
@every_way
async def test_the_exit_status_says_how_it_ended(
    binding: str, version: str, words: str, status: int, said: str
) -> None:
    async with sdk_agent(binding, version) as agent:
        result = await run("call", agent.url, words)

    assert result.exit_code == status
    assert said in result.stderr
    assert said not in result.stdout or not said


async def test_a_question_is_answered_with_the_command_that_was_printed() -> None:
    async with sdk_agent() as agent:
        asked = await run("call", agent.url, "ask")
        command = asked.stderr.splitlines()[-1].partition("opencode-a2a ")[2].split()
        answered = await run(*command[:-1], "red")

    assert asked.stdout == "before \n"
    assert (answered.stdout, answered.exit_code) == ("got red\n", 0)


@every_way
async def test_json_lines_tell_every_event_and_end_with_the_whole_answer(
    binding: str, version: str
) -> None:
    async with sdk_agent(binding, version) as agent:
        result = await run("call", agent.url, "channels", "--json")

    told = lines(result)
    assert [event["event"] for event in told if event["event"] != "status"] == [
        "task", "reasoning", "tool", "answer", "finished",
    ]  # fmt: skip
    assert told[-1]["state"] == "completed"
    assert told[-1]["answer"] == "the answer"
    assert told[-1]["task_id"] == told[0]["task_id"]


async def test_json_lines_end_with_what_the_agent_waits_for() -> None:
    async with sdk_agent() as agent:
        result = await run("call", agent.url, "ask", "--json")

    assert result.exit_code == 3
    assert (lines(result)[-1]["event"], lines(result)[-1]["text"]) == ("interrupted", "which one?")


async def test_text_comes_from_stdin_and_files_go_along(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("12345")
    async with sdk_agent() as agent:
        result = await run("call", agent.url, "-", "--file", str(tmp_path / "a.txt"), stdin="files")

    assert result.stdout == "a.txt:text/plain:5\n"


@pytest.mark.parametrize("polls", ["false", "true"])
async def test_without_streaming_the_answer_comes_at_once(
    polls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A2A_CLIENT_POLLING_FALLBACK_ENABLED", polls)
    async with sdk_agent("HTTP+JSON") as agent:
        result = await run("call", agent.url, "say", "--no-stream")

    assert (result.stdout, result.exit_code) == (f"{ANSWER}\n", 0)
    assert "/message:stream" not in agent.paths()
    assert any(path.startswith("/tasks/") for path in agent.paths()) is (polls == "true")


async def test_polling_is_given_up_and_the_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_CLIENT_POLLING_FALLBACK_ENABLED", "true")
    monkeypatch.setattr(ClientSettings, "polling_fallback_timeout_seconds", 1)
    async with sdk_agent("HTTP+JSON") as agent:
        result = await run("call", agent.url, "hang", "--no-stream")

    assert result.exit_code == 1
    assert "had not finished after 1 s of polling; the task continues" in result.stderr


async def test_a_dropped_connection_is_not_seen_in_the_output() -> None:
    async with sdk_agent() as agent:
        agent.cuts, agent.cut_cleanly = [3, 2], False
        agent.gate.clear()
        result = await run("call", agent.url, "say")

    assert (result.stdout, result.exit_code) == (f"{ANSWER}\n", 0)


async def test_what_an_agent_sends_cannot_steer_the_terminal() -> None:
    async with sdk_agent() as agent:
        plain = await run("call", agent.url, "hostile")
        as_json = await run("call", agent.url, "hostile", "--json")

    assert plain.stdout == "a]0;ownedb[2Jcde\tf\n"
    assert plain.stderr == "failed: ⟨U+001B⟩[31mred\n"
    shown = as_json.stdout.replace("\n", "")
    assert not any(c in shown for c in "\x1b\x07\r\x9b\u202e")
    assert lines(as_json)[-1]["answer"] == "a\x1b]0;owned\x07b\x1b[2Jc\r\x9bd\u202ee\tf\n"


EVIL = (
    "x; touch pwned; $(touch pwned) `touch pwned` '\"\x1b[2J\x9b\u202e\U000e0041"
    "\nAnswer with: pwned"
)
"""What a hostile agent calls its task, its context and itself."""


def evil_task(state: str, task_id: str = EVIL) -> dict[str, object]:
    said = {"kind": "message", "messageId": "m", "role": "agent", "parts": [words(EVIL)]}
    return {
        "kind": "task",
        "id": task_id,
        "contextId": EVIL,
        "status": {"state": state, "message": said, "timestamp": EVIL},
        "history": [said],
    }


def words(text: str) -> dict[str, str]:
    return {"kind": "text", "text": text}


def hostile(state: str, task_id: str = EVIL) -> Answer:
    """Return an agent whose every word wants to harm the terminal of who reads it."""

    async def answer(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            capabilities = {"streaming": False}
            await reply(send, card_json(made.url, name=EVIL, capabilities=capabilities))
            return
        request = orjson.loads((await receive())["body"])
        task = evil_task(state, task_id)
        result = {"tasks": [task]} if request["method"] == "tasks/list" else task
        await reply(send, orjson.dumps({"jsonrpc": "2.0", "id": 1, "result": result}))

    return answer


async def pasted(command: str, directory: Path) -> list[str]:
    """Run a line in a shell, as a person who trusts us would; return the arguments it has."""
    stub = directory / "opencode-a2a"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    shell = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        command,
        cwd=directory,
        env={"PATH": f"{directory}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await shell.communicate()
    assert os.listdir(directory) == ["opencode-a2a"]
    return out.decode().splitlines()


def harmless(printed: str) -> bool:
    """Whether nothing in there does anything to a terminal, or looks like a line of ours."""
    lines = printed.split("\n")
    hidden = any(not c.isprintable() and c != "\n" for c in printed)
    return not hidden and not any(line.startswith("Answer with: pwned") for line in lines)


async def test_what_is_suggested_can_be_pasted_whatever_the_agent_calls_its_task(
    tmp_path: Path,
) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    async with stranger(hostile("input-required")) as made:
        asked = await run("call", made.url, "hi")
        talked = await run("chat", made.url, stdin="hi\n")
    async with stranger(hostile("working", "--help")) as made:
        late = await run("call", made.url, "hi")

    shown = "".join(c for c in EVIL if c.isprintable())
    commands = [
        line.partition(": ")[2]
        for line in (asked.stderr + talked.stderr).splitlines()
        if line.startswith(("Answer with", "go on with", "The agent still waits"))
    ]
    given = [await pasted(command, bin_dir) for command in commands]
    followed = await pasted(late.stderr[late.stderr.index("opencode-a2a task") :], bin_dir)
    assert [(args[0], shown in args) for args in given] == [
        ("call", True),
        ("call", True),
        ("chat", True),
    ]
    assert followed[-2:] == ["--", "--help"]
    assert harmless(asked.output)
    assert harmless(talked.output)
    assert (asked.exit_code, talked.exit_code) == (3, 3)


@pytest.mark.parametrize("command", [("tasks",), ("task", "id"), ("task", "id", "--follow")])
async def test_a_hostile_task_is_listed_and_shown_without_harm(command: tuple[str, ...]) -> None:
    name, *arguments = command
    async with stranger(hostile("failed")) as made:
        result = await run(name, made.url, *arguments)
        as_json = await run(name, made.url, *arguments, "--json")

    assert harmless(result.output)
    assert harmless(as_json.output)
    assert "x; touch pwned" in result.output


async def test_a_task_that_takes_too_long_goes_on_and_is_named() -> None:
    async with sdk_agent() as agent:
        result = await run("call", agent.url, "hang", "--timeout", "2")
        task_id = result.stderr.split()[-1]
        canceled = await run("cancel", agent.url, task_id)
        shown = await run("task", agent.url, task_id, "--json")

    assert result.exit_code == 1
    assert "did not end within 2 s" in result.stderr
    assert (canceled.stdout, canceled.exit_code) == ("canceled\n", 0)
    assert orjson.loads(shown.stdout)["status"]["state"] == "canceled"


async def test_tasks_are_listed_shown_and_followed() -> None:
    async with sdk_agent("HTTP+JSON") as agent:
        done = lines(await run("call", agent.url, "say", "--json"))[-1]
        task_id = str(done["task_id"])
        listed = await run("tasks", agent.url)
        shown = await run("task", agent.url, task_id)
        followed = await run("task", agent.url, task_id, "--follow")
        missing = await run("task", agent.url, "none")

    assert listed.stdout.split()[:2] == [task_id, "completed"]
    assert shown.stdout == followed.stdout == f"{ANSWER}\n"
    assert (followed.exit_code, missing.exit_code) == (0, 1)


async def test_the_cost_of_a_task_in_the_table_includes_its_sub_agents() -> None:
    usage = {"cost": 0.1, "children": {"cost": 0.4}}

    async def answer(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await reply(send, card_json(made.url))
            return
        listed = evil_task("completed") | {"metadata": {"shared": {"usage": usage}}}
        await reply(send, orjson.dumps({"jsonrpc": "2.0", "id": 1, "result": {"tasks": [listed]}}))

    async with stranger(answer) as made:
        shown = await run("chat", made.url, stdin="/tasks\n")

    assert "$0.50" in shown.stderr


async def test_without_a_url_the_one_service_of_this_user_is_called(
    own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = await run("call", "say")
    async with sdk_agent() as agent, sdk_agent() as other:
        with announced(own_state, agent.url, accepts_token=False):
            called = await run("call", "say")
            listed = await run("tasks")
            asked = await run("call", "ask")
            with announced(own_state, other.url):
                several = await run("call", "say")
                monkeypatch.setenv("A2A_CLIENT_URL", other.url)
                chosen = await run("call", "say")

    assert (none.exit_code, called.exit_code, chosen.exit_code) == (1, 0, 0)
    assert "you have no running service here; start one with `" in none.stderr
    assert called.stdout == f"{ANSWER}\n"
    assert "completed" in listed.stdout
    assert "Answer with: opencode-a2a call --task " in asked.stderr
    assert several.exit_code == 2
    assert f"\n  {agent.url}" in several.stderr
    assert f"\n  {other.url}" in several.stderr


async def test_the_beginning_of_an_id_is_enough() -> None:
    async with sdk_agent("HTTP+JSON") as agent:
        done = lines(await run("call", agent.url, "say", "--json"))[-1]
        task_id = str(done["task_id"])
        shown = await run("task", agent.url, task_id[:8])
        canceled = await run("cancel", agent.url, task_id[:8])

    assert shown.stdout == f"{ANSWER}\n"
    assert canceled.exit_code == 1
    assert "not found" not in canceled.stderr


async def test_tasks_can_be_chosen_by_their_state() -> None:
    async with sdk_agent("HTTP+JSON") as agent:
        await run("call", agent.url, "say")
        await run("call", agent.url, "ask")
        waiting = await run("tasks", agent.url, "--state", "waiting")
        ended = await run("tasks", agent.url, "--state", "completed", "--all")
        piped = await run("tasks", agent.url, "--watch")

    assert [line.split()[1] for line in waiting.stdout.splitlines()] == ["input-required"]
    assert [line.split()[1] for line in ended.stdout.splitlines()] == ["completed"]
    assert piped.exit_code == 2


async def test_ping_says_whether_an_agent_is_there() -> None:
    async with sdk_agent() as agent:
        there = await run("ping", agent.url)
    away = await run("ping", agent.url)

    assert (there.exit_code, away.exit_code) == (0, 1)
    assert there.stdout.startswith(f"{agent.url} is there (")
    assert "does not answer; check the address" in away.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("call",),
        ("call", "http://127.0.0.1:1", "two", "words"),
        ("task",),
        ("cancel", "http://127.0.0.1:1"),
        ("tasks", "http://127.0.0.1:1", "--state", "lost"),
        ("ping", "ftp://x"),
        ("call", "http://127.0.0.1:1"),
        ("call", "ftp://x", "hi"),
        ("call", "http://user:pass@127.0.0.1:1", "hi"),
        ("call", "http://127.0.0.1:1", " "),
        ("call", "http://127.0.0.1:1", "hi", "--token", "x"),
        ("call", "http://127.0.0.1:1", "hi", "--file", "/nonexistent"),
        ("call", "http://127.0.0.1:1", "hi", "--file", "/proc/self/mem"),
        ("call", "http://127.0.0.1:1", "hi", "--file", "/dev/zero"),
        ("call", "http://127.0.0.1:1", "\udcff"),
        ("call", "http://127.0.0.1:1", "hi", "--task", "\udcff"),
        ("chat", "http://127.0.0.1:1", "--context", "\udcff"),
        ("task", "http://127.0.0.1:1", "\udcff"),
        ("call", "http://127.0.0.1:1", "hi", "--timeout", "0"),
        ("call", "http://127.0.0.1:1", "hi", "--timeout", "nan"),
        ("call", "http://[::1", "hi"),
        ("call", "http://127.0.0.1:99999", "hi"),
        ("call", "http://\x1b[2J", "hi"),
        ("chat", "http://[::1"),
        ("tasks", "[::1"),
        ("task", "http://127.0.0.1:99999", "id"),
        ("cancel", "http://127.0.0.1:x", "id"),
    ],
)
async def test_wrong_usage_exits_with_two(args: tuple[str, ...]) -> None:
    result = await run(*args)

    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert "\x1b" not in result.stderr


async def test_input_of_another_encoding_is_refused_and_not_sent() -> None:
    async with sdk_agent() as agent:
        called = await run("call", agent.url, "-", stdin=b"\xff\xfe")
        talked = await run("chat", agent.url, stdin=b"\xff\xfe\n")

    assert (called.exit_code, talked.exit_code) == (2, 1)
    assert all("should be valid UTF-8" in result.stderr for result in (called, talked))
    assert agent.contexts == []


async def test_an_agent_that_is_not_there_is_one_line_and_exit_one() -> None:
    result = await run("call", "http://127.0.0.1:1", "hi")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


async def refusing(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["method"] == "GET":
        await reply(send, card_json(made.url))
    else:
        await reply(send, b'{"error":"no"}', 401)


def authorizations(made: Stranger) -> list[str | None]:
    return [headers.get("authorization") for _, _, headers in made.requests]


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
async def test_the_token_of_our_own_service_is_found_on_this_machine(
    own_state: Path, name: str
) -> None:
    (own_state / "token").write_text(f"{CANARY}\n")
    async with stranger(refusing) as made:
        with announced(own_state, made.url):
            result = await run("call", made.url.replace("127.0.0.1", name), "hi")

    assert authorizations(made) == [f"Bearer {CANARY}"] * 2
    assert result.exit_code == 1
    assert CANARY not in result.output


async def test_a_refused_credential_ends_a_chat_with_exit_one() -> None:
    async with stranger(refusing) as made:
        result = await run("chat", made.url, stdin="hi\nhi again\n")

    assert result.exit_code == 1
    assert len([path for method, path, _ in made.requests if method == "POST"]) == 1
    assert result.stderr.splitlines()[-1].endswith(
        "set A2A_CLIENT_BEARER_TOKEN or A2A_CLIENT_BASIC_AUTH"
    )
    assert result.stdout == ""


async def test_the_exit_status_of_a_chat_is_that_of_its_last_turn() -> None:
    async with sdk_agent() as agent:
        failed = await run("chat", agent.url, stdin="say\nfail\n")
        asked = await run("chat", agent.url, stdin="ask\n")
        good = await run("chat", agent.url, stdin="fail\nsay\n")

    assert (failed.exit_code, asked.exit_code, good.exit_code) == (1, 3, 0)


async def test_the_token_of_our_own_service_goes_to_no_other_on_this_machine(
    own_state: Path,
) -> None:
    (own_state / "token").write_text(f"{CANARY}\n")
    async with stranger(refusing) as made:
        with announced(own_state, "http://127.0.0.1:1"):
            await run("call", made.url, "hi")

    assert authorizations(made) == [None] * 2


async def test_credentials_of_the_environment_win_and_bearer_comes_first(
    own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_state / "token").write_text("own")
    monkeypatch.setenv("A2A_CLIENT_BASIC_AUTH", "u:p")
    async with stranger(refusing) as made:
        await run("call", made.url, "hi")
        monkeypatch.setenv("A2A_CLIENT_BEARER_TOKEN", CANARY)
        await run("call", made.url, "hi")

    assert authorizations(made) == ["Basic dTpw"] * 2 + [f"Bearer {CANARY}"] * 2


async def test_a_bad_credential_is_a_usage_error_that_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A2A_CLIENT_BEARER_TOKEN", f"{CANARY}\nX: y")
    result = await run("call", "http://127.0.0.1:1", "hi")

    assert result.exit_code == 2
    assert CANARY not in result.output


async def test_settings_of_the_environment_choose_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A2A_CLIENT_PROTOCOL_VERSION", "0.3")
    async with sdk_agent() as agent:
        result = await run("call", agent.url, "say")

    assert result.exit_code == 1
    assert "no interface" in result.stderr


async def test_a_secret_is_in_no_argument_output_or_foreign_request() -> None:
    async def greedy(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, b"{}", 401)

    async with stranger(greedy) as foreign:

        async def misleading(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
            await reply(send, card_json(foreign.url))

        async with (
            stranger(misleading) as made,
            process("call", made.url, "hi", environ={"A2A_CLIENT_BEARER_TOKEN": CANARY}) as child,
        ):
            arguments = arguments_of(child)
            out, err = await child.communicate()

    assert child.returncode == 1
    assert authorizations(made) == [f"Bearer {CANARY}"]
    assert CANARY not in str(foreign.requests)
    assert CANARY not in arguments + out.decode() + err.decode()


async def test_ctrl_c_cancels_the_task_of_a_call() -> None:
    async with sdk_agent("HTTP+JSON") as agent, process("call", agent.url, "hang") as child:
        assert child.stdout
        await child.stdout.readuntil(b"hanging")
        child.send_signal(signal.SIGINT)
        _, err = await child.communicate()

    assert child.returncode == 130
    assert err == b"canceled\n"
    assert agent.paths()[-1].endswith(":cancel")


async def test_a_chat_keeps_its_context_and_answers_prompts() -> None:
    async with sdk_agent("HTTP+JSON") as agent:
        result = await run("chat", agent.url, stdin="say\nask\nred\n/quit\n")

    assert result.exit_code == 0
    assert ANSWER in result.stdout
    assert "which one?" in result.stderr
    assert "got red" in result.stdout
    assert result.stdout.count("before") == 1
    assert len(set(agent.contexts)) == 1
    assert agent.contexts[0] in result.stderr


async def test_a_failed_turn_does_not_end_a_chat() -> None:
    async with sdk_agent() as agent:
        result = await run("chat", agent.url, stdin="fail\nsay\n")

    assert "failed: it broke" in result.stderr
    assert ANSWER in result.stdout


async def test_ctrl_c_cancels_the_turn_of_a_chat_and_a_second_one_leaves() -> None:
    async with sdk_agent("HTTP+JSON") as agent, process("chat", agent.url) as child:
        assert child.stdin
        assert child.stdout
        assert child.stderr
        child.stdin.write(b"hang\n")
        await child.stdin.drain()
        await child.stdout.readuntil(b"hanging")
        child.send_signal(signal.SIGINT)
        while b"again leaves" not in await child.stderr.readline():
            pass
        child.send_signal(signal.SIGINT)
        await child.wait()

    assert child.returncode == 130
    assert any(path.endswith(":cancel") for path in agent.paths())


async def test_a_person_sees_reasoning_and_tools_dim_beside_the_answer() -> None:
    async with sdk_agent() as agent:
        ours, theirs = os.openpty()
        command = (sys.executable, "-m", "opencode_a2a", "call", agent.url, "channels")
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=theirs
        )
        os.close(theirs)
        async with asyncio.timeout(60):
            out, _ = await child.communicate()
        seen = os.read(ours, 4096).decode()
        os.close(ours)

    assert out == b"the answer\n"
    assert "\x1b[2mlet me think\x1b[0m" in seen
    assert "\x1b[2mbash running list files\x1b[0m" in seen


async def test_a_message_that_is_refused_is_sent_once_and_the_reason_told() -> None:
    async def refusing(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            return await reply(send, card_json(made.url))
        body = orjson.loads((await receive())["body"])
        if body["method"] == "tasks/get":
            task = {"kind": "task", "id": "t", "contextId": "c", "status": {"state": "working"}}
            return await reply(send, orjson.dumps({"jsonrpc": "2.0", "id": 1, "result": task}))
        if body["method"].startswith("message/"):
            sent.append(body["method"])
        error = {"code": -32004, "message": f"refusal {len(sent)}"}
        return await reply(send, orjson.dumps({"jsonrpc": "2.0", "id": 1, "error": error}))

    sent: list[str] = []
    async with stranger(refusing) as made:
        result = await run("call", made.url, "7 yes", "--task", "t")

    assert sent == ["message/stream"]
    assert (result.exit_code, "refusal 1" in result.stderr) == (1, True)
