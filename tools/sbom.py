"""The bill of materials of what is shipped, in the format CycloneDX: from the two lock files.

``make release-files`` puts it beside the wheel, and ``make image`` into the image.
"""

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

from opencode_a2a import __version__

ROOT = Path(__file__).resolve().parent.parent


def materials(uv: str, *programs: str) -> str:
    """Return the locked Python packages with all extras, and these npm packages with programs."""
    done = subprocess.run(  # noqa: S603 - our own
        [uv, "export", "--frozen", "--no-dev", "--all-extras", "-q", "--format", "cyclonedx1.5"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    listed: dict[str, Any] = json.loads(done.stdout)
    product = listed["metadata"]["component"]
    product |= {"type": "application", "version": __version__}
    product["licenses"] = [{"license": {"id": "Apache-2.0"}}]
    (own,) = (one for one in listed["dependencies"] if one["ref"] == product["bom-ref"])
    locked = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    for name in programs:
        entry = locked[f"node_modules/{name}"]
        reference = f"pkg:npm/{name.replace('@', '%40')}@{entry['version']}"
        component: dict[str, Any] = {
            "type": "application",
            "bom-ref": reference,
            "name": name,
            "purl": reference,
        }
        component["version"] = entry["version"]
        if integrity := entry.get("integrity"):  # none for a program that its writer could not have
            content = base64.b64decode(integrity.removeprefix("sha512-")).hex()
            component |= {"hashes": [{"alg": "SHA-512", "content": content}]}
        listed["components"].append(component)
        listed["dependencies"].append({"ref": reference})
        own["dependsOn"].append(reference)
    return json.dumps(listed, indent=2) + "\n"
