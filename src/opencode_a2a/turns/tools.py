"""The tools of this service inside OpenCode: offered before a prompt, followed during a turn.

``turn`` calls for both. ``peers`` carries the tool calls out, and asks here which turn a call comes
from.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from opencode_a2a.errors import NotInOpenCodeError, UpstreamError
from opencode_a2a.events import JsonObject, Progressed
from opencode_a2a.ids import Principal
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.events import PartUpdated
from opencode_a2a.opencode.feed import FeedItem
from opencode_a2a.opencode.types import McpServer, ToolPart, ToolRunning
from opencode_a2a.telemetry import Trace, current_trace

logger = structlog.get_logger(__name__)

OFFER_SECONDS = 15.0
"""Seconds that OpenCode may take to connect to the tools before a turn continues without them."""
HEARD_SECONDS = 2.0
"""Seconds after a call in which OpenCode's event about it may come."""


@dataclass(eq=False, slots=True)
class CallingTurn:
    """A turn as a tool call sees it."""

    hops: int
    """How many agents its request went through."""
    tell: Callable[[Progressed], None]
    """Reports the progress of a call to the turn."""
    principal: Principal | None = None
    """The owner of the turn; None if it is not known which turn calls."""
    trace: Trace | None = None
    """The trace in which the turn makes its calls."""
    running: dict[str, tuple[str, JsonObject]] = field(
        default_factory=dict[str, tuple[str, JsonObject]]
    )
    """Tool and input of the calls that are running, by call id."""
    left: dict[str, Callable[[], None]] = field(default_factory=dict[str, Callable[[], None]])
    """Functions that cancel tasks of other agents which still work for the turn, by handle."""


class CallingTurns:
    """The turns that run now, to find the one that a tool call comes from.

    A call names neither session nor turn, so it is matched by tool and input. Where that is
    ambiguous the turn stays unknown: nobody sees another's progress, and the call counts as having
    come through as many agents as any of the turns.
    """

    def __init__(self) -> None:
        self._turns: set[CallingTurn] = set()
        self._change = asyncio.Event()

    def enter(
        self, hops: int, tell: Callable[[Progressed], None], principal: Principal | None = None
    ) -> CallingTurn:
        turn = CallingTurn(hops, tell, principal, current_trace.get())
        self._turns.add(turn)
        return turn

    def leave(self, turn: CallingTurn, *, canceled: bool) -> None:
        """Forget a turn; if it was canceled, stop the other agents that work for it."""
        self._turns.discard(turn)
        if canceled:
            for stop in turn.left.values():
                stop()

    def began(self, turn: CallingTurn, call_id: str, tool: str, given: JsonObject) -> None:
        turn.running[call_id] = (tool, given)
        self._change.set()

    async def find(self, tool: str, given: JsonObject) -> CallingTurn:
        """Return the turn that a call comes from, or a stand-in if that is not known."""
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
    """Offers the MCP server of this service to OpenCode.

    OpenCode keeps its MCP servers by directory and in memory, so ours is looked up before every
    prompt, and added if it is missing or was left by an earlier run of this service. It is never
    written to OpenCode's configuration: that is an environment variable which every tool inherits,
    and would give the agent the server's token.
    """

    def __init__(
        self, opencode: Driver, name: str, server: McpServer, calling_turns: CallingTurns
    ) -> None:
        self.calling_turns = calling_turns
        self._opencode = opencode
        self._name = name
        self._server = server
        self._offered: set[Location] = set()

    async def offer(self, at: Location) -> None:
        """Make sure that the model has the tools, or log a warning: a turn can do without them."""
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
        except NotInOpenCodeError as missing:
            error = missing.message
        if error is not None:
            logger.warning("tools for other agents could not be offered to OpenCode", error=error)

    def hear(self, turn: CallingTurn, items: Iterable[FeedItem]) -> None:
        """Note which of the tools a turn is calling."""
        prefix = f"{self._name}_"
        for item in items:
            match item:
                case PartUpdated(part=ToolPart() as part) if part.tool.startswith(prefix):
                    if isinstance(part.state, ToolRunning):
                        tool = part.tool.removeprefix(prefix)
                        self.calling_turns.began(turn, part.call_id, tool, part.state.input)
                    else:
                        turn.running.pop(part.call_id, None)
                case _:
                    pass
