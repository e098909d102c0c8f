"""The direction of imports: a layer knows only those to its right."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "opencode_a2a"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE
OUTER = [
    "cli",
    "app",
    "notices",
    "otel",
    "web",
    "server",
    "extensions",
    "push",
    "peers",
    "a2a",
    "tasks",
    "cluster",
    "turns",
    "log",
]
LAYERS = [*OUTER, "opencode", "store", "net"]
"""From the outside in; below them are the root modules, which every layer may use."""
NO_UPSTREAM = {"web", "server", "a2a", "tasks", "log"}
"""Layers that never see what OpenCode sends."""

MODULES = sorted(SOURCE.rglob("*.py"))


def layer_of(module: str) -> str:
    """Return the part after the package: ``opencode_a2a.server.sse`` lies in ``server``."""
    return module.split(".")[1] if "." in module else ""


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """Yield every imported module, those inside functions too."""
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                whole = module == PACKAGE
                yield from ((f"{module}.{a.name}" for a in names) if whole else (module,))
            case ast.ImportFrom(level=level) if level:
                yield f"{PACKAGE}.relative"
            case _:
                pass


def ours(path: Path) -> set[str]:
    """Return the layers that a module imports, without its own."""
    own = layer_of(name_of(path))
    modules = (m for m in imports_of(path) if m.startswith(f"{PACKAGE}."))
    return {layer_of(m) for m in modules} - {own, "__version__"}


def identify(path: Path) -> str:
    return name_of(path)


ROOT = {layer_of(name_of(path)) for path in MODULES} - {"", "__main__", *LAYERS}


def allowed(own: str) -> set[str]:
    """Return the layers that one may import."""
    if own not in LAYERS:
        return ROOT
    return {*LAYERS[LAYERS.index(own) + 1 :], *ROOT}


def test_imports_go_down() -> None:
    found: dict[str, set[str]] = {}
    for path in MODULES:
        own = layer_of(name_of(path))
        if own not in ("", "__main__"):  # the package itself offers the program and the application
            found[name_of(path)] = ours(path) - allowed(own)

    assert {name: layers for name, layers in found.items() if layers} == {}


ONLY_FROM = {"notices": {"app", "cli"}, "otel": {"app"}}
"""Packages without which the service works, and who may import them."""


@pytest.mark.parametrize("package", ONLY_FROM)
def test_what_can_be_switched_off_is_imported_from_few_places(package: str) -> None:
    using = {layer_of(name_of(path)) for path in MODULES if package in ours(path)}

    assert using == ONLY_FROM[package]


def test_nothing_uses_the_sdk() -> None:
    """The A2A SDK is for the tests alone."""
    imports = [(name_of(path), module) for path in MODULES for module in imports_of(path)]

    assert [one for one in imports if one[1].split(".")[0] == "a2a"] == []


def test_only_the_inner_layers_see_what_opencode_sends() -> None:
    outside = [path for path in MODULES if layer_of(name_of(path)) in NO_UPSTREAM]

    assert [name_of(path) for path in outside if "opencode" in ours(path)] == []


def test_the_demo_model_stands_alone() -> None:
    demo = (SOURCE.parent / "opencode_a2a_demo").glob("*.py")

    assert not [m for path in demo for m in imports_of(path) if m.split(".")[0] == PACKAGE]


def test_only_migrate_imports_the_importer_of_earlier_databases() -> None:
    using = [name_of(path) for path in MODULES if "opencode_a2a_import" in imports_of(path)]

    assert using == [f"{PACKAGE}.cli.setup"]


def test_root_modules_are_single_files() -> None:
    """A new folder is a new layer: it gets its place in the order first."""
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}

    assert folders == {*LAYERS, "config"}


def test_docstrings_name_modules_that_exist() -> None:
    # Methods and settings begin with these two names as well.
    packages = "|".join({*LAYERS, "config"} - {"opencode", "a2a"})
    named = re.compile(rf"``((?:{packages})\.[a-z_0-9]+)(?=[`.])")
    modules = {name_of(path).removeprefix(f"{PACKAGE}.") for path in MODULES}
    found = [(name_of(path), name) for path in MODULES for name in named.findall(path.read_text())]

    assert [one for one in found if one[1] not in modules] == []


def test_the_types_of_failures_are_declared() -> None:
    """A failure whose type is a plain string would be missing from ``docs/errors.md``."""
    for node in (node for path in MODULES for node in ast.walk(tree_of(path))):
        match node:
            case ast.Call(func=ast.Name("Failure"), args=[ast.Constant(value), *_]):
                pytest.fail(f"declare {value} in FailureType")
            case _:
                pass


UPSTREAM_PATH = re.compile(
    r"/(session|global|permission|question|config|provider|command|find|experimental|vcs|api)/"
)
UPSTREAM_EVENT = re.compile(r"(session|message\.part|todo|server|pty|vcs)\.[a-z]+(\.[a-z]+)*")
UPSTREAM_PERMISSIONS = {"bash", "webfetch", "todowrite", "external_directory", "doom_loop"}
PERMISSION_WORDS = {f"opencode_a2a.{name}" for name in ("a2a.texts", "config.values", "rights")}
"""What a person is asked, in words; what ``--ask`` can name; which permissions there are."""


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_only_the_driver_knows_names_of_one_version_of_opencode(path: Path) -> None:
    """OpenCode 2 has other paths, events and permissions: a second driver is one package."""
    if layer_of(name_of(path)) == "opencode" or name_of(path) == f"{PACKAGE}.otel.names":
        return  # OpenTelemetry's names look like events
    tree = tree_of(path)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]

    assert not [text for text in texts if UPSTREAM_PATH.match(text)]
    assert not [text for text in texts if UPSTREAM_EVENT.fullmatch(text)]
    if name_of(path) not in PERMISSION_WORDS:
        assert not UPSTREAM_PERMISSIONS.intersection(texts)


def test_no_test_skips_itself() -> None:
    """A run that leaves something out must not look complete.

    A test that needs a system, or a program, is collected only where there is one.
    """
    skips = re.compile(r"pytest\.(mark\.)?(skip|skipif|importorskip)\b")
    files = Path(__file__).parent.rglob("*.py")

    assert [path.name for path in files if skips.search(path.read_text())] == []
