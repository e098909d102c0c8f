"""The units of deploy/systemd, run by a systemd: make units-test.

Needs root, systemd and a Python 3.11 in /usr/bin, so no test run collects it by its name. The
systemd is the first process of namespaces of its own (processes, mounts, network, control groups),
on a view of this machine's files that keeps every change to itself. It runs our units and a model.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest

from opencode_a2a_demo.server import opencode_config
from tests.conftest import ROOT
from tests.support.backstage import script

PATIENCE = 180
"""Seconds for a start, an answer, or for systemd to notice something."""
OLD_GROUPS = Path("/sys/fs/cgroup/systemd")
"""Where control groups are if the machine has those of version 1."""
GROUP = (OLD_GROUPS if OLD_GROUPS.is_dir() else OLD_GROUPS.parent) / "opencode-a2a-units"
URL = "http://127.0.0.1:8000"
TOKEN, PASSWORD = "of-this-service-0123456789", "of-this-opencode-0123456789"
MODEL_PORT = 4199
MODEL = f"[Service]\nExecStart=/opt/bin/python -m opencode_a2a_demo --port {MODEL_PORT}\n"
LOOK = """
id -un; touch /usr/x; cat /etc/opencode-a2a/*.env; ls /var/lib/opencode-a2a; env
cat /proc/[0-9]*/environ; echo made > made.txt; git --version
"""
BOOT = r"""
set -e
root=$PLACE/root
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$PLACE"
mkdir "$root" "$PLACE/upper" "$PLACE/work" "$PLACE/units"
mount -t overlay -o "lowerdir=/,upperdir=$PLACE/upper,workdir=$PLACE/work" overlay "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
if [ "$OLD_GROUPS" ]; then
    mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
    mkdir "$root/sys/fs/cgroup/systemd"
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
else
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
fi
for place in run tmp srv etc/systemd/system usr/lib/systemd/system-generators; do
    mount -t tmpfs -o mode=755 tmpfs "$root/$place"
done
# Of the units of the machine there are only targets, which start nothing.
for name in sysinit basic shutdown multi-user network-online; do
    printf '[Unit]\nDefaultDependencies=no\n' > "$PLACE/units/$name.target"
