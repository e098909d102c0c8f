"""An OpenCode that replays recordings: sessions, prompts and events over a socket, no model.

Tests of the service stand on it when a real OpenCode would be slow or could not be stopped in
the middle of a word. A prompt plays a recording with the ids of its own session; what is stored
is the fold of what was told. A recorded permission or question waits for its reply.
"""

import asyncio
import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import orjson
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.opencode.events import Event, PartDelta, SessionChanged, decode
from opencode_a2a.opencode.types import AssistantMessage, MessageWithParts, UserMessage
from opencode_a2a.server.sse import Streams
from tests.support.opencode_state import OpenCodeState, SessionState, frames
from tests.support.running import running

_ID = re.compile(rb"\b(ses|msg|prt|per|que|evt)_\w+")
_SETTLED = {b"permission.replied", b"question.replied", b"question.rejected"}
_BEFORE = {b"server.connected", b"session.created"}
"""What a recording begins with and a prompt does not cause."""
_HEARTBEAT_SECONDS = 10.0
_CONSTANT: dict[str, Json] = {
    "/global/health": {"healthy": True, "version": "1.18.33"},
    "/config": {"model": "fake/fake-1"},
    "/config/providers": {"providers": [], "default": {}},
}
_count = itertools.count(1)


def new_id(prefix: str) -> str:
    """Make an id; ids sort by time, as OpenCode's do."""
    stamp = (_now() * 4096 + next(_count)) % 2**48
    return f"{prefix}_{stamp:012x}FakeFakeFakeFa"


def _now() -> int:
    return time.time_ns() // 1_000_000


@cache
def recorded(name: str) -> list[tuple[bytes, bytes]]:
    """Return the kind and the frame of every event that a prompt causes."""
    told = ((orjson.loads(frame)["payload"]["type"].encode(), frame) for frame in frames(name))
    return list(itertools.dropwhile(lambda event: event[0] in _BEFORE, told))


class Hold:
    """A place in a recording at which turns stop until they are released."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind = kind.encode()
        self.count = count
        self.reached = asyncio.Event()
        self.released = asyncio.Event()
        self.next: Hold | None = None
        """Where turns that were released stop again."""


class _Turn:
    """One prompt being answered."""

    def __init__(self, opencode: "FakeOpenCode", session_id: SessionId, prompt: JsonObject) -> None:
        self._opencode = opencode
        self._session_id = session_id
        self._prompt = prompt
        given = prompt.get("messageID")
        self._message_id = given if isinstance(given, str) else new_id("msg")
        self._names: dict[bytes, bytes] = {}
        self._answered: defaultdict[bytes, asyncio.Event] = defaultdict(asyncio.Event)
        self._growing: defaultdict[str, str] = defaultdict(str)
        """The text of parts by their deltas, which are stored only at the end of a part."""
        self.aborted = asyncio.Event()

    async def play(self, hold: Hold | None) -> None:
        """Tell the recording; stop where it waits for a reply, and where tests want it to."""
        left = hold.count if hold else 0
        for kind, frame in self._opencode.played(self._prompt):
            frame = self._renamed(frame)
            if kind in _SETTLED:
                await self._unless_aborted(self._answered[_request_id(frame)])
            event = self._opencode.tell(frame)
            if isinstance(event, PartDelta):
                self._growing[event.part_id] += event.delta
                if self._opencode.pace:
                    await asyncio.sleep(self._opencode.pace)
            if hold is not None and kind == hold.kind and left:
                left -= 1
                if not left:
                    hold.reached.set()
                    await self._unless_aborted(hold.released)
                    if hold.next is not None:
                        hold = hold.next
                        left = hold.count
            if self.aborted.is_set():
                self._end()
                return

    def answer(self, request_id: str) -> None:
        self._answered[request_id.encode()].set()

    async def _unless_aborted(self, event: asyncio.Event) -> None:
        waits = {asyncio.create_task(one.wait()) for one in (event, self.aborted)}
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()

    def _end(self) -> None:
        """Say what OpenCode says of a turn that was aborted."""
        error: JsonObject = {"name": "MessageAbortedError", "data": {"message": "Aborted"}}
        answer = self._opencode.last_answer(self._session_id)
        told = [("session.error", {"error": error}), *_IDLE]
        if answer is None and self._opencode.stops_without_answer:
            failure = self._opencode.failure_without_answer
            told = [*([("session.error", {"error": failure})] if failure else []), *_IDLE]
        if answer is not None:
            parts = [_dumped(part) for part in answer.parts if part.id in self._growing]
            for part in parts:
                part["text"] = self._growing[part["id"]]
                part["time"]["end"] = _now()
            told += [("message.part.updated", {"part": part}) for part in parts]
            info = _dumped(answer.info)
            info |= {"error": error, "time": {**info["time"], "completed": _now()}}
            told += [("message.updated", {"info": info}), *_IDLE]
        for kind, properties in told:
            event = {"sessionID": self._session_id, **properties}
            self._opencode.tell_event(kind, event)

    def _renamed(self, frame: bytes) -> bytes:
        frame = _ID.sub(self._name, frame).replace(
            b'"/workspace"', orjson.dumps(str(self._opencode.workspace))
        )
        for recorded, said in self._opencode.said.items():
            frame = frame.replace(recorded, said)
        return frame

    def _name(self, found: re.Match[bytes]) -> bytes:
        """Return our name for a recorded id: the first session and message are the caller's."""
        prefix, recorded = found[1].decode(), found[0]
        if recorded not in self._names:
            first = not any(name.startswith(found[1]) for name in self._names)
            ours = {"ses": self._session_id, "msg": self._message_id} if first else {}
            self._names[recorded] = ours.get(prefix, new_id(prefix)).encode()
        return self._names[recorded]


