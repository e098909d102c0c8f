"""Tasks and log entries as A2A has them, for each kind of caller.

The functions render tasks and entries as 1.0. Parts are fitted to the output modes of the task. The
metadata beside them (session, usage, progress, interrupts, errors) are for clients that know this
service; nobody needs them to read a task correctly.

A binding chooses one ``Encoding`` for a request, by its version and spelling: how params are read,
and how what was rendered is written. The growing text of an answer takes a short way: the encoded
text goes into a template, since that is what most of a stream consists of.
"""

import base64
import secrets
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from operator import itemgetter
from typing import assert_never

import orjson

from opencode_a2a.a2a import types, v03
from opencode_a2a.a2a.texts import interrupt_text
from opencode_a2a.a2a.types import (
    NoParams,
    PushListParams,
    PushRef,
    PushRequest,
    SendRequest,
    TaskParams,
    Version,
    check,
    timestamp,
)
from opencode_a2a.a2a.v03 import Spelling
from opencode_a2a.events import (
    ArtifactChanged,
    ArtifactEvent,
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    Finished,
    Grew,
    Interrupted,
    Json,
    JsonObject,
    Progressed,
    ResultGiven,
    Resumed,
    SessionBound,
    Started,
    ToolChanged,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import ContextId, Principal, TaskId
from opencode_a2a.media import DIFF_TYPE, accepts
from opencode_a2a.messages import Added, Answered, Message, Part
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks.state import (
    Accepted,
    Cursor,
    Entry,
    Query,
    Recovered,
    State,
    Status,
    TaskRef,
    TaskState,
    Unknown,
)
from opencode_a2a.turns.answers import groups

_PLACES: dict[Channel | type[ArtifactEvent], int] = {
    kind: place
    for place, kind in enumerate(
        (Channel.REASONING, Channel.PLAN, DiffChanged, Channel.TEXT, ResultGiven), start=1
    )
}
"""The order of the last artifacts of a task; the others, such as tool calls, come before."""
StatusEvent = SessionBound | Started | Progressed | Interrupted | Resumed | Finished | Recovered
"""What is told by a status."""


def task(
    state: TaskState,
    history_length: int | None = None,
    *,
    artifacts: bool = True,
    streamed: bool = False,
) -> JsonObject:
    """Return a Task as it is now; ``streamed`` when updates follow it.

    Clients look for what the agent says in different places: in the status message, in the first
    or the last artifact, in all of them (docs/compatibility.md). So the answer is the last
    artifact, and the message of a completed task; and what the agent asks, or why it failed, is
    the last artifact too. A stream is without these repetitions: its readers show every text.
    """
    ref, status = state.ref, state.status
    shared = known(
        session=status.session_id and known(id=status.session_id, title=status.title),
        usage=status.usage and _usage(status.usage),
        interrupt=_waiting(status),
    )
    about = known(
        created_at=timestamp(ref.created_at),
        title=status.subject,
        model=status.model,
        agent=status.agent,
        directory=status.directory,
    )
    rendered: JsonObject = {
        "id": ref.id,
        "contextId": ref.context_id,
        "status": (told := _status(status, ref)),
        "metadata": known(shared=shared or None, opencode=about | _outcome(status, ref)),
    }
    if artifacts:
        placed = [
            (_PLACES.get(type(one), 0), _artifact(one, ref)) for one in state.artifacts.values()
        ]
        for channel, running in state.channels.items():
            if ref.shows_channel(channel):
                hints = _hints(ref, "stream", running.message_id, channel)
                placed.append((_PLACES[channel], _channel(ref, channel, running.text, hints)))
        placed.sort(key=itemgetter(0))
        made: list[Json] = [artifact for _, artifact in placed if artifact]
        text, plan = state.channels.get(Channel.TEXT), state.channels.get(Channel.PLAN)
        answer = text and text.text
        if isinstance(result := state.artifacts.get(ResultGiven.artifact), ResultGiven):
            answer = orjson.dumps(result.data).decode()
        if status.state is State.COMPLETED and answer is not None:
            said = Message(f"{ref.id}:answer", "agent", [Part("text", text=answer)])
            told["message"] = message(said, ref)
        elif not streamed and (status.pending or status.failure) and (says := _says(status)):
            made.append(_notice(ref, says[1]))
            if status.plan is not None and plan is not None:
                # Who reads the status alone has to know what there is to approve.
                parts = [Part("text", text=f"{plan.text}\n\n{says[1]}")]
                told["message"] = message(Message(f"{ref.id}:{says[0]}", "agent", parts), ref)
        if made:
            rendered["artifacts"] = made
    if history_length != 0:
        latest = state.history if history_length is None else state.history[-history_length:]
        rendered["history"] = [m for sent in latest if (m := message(sent, ref))]
    return rendered


def snapshot(state: TaskState, history_length: int | None = None) -> tuple[bytes, JsonObject]:
    """Return a task as an event of a stream, and the cursor of a reader that has it."""
    return cursor(state.seq, state), {"task": task(state, history_length, streamed=True)}


def present(state: TaskState) -> JsonObject:
    """Return the status of a task as the event of a stream that led to it."""
    status, ref = state.status, state.ref
    shared = known(
        session=status.session_id and known(id=status.session_id, title=status.title),
        usage=status.usage and _usage(status.usage),
        interrupt=_waiting(status),
    )
    shared["stream"] = _hints(ref, "status", None, None)
    return {
        "statusUpdate": {
            "taskId": ref.id,
            "contextId": ref.context_id,
            "status": _status(status, ref),
            "metadata": known(shared=shared, opencode=_outcome(status, ref) or None),
        }
    }


def push_config(task_id: str, row: HookRow) -> JsonObject:
    """Return a push notification configuration: what is secret in it is never given back."""
    authentication: JsonObject | None = {"scheme": row.scheme} if row.scheme else None
    return {
        "taskId": task_id,
        "id": row.config_id,
        "url": row.url,
        **known(authentication=authentication),
    }


def message(sent: Message, ref: TaskRef) -> JsonObject | None:
    """Return a message of a task; None when the caller accepts nothing of it."""
    parts = _parts(sent.parts, ref.output_modes)
    if not parts:
        return None
    rendered: JsonObject = {
        "messageId": sent.message_id,
        "contextId": ref.context_id,
        "taskId": ref.id,
        "role": f"ROLE_{sent.role.upper()}",
        "parts": parts,
    }
    if sent.metadata is not None:
        rendered["metadata"] = sent.metadata
    if sent.extensions:
        rendered["extensions"] = [*sent.extensions]
    if sent.reference_task_ids:
        rendered["referenceTaskIds"] = [*sent.reference_task_ids]
    return rendered


def part(of: Part) -> JsonObject:
    content: JsonObject = {"text": of.text, "raw": of.raw, "url": of.url, "data": of.data}
    named = known(mediaType=of.media_type, filename=of.filename, metadata=of.metadata)
    return {of.kind: content[of.kind], **named}


def update(entry: Entry, ref: TaskRef) -> JsonObject | None:
    """Return an entry as an event of a stream; None when it says nothing to a reader."""
    event, seq = entry.event, entry.seq
    if not ref.visible(event):
        return None
    match event:
        case Grew():
            return growth(ref, event.channel, event.message_id, event.text, seq, opens=event.opens)
        case ChannelReplaced():
            text = "".join(text for _, text in event.parts)
            hints = _hints(ref, "final_snapshot", event.message_id, event.channel, seq)
            artifact = _channel(ref, event.channel, text, hints)
            return _artifact_update(ref, artifact, append=False, last=False)
        case ChannelClosed():
            hints = _hints(ref, "stream", event.message_id, event.channel, seq)
            artifact = _channel(ref, event.channel, "", hints)
            return _artifact_update(ref, artifact, append=True, last=True)
        case ArtifactChanged():
            artifact = _artifact(event, ref, seq)
            return _artifact_update(ref, artifact, append=False, last=event.complete)
        case (
            SessionBound()
            | Started()
            | Progressed()
            | Interrupted()
            | Resumed()
            | Finished()
            | Recovered()
        ):
            return entry.status and _status_update(event, seq, entry.status, ref)
        case Accepted() | Added() | Answered() | UsageCounted() | Unknown():
            return None  # see TaskRef.visible
        case _:
            assert_never(event)


def growth(
    ref: TaskRef, channel: Channel, message_id: str, text: str, seq: int | str, *, opens: bool
) -> JsonObject:
    """Return new text of a channel as an event of a stream."""
    hints = _hints(ref, "stream", message_id, channel, seq)
    artifact = _channel(ref, channel, text, hints)
    return {"artifactUpdate": _chunk(ref, artifact, append=not opens, last=False)}


def cursor(seq: int, state: TaskState) -> bytes:
    """Return the position of a reader that has the entry with this number."""
    if not state.epochs:
        return b"%d" % seq
    return str(Cursor(seq, bisect_right(state.epochs, seq))).encode()


def interrupt(event: Interrupted) -> JsonObject:
    """Return a request that waits for an answer, as ``metadata.shared.interrupt`` has it."""
    tool = known(call_id=event.call_id, name=event.tool, input=event.tool_input) or None
    origin: JsonObject | None = None
    if event.origin is not None:
        origin = {"type": "sub-agent", "title": event.origin}
    if event.type == "permission":
        details = known(
            replies=["once", *(["always"] if event.allows_always else []), "reject"],
            # OpenCode says what else a yes could allow, or there is nothing wider to offer.
            scopes=["task", "context"] if event.always else None,
            origin=origin,
            permission=event.permission,
            patterns=[*event.patterns],
            always=[*event.always],
            metadata=event.metadata,
            tool=tool,
        )
    elif event.type == "plan":
        details = known(replies=["go"])
    else:
        questions: list[Json] = [
            {
                "header": question.header,
                "question": question.question,
                "options": [
                    {
                        "label": option.label,
                        "value": option.label,
                        "description": option.description,
                    }
                    for option in question.options
                ],
                "multiple": question.multiple,
                "custom": question.custom,
            }
            for question in event.questions
        ]
        details = known(origin=origin, questions=questions, tool=tool)
    return known(
        request_id=event.request_id,
        number=event.number,
        type=event.type,
        phase="asked",
        session_id=event.session_id,
        details=details,
        asked_at=None if event.asked_at is None else timestamp(event.asked_at),
        expires_at=None if event.expires_at is None else timestamp(event.expires_at),
        default=event.default,
    )


def _waiting(status: Status) -> JsonObject | None:
    """Return the first request that waits for an answer, and the numbers of all that do.

    Requests for exactly the same are one, by the number of the latest, as in the text.
    """
    shown = groups(status.pending)
    if not shown:
        return None
    numbers: list[Json] = [number for group in shown if (number := group[-1].number) is not None]
    return {**interrupt(shown[0][-1]), "waiting": numbers}


def known(**values: Json) -> JsonObject:
    """Return an object of what is known: absent values leave no key."""
    return {name: value for name, value in values.items() if value is not None}


# --- events -----------------------------------------------------------------------------------


def _artifact_update(
    ref: TaskRef, artifact: JsonObject | None, *, append: bool, last: bool
) -> JsonObject | None:
    return artifact and {"artifactUpdate": _chunk(ref, artifact, append=append, last=last)}


def _chunk(ref: TaskRef, artifact: JsonObject, *, append: bool, last: bool) -> JsonObject:
    chunk: JsonObject = {
        "taskId": ref.id,
        "contextId": ref.context_id,
        "artifact": artifact,
        "append": append,
        "lastChunk": last,
    }
    if (negotiated := _negotiation(ref)) is not None:
        chunk["metadata"] = {"opencode": {"output_negotiation": negotiated}}
    return chunk


def _status_update(event: StatusEvent, no: int, status: Status, ref: TaskRef) -> JsonObject:
    shared = known(session=status.session_id and known(id=status.session_id, title=status.title))
    opencode = known(output_negotiation=_negotiation(ref))
    source, message_id, seq = "status", None, no
    match event:
        case Progressed():
            source, shared["progress"] = "progress", known(**asdict(event))
        case Recovered():
            recovered = Progressed("recovered", "resumed", reason=event.reason)
            source, shared["progress"] = "progress", known(**asdict(recovered))
        case Interrupted():
            waiting = (_waiting(status) or {}) | interrupt(event)
            source, shared["interrupt"] = "interrupt", waiting
        case Resumed():
            answered = known(
                request_id=event.request_id,
                type=event.type,
                phase="resolved",
                resolution=event.resolution,
                by=event.by,
                reason=event.reason,
            )
            source, shared["interrupt"] = "interrupt", answered
        case Finished():
            # The last status has no number: it is the same whenever it is read.
            message_id, seq = event.message_id, None
            shared |= known(usage=status.usage and _usage(status.usage))
            opencode = _outcome(status, ref)
        case SessionBound() | Started():
            pass
        case _:
            assert_never(event)
    shared["stream"] = _hints(ref, source, message_id, None, seq)
    return {
        "statusUpdate": {
            "taskId": ref.id,
            "contextId": ref.context_id,
            "status": _status(status, ref),
            "metadata": known(shared=shared, opencode=opencode or None),
        }
    }


def _hints(
    ref: TaskRef,
    source: str,
    message_id: str | None,
    block_type: str | None,
    seq: int | str | None = None,
) -> JsonObject:
    """Return where a chunk or status came from."""
    if block_type == Channel.PLAN:  # a plan is text; the name of its artifact says what it is
        block_type = Channel.TEXT
    hints = known(block_type=block_type, source=source)
    hints["message_id"] = message_id or f"{ref.id}:{ref.context_id}:assistant"
    events = f"{ref.id}:{ref.context_id}:{ref.id}:stream:"
    if seq is not None:
        hints |= {"event_id": f"{events}{seq}", "sequence": seq}
    elif source == "status":
        hints["event_id"] = f"{events}status"
    return hints


# --- the status -------------------------------------------------------------------------------


def _status(status: Status, ref: TaskRef) -> JsonObject:
    rendered: JsonObject = {
        "state": f"TASK_STATE_{status.state.name}",
        "timestamp": timestamp(status.at),
    }
    if (says := _says(status)) is not None:
        name, text = says
        said = Message(f"{ref.id}:{name}", "agent", [Part("text", text=text)])
        rendered["message"] = message(said, ref)
    return rendered


def _says(status: Status) -> tuple[str, str] | None:
    """Return what the agent says about its state: what it asks or waits for, or why it failed."""
    if status.pending:
        requests = "+".join(asked.request_id for asked in status.pending)
        return f"prompt:{requests}", interrupt_text(status.pending)
    if status.failure is not None:
        return f"{status.state.value}:{status.at}", status.failure.message
    if (queued := status.queued) is not None:
        text = f"{'. '.join(filter(None, (queued.title, queued.reason)))}."
        return f"queue:{queued.status}:{queued.part_id}", text
    return None


def _usage(counted: UsageCounted) -> JsonObject:
    def tokens(used: Usage) -> JsonObject:
        return {
            "input_tokens": used.input,
            "output_tokens": used.output,
            "total_tokens": used.total,
            "reasoning_tokens": used.reasoning,
            "cache_tokens": {"read_tokens": used.cache_read, "write_tokens": used.cache_write},
            "cost": used.cost,
        }

    children = None if counted.children is None else tokens(counted.children)
    return tokens(counted.own) | known(children=children)


def _outcome(status: Status, ref: TaskRef) -> JsonObject:
    """Return what OpenCode said beyond A2A: why it failed or stopped, and how parts were fitted."""
    error = status.failure and known(
        type=status.failure.type, upstream_status=status.failure.upstream_status
    )
    return known(
        error=error,
        finish=status.finish,
        structured=status.structured,
        output_negotiation=_negotiation(ref),
    )


def _negotiation(ref: TaskRef) -> JsonObject | None:
    if ref.output_modes is None:
        return None
    return {"accepted_output_modes": [*ref.output_modes]}


# --- artifacts --------------------------------------------------------------------------------


def _channel(ref: TaskRef, channel: Channel, text: str, hints: JsonObject) -> JsonObject:
    # A2A has no word for reasoning. This is Google's, whose kit then shows it as a thought.
    metadata: JsonObject | None = {"adk_thought": True} if channel is Channel.REASONING else None
    media_type = None
    if channel is Channel.PLAN and accepts(ref.output_modes or ("text/*",), "text/markdown"):
        media_type = "text/markdown"
    part = Part("text", text=text, media_type=media_type, metadata=metadata)
    return {
        "artifactId": f"{ref.id}:stream:{channel.value}",
        "name": channel.value,
        "parts": _parts([part], ref.output_modes),
        "metadata": {"shared": {"stream": hints}},
    }


def _artifact(event: ArtifactEvent, ref: TaskRef, seq: int | None = None) -> JsonObject | None:
    """Return an artifact beside the texts; None when the caller accepts nothing of it."""
    where, name, description = event.artifact, event.artifact, None
    source, message_id, block_type = "final_snapshot", None, None
    match event:
        case ToolChanged():
            where, name = f"stream:{event.artifact}", event.tool
            source, message_id, block_type = "tool_part_update", event.message_id, "tool_call"
            call = known(
                call_id=event.call_id,
                tool=event.tool,
                status=event.status,
                title=event.title,
                input=event.input,
                output=event.output,
                error=event.error,
                metadata=event.metadata,
            )
            content = [Part("data", data=call, media_type="application/json")]
        case DiffChanged():
            description = "Files that this turn changed"
            files: list[Json] = [
                {
                    "file": change.file,
                    "status": change.status,
                    "additions": change.additions,
                    "deletions": change.deletions,
                }
                for change in event.files
            ]
            summary: JsonObject = {"files": files, "truncated": event.truncated}
            content = [Part("data", data=summary, media_type="application/json")]
            if event.patch:
                # A file and not text: clients that join all text would show it in the answer.
                raw = base64.b64encode(event.patch.encode()).decode()
                patch = Part("raw", raw=raw, media_type=DIFF_TYPE, filename="changes.diff")
                content.insert(0, patch)
        case ResultGiven():
            description = "The answer by the schema that was asked for"
            content = [Part("data", data=event.data, media_type="application/json")]
        case _:
            assert_never(event)
    if not (parts := _parts(content, ref.output_modes)):
        return None
    return {
        "artifactId": f"{ref.id}:{where}",
        "name": name,
        "parts": parts,
        **known(description=description),
        "metadata": {"shared": {"stream": _hints(ref, source, message_id, block_type, seq)}},
    }


def _notice(ref: TaskRef, text: str) -> JsonObject:
    return {
        "artifactId": f"{ref.id}:notice",
        "name": "notice",
        "description": "What the status message says, for clients that read artifacts alone",
        "parts": _parts([Part("text", text=text)], ref.output_modes),
        "metadata": {"shared": {"stream": _hints(ref, "status", None, None)}},
    }


def _parts(parts: list[Part], modes: tuple[str, ...] | None) -> list[Json]:
    """Return what of the parts the caller accepts; data becomes text rather than nothing."""
    if modes is None:
        return [part(one) for one in parts]
    fitted: list[Json] = []
    for one in parts:
        match one.kind:
            case "data":
                media_type = "application/json"
            case "text":
                media_type = one.media_type or "text/plain"
            case _:
                media_type = one.media_type or "application/octet-stream"
        if accepts(modes, media_type):
            fitted.append(part(one))
        elif one.kind == "data":
            text = orjson.dumps(one.data, option=orjson.OPT_SORT_KEYS).decode()
            fitted.append(part(Part("text", text=text, metadata=one.metadata)))
    return fitted


# --- encodings --------------------------------------------------------------------------------

# Stand for what varies in a template; unguessable, since ids come from callers.
_TEXT, _SEQ = secrets.token_hex(12), secrets.token_hex(12)


ReadPush = tuple[
    Callable[[JsonObject], PushRequest],
    Callable[[JsonObject], PushRef],
    Callable[[JsonObject], PushListParams],
]


class Encoding:
    """One version of A2A, in one of its spellings."""

    def __init__(
        self,
        version: Version,
        read_send: Callable[[JsonObject], SendRequest],
        read_list: Callable[[JsonObject], Query],
        push: ReadPush,
        downgrade: Callable[..., Json] | None = None,
    ) -> None:
        self.version = version
        read_push, read_push_ref, read_push_list = push
        self.read: dict[type, Callable[[JsonObject], object]] = {
            SendRequest: read_send,
            Query: read_list,
            PushRequest: read_push,
            PushRef: read_push_ref,
            PushListParams: read_push_list,
            TaskParams: partial(check, TaskParams),
            NoParams: partial(check, NoParams),
        }
        """How the params of an operation are checked, by what it takes."""
        self._downgrade = downgrade
        self._shared: tuple[Entry, int, list[tuple[bytes, bytes]]] | None = None
        """What several readers are given at the moment: its first entry, how many, the events."""

    def result(self, result: JsonObject) -> Json:
        """Return the result of an operation as the caller reads it."""
        return result if self._downgrade is None else self._downgrade(result)

    def events(
        self, entries: list[Entry], state: TaskState, *, shared: bool
    ) -> list[tuple[bytes, bytes]]:
        """Return entries as events of a stream: cursors and bodies.

        What is ``shared`` is encoded once for all readers that get it at the same time.
        """
        known = self._shared
        if known is not None and known[0] is entries[0] and known[1] == len(entries):
            return known[2]
        events = [
            (cursor(entry.seq, state), body)
            for entry in entries
            if (body := self.entry(entry, state.ref)) is not None
        ]
        self._shared = (entries[0], len(entries), events) if shared else None
        return events

    def entry(self, entry: Entry, ref: TaskRef) -> bytes | None:
        """Return an entry as an event of a stream; None when it says nothing to a reader."""
        event = entry.event
        if isinstance(event, Grew):
            template = _template(
                self,
                ref.id,
                ref.context_id,
                ref.output_modes,
                event.channel,
                event.message_id,
                event.opens,
            )
            if template is None:
                return None
            head, middle, tail, end = template
            number = b"%d" % entry.seq
            return b"".join((head, orjson.dumps(event.text), middle, number, tail, number, end))
        rendered: Json = update(entry, ref)
        if rendered is None:
            return None
        if self._downgrade is not None:
            rendered = self._downgrade(rendered, final=entry.stops)
        return orjson.dumps(rendered)


@lru_cache(maxsize=4096)
def _template(
    encoding: Encoding,
    task_id: TaskId,
    context_id: ContextId,
    modes: tuple[str, ...] | None,
    channel: Channel,
    message_id: str,
    opens: bool,
) -> tuple[bytes, bytes, bytes, bytes] | None:
    """Return what stands around the text and the two places of the sequence number.

    None when the caller is not shown the text.
    """
    ref = TaskRef(task_id, context_id, Principal(""), modes)
    if not ref.shows_channel(channel):
        return None
    rendered = growth(ref, channel, message_id, _TEXT, _SEQ, opens=opens)
    whole = orjson.dumps(encoding.result(rendered))
    head, rest = whole.split(b'"%s"' % _TEXT.encode())
    middle, tail, end = rest.split(_SEQ.encode())
    return head, middle, tail.removesuffix(b'"'), end.removeprefix(b'"')


_LIST_PUSH = partial(check, PushListParams)
_PUSH = (types.read_push, types.read_push_ref, _LIST_PUSH)
_REST_PUSH = (v03.read_push_proto, types.read_push_ref, _LIST_PUSH)

V1 = Encoding(Version.V1, types.read_send, types.read_list, _PUSH)
V03 = Encoding(
    Version.V03,
    v03.read_send,
    v03.read_list,
    (v03.read_push, v03.read_push_ref, v03.read_push_list),
    partial(v03.downgrade, spelling=Spelling.JSON, bare=True),
)
"""0.3 over JSON-RPC."""
V03_REST = Encoding(
    Version.V03,
    v03.read_send,
    v03.read_list,
    _REST_PUSH,
    partial(v03.downgrade, spelling=Spelling.JSON),
)
"""0.3 over HTTP+JSON, in the JSON of its specification."""
V03_PROTO = Encoding(
    Version.V03,
    v03.read_send_proto,
    v03.read_list,
    _REST_PUSH,
    partial(v03.downgrade, spelling=Spelling.PROTO),
)
"""0.3 over HTTP+JSON, in ProtoJSON."""
