"""Prepare and build the container image: make image, make image ARCH=arm64.

Everything but the packages of the distribution is prepared here, from the two lock files with their
hashes, and copied by deploy/Containerfile. So any builder can build it, and another architecture
needs emulation for apt-get and little else. Without a builder, say how to build what was prepared.
``make image-test`` builds it on a base that needs no registry, and runs it.
"""

import argparse
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from opencode_a2a import __version__
from tools.sbom import materials

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "3.13"
"""That of the base image."""
BUILDERS = {
    "docker": (),
    # In the format of OCI, which these write by default, an image has no health check.
    "podman": ("--format", "docker"),
    "buildah": ("--format", "docker"),
}
"""Programs that build images, and what each needs to be told."""
LAUNCHER = """\
#!/usr/bin/env -S python3 -P
# The packages are on the path of this program alone: what the agent runs must not import them.
import sys

sys.path.insert(0, "/opt/opencode-a2a")
from opencode_a2a.cli import main

sys.exit(main())
"""


class Architecture(NamedTuple):
    """One kind of processor, by its names in the world of Python, of npm, and of programs."""

    wheels: str
    cpu: str
    opencode: str
    machine: int
    """In the header of a program or library (ELF)."""


ARCHITECTURES = {
    # The baseline build needs no AVX2.
    "amd64": Architecture("x86_64-manylinux_2_28", "x64", "opencode-linux-x64-baseline", 62),
    "arm64": Architecture("aarch64-manylinux_2_28", "arm64", "opencode-linux-arm64", 183),
}
OWN = "arm64" if platform.machine() in ("aarch64", "arm64") else "amd64"


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command of this recipe; exit with its output if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


def prepare_packages(uv: str, into: Path, architecture: Architecture) -> None:
    """Install this program and what is locked for it."""
    locked, wheels = into.with_name("requirements.txt"), into.with_name("wheel")
    run(uv, "export", "--frozen", "--no-dev", "--extra", "all", "--no-emit-project", "--quiet",
        "--output-file", locked)  # fmt: skip
    run(uv, "build", "--wheel", "--quiet", "--out-dir", wheels)
    (wheel,) = wheels.glob("*.whl")
    target = ("--target", into, "--python-version", PYTHON, "--no-deps", "--quiet")
    target += ("--python-platform", architecture.wheels, "--only-binary", ":all:")
    run(uv, "pip", "install", *target, "--require-hashes", "--requirement", locked)
    run(uv, "pip", "install", *target, wheel)


def prepare_opencode(into: Path, architecture: Architecture) -> None:
    """Fetch the one program of OpenCode's package that is for this kind of processor."""
    folder = into.with_name("npm")
    folder.mkdir()
    for name in ("package.json", "package-lock.json", ".npmrc"):
        shutil.copy(ROOT / name, folder)
    run("npm", "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--os=linux",
        f"--cpu={architecture.cpu}", "--libc=glibc", cwd=folder)  # fmt: skip
    program = folder / "node_modules" / architecture.opencode / "bin" / "opencode"
    # npm leaves out an optional package that it cannot have, without an error.
    if not program.is_file():
        sys.exit(f"npm did not bring {architecture.opencode}; look for it in your registry")
    locked = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    if "integrity" not in locked[f"node_modules/{architecture.opencode}"]:
        name = architecture.opencode
        print(f"Not checked: package-lock.json has no hash of {name}.", file=sys.stderr)
    shutil.move(program, into)
    into.chmod(0o755)


def of_other_machines(folder: Path, machine: int) -> list[Path]:
    """Return the programs and libraries that this kind of processor could not run."""
    found: list[Path] = []
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                header = file.read(20)
            if header[:4] == b"\x7fELF" and int.from_bytes(header[18:20], "little") != machine:
                found.append(path)
    return found


def prepare(uv: str, architecture: str) -> Path:
    """Return a directory with all that deploy/Containerfile copies."""
    folder = ROOT / "build" / "image" / architecture
    shutil.rmtree(folder, ignore_errors=True)
    context = folder / "context"
    context.mkdir(parents=True)
    # Files that only their owner could read would be of no use to the container's user.
    os.umask(0o022)
    prepare_packages(uv, folder / "app", ARCHITECTURES[architecture])
    prepare_opencode(folder / "opencode", ARCHITECTURES[architecture])
    for name in ("app", "opencode"):
        (folder / name).rename(context / name)
    launcher = context / "opencode-a2a"
    launcher.write_text(LAUNCHER)
    launcher.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    (context / "sbom.cdx.json").write_text(materials(uv, ARCHITECTURES[architecture].opencode))
    if wrong := of_other_machines(context, ARCHITECTURES[architecture].machine):
        sys.exit(f"These are not for {architecture}: {', '.join(map(str, wrong))}")
    return context


def works(builder: str) -> bool:
    """Tell whether a builder is there, and has all it needs: Docker's client needs a daemon."""
    if not shutil.which(builder):
        return False
    asked = subprocess.run([builder, "info"], capture_output=True, check=False)  # noqa: S603 - one of ours
    return asked.returncode == 0


def build_command(
    builder: str, context: Path, architecture: str, tag: str, base: str | None
) -> list[str]:
    """Return the command that builds the image."""
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"],  # noqa: S607 - the one on the path
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    arguments = ["build", "--file", "deploy/Containerfile", "--platform", f"linux/{architecture}"]
    arguments += ["--build-arg", f"VERSION={__version__}"]
    arguments += ["--build-arg", f"REVISION={revision.stdout.strip() or 'unknown'}"]
    if base:
        arguments += ["--build-arg", f"BASE={base}"]
    return [builder, *arguments, *BUILDERS[builder], "--tag", tag, str(context.relative_to(ROOT))]


def main() -> None:
    """Prepare, and build with the first builder that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=ARCHITECTURES, default=OWN)
    parser.add_argument("--tag", default="opencode-a2a:latest")
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--base", help="the image to build upon, instead of that of the recipe")
    parser.add_argument("--builder", choices=BUILDERS, help="default: the first that works")
    parser.add_argument("--prepare", action="store_true", help="do not build")
    given = parser.parse_args()
    context = prepare(given.uv, given.arch)
    builder = given.builder or next(filter(works, BUILDERS), None)
    command = build_command(builder or "docker", context, given.arch, given.tag, given.base)
    if given.prepare or not builder:
        print(f"Prepared {command[-1]}. Build it with:\n  {' '.join(command)}")
    elif status := subprocess.run(command, cwd=ROOT, check=False).returncode:  # noqa: S603 - our own
        sys.exit(status)


if __name__ == "__main__":
    main()
