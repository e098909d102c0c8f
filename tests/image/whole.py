"""The image: built by its recipe, and run as restricted as deploy/compose.yaml has it.

Needs root, buildah and some minutes, so no test run collects it by its name: ``make image-test``
does. The base is a file system from Debian's packages instead of the recipe's base image.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from signal import SIGTERM
from typing import Any

import httpx2
import pytest

from opencode_a2a import __version__
from opencode_a2a.events import JsonObject
from opencode_a2a_demo.server import DemoModel, opencode_config
from tests.conftest import ROOT, make_repository
from tests.support.backstage import script
from tests.support.container import PATIENCE, Container, Image
from tests.support.ports import free_port
from tests.support.service import TOKEN

BASE = ROOT / ".tools" / "image" / "base.tar"
ASKS = {"permission": {"bash": "ask", "external_directory": "allow"}}
PASSWORD = "of-this-opencode-0123456789"  # noqa: S105 - of this test
LOOK = """
id -u; touch /usr/x; grep CapBnd /proc/self/status; echo made > made.txt; git --version; rg -V
"""


def runs(command: str) -> str:
    """Return a prompt upon which the agent runs a command."""
    return script(
        {"tool": "bash", "input": {"command": command, "description": "look"}}, {"say": "done"}
    )


@pytest.fixture(scope="session")
def image() -> Generator[Image]:
    with tempfile.TemporaryDirectory(dir=BASE.parent) as storage:
        made = Image(Path(storage)).build(os.environ["UV"], BASE)
        yield made
        made.close()


@pytest.fixture
def place() -> Generator[Callable[[str], Path]]:
    """Makes directories for volumes, also for users who may not read those of this test."""
    with tempfile.TemporaryDirectory() as held:
        Path(held).chmod(0o755)

        def make(name: str) -> Path:
            made = Path(held, name)
            made.mkdir(exist_ok=True)
            return made

        yield make


class Agent:
    """The service in a container, as its callers reach it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def _call(self, verb: str, path: str, body: JsonObject | None = None) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}", "A2A-Version": "1.0"}
        with httpx2.Client(timeout=PATIENCE, trust_env=False, headers=headers) as client:
            answer = client.request(verb, self._url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def send(self, text: str, **fields: str) -> JsonObject:
        """Send a message, and return its task when it ends or waits for somebody."""
        message: JsonObject = {"messageId": os.urandom(8).hex(), "role": "ROLE_USER"}
        return self._call(
            "POST", "/message:send", {"message": {**message, **fields, "parts": [{"text": text}]}}
        )["task"]

    def approve(self, task: JsonObject) -> JsonObject:
        """Say yes to everything that a task asks for, and return it when it has ended."""
        number = 0
        while state(task) == "input_required":
            # By its number: a plain answer that follows another at once may be meant for that one.
            number += 1
            task = self.send(f"{number} yes", taskId=str(task["id"]))
        return task


def state(task: JsonObject) -> str:
    match task:
        case {"status": {"state": str(found)}}:
            return found.removeprefix("TASK_STATE_").lower()
        case _:
            raise AssertionError(task)


def test_the_image_says_what_it_is_and_holds_its_bill_of_materials(image: Image) -> None:
    labels = image.config["Labels"]
    bill = (image.root / "usr/share/doc/opencode-a2a/sbom.cdx.json").read_text()
    size = sum(
        path.lstat().st_blocks * 512 for path in image.root.rglob("*") if not path.is_symlink()
    )
    print(f"\nThe files of the image take {size / 1e6:.0f} MB.")

    assert labels["org.opencontainers.image.version"] == __version__
    assert image.config["User"] == "10001:10001"
    assert {*image.config["Volumes"]} == {"/state", "/workspace"}
    assert image.config["Healthcheck"]["Test"] == ["CMD", "opencode-a2a", "ping"]
    assert '"opencode-linux-' in bill
    assert '"pkg:pypi/starlette@' in bill


def test_a_container_answers_acts_and_stops_without_any_right(
    image: Image, place: Callable[[str], Path], tmp_path: Path
) -> None:
    port, volumes = free_port(), {"/state": place("state"), "/workspace": place("workspace")}
    variables = {
        "A2A_PORT": str(port),
        "A2A_DEMO": "true",
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_PUBLIC_URL": f"http://127.0.0.1:{port}",
        "OPENCODE_STARTUP_TIMEOUT": str(PATIENCE),
    }
    look = runs(LOOK)
    with Container(image, tmp_path / "log", volumes, variables) as container:
        container.until_healthy()
        agent = Agent(port)

        card = agent.get("/.well-known/agent-card.json")
        greeted = container.run(
            "opencode-a2a", "call", f"http://127.0.0.1:{port}", "hello",
            A2A_CLIENT_BEARER_TOKEN=TOKEN,
        )  # fmt: skip
        asked = agent.send(look)
        done = agent.approve(asked)
        ended = container.stop(SIGTERM)

    assert card["version"] == __version__
    assert "demo model" in greeted.stdout.lower(), greeted
    assert (state(asked), state(done)) == ("input_required", "completed")
    said = str(done)
    assert "10001" in said
    assert "Read-only file system" in said
    assert "CapBnd:\\t0000000000000000" in said.replace("\\\\t", "\\t")
    assert "git version" in said
    assert "ripgrep" in said
    assert (volumes["/workspace"] / "made.txt").stat().st_uid == 10001
    assert TOKEN not in said
    assert ended == 0, container.printed

    with Container(image, tmp_path / "log", volumes, variables) as container:
        container.until_healthy()
        kept = agent.get(f"/tasks/{done['id']}")

    assert state(kept) == "completed"


async def test_what_waits_outlives_the_container_of_the_service(
    image: Image, place: Callable[[str], Path], tmp_path: Path
) -> None:
    """As in deploy/compose.yaml: two containers, of a user whom the image does not know."""
    user, port, opencode_port = "12345:0", free_port(), free_port()
    workspace = place("workspace")
    make_repository(workspace)
    for path in (workspace, *workspace.rglob("*")):
        os.chown(path, 12345, 0)
    look = runs("env; cat /proc/[0-9]*/environ")
    async with DemoModel() as model:
        with Container(
            image, tmp_path / "opencode.log",
            {"/state": place("opencode"), "/workspace": workspace},
            {
                "OPENCODE_SERVER_PASSWORD": PASSWORD,
                "OPENCODE_CONFIG_CONTENT": json.dumps(opencode_config(model.url) | ASKS),
            },
            ["opencode", "--", "serve", "--hostname", "127.0.0.1", "--port", str(opencode_port)],
            ["opencode-a2a"], user,
        ) as opencode:  # fmt: skip
            volumes = {"/state": place("service"), "/workspace": workspace}
            variables = {
                "A2A_PORT": str(port),
                "A2A_BEARER_TOKEN": TOKEN,
                "OPENCODE_AUTH_PASSWORD": PASSWORD,
                "OPENCODE_BASE_URL": f"http://127.0.0.1:{opencode_port}",
            }
            agent = Agent(port)
            with Container(image, tmp_path / "log", volumes, variables, user=user) as service:
                service.until_healthy()
                asked = await asyncio.to_thread(agent.send, look)
                ended = service.stop(SIGTERM)
            with Container(image, tmp_path / "log", volumes, variables, user=user) as service:
                service.until_healthy()
                kept = agent.get(f"/tasks/{asked['id']}")
                done = await asyncio.to_thread(agent.approve, asked)
            environments = opencode.environments()
            stopped = opencode.stop(SIGTERM)

    assert ended == 0, service.printed
    assert [state(one) for one in (asked, kept, done)] == ["input_required"] * 2 + ["completed"]
    assert "PATH=" in environments
    assert PASSWORD not in environments + str(done)
    assert "A2A_HOST" in str(done)
    assert stopped == 143, opencode.printed
