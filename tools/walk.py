"""Follow one streaming request through the code, from the socket to the prompt in OpenCode.

Prints every function of the package that is entered meanwhile, in order of the first call, in
three lists: the way down to the prompt, the response that opens beside it, and the events of
OpenCode that arrive meanwhile, with the loop that waits for them. A function stands
in the first list that it belongs to. What the tests' OpenCode calls by itself does not count.
`docs/architecture.md` has the walk as a reader would take it.

    python -m tools.walk            the list
    python -m tools.walk --count    the figures alone
"""

import asyncio
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.service import message, serving, settings_for

_ARRIVED = FakeOpenCode._prompt.__code__  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] # where the walk ends
SOURCE = Path(__file__).parent.parent / "src" / "opencode_a2a"
DOWN, RESPONSE = "down to the prompt", "the response, beside it"
EVENTS = "events of OpenCode, and the loop that waits for them"
BRANCHES = {
    "snapshot": RESPONSE,
    "event_stream": RESPONSE,
    "EventStream.__call__": RESPONSE,
    "_disconnect": RESPONSE,
    "LogReader.offer": RESPONSE,
    "Feed.run.<locals>.take": EVENTS,
    "Subscription.batch": EVENTS,
    "Attempt._hear": EVENTS,
    "Attempt._tick": EVENTS,
    "Attempt._decide": EVENTS,
}
"""The functions with which a branch begins; what they call belongs to it."""
SOMETIMES = {
    "Attempt._write": EVENTS,
    "Reader.starting": EVENTS,
    "HttpConnection._hand_on": EVENTS,
}
"""The same, for what is entered before the prompt has arrived or a moment later."""


class Walk:
    """The functions that were entered while it was on, and on which branch."""

    def __init__(self) -> None:
        self.on = False
        self.functions: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.on or event != "call" or self.functions.get(code) == DOWN:
            return
        if code is _ARRIVED:
            self.on = False
        if Path(code.co_filename).is_relative_to(SOURCE) and not code.co_name.startswith("<"):
            branch = _branch(frame)
            if branch == DOWN or (branch and code not in self.functions):
                self.functions[code] = branch


def _branch(frame: FrameType) -> str | None:
    """Return the list that a call belongs to; None if it is one of the tests' own."""
    caller: FrameType | None = frame
    while caller is not None:
        name = caller.f_code.co_qualname
        if found := BRANCHES.get(name) or SOMETIMES.get(name):
            return found
        if caller.f_code.co_filename == _ARRIVED.co_filename:
            return None
        caller = caller.f_back
    return DOWN


def _file(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(SOURCE).as_posix()


async def walk() -> Walk:
    """Send a message twice, and follow the second one: the first one fills caches."""
    seen = Walk()
    threading.setprofile(seen)
    sys.setprofile(seen)
    with TemporaryDirectory() as directory:
        state, workspace = Path(directory) / "state", Path(directory) / "workspace"
        state.mkdir()
        workspace.mkdir()
        async with (
            FakeOpenCode(workspace).running() as opencode,
            serving(settings_for(opencode, state)) as service,
        ):
            await Caller(service).send("hello")
            seen.on = True
            await service.http.post(
                "/message:stream", json=message("hello"), headers={"A2A-Version": "1.0"}
            )
    sys.setprofile(None)
    return seen


def main() -> None:
    seen = asyncio.run(walk())
    if unknown := BRANCHES.keys() - {code.co_qualname for code in seen.functions}:
        sys.exit(f"no branch of the walk begins here any more: {', '.join(sorted(unknown))}")
    for branch in (DOWN, RESPONSE, EVENTS):
        codes = [code for code, where in seen.functions.items() if where == branch]
        if "--count" not in sys.argv:
            for code in codes:
                print(f"{_file(code)}:{code.co_firstlineno}  {code.co_qualname}")
        print(f"{branch}: {len(codes)} functions in {len(set(map(_file, codes)))} files\n")
    print(f"{len(seen.functions)} functions in {len(set(map(_file, seen.functions)))} files")


if __name__ == "__main__":
    main()
