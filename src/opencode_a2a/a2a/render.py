"""Tasks and log entries as the wire has them, in each dialect.

``handler`` renders tasks, streams render entries. The growing text of an answer takes a short
way: a prebuilt frame around the encoded text. Everything else is built from neutral parts,
fitted to the output modes of the task, and spelled by the dialect.
"""

import secrets
from bisect import bisect_right
from functools import lru_cache

import orjson

from opencode_a2a.a2a import metadata
from opencode_a2a.a2a.spelling import fit, spell_message, spell_part, spell_state
from opencode_a2a.a2a.texts import moment, prompt_text
from opencode_a2a.a2a.versions import Dialect
from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    Finished,
    Interrupted,
    Json,
    JsonObject,
    Progressed,
    ReasoningGrew,
    Resumed,
    TextGrew,
    ToolChanged,
    UsageCounted,
)
from opencode_a2a.ids import ContextId, Principal, TaskId
from opencode_a2a.messages import Answered, Message, Part
from opencode_a2a.tasks.state import (
    Accepted,
    Cursor,
    Entry,
    Recovered,
    Status,
    TaskRef,
    TaskState,
)

# Stands for what varies in a prebuilt frame; unguessable, since ids come from callers.
_TEXT, _SEQ = secrets.token_hex(12), secrets.token_hex(12)
_GROWTH = (TextGrew, ReasoningGrew)


def task(
    state: TaskState,
    dialect: Dialect,
    history_length: int | None = None,
    *,
    artifacts: bool = True,
) -> JsonObject:
    """Return a Task as it is now."""
    ref = state.ref
    told: JsonObject = {"kind": "task"} if dialect is Dialect.V03 else {}
    told |= {
        "id": ref.id,
        "contextId": ref.context_id,
        "status": _status(state.status, ref, dialect),
        "metadata": _task_metadata(state),
    }
    if artifacts and (made := _artifacts(state, dialect)):
        told["artifacts"] = made
    if history_length != 0:
        latest = state.history if history_length is None else state.history[-history_length:]
        told["history"] = _history(latest, ref, dialect)
    return told


def entry(told: Entry, ref: TaskRef, dialect: Dialect) -> bytes | None:
    """Return one entry as a stream carries it; None when it says nothing to a reader."""
    event = told.event
    if isinstance(event, _GROWTH):
        return _growth(told.seq, event, ref, dialect)
    update = _update(told, ref, dialect)
    return None if update is None else orjson.dumps(update)


def cursor(seq: int, state: TaskState) -> bytes:
    """Spell the position of a reader that has the entry with this number."""
    if not state.epochs:
        return b"%d" % seq
    return str(Cursor(seq, bisect_right(state.epochs, seq))).encode()


# --- growing text -----------------------------------------------------------------------------


def _growth(seq: int, event: TextGrew | ReasoningGrew, ref: TaskRef, dialect: Dialect) -> bytes:
    thought = isinstance(event, ReasoningGrew)
    head, middle, tail, end = _frame(
        ref.id, ref.context_id, ref.output_modes, thought, event.message_id, event.opens, dialect
    )
    number = b"%d" % seq
    return b"".join((head, orjson.dumps(event.text), middle, number, tail, number, end))


@lru_cache(maxsize=4096)
def _frame(
    task_id: TaskId,
    context_id: ContextId,
    modes: tuple[str, ...] | None,
    thought: bool,
    message_id: str,
    opens: bool,
    dialect: Dialect,
) -> tuple[bytes, bytes, bytes, bytes]:
    """Return what stands around the text and the two places of the sequence number."""
    channel = Channel.REASONING if thought else Channel.TEXT
    ref = TaskRef(task_id, context_id, Principal(""), modes)
    stream = _stream(ref, "stream", message_id, block_type=channel.value)
    stream |= {"event_id": f"{_event_id(ref)}{_SEQ}", "sequence": _SEQ}
    artifact = _spell(
        ref, _channel_id(ref, channel), channel.value, [Part("text", text=_TEXT)], dialect
    )
    artifact["metadata"] = {"shared": {"stream": stream}}
    whole = orjson.dumps(_artifact_update(ref, artifact, dialect, append=not opens, last=False))
    head, rest = whole.split(b'"%s"' % _TEXT.encode())
    middle, tail, end = rest.split(_SEQ.encode())
    return head, middle, tail.removesuffix(b'"'), end.removeprefix(b'"')


# --- entries ----------------------------------------------------------------------------------


