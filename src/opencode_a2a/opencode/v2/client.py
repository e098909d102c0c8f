"""The driver of OpenCode 2: what the service asks of an OpenCode, in calls of its other API.

Here are sessions, their messages and prompts, and the event stream; what is not about sessions is
in ``v2.catalogues``, and how a call is sent in ``v2.calls``. Messages and requests come back as the
values of ``opencode.types`` (``v2.messages``), events by ``v2.events``. Where releases differ, the
contract that the server serves has the names (``v2.contract``). What 2.x cannot do is refused with
a sentence. Nothing here knows about turns.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Final, Literal, TypeVar

import orjson

from opencode_a2a.bounds import Recent, wait
from opencode_a2a.errors import (
    Missing,
    NotInOpenCodeError,
    SessionNotFoundError,
    UpstreamError,
    UpstreamHttpError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamUnansweredError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.opencode.calls import Query, checked, well_formed
from opencode_a2a.opencode.driver import HERE, Decoder, Features, Location, MessagePage
from opencode_a2a.opencode.types import (
    AnyObject,
    AssistantMessage,
    CommandCall,
    FileDiff,
    FileInput,
    Health,
    MessageWithParts,
    PermissionRequest,
    PermissionRule,
    Prompt,
    QuestionRequest,
    Readable,
    Session,
    SessionChanges,
    SessionDraft,
    SessionStatus,
    ShellCall,
    StatusBusy,
    TextInput,
    Todo,
    ToolPart,
)
from opencode_a2a.opencode.v2.background import work_left
from opencode_a2a.opencode.v2.calls import missing
from opencode_a2a.opencode.v2.catalogues import AGENT_SECONDS, POLL_SECONDS, Catalogues2
from opencode_a2a.opencode.v2.contract import (
    DIFF,
    END_SHELL,
    INBOX,
    OUTPUT,
    RENAME,
    REPLY,
    RULES,
    SESSION,
    SHELLS,
    TAKE_BACK,
    UNINSTRUCT,
    UNREVERT,
    Endpoint,
)
from opencode_a2a.opencode.v2.events import KNOWN, Decoder2, KnownCall, Memory
from opencode_a2a.opencode.v2.messages import (
    UNKNOWN,
    Form2,
    Message2,
    Permission2,
    permission_of,
    question_of,
    rule_of,
    rule_to,
    stored,
)
from opencode_a2a.opencode.v2.outputs import LOOK_SECONDS, Inserted
from opencode_a2a.opencode.v2.types import (
    Named2,
    Output2,
    Page2,
    Session2,
    Shell2,
)
from opencode_a2a.rights import PERMISSIONS

PAGE: Final = 200
"""Messages that 2.x returns at most."""
WAKE_SECONDS: Final = 0.5
"""Seconds within which a session continues after its work in the background was stopped, if it
does. A cancel waits for that, and has to be confirmed within 2 s."""
WAKE_POLL_SECONDS: Final = 0.02
"""Seconds between two looks whether it does: the model is asked as soon as it is awake."""
HEARTBEAT_SECONDS: Final = 18.0
"""Seconds after which a stream without even a heartbeat, which comes every 15, is dead."""
BACKGROUND_SECONDS: Final = 1.0
"""Seconds between two polls of work in the background."""
IDLE_LOOKS: Final = 3
"""After so many looks at which a session was idle, work in the background is lost: its end would
have woken the session."""
LATEST: Final = 20
"""Messages in which a prompt, its last answer and earlier work in the background are looked for at
first."""
INSTRUCTIONS: Final = "a2a"
"""The name of the service's own entry in the instructions of a session."""
GONE: Final = frozenset({"todowrite", "todoread", "list", "lsp", "codesearch", "doom_loop"})
"""Permissions of 1.x that 2.x never asks for."""
MISSING: Final[Missing] = frozenset({"schemas", "todos", "sharing", "workspaces", "worktrees"})
"""What no OpenCode 2 has, or not in a way that this service can use."""


