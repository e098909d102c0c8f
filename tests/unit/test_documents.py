"""The pages that are written by hand: their links lead somewhere, and what they say holds."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import click
import jsonschema_rs
import pytest

from opencode_a2a import __version__
from opencode_a2a.cli import main
from opencode_a2a.config import RETIRED, VARIABLES, Settings, load, settings_schema
from opencode_a2a.events import ProgressType
from opencode_a2a.extensions.metadata import STREAM_HINTS
from opencode_a2a.extensions.registry import NOTHING
from opencode_a2a.opencode.process import QUALIFIED
from tools.site import dead_links

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "opencode_a2a"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
INSTALL = re.compile(
    r"(?:\binstall|\buvx|\bpipx run|\buv tool run)\s+(?:-\S+\s+)*"
    r"[\"']?opencode-a2a(?:-server)?\b(?![/.]|\S* @ )"
)
"""Installing the name from the package index, where it belongs to another program."""


def anchors(page: Path) -> set[str]:
    """Return the anchors that headings of a page get on the web."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    broken = [
        (name, anchor)
        for name, anchor in LINK.findall(page.read_text())
        for target in [page.parent / name if name else page]
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]

    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|js))`", page.read_text())
    roots = (ROOT, ROOT / "src", ROOT / "src" / "opencode_a2a")

    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


FOREIGN_NAMES = {
    "GetTask",
    "SubscribeToTask",
    "KillMode",
    "adk_thought",
    "plan_exit",
    "opencode_a2a_demo",
    "opencode_a2a_import",
}
"""Names in the page about the architecture that are A2A's, systemd's, Google's and OpenCode's."""


def names_in(path: Path) -> tuple[set[str], dict[str, tuple[set[str], set[str]]]]:
    """Return everything that a module names, and for each class the same and its bases."""

    def named(tree: ast.AST) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.ClassDef(name=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
                case _:
                    pass
        return found

    tree = ast.parse(path.read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return named(tree), {
        node.name: (named(node), {base.id for base in node.bases if isinstance(base, ast.Name)})
        for node in classes
    }


def test_what_the_pages_about_the_architecture_name_exists() -> None:
    pages = ("architecture.md", "decisions.md", "extending.md")
    page = "".join((ROOT / "docs" / name).read_text() for name in pages)
    modules = {
        path.relative_to(PACKAGE).as_posix(): names_in(path) for path in PACKAGE.rglob("*.py")
    }
    everything = set[str]().union(*(names for names, _ in modules.values()))
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for _, classes in modules.values():
        for kind, (names, above) in classes.items():  # several modules may have a class of a name
            members.setdefault(kind, set()).update(names)
            bases.setdefault(kind, set()).update(above - {kind})

    def has(kind: str, member: str) -> bool:
        return member in members.get(kind, ()) or any(
            has(base, member) for base in bases.get(kind, ())
        )

    def exists(name: str) -> bool:
        head, _, member = name.partition(".")
        if head in members and member:
            return has(head, member)
        ours = re.match(r"_[a-z]|[A-Z][a-z]+[A-Z]|[a-z]+_[a-z]", name)
        return not ours or name in everything or name in FOREIGN_NAMES

    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`", page))
    placed = set(re.findall(r"`([\w/]+\.py)`, `([A-Za-z_]\w*)[`.]", page))

    assert {name for name in named if not exists(name)} == set()
    assert {(file, name) for file, name in placed if name not in modules[file][0]} == set()


def test_no_page_installs_the_name_from_the_package_index() -> None:
    texts = [*PAGES, ROOT / "Makefile", *(ROOT / "src").rglob("*.py"), *(ROOT / "tools").glob("*")]
    found = [
        (file.name, match.group())
        for file in texts
        if file.is_file() and file.suffix != ".pyc"
        for match in INSTALL.finditer(file.read_text())
    ]

    assert found == []


def test_opencode_is_installed_in_one_version_everywhere() -> None:
    texts = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / "screens").glob("*.txt")]
    found = {
        (file.name, match)
        for file in texts
        for match in re.findall(r"npm install -g opencode-ai\S*", file.read_text())
        if match.rstrip("`,;.):") != f"npm install -g opencode-ai@{QUALIFIED}"
    }

    assert found == {("process.py", 'npm install -g opencode-ai@{QUALIFIED}`"')}


