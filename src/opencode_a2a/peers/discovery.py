"""Find an agent's card, and the interface of it to speak to.

Used by ``peers.client``. A URL is a base, to which the well-known path is added, or the card's
own address, to which nothing is.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import SplitResult

from opencode_a2a.peers import wire
from opencode_a2a.peers.errors import ErrorCode, PeerError
from opencode_a2a.peers.exchange import Exchange
from opencode_a2a.peers.network import Egress, EgressError, check
from opencode_a2a.peers.wire import Binding, Card, Interface, Version

_WELL_KNOWN = "/.well-known/agent-card.json"
_WELL_KNOWN_EARLIER = "/.well-known/agent.json"
_CARD_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Preference:
    """Which bindings and line we can and want to speak."""

    bindings: tuple[Binding, ...] = (Binding.JSONRPC, Binding.HTTP_JSON)
    own: bool = False
    """Our order of bindings wins over the peer's."""
    line: Version | None = None


async def find_card(exchange: Exchange, url: str, patience: float) -> Card:
    """Return the card at a base URL or card URL."""
    *guesses, last = card_urls(url, exchange.rules)
    try:
        async with asyncio.timeout(patience):
            for place in guesses:
                try:
                    return await _read_card(exchange, place)
                except PeerError as error:
                    if error.http_status != 404:
                        raise
            return await _read_card(exchange, last)
    except TimeoutError as error:
        raise PeerError(ErrorCode.TIMEOUT, f"no agent card within {patience:g} s") from error


async def _read_card(exchange: Exchange, place: str) -> Card:
    try:
        request = wire.Request("GET", place, None)
        return wire.read_card(await exchange.fetch(request, {}, _CARD_BYTES))
    except PeerError as error:
        if error.http_status == 404:
            message = f"there is no agent card at {place}"
        elif error.code in (ErrorCode.PROTOCOL, ErrorCode.UNEXPECTED):
            message = f"no agent card: {error.message}"
        else:
            raise
        status = error.http_status
        raise PeerError(ErrorCode.INVALID_CARD, message, http_status=status) from error


def card_urls(url: str, rules: Egress) -> list[str]:
    """Return where the card may be, best guess first."""
    parts = _checked(url, rules)
    site = f"{parts.scheme}://{parts.netloc}"
    if "/.well-known/" in parts.path or parts.path.endswith(".json"):
        return [site + parts.path + (f"?{parts.query}" if parts.query else "")]
    base = site + parts.path.rstrip("/")
    found = [base + _WELL_KNOWN, base + _WELL_KNOWN_EARLIER, site + _WELL_KNOWN]
    return list(dict.fromkeys(found))


def choose(card: Card, preference: Preference, rules: Egress) -> Interface:
    """Return the interface to speak to: the peer's order, unless ours is to win."""
    usable = [
        interface
        for interface in card.interfaces
        if interface.binding in preference.bindings and preference.line in (None, interface.line)
    ]
    if preference.own:
        usable.sort(key=lambda interface: preference.bindings.index(interface.binding))
    if not usable:
        raise PeerError(
            ErrorCode.INVALID_CARD,
            "the card offers no interface that is spoken here (JSON-RPC or HTTP+JSON, 1.0 or 0.3)",
        )
    _checked(usable[0].url, rules)
    return usable[0]


def _checked(url: str, rules: Egress) -> SplitResult:
    try:
        return check(url, rules)
    except EgressError as error:
        raise PeerError(ErrorCode.INVALID_INPUT, f"not called: {error}") from error