class OpenCode2(Catalogues2):
    """The driver of an OpenCode 2; open it with ``async with``.

    What it remembers of sessions is bounded, and may be forgotten: ``memory`` with every connection
    of the event stream, and everything with the driver itself, which a restart of the service or an
    OpenCode 1 in between replaces. What matters then is read from OpenCode again. Only that this
    driver has ended a command (``stopped``) cannot be: its work then counts as lost.
    """

    @property
    def features(self) -> Features:
        has_rules = self.contract.has(*self._rules_call)
        rules: Missing = frozenset() if has_rules else frozenset({"rules"})
        return Features(
            always=False,
            lists_plugins=False,
            permissions=PERMISSIONS - GONE,
            missing=MISSING | rules,
        )

    @property
    def _rules_call(self) -> Endpoint:
        """The call that sets the rules of a session; the preview has none."""
        return self.contract.first(RULES, "permissions")

    @cached_property
    def memory(self) -> Memory:
        """What later events do not repeat; ``begin_decoding`` begins another."""
        return Memory()

    @cached_property
    def stops(self) -> Recent[SessionId, asyncio.Event]:
        """Set when a session is stopped, for the calls that wait for its work in the background."""
        return Recent(KNOWN)

    @cached_property
    def stopped(self) -> Recent[str, None]:
        """Commands in the background that this driver has ended; their reports may never come."""
        return Recent(KNOWN)

    @cached_property
    def parents(self) -> Recent[SessionId, SessionId | None]:
        """The session that each session works for, None if it is nobody's sub-agent."""
        return Recent(KNOWN)

    # Sessions

    async def session(self, session_id: SessionId, *, at: Location = HERE) -> Session:
        return _session_of(await self.data(Session2, "GET", _path(session_id)))

    async def sessions(
        self,
        *,
        at: Location = HERE,
        limit: int | None = None,
        roots: bool | None = None,
        search: str | None = None,
        start: int | None = None,
    ) -> list[Session]:
        """List sessions, newest first: 100 unless ``limit`` is given."""
        wanted, found = limit or 100, list[Session]()
        query: dict[str, str | int | bool | None] = {
            "directory": at.directory,
            "parentID": "null" if roots else None,
            "search": search,
        }
        while len(found) < wanted:
            query["limit"] = min(wanted - len(found), PAGE)
            page = await self.call(Page2[Readable[Session2]], "GET", "/api/session", query=query)
            listed = [_session_of(one) for one in page.data]
            found += [one for one in listed if start is None or one.time.updated >= start]
            if page.cursor.next is None or not listed:
                break
            query = {"cursor": page.cursor.next}
        return found

    async def session_children(
        self,
        session_id: SessionId,
        *,
        at: Location = HERE,
    ) -> list[Session]:
        await self.session(session_id)  # an unknown one would have no children
        return await self._children(session_id)

    async def _children(self, session_id: SessionId, *, urgent: bool = False) -> list[Session]:
        query: Query = {"parentID": session_id, "limit": PAGE}
        found = await self.call(
            Page2[Readable[Session2]], "GET", "/api/session", query=query, urgent=urgent
        )
        return [_session_of(one) for one in found.data]

    async def session_status(self, *, at: Location = HERE) -> dict[SessionId, SessionStatus]:
        """Return the sessions that are not idle.

        One with a command in the background, or with a running sub-agent, will be asked again.
        """
        active, shells = await self._active(), await self._shells(at)
        busy = {*active, *(one.metadata.session_id for one in shells)} - {None}
        for one in active:
            with suppress(SessionNotFoundError):
                busy.update(await self._ancestors(one))
        return {one: StatusBusy() for one in busy if one is not None}

    async def _ancestors(self, session_id: SessionId) -> list[SessionId]:
        """Return the sessions that a sub-agent works for."""
        found, one = list[SessionId](), session_id
        while True:
            if one not in self.parents:
                found_one = await self.data(Session2, "GET", _path(one), urgent=True)
                self.parents[one] = found_one.parent_id
            parent = self.parents[one]
            if parent is None or parent in (
                session_id,
                *found,
            ):  # no circle, whatever OpenCode says
                return found
            found.append(parent)
            one = parent

    async def _active(self) -> dict[SessionId, AnyObject]:
        kind = dict[SessionId, AnyObject]
        return await self.data(kind, "GET", "/api/session/active", urgent=True)

    async def _shells(self, at: Location) -> list[Shell2]:
        """Return the commands that run in a directory for a session."""
        if not self.contract.has(*SHELLS):
            return []
        found = await self.data(Readable[Shell2], "GET", "/api/shell", at, urgent=True)
        return [one for one in found if one.status == "running" and one.metadata.session_id]

    async def session_todo(self, session_id: SessionId, *, at: Location = HERE) -> list[Todo]:
        raise missing("todo lists")

    async def session_diff(
        self, session_id: SessionId, message_id: MessageId | None = None, *, at: Location = HERE
    ) -> list[FileDiff]:
        """List the files that the answer to a prompt changed, as far as its tools tell."""
        if message_id is None:
            return []
        if self.contract.has(*DIFF):
            query: Query = {"from": message_id}
            return await self.data(
                Readable[FileDiff], "GET", _path(session_id, "/diff"), query=query
            )
        diffs: list[FileDiff] = []
        for message in (await self.messages(session_id, at=at)).items:
            if isinstance(message.info, AssistantMessage) and message.info.parent_id == message_id:
                for part in message.parts:
                    files = (isinstance(part, ToolPart) and part.state.metadata) or {}
                    changed = files.get("files")
                    diffs += [
                        FileDiff.model_validate(file)
                        for file in (changed if isinstance(changed, list) else ())
                        if isinstance(file, dict) and "patch" in file
                    ]
        return diffs

    async def create_session(self, draft: SessionDraft, *, at: Location = HERE) -> Session:
        """Create a session; the same metadata lead to the same session."""
        if draft.parent_id is not None:
            raise missing("new sessions with a parent")
        body: JsonObject = {}
        if draft.metadata:
            named = hashlib.sha256(orjson.dumps(draft.metadata)).hexdigest()
            body["id"] = f"ses_a2a{named[:24]}"
        if at.directory is not None:
            body["location"] = {"directory": at.directory}
        if draft.agent:
            body["agent"] = draft.agent
        if draft.model is not None:
            body["model"] = {"id": draft.model.model_id, "providerID": draft.model.provider_id}
        for field, value in (("title", draft.title), ("metadata", draft.metadata)):
            if value and self.contract.takes("post", "/api/session", field):
                body[field] = value
        made = await self.data(Session2, "POST", "/api/session", body=body)
        changes = SessionChanges(permission=draft.permission)
        if draft.title and "title" not in body:
            changes = changes.model_copy(update={"title": draft.title})
        if changes.title or changes.permission:
            return await self.update_session(made.id, changes, at=at)
        return _session_of(made)

    async def update_session(
        self,
        session_id: SessionId,
        changes: SessionChanges,
        *,
        at: Location = HERE,
    ) -> Session:
        """Change the title or the rules of a session. Rules are appended, as in 1.x.

        A server that has no rules of sessions returns none, by which the caller knows it.
        """
        if changes.time is not None:
            raise missing("archive for sessions")
        if changes.title is not None:
            method, path = self.contract.first(RENAME, "title")
            await self.do(method.upper(), _of(session_id, path), {"title": changes.title})
        if changes.permission is not None:
            before = (await self.session(session_id)).permission
            await self._set_rules(session_id, [*before, *changes.permission])
        return await self.session(session_id)

    async def _set_rules(self, session_id: SessionId, rules: Sequence[PermissionRule]) -> None:
        body: JsonObject = {"permissions": [rule_to(rule) for rule in rules]}
        method, path = self._rules_call
        if self.contract.has(*self._rules_call):
            await self.do(method.upper(), _of(session_id, path), body)

    async def delete_session(self, session_id: SessionId, *, at: Location = HERE) -> bool:
        await self.abort_session(session_id, at=at)  # commands would outlive it
        await self.do("DELETE", _path(session_id))
        return True

    async def abort_session(self, session_id: SessionId, *, at: Location = HERE) -> bool:
        """Stop a session's turn, its sub-agents and its work in the background.

        OpenCode ends the turn before it answers. It does not end work in the background; ended
        piece by piece, that may wake the session, which is stopped once more.
        """
        interrupt = _path(session_id, "/interrupt")
        await self.do("POST", interrupt, urgent=True)
        if at == HERE:
            found = await self.data(Session2, "GET", _path(session_id), urgent=True)
            at = Location(found.location.directory)
        active = await self._active()
        family, unvisited = {session_id}, [session_id]
        while unvisited:  # sub-agents may have sub-agents
            for child in await self._children(unvisited.pop(), urgent=True):
                if child.id not in family:
                    family.add(child.id)
                    unvisited.append(child.id)
                    with suppress(SessionNotFoundError):  # it may be deleted by now
                        await self.do("POST", _path(child.id, "/interrupt"), urgent=True)
        left = list[Shell2]()
        if self.contract.has(*END_SHELL):  # else they keep the session busy
            shells = await self._shells(at)
            left = [one for one in shells if one.metadata.session_id in family]
        for shell in left:
            self.stopped[shell.id] = None
            with suppress(UpstreamNotFoundError):
                path = f"/api/shell/{checked('sh', shell.id)}"
                await self.do("DELETE", path, at=at, urgent=True)
        if left or (family - {session_id}) & active.keys():
            with suppress(TimeoutError):
                async with asyncio.timeout(WAKE_SECONDS):
                    while session_id not in await self._active():  # noqa: ASYNC110 - no event here
                        await asyncio.sleep(WAKE_POLL_SECONDS)
            await self.do("POST", interrupt, urgent=True)
        await self._empty_inbox(session_id)
        self.memory.background.pop(session_id, None)  # the inbox may have had the report of its end
        if (stop := self.stops.pop(session_id, None)) is not None:
            stop.set()
        return True

    async def _empty_inbox(self, session_id: SessionId, only: MessageId | None = None) -> None:
        """Take back prompts that the model was not given, or ``only`` one of them.

        The next prompt would run them as well.
        """
        inbox, take_back = self.contract.first(INBOX), self.contract.first(TAKE_BACK)
        if self.contract.has(*inbox) and self.contract.has(*take_back):
            listed, path = _of(session_id, inbox[1]), _of(session_id, take_back[1])
            items = await self.data(Readable[Named2], "GET", listed, urgent=True)
            for item in (one for one in items if only in (None, one.id)):
                with suppress(UpstreamNotFoundError):
                    waiting = path.replace("{}", checked("msg", item.id))
                    await self.do("DELETE", waiting, urgent=True)

    async def fork_session(
        self, session_id: SessionId, message_id: MessageId | None = None, *, at: Location = HERE
    ) -> Session:
        """Copy the messages before ``message_id``, or all, into a new session."""
        body: JsonObject = {} if message_id is None else {"messageID": message_id}
        if self.contract.takes("post", f"{SESSION}/fork", "boundary"):
            last = message_id or await self._newest(session_id)
            if last is None:  # 2.x cannot copy nothing
                session = await self.session(session_id)
                draft = SessionDraft(
                    title=f"{session.title} (fork #1)", permission=session.permission or None
                )
                return await self.create_session(draft, at=Location(session.directory))
            kind = "before" if message_id else "through"
            body = {"boundary": {"type": kind, "messageID": last}}
        return _session_of(await self.data(Session2, "POST", _path(session_id, "/fork"), body=body))

    async def _newest(self, session_id: SessionId) -> MessageId | None:
        page = await self._page(session_id, {"limit": 1, "order": "desc"})
        return page.data[0].id if page.data else None

    async def summarize_session(
        self,
        session_id: SessionId,
        model: ModelRef,
        *,
        auto: bool | None = None,
        at: Location = HERE,
    ) -> None:
        await self.do("POST", _path(session_id, "/compact"), {})
        await self._wait(session_id)

    async def revert_session(
        self,
        session_id: SessionId,
        message_id: MessageId,
        part_id: str | None = None,
        *,
        at: Location = HERE,
    ) -> Session:
        if part_id is not None:
            raise missing("revert of a part; revert the whole message")
        body: JsonObject = {"messageID": message_id, "files": True}
        await self.do("POST", _path(session_id, "/revert/stage"), body)
        return await self.session(session_id, at=at)

    async def unrevert_session(self, session_id: SessionId, *, at: Location = HERE) -> Session:
        method, path = self.contract.first(UNREVERT)
        await self.do(method.upper(), _of(session_id, path))
        return await self.session(session_id, at=at)

    async def share_session(self, session_id: SessionId, *, at: Location = HERE) -> Session:
        raise missing("shared sessions")

    async def unshare_session(self, session_id: SessionId, *, at: Location = HERE) -> Session:
        raise missing("shared sessions")

    # Messages

    async def messages(
        self,
        session_id: SessionId,
        *,
        limit: int | None = None,
        before: str | None = None,
        at: Location = HERE,
    ) -> MessagePage:
        """Return the newest ``limit`` messages, or all; ``before`` is the cursor of a page."""
        found, cursor = list[Message2](), before
        while True:
            size = PAGE if limit is None else min(limit - len(found), PAGE)
            query: Query = {"cursor": cursor} if cursor else {"limit": size, "order": "desc"}
            page = await self._page(session_id, query)
            found += page.data
            cursor = page.cursor.next if page.data else None
            if cursor is None or (limit is not None and len(found) >= limit):
                break
        # The prompt of the oldest answer may be on an earlier page.
        earlier, rest, parent = cursor, list[Message2](), UNKNOWN
        oldest = (one for one in reversed(found) if one.type == "assistant" or _is_prompt(one))
        if (first := next(oldest, None)) is not None and not _is_prompt(first):
            while earlier and parent == UNKNOWN:
                page = await self._page(session_id, {"cursor": earlier})
                parent = next((one.id for one in page.data if _is_prompt(one)), UNKNOWN)
                rest, earlier = page.data, page.cursor.next
                if not rest:
                    break
        self._remember(session_id, found, newest=before is None)
        unnamed = self.contract.finish_unnamed
        messages = stored(session_id, reversed(found), parent, finish_unnamed=unnamed)
        return MessagePage([*messages], cursor)

    def _remember(self, session_id: SessionId, found: Sequence[Message2], *, newest: bool) -> None:
        """Keep what later events do not repeat, for a connection that did not hear it.

        ``found`` begins with the latest message; ``newest``: with that of the session.
        """
        for one in found:
            for block in one.content:
                if block.type == "tool" and block.state.status in ("streaming", "running"):
                    call = KnownCall(block.name, block.state.input)
                    self.memory.calls.setdefault((one.id, block.id), call)
        if newest and session_id not in self.memory.prompts:
            last = next((one.id for one in found if _is_prompt(one)), None)
            if last is not None:
                self.memory.prompts[session_id] = last

    async def _page(self, session_id: SessionId, query: Query) -> Page2[list[Message2]]:
        path = _path(session_id, "/message")
        return await self.call(Page2[Readable[Message2]], "GET", path, query=query)

    async def message(
        self, session_id: SessionId, message_id: MessageId, *, at: Location = HERE
    ) -> MessageWithParts:
        checked("msg", message_id)
        cursor: str | None = None
        while True:
            page = await self.messages(session_id, limit=PAGE, before=cursor, at=at)
            for message in page.items:
                if message.info.id == message_id:
                    return message
            cursor = page.next_cursor
            if cursor is None:
                detail = "Message not found"
                raise UpstreamNotFoundError(upstream_status=404, detail=detail)

    def leave_work(self, messages: Sequence[MessageWithParts]) -> bool:
        """Whether messages have put work into the background whose end none of them reports.

        If that work does not run any more (``session_status``), it was lost.
        """
        return self.contract.has(*SHELLS) and self._leave_work(messages)

    def _leave_work(self, messages: Sequence[MessageWithParts]) -> bool:
        return not work_left(messages).keys() <= self.stopped.keys()

    def prompt(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> Coroutine[None, None, MessageWithParts]:
        """Run a turn and return its last message, which may hold an error: ``info.error``."""
        body, refused = _prompt_body(prompt), _refused(prompt)
        agent, model, variant, system = prompt.agent, prompt.model, prompt.variant, prompt.system
        tools, prompt_id = prompt.tools, prompt.message_id

        async def run(body: JsonObject | None) -> MessageWithParts:
            if refused is not None:
                raise refused
            await self._prepare(session_id, agent, model, variant, system, tools, at)
            await self.do("POST", _path(session_id, "/prompt"), body)
            body = None  # large files need not be kept until the turn has ended
            return await self._answer(session_id, prompt_id, at)

        return run(body)

    async def prompt_async(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> None:
        refused = _refused(prompt)
        if refused is not None:
            raise refused
        await self._prepare(
            session_id, prompt.agent, prompt.model, prompt.variant, prompt.system, prompt.tools, at
        )
        body = _prompt_body(prompt)
        if prompt.no_reply:
            body["resume"] = False
        await self.do("POST", _path(session_id, "/prompt"), body)

    async def _prepare(
        self,
        session_id: SessionId,
        agent: str | None,
        model: ModelRef | None,
        variant: str | None,
        system: str | None,
        tools: Mapping[str, bool] | None,
        at: Location,
    ) -> None:
        """Set what belongs to the session in 2.x and to the prompt in 1.x.

        What an earlier prompt has set is taken back, but for the agent and the model.
        """
        now = await self.data(Session2, "GET", _path(session_id))
        if agent is not None and agent != now.agent:
            known = [one.name for one in await self.agents(at=at)]
            if agent not in known:  # OpenCode would keep the prompt, and run it with the next
                raise UpstreamHttpError(f"OpenCode has no agent {agent}", upstream_status=400)
            await self.do("POST", _path(session_id, "/agent"), {"agent": agent})
        if model is None and variant:  # of the model that will be used
            used = now.model or await self.default_model(at)
            if used is None:
                raise missing("default model that is known; name the model of the variant")
            model = ModelRef(used.provider_id, used.id)
        if model is not None and (
            now.model is None or now.model.chosen != (model, variant or None)
        ):
            chosen: JsonObject = {"id": model.model_id, "providerID": model.provider_id}
            if variant:
                chosen["variant"] = variant
            await self.do("POST", _path(session_id, "/model"), {"model": chosen})
        instructions = _path(session_id, f"/instructions/entries/{INSTRUCTIONS}")
        if system:
            await self.do("PUT", instructions, {"value": system})
        elif self.contract.has(*UNINSTRUCT):
            await self.do("DELETE", instructions)
        if tools is not None:
            denied = [name for name, offered in tools.items() if not offered]
            rules = [PermissionRule(permission=n, pattern="*", action="deny") for n in denied]
            await self._set_rules(session_id, rules)
            if len((await self.session(session_id)).permission) < len(rules):
                raise missing("rules of a session, so that tools cannot be taken away")

    async def _answer(
        self, session_id: SessionId, prompt_id: MessageId | None, at: Location
    ) -> MessageWithParts:
        """Wait until the session is done with a prompt that it has; return its last answer.

        If that cannot be read, the connection counts as broken: it is no refusal of the prompt.
        """
        try:
            found = await self._since_prompt(session_id, prompt_id, at)
        except UpstreamUnreachableError:
            raise
        except UpstreamError as error:
            text = f"OpenCode has the prompt, but its answer could not be read: {error.message}"
            raise UpstreamUnreachableError(text, detail=error.detail) from None
        for message in reversed(found):
            if isinstance(message.info, AssistantMessage):
                return message
        raise UpstreamUnansweredError

    async def _since_prompt(
        self, session_id: SessionId, prompt_id: MessageId | None, at: Location
    ) -> Sequence[MessageWithParts]:
        """Wait until the session is done with a prompt; return its messages from that on.

        It is not while work runs that it has put into the background, or an earlier prompt has:
        this one may have been sent while the turn of the other was running.
        """
        stop = self.stops.setdefault(session_id, asyncio.Event())
        unbegun, idle = round(AGENT_SECONDS / POLL_SECONDS), 0
        while True:
            await self._wait(session_id)
            page = await self.messages(session_id, limit=LATEST)
            found, begin = page.items, _index(page.items, prompt_id)
            if begin is None and unbegun and await self._waits(session_id, prompt_id):
                unbegun -= 1
                await asyncio.sleep(POLL_SECONDS)
                continue
            while begin is None and page.next_cursor:  # a long turn
                page = await self.messages(session_id, limit=PAGE, before=page.next_cursor)
                found, begin = [*page.items, *found], _index(page.items, prompt_id)
            if stop.is_set() or not self._leave_work(found):
                break
            # The end of its own work wakes the session a moment later. Earlier work may be lost.
            idle = 0 if session_id in await self.session_status(at=at) else idle + 1
            if idle >= (IDLE_LOOKS if self._leave_work(found[begin or 0 :]) else 1):
                break
            await wait(stop, BACKGROUND_SECONDS)
        if begin is None:  # it was not even begun, and its sender is told so
            await self._empty_inbox(session_id, only=prompt_id)
            return []
        return found[begin:]

    async def _waits(self, session_id: SessionId, prompt_id: MessageId | None) -> bool:
        """Whether a prompt is in the inbox of a session still, as far as 2.x tells it."""
        inbox = self.contract.first(INBOX)
        if not self.contract.has(*inbox):
            return True
        found = await self.data(Readable[Named2], "GET", _of(session_id, inbox[1]))
        return any(one.id == prompt_id for one in found)

    async def _wait(self, session_id: SessionId) -> None:
        await self.do("POST", _path(session_id, "/wait"), endless=True)

    async def run_command(
        self, session_id: SessionId, command: CommandCall, *, at: Location = HERE
    ) -> MessageWithParts:
        model = ModelRef.parse(command.model)
        await self._prepare(session_id, command.agent, model, command.variant, None, None, at)
        body: JsonObject = {
            "command": command.command,
            "arguments": command.arguments,
            "id": command.message_id,
            "files": _files(command.parts or ()) or None,
        }
        await self.do("POST", _path(session_id, "/command"), body)
        return await self._answer(session_id, command.message_id, at)

    async def run_shell(
        self,
        session_id: SessionId,
        command: ShellCall,
        *,
        at: Location = HERE,
    ) -> MessageWithParts:
        await self.do("POST", _path(session_id, "/shell"), {"command": command.command})
        await self._wait(session_id)
        for message in reversed((await self.messages(session_id, limit=LATEST)).items):
            for part in message.parts:
                if isinstance(part, ToolPart) and part.call_id == message.info.id:
                    return message
        raise UpstreamPayloadError(detail="the command has no message")

    # Interrupts; the location has to be that of the session that asks

    async def permissions(self, *, at: Location = HERE) -> list[PermissionRequest]:
        return [permission_of(one) for one in await self._permissions(at)]

    async def _permissions(self, at: Location, *, urgent: bool = False) -> list[Permission2]:
        path = "/api/permission/request"
        return await self.data(Readable[Permission2], "GET", path, at, urgent=urgent)

    async def questions(self, *, at: Location = HERE) -> list[QuestionRequest]:
        return [question_of(one) for one in await self._forms(at)]

    async def _forms(self, at: Location, *, urgent: bool = False) -> list[Form2]:
        return await self.data(Readable[Form2], "GET", "/api/form/request", at, urgent=urgent)

    async def reply_permission(
        self,
        request_id: RequestId,
        reply: Literal["once", "always", "reject"],
        message: str | None = None,
        *,
        at: Location = HERE,
    ) -> None:
        """Answer a permission; the list of those that are pending has its session.

        ``always`` is refused: 2.x would keep it for good, for everybody.
        """
        if reply == "always":
            raise missing("answer `always` that ends with the session; answer `once`")
        asked = _with_id(request_id, await self._permissions(at, urgent=True))
        field = "decision" if self.contract.takes(*REPLY, "decision") else "reply"
        rest = f"/permission/{checked('per', request_id)}/reply"
        await self._settle(asked.session_id, rest, {field: reply, "message": message})

    async def reply_question(
        self, request_id: RequestId, answers: Sequence[Sequence[str]], *, at: Location = HERE
    ) -> None:
        form = _with_id(request_id, await self._forms(at, urgent=True))
        rest = f"/form/{checked('frm', request_id)}/reply"
        await self._settle(form.session_id, rest, {"answer": form.answer(answers)})

    async def reject_question(self, request_id: RequestId, *, at: Location = HERE) -> None:
        form = _with_id(request_id, await self._forms(at, urgent=True))
        await self._settle(form.session_id, f"/form/{checked('frm', request_id)}/cancel")

    async def _settle(
        self, session_id: SessionId, rest: str, body: JsonObject | None = None
    ) -> None:
        """Answer or cancel a request of a session, which may be that of a sub-agent.

        If that session was deleted, only the request is lost, not the session of the turn.
        """
        try:
            await self.do("POST", _path(session_id, rest), body, urgent=True)
        except SessionNotFoundError:
            detail = "The session that asked was deleted"
            raise UpstreamNotFoundError(upstream_status=404, detail=detail) from None

    # The server itself

    async def health(self) -> Health:
        """Raise unless OpenCode answers; where it tells its version differs between releases."""
        await self._active()
        return Health(healthy=True, version="")

    async def dispose(self) -> None:
        """Do nothing: OpenCode 2 ends its turns and their commands when it is ended itself."""

    async def events(self, sink: Callable[[bytes], object]) -> None:
        """Pass the event stream to ``sink`` in chunks, cut anywhere, until the stream ends.

        What running commands print is put in between.
        """
        stream = Inserted(sink)
        looking = asyncio.create_task(self._tell_outputs(stream))
        try:
            await self.read_stream("/api/event", stream.take)
        finally:
            looking.cancel()
            await asyncio.wait([looking])

    async def _tell_outputs(self, stream: Inserted) -> None:
        """Look at running commands again and again. Failures are left to the stream itself."""
        silent = 0.0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            silent = 0.0 if stream.fresh else silent + LOOK_SECONDS
            stream.fresh = False
            # A stream that has died must not be kept alive by what is put into it.
            if silent > HEARTBEAT_SECONDS or not self.contract.has(*OUTPUT):
                continue
            for shell, command in [*self.memory.running.items()]:
                at, query = Location(command.directory), {"cursor": command.cursor}
                with suppress(UpstreamError):  # it may have ended by now, or have an odd id
                    path = f"/api/shell/{checked('sh', shell)}/output"
                    new = await self.data(Output2, "GET", path, at, query=query)
                    if new.output and self.memory.running.get(shell) is command:
                        stream.put(command.printed(shell, new.output, new.cursor))

    def begin_decoding(self) -> Decoder:
        """Return what decodes the events of a new connection; forget what earlier ones told."""
        self.memory = Memory()
        return Decoder2(self.memory, finish_unnamed=self.contract.finish_unnamed)


R = TypeVar("R", Permission2, Form2)


def _with_id(request_id: RequestId, pending: Sequence[R]) -> R:
    for one in pending:
        if one.id == request_id:
            return one
    raise UpstreamNotFoundError(upstream_status=404, detail="not pending")


def _path(session_id: SessionId, rest: str = "") -> str:
    return _of(session_id, f"{SESSION}{rest}")


def _of(session_id: SessionId, path: str) -> str:
    """Return a path of the contract with the id of a session in it."""
    if not well_formed("ses", session_id):
        raise SessionNotFoundError(session_id=session_id)
    return path.replace("{}", session_id, 1)


def _session_of(found: Session2) -> Session:
    return Session(
        id=found.id,
        title=found.title,
        directory=found.location.directory,
        project_id=found.project_id,
        version="2",
        time=found.time,
        parent_id=found.parent_id,
        model=found.model.ref if found.model else None,
        metadata=found.metadata,
        revert=found.revert,
        permission=[rule_of(rule) for rule in found.permissions],
    )


def _index(messages: Sequence[MessageWithParts], prompt_id: MessageId | None) -> int | None:
    """Return where a prompt is among messages; the beginning if it has no id."""
    if prompt_id is None:
        return 0
    return next((at for at, one in enumerate(messages) if one.info.id == prompt_id), None)


def _is_prompt(message: Message2) -> bool:
    return message.type in ("user", "synthetic")


def _refused(prompt: Prompt) -> NotInOpenCodeError | None:
    """Return why 2.x cannot take a prompt; None if it can."""
    if prompt.format is not None and prompt.format.type == "json_schema":
        return missing("answers by a schema; send the message without a schema")
    kinds = {type(part) for part in prompt.parts}
    if kinds - {TextInput, FileInput}:
        return missing("parts of a prompt that name an agent; set the agent of the prompt")
    return None


def _prompt_body(prompt: Prompt) -> JsonObject:
    texts = [part.text for part in prompt.parts if isinstance(part, TextInput)]
    files = _files([part for part in prompt.parts if isinstance(part, FileInput)])
    body: JsonObject = {"text": "\n".join(texts)}
    if prompt.message_id is not None:
        body["id"] = prompt.message_id
    if files:
        body["files"] = files
    return body


def _files(parts: Sequence[FileInput]) -> list[Json]:
    return [{"uri": part.url, "name": part.filename or "file"} for part in parts]
