"""An image and its containers, without a daemon: built by buildah, run by util-linux alone.

A container here has the user, the environment, the command and the directory that the image's own
configuration names, a read-only root, no capability, and processes of its own. It shares the
network of the machine.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, Self

PATIENCE = 180
"""Seconds that a container may take to start, to answer or to end."""
RUN = r"""
set -e
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
mount -t tmpfs -o "$HOME_OPTIONS" tmpfs "$ROOT/home/agent"
for pair in $VOLUMES; do mount --bind "${pair#*:}" "$ROOT${pair%%:*}"; done
mount -o remount,bind,ro "$ROOT"
unset ROOT VOLUMES HOME_OPTIONS PWD OLDPWD
"""
"""What a runtime does before the first process of a container starts."""


class Image:
    """An image in the storage of buildah, and its files."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        # The other one copies the whole image for each step, but needs nothing of the system.
        driver = "overlay" if "overlay" in Path("/proc/filesystems").read_text() else "vfs"
        places = f'graphroot = "{storage}/root"\nrunroot = "{storage}/run"\n'
        (storage / "storage.conf").write_text(f'[storage]\ndriver = "{driver}"\n{places}')
        self.variables = {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": f"{storage}/storage.conf",
            "BUILDAH_ISOLATION": "chroot",
        }
        self.config: dict[str, Any] = {}
        self.root = Path()

    def buildah(self, *arguments: str | Path) -> str:
        done = subprocess.run(  # noqa: S603 - our own
            ["buildah", *arguments],  # noqa: S607 - the one on the path
            env=self.variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def build(self, uv: str, base: Path) -> Self:
        """Build by the recipe, on a base that is made of a file system."""
        context = self._storage / "base"
        context.mkdir()
        os.link(base, context / "base.tar")
        (context / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
        self.buildah("build", "--tag", "localhost/base", context)
        shutil.rmtree(context)
        making = [sys.executable, "-m", "tools.image", "--uv", uv, "--builder", "buildah"]
        making += ["--base", "localhost/base", "--tag", "localhost/opencode-a2a"]
        done = subprocess.run(  # noqa: S603 - our own
            making, env=self.variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        described = json.loads(self.buildah("inspect", "--type", "image", "localhost/opencode-a2a"))
        self.config = described["Docker"]["config"]
        self.root = Path(self.buildah("mount", self.buildah("from", "localhost/opencode-a2a")))
        for name in ("hosts", "resolv.conf"):  # a runtime brings its own
            shutil.copyfile(f"/etc/{name}", self.root / "etc" / name)
        return self

    def close(self) -> None:
        self.buildah("rm", "--all")


class Container:
    """A container of an image; ``with`` starts it, and ends what still runs."""

    def __init__(
        self,
        image: Image,
        log: Path,
        volumes: Mapping[str, Path],
        variables: Mapping[str, str],
        command: Sequence[str] = (),
        entrypoint: Sequence[str] = (),
        user: str = "",
    ) -> None:
        config = image.config
        self._image, self._log = image, log
        self._command = [*(entrypoint or config["Entrypoint"]), *(command or config["Cmd"])]
        self._user, _, self._group = (user or config["User"]).partition(":")
        own = dict(one.split("=", 1) for one in config["Env"])
        path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.variables: dict[str, str] = {**path, **own, **variables}
        for name, place in volumes.items():
            assert name in config["Volumes"]
            # As a new volume gets them from the image.
            made = (image.root / name[1:]).stat()
            if place.stat().st_uid == 0:
                os.chown(place, int(self._user), made.st_gid)
                place.chmod(made.st_mode)
        self._volumes = " ".join(f"{name}:{place}" for name, place in volumes.items())
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        root = self._image.root
        begins = ["chroot", str(root), *self._rights(), *self._command]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own
                ["unshare", "--mount", "--pid", "--fork", "--kill-child",  # noqa: S607
                 "sh", "-c", RUN + 'exec "$@"', "sh", *begins],
                env={
                    **self.variables, "ROOT": str(root), "VOLUMES": self._volumes,
                    "HOME_OPTIONS": "mode=0770,gid=0" if self._group == "0" else "mode=0777",
                },
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self.pid, SIGKILL)
        self._process.wait(PATIENCE)

    def _rights(self) -> list[str]:
        directory = self._image.config["WorkingDir"]
        return [
            "env", "--chdir", directory, "setpriv", "--reuid", self._user, "--regid", self._group,
            "--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all",
        ]  # fmt: skip

    @property
    def pid(self) -> int:
        """The first process of the container, as the machine numbers it."""
        assert self._process is not None
        outer = self._process.pid
        children = Path(f"/proc/{outer}/task/{outer}/children")
        while not (found := children.read_text().split()):
            assert self._process.poll() is None, self.printed
            time.sleep(0.01)
        return int(found[0])

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one more command in it, as ``docker exec`` does."""
        enters = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--root"]
        return subprocess.run(  # noqa: S603 - our own
            [*enters, "--", *self._rights(), *command], env={**self.variables, **variables},
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip

    def until_healthy(self) -> None:
        """Run the health check of the image until it passes."""
        kind, *check = self._image.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        ends = time.monotonic() + PATIENCE
        while (done := self.run(*check)).returncode:
            assert self._process is not None
            assert self._process.poll() is None, self.printed
            assert time.monotonic() < ends, done.stdout + done.stderr + self.printed
            time.sleep(0.5)

    def stop(self, signal: Signals) -> int:
        """Send a signal to the first process, as ``docker stop`` does; return its status."""
        assert self._process is not None
        os.kill(self.pid, signal)
        return self._process.wait(PATIENCE)

    def environments(self) -> str:
        """Return what a process in the container can read of the others' environment."""
        # What is run in a container gets its environment as well.
        without = {name: "" for name in self.variables if name != "PATH"}
        return self.run("sh", "-c", "/bin/cat /proc/[0-9]*/environ", **without).stdout
