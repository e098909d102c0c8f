"""Mutated requests against a real service process (``make fuzz``).

Starts the service in front of an OpenCode that replays recordings, and sends it requests of both
versions and bindings, of every route and every extension method, each of them damaged somewhere:
in a value, in the bytes, in a header, in the path. Bad input has to get a clear error: a 5xx or
-32603, an error that shows a path or a traceback, a request without an answer and a process that
ends are failures, and are printed with the request. Everything stays on the loopback address. The
seed decides what is sent, apart from the ids that the service returned.
"""

import argparse
import asyncio
import copy
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx2

from opencode_a2a.a2a.operations import CARD_PATHS, OPERATIONS, PREFIXES, ROUTES
from opencode_a2a.a2a.types import Version
from opencode_a2a.events import JsonObject
from opencode_a2a.extensions import METHODS
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program
from tests.support.service import TOKEN, message, variables_for

WORKERS = 16
ANSWER_SECONDS = 30.0
SEND_SECONDS, READ_SECONDS = 3.0, 0.3
"""How long a message is waited for, which may have to wait for a person, and a stream is read."""
MAX_FAILURES = 20
PLAYS = ["plain-text"] * 6 + ["tool-completed", "permission-once", "question-answered"]
VARIABLES = {
    "A2A_ENABLE_SESSION_SHELL": "true",
    "A2A_ENABLE_WORKSPACE_MUTATIONS": "true",
    "A2A_FETCH_FILES": "false",  # nothing may leave the machine
    "A2A_LOG_LEVEL": "ERROR",
}
PAGES = [
    "/livez", "/readyz", "/health", "/metrics", "/openapi.json", "/docs", "/nothing",
    "/.well-known/agent-card.json", "/.well-known/agent.json",
    *(path for path, _ in CARD_PATHS),
]  # fmt: skip
VERBS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"]
DEEP_LIST: Any = json.loads("[" * 300 + "]" * 300)
DEEP_OBJECT: Any = json.loads('{"a":' * 300 + "1" + "}" * 300)
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**64, -(10**400), 1e308, -0.0, 0.1,
    float("nan"), float("inf"), "", " ", "\0", "\ud800", "\udfff\ud800", "é\u202e😀", "%00%2e",
    "x" * 300, "x" * 20_000, "../../etc/passwd", "/", "/etc/passwd", "~", "C:\\", "null",
    "ses_1", "msg_1", "prt_1", "per_1", "que_1", "wrk_1", "ctx:opencode-session:ses_1",
    "file:///etc/passwd", "http://127.0.0.1:9/x", "http://[::1", "data:,", "data:x;base64,%",
    "1.0", "0.3", "ROLE_USER", "user", "TASK_STATE_WORKING", "2026-11-15T09:00:00Z", "text/*",
    [], {}, [None], [[]], {"": ""}, {"__proto__": {}}, DEEP_LIST, DEEP_OBJECT,
    ["x"] * 1000, {str(n): n for n in range(1000)}, [{}] * 50, {"text": "x"}, {"id": {}},
]  # fmt: skip
HEADERS: dict[str, list[str]] = {
    "A2A-Version": ["1.0", "0.3", "", "2.0", "1", "0.3, 1.0", "x" * 3000, "1.0.0", "-1", "\x7f"],
    "Content-Type": ["application/json", "application/a2a+json", "text/plain", "", "a/b; c=\x01"],
    "Content-Encoding": ["gzip", "identity", "br", "x"],
    "Accept": ["text/event-stream", "application/json", "*/*;q=x", ""],
    "Accept-Encoding": ["gzip;q=0", "br, gzip", "*", "identity;q=0"],
    "Last-Event-ID": ["0", "1", "-1", "99999999999999999999", "1.1", "1.x", "é", "x" * 3000, ""],
    "A2A-Extensions": ["", ",,,", "urn:a2a:x", "https://example.org/" + "x" * 3000],
    "A2A-Hops": ["0", "3", "-1", "x", "9" * 400],
    "Authorization": ["", "Bearer", "Bearer x", "Basic %%%", "Basic Og==", "Digest x", "\x80"],
    "Host": ["", "evil.example", "127.0.0.1:1", "[::1", "a" * 300],
    "Origin": ["null", "https://evil.example", "", "x"],
    "traceparent": ["00-" + "0" * 32 + "-" + "0" * 16 + "-00", "x", ""],
    "X-Request-ID": ["x" * 3000, "\x01", "{}"],
    "Transfer-Encoding": ["chunked", "x"],
    "Expect": ["100-continue", "x"],
}
LEAK = re.compile(r'Traceback \(most recent|File \\?"/|site-packages|\.py\b|sqlalchemy|sqlite3')


