"""The page behind a link: it shows one request, and takes one answer to it.

No credential is needed but the link, which gives the right to see and answer that one request and
nothing else. The page itself is the same for everybody; it asks for the request with a POST, and
answers with another, so that whatever only follows a link answers nothing. An answer takes the way
of every other answer: the method for a permission or question, a message on the task for a plan or
a sign-in.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from opencode_a2a.a2a import render
from opencode_a2a.a2a.types import Version, timestamp
from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    InterruptExpiredError,
    InterruptNotFoundError,
    ServiceError,
    TaskNotFoundError,
    UnsupportedOperationError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import Channel, Interrupted, Json, JsonObject
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.ids import Caller, Principal
from opencode_a2a.log.state import TaskState, load_request
from opencode_a2a.messages import Message, MessageIds, Part, PromptPart, TurnRequest
from opencode_a2a.notices.links import (
    PAGE,
    SIGN_IN,
    Signer,
    Subject,
    load_sign_in_id,
    sign_in_deadline,
)
from opencode_a2a.rights import NARROWEST, Budget, Rights
from opencode_a2a.server.http import OrjsonResponse
from opencode_a2a.store import interrupts
from opencode_a2a.store.database import Database
from opencode_a2a.tasks.command import SendCommand
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.web.auth import peer_address
from opencode_a2a.web.browser import StaticFile, static_files

SHOW, ANSWER = f"{PAGE}/show", f"{PAGE}/answer"
ANONYMOUS = frozenset({f"POST {SHOW}", f"POST {ANSWER}"})
"""The requests for which the link is the credential."""
CREDENTIAL = "link"
"""What audit records name in place of a credential."""
_UNSTORED = {"cache-control": "no-store"}
INVALID = "This link is not valid, or what it was for is no longer known; open the console instead."
LATE = "The time for an answer is over; nothing was done."
VOID = "The task went on or ended without an answer; nothing was done."
BEFORE = "It was answered before; nothing more was done."
STILL_WAITS = "The answer was not taken, and the request still waits; try again."
NOT_SHOWN = "Nothing was answered, since the request was not shown first; open the link again."

_Short = Annotated[str, Field(max_length=4000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Show(_Body):
    link: _Short


class _AnswerBody(_Body):
    link: _Short
    page: _Short
    method: Literal[
        "permission.reply", "question.reply", "question.reject", "plan.go", "plan.drop", "retry"
    ]
    reply: Literal["once", "reject"] | None = None
    message: _Short | None = None
    answers: list[list[_Short]] | None = None


_METHODS = {
    "permission": {"permission.reply"},
    "question": {"question.reply", "question.reject"},
    "plan": {"plan.go", "plan.drop"},
    None: {"retry"},
}
"""What may be answered to each type of request; None is a sign-in."""
_RESOLUTIONS = {
    "question.reply": "replied",
    "question.reject": "rejected",
    "plan.go": "approved",
    "plan.drop": "rejected",
    "retry": "retried",
}


@dataclass(frozen=True, slots=True)
class _Linked:
    """What a link that fits leads to."""

    subject: Subject
    deadline: int
    """Until when an answer counts, in milliseconds since the epoch."""
    task_id: str
    asked: Interrupted | None
    """None for a sign-in."""
    settled: JsonObject | None
    """How it ended; None if it waits."""
    sign_in: int | None = None
    """See ``Status.sign_in``; None for a request."""

    @property
    def may_change(self) -> list[str]:
        """What of the request may be another than a page has shown."""
        asked = self.asked
        found = asked and (asked.links, asked.links_unknown, asked.changes)
        return [repr(found)] if found and any(found) else []

    @property
    def late(self) -> bool:
        # The turn decides by a clock of its own, a moment later.
        return self.settled is None and now_ms() >= self.deadline

    @property
    def principal(self) -> Principal:
        return Principal(self.subject.principal)


def files() -> dict[str, StaticFile]:
    """Return the files of the page, by path."""
    return static_files(Path(__file__).parent / "page", PAGE)


class LinkPages:
    def __init__(
        self,
        settings: Settings,
        signer: Signer,
        database: Database,
        tasks: TaskService,
        methods: Dispatcher,
        new_message_id: MessageIds,
        budget_of: Callable[[Principal], Budget | None],
    ) -> None:
        """``budget_of`` returns None for a principal that may no longer call."""
        self._settings = settings
        self._signer = signer
        self._database = database
        self._tasks = tasks
        self._methods = methods
        self._new_message_id = new_message_id
        self._budget_of = budget_of

    def routes(self) -> list[BaseRoute]:
        return [
            Route(SHOW, self._show, methods=["POST"]),
            Route(ANSWER, self._answer, methods=["POST"]),
        ]

    # What a link leads to

    async def _linked(self, link: str) -> _Linked | None:
        """Return what a link leads to; None if it is forged, or for something else."""
        name, _, signature = link.rpartition(".")
        name = unquote(name)
        if not name.isascii() or not name.isprintable():
            return None
        found = await (
            self._linked_sign_in(name) if name.startswith(SIGN_IN) else self._linked_request(name)
        )
        nobody = Subject(name, "", 0)
        fits = self._signer.fits(signature, nobody if found is None else found.subject)
        if found is None or not fits or self._budget_of(found.principal) is None:
            return None
        return found

    async def _linked_request(self, request_id: str) -> _Linked | None:
        row = await self._database.read(interrupts.find, request_id)
        if row is None or not row.task_id:
            return None
        subject = Subject(request_id, row.principal, row.expires_at)
        try:
            asked = Interrupted.load(orjson.loads(row.asked))
        except (KeyError, TypeError, ValueError):  # damaged; its task cannot continue
            return None
        asked = replace(asked, expires_at=row.expires_at, number=row.number)
        settled: JsonObject | None = None
        if row.resolution is not None:
            settled = {
                "resolution": row.resolution,
                "by": row.settled_by,
                "at": timestamp(row.settled_at or now_ms()),
            }
        return _Linked(subject, row.expires_at, row.task_id, asked, settled)

    async def _linked_sign_in(self, name: str) -> _Linked | None:
        named = load_sign_in_id(name)
        if named is None:
            return None
        task_id, since = named
        owner = await self._tasks.principal_of(task_id)
        if owner is None:
            return None
        deadline = sign_in_deadline(since, self._settings.interrupts.interrupt_request_ttl_seconds)
        state = (await self._tasks.log(owner, task_id)).state
        sent = _message_id("retry", name)
        retried = not state.status.state.terminal or any(
            message.message_id == sent for message in state.history
        )
        over: JsonObject = {"resolution": "retried" if retried else "void"}
        settled = None if state.status.sign_in == since else over
        return _Linked(Subject(name, owner, since), deadline, task_id, None, settled, since)

    # Requests of the page

    async def _show(self, request: Request) -> Response:
        try:
            sent = _Show.model_validate_json(await request.body())
            linked = await self._linked(sent.link)
        except ValidationError:
            linked = None
        if linked is None:
            return _refusal(404, INVALID)
        about: JsonObject = {"title": self._settings.a2a.title}
        if self._settings.a2a.project:
            about["project"] = self._settings.a2a.project
        if linked.settled is not None or linked.late:
            return _response({"about": about, "over": linked.settled or {"resolution": "expired"}})
        log = await self._tasks.log(linked.principal, linked.task_id)
        page = self._signer.page_token(linked.subject, *linked.may_change)
        shown: JsonObject = {"about": about, "page": page}
        if linked.asked is None:
            shown["task"] = _sign_in_card(log.state)
        else:
            asked = replace(linked.asked, allows_always=False)
            shown["asked"] = render.interrupt(asked, ())
            if asked.type == "plan":
                text = log.state.channels.get(Channel.PLAN)
                shown["plan"] = text.text if text is not None else ""
            # A plain "yes" elsewhere counts from now on for this request, too; but not if it would
            # then count for one before it that nobody was shown.
            number = asked.number or 0
            before = [n for one in log.state.status.pending if (n := one.number or 0) < number]
            if max(before, default=0) <= log.seen.newest:
                log.note_seen_number(number)
        return _response(shown)

    async def _answer(self, request: Request) -> Response:
        try:
            sent = _AnswerBody.model_validate_json(await request.body())
        except ValidationError:
            return _refusal(400, "This is not an answer that a link can give; open it again.")
        linked = await self._linked(sent.link)
        if linked is None:
            return _refusal(404, INVALID)
        if not self._signer.fits_page(sent.page, linked.subject, *linked.may_change):
            return _refusal(400, NOT_SHOWN)
        kind = linked.asked.type if linked.asked is not None else None
        fits = sent.method in _METHODS[kind]
        if not fits or (sent.method == "permission.reply") != (sent.reply is not None):
            return _refusal(400, "The answer does not fit the request; open the link again.")
        resolution = _RESOLUTIONS.get(sent.method, "once" if sent.reply == "once" else "rejected")
        outcome = "refused"
        try:
            response = await self._give(linked, sent, resolution)
            outcome = "success" if response.status_code == 200 else "over"
        except ServiceError as error:
            outcome = error.outcome
            response = _refusal(error.http, error.message)
        finally:
            AUDIT.info(
                "answered by link",
                request_id=linked.subject.id,
                task_id=linked.task_id,
                principal=linked.principal,
                credential_id=CREDENTIAL,
                resolution=resolution,
                address=peer_address(request.scope),
                outcome=outcome,
            )
        return response

    async def _give(self, linked: _Linked, sent: _AnswerBody, resolution: str) -> Response:
        """Give an answer; if the request is over, say how it ended."""

        def so_settled(settled: JsonObject) -> bool:
            by_us = settled.get("by") == linked.principal or resolution == "retried"
            return settled["resolution"] == resolution and by_us

        if linked.late:
            return _over(410, LATE, {"resolution": "expired"})
        if linked.settled is not None and not so_settled(linked.settled):
            return await self._how_it_ended(sent.link)
        given: JsonObject = {
            "resolution": resolution,
            "by": linked.principal,
            "at": timestamp(now_ms()),
        }
        by_message = linked.asked is None or linked.asked.type == "plan"
        try:
            if by_message:
                await self._answer_by_message(linked, sent, so_settled)
            else:  # also if it is settled: whether the answer was the same, the method knows
                await self._answer_by_method(linked, sent)
        except (InterruptNotFoundError, InterruptExpiredError, UnsupportedOperationError):
            # Meanwhile somebody else answered, at this replica or another.
            return await self._how_it_ended(sent.link)
        return _response({"settled": given})

    async def _answer_by_method(self, linked: _Linked, sent: _AnswerBody) -> None:
        """Answer a permission or questions by the method that everybody uses."""
        params: dict[str, Json] = {"request_id": linked.subject.id}
        if sent.reply is not None:
            params["reply"] = sent.reply
            if sent.reply == "reject" and sent.message and sent.message.strip():
                params["message"] = sent.message.strip()
        if sent.method == "question.reply":
            params["answers"] = [[*texts] for texts in sent.answers or []]
        rights = await self._rights(linked)
        caller = Caller(
            linked.principal, credential_id=CREDENTIAL, rights=rights, budget=self._budget(linked)
        )
        await self._methods.call(caller, f"a2a.interrupt.{sent.method}", params, Version.V1)

    async def _answer_by_message(
        self, linked: _Linked, sent: _AnswerBody, so_settled: Callable[[JsonObject], bool]
    ) -> None:
        """Send the message that has a plan carried out or dropped, or a turn tried again."""
        part = Part("text", text="Try again")
        if linked.asked is not None:
            reply = "go" if sent.method == "plan.go" else "cancel"
            part = Part("data", data={"reply": reply, "request_id": linked.subject.id})
        # The same tap twice: the second waits for the first.
        copies = (linked.principal, f"link {linked.subject.id}")
        async with self._tasks.continuing.message_locks.setdefault(copies, asyncio.Lock()):
            now = await self._linked(sent.link)
            if now is not None and now.settled is not None and so_settled(now.settled):
                return
            if now is None or now.settled is not None:
                raise InterruptNotFoundError
            prompt = (PromptPart(text="Try again"),)
            request = TurnRequest(prompt, self._new_message_id(), rights=await self._rights(linked))
            await self._tasks.sending.submit(
                SendCommand(
                    linked.principal,
                    Message(_message_id(sent.method, linked.subject.id), "user", [part]),
                    request,
                    task_id=linked.task_id,
                    budget=self._budget(linked),
                    sign_in=linked.sign_in,
                )
            )

    def _budget(self, linked: _Linked) -> Budget:
        budget = self._budget_of(linked.principal)
        if budget is None:
            raise TaskNotFoundError
        return budget

    async def _rights(self, linked: _Linked) -> Rights:
        """Return the rights of the turn that asks: an answer by link gives it no more."""
        row = await self._tasks.open.row(linked.principal, linked.task_id)
        # A task that has ended takes no answer, but may be sent the same one again.
        return NARROWEST if row.request is None else load_request(row.request).rights

    async def _how_it_ended(self, link: str) -> Response:
        """Say how a request ended for which an answer came too late."""
        now = await self._linked(link)
        if now is None:
            return _refusal(404, INVALID)
        settled = now.settled
        if settled is None:
            # Its turn is being taken up, perhaps by another replica.
            raise UpstreamUnreachableError(STILL_WAITS)
        message = {"expired": LATE, "void": VOID}.get(str(settled["resolution"]), BEFORE)
        return _over(409 if message is BEFORE else 410, message, settled)


def _message_id(method: str, name: str) -> str:
    """Return the id of the message that an answer by link is; a repeated answer has the same."""
    return f"link-{sha256(f'{method} {name}'.encode()).hexdigest()[:24]}"


def _sign_in_card(state: TaskState) -> JsonObject:
    """Return as much of a task as the card of a sign-in shows."""
    status = render.task(state, 0, artifacts=False)["status"]
    return {"status": status}


def _response(content: JsonObject) -> Response:
    return OrjsonResponse(content, headers=_UNSTORED)


def _refusal(status: int, message: str) -> Response:
    content = {"error": {"message": message}}
    return OrjsonResponse(content, status_code=status, headers=_UNSTORED)


def _over(status: int, message: str, settled: JsonObject) -> Response:
    content = {"error": {"message": message}, "over": settled}
    return OrjsonResponse(content, status_code=status, headers=_UNSTORED)
