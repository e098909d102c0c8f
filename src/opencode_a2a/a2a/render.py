"""Renders tasks and entries of their logs as JSON of A2A 1.0.

``encoding`` makes bytes of it, for callers of 0.3 after ``v03`` has rewritten it. Parts are
converted to the media types that the caller accepts. The metadata (session, usage, progress,
interrupts, errors) are for clients that know this service; nobody needs them to understand a task.
"""

import base64
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import assert_never

import orjson

from opencode_a2a.a2a.texts import interrupt_text
from opencode_a2a.a2a.types import timestamp
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
from opencode_a2a.ids import Principal
from opencode_a2a.log.state import (
    Accepted,
    Cursor,
    Entry,
    Recovered,
    State,
    Status,
    StatusEvent,
    TaskRef,
    TaskState,
    Unknown,
)
from opencode_a2a.media import DIFF_TYPE, accepts
from opencode_a2a.messages import Added, Answered, Message, Part
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.turns.answers import Scope, groups, wider_grant
from opencode_a2a.turns.shell import can_be_wider

_PLACES: dict[Channel | type[ArtifactEvent], int] = {
    kind: place
    for place, kind in enumerate(
        (Channel.REASONING, Channel.PLAN, DiffChanged, Channel.TEXT, ResultGiven), start=1
    )
}
"""The order of the last artifacts of a task; all others, such as tool calls, come before them."""
CANCELED = "Canceled by the caller."


def task(
    state: TaskState,
    history_length: int | None = None,
    *,
    artifacts: bool = True,
    streamed: bool = False,
    reader: Principal | None = None,
) -> JsonObject:
    """Return the current Task; ``streamed`` if updates of it follow.

    A ``reader`` who is not its principal, hence a supervisor, is told whose it is.

    Clients look for the agent's words in different places: the status message, the first or the
    last artifact, or all artifacts (docs/compatibility.md). So the answer is the last artifact, and
    the status message too if there are other artifacts; a question, or why a task ended without an
    answer, is the status message, and the last artifact too if there are others. Without others
    nothing is repeated, and in a stream neither: clients that join all texts show them once.
    """
    ref, status = state.ref, state.status
    shared = _shared(status)
    about = compact(
        created_at=timestamp(ref.created_at),
        title=status.subject,
        model=status.model,
        agent=status.agent,
        directory=status.directory,
        principal=ref.principal if reader not in (None, ref.principal) else None,
    )
    rendered: JsonObject = {
        "id": ref.id,
        "contextId": ref.context_id,
        "status": (rendered_status := _status(status, ref)),
        "metadata": compact(shared=shared or None, opencode=about | _outcome(status, ref)),
    }
    if artifacts:
        placed = [
            (_PLACES.get(type(event), 0), _artifact(event, ref))
            for event in state.artifacts.values()
        ]
        for channel, running in state.channels.items():
            if ref.shows_channel(channel):
                hints = _hints(ref, "stream", running.message_id, channel)
                placed.append((_PLACES[channel], _channel(ref, channel, running.text, hints)))
        placed.sort(key=itemgetter(0))
        shown: list[Json] = [artifact for _, artifact in placed if artifact]
        running, plan = state.channels.get(Channel.TEXT), state.channels.get(Channel.PLAN)
        answer, repeated = running and running.text, len(shown) > 1
        if isinstance(result := state.artifacts.get(ResultGiven.artifact), ResultGiven):
            answer, repeated = orjson.dumps(result.data).decode(), True
        if status.state is State.COMPLETED:
            if answer is not None and repeated:
                rendered_status["message"] = _agent_message(ref, "answer", answer)
        elif (
            not streamed
            and shown
            and (status.pending or status.state.terminal)
            and (notice := _notice(status))
        ):
            name, text = notice
            shown.append(_notice_artifact(ref, text))
            if status.plan is not None and plan is not None:
                # A client that reads the status alone needs to see the plan that it approves.
                rendered_status["message"] = _agent_message(ref, name, f"{plan.text}\n\n{text}")
        if shown:
            rendered["artifacts"] = shown
    if history_length != 0:
        latest = state.history if history_length is None else state.history[-history_length:]
        rendered["history"] = [m for sent in latest if (m := message(sent, ref))]
    return rendered


def task_event(state: TaskState, history_length: int | None = None) -> tuple[bytes, JsonObject]:
    """Return the current task as an event of a stream, after the cursor of that event."""
    return cursor(state.seq, state), {"task": task(state, history_length, streamed=True)}


