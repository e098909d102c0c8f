"""Which turn a tool call comes from.

``turns`` enters its turns here and says which tool calls it hears of; ``peers.tool`` asks
when OpenCode calls. The call itself names neither session nor turn, so the two are brought
together by what was called with what. Where that is not clear the turn stays unknown: nobody is
told another's progress, and the longest way that a request may have come is assumed.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from opencode_a2a.events import JsonObject, Progressed

_HEARD_SECONDS = 2.0
"""How long after a call OpenCode's event about it may come."""


@dataclass(eq=False, slots=True)
class CallingTurn:
    """A turn, as far as a tool call has to know it."""

    hops: int
    """How many agents its request went through."""
    tell: Callable[[Progressed], None]
    running: dict[str, tuple[str, JsonObject]] = field(
        default_factory=dict[str, tuple[str, JsonObject]]
    )
    """Tool and input of the calls that it has begun, by call id."""
    left: dict[str, Callable[[], None]] = field(default_factory=dict[str, Callable[[], None]])
    """How to stop what still works for it elsewhere, by handle."""


class CallingTurns:
    """The turns that run now."""

    def __init__(self) -> None:
        self._turns: set[CallingTurn] = set()
        self._change = asyncio.Event()

    def enter(self, hops: int, tell: Callable[[Progressed], None]) -> CallingTurn:
        origin = CallingTurn(hops, tell)
        self._turns.add(origin)
        return origin

    def leave(self, origin: CallingTurn, *, canceled: bool) -> None:
        """Forget a turn; a canceled one takes along what works for it elsewhere."""
        self._turns.discard(origin)
        if canceled:
            for stop in origin.left.values():
                stop()

    def began(self, origin: CallingTurn, call_id: str, tool: str, given: JsonObject) -> None:
        origin.running[call_id] = (tool, given)
        self._change.set()

    def ended(self, origin: CallingTurn, call_id: str) -> None:
        origin.running.pop(call_id, None)

    async def find(self, tool: str, given: JsonObject) -> CallingTurn:
        """Return the turn that a call comes from, or a stand-in for it."""
        found = self._matching(tool, given)
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEARD_SECONDS):
                while self._turns and not found:
                    self._change.clear()
                    await self._change.wait()
                    found = self._matching(tool, given)
        if len(found) == 1:
            return found[0]
        hops = max((turn.hops for turn in found or self._turns), default=0)
        return CallingTurn(hops, lambda _: None)

    def _matching(self, tool: str, given: JsonObject) -> list[CallingTurn]:
        return [turn for turn in self._turns if (tool, given) in turn.running.values()]
