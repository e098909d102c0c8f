"""Entries, statuses and requests as the bytes that are stored.

An event is written as its name and its fields; what is read back is equal to what was written.
"""

from collections.abc import Callable, Iterable
from typing import Any

import orjson

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    Failure,
    FileChange,
    Finished,
    Interrupted,
    Outcome,
    Progressed,
    ReasoningGrew,
    Resumed,
    RunningText,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import ContextId, ModelRef, Principal, TaskId
from opencode_a2a.messages import Answered, Message, PromptPart, Routing
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.tasks.state import (
    Accepted,
    Entry,
    LogEvent,
    Recovered,
    State,
    Status,
    TaskRef,
    TaskState,
)
from opencode_a2a.turns.prompt import TurnRequest

# What comes out of the database was written by this module, so its shape is not checked again.
_Fields = dict[str, Any]


def _usage(fields: _Fields) -> UsageCounted:
    own, children = fields.pop("own"), fields.pop("children")
    return UsageCounted(Usage(**own), Usage(**children) if children else None, **fields)


def _finished(fields: _Fields) -> Finished:
    failure = fields.pop("failure")
    outcome = Outcome(fields.pop("outcome"))
    return Finished(outcome, failure=Failure(**failure) if failure else None, **fields)


def _replaced(fields: _Fields) -> ChannelReplaced:
    parts = [(part_id, text) for part_id, text in fields["parts"]]
    return ChannelReplaced(Channel(fields["channel"]), fields["message_id"], parts)


def _diff(fields: _Fields) -> DiffChanged:
    files = [FileChange(**file) for file in fields.pop("files")]
    return DiffChanged(files, **fields)


_READERS: dict[type[LogEvent], Callable[[_Fields], LogEvent]] = {
    TextGrew: lambda fields: TextGrew(**fields),
    ReasoningGrew: lambda fields: ReasoningGrew(**fields),
    ChannelReplaced: _replaced,
    ChannelClosed: lambda fields: ChannelClosed(Channel(fields["channel"]), fields["message_id"]),
    ToolChanged: lambda fields: ToolChanged(**fields),
    Progressed: lambda fields: Progressed(**fields),
    SessionBound: lambda fields: SessionBound(**fields),
    Started: lambda _: Started(),
    Interrupted: Interrupted.load,
    Resumed: lambda fields: Resumed(**fields),
    UsageCounted: _usage,
    DiffChanged: _diff,
    Finished: _finished,
    Accepted: lambda fields: Accepted(Message.load(fields["message"])),
    Answered: lambda fields: Answered(Message.load(fields["message"])),
    Recovered: lambda fields: Recovered(**fields),
}
_NAMES = {event: event.__name__ for event in _READERS}
_BY_NAME: dict[str, Callable[[_Fields], LogEvent]] = {
    **{event.__name__: reader for event, reader in _READERS.items()},
    # What 2.0.0 called a channel, in the logs that it wrote.
    "LaneReplaced": lambda fields: _replaced({**fields, "channel": fields["lane"]}),
    "LaneClosed": lambda fields: ChannelClosed(Channel(fields["lane"]), fields["message_id"]),
}


def dump_entries(entries: Iterable[Entry]) -> bytes:
    return orjson.dumps([(e.at, _NAMES[type(e.event)], e.event) for e in entries])


def load_entries(data: bytes) -> list[tuple[int, LogEvent]]:
    """Return (time, event) of each entry in a segment."""
    return [(at, _BY_NAME[name](fields)) for at, name, fields in orjson.loads(data)]


def load_status(data: bytes) -> Status:
    """Read a status as ``orjson`` wrote it."""
    fields: _Fields = orjson.loads(data)
    failure, usage = fields.pop("failure"), fields.pop("usage")
    queued = fields.pop("queued", None)  # not in what 2.0.0 wrote
    return Status(
        state=State(fields.pop("state")),
        pending=tuple(Interrupted.load(one) for one in fields.pop("pending")),
        failure=Failure(**failure) if failure else None,
        usage=_usage(usage) if usage else None,
        queued=Progressed(**queued) if queued else None,
        **fields,
    )


def dump_archive(state: TaskState) -> bytes:
    """Encode everything of an ended task that is not in its status."""
    return orjson.dumps(
        {
            "seq": state.seq,
            "epochs": state.epochs,
            "history": state.history,
            "lanes": {
                channel.value: [
                    text.message_id,
                    text.closed,
                    [(part_id, "".join(pieces)) for part_id, pieces in text.parts],
                ]
                for channel, text in state.channels.items()
            },
            "tools": list(state.tools.values()),
            "diff": state.diff,
            "artifacts": list(state.artifacts),
            "settled": list(state.settled.values()),
        }
    )


def load_task(row: TaskRow) -> TaskState:
    """Build a task from its row; without the archive it has a status and nothing else."""
    state = TaskState(ref_of(row))
    state.status = load_status(row.status)
    if row.archive is None:
        return state
    fields: _Fields = orjson.loads(row.archive)
    state.seq = fields["seq"]
    state.epochs = fields["epochs"]
    state.history = [Message.load(message) for message in fields["history"]]
    for name, (message_id, closed, parts) in fields["lanes"].items():
        pieces = [(part_id, [text]) for part_id, text in parts]
        state.channels[Channel(name)] = RunningText(message_id, pieces, closed)
    state.tools = {tool["part_id"]: ToolChanged(**tool) for tool in fields["tools"]}
    state.diff = _diff(fields["diff"]) if fields["diff"] else None
    state.artifacts = dict.fromkeys(fields["artifacts"])
    state.settled = {one["request_id"]: Resumed(**one) for one in fields["settled"]}
    return state


def ref_of(row: TaskRow) -> TaskRef:
    modes = tuple(orjson.loads(row.output_modes)) if row.output_modes is not None else None
    return TaskRef(
        TaskId(row.id), ContextId(row.context_id), Principal(row.principal), modes, row.created_at
    )


def load_request(data: bytes) -> TurnRequest:
    """Read a request as ``orjson`` wrote it; 2.0.0 wrote a session as well, which is not needed."""
    fields: _Fields = orjson.loads(data)
    routing: _Fields = fields["routing"]
    model = routing.pop("model")
    return TurnRequest(
        tuple(PromptPart(**part) for part in fields["prompt"]),
        Routing(model=ModelRef(**model) if model else None, **routing),
        fields["user_message_id"],
    )
