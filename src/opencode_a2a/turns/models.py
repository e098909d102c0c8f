"""Which model a prompt goes to.

A model that a request names is meant for that request, but OpenCode goes on with it in the same
session; the prompt after it therefore names the model from before. ``turn`` asks for each prompt.
"""

from collections import OrderedDict

from opencode_a2a.ids import ModelRef, SessionId
from opencode_a2a.opencode.client import OpenCode
from opencode_a2a.turns.sessions import KNOWN_SESSIONS, BoundSession


class Models:
    def __init__(self, opencode: OpenCode, default: ModelRef | None) -> None:
        self._opencode = opencode
        self._default = default
        self._before: OrderedDict[SessionId, ModelRef | None] = OrderedDict()
        """The model of each session whose last prompt named another."""

    async def choose(self, seat: BoundSession, named: ModelRef | None) -> ModelRef | None:
        """Return the model to send; None leaves it to OpenCode."""
        if named is None:
            return self._default or self._before.pop(seat.session_id, None)
        if self._default is None and seat.session_id not in self._before:
            self._before[seat.session_id] = await self._current(seat)
            if len(self._before) > KNOWN_SESSIONS:
                self._before.popitem(last=False)
        return named

    async def _current(self, seat: BoundSession) -> ModelRef | None:
        model = (await self._opencode.session(seat.session_id)).model
        return model or ModelRef.parse((await self._opencode.config(at=seat.location)).model)
