"""Clients of a cluster whose parts die: each sends, reads, answers and cancels on any replica.

They behave as good clients do: after a broken connection, a 503 or ``STREAM_ENDED`` they go to
another replica with the last cursor they have, and a message that got no response is sent again
under the same id. Everything they receive goes into the history.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import httpx2
import orjson

from tests.chaos.cluster import Cluster, Replica
from tests.chaos.history import (
    TERMINAL,
    CancelAsked,
    Read,
    Sent,
    Told,
    Unexpected,
    state_of,
    text_of,
)
from tests.chaos.opencode import Script

TRY_AGAIN = {
    "TASK_STORE_UNAVAILABLE",
    "UPSTREAM_UNREACHABLE",
    "UPSTREAM_BACKPRESSURE",
    "STREAM_ENDED",
    "SERVICE_UNAVAILABLE",
}
"""Reasons of errors that a failure of the cluster explains."""
NOT_WAITING = ("UNSUPPORTED_OPERATION", "INVALID_PARAMS", "INTERRUPT_REQUEST_NOT_FOUND")
"""Reasons of errors for an answer that nothing waits for, or no longer."""
PAUSE_SECONDS = 0.4
ASK_AGAIN_SECONDS = 2.0
REFUSED = 5
"""How often an answer may be refused while no faults are caused."""
ANSWERED_SECONDS = 12.0
"""Seconds within which an answer must take effect on an idle machine, without faults."""
_readings = count(1)


class RefusedCallError(Exception):
    """The service responded with an error."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(f"{status} {reason}: {text}")
        self.reason = reason


class LeftError(Exception):
    """The connection broke, or was silent for too long."""


@dataclass
class Asked:
    """A message that a client sent, and what the client knows about its task."""

    script: Script
    message_id: str
    task: str | None = None
    cursor: str | None = None
    state: str = ""
    told: str = ""
    """The latest state in the stream, which may lag behind ``state``."""
    text: str = ""
    """The answer text received so far."""
    answering: bool = False
    answers: int = 1

    @property
    def answer_id(self) -> str:
        return f"{self.message_id}-yes{self.answers}"


