"""What refused requests and ended turns leave in memory: nothing, of whatever kind they are."""

import asyncio
import base64
import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from opencode_a2a.turns.attempt import Attempt
from opencode_a2a.turns.turn import Turn
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program
from tests.support.replicas import until
from tests.support.service import Running, variables_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

EACH = int(os.environ.get("OPENCODE_A2A_TEST_REFUSALS", "8"))
"""Requests of each kind; with 800 they are more than 10,000 in all."""
MEGABYTES = 60
TEXT = "x" * 1_000_000
MANY = [{"text": f"part {number}"} for number in range(900)]
FILE = {"raw": base64.b64encode(b"\xff" * 700_000).decode(), "mediaType": "image/png"}
V1, V03 = {"A2A-Version": "1.0"}, {"A2A-Version": "0.3"}


class Refused(NamedTuple):
    body: Any
    """What is sent; bytes as they are."""
    path: str = "/"
    headers: Mapping[str, str] = V1
    verb: str = "POST"


def called(method: str, params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def sent(**wrong: Any) -> dict[str, Any]:
    parts = [{"text": TEXT}]
    return {"message": {"messageId": "m", "role": "ROLE_USER", "parts": parts, **wrong}}


def sent03(**wrong: Any) -> dict[str, Any]:
    parts = [{"kind": "text", "text": TEXT}]
    return {
        "message": {"kind": "message", "messageId": "m", "role": "user", "parts": parts} | wrong
    }


REFUSED = {
    "invalid params": Refused(called("SendMessage", sent(messageId=""))),
    "many wrong parts": Refused(called("SendMessage", sent(parts=[*MANY, {"text": TEXT}], role=7))),
    "an unknown field of 1 MB": Refused(called("SendMessage", sent(role=TEXT))),
    "unknown task": Refused(called("SendMessage", sent(taskId="none"))),
    "unknown method": Refused(called("NoSuchMethod", {"text": TEXT})),
    "long method": Refused(called(TEXT, {})),
    "broken JSON": Refused(b'{"jsonrpc": "2.0", "text": "' + TEXT.encode()),
    "half a character": Refused(b'{"text": "\\ud800' + TEXT.encode() + b'"}'),
    "too deep": Refused(b"[" * 500_000 + b"]" * 500_000),
    "a key twice": Refused(b'{"a": "' + TEXT.encode() + b'", "a": 1}'),
    "a batch": Refused([called("SendMessage", sent())]),
    "wrong version": Refused(called("SendMessage", sent()), headers={"A2A-Version": "7.0"}),
    "unauthorised": Refused(called("SendMessage", sent()), headers={"Authorization": "Bearer no"}),
    "wrong path": Refused(sent(), "/no/such/path"),
    "wrong verb": Refused(sent(), "/message:send", verb="PUT"),
    "wrong type": Refused(sent(), headers={**V1, "Content-Type": "text/plain"}),
    "0.3, invalid params": Refused(called("message/send", sent03(role="x")), headers=V03),
    "0.3, stream": Refused(called("message/stream", sent03(messageId=1)), headers=V03),
    "REST, invalid params": Refused(sent(role="x"), "/message:send"),
    "REST, unknown task": Refused(sent(taskId="none"), "/message:send"),
    "REST, stream": Refused(sent(contextId=5), "/message:stream"),
    "REST 0.3": Refused(sent03(role="x"), "/v1/message:send", V03),
    "a method": Refused(called("opencode.sessions.list", {"text": TEXT})),
    "a method, unknown session": Refused(
        called("opencode.sessions.prompt_async", {"session_id": "ses_1", "request": {"x": TEXT}})
    ),
    "a file": Refused(called("SendMessage", sent(parts=[FILE], taskId="none"))),
    "a broken file": Refused(sent(parts=[{"raw": TEXT + "!"}]), "/message:send"),
}


def resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.requirement("I8")
async def test_refused_requests_leave_nothing_in_memory(tmp_path: Path) -> None:
    async with FakeOpenCode(tmp_path / "workspace").running() as opencode:
        settings = {
            "A2A_RATE_LIMIT_ENABLED": "true",
            "A2A_RATE_LIMIT_MAX_REQUESTS": str((EACH + 1) * (len(REFUSED) - 2)),
            "A2A_RATE_LIMIT_WINDOW_SECONDS": "3600",
            "A2A_LOG_LEVEL": "ERROR",
        }
        async with Program(variables_for(opencode, tmp_path, **settings)) as program:

            async def refuse(one: Refused, limit: asyncio.Semaphore) -> int:
                body = one.body if isinstance(one.body, bytes) else orjson.dumps(one.body)
                kind = {"Content-Type": "application/json"}
                async with limit:
                    answer = await program.http.request(
                        one.verb, one.path, content=body, headers={**kind, **one.headers}
                    )
                assert answer.status_code < 500, answer.text[:300]
                assert answer.status_code != 200 or b'"error"' in answer.content
                assert b"-32603" not in answer.content
                return answer.status_code

            limit = asyncio.Semaphore(4)
            for one in REFUSED.values():
                await refuse(one, limit)
            before, grown = resident(program.pid), dict[str, float]()
            for name, one in REFUSED.items():
                at = resident(program.pid)
                await asyncio.gather(*(refuse(one, limit) for _ in range(EACH)))
                grown[name] = resident(program.pid) - at
            limited = [await refuse(REFUSED["invalid params"], limit) for _ in range(EACH)]
            after = resident(program.pid)

    assert 429 in limited
    print("\n".join(f"{round(more):6} MB {name}" for name, more in grown.items()))
    assert after - before < MEGABYTES, grown


def of_turns() -> list[str]:
    return [type(one).__name__ for one in gc.get_objects() if isinstance(one, Attempt | Turn)]


FREED = """
import asyncio, contextlib
from opencode_a2a.web import socket

def megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

async def main():
    kept = [bytes(5_000) for _ in range(20_000)][::50]
    before = megabytes()
    socket.COLLECT_SECONDS = socket.COLLECT_AT_LEAST_SECONDS = 0.0
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(socket.collect_garbage(), 0.2)
    print(len(kept), before - megabytes())

asyncio.run(main())
"""


@pytest.mark.requirement("I8")
async def test_what_was_freed_between_things_that_stay_is_returned_to_the_system() -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FREED, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await program.communicate()
    _, returned = map(int, printed.split())

    assert returned > 70  # of about 100


@pytest.mark.parametrize("transcript", ["plain-text", "tool-completed", "permission-once"])
async def test_a_turn_that_has_ended_needs_no_garbage_collector(
    service: Running, opencode: FakeOpenCode, transcript: str
) -> None:
    opencode.play(transcript)
    caller = Caller(service)
    gc.collect()
    gc.disable()
    try:
        task = await caller.send("run it")
        if task.state == "input_required":
            task = await caller.send("yes", task=task.id)
        await until(lambda: not of_turns())
    finally:
        gc.enable()

    assert task.state == "completed"