done
mount --bind "$PLACE/units" "$root/usr/lib/systemd/system"
mount --bind "$INSTALLED" "$root/opt"
cp "$INSTALLED"/units/* "$root/etc/systemd/system"
cp -r "$INSTALLED/etc" "$root/etc/opencode-a2a"
for name in opencode-a2a opencode rg; do ln -sf "/opt/bin/$name" "$root/usr/local/bin/$name"; done
for user in opencode-a2a:991 opencode:992; do
    echo "${user%:*}:x:${user#*:}:${user#*:}::/nonexistent:/usr/sbin/nologin" >> "$root/etc/passwd"
    echo "${user%:*}:x:${user#*:}:" >> "$root/etc/group"
done
install --directory --owner 992 "$root/srv/opencode-a2a"
ip link set lo up
exec chroot "$root" env -i container=test /lib/systemd/systemd --system --unit=multi-user.target
"""
ENTER = """
echo $$ > "$GROUP/cgroup.procs"
exec unshare --mount --pid --net --uts --ipc --cgroup --fork --kill-child sh -c "$BOOT"
"""


class Machine:
    """The namespaces in which a systemd runs."""

    def __init__(self, first: int) -> None:
        self._enter = ["nsenter", "--target", str(first), "--all", "--root", "--wd"]

    def run(self, *command: str) -> tuple[int, str]:
        """Run a command there, and return its status and what it printed."""
        variables = {"A2A_CLIENT_BEARER_TOKEN": TOKEN, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        done = subprocess.run(  # noqa: S603 - our own
            [*self._enter, *command], env=variables,
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def systemctl(self, *command: str) -> None:
        status, printed = self.run("systemctl", *command)
        assert status == 0, printed

    def property(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)[1].strip()

    def until_served(self, restarts: int) -> None:
        """Wait until the service says that it is ready, after so many restarts by systemd."""

        def served() -> bool:
            told = [self.property("opencode-a2a", of) for of in ("NRestarts", "StatusText")]
            return told == [str(restarts), f"Serving at {URL}"]

        eventually(served)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.fixture
def installed(tmp_path: Path, opencode_command: str) -> Path:
    """What is installed on the machine: programs, units and their settings."""
    uv, bin_ = os.environ["UV"], tmp_path / "bin"
    for command in (
        ["venv", "--quiet", "--relocatable", "--python", "/usr/bin/python3", str(tmp_path)],
        ["pip", "install", "--quiet", "--python", str(tmp_path), f"{ROOT}[all]"],
    ):
        subprocess.run([uv, *command], check=True)  # noqa: S603 - our own
    shutil.copy(Path(opencode_command).resolve(), bin_ / "opencode")
    shutil.copy(shutil.which("rg") or "", bin_)
    units, settings = tmp_path / "units", tmp_path / "etc"
    shutil.copytree(ROOT / "deploy" / "systemd", units)
    (units / "model.service").write_text(MODEL)
    settings.mkdir()
    config = opencode_config(f"http://127.0.0.1:{MODEL_PORT}/v1")
    config |= {"permission": {"bash": "ask", "external_directory": "allow"}}
    for name, lines in {
        "service.env": {
            "OPENCODE_BASE_URL": "http://127.0.0.1:4096",
            "OPENCODE_AUTH_PASSWORD": PASSWORD,
            "A2A_BEARER_TOKEN": TOKEN,
            "A2A_PUBLIC_URL": URL,
        },
        "opencode.env": {
            "OPENCODE_SERVER_PASSWORD": PASSWORD,
            "OPENCODE_CONFIG_CONTENT": f"'{json.dumps(config)}'",
        },
    }.items():
        (settings / name).write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        (settings / name).chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    return tmp_path


@pytest.fixture
def machine(installed: Path) -> Generator[Machine]:
    GROUP.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        booting = subprocess.Popen(  # noqa: S603 - our own
            ["sh", "-c", ENTER],  # noqa: S607 - the one on the path
            env={
                **os.environ, "PLACE": place, "INSTALLED": str(installed), "GROUP": str(GROUP),
                "BOOT": BOOT, "OLD_GROUPS": "yes" if OLD_GROUPS.is_dir() else "",
            },
        )  # fmt: skip
        children = Path(f"/proc/{booting.pid}/task/{booting.pid}/children")
        eventually(lambda: bool(children.read_text()))
        first = int(children.read_text())
        eventually(lambda: Path(f"/proc/{first}/comm").read_text().strip() == "systemd")
        yield Machine(first)
        os.kill(first, SIGKILL)
        booting.wait()
    for folder in sorted(GROUP.rglob("*/"), reverse=True):
        folder.rmdir()
    GROUP.rmdir()


def test_the_units_serve_and_are_restarted_without_losing_what_waits(machine: Machine) -> None:
    call = ("opencode-a2a", "call", "--json", URL)
    look = script(
        {"tool": "bash", "input": {"command": LOOK, "description": "look"}}, {"say": "done"}
    )
    for unit in ("model", "opencode", "opencode-a2a"):
        machine.systemctl("start", unit)
    machine.until_served(restarts=0)

    # A request waits, and the service is restarted: by a person, after a kill, and by the watchdog.
    waits, asked = machine.run(*call, look)
    machine.systemctl("reload", "opencode-a2a")
    machine.systemctl("restart", "opencode-a2a")
    machine.until_served(restarts=0)
    for number, signal in enumerate((SIGKILL, SIGSTOP), start=1):
        machine.systemctl("kill", "--kill-whom=main", f"--signal={signal.name}", "opencode-a2a")
        machine.until_served(restarts=number)
    task = json.loads(asked.splitlines()[-1])["task_id"]
    answered, said = machine.run(*call[:-1], "--task", task, URL, "yes")
    machine.systemctl("stop", "opencode-a2a", "opencode")

    assert (waits, answered) == (3, 0), asked + said
    assert "opencode\\n" in said
    assert "touch: cannot touch '/usr/x': Read-only file system" in said
    denied = set(re.findall(r"/etc/opencode-a2a/(\w+)\.env: Permission denied", said))
    assert denied == {"opencode", "service"}
    assert "'/var/lib/opencode-a2a': Permission denied" in said
    assert "git version" in said
    assert PASSWORD not in said
    assert TOKEN not in said
    ended = [machine.property(unit, "Result") for unit in ("opencode-a2a", "opencode")]
    assert ended == ["success", "success"]