def _update(told: Entry, ref: TaskRef, dialect: Dialect) -> JsonObject | None:
    event = told.event
    match event:
        case ChannelReplaced() | ChannelClosed():
            return _channel_update(told.seq, event, ref, dialect)
        case ToolChanged():
            return _tool_update(told.seq, event, ref, dialect)
        case DiffChanged():
            return _diff_update(told.seq, event, ref, dialect)
        case Accepted() | Answered() | UsageCounted():
            return None
        case _:
            return told.status and _status_update(told, told.status, ref, dialect)


def _channel_update(
    seq: int, event: ChannelReplaced | ChannelClosed, ref: TaskRef, dialect: Dialect
) -> JsonObject | None:
    closes = isinstance(event, ChannelClosed)
    text = "" if closes else "".join(text for _, text in event.parts)
    stream = _stream(
        ref,
        "stream" if closes else "final_snapshot",
        event.message_id,
        block_type=event.channel.value,
        seq=seq,
    )
    name = _channel_id(ref, event.channel)
    artifact = _spell(ref, name, event.channel.value, [Part("text", text=text)], dialect)
    artifact["metadata"] = {"shared": {"stream": stream}}
    return _artifact_update(ref, artifact, dialect, append=closes, last=closes)


def _tool_update(seq: int, event: ToolChanged, ref: TaskRef, dialect: Dialect) -> JsonObject | None:
    artifact = _tool_artifact(event, ref, dialect, seq)
    done = event.status in ("completed", "error")
    return artifact and _artifact_update(ref, artifact, dialect, append=False, last=done)


def _diff_update(seq: int, event: DiffChanged, ref: TaskRef, dialect: Dialect) -> JsonObject | None:
    artifact = _diff_artifact(event, ref, dialect, seq)
    return artifact and _artifact_update(ref, artifact, dialect, append=False, last=True)


def _artifact_update(
    ref: TaskRef, artifact: JsonObject, dialect: Dialect, *, append: bool, last: bool
) -> JsonObject:
    update: JsonObject = {
        "taskId": ref.id,
        "contextId": ref.context_id,
        "artifact": artifact,
        "append": append,
        "lastChunk": last,
    }
    if (negotiated := metadata.negotiation(ref)) is not None:
        update["metadata"] = {"opencode": {"output_negotiation": negotiated}}
    if dialect is Dialect.V03:
        return {"kind": "artifact-update"} | update
    return {"artifactUpdate": update}


def _status_update(told: Entry, status: Status, ref: TaskRef, dialect: Dialect) -> JsonObject:
    update: JsonObject = {
        "taskId": ref.id,
        "contextId": ref.context_id,
        "status": _status(status, ref, dialect),
        "metadata": _status_metadata(told, status, ref),
    }
    if dialect is Dialect.V1:
        return {"statusUpdate": update}
    update["final"] = told.stops
    if dialect is Dialect.V03:
        return {"kind": "status-update"} | update
    return {"statusUpdate": update}


def _status_metadata(told: Entry, status: Status, ref: TaskRef) -> JsonObject:
    event = told.event
    shared = metadata.known(session=metadata.session(status))
    opencode = metadata.known(output_negotiation=metadata.negotiation(ref))
    source, message_id, seq = "status", None, told.seq
    match event:
        case Progressed():
            source, shared["progress"] = "progress", metadata.progress(event)
        case Recovered():
            recovered = Progressed("recovered", "resumed", reason=event.reason)
            source, shared["progress"] = "progress", metadata.progress(recovered)
        case Interrupted():
            source, shared["interrupt"] = "interrupt", metadata.asked(event)
        case Resumed():
            source, shared["interrupt"] = "interrupt", metadata.resolved(event)
        case Finished():
            message_id, seq = event.message_id, None
            shared |= metadata.known(usage=metadata.usage(status.usage))
            opencode = metadata.outcome(status, ref)
        case _:
            pass
    shared["stream"] = _stream(ref, source, message_id, seq=seq)
    return metadata.grouped(shared, opencode)


# --- the parts of a task ----------------------------------------------------------------------


def _status(status: Status, ref: TaskRef, dialect: Dialect) -> JsonObject:
    told: JsonObject = {
        "state": spell_state(status.state, dialect),
        "timestamp": moment(status.at),
    }
    if (said := _status_message(status, ref)) is not None:
        told["message"] = spell_message(said, ref, dialect)
    return told


