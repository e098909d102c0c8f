"""A conversation with an agent through somebody else's client, driven by lines of JSON on stdin.

Each client of this folder runs in an environment of its own and imports nothing of the project
but this module.

in:   {"text": "hello", "fresh": true}, where ``fresh`` begins a new conversation
out:  {"shown": "what a person sees"} or {"error": "what was raised"}
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable

Say = Callable[[str], Awaitable[str]]
"""Sends a text and returns what the client shows of the answer."""


async def converse(begin: Callable[[], Awaitable[Say]]) -> None:
    """Answer the lines, one after the other."""
    # Frameworks print what they like; only the lines of the conversation belong on stdout.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**values: object) -> None:
        print(json.dumps(values), file=out, flush=True)

    tell(ready=True)
    say: Say | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        try:
            if say is None or asked.get("fresh"):
                say = await begin()
            tell(shown=await say(asked["text"]))
        except Exception as error:
            tell(error=f"{type(error).__name__}: {error}")