class Client:
    def __init__(self, number: int, cluster: Cluster, rng: Random) -> None:
        self.number = number
        self.cluster = cluster
        self.history = cluster.history
        self.rng = rng
        self.sent = 0
        self.stopping = False
        self.doing = ""

    async def run(self) -> None:
        flows = (self._stream, self._poll, self._cancel, self._send_twice)
        while not self.stopping:
            flow = self.rng.choices(flows, (5, 2, 2, 1))[0]
            await flow()

    # What a client does: one of these after the other

    async def _stream(self) -> None:
        """Follow a task to its end, on one replica after another."""
        asked = self._new(asks=self.rng.random() < 0.3)
        await self._follow(asked)
        await self._read_again(asked)

    async def stream_long(self, words: int) -> None:
        """Follow a task that writes one long text."""
        asked = self._new(words)
        await self._follow(asked)
        await self._read_again(asked)

    async def _poll(self) -> None:
        """Send without waiting, and get the task from random replicas until it has ended."""
        asked = self._new(asks=self.rng.random() < 0.2)
        await self._send(asked)
        await self._get_until_ended(asked)
        await self._read_again(asked)

    async def _cancel(self) -> None:
        """Cancel a task through another replica."""
        asked = self._new(words=60)
        await self._send(asked)
        await asyncio.sleep(self.rng.uniform(0, 3))
        self.doing = f"cancels {asked.task}"
        while asked.state not in TERMINAL:
            replica = self._replica()
            # It may take effect even if no response comes back.
            cancel = CancelAsked(time.time(), self.number, replica.name, str(asked.task))
            self.history.cancels.append(cancel)
            try:
                await self._whole(asked, replica, "POST", f"/tasks/{asked.task}:cancel")
            except LeftError:
                pass
            except RefusedCallError as error:
                if error.reason == "TASK_NOT_CANCELABLE":
                    break  # it has ended
                self._expect(error, asked, replica, "cancel")
            await self._pause()
        await self._get_until_ended(asked)

    async def _send_twice(self) -> None:
        """Send one message to all replicas at once."""
        asked = self._new()
        copies = [Asked(asked.script, asked.message_id) for _ in self.cluster.replicas]
        places = zip(copies, self.cluster.replicas, strict=True)
        await asyncio.gather(*(self._send(copy, replica) for copy, replica in places))
        await self._follow(copies[0])
        await self._read_again(copies[0])

    # How it does that

    def _new(self, words: int = 0, *, asks: bool = False) -> Asked:
        self.sent += 1
        token = f"c{self.number}n{self.sent}"
        script = Script(token, words or self.rng.randint(3, 30), asks)
        return Asked(script, f"{self.history.seed}-{token}")

    def _replica(self) -> Replica:
        return self.rng.choice(self.cluster.replicas)

    async def _pause(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.5, 1.5) * PAUSE_SECONDS)

    def _message(self, asked: Asked, *, answer: bool = False) -> dict[str, Any]:
        text = "yes" if answer else asked.script.prompt
        message: dict[str, Any] = {
            "messageId": asked.answer_id if answer else asked.message_id,
            "role": "ROLE_USER",
            "parts": [{"text": text}],
        }
        if answer:
            message["taskId"] = asked.task
        return {"message": message, "configuration": {"returnImmediately": True}}

    def _note_sent(self, asked: Asked, replica: Replica, task: str, *, answers: bool) -> None:
        script = asked.script
        self.history.sent.append(
            Sent(
                time.time(),
                self.number,
                replica.name,
                asked.answer_id if answers else asked.message_id,
                script.token,
                script.text,
                task,
                answers,
            )
        )

    async def _send(self, asked: Asked, replica: Replica | None = None) -> None:
        """Send a message until a replica responds; the first attempt goes to ``replica``."""
        while asked.task is None:
            replica = replica or self._replica()
            self.doing = f"sends {asked.message_id} to {replica.name}"
            try:
                body = await self._ask(replica, "POST", "/message:send", self._message(asked))
                self._take(asked, replica, body["task"], time.time())
            except LeftError:
                await self._pause()
            except RefusedCallError as error:
                self._expect(error, asked, replica, "send")
                await self._pause()
            replica = None

    async def _answer(self, asked: Asked) -> None:
        """Say yes until the task goes on, under the same id until a replica has responded."""
        refused = 0
        try:
            while asked.state == "input_required":
                replica = self._replica()
                # The answer may take effect even if no response comes back.
                self._note_sent(asked, replica, str(asked.task), answers=True)
                message, began = self._message(asked, answer=True), time.time()
                try:
                    body = await self._ask(replica, "POST", "/message:send", message)
                    self._note_read(replica, body["task"], began)
                except LeftError:
                    await self._pause()
                    continue
                except RefusedCallError as error:
                    self._expect(error, asked, replica, "answer", *NOT_WAITING)
                    if error.reason in NOT_WAITING:
                        # That message stays refused; if the task still asks, answer anew.
                        asked.answers += 1
                        refused += not self.cluster.tormented
                    if refused == REFUSED:
                        who = f"client {self.number}"
                        text = f"is asked, and its answers are refused: {error}"
                        self._note_unexpected(who, text, asked)
                    await asyncio.sleep(ASK_AGAIN_SECONDS)
                    await self._get(asked, self._replica())
                    continue
                # While faults are caused, this may take longer than any client would wait.
                patient, since, limit = not self.cluster.tormented, time.time(), PAUSE_SECONDS
                while asked.state == "input_required" and time.time() < since + limit:
                    limit = self.cluster.allowed(ANSWERED_SECONDS, since) if patient else limit
                    await self._pause()
                    await self._get(asked, self._replica())
                if asked.state == "input_required" and patient:
                    text = "gave an answer that was taken, and nothing came of it"
                    self._note_unexpected(f"client {self.number}", text, asked)
                    asked.answers += 1
        finally:
            asked.answering = False

    def _note_unexpected(self, who: str, what: str, asked: Asked) -> None:
        self.history.unexpected.append(Unexpected(time.time(), who, what, asked.task))

    async def _get_until_ended(self, asked: Asked) -> None:
        while asked.state not in TERMINAL:
            self.doing = f"gets {asked.task}, which is {asked.state}"
            await self._get(asked, self._replica())
            if asked.state == "input_required":
                await self._answer(asked)
            await self._pause()

    async def _get(self, asked: Asked, replica: Replica) -> None:
        try:
            await self._whole(asked, replica, "GET", f"/tasks/{asked.task}")
        except LeftError:
            pass
        except RefusedCallError as error:
            self._expect(error, asked, replica, "get")

    async def _read_again(self, asked: Asked) -> None:
        """Get a task that has ended from two random replicas."""
        for _ in range(2):
            await self._get(asked, self._replica())

    async def _whole(self, asked: Asked, replica: Replica, verb: str, path: str) -> None:
        began = time.time()
        self._take(asked, replica, await self._ask(replica, verb, path), began)

    def _take(self, asked: Asked, replica: Replica, task: Any, began: float) -> None:
        """Record a task as it was received."""
        if asked.task is None:
            asked.task = task["id"]
            self._note_sent(asked, replica, task["id"], answers=False)
        asked.state = state_of(task["status"])
        self._note_read(replica, task, began)

    def _note_read(self, replica: Replica, task: Any, began: float) -> None:
        self.history.reads.append(
            Read(
                began,
                time.time(),
                self.number,
                replica.name,
                task["id"],
                state_of(task["status"]),
                text_of(task),
            )
        )

    async def _follow(self, asked: Asked) -> None:
        """Stream until the task has ended, and reconnect after every break."""
        answering: asyncio.Task[None] | None = None
        try:
            while asked.told not in TERMINAL:
                replica = self._replica()
                self.doing = f"follows {asked.task} at {replica.name} after {asked.cursor}"
                leaves = self.rng.randint(2, 40) if self.rng.random() < 0.4 else 10**6
                try:
                    async with aclosing(self._events(asked, replica)) as events:
                        async for _ in events:
                            leaves -= 1
                            if asked.told == "input_required" and not asked.answering:
                                asked.answering = True
                                answering = asyncio.create_task(self._answer(asked))
                            if not leaves or asked.told in TERMINAL:
                                break
                except LeftError:
                    await self._pause()
                except RefusedCallError as error:
                    if error.reason == "UNSUPPORTED_OPERATION" and asked.cursor is None:
                        await self._get(asked, replica)  # it has ended
                        asked.told = asked.state
                    else:
                        self._expect(error, asked, replica, "follow")
                    await self._pause()
        finally:
            if answering is not None:
                await answering
        if asked.task is not None and asked.cursor is not None:
            now = time.time()
            told = Read(now, now, self.number, "stream", asked.task, asked.told, asked.text)
            self.history.reads.append(told)

    async def _events(self, asked: Asked, replica: Replica) -> AsyncGenerator[None]:
        """Read a stream: for a new message, or for a task from where the last one broke."""
        headers = {"Last-Event-ID": asked.cursor} if asked.cursor else {}
        path, content = f"/tasks/{asked.task}:subscribe", b"{}"
        if asked.task is None:
            path, content = "/message:stream", orjson.dumps(self._message(asked))
        headers["Content-Type"] = "application/json"
        reading, cursor = next(_readings), ""
        began = time.time()
        try:
            async with replica.http.stream(
                "POST", path, content=content, headers=headers
            ) as response:
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        cursor = line[4:]
                    elif line.startswith("data: "):
                        self._hear(asked, replica, reading, cursor, line[6:].encode(), began)
                        yield
        except (httpx2.HTTPError, OSError) as error:
            raise LeftError(str(error)) from None

    def _hear(
        self, asked: Asked, replica: Replica, reading: int, cursor: str, data: bytes, began: float
    ) -> None:
        event: dict[str, Any] = orjson.loads(data)
        if "error" in event:
            raise _refusal(200, data)
        asked.cursor = cursor
        if "task" in event:
            self._take(asked, replica, event["task"], began)
            asked.told, asked.text = asked.state, text_of(event["task"])
        elif status := event.get("statusUpdate"):
            asked.state = asked.told = state_of(status["status"])
        elif update := event.get("artifactUpdate"):
            artifact = update["artifact"]
            if artifact["artifactId"].endswith(":stream:text"):
                said = "".join(part.get("text", "") for part in artifact["parts"])
                asked.text = asked.text + said if update.get("append") else said
        told = Told(time.time(), self.number, reading, replica.name, str(asked.task), cursor, data)
        self.history.told.append(told)

    async def _ask(
        self, replica: Replica, verb: str, path: str, content: dict[str, Any] | None = None
    ) -> Any:
        try:
            answer = await replica.http.request(verb, path, json=content)
        except (httpx2.HTTPError, OSError) as error:
            raise LeftError(str(error)) from None
        if answer.status_code != 200:
            raise _refusal(answer.status_code, answer.content)
        return answer.json()

    def _expect(
        self, error: RefusedCallError, asked: Asked, replica: Replica, what: str, *more: str
    ) -> None:
        """Record an error; it is unexpected unless a failure of the cluster explains it."""
        who = f"client {self.number}, {what} at {replica.name}"
        explained = error.reason in TRY_AGAIN or error.reason in more
        notes = self.history.refused if explained else self.history.unexpected
        notes.append(Unexpected(time.time(), who, str(error), asked.task))

    async def replay(self, task: str, replica: Replica) -> list[Told]:
        """Return the stored log of a task that has ended."""
        asked = Asked(Script("", 0), "", task=task, cursor="0")
        before = len(self.history.told)
        while asked.told not in TERMINAL:
            del self.history.told[before:]
            asked.cursor = "0"
            try:
                async with aclosing(self._events(asked, replica)) as events:
                    async for _ in events:
                        pass
            except LeftError:
                await self._pause()
            except RefusedCallError as error:
                self._expect(error, asked, replica, "replay")
                break
        return self.history.told[before:]


def _refusal(status: int, content: bytes) -> RefusedCallError:
    try:
        error: Any = orjson.loads(content)["error"]
        details: Any = error.get("details") or error.get("data") or [{}]
        return RefusedCallError(status, details[0].get("reason", "?"), error["message"])
    except (ValueError, KeyError, TypeError):
        return RefusedCallError(status, "?", content.decode(errors="replace"))
