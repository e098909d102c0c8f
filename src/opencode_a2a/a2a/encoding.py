"""The wire form of requests and results, for each version of A2A and each spelling of it.

A binding chooses one ``Encoding`` for a request. ``Encoding.read`` checks the params. The way back
is the same for all: ``render`` makes JSON of 1.0 from a task or an entry of its log, ``v03`` turns
that into 0.3 if the caller speaks it, and the result is encoded. Growing text, which most of a
stream consists of, takes a shortcut: the text is inserted into the bytes of a template.
"""

import secrets
from collections.abc import Callable
from functools import lru_cache, partial

import orjson

from opencode_a2a.a2a import render, types, v03
from opencode_a2a.a2a.types import (
    NoParams,
    PushListParams,
    PushRef,
    PushRequest,
    SendRequest,
    TaskParams,
    Version,
    check,
)
from opencode_a2a.a2a.v03 import Spelling
from opencode_a2a.events import Channel, Grew, Json, JsonObject
from opencode_a2a.ids import ContextId, Principal, TaskId
from opencode_a2a.log.log import ReadableLog
from opencode_a2a.log.state import Entry, Query, TaskRef

ReadParams = dict[type, Callable[[JsonObject], object]]

# Placeholders in a template; they cannot be guessed, because ids in it come from callers.
_TEXT, _SEQ = secrets.token_hex(12), secrets.token_hex(12)


class Encoding:
    """One version of A2A, in one of its spellings."""

    def __init__(
        self, version: Version, read: ReadParams, downgrade: Callable[..., Json] | None = None
    ) -> None:
        self.version = version
        self.read = read
        """Functions that check the params of an operation, by the type that it takes."""
        self._downgrade = downgrade
        self._shared: tuple[Entry, int, list[tuple[bytes, bytes]]] | None = None
        """Cache of the last shared encoding: first entry, number of entries, encoded events."""

    def result(self, result: JsonObject) -> Json:
        """Return the result of an operation in the form of this version."""
        return result if self._downgrade is None else self._downgrade(result)

    def encode(self, result: JsonObject) -> bytes:
        """Encode the result of an operation, or an event that is no entry."""
        return orjson.dumps(self.result(result))

    def events(self, entries: list[Entry], log: ReadableLog) -> list[tuple[bytes, bytes]]:
        """Encode entries of a log as events of a stream; return the cursor and the body of each.

        They are encoded once for all readers that get them at the same time.
        """
        last = self._shared
        if last is not None and last[0] is entries[0] and last[1] == len(entries):
            return last[2]
        events = [
            (render.cursor(entry.seq, log.state), body)
            for entry in entries
            if (body := self.entry(entry, log.state.ref)) is not None
        ]
        self._shared = (entries[0], len(entries), events) if len(log.readers) > 1 else None
        return events

    def entry(self, entry: Entry, ref: TaskRef) -> bytes | None:
        """Encode an entry as an event of a stream; None if clients are not shown it."""
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
        rendered: Json = render.update(entry, ref)
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
    """Return the bytes around the text and around the two occurrences of the entry's number.

    None if the caller is not shown the channel.
    """
    ref = TaskRef(task_id, context_id, Principal(""), modes)
    if not ref.shows_channel(channel):
        return None
    rendered = render.growth(ref, channel, message_id, _TEXT, _SEQ, opens=opens)
    whole = encoding.encode(rendered)
    head, rest = whole.split(b'"%s"' % _TEXT.encode())
    middle, tail, end = rest.split(_SEQ.encode())
    return head, middle, tail.removesuffix(b'"'), end.removeprefix(b'"')


_READ_V1: ReadParams = {
    SendRequest: types.read_send,
    TaskParams: partial(check, TaskParams),
    Query: types.read_list,
    PushRequest: types.read_push,
    PushRef: types.read_push_ref,
    PushListParams: partial(check, PushListParams),
    NoParams: partial(check, NoParams),
}
_READ_V03_REST = _READ_V1 | {
    SendRequest: v03.read_send,
    Query: v03.read_list,
    PushRequest: v03.read_push_proto,
}

V1 = Encoding(Version.V1, _READ_V1)
V03 = Encoding(
    Version.V03,
    _READ_V03_REST
    | {
        PushRequest: v03.read_push,
        PushRef: v03.read_push_ref,
        PushListParams: v03.read_push_list,
    },
    partial(v03.downgrade, spelling=Spelling.JSON, bare=True),
)
"""0.3 over JSON-RPC."""
V03_REST = Encoding(Version.V03, _READ_V03_REST, partial(v03.downgrade, spelling=Spelling.JSON))
"""0.3 over HTTP+JSON, in the JSON of its specification."""
V03_PROTO = Encoding(
    Version.V03,
    _READ_V03_REST | {SendRequest: v03.read_send_proto},
    partial(v03.downgrade, spelling=Spelling.PROTO),
)
"""0.3 over HTTP+JSON, in ProtoJSON."""
