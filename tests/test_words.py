"""Docstrings and log messages are in the English of the pages for users."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import opencode_a2a

SOURCE = Path(opencode_a2a.__file__).parent
WORDS = {
    "goes on": "continues",
    "go on": "continue",
    "by method": "through an extension method",
    "is away": "is unreachable",
    "is heard": "sends events",
    "fare": "succeed, fail",
    "from which on": "above which, minimum",
    "to no purpose": "early",
    "time is up": "time has run out",
    "nobody is told": "silently",
    "at work": "running",
}
"""Words of a dialect, and what a colleague would say."""
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


def written(tree: ast.Module) -> Iterator[str]:
    """Yield docstrings, of attributes too, and the messages of log records."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield text
            case _:
                pass
    yield from logged(tree)


def logged(tree: ast.Module) -> Iterator[str]:
    """Yield the messages of log records."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr=level), args=[ast.Constant(value=str() as text), *_]
            ) if level in LEVELS:
                yield text
            case _:
                pass


def test_docstrings_and_log_messages_say_what_a_colleague_would_say() -> None:
    found: list[str] = []
    for file in sorted(SOURCE.rglob("*.py")):
        where = file.relative_to(SOURCE)
        for text in written(ast.parse(file.read_text())):
            for word, better in WORDS.items():
                if re.search(rf"\b{word}\b", " ".join(text.split())):
                    found.append(f"{where}: {word!r} in {text[:60]!r}; write {better!r}")

    assert found == []


def test_log_messages_say_what_happened() -> None:
    """In the past tense where something failed, and without a final dot."""
    wrong = re.compile(r"\b(cannot be|does not|do not)\b|\.$")
    found = [
        f"{file.relative_to(SOURCE)}: {text!r}"
        for file in sorted(SOURCE.rglob("*.py"))
        for text in logged(ast.parse(file.read_text()))
        if wrong.search(text)
    ]

    assert found == []
