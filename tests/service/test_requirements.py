"""That every requirement has a test."""

import re
from pathlib import Path

from tests.service.requirements import REQUIREMENTS

TESTS = Path(__file__).parent.parent
ARCHITECTURE = TESTS.parent / "docs" / "architecture.md"
_MARK = re.compile(r'requirement\("([^"]+)"\)')
_INVARIANT = re.compile(r"^\| (I\d+) \|", re.MULTILINE)


def _named(folder: Path) -> set[str]:
    return {name for test in folder.rglob("test_*.py") for name in _MARK.findall(test.read_text())}


def test_every_requirement_is_named_by_a_test() -> None:
    assert set(REQUIREMENTS) - _named(TESTS) == set()


def test_every_name_in_the_service_tests_is_a_requirement() -> None:
    assert _named(TESTS / "service") - set(REQUIREMENTS) == set()


def test_every_invariant_that_is_documented_is_named_by_a_test() -> None:
    documented = _INVARIANT.findall(ARCHITECTURE.read_text())

    assert set(documented) - _named(TESTS) == set()