@pytest.mark.parametrize(
    "line",
    [
        "pip install opencode-a2a",
        "uvx opencode-a2a serve",
        "uv tool install opencode-a2a",
        'pip install --upgrade "opencode-a2a==1.4.0"',
        "uvx --from opencode-a2a opencode-a2a-server",
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert INSTALL.search(line)


CODE = re.compile(r"^```\w*\n(.*?)^```|(?<!`)`([^`\n]+)`(?!`)", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?<![\w/.@-])opencode-a2a (?!-)([a-z-]+)((?: [^\n|;&)#]*)?)")


def code(page: Path) -> str:
    """Return everything on a page that is written as code, with continued lines joined."""
    found = (block or span for block, span in CODE.findall(page.read_text()))
    return "\n".join(found).replace("\\\n", " ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_exist_with_their_flags(page: Path) -> None:
    written = code(page)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    context = click.Context(main)
    wrong: list[str] = []
    for name, rest in CALL.findall(written):
        command = main.get_command(context, name)
        known = {flag for one in command.params for flag in one.opts} if command else set[str]()
        given = re.findall(r"(?<= )--[a-z][a-z-]*", rest.partition(" -- ")[0])
        if command is None or not set(given) <= known | {"--help"}:
            wrong.append(f"opencode-a2a {name}{rest}")

    assert wrong == []
    assert (
        set(re.findall(r"(?<![\w-])make ([a-z][a-z0-9-]+)(?= |$)", written, re.MULTILINE))
        <= targets
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_a_page_exports_would_be_accepted(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    number = itertools.count(10**20)
    for block in blocks:
        commands = re.split(r"^\$ ", block, flags=re.MULTILINE)
        exports = [one for one in commands if one.startswith("export ")]
        if not exports:
            continue
        script = re.sub("…", lambda _: str(next(number)), "\n".join(exports))
        script = script.replace("/srv", str(tmp_path))
        shell = ["/bin/sh", "-ec", f"{script}\nenv -0"]
        said = subprocess.run(shell, capture_output=True, text=True, check=True, env={"PWD": "/"})  # noqa: S603 - our pages
        given = dict(line.split("=", 1) for line in said.stdout.split("\0") if "=" in line)
        if "OPENCODE_SERVER_PASSWORD" in given:
            continue  # of an OpenCode, not of the service
        (tmp_path / "app").mkdir(exist_ok=True)

        load({}, {**given, "A2A_STATE_DIR": "/nowhere", "OPENCODE_WORKSPACE_ROOT": str(tmp_path)})


def test_no_page_has_a_copy_of_a_file_to_deploy() -> None:
    deployed = "\n".join(
        file.read_text() for file in (ROOT / "deploy").rglob("*") if file.is_file()
    )
    copied: list[tuple[str, str]] = []
    for page in PAGES:
        for block, _ in CODE.findall(page.read_text()):
            lines = block.splitlines()
            threes = ("\n".join(lines[i : i + 3]) for i in range(len(lines) - 2))
            copied += [(page.name, three) for three in threes if three in deployed]

    assert copied == []
    linked = set(re.findall(r"\]\(\.\./deploy/([\w.]+)", (ROOT / "docs/deployment.md").read_text()))
    assert {path.name for path in (ROOT / "deploy").iterdir()} <= linked


def test_the_guide_has_the_headings_that_earlier_pages_link_to() -> None:
    assert anchors(ROOT / "docs" / "guide.md") >= {
        "compatibility-profile",
        "opencode-session-query--provider-discovery-a2a-extensions",
        "shared-interrupt-callback-a2a-extension",
        "shared-model-selection-contract",
        "shared-session-binding-contract",
        "shared-stream-hints-contract",
        "troubleshooting-provider-auth-state",
    }


def test_the_guide_lists_the_types_of_progress() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    (row,) = [line for line in guide.splitlines() if line.startswith("| `shared.progress`")]
    (listed,) = re.findall(r"`type` \(([^)]+)\)", row)

    assert listed == ", ".join(f"`{name}`" for name in get_args(ProgressType))


def test_the_guide_lists_the_shared_metadata_with_their_fields() -> None:
    declared: Any = STREAM_HINTS.public(Settings(), NOTHING)
    declared |= STREAM_HINTS.extended(Settings(), NOTHING)
    guide = (ROOT / "docs" / "guide.md").read_text()
    rows = dict(re.findall(r"^\| `shared\.(\w+)` \|(.+)$", guide, re.MULTILINE))
    groups = [
        place.removeprefix("metadata.shared.")
        for name, place in declared.items()
        if name.endswith("_metadata_field") and place.startswith("metadata.shared.")
    ]

    assert set(rows) == set(groups)
    for group, row in rows.items():
        about = "".join(one for one in guide.split("\n\n") if f"`metadata.shared.{group}`" in one)
        fields = {field.partition(".")[0] for field in declared[f"{group}_fields"]}
        assert fields - set(re.findall(r"`(\w+)", row + about)) == set(), group


def test_the_upgrade_page_names_errors_with_their_numbers() -> None:
    rows = re.findall(r"^\| (.+?) \| (-3\d+) \| (.+?) \|$", upgrade_page(), re.MULTILINE)
    errors = (ROOT / "docs" / "errors.md").read_text()
    numbers = dict(re.findall(r"^\| (\w+) \| (-\d+) \|", errors, re.MULTILINE))

    assert len(rows) == 14
    for types, _, now in rows:
        name, _, number = now.rpartition(", ")
        for one in [name] if name else types.partition(", for ")[0].split(", "):
            assert number == numbers.get(one, "does not occur"), one


def test_the_upgrade_page_names_settings_that_are_read_or_warned_of() -> None:
    named = set(re.findall(r"`((?:A2A|OPENCODE)_[A-Z_]+)`", upgrade_page()))
    gone = {
        "OPENCODE_DIRECTORY",
        "A2A_STREAM_SSE_PING_SECONDS",
        "A2A_SESSION_CACHE_TTL_SECONDS",
        "A2A_SESSION_CACHE_MAXSIZE",
        "A2A_STREAMING",
    }

    assert named - set(VARIABLES) == gone | {one.variable for one in RETIRED.values()}


EARLIER_DEFAULTS: dict[str, object] = {
    "OPENCODE_BASE_URL": "http://127.0.0.1:4096",
    "OPENCODE_MANAGED_SERVER": False,
    "OPENCODE_MANAGED_SERVER_HOST": "127.0.0.1",
    "OPENCODE_MANAGED_SERVER_PORT": None,
    "OPENCODE_COMMAND": "opencode",
    "OPENCODE_STARTUP_TIMEOUT": 20,
    "OPENCODE_WORKSPACE_ROOT": None,
    "OPENCODE_PROVIDER_ID": None,
    "OPENCODE_MODEL_ID": None,
    "OPENCODE_TIMEOUT": 120,
    "OPENCODE_TIMEOUT_STREAM": 900,
    "OPENCODE_AGENT": None,
    "OPENCODE_SYSTEM": None,
    "OPENCODE_VARIANT": None,
    "OPENCODE_MAX_CONCURRENT_REQUESTS": 32,
    "OPENCODE_MAX_CONCURRENT_STREAMS": 8,
    "OPENCODE_AUTH_USERNAME": "opencode",
    "OPENCODE_AUTH_PASSWORD": None,
    "A2A_HOST": "127.0.0.1",
    "A2A_PORT": 8000,
    "A2A_PUBLIC_URL": "http://127.0.0.1:8000",
    "A2A_TITLE": "OpenCode A2A",
    "A2A_PROTOCOL_VERSION": "0.3",
    "A2A_SUPPORTED_PROTOCOL_VERSIONS": ("0.3", "1.0"),
    "A2A_LOG_LEVEL": "WARNING",
    "A2A_LOG_PAYLOADS": False,
    "A2A_LOG_BODY_LIMIT": 0,
    "A2A_MAX_REQUEST_BODY_BYTES": 2**20,
    "A2A_ALLOW_DIRECTORY_OVERRIDE": True,
    "A2A_ENABLE_SESSION_SHELL": False,
    "A2A_ENABLE_WORKSPACE_MUTATIONS": False,
    "A2A_METRICS_ENABLED": True,
    "A2A_ALLOWED_ORIGINS": (),
    "A2A_ALLOWED_HOSTS": (),
    "A2A_RATE_LIMIT_ENABLED": True,
    "A2A_RATE_LIMIT_WINDOW_SECONDS": 60,
    "A2A_RATE_LIMIT_MAX_REQUESTS": 120,
    "A2A_STREAM_MAX_BYTES": 64 * 2**20,
    "A2A_STREAM_MAX_DURATION_SECONDS": 3600,
    "A2A_STREAM_IDLE_TIMEOUT_SECONDS": 120,
    "A2A_TASK_STORE_BACKEND": "database",
    "A2A_TASK_STORE_DATABASE_URL": "sqlite+aiosqlite:///./opencode-a2a.db",
    "A2A_INTERRUPT_REQUEST_TTL_SECONDS": 10800,
    "A2A_CLIENT_TIMEOUT_SECONDS": 30,
    "A2A_CLIENT_CARD_FETCH_TIMEOUT_SECONDS": 5,
    "A2A_CLIENT_USE_CLIENT_PREFERENCE": False,
    "A2A_CLIENT_SUPPORTED_TRANSPORTS": ("JSONRPC", "HTTP+JSON"),
    "A2A_CLIENT_BEARER_TOKEN": None,
    "A2A_CLIENT_BASIC_AUTH": None,
    "A2A_CLIENT_ALLOWED_HOSTS": (),
    "A2A_CLIENT_ALLOW_PRIVATE_HOSTS": False,
    "A2A_CLIENT_POLLING_FALLBACK_ENABLED": False,
}
"""The settings of the earlier adapter if nobody set them: 1.4, or the last that had them."""


def test_the_upgrade_page_names_every_setting_whose_default_has_changed() -> None:
    changed = {
        name
        for name, earlier in EARLIER_DEFAULTS.items()
        if VARIABLES[name].info.get_default(call_default_factory=True) != earlier
    }

    assert len(changed) >= 10
    assert [name for name in sorted(changed) if f"`{name}`" not in upgrade_page()] == []


def upgrade_page() -> str:
    return (ROOT / "docs" / "upgrading.md").read_text()


def test_pages_name_the_files_of_this_version() -> None:
    text = "\n".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    named = re.findall(r"opencode_a2a-([\d.]+)-py3|\?ref=v([\d.]+)\]|newTag: \"([\d.]+)\"", text)

    assert {one for found in named for one in found if one} == {__version__}


@pytest.mark.parametrize("name", ["opencode-a2a", "opencode-a2a-server"])
def test_both_names_of_the_program_work(name: str) -> None:
    program = Path(sys.executable).parent / name

    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)  # noqa: S603

    assert said.stdout.strip() == __version__


def test_the_version_leads_forward_from_the_earlier_adapter() -> None:
    assert int(__version__.partition(".")[0]) >= 2


def test_a_link_of_the_site_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<h1 id="top"><a href="#top">a</a><a href="no/">b</a>')

    assert dead_links(tmp_path) == ["index.html: no/"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_files_on_a_page_fit_the_schema_of_the_file(page: Path) -> None:
    accepts = jsonschema_rs.validator_for(settings_schema())
    written = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)

    for text in written:
        accepts.validate(tomllib.loads(text))


@pytest.mark.parametrize(
    "text", ["[a2a]\nprot = 8080", "[a2a]\nport = 0", "[aa]\nport = 1", "[log]\nlevel = 'LOUD'"]
)
def test_the_schema_of_the_settings_file_refuses_what_a_start_would(text: str) -> None:
    wrong = tomllib.loads(text)

    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validator_for(settings_schema()).validate(wrong)


def test_the_schema_takes_lists_as_a_settings_file_may_have_them() -> None:
    accepts = jsonschema_rs.validator_for(settings_schema())

    accepts.validate({"auth": {"allowed_hosts": ["a.example", "b.example"]}})
    accepts.validate({"auth": {"allowed_hosts": "a.example,b.example"}})