_IDLE: list[tuple[str, JsonObject]] = [
    ("session.status", {"status": {"type": "idle"}}),
    ("session.idle", {}),
]


class FakeOpenCode:
    """One OpenCode; ``url`` is where it is."""

    password = "not-asked-for"  # noqa: S105 - nobody checks it

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.url = ""
        self.prompts: list[JsonObject] = []
        """Every prompt that was sent, in order."""
        self.agents: list[Json] = []
        """The agents that there are."""
        self.workspaces: list[Json] = []
        self.worktrees: list[Json] = []
        self.commands: list[Json] = []
        """The commands that there are."""
        self.creating = asyncio.Event()
        """Clear it to let sessions wait before they are made."""
        self.creating.set()
        self.changing = asyncio.Event()
        """Clear it to let changes of sessions wait before they are made."""
        self.changing.set()
        self.listing = asyncio.Event()
        """Clear it to let lists of sessions wait."""
        self.listing.set()
        self.stopping = asyncio.Event()
        """Clear it to let aborts wait before turns stop."""
        self.stopping.set()
        self.held_agents: asyncio.Event | None = None
        """The next list of agents waits for this."""
        self.held_session: asyncio.Event | None = None
        """The next read of a session waits for this."""
        self.starved = False
        """While set, sessions at work are not listed as busy yet, and an abort finds nothing."""
        self.statuses_before_failure: int | None = None
        """How many lists of busy sessions are answered before one fails; None: all are."""
        self._asked: Counter[str] = Counter()
        self._asking = asyncio.Condition()
        self.pace = 0.0
        """Seconds between two pieces of text."""
        self.said: dict[bytes, bytes] = {}
        """What the next prompts say instead of a recorded word."""
        self.lost: set[str] = set()
        """The types of events that are stored, and told to nobody."""
        self.figures: dict[str, str] = {}
        """The JSON that messages have in place of the numbers under a key."""
        self.refusing: set[str] = set()
        """The texts of prompts that are not taken."""
        self.stops_without_answer = False
        """Whether an answer that is stopped before it has begun is not stored, as in OpenCode 2."""
        self.failure_without_answer: JsonObject | None = None
        """Why it was stopped then."""
        self._plays = "plain-text"
        self._hold: Hold | None = None
        self.failing_reply: asyncio.Event | None = None
        """The next reply to a request waits for this, and then fails."""
        self.replies_before_failure = 0
        """How many replies are taken before that one."""
        self.loses_reply = False
        """Whether the next reply to a request is taken, and the response to it lost."""
        self.replies: list[RequestId] = []
        """The requests that were replied to, as far as the reply was taken."""
        self.aborts: list[SessionId] = []
        """The sessions that were to stop."""
        self._state = OpenCodeState()
        self._sessions: dict[SessionId, JsonObject] = {}
        self._deleted: set[SessionId] = set()
        self._turns: dict[SessionId, _Turn] = {}
        self._at_work: set[_Turn] = set()
        self._playing: set[asyncio.Task[None]] = set()
        self._readers: set[asyncio.Queue[bytes]] = set()

    def play(self, name: str) -> None:
        """Choose what the next prompts play."""
        self._plays = name

    def hold(self, kind: str = "message.part.delta", count: int = 1) -> Hold:
        """Let the next prompts stop after so many events of a kind, until released."""
        self._hold = Hold(kind, count)
        return self._hold

    def step(self, count: int = 1) -> None:
        """Let turns that are held go on for so many more events of the kind."""
        assert self._hold is not None
        held, self._hold = self._hold, Hold(self._hold.kind.decode(), count)
        held.next = self._hold
        held.released.set()

    def release(self) -> None:
        """Let turns that are held go on, and later ones not stop."""
        if self._hold is not None:
            self._hold.released.set()
        self._hold = None

    async def idle(self) -> None:
        """Wait until no turn runs."""
        async with asyncio.timeout(60):
            await asyncio.gather(*self._playing)

    async def asked(
        self,
        what: Literal["status", "abort", "change", "agents", "session", "sessions"],
        times: int,
    ) -> None:
        """Wait until it was asked so often, from now on, for something, or told to do something."""
        wanted = self._asked[what] + times
        async with asyncio.timeout(60), self._asking:
            await self._asking.wait_for(lambda: self._asked[what] >= wanted)

    @property
    def texts(self) -> list[Any]:
        """The texts that were sent as prompts, in order."""
        prompts: list[Any] = [*self.prompts]
        return [part["text"] for prompt in prompts for part in prompt["parts"]]

    def rules(self, session_id: str) -> list[Any]:
        """Return the permission rules that a session has been given."""
        info: Any = self._sessions[SessionId(session_id)]
        return [*info.get("permission", [])]

    async def prompted(self, count: int) -> None:
        """Wait until so many prompts were sent."""
        async with asyncio.timeout(60), self._asking:
            await self._asking.wait_for(lambda: len(self.prompts) >= count)

    async def _count(self, what: str) -> None:
        async with self._asking:
            self._asked[what] += 1
            self._asking.notify_all()

    @property
    def at_work(self) -> bool:
        """Whether a prompt is being answered, or is about to be."""
        return bool(self._at_work)

    def played(self, prompt: JsonObject) -> list[tuple[bytes, bytes]]:
        """Return what a prompt plays: the kind and the frame of each event."""
        return recorded(self._plays)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncGenerator["FakeOpenCode"]:
        app = Starlette(routes=list(self._routes()))
        async with running(app, port, streams=_Leave(self)) as self.url:
            yield self

    # Telling

    def tell(self, frame: bytes) -> Event | None:
        """Store what an event says, and send it to all readers."""
        event = decode(frame)
        if isinstance(event, SessionChanged) and event.session_id not in self._deleted:
            self._sessions[event.session_id] = orjson.loads(frame)["payload"]["properties"]["info"]
        if event is not None:
            self._state.apply(event)
        if event is None or type(event).__name__ not in self.lost:
            for reader in self._readers:
                reader.put_nowait(self._figured(frame))
        return event

    def _figured(self, body: bytes) -> bytes:
        for key, value in self.figures.items():
            number = b'"%b":[-+.\\w]+' % key.encode()
            body = re.sub(number, b'"%b":%b' % (key.encode(), value.encode()), body)
        return body

    def _answer(self, content: Json) -> Response:
        return Response(self._figured(orjson.dumps(content)), media_type="application/json")

    def tell_event(self, kind: str, properties: JsonObject) -> None:
        self.tell(orjson.dumps(self._envelope(kind, properties)))

    def delete(self, session_id: SessionId) -> None:
        """Delete a session, and tell nobody."""
        del self._sessions[session_id]
        self._deleted.add(session_id)

    def _envelope(self, kind: str, properties: JsonObject) -> JsonObject:
        payload: JsonObject = {"id": new_id("evt"), "type": kind, "properties": properties}
        return {"directory": str(self.workspace), "project": "0" * 40, "payload": payload}

    def last_answer(self, session_id: SessionId) -> MessageWithParts | None:
        answers = [m for m in self._messages(session_id) if isinstance(m.info, AssistantMessage)]
        return answers[-1] if answers else None

    def _messages(self, session_id: SessionId) -> list[MessageWithParts]:
        return self._state.sessions.get(session_id, SessionState()).messages()

    # Answering

    def _routes(self) -> Iterator[Route]:
        for path, content in _CONSTANT.items():
            yield Route(path, _constant(content))
        yield Route("/agent", self._agents)
        yield Route("/experimental/workspace", self._workspaces)
        yield Route("/experimental/worktree", self._worktrees)
        yield Route("/project/current", self._project)
        yield Route("/command", self._commands)
        yield Route("/global/event", self._events)
        yield Route("/session", self._create, methods=["POST"])
        yield Route("/session", self._all)
        yield Route("/session/status", self._statuses)
        yield Route("/session/{id}", self._session)
        yield Route("/session/{id}", self._change, methods=["PATCH"])
        yield Route("/session/{id}/prompt_async", self._prompt_async, methods=["POST"])
        yield Route("/session/{id}/message", self._prompt, methods=["POST"])
        yield Route("/session/{id}/message", self._list)
        yield Route("/session/{id}/abort", self._abort, methods=["POST"])
        yield Route("/session/{id}/diff", self._diff)
        yield Route("/session/{id}/children", self._children)
        yield Route("/permission", self._pending_permissions)
        yield Route("/question", self._pending_questions)
        yield Route("/permission/{id}/reply", self._reply, methods=["POST"])
        yield Route("/question/{id}/{verb:str}", self._reply, methods=["POST"])

    async def _agents(self, _: Request) -> Response:
        await self._count("agents")
        held, self.held_agents = self.held_agents, None
        if held is not None:
            await held.wait()
        return Response(orjson.dumps(self.agents), media_type="application/json")

    async def _workspaces(self, _: Request) -> Response:
        return Response(orjson.dumps(self.workspaces), media_type="application/json")

    async def _worktrees(self, _: Request) -> Response:
        return Response(orjson.dumps(self.worktrees), media_type="application/json")

    async def _project(self, _: Request) -> Response:
        project: Json = {"id": "0" * 40, "worktree": str(self.workspace)}
        return Response(orjson.dumps(project), media_type="application/json")

    async def _commands(self, _: Request) -> Response:
        return Response(orjson.dumps(self.commands), media_type="application/json")

    async def _events(self, _: Request) -> Response:
        return StreamingResponse(self._told(), media_type="text/event-stream")

    async def _told(self) -> AsyncGenerator[bytes]:
        reader: asyncio.Queue[bytes] = asyncio.Queue()
        reader.put_nowait(orjson.dumps(self._envelope("server.connected", {})))
        self._readers.add(reader)
        try:
            while frame := await self._next(reader):
                yield b"data: %b\n\n" % frame
        finally:
            self._readers.discard(reader)

    async def _next(self, reader: asyncio.Queue[bytes]) -> bytes:
        try:
            async with asyncio.timeout(_HEARTBEAT_SECONDS):
                return await reader.get()
        except TimeoutError:
            return orjson.dumps(self._envelope("server.heartbeat", {}))

    def cut(self) -> None:
        """End all streams of events; what is told until their readers return is lost to them."""
        for reader in self._readers:
            reader.put_nowait(b"")
        self._readers.clear()

    def leave(self) -> None:
        """End all turns and streams of events, as a server that stops does."""
        for turn in self._turns.values():
            turn.aborted.set()
        for reader in self._readers:
            reader.put_nowait(b"")

    async def _create(self, request: Request) -> Response:
        draft = orjson.loads(await request.body() or b"{}")
        await self.creating.wait()
        session_id = new_id("ses")
        now = _now()
        info: JsonObject = {
            "id": session_id,
            "slug": "fake",
            "version": "1.18.33",
            "projectID": "0" * 40,
            "directory": request.query_params.get("directory", str(self.workspace)),
            "title": "New session - 2026-11-15T09:00:00.000Z",
            "time": {"created": now, "updated": now},
            **draft,
        }
        self.tell_event("session.created", {"sessionID": session_id, "info": info})
        return _json(info)

    async def _all(self, request: Request) -> Response:
        workspaces: list[Any] = [None, *(one["id"] for one in cast("list[Any]", self.workspaces))]
        if request.query_params.get("workspace") not in workspaces:
            return Response("Unexpected server error", 500, media_type="text/plain")  # as 1.18 does
        await self._count("sessions")
        await self.listing.wait()
        return _json([*self._sessions.values()])

    async def _session(self, request: Request) -> Response:
        info = self._sessions.get(_session_id(request))
        held, self.held_session = self.held_session, None
        await self._count("session")
        if held is not None:
            await held.wait()
        return _json(info) if info else _missing()

    async def _change(self, request: Request) -> Response:
        changes: dict[str, Any] = orjson.loads(await request.body())
        await self._count("change")
        await self.changing.wait()
        info: dict[str, Any] = self._sessions[_session_id(request)]
        rules: list[Any] = info.setdefault("permission", [])
        rules += changes.pop("permission", [])  # they are only ever added
        info |= changes
        return _json(info)

    async def _statuses(self, _: Request) -> Response:
        busy = {k: v for k, v in self._state.statuses.items() if v.type != "idle"}
        if self.starved:
            busy.clear()
        await self._count("status")
        if self.statuses_before_failure is not None:
            self.statuses_before_failure -= 1
            if self.statuses_before_failure < 0:
                self.statuses_before_failure = None
                return Response(status_code=500)
        return _json({key: _dumped(value) for key, value in busy.items()})

    async def _prompt(self, request: Request) -> Response:
        session_id = _session_id(request)
        if session_id not in self._sessions:
            return _missing()
        prompt = orjson.loads(await request.body())
        if prompt["parts"][0].get("text") in self.refusing:
            self.prompts.append(prompt)
            return _json({"name": "BadRequestError", "data": {"message": "not taken"}}, 400)
        await self._play(session_id, prompt)
        answer = self.last_answer(session_id)
        if answer is None and self.stops_without_answer:
            return Response(status_code=500)
        assert answer is not None
        return self._answer(_dumped(answer))

    async def _prompt_async(self, request: Request) -> Response:
        prompt = orjson.loads(await request.body())
        playing = asyncio.create_task(self._play(_session_id(request), prompt))
        self._playing.add(playing)
        playing.add_done_callback(self._playing.discard)
        return Response(status_code=204)

    async def _play(self, session_id: SessionId, prompt: JsonObject) -> None:
        self.prompts.append(prompt)
        await self._count("prompt")
        turn = self._turns[session_id] = _Turn(self, session_id, prompt)
        self._at_work.add(turn)
        try:
            await turn.play(self._hold)
        finally:
            self._at_work.discard(turn)

    async def _list(self, request: Request) -> Response:
        return self._answer([_dumped(one) for one in self._messages(_session_id(request))])

    async def _abort(self, request: Request) -> Response:
        self.aborts.append(_session_id(request))
        await self._count("abort")
        await self.stopping.wait()
        turn = self._turns.get(_session_id(request))
        if turn is not None and not self.starved:
            turn.aborted.set()
        return _json(True)

    async def _diff(self, request: Request) -> Response:
        wanted = MessageId(request.query_params.get("messageID", ""))
        infos = [message.info for message in self._messages(_session_id(request))]
        asked = [one for one in infos if isinstance(one, UserMessage) and one.id == wanted]
        summary = asked[0].summary if asked else None
        return _json([_dumped(diff) for diff in summary.diffs] if summary else [])

    async def _children(self, request: Request) -> Response:
        children = self._state.descendants(_session_id(request))
        return _json([self._sessions[child] for child in sorted(children)])

    async def _pending_permissions(self, _: Request) -> Response:
        return _json([_dumped(one) for one in self._state.permissions.values()])

    async def _pending_questions(self, _: Request) -> Response:
        return _json([_dumped(one) for one in self._state.questions.values()])

    async def _reply(self, request: Request) -> Response:
        request_id = RequestId(request.path_params["id"])
        if self.failing_reply is not None and self.replies_before_failure == 0:
            gate, self.failing_reply = self.failing_reply, None
            await gate.wait()
            return Response(status_code=500)
        if request_id not in {**self._state.permissions, **self._state.questions}:
            return _missing()
        self.replies_before_failure = max(0, self.replies_before_failure - 1)
        self.replies.append(request_id)
        for turn in self._turns.values():
            turn.answer(request_id)
        lost, self.loses_reply = self.loses_reply, False
        # A response that ends before its length: the connection breaks.
        return Response(headers={"content-length": "4"}) if lost else _json(True)


class _Leave(Streams):
    """Ends the streams of an OpenCode when its server stops."""

    def __init__(self, opencode: FakeOpenCode) -> None:
        super().__init__()
        self._opencode = opencode

    def drain(self) -> None:
        super().drain()
        self._opencode.leave()


def _constant(content: Json) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return _json(content)

    return answer


def _session_id(request: Request) -> SessionId:
    return SessionId(request.path_params["id"])


def _request_id(frame: bytes) -> bytes:
    return orjson.loads(frame)["payload"]["properties"]["requestID"].encode()


def _dumped(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def _json(content: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _missing() -> Response:
    return _json({"name": "NotFoundError", "data": {"message": "not found"}}, 404)
