"""How each kind of caller writes A2A.

A binding chooses one ``Encoding`` for a request, by the version and the spelling of it. Behind it
there are only the values of ``types`` and objects of 1.0. The growing text of an answer takes a
short way: a prebuilt frame around the encoded text, since that is what most of a stream consists
of.
"""

import secrets
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

import orjson

from opencode_a2a.a2a import render, types, v03
from opencode_a2a.a2a.types import NoParams, SendRequest, TaskParams, Version, check
from opencode_a2a.a2a.v03 import Spelling
from opencode_a2a.events import Channel, JsonObject, ReasoningGrew, TextGrew
from opencode_a2a.ids import ContextId, Principal, TaskId
from opencode_a2a.tasks.state import Entry, Query, TaskRef

P = TypeVar("P")

# Stand for what varies in a prebuilt frame; unguessable, since ids come from callers.
_TEXT, _SEQ = secrets.token_hex(12), secrets.token_hex(12)
_GROWTH = (TextGrew, ReasoningGrew)


_SHARED: dict[type, Callable[[JsonObject], object]] = {
    NoParams: partial(check, NoParams),
    TaskParams: partial(check, TaskParams),
}
"""How params are read that are the same in all versions."""


class Encoding:
    """One version of A2A, in one of its spellings."""

    def __init__(
        self,
        version: Version,
        readers: dict[type, Callable[[JsonObject], object]],
        downgrade: Callable[..., JsonObject] | None = None,
    ) -> None:
        self.version = version
        self._readers = _SHARED | readers
        self._downgrade = downgrade

    def read(self, kind: type[P], params: JsonObject) -> P:
        """Return the params of an operation; raise InvalidParamsError if they are wrong."""
        read = self._readers[kind](params)
        if not isinstance(read, kind):
            raise TypeError(f"{kind.__name__} is read as {type(read).__name__}")
        return read

    def result(self, result: JsonObject) -> JsonObject:
        """Return the result of an operation as the caller reads it."""
        return result if self._downgrade is None else self._downgrade(result)

    def entry(self, entry: Entry, ref: TaskRef) -> bytes | None:
        """Return an entry as an event of a stream; None when it says nothing to a reader."""
        event = entry.event
        if isinstance(event, _GROWTH):
            head, middle, tail, end = _frame(
                self,
                ref.id,
                ref.context_id,
                ref.output_modes,
                type(event),
                event.message_id,
                event.opens,
            )
            number = b"%d" % entry.seq
            return b"".join((head, orjson.dumps(event.text), middle, number, tail, number, end))
        update = render.update(entry, ref)
        if update is None:
            return None
        if self._downgrade is not None:
            update = self._downgrade(update, final=entry.stops)
        return orjson.dumps(update)


@lru_cache(maxsize=4096)
def _frame(
    encoding: Encoding,
    task_id: TaskId,
    context_id: ContextId,
    modes: tuple[str, ...] | None,
    kind: type[TextGrew | ReasoningGrew],
    message_id: str,
    opens: bool,
) -> tuple[bytes, bytes, bytes, bytes]:
    """Return what stands around the text and the two places of the sequence number."""
    ref = TaskRef(task_id, context_id, Principal(""), modes)
    channel = Channel.TEXT if kind is TextGrew else Channel.REASONING
    update = render.growth(ref, channel, message_id, _TEXT, _SEQ, opens=opens)
    whole = orjson.dumps(encoding.result(update))
    head, rest = whole.split(b'"%s"' % _TEXT.encode())
    middle, tail, end = rest.split(_SEQ.encode())
    return head, middle, tail.removesuffix(b'"'), end.removeprefix(b'"')


V1 = Encoding(Version.V1, {SendRequest: types.read_send, Query: types.read_list})
V03 = Encoding(
    Version.V03,
    {SendRequest: v03.read_send, Query: v03.read_list},
    partial(v03.downgrade, spelling=Spelling.JSON, bare=True),
)
"""0.3 over JSON-RPC."""
V03_REST = Encoding(
    Version.V03,
    {SendRequest: v03.read_send, Query: v03.read_list},
    partial(v03.downgrade, spelling=Spelling.JSON),
)
"""0.3 over HTTP+JSON, in the JSON of its specification."""
V03_PROTO = Encoding(
    Version.V03,
    {SendRequest: v03.read_send_proto, Query: v03.read_list},
    partial(v03.downgrade, spelling=Spelling.PROTO),
)
"""0.3 over HTTP+JSON, in ProtoJSON."""
