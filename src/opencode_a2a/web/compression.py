"""Compress large answers for readers who can unpack them.

Only answers that are sent in one piece are touched: a stream must reach its reader as it is
written, and a page is not worth holding back.
"""

import asyncio
import zlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opencode_a2a.web.answers import Header, header

_LEVEL = 5
_GZIP = 16 + zlib.MAX_WBITS
_IN_THREAD = 128 * 1024
"""Bytes from which on compressing would hold up everyone else."""


class Compression:
    """Answer with gzip when it is accepted and the answer is at least ``minimum`` bytes."""

    def __init__(self, app: ASGIApp, minimum: int = 8192) -> None:
        self._app = app
        self._minimum = minimum

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _accepts_gzip(header(scope, b"accept-encoding")):
            await self._app(scope, receive, send)
            return
        held: Message | None = None

        async def pack(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and _worth_it(message, self._minimum):
                held = message
                return
            if held is not None:
                start, held = held, None
                if not message.get("more_body", False):
                    message = {**message, "body": await _gzip(message["body"])}
                    start = _packed(start, len(message["body"]))
                await send(start)
            await send(message)

        await self._app(scope, receive, pack)


def _accepts_gzip(accepted: str | None) -> bool:
    if accepted is None or "gzip" not in accepted.lower():
        return False
    offers = (offer.replace(" ", "").partition(";") for offer in accepted.lower().split(","))
    return any(name == "gzip" and not _refused(quality) for name, _, quality in offers)


def _refused(quality: str) -> bool:
    return quality.startswith("q=0") and not quality.strip("q=0.")


def _worth_it(start: Message, minimum: int) -> bool:
    """Tell whether the answer is announced as large and is not packed yet."""
    headers: list[Header] = start["headers"]
    named = dict(headers)
    length = named.get(b"content-length", b"")
    return length.isdigit() and int(length) >= minimum and b"content-encoding" not in named


def _packed(start: Message, length: int) -> Message:
    kept = [(name, value) for name, value in start["headers"] if name != b"content-length"]
    more = [
        (b"content-length", str(length).encode()),
        (b"content-encoding", b"gzip"),
        (b"vary", b"Accept-Encoding"),
    ]
    return {**start, "headers": [*kept, *more]}


async def _gzip(body: bytes) -> bytes:
    if len(body) < _IN_THREAD:
        return _compress(body)
    return await asyncio.to_thread(_compress, body)


def _compress(body: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    return packer.compress(body) + packer.flush()
