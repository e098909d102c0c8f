"""Trace one streaming request through the code, from the socket to the prompt in OpenCode.

Prints every function of the package that is called before OpenCode has the prompt, in the order
of the first calls and in three lists:

- the way down: everything until the request has started the turn of its task, and then everything
  that the turn does;
- the response: everything that the request does once it has started the turn (`OpenTask.start`),
  and the functions that hand an entry of the log to its readers;
- the events of OpenCode that arrive meanwhile, and the loop of the turn that waits for them.

A function is listed once, in the first list it belongs to. Calls made by the tests' OpenCode do not
count. `docs/architecture.md` describes the same walk for readers.

    python -m tools.walk            the lists
    python -m tools.walk --count    only the totals
"""

import asyncio
import signal
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import structlog

from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.service import message, serving, settings_for

_ARRIVED = FakeOpenCode._prompt.__code__  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] # where the walk ends
SOURCE = Path(__file__).parent.parent / "src" / "opencode_a2a"
PACKAGE = "opencode_a2a."
DOWN, RESPONSE = "down to the prompt", "the response, beside it"
EVENTS = "events of OpenCode, and the loop that waits for them"
REQUEST, STARTED = "Entrance.__call__", "OpenTask.start"
BRANCHES = {
    "_disconnect": RESPONSE,
    "LogReader.offer": RESPONSE,
    "Feed.run.<locals>.on_chunk": EVENTS,
    "Subscription.batch": EVENTS,
    "Attempt._hear": EVENTS,
    "Attempt._tick": EVENTS,
    "Attempt._decide_or_wait": EVENTS,
}
"""The functions at which a branch begins; every function they call belongs to it."""
SOMETIMES = {
    "Attempt._write": EVENTS,
    "TurnReader.starting": EVENTS,
    "HttpConnection._drain": EVENTS,
}
"""The same, for functions that may be called only after the prompt has arrived."""
TIMERS = {"collect_garbage", "Fleet.notice_lost"}
"""What runs from time to time, and has nothing to do with the request."""


class Walk:
    """A profiler that records each function called while ``on``, and its branch."""

    def __init__(self) -> None:
        self.on = False
        self._started = False
        """Whether the request has started the turn."""
        self.functions: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.on:
            return
        if event == "return" and code.co_qualname == STARTED:
            self._started = True
        if event != "call" or self.functions.get(code) == DOWN:
            return
        if code is _ARRIVED:
            self.on = False
        if Path(code.co_filename).is_relative_to(SOURCE) and not code.co_name.startswith("<"):
            branch = self._branch(frame)
            if branch == DOWN or (branch and code not in self.functions):
                self.functions[code] = branch

    def _branch(self, frame: FrameType) -> str | None:
        """Return the list that a call belongs to; None if a timer or the tests' OpenCode makes
        it."""
        caller: FrameType | None = frame
        while caller is not None:
            name = caller.f_code.co_qualname
            if found := BRANCHES.get(name) or SOMETIMES.get(name):
                return found
            if self._started and name == REQUEST:
                return RESPONSE
            if name in TIMERS or caller.f_code.co_filename == _ARRIVED.co_filename:
                return None
            caller = caller.f_back
        return DOWN


def _exists(name: str) -> bool:
    """Whether a module of the package has a function of that name."""
    for module in [module for key, module in sys.modules.items() if key.startswith(PACKAGE)]:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return True
    return False


def _file(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(SOURCE).as_posix()


async def walk() -> Walk:
    """Send a message twice and trace the second request: the first one fills caches."""
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
    # The service in this process would log to stdout. When `head` closes that, the service's own
    # requests would fail, and wait for one another for ever.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    seen = asyncio.run(walk())
    called = {code.co_qualname for code in seen.functions}
    unknown = {REQUEST, STARTED, *BRANCHES} - called | {
        name for name in SOMETIMES if not _exists(name)
    }
    if unknown:
        sys.exit(f"these functions are not called any more: {', '.join(sorted(unknown))}")
    for branch in (DOWN, RESPONSE, EVENTS):
        codes = [code for code, where in seen.functions.items() if where == branch]
        if "--count" not in sys.argv:
            for code in codes:
                print(f"{_file(code)}:{code.co_firstlineno}  {code.co_qualname}")
        print(f"{branch}: {len(codes)} functions in {len(set(map(_file, codes)))} files\n")
    print(f"{len(seen.functions)} functions in {len(set(map(_file, seen.functions)))} files")


if __name__ == "__main__":
    main()