def status_event(state: TaskState) -> JsonObject:
    """Return the current status of a task in the form of the stream event that announced it."""
    status, ref = state.status, state.ref
    shared = _shared(status)
    shared["stream"] = _hints(ref, "status", None, None)
    return {
        "statusUpdate": {
            "taskId": ref.id,
            "contextId": ref.context_id,
            "status": _status(status, ref),
            "metadata": compact(shared=shared, opencode=_outcome(status, ref) or None),
        }
    }


def push_config(task_id: str, row: HookRow) -> JsonObject:
    """Return a push notification configuration without its secrets, which are never returned."""
    authentication: JsonObject | None = {"scheme": row.scheme} if row.scheme else None
    return {
        "taskId": task_id,
        "id": row.config_id,
        "url": row.url,
        **compact(authentication=authentication),
    }


def message(sent: Message, ref: TaskRef) -> JsonObject | None:
    """Return a message of a task; None if the caller accepts none of its parts."""
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


def part(sent: Part) -> JsonObject:
    content: JsonObject = {"text": sent.text, "raw": sent.raw, "url": sent.url, "data": sent.data}
    named = compact(mediaType=sent.media_type, filename=sent.filename, metadata=sent.metadata)
    return {sent.kind: content[sent.kind], **named}


def update(entry: Entry, ref: TaskRef) -> JsonObject | None:
    """Return an entry as an event of a stream; None if clients are not shown it."""
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
        case Accepted() | Added() | Answered() | UsageCounted() | Unknown():
            return None  # see TaskRef.visible
        case _:
            return entry.status and _status_update(event, seq, entry.status, ref)


def growth(
    ref: TaskRef, channel: Channel, message_id: str, text: str, seq: int | str, *, opens: bool
) -> JsonObject:
    """Return new text of a channel as an event of a stream."""
    hints = _hints(ref, "stream", message_id, channel, seq)
    artifact = _channel(ref, channel, text, hints)
    return {"artifactUpdate": _chunk(ref, artifact, append=not opens, last=False)}


def cursor(seq: int, state: TaskState) -> bytes:
    """Return the cursor of the entry with this number."""
    if not state.epochs:
        return b"%d" % seq
    return str(Cursor(seq, bisect_right(state.epochs, seq))).encode()


def interrupt(event: Interrupted, scopes: Sequence[Scope] = ("task", "context")) -> JsonObject:
    """Return a pending request as ``metadata.shared.interrupt`` shows it.

    ``scopes`` are those for which whoever asked for the work may give a permission.
    """
    tool = compact(call_id=event.call_id, name=event.tool, input=event.tool_input) or None
    origin: JsonObject | None = None
    if event.origin is not None:
        origin = {"type": "sub-agent", "title": event.origin}
    if event.type == "permission":
        details = compact(
            replies=["once", *(["always"] if event.allows_always else []), "reject"],
            # A wider grant is offered only if OpenCode says what else it could allow.
            scopes=[*scopes] if scopes and can_be_wider(event) else None,
            scope_text=wider_grant(event)[0] if scopes and can_be_wider(event) else None,
            origin=origin,
            permission=event.permission,
            patterns=[*event.patterns],
            always=[*event.always],
            metadata=event.metadata,
            tool=tool,
            tells_reason=None if event.tells_reason else False,
            links={**event.links} or None,
            links_unknown=event.links_unknown or None,
            changes=[compact(**asdict(change)) for change in event.changes] or None,
        )
    elif event.type == "plan":
        details = compact(replies=["go"])
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
        details = compact(origin=origin, questions=questions, tool=tool)
    return compact(
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
    """Return the first pending request, with the numbers of all pending ones.

    As in the text, identical requests count as one, which has the number of the latest.
    """
    shown = groups(status.pending)
    if not shown:
        return None
    numbers: list[Json] = [number for group in shown if (number := group[-1].number) is not None]
    return {**interrupt(shown[0][-1]), "waiting": numbers}


def compact(**values: Json) -> JsonObject:
    """Return an object of these values without those that are None."""
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


def _status_update(event: StatusEvent, number: int, status: Status, ref: TaskRef) -> JsonObject:
    shared = compact(
        session=status.session_id and compact(id=status.session_id, title=status.title)
    )
    opencode = compact(output_negotiation=_negotiation(ref))
    source, message_id, seq = "status", None, number
    match event:
        case Progressed():
            source, shared["progress"] = "progress", compact(**asdict(event))
        case Recovered():
            recovered = Progressed("recovered", "resumed", reason=event.reason)
            source, shared["progress"] = "progress", compact(**asdict(recovered))
        case Interrupted():
            waiting = (_waiting(status) or {}) | interrupt(event)
            source, shared["interrupt"] = "interrupt", waiting
        case Resumed():
            answered = compact(
                request_id=event.request_id,
                type=event.type,
                phase="resolved",
                resolution=event.resolution,
                by=event.by,
                reason=event.reason,
                scope=event.scope,
            )
            source, shared["interrupt"] = "interrupt", answered
        case Finished():
            # The last status has no number, so that it is the same whenever it is read.
            message_id, seq = event.message_id, None
            shared |= compact(usage=status.usage and _usage(status.usage))
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
            "metadata": compact(shared=shared, opencode=opencode or None),
        }
    }


