"""Follow one streaming request through the code, from the socket to the prompt in OpenCode.

Prints every function of the package that the request enters, in order of the first call, and how
many there are in how many files. `docs/architecture.md` has the walk as a reader would take it.

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


class Walk:
    """The functions that were entered while it was on."""

    def __init__(self) -> None:
        self.on = False
        self.functions: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.on or event != "call" or code in self.functions:
            return
        if code is _ARRIVED:
            self.on = False
        path = Path(code.co_filename)
        if path.is_relative_to(SOURCE) and not code.co_name.startswith("<"):
            self.functions[code] = path.relative_to(SOURCE).as_posix()


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
    files = sorted(set(seen.functions.values()))
    if "--count" not in sys.argv:
        for code, path in seen.functions.items():
            print(f"{path}:{code.co_firstlineno}  {code.co_qualname}")
    print(f"{len(seen.functions)} functions in {len(files)} files")


if __name__ == "__main__":
    main()
