"""Every setting has a reason, and an effect.

The reason: a founding document has it, a page tells of it, or a test sets it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from opencode_a2a.config import VARIABLES

ROOT = Path(__file__).parents[2]
FOUNDING = frozenset(
    f"{prefix}_{name}"
    for prefix, names in {
        "OPENCODE": "BASE_URL MANAGED_SERVER MANAGED_SERVER_HOST MANAGED_SERVER_PORT COMMAND"
        " STARTUP_TIMEOUT WORKSPACE_ROOT PROVIDER_ID MODEL_ID TIMEOUT TIMEOUT_STREAM",
        "A2A": "BEARER_TOKEN HOST PORT PUBLIC_URL PROTOCOL_VERSION SUPPORTED_PROTOCOL_VERSIONS"
        " MAX_REQUEST_BODY_BYTES ALLOW_DIRECTORY_OVERRIDE ENABLE_SESSION_SHELL"
        " ENABLE_WORKSPACE_MUTATIONS TASK_STORE_BACKEND TASK_STORE_DATABASE_URL"
        " INTERRUPT_REQUEST_TTL_SECONDS NETWORK_ACCESS NETWORK_ALLOWED_DOMAINS APPROVAL_POLICY"
        " APPROVAL_ESCALATION_BEHAVIOR WRITE_ACCESS_SCOPE WRITE_ACCESS_OUTSIDE_WORKSPACE",
        "A2A_SANDBOX": "MODE FILESYSTEM_SCOPE WRITABLE_ROOTS",
        "A2A_LOG": "LEVEL PAYLOADS BODY_LIMIT",
        "A2A_CLIENT": "TIMEOUT_SECONDS CARD_FETCH_TIMEOUT_SECONDS USE_CLIENT_PREFERENCE"
        " SUPPORTED_TRANSPORTS BEARER_TOKEN BASIC_AUTH POLLING_FALLBACK_ENABLED",
    }.items()
    for name in names.split()
)
"""Variables of the documents that this project was founded on, which keep name and meaning."""
REFERENCE = frozenset({"settings.md", "commands.md", "upgrading.md"})
"""Pages that name all settings, or those of the earlier adapter."""


def named_in(files: list[Path]) -> set[str]:
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    return set(re.findall(r"\b(?:A2A|OPENCODE)_[A-Z0-9_]+\b", text))


def test_every_setting_is_founded_or_told_of_or_set_by_a_test() -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in REFERENCE]
    tests = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    used = FOUNDING | named_in([*pages, ROOT / "README.md"]) | named_in(tests)
    used |= named_in([*(ROOT / "deploy").rglob("*")])
    texts = "\n".join(file.read_text() for file in tests)
    # Tests of a part give it the settings of its group; short names of fields say little.
    used |= {
        one.variable
        for one in VARIABLES.values()
        if one.field.count("_") > 1 and f"{one.field}=" in texts
    }

    assert set(VARIABLES) >= FOUNDING
    assert set(VARIABLES) - used == set()


def read_in(node: ast.AST) -> Iterator[str]:
    """Return the attributes that are read, except to find out whether settings conflict."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    if not (isinstance(node, ast.FunctionDef) and node.name == "conflicts"):
        for child in ast.iter_child_nodes(node):
            yield from read_in(child)


def test_every_setting_is_read() -> None:
    files = (ROOT / "src").rglob("*.py")
    # Only names are compared: a field that is called like another attribute counts as read.
    read = {name for file in files for name in read_in(ast.parse(file.read_text()))}

    assert {one.variable for one in VARIABLES.values() if one.field not in read} == set()
