"""The wheel, as somebody without the repository gets it."""

import asyncio
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from email import message_from_string
from pathlib import Path

import pytest

from opencode_a2a.opencode.process import QUALIFIED, marked_processes
from tests.support.ports import free_port

pytestmark = [pytest.mark.live, pytest.mark.linux_only]

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 300
"""Seconds for everything: packages may have to be downloaded first."""


def uv() -> str:
    return os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")


def run(*command: str, status: int = 0, variables: Mapping[str, str] | None = None) -> str:
    """Run a command to its end, and return what it printed."""
    done = subprocess.run(  # noqa: S603 - our own
        command, capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**os.environ, **(variables or {})}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the wheel and the source distribution."""
    place = tmp_path_factory.mktemp("dist")
    run(uv(), "build", "--quiet", "--out-dir", str(place), str(ROOT))
    return place


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_holds_the_program_and_nothing_else(wheel: Path) -> None:
    run(
        sys.executable,
        "-m",
        "check_wheel_contents",
        "--config",
        f"{ROOT}/pyproject.toml",
        str(wheel),
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        said = message_from_string(archive.read(metadata).decode())

    folders = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert {name for name in folders if not name.endswith(".data")} == {
        "opencode_a2a",
        "opencode_a2a_demo",
        "opencode_a2a_import",
    }
    assert [name.partition(".data/")[2] for name in names if ".data/" in name] == [
        "data/share/man/man1/opencode-a2a.1"
    ]
    assert {"opencode_a2a/py.typed", "opencode_a2a/opencode/withhold.js"} <= {*names}
    assert {url.partition(",")[0] for url in said.get_all("Project-URL", [])} == {
        "Changelog", "Documentation", "Issues", "Source",
    }  # fmt: skip
    assert said.get_all("Provides-Extra") == ["all", "postgres", "security"]
    description = str(said.get_payload())
    assert "https://github.com/Intelligent-Internet/opencode-a2a/blob/main/docs/" in description
    assert "](docs/" not in description


def test_the_source_distribution_leaves_out_tests_and_recordings(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]

    assert not [name for name in names if name.startswith(("tests/", "bench/", "node_modules/"))]
    assert {"pyproject.toml", "README.md", "LICENSE", "src/opencode_a2a/__init__.py"} <= {*names}


@pytest.fixture
def installed(wheel: Path, tmp_path: Path, resolution: str) -> Iterator[dict[str, str]]:
    """A user with nothing but the program, on the path; the processes it leaves are ended."""
    place = tmp_path / "environment"
    run(uv(), "venv", "--quiet", "--python", sys.executable, str(place))
    run(
        uv(),
        "pip",
        "install",
        "--quiet",
        "--python",
        str(place),
        "--resolution",
        resolution,
        f"{wheel}[all]",
    )
    home = tmp_path / "home"
    home.mkdir()
    yield {
        "PATH": f"{place}/bin:/usr/bin:/bin",
        "HOME": str(home),
        "XDG_STATE_HOME": f"{home}/state",
    }
    for pid, marker in marked_processes():
        if str(home) in marker:
            os.kill(pid, 9)


@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
async def test_the_wheel_answers_in_an_empty_home(
    installed: dict[str, str], opencode_command: str, tmp_path: Path
) -> None:
    program = shutil.which("opencode-a2a", path=installed["PATH"])
    assert program is not None
    python = str(Path(program).with_name("python"))
    assert "modules imported" in run(python, str(ROOT / "tools" / "lowest.py"), variables=installed)
    missing = run(program, "serve", "--demo", status=2, variables=installed)
    assert f"npm install -g opencode-ai@{QUALIFIED}" in missing
    assert "Traceback" not in missing

    port = free_port()
    variables = {
        **installed,
        "OPENCODE_COMMAND": opencode_command,
        "OPENCODE_STARTUP_TIMEOUT": "120",
    }
    serving = await asyncio.create_subprocess_exec(
        program, "serve", "--demo", "--port", str(port), env=variables, cwd=tmp_path,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert serving.stdout is not None
    printed: list[str] = []
    try:
        async with asyncio.timeout(PATIENCE):
            while "started" not in "".join(printed):
                line = (await serving.stdout.readline()).decode()
                assert line, "".join(printed)
                printed.append(line)
            answer = await asyncio.to_thread(run, program, "call", "hello", variables=installed)
    finally:
        serving.terminate()
        await serving.communicate()

    assert "demo model" in answer.lower()
    assert serving.returncode == 0


def test_the_wheel_is_tried_without_installing_it(wheel: Path) -> None:
    told = run(uv(), "tool", "run", "--quiet", "--from", str(wheel), "opencode-a2a", "version")

    assert told.split() == [wheel.name.split("-")[1]]
