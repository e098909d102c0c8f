"""The tools of this service inside OpenCode: offered before a prompt, followed during a turn.

``turn`` asks for both. OpenCode keeps its tool servers by directory and in memory, so they are
looked for before every prompt; one that is missing, or that an earlier run of this service left,
is put there. It never stands in OpenCode's configuration: that is a variable which every tool
inherits, and would give the agent the server's token. What the tools do is the business of
``peers``.
"""

import asyncio
from collections.abc import Iterable

import structlog

from opencode_a2a.errors import UpstreamError
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.events import PartUpdated
from opencode_a2a.opencode.feed import FeedItem
from opencode_a2a.opencode.types import McpServer, ToolPart, ToolRunning
from opencode_a2a.turns.calling import CallingTurn, CallingTurns

log = structlog.get_logger(__name__)

OFFER_SECONDS = 15.0


class Tools:
    def __init__(
        self, opencode: OpenCode, name: str, server: McpServer, origins: CallingTurns
    ) -> None:
        self.origins = origins
        self._opencode = opencode
        self._name = name
        self._server = server
        self._offered: set[Location] = set()

    async def offer(self, at: Location) -> None:
        """See to it that the model has the tools; a turn can do without them."""
        try:
            async with asyncio.timeout(OFFER_SECONDS):
                if not await self._connected(at):
                    statuses = await self._opencode.add_mcp(self._name, self._server, at=at)
                    self._warn(statuses[self._name].error if self._name in statuses else "missing")
            self._offered.add(at)
        except (TimeoutError, UpstreamError) as error:
            self._warn(type(error).__name__)

    async def _connected(self, at: Location) -> bool:
        if at not in self._offered:
            return False
        status = (await self._opencode.mcp_status(at=at)).get(self._name)
        return status is not None and status.status == "connected"

    def _warn(self, error: str | None) -> None:
        if error is not None:
            log.warning("the tools for other agents cannot be offered to OpenCode", error=error)

    def hear(self, origin: CallingTurn, items: Iterable[FeedItem]) -> None:
        """Note which of the tools a turn is calling."""
        prefix = f"{self._name}_"
        for item in items:
            match item:
                case PartUpdated(part=ToolPart() as part) if part.tool.startswith(prefix):
                    if isinstance(part.state, ToolRunning):
                        tool = part.tool.removeprefix(prefix)
                        self.origins.began(origin, part.call_id, tool, part.state.input)
                    else:
                        self.origins.ended(origin, part.call_id)
                case _:
                    pass
