"""The commands against our own service with a real OpenCode, in both versions of A2A."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from tests.support.backstage import Backstage, script
from tests.support.ports import free_port
from tests.support.program import Program
from tests.support.service import TOKEN, serving, settings_for, variables_for

pytestmark = pytest.mark.live

BASH = {"tool": "bash", "input": {"command": "echo ran", "description": "Say it"}}


@pytest.fixture
async def url(asking_backstage: Backstage, tmp_path: Path) -> AsyncGenerator[str]:
    """A service that is where its card says."""
    port = free_port()
    settings = settings_for(asking_backstage, tmp_path, A2A_PORT=str(port))
    async with serving(settings, port=port) as running:
        yield running.url


@pytest.fixture(params=["1.0", "0.3"], autouse=True)
def line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Each version, with the credential of the environment."""
    monkeypatch.setenv("A2A_CLIENT_PROTOCOL_VERSION", request.param)
    monkeypatch.setenv("A2A_CLIENT_BEARER_TOKEN", TOKEN)
    monkeypatch.setenv("A2A_STATE_DIR", str(tmp_path))
    return request.param


@dataclass(frozen=True)
class Result:
    stdout: str
    stderr: str
    exit_code: int


async def run(*args: str, stdin: str | None = None) -> Result:
    """Run the program as a person would."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "opencode_a2a", *args, stdin=pipe, stdout=pipe, stderr=pipe
    )
    async with asyncio.timeout(60):
        out, err = await child.communicate((stdin or "").encode())
    return Result(out.decode(), err.decode(), child.returncode or 0)


async def test_a_call_prints_the_answer(url: str) -> None:
    result = await run("call", url, script({"think": "hm"}, {"say": "two words"}))

    assert (result.stdout, result.stderr, result.exit_code) == ("two words\n", "", 0)


async def test_without_a_stream_the_answer_is_the_same(url: str) -> None:
    result = await run("call", url, script({"say": "two words"}), "--no-stream")

    assert (result.stdout, result.exit_code) == ("two words\n", 0)


async def test_json_lines_tell_the_turn(url: str) -> None:
    result = await run("call", url, script({"think": "hm"}, {"say": "yes"}), "--json")

    told = [orjson.loads(line) for line in result.stdout.splitlines()]
    kinds = [event["event"] for event in told]
    assert (kinds[0], kinds[-1], result.exit_code) == ("task", "finished", 0)
    assert {"reasoning", "answer"} <= set(kinds)
    assert (told[-1]["state"], told[-1]["answer"]) == ("completed", "yes")


async def test_an_answer_that_the_model_did_not_end_itself_is_told(url: str) -> None:
    text = script({"say": "half a"}, {"finish": "length"})
    result = await run("call", url, text)
    told = orjson.loads((await run("call", url, text, "--json")).stdout.splitlines()[-1])

    assert result.stdout == "half a\n"
    assert "the model reached the limit of its output" in result.stderr
    assert told["cut_short"] is True


async def test_the_exit_status_tells_the_end(url: str) -> None:
    failed = await run("call", url, script({"error": 400, "message": "no such thing"}))
    usage = await run("call", url)
    waits = await run("call", url, script(BASH, {"say": "done"}))
    task_id = waits.stderr.split("--task ")[1].split()[0]
    answered = await run("call", url, "--task", task_id, "once")

    assert failed.exit_code == 1
    assert failed.stderr.startswith("failed: ")
    assert usage.exit_code == 2
    assert waits.exit_code == 3
    assert "echo ran" in waits.stderr
    assert (answered.stdout, answered.exit_code) == ("done\n", 0)


async def test_a_permission_is_answered_in_a_chat(url: str) -> None:
    lines = f"{script({'say': 'hello'})}\n{script(BASH, {'say': 'done'})}\no\n/quit\n"

    result = await run("chat", url, stdin=lines)

    assert result.exit_code == 0
    assert "hello" in result.stdout
    assert "echo ran" in result.stderr
    assert "done" in result.stdout


async def test_a_service_says_where_its_token_is_good(
    asking_backstage: Backstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("A2A_CLIENT_BEARER_TOKEN")
    variables = variables_for(asking_backstage, tmp_path)
    del variables["A2A_BEARER_TOKEN"]
    async with Program(variables) as program:
        [file] = (tmp_path / "services").iterdir()
        mode, said = file.stat().st_mode & 0o777, file.read_text()
        called = await run("call", f"localhost:{program.port}", script({"say": "yes"}))
        status = await program.stop()

    assert (mode, said) == (0o600, f"{program.url}\n")
    assert (called.stdout, called.exit_code) == ("yes\n", 0)
    assert status == 0
    assert not file.exists()


async def test_tasks_are_listed_shown_and_followed(url: str, line: str) -> None:
    done = await run("call", url, script({"say": "yes"}), "--json")
    task_id = orjson.loads(done.stdout.splitlines()[-1])["task_id"]

    shown = await run("task", url, task_id)
    followed = await run("task", url, task_id, "--follow")
    listed = await run("tasks", url)
    canceled = await run("cancel", url, task_id)

    assert shown.stdout == followed.stdout == "yes\n"
    assert task_id in listed.stdout or line == "0.3"
    assert canceled.exit_code == 1
