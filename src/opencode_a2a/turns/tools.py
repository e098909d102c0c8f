"""The tools of this service inside OpenCode: offered before a prompt, followed during a turn.

``turn`` asks for both; what the tools do is the business of ``peers``, which asks here which turn a
call comes from.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from opencode_a2a.errors import UpstreamError
from opencode_a2a.events import JsonObject, Progressed
from opencode_a2a.ids import Principal
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.events import PartUpdated
from opencode_a2a.opencode.feed import FeedItem
from opencode_a2a.opencode.types import McpServer, ToolPart, ToolRunning

logger = structlog.get_logger(__name__)

OFFER_SECONDS = 15.0
HEARD_SECONDS = 2.0
"""How long after a call OpenCode's event about it may come."""


@dataclass(eq=False, slots=True)
class CallingTurn:
    """A turn, as far as a tool call has to know it."""

    hops: int
    """How many agents its request went through."""
    tell: Callable[[Progressed], None]
    principal: Principal | None = None
    """Whose it is; None when it is not known which turn calls."""
    running: dict[str, tuple[str, JsonObject]] = field(
        default_factory=dict[str, tuple[str, JsonObject]]
    )
    """Tool and input of the calls that it has begun, by call id."""
    left: dict[str, Callable[[], None]] = field(default_factory=dict[str, Callable[[], None]])
    """How to stop what still works for it elsewhere, by handle."""


class CallingTurns:
    """The turns that run now, for finding the one that a tool call comes from.

    A call names neither session nor turn, so the two are matched by tool and input. Where that is
    ambiguous the turn stays unknown: nobody sees another's progress, and the longest way that a
    request may have come is assumed.
    """

    def __init__(self) -> None:
        self._turns: set[CallingTurn] = set()
        self._change = asyncio.Event()

    def enter(
        self, hops: int, tell: Callable[[Progressed], None], principal: Principal | None = None
    ) -> CallingTurn:
        turn = CallingTurn(hops, tell, principal)
        self._turns.add(turn)
        return turn

    def leave(self, turn: CallingTurn, *, canceled: bool) -> None:
        """Forget a turn; when it was canceled, stop what works for it elsewhere."""
        self._turns.discard(turn)
        if canceled:
            for stop in turn.left.values():
                stop()

    def began(self, turn: CallingTurn, call_id: str, tool: str, given: JsonObject) -> None:
        turn.running[call_id] = (tool, given)
        self._change.set()

    async def find(self, tool: str, given: JsonObject) -> CallingTurn:
        """Return the turn that a call comes from, or a stand-in for it."""
        found = self._matching(tool, given)
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARD_SECONDS):
                while self._turns and not found:
                    self._change.clear()
                    await self._change.wait()
                    found = self._matching(tool, given)
        if len(found) == 1:
            return found[0]
        hops = max((turn.hops for turn in found or self._turns), default=0)
        whose = {turn.principal for turn in found}
        return CallingTurn(hops, lambda _: None, whose.pop() if len(whose) == 1 else None)

    def _matching(self, tool: str, given: JsonObject) -> list[CallingTurn]:
        return [turn for turn in self._turns if (tool, given) in turn.running.values()]


class Tools:
    """The MCP server of this service, as OpenCode is offered it.

    OpenCode keeps its MCP servers by directory and in memory, so ours is looked for before every
    prompt; one that is missing, or that an earlier run of this service left, is put there. It never
    stands in OpenCode's configuration: that is an environment variable which every tool inherits,
    and would give the agent the server's token.
    """

    def __init__(
        self, opencode: OpenCode, name: str, server: McpServer, callers: CallingTurns
    ) -> None:
        self.callers = callers
        self._opencode = opencode
        self._name = name
        self._server = server
        self._offered: set[Location] = set()

    async def offer(self, at: Location) -> None:
        """Make sure that the model has the tools; a turn can do without them."""
        error: str | None = None
        try:
            async with asyncio.timeout(OFFER_SECONDS):
                known = None
                if at in self._offered:
                    known = (await self._opencode.mcp_status(at=at)).get(self._name)
                if known is None or known.status != "connected":
                    statuses = await self._opencode.add_mcp(self._name, self._server, at=at)
                    error = statuses[self._name].error if self._name in statuses else "missing"
            self._offered.add(at)
        except (TimeoutError, UpstreamError) as failed:
            error = type(failed).__name__
        if error is not None:
            logger.warning("the tools for other agents cannot be offered to OpenCode", error=error)

    def hear(self, turn: CallingTurn, items: Iterable[FeedItem]) -> None:
        """Note which of the tools a turn is calling."""
        prefix = f"{self._name}_"
        for item in items:
            match item:
                case PartUpdated(part=ToolPart() as part) if part.tool.startswith(prefix):
                    if isinstance(part.state, ToolRunning):
                        tool = part.tool.removeprefix(prefix)
                        self.callers.began(turn, part.call_id, tool, part.state.input)
                    else:
                        turn.running.pop(part.call_id, None)
                case _:
                    pass
