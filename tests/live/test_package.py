"""The wheel, as somebody without the repository gets it."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from email import message_from_string
from pathlib import Path

import cyclonedx
import jsonschema_rs
import pytest

from opencode_a2a import __version__
from opencode_a2a.opencode.process import QUALIFIED, marked_processes
from tests.support.ports import free_port
from tools.image import ARCHITECTURES
from tools.sbom import materials

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
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert said.get_all("Provides-Extra") == sorted(declared["optional-dependencies"])
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
def user(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of somebody with an empty home; the processes that are left are ended."""
    home = tmp_path / "home"
    home.mkdir()
    yield {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "XDG_STATE_HOME": f"{home}/state",
        # What is installed goes into the new home; what was downloaded before is used again.
        "UV_CACHE_DIR": run(uv(), "cache", "dir").strip(),
    }
    for pid, marker in marked_processes():
        if str(home) in marker:
            os.kill(pid, 9)


def tried(wheel: Path, user: Mapping[str, str], place: Path) -> list[str]:
    """The command of somebody who installs nothing."""
    return [uv(), "tool", "run", "--quiet", "--python", sys.executable, "--from", str(wheel),
            "opencode-a2a"]  # fmt: skip


def lowest(wheel: Path, user: Mapping[str, str], place: Path) -> list[str]:
    """The command of an installation with the lowest versions of everything, and all extras."""
    run(uv(), "venv", "--quiet", "--python", sys.executable, str(place))
    run(uv(), "pip", "install", "--quiet", "--python", str(place), "--resolution", "lowest-direct",
        f"{wheel}[all]")  # fmt: skip
    python = f"{place}/bin/python"
    assert "modules imported" in run(python, f"{ROOT}/tools/lowest.py", variables=user)
    return [f"{place}/bin/opencode-a2a"]


async def answered(
    user: Mapping[str, str], place: Path, serve: Sequence[str], program: Sequence[str]
) -> None:
    """Start the service as this user, until it has answered a message, and stop it."""
    serving = await asyncio.create_subprocess_exec(
        *serve, env=user, cwd=place, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert serving.stdout is not None
    printed: list[str] = []
    try:
        async with asyncio.timeout(PATIENCE):
            while '"started"' not in "".join(printed):
                line = (await serving.stdout.readline()).decode()
                assert line, "".join(printed)
                printed.append(line)
            answer = await asyncio.to_thread(run, *program, "call", "hello", variables=user)
    finally:
        serving.terminate()
        rest, _ = await serving.communicate()

    assert "demo model" in answer.lower()
    assert '"stopped"' in rest.decode()


@pytest.mark.parametrize("command_of", [tried, lowest])
async def test_the_wheel_answers_in_an_empty_home(
    wheel: Path, user: dict[str, str], opencode_command: str, tmp_path: Path,
    command_of: Callable[[Path, Mapping[str, str], Path], list[str]],
) -> None:  # fmt: skip
    command = command_of(wheel, user, tmp_path / "environment")
    missing = run(*command, "serve", "--demo", status=2, variables=user)
    assert f"npm install -g opencode-ai@{QUALIFIED}" in missing
    assert "Traceback" not in missing

    there = {"OPENCODE_COMMAND": opencode_command, "OPENCODE_STARTUP_TIMEOUT": "120"}
    serve = [*command, "serve", "--demo", "--port", str(free_port())]
    await answered({**os.environ, **user, **there}, tmp_path, serve, command)


async def test_a_clone_answers_where_there_is_only_python_node_and_git(
    user: dict[str, str], tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone))
    # All that is on the machine, without what is installed in this repository.
    path = os.pathsep.join(
        one for one in os.environ["PATH"].split(os.pathsep) if not one.startswith(str(ROOT))
    )
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    variables = {"npm_config_cache": f"{Path.home()}/.npm", **outer, **user, "PATH": path}
    variables["OPENCODE_STARTUP_TIMEOUT"] = "120"
    flags = f"ARGS=--demo --port {free_port()}"

    program = [f"{clone}/.venv/bin/opencode-a2a"]
    await answered(variables, clone, ["make", "serve", flags], program)

    left = run("git", "-C", str(clone), "status", "--short")
    assert left == ""


def test_the_wheel_is_kept_by_pipx_with_its_manual_page(
    wheel: Path, user: dict[str, str], tmp_path: Path
) -> None:
    places = {
        "PIPX_HOME": f"{tmp_path}/pipx",
        "PIPX_BIN_DIR": f"{tmp_path}/bin",
        "PIPX_MAN_DIR": f"{tmp_path}/man",
        "PIPX_DEFAULT_PYTHON": sys.executable,
    }
    run(uv(), "tool", "run", "--quiet", "pipx", "install", str(wheel), variables={**user, **places})

    told = run(f"{tmp_path}/bin/opencode-a2a", "version", variables=user)

    assert told.split() == [__version__]
    assert (tmp_path / "man" / "man1" / "opencode-a2a.1").exists()


def test_the_newest_commit_is_tried_from_the_repository(
    user: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "repository"
    place.mkdir()
    # Made anew: from a checkout without its history nothing can be fetched.
    run("git", "-C", str(ROOT), "archive", f"--output={tmp_path}/files.tar", "HEAD")
    run("tar", "-xf", f"{tmp_path}/files.tar", "-C", str(place))
    git = ("git", "-C", str(place), "-c", "user.name=x", "-c", "user.email=x@example.org")
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "-m", "x")):
        run(*git, *command)

    source = ("--from", f"git+{place.as_uri()}", "opencode-a2a")
    told = run(uv(), "tool", "run", "--quiet", "--python", sys.executable, *source, "version",
               variables=user)  # fmt: skip

    assert told.split() == [__version__]


def test_the_bill_of_materials_fits_its_schema() -> None:
    folder = Path(cyclonedx.__file__).parent / "schema" / "_res"
    base = "http://cyclonedx.org/schema/"
    schemas = {
        base + name: json.loads((folder / name).read_text())
        for name in (f"{one}.SNAPSHOT.schema.json" for one in ("bom-1.5", "spdx", "jsf-0.82"))
    }
    registry = jsonschema_rs.Registry([*schemas.items()])
    accepts = jsonschema_rs.validator_for(next(iter(schemas.values())), registry=registry)
    bill = json.loads(materials(uv(), *(one.opencode for one in ARCHITECTURES.values())))

    accepts.validate(bill)
    bill["components"][0]["verison"] = "1"
    assert not accepts.is_valid(bill)
