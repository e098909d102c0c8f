"""Make the files of a release from a tag: make release-files TAG=v2.0.0.

Writes to dist/ the wheel, the source, the bill of materials, NOTES.md from the section of
CHANGELOG.md, and SHA256SUMS.
Fails if the tag, the version of the program and the newest section of the changelog differ.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from opencode_a2a import __version__
from tools.sbom import materials

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
SOURCE = "https://github.com/Intelligent-Internet/opencode-a2a"


def notes(changelog: str, version: str) -> str:
    """Return the section of a version; raise ValueError if it is not the newest.

    Its links lead to the files of that version: the forge shows the notes outside of them.
    """
    sections = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)[1:]
    newest, text = sections[0], sections[1]
    if newest != version:
        raise ValueError(f"CHANGELOG.md begins with '{newest}', not with '{version}'.")
    return re.sub(r"\]\((?!https?:)", f"]({SOURCE}/blob/v{version}/", text.strip()) + "\n"


def main() -> None:
    """Check, build, and write what belongs to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag")
    parser.add_argument("--uv", default="uv")
    given = parser.parse_args()
    if given.tag != f"v{__version__}":
        sys.exit(f"The tag is {given.tag}, and the version {__version__}.")
    try:
        said = notes((ROOT / "CHANGELOG.md").read_text(), __version__)
    except ValueError as error:
        sys.exit(str(error))
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([given.uv, "build", "--quiet", "--out-dir", DIST], cwd=ROOT, check=True)  # noqa: S603 - our own
    built = sorted([*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")])
    subprocess.run([Path(sys.executable).parent / "check-wheel-contents", built[0]], check=True)  # noqa: S603 - our own
    bill = DIST / f"opencode_a2a-{__version__}.cdx.json"
    bill.write_text(materials(given.uv))
    built.append(bill)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in built]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    (DIST / "NOTES.md").write_text(said)
    print("".join(sums), end="")


if __name__ == "__main__":
    main()