@dataclass(slots=True)
class Request:
    verb: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    def __str__(self) -> str:
        shown = self.body[:2000] + (b"..." if len(self.body) > 2000 else b"")
        return f"{self.verb} {self.target[:2000]}\n  {self.headers}\n  {shown!r}"


@dataclass
class Report:
    """What came of a run."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    """The first request of each kind of failure, with its answer."""
    memory: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Requests sent, and megabytes that the service had then."""
    cut: int = 0
    """Streams and sends that were not heard to their end."""


class Maker:
    """Makes requests from a seed and from the ids that the service returned."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - to be repeatable
        self.known: deque[str] = deque(["ses_1", "per_1"], maxlen=200)
        self._methods = METHODS
        self._kinds: list[Callable[[], Request]] = [
            *([self._operation] * 4),
            *([self._extension] * 5),
            *([self._rest] * 4),
            self._page,
        ]

    def request(self) -> Request:
        """Make a request, in most cases with something wrong."""
        made = self.random.choice(self._kinds)()
        for damage in (self._damage_bytes, self._damage_header, self._damage_line):
            if self.random.random() < 0.08:
                damage(made)
        return made

    def learn(self, answer: str) -> None:
        """Keep some of the ids in an answer for later requests."""
        found = re.findall(
            r'"(?:id|taskId|contextId|request_id|session_id)":"([^"]{1,80})"', answer
        )
        self.known.extend(found[:5])

    # Requests as they should be

    def _operation(self) -> Request:
        line = self.random.choice([*Version])
        method = self.random.choice(OPERATIONS)
        name = method.named(self.random.choice([*Version, line, line])) or "tasks/list"
        params = self._message(line) if "essage" in name else self._of_task()
        return self._rpc(name, params, line)

    def _extension(self) -> Request:
        method = self.random.choice(self._methods)
        params: Any = copy.deepcopy(method.example)
        if "session_id" in params and self.random.random() < 0.7:
            params["session_id"] = self._id()
        if "request_id" in params and self.random.random() < 0.7:
            params["request_id"] = self._id()
        if self.random.random() < 0.2:
            params["metadata"] = self._metadata()
        return self._rpc(method.name, params, self.random.choice([*Version]))

    def _rpc(self, method: str, params: Any, line: Version) -> Request:
        envelope: Any = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        if self.random.random() < 0.1:
            envelope.pop("id")
        if self.random.random() < 0.85:
            # The envelope itself is damaged now and then, its parameters most of the time.
            if self.random.random() < 0.15:
                envelope = self._damage(envelope)
            else:
                envelope["params"] = self._damage(params)
        if self.random.random() < 0.02:
            envelope = [envelope] * self.random.choice([1, 2, 20])
        return self._json("POST", "/", envelope, line)

    def _rest(self) -> Request:
        line = self.random.choice([*Version])
        path, verbs = self.random.choice([*ROUTES.items()])
        names = {"id": self._path_value(), "taskId": self._path_value()}
        target = PREFIXES[line] + path.format(**names)
        if self.random.random() < 0.4:
            fields = ("historyLength", "pageSize", "pageToken", "status", "contextId", "after")
            chosen = self.random.sample(fields, 2)
            query = {name: self._text(self._value()) for name in chosen}
            target += "?" + urlencode(query, errors="replace")
        verb = self.random.choice([*verbs])
        body: Any = self._message(line) if "message" in path else {}
        if self.random.random() < 0.8:
            body = self._damage(body)
        return self._json(verb, target, body if verb == "POST" else None, line)

    def _page(self) -> Request:
        line = self.random.choice([*Version])
        return self._json("GET", self.random.choice(PAGES), None, line)

    def _json(self, verb: str, target: str, body: Any, line: Version) -> Request:
        headers = {"Authorization": f"Bearer {TOKEN}", "A2A-Version": line.value}
        content = b""
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body, ensure_ascii=self.random.random() < 0.9).encode(
                errors="surrogatepass"
            )
        return Request(verb, target, headers, content)

    def _message(self, line: Version) -> Any:
        number = f"m-{self.random.randrange(10**6)}"
        params: Any = message("hello", messageId=number)
        sent = params["message"]
        if line is Version.V03:
            sent |= {"role": "user", "kind": "message", "parts": [{"kind": "text", "text": "hi"}]}
        more: list[Any] = [
            {"raw": "aGk=", "filename": "a.txt", "mediaType": "text/plain"},
            {"url": "http://127.0.0.1:9/a.png", "mediaType": "image/png"},
            {"data": {"a": [1, None]}},
            {"kind": "file", "file": {"bytes": "aGk=", "mimeType": "text/plain", "name": "a"}},
            {"kind": "data", "data": {"a": 1}},
        ]
        if self.random.random() < 0.4:
            sent["parts"] += self.random.sample(more, 2)
        if self.random.random() < 0.2:
            sent["taskId"] = self._id()
        if self.random.random() < 0.2:
            sent["contextId"] = self._id()
        if self.random.random() < 0.2:
            sent["referenceTaskIds"] = [self._id()]
        if self.random.random() < 0.4:
            quick = "returnImmediately" if line is Version.V1 else "blocking"
            params["configuration"] = {
                quick: line is Version.V1,
                "historyLength": 1,
                "acceptedOutputModes": ["text/plain"],
            }
        if self.random.random() < 0.3:
            params["metadata"] = self._metadata()
        return params

    def _metadata(self) -> Any:
        return {
            "shared": {
                "session": {"id": self._id()},
                "model": {"providerID": "fake", "modelID": "fake-1"},
            },
            "opencode": {"directory": ".", "workspace": {"id": "wrk_1"}},
        }

    def _of_task(self) -> Any:
        return {
            "id": self._id(),
            "taskId": self._id(),
            "historyLength": 1,
            "pageSize": 5,
            "contextId": self._id(),
            "pushNotificationConfig": {"url": "http://127.0.0.1:9/", "token": "x"},
        }

    def _id(self) -> str:
        return self.random.choice(self.known)

    # Damage

    def _value(self) -> Any:
        if self.random.random() < 0.15:
            return self._id()
        return copy.deepcopy(self.random.choice(HOSTILE))  # it may be damaged further

    def _text(self, value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)[:2000]

    def _path_value(self) -> str:
        if self.random.random() < 0.6:
            return quote(self._id(), safe="")
        value = self._text(self._value())[:3000].encode(errors="replace")
        return quote(value, safe=self.random.choice(["", ":", "%"])) or "-"

    def _damage(self, value: Any) -> Any:
        """Return the value with one or a few of its inner values replaced, removed or added."""
        copied: Any = {"": copy.deepcopy(value)}
        for _ in range(self.random.choice([1, 1, 1, 2, 4])):
            places = [*self._places(copied)]
            holder, key = self.random.choice(places)
            named = isinstance(key, str) and key != ""
            match self.random.randrange(8):
                case 0 if key != "":
                    del holder[key]
                case 1 if named:
                    holder[self._text(self._value())[:50]] = holder.pop(key)
                case 2 if named:
                    holder[self.random.choice([key.upper(), f"{key}_", f"_{key}"])] = self._value()
                case 3:
                    holder[key] = [
                        copy.deepcopy(holder[key]) for _ in range(self.random.choice([1, 2, 50]))
                    ]
                case 4:
                    other, its = self.random.choice(places)
                    with suppress(KeyError, IndexError):
                        holder[key] = copy.deepcopy(other[its])
                case _:
                    holder[key] = self._value()
            if len(json.dumps(copied)) > 200_000:
                break
        return copied[""]

    def _places(self, value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
        """Return every place in a value: what holds it, and under which key."""
        keys: list[Any] = []
        if isinstance(value, dict):
            keys = [*value]  # pyright: ignore[reportUnknownArgumentType] # any JSON
        elif isinstance(value, list):
            keys = [*range(min(len(value), 20))]  # pyright: ignore[reportUnknownArgumentType] # same
        found: list[tuple[Any, Any]] = [(value, key) for key in keys]
        if depth < 8:
            for key in keys:
                found += self._places(value[key], depth + 1)
        return found[:400]

    def _damage_bytes(self, made: Request) -> None:
        body = bytearray(made.body)
        at = self.random.randrange(len(body) + 1)
        match self.random.randrange(6):
            case 0:
                del body[at:]
            case 1:
                body[at:at] = bytes(self.random.randrange(256) for _ in range(4))
            case 2:
                body[at : at + 1] = self.random.choice(
                    [b"\xff", b"\0", b'"', b"{", b"]", b"\xed\xa0"]
                )
            case 3:
                body[:0] = b"\xef\xbb\xbf"
            case 4:
                body = bytearray(body.decode(errors="replace").encode("utf-16"))
            case _:
                body += body[at:]
        made.body = bytes(body)

    def _damage_header(self, made: Request) -> None:
        name = self.random.choice([*HEADERS])
        value = self.random.choice(HEADERS[name])
        if value and value.isprintable() and value.isascii():
            made.headers[name] = value
        else:
            made.headers.pop(name, None)

    def _damage_line(self, made: Request) -> None:
        if self.random.random() < 0.5:
            made.verb = self.random.choice(VERBS)
            return
        at = self.random.randrange(1, len(made.target) + 1)
        extra = self.random.choice(["/", "//", "/..", "%00", "%ff", ":", "?", "?a=b&a=c", ";", "%"])
        made.target = made.target[:at] + extra + made.target[at:]


@dataclass
class Fuzzer:
    """Sends what a maker makes, and judges the answers."""

    maker: Maker
    program: Program
    http: httpx2.AsyncClient
    secrets: tuple[str, ...]
    """Paths that no error may show."""
    report: Report = field(default_factory=Report)

    async def send(self, made: Request) -> None:
        url = httpx2.URL(self.program.url).copy_with(raw_path=made.target.encode(errors="replace"))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                status, text = await self._exchange(made, url)
        except TimeoutError:
            self._fail("no answer", made, "")
        except httpx2.TransportError as error:
            # A body that is not what its headers say ends in a closed connection.
            if not {"Transfer-Encoding", "Expect", "Host"} & {*made.headers}:
                self._fail(f"no answer: {type(error).__name__}", made, str(error))
        else:
            self.report.statuses[status] += 1
            self._judge(made, status, text)

    async def _exchange(self, made: Request, url: httpx2.URL) -> tuple[int, str]:
        request = self.http.build_request(
            made.verb, url, headers=made.headers, content=made.body or None
        )
        # A message may have to wait for its turn behind one that waits for a person.
        waits = b"essage" in made.body or "message" in made.target
        try:
            async with asyncio.timeout(SEND_SECONDS if waits else None):
                response = await self.http.send(request, stream=True)
        except TimeoutError:
            self.report.cut += 1
            return 0, ""
        chunks: list[bytes] = []
        try:
            streams = "event-stream" in response.headers.get("content-type", "")
            async with asyncio.timeout(READ_SECONDS if streams else None):
                async for chunk in response.aiter_bytes():
                    chunks.append(chunk)
                    if sum(map(len, chunks)) > 2**20:
                        break
        except TimeoutError:
            self.report.cut += 1
        finally:
            await response.aclose()
        return response.status_code, b"".join(chunks).decode(errors="replace")

    def _judge(self, made: Request, status: int, text: str) -> None:
        # The simulated OpenCode runs in this busy process, and is slow to answer now and then.
        upstream = status in (502, 503, 504) and "UPSTREAM_" in text
        unready = status == 503 and made.target.partition("?")[0].endswith("/readyz")
        if status >= 500 and not (upstream or unready):
            self._fail(f"status {status}", made, text)
        if re.search(r'"code":\s*-32603\b', text):
            self._fail("code -32603", made, text)
        if told := errors_in(status, text):
            if LEAK.search(told):
                self._fail("an error tells code", made, text)
            if any(secret in told for secret in self.secrets):
                self._fail("an error tells a path", made, text)
        else:
            self.maker.learn(text)

    def _fail(self, what: str, made: Request, text: str) -> None:
        method = re.search(rb'"method": ?"([\w./]+)"', made.body)
        kind = f"{what}: {method[1].decode() if method else made.target.partition('?')[0][:40]}"
        if kind not in self.report.failures:
            self.report.failures[kind] = f"{made}\n  -> {text[:1500]}"
            print(f"FAILED {kind}\n{self.report.failures[kind]}", flush=True)

    async def settle(self) -> None:
        """Cancel what waits for a person."""
        listing: JsonObject = {"status": "TASK_STATE_INPUT_REQUIRED", "pageSize": 100}
        waiting = (await Caller(self.program).answer("ListTasks", listing))["result"]["tasks"]
        for task in waiting:
            await Caller(self.program).answer("CancelTask", {"id": task["id"]})

    async def check(self) -> None:
        """See that the service still does its work."""
        await self.settle()
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await Caller(self.program).answer("SendMessage", message("hello"))
        if answer["result"]["task"]["status"]["state"] != "TASK_STATE_COMPLETED":
            self.report.failures["a plain message after all"] = str(answer)

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.program.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


def errors_in(status: int, text: str) -> str:
    """Return the errors in a response; a task that is shown may have been given a directory."""
    if status >= 400:
        return text
    errors: list[str] = []
    for line in text.split("\n"):  # the events of a stream, or one document
        with suppress(ValueError):
            value: Any = json.loads(line.removeprefix("data: "))
            if isinstance(value, dict) and "error" in value:
                errors.append(line)
    return "\n".join(errors)


@asynccontextmanager
async def started(seed: int, state: Path) -> AsyncGenerator[tuple[Fuzzer, FakeOpenCode]]:
    """Run the service and what stands behind it."""
    workspace = state / "workspace"
    workspace.mkdir()
    async with FakeOpenCode(workspace).running() as opencode:
        variables = variables_for(opencode, state / "state", **VARIABLES)
        limits = httpx2.Limits(max_connections=WORKERS * 2)
        async with (
            Program(variables) as program,
            httpx2.AsyncClient(timeout=None, trust_env=False, limits=limits) as http,
        ):
            secrets = (str(state), str(Path(__file__).parent.parent))
            yield Fuzzer(Maker(seed), program, http, secrets), opencode


async def fuzz(seed: int, count: int, state: Path) -> Report:
    """Send so many requests, and return what came of them."""
    async with started(seed, state) as (fuzzer, opencode):
        report, sent = fuzzer.report, 0

        async def work() -> None:
            nonlocal sent
            while sent < count and len(report.failures) < MAX_FAILURES:
                sent += 1
                if sent % 500 == 0:
                    opencode.play(fuzzer.maker.random.choice(PLAYS))
                if sent % max(count // 20, 1) == 0:
                    report.memory.append((sent, fuzzer.megabytes()))
                    await fuzzer.settle()
                await fuzzer.send(fuzzer.maker.request())

        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(work())
        opencode.play("plain-text")
        await fuzzer.check()
        if await fuzzer.program.stop() != 0:
            report.failures["the end of the process"] = "\n".join(fuzzer.program.lines[-20:])
        noisy = [line for line in fuzzer.program.lines if "Traceback" in line]
        if noisy:
            report.failures["a traceback in the log"] = noisy[0][:3000]
        fuzzer.program.lines.clear()  # thousands of audit records, which it would print
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.count} requests", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as state:
        report = asyncio.run(fuzz(options.seed, options.count, Path(state)))
    print(f"{time.monotonic() - began:.0f} s, {report.cut} not heard to the end")
    print("statuses", dict(sorted(report.statuses.items())))
    print("megabytes", " ".join(f"{sent}:{size:.0f}" for sent, size in report.memory))
    for kind, shown in report.failures.items():
        print(f"FAILED {kind}\n{shown}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
