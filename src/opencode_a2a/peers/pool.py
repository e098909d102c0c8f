"""Peers kept open between calls, by URL and credential.

The tool asks here, so that a second question to an agent costs neither a card nor a handshake.
Bounded in number and age; a peer in use is never closed under its user. Knows nothing of what
is asked.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opencode_a2a.peers.client import Options, Peer
from opencode_a2a.peers.credential import Credential
from opencode_a2a.peers.errors import PeerError
from opencode_a2a.peers.network import Egress

_Key = tuple[str, Credential | None]


@dataclass(eq=False, slots=True)
class _Entry:
    """A peer, or the place where one is being opened."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    peer: Peer | None = None
    expires: float = 0.0
    users: int = 0
    dropped: bool = False
    """No longer in the pool: the last user closes it."""


class Pool:
    """At most ``limit`` idle peers, each with a card not older than ``ttl`` seconds."""

    def __init__(
        self,
        rules: Egress,
        options: Options | None = None,
        *,
        limit: int = 256,
        ttl: float = 900.0,
    ) -> None:
        self._rules = rules
        self._options = options or Options()
        self._limit = limit
        self._ttl = ttl
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @asynccontextmanager
    async def peer(self, url: str, credential: Credential | None = None) -> AsyncGenerator[Peer]:
        """Lend the peer at a URL; the first to ask opens it, the others wait for that."""
        await self._trim()
        key = (url, credential)
        entry = self._entry(key)
        entry.users += 1
        try:
            yield await self._opened(key, entry)
        except PeerError as error:
            if error.retryable:
                self._forget(key, entry)  # its card may be what no longer fits
            raise
        finally:
            entry.users -= 1
            if entry.peer is None and entry.users == 0:
                self._forget(key, entry)
            await self._trim()
            await _close_unused(entry)

    async def aclose(self) -> None:
        """Close what is idle; what is lent out is closed by its last user."""
        for key, entry in list(self._entries.items()):
            self._forget(key, entry)
            await _close_unused(entry)

    async def _opened(self, key: _Key, entry: _Entry) -> Peer:
        async with entry.opening:
            if entry.peer is None:
                entry.peer = await Peer.open(key[0], self._rules, key[1], self._options)
                entry.expires = asyncio.get_running_loop().time() + self._ttl
            return entry.peer

    def _entry(self, key: _Key) -> _Entry:
        entry = self._entries.get(key)
        if entry and entry.peer and entry.expires <= asyncio.get_running_loop().time():
            # An expired card is read anew; who still uses the old peer keeps it to the end.
            self._forget(key, entry)
            entry = None
        if entry is None:
            entry = self._entries[key] = _Entry()
        self._entries.move_to_end(key)
        return entry

    def _forget(self, key: _Key, entry: _Entry) -> None:
        entry.dropped = True
        if self._entries.get(key) is entry:
            del self._entries[key]

    async def _trim(self) -> None:
        """Close idle peers that are expired or too many, the longest unused first."""
        now = asyncio.get_running_loop().time()
        excess = len(self._entries) - self._limit
        for key, entry in list(self._entries.items()):
            if entry.users == 0 and (excess > 0 or entry.expires <= now):
                excess -= 1
                self._forget(key, entry)
                await _close_unused(entry)


async def _close_unused(entry: _Entry) -> None:
    if entry.dropped and entry.users == 0 and entry.peer:
        peer, entry.peer = entry.peer, None
        await peer.aclose()
