"""That every requirement has a test."""

import re
from pathlib import Path

from tests.service.requirements import REQUIREMENTS

_MARK = re.compile(r'requirement\("([^"]+)"\)')


def test_every_requirement_is_named_by_a_test_and_every_name_is_one() -> None:
    sources = Path(__file__).parent.glob("test_*.py")
    named = {name for source in sources for name in _MARK.findall(source.read_text())}

    assert set(REQUIREMENTS) - named == set()
    assert named - set(REQUIREMENTS) == set()