def _hints(
    ref: TaskRef,
    source: str,
    message_id: str | None,
    block_type: str | None,
    seq: int | str | None = None,
) -> JsonObject:
    """Return the metadata about the origin of a chunk or status."""
    if block_type == Channel.PLAN:  # a plan is text; the artifact's name says that it is a plan
        block_type = Channel.TEXT
    hints = compact(block_type=block_type, source=source)
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
    if (notice := _notice(status)) is not None:
        rendered["message"] = _agent_message(ref, *notice)
    return rendered


def _agent_message(ref: TaskRef, name: str, text: str) -> JsonObject | None:
    return message(Message(f"{ref.id}:{name}", "agent", [Part("text", text=text)]), ref)


def _notice(status: Status) -> tuple[str, str] | None:
    """Return what the agent asks or waits for, or why it did not finish: a name and a text."""
    if status.pending:
        requests = "+".join(asked.request_id for asked in status.pending)
        return f"prompt:{requests}", interrupt_text(status.pending)
    if status.failure is not None:
        return f"{status.state.value}:{status.at}", status.failure.message
    if status.state is State.CANCELED:
        return f"{status.state.value}:{status.at}", CANCELED
    if (queued := status.queued) is not None:
        text = f"{'. '.join(filter(None, (queued.title, queued.reason)))}."
        return f"queue:{queued.status}:{queued.part_id}", text
    return None


def _shared(status: Status) -> JsonObject:
    """Return ``metadata.shared`` of a task or of its current status."""
    return compact(
        session=status.session_id and compact(id=status.session_id, title=status.title),
        usage=status.usage and _usage(status.usage),
        interrupt=_waiting(status),
    )


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
    return tokens(counted.own) | compact(children=children)


def _outcome(status: Status, ref: TaskRef) -> JsonObject:
    """Return details that A2A has no field for: error, finish reason, structured output."""
    error = status.failure and compact(
        type=status.failure.type, upstream_status=status.failure.upstream_status
    )
    return compact(
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
    # A2A has no field for reasoning. This one is Google's: its kit shows the text as a thought.
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
    """Return an artifact other than running text; None if the caller accepts none of its parts."""
    where, name, description = event.artifact, event.artifact, None
    source, message_id, block_type = "final_snapshot", None, None
    match event:
        case ToolChanged():
            where, name = f"stream:{event.artifact}", event.tool
            source, message_id, block_type = "tool_part_update", event.message_id, "tool_call"
            call = compact(
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
    # See TaskRef.visible. An answer that is data is text for callers that accept no data.
    parts = _parts(content, ref.output_modes, converts=isinstance(event, ResultGiven))
    if not parts:
        return None
    return {
        "artifactId": f"{ref.id}:{where}",
        "name": name,
        "parts": parts,
        **compact(description=description),
        "metadata": {"shared": {"stream": _hints(ref, source, message_id, block_type, seq)}},
    }


def _notice_artifact(ref: TaskRef, text: str) -> JsonObject:
    return {
        "artifactId": f"{ref.id}:notice",
        "name": "notice",
        "description": "What the status message says, for clients that read artifacts alone",
        "parts": _parts([Part("text", text=text)], ref.output_modes),
        "metadata": {"shared": {"stream": _hints(ref, "status", None, None)}},
    }


def _parts(
    parts: list[Part], modes: tuple[str, ...] | None, *, converts: bool = True
) -> list[Json]:
    """Return the parts that the caller accepts, and plain text, which nobody does without.

    With ``converts``, data that the caller does not accept becomes text.
    """
    if modes is None:
        return [part(sent) for sent in parts]
    fitted: list[Json] = []
    for sent in parts:
        match sent.kind:
            case "data":
                media_type = "application/json"
            case "text":
                media_type = sent.media_type or "text/plain"
            case _:
                media_type = sent.media_type or "application/octet-stream"
        if media_type == "text/plain" or accepts(modes, media_type):
            fitted.append(part(sent))
        elif sent.kind == "data" and converts:
            text = orjson.dumps(sent.data, option=orjson.OPT_SORT_KEYS).decode()
            fitted.append(part(Part("text", text=text, metadata=sent.metadata)))
    return fitted
