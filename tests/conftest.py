"""What tests of every kind share."""

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from opencode_a2a.events import JsonObject
from tests.support import stores
from tests.support.answers import Wire
from tests.support.backstage import Backstage, stop_all
from tests.support.service import Running, serving, settings_for

ROOT = Path(__file__).parent.parent
PREVIEW = ROOT / "node_modules/@opencode-ai/cli-linux-x64-baseline/bin/opencode2"
"""The OpenCode 2 that the project pins; it exists for Linux on x64 only, and so are its tests."""
OPENCODE1, OPENCODE2 = "opencode1", "opencode2"

# A shell that runs the tests in the background lets them, and all they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does, and the first ones on whether
# Hypothesis has read the sources for constants before.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker
    if marked("postgresql_only"):
        metafunc.parametrize("database", ["postgresql"], indirect=True, scope="module")
    elif (both := marked("both_databases")) and not marked("sqlite_only"):
        engines = [*stores.ENGINES, *both.args]
        metafunc.parametrize("database", engines, indirect=True, scope="module")
    if "opencode_command" in metafunc.fixturenames:
        # A test without this parameter would need an OpenCode of its own.
        tried = os.environ.get("OPENCODE_UNDER_TEST")
        first = OPENCODE2 if tried and Path(tried).name == PREVIEW.name else OPENCODE1
        drivers = [pytest.param(first, id=pytest.HIDDEN_PARAM)]
        if tried is None:
            if marked("both_drivers"):
                drivers.append(pytest.param(OPENCODE2, id=OPENCODE2))
            elif marked("opencode2_only"):
                drivers = [pytest.param(OPENCODE2, id=OPENCODE2)]
        metafunc.parametrize("driver", drivers, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)  # pytest itself moves tests with the same parameter together
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what this system cannot run, or need not, and put the longest files first.

    At the end, no process then has to wait for another. No layer knows both a binding and a
    database, or a database and OpenCode: on another database than the default, one of these is
    enough.
    """
    items[:] = [item for item in items if not is_one_too_many(item)]
    if sys.platform != "linux":
        items[:] = [item for item in items if item.get_closest_marker("linux_only") is None]
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        items[:] = [item for item in items if not is_on_opencode2(item.nodeid)]
    order = ["deploy", "image", "live", "browser", "chaos", "service", "unit", "tests"]
    files = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}

    def place(item: pytest.Item) -> tuple[int, bool, int]:
        folder = order.index(item.path.parent.name)
        return folder, not is_on_opencode2(item.nodeid), files[item.path]

    items.sort(key=place)


def is_on_opencode2(nodeid: str) -> bool:
    return OPENCODE2 in nodeid.partition("[")[2]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Let one process run all that needs an OpenCode 2, and the others file by file.

    A test that has ended its process, as one that hangs does, has failed: xdist would give it to
    the next process, a dozen times.
    """
    from xdist.scheduler import LoadFileScheduling  # pyright: ignore[reportMissingTypeStubs] # none

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return OPENCODE2 if is_on_opencode2(nodeid) else super()._split_scope(nodeid)

        def remove_node(self, node: Any) -> str | None:
            for tests in self.assigned_work[node].values():
                for test, is_done in tests.items():
                    if not is_done:
                        tests[test] = True
                        super().remove_node(node)
                        return test
            return super().remove_node(node)

    return Scheduling(config, log)


def is_one_too_many(item: pytest.Item) -> bool:
    spec = getattr(item, "callspec", None)
    if spec is None or item.get_closest_marker("both_databases") is None:
        return False
    engine, wire = spec.params.get("database"), spec.params.get("wire")
    one = wire in (None, Wire.RPC) and spec.params.get("driver") != OPENCODE2
    return engine not in (None, stores.DEFAULT) and not one


@pytest.hookimpl(trylast=True)  # when the fixtures of the test are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the shared OpenCodes after the last test of a folder: an idle one uses 5 % of a core."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        stop_all()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the tests that were repeated, as ``make test`` does with those that failed."""
    if config.getoption("lf", default=False):
        ended = [
            (report.nodeid, outcome)
            for outcome in ("passed", "failed", "error")
            for report in terminalreporter.stats.get(outcome, [])
            if report.when == "call" or outcome == "error"
        ]
        terminalreporter.section(f"{len(ended)} repeated")
        for test, outcome in ended:
            terminalreporter.line(f"{outcome} alone: {test}")


@pytest.fixture(scope="session", autouse=True)
def database_server() -> Generator[None]:
    yield
    stores.close()


@pytest.fixture(scope="module", autouse=True)
def database(request: pytest.FixtureRequest, database_server: None) -> Generator[str]:
    """The engine of the databases that ``stores.url`` names."""
    engine: str = getattr(request, "param", stores.DEFAULT)
    with stores.using(engine):
        yield engine


@pytest.fixture(scope="session")
def driver(request: pytest.FixtureRequest) -> str:
    """The generation of OpenCode that a test runs on; mark those that run on both."""
    return request.param


@pytest.fixture(scope="session")
def opencode_command(driver: str) -> str:
    """The OpenCode to try out, else the one that the project pins, else that on the search path."""
    if tried := os.environ.get("OPENCODE_UNDER_TEST"):
        return tried
    if driver == OPENCODE2:
        if not PREVIEW.exists():
            pytest.fail("OpenCode 2 is not installed: run `make test-programs`", pytrace=False)
        return str(PREVIEW)
    local = ROOT / "node_modules" / ".bin" / "opencode"
    found = str(local) if local.exists() else shutil.which("opencode")
    if found is None:
        pytest.fail("OpenCode is not installed: run `make test`, which installs it", pytrace=False)
    return found


ASKING: JsonObject = {
    "permission": {"webfetch": "ask", "external_directory": "ask", "doom_loop": "ask"}
}
UNTRACKED: JsonObject = {"snapshot": False}
"""To look for changed files after every step is half of what a turn costs OpenCode."""


Stages = Callable[[str, JsonObject], Backstage]
"""Makes a real OpenCode with the scripted model, by name and configuration; ``with`` starts it."""


@pytest.fixture(scope="session")
def stages(opencode_command: str, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    def make(name: str, config: JsonObject) -> Backstage:
        workspace = tmp_path_factory.mktemp(name)
        make_repository(workspace)
        state = tmp_path_factory.mktemp(f"{name}-opencode")
        return Backstage(opencode_command, state, workspace, config)

    return make


@pytest.fixture(scope="session")
def backstage(stages: Stages) -> Generator[Backstage]:
    """The OpenCode of most live tests, one for the whole run.

    It does not keep track of changed files; see ``tracking_backstage``.
    """
    with stages("workspace", {**ASKING, **UNTRACKED}) as running:
        yield running


def make_repository(directory: Path) -> None:
    """Make a git repository with one commit: OpenCode keeps track of changes only in one."""
    (directory / "hello.txt").write_text("hello\n")
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "First"]):
        subprocess.run(["git", *command], cwd=directory, check=True)  # noqa: S603, S607


@pytest.fixture
async def service(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Running]:
    """The service in front of the live OpenCode, with a store of its own."""
    async with serving(settings_for(backstage, tmp_path)) as running:
        yield running
