"""Peers kept open between calls, by URL and credential.

The tool uses the pool, so that a second question to an agent needs neither a card nor a handshake.
It bounds the number and age of peers, and never closes one in use.
"""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opencode_a2a.config import ClientSettings
from opencode_a2a.peers.answer import PeerError
from opencode_a2a.peers.client import Peer
from opencode_a2a.peers.network import Egress, OriginCredential, trust
from opencode_a2a.peers.proof import Proof


@dataclass(eq=False, slots=True)
class _Entry:
    """A peer that is open, or is being opened."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    peer: Peer | None = None
    expires: float = math.inf
    users: int = 0

    async def close_if_idle(self) -> None:
        if self.users == 0 and self.peer:
            await self.peer.aclose()


class Pool:
    """Peers up to the number in the settings, each until its card is too old.

    A peer that leaves the pool while it is in use is closed after its last use.
    """

    def __init__(self, rules: Egress, settings: ClientSettings) -> None:
        self._rules = rules
        self._settings = settings
        self._tls = trust(settings)
        self._entries: dict[tuple[str, OriginCredential | None, Proof | None], _Entry] = {}
        """In the order of their last use, the oldest first."""

    def __len__(self) -> int:
        return len(self._entries)

    @asynccontextmanager
    async def peer(
        self, url: str, credential: OriginCredential | None = None, proof: Proof | None = None
    ) -> AsyncGenerator[Peer]:
        """Yield the peer at a URL; the first caller opens it, and others wait for that."""
        await self._trim()
        key = (url, credential, proof)
        entry = self._entries[key] = self._entries.pop(key, None) or _Entry()
        entry.users += 1
        try:
            async with entry.opening:
                if entry.peer is None:
                    entry.peer = await Peer.open(
                        url, self._rules, credential, self._settings, self._tls, proof
                    )
                    now = asyncio.get_running_loop().time()
                    entry.expires = now + self._settings.cache_ttl_seconds
            yield entry.peer
        except PeerError as error:
            if error.retryable and self._entries.get(key) is entry:
                del self._entries[key]  # its card may be out of date
            raise
        finally:
            entry.users -= 1
            await self._trim()
            if self._entries.get(key) is not entry:
                await entry.close_if_idle()

    async def aclose(self) -> None:
        dropped, self._entries = self._entries, {}
        for entry in dropped.values():
            await entry.close_if_idle()

    async def _trim(self) -> None:
        """Drop expired entries, those that were never opened, and the oldest if there are too many.

        Only the first are dropped while they are in use.
        """
        now = asyncio.get_running_loop().time()
        excess = len(self._entries) - self._settings.cache_maxsize
        dropped: list[_Entry] = []
        for key, entry in list(self._entries.items()):
            useless = excess > 0 or entry.peer is None
            if entry.expires <= now or (entry.users == 0 and useless):
                excess -= 1
                dropped.append(self._entries.pop(key))
        for entry in dropped:
            await entry.close_if_idle()