def _status_message(status: Status, ref: TaskRef) -> Message | None:
    """Return what the agent says to its state: what it asks, or why it did not complete."""
    if status.pending:
        requests = "+".join(asked.request_id for asked in status.pending)
        name, text = f"prompt:{requests}", prompt_text(status.pending)
    elif status.failure is not None:
        name, text = f"{status.state.value}:{status.at}", status.failure.message
    else:
        return None
    return Message(f"{ref.id}:{name}", "agent", [Part("text", text=text)])


def _task_metadata(state: TaskState) -> JsonObject:
    status = state.status
    shared = metadata.known(
        session=metadata.session(status),
        usage=metadata.usage(status.usage),
        interrupt=metadata.asked(status.pending[0]) if status.pending else None,
    )
    return metadata.grouped(shared, metadata.outcome(status, state.ref))


def _history(messages: list[Message], ref: TaskRef, dialect: Dialect) -> list[Json]:
    spelled = [spell_message(message, ref, dialect) for message in messages]
    return [message for message in spelled if message is not None]


def _artifacts(state: TaskState, dialect: Dialect) -> list[Json]:
    made = [_artifact(state, name, dialect) for name in state.artifacts]
    return [artifact for artifact in made if artifact is not None]


def _artifact(state: TaskState, name: str, dialect: Dialect) -> JsonObject | None:
    ref = state.ref
    if name.startswith("tool:"):
        return _tool_artifact(state.tools[name.removeprefix("tool:")], ref, dialect)
    if name == "diff":
        return state.diff and _diff_artifact(state.diff, ref, dialect)
    channel = Channel(name)
    text = state.channels[channel]
    artifact = _spell(ref, _channel_id(ref, channel), name, [Part("text", text=text.text)], dialect)
    stream = _stream(ref, "stream", text.message_id, block_type=channel.value)
    artifact["metadata"] = {"shared": {"stream": stream}}
    return artifact


def _tool_artifact(
    event: ToolChanged, ref: TaskRef, dialect: Dialect, seq: int | None = None
) -> JsonObject | None:
    call = metadata.known(
        call_id=event.call_id,
        tool=event.tool,
        status=event.status,
        title=event.title,
        input=event.input,
        output=event.output,
        error=event.error,
        metadata=event.metadata,
    )
    name = f"{ref.id}:stream:tool:{event.part_id}"
    parts = [Part("data", data=call, media_type="application/json")]
    artifact = _spell(ref, name, event.tool, parts, dialect)
    stream = _stream(ref, "tool_part_update", event.message_id, block_type="tool_call", seq=seq)
    artifact["metadata"] = {"shared": {"stream": stream}}
    return artifact if artifact["parts"] else None


def _diff_artifact(
    event: DiffChanged, ref: TaskRef, dialect: Dialect, seq: int | None = None
) -> JsonObject | None:
    files: list[Json] = [
        {
            "file": change.file,
            "status": change.status,
            "additions": change.additions,
            "deletions": change.deletions,
        }
        for change in event.files
    ]
    parts = [
        Part("text", text=event.patch, media_type="text/x-diff", filename="changes.diff"),
        Part(
            "data",
            data={"files": files, "truncated": event.truncated},
            media_type="application/json",
        ),
    ]
    artifact = _spell(ref, f"{ref.id}:diff", "diff", parts, dialect)
    artifact["description"] = "Files that this turn changed"
    artifact["metadata"] = {"shared": {"stream": _stream(ref, "final_snapshot", None, seq=seq)}}
    return artifact if artifact["parts"] else None


def _spell(
    ref: TaskRef, artifact_id: str, name: str, parts: list[Part], dialect: Dialect
) -> JsonObject:
    fitted: list[Json] = [spell_part(part, dialect) for part in fit(parts, ref.output_modes)]
    return {"artifactId": artifact_id, "name": name, "parts": fitted}


def _stream(
    ref: TaskRef,
    source: str,
    message_id: str | None,
    *,
    block_type: str | None = None,
    seq: int | None = None,
) -> JsonObject:
    """Return hints about where a chunk or status came from; the last status has no number."""
    hints = metadata.known(block_type=block_type, source=source)
    hints["message_id"] = message_id or f"{ref.id}:{ref.context_id}:assistant"
    if seq is not None:
        hints |= {"event_id": f"{_event_id(ref)}{seq}", "sequence": seq}
    elif source == "status":
        hints["event_id"] = f"{_event_id(ref)}status"
    return hints


def _event_id(ref: TaskRef) -> str:
    return f"{ref.id}:{ref.context_id}:{ref.id}:stream:"


def _channel_id(ref: TaskRef, channel: Channel) -> str:
    return f"{ref.id}:stream:{channel.value}"
