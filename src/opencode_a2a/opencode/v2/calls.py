"""How an OpenCode 2 is called: where a call runs, what it answers, and calls that it lacks."""

import re
from typing import TypeVar

import orjson

from opencode_a2a.errors import (
    NotInOpenCodeError,
    ServiceError,
    SessionNotFoundError,
    UpstreamNotFoundError,
)
from opencode_a2a.events import JsonObject
from opencode_a2a.net.exchange import HttpResponse
from opencode_a2a.opencode.calls import Calls, Query, Refusal, Request
from opencode_a2a.opencode.driver import HERE, Location
from opencode_a2a.opencode.v2.contract import Contract
from opencode_a2a.opencode.v2.types import Data

T = TypeVar("T")


def missing(what: str) -> NotInOpenCodeError:
    return NotInOpenCodeError(f"OpenCode 2 has no {what}")


class Calls2(Calls):
    """Calls of one OpenCode 2, as its contract has them."""

    contract = Contract({})
    """What the server offers; ``opencode.connect`` reads it."""

    def place(self, at: Location) -> dict[str, str]:
        if at.workspace is not None:
            raise missing("workspaces; name a directory")
        return {} if at.directory is None else {"location[directory]": at.directory}

    def not_found(self, path: str, refused: Refusal, detail: str) -> ServiceError:
        named = path.split("/")[3:4] if path.startswith("/api/session/ses_") else []
        if refused.tag == "SessionNotFoundError" and named:
            return SessionNotFoundError(session_id=named[0])
        return UpstreamNotFoundError(upstream_status=404, detail=detail)

    async def send(self, request: Request) -> HttpResponse:
        """Send a request, unless the server has no such call: some answer it with a web page."""
        if not self.contract.serves(request.method.lower(), request.path):
            named = re.sub(r"/[a-z]{2,3}_\w+", "/{}", request.path)
            raise missing(f"{request.method} {named}")
        return await super().send(request)

    async def data(
        self,
        kind: type[T],
        method: str,
        path: str,
        at: Location = HERE,
        *,
        query: Query | None = None,
        body: JsonObject | None = None,
        urgent: bool = False,
    ) -> T:
        """Send a request and return what the response has as ``data``."""
        found = await self.call(Data[kind], method, path, at, query=query, body=body, urgent=urgent)
        return found.data

    async def do(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        at: Location = HERE,
        *,
        endless: bool = False,
        urgent: bool = False,
    ) -> None:
        """Send a request whose response says nothing."""
        encoded = None
        if body is not None:
            encoded = orjson.dumps({key: value for key, value in body.items() if value is not None})
        request = Request(method, path, at, None, encoded, endless, urgent)
        await self.send(request)
