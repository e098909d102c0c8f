"""Which line a request speaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.errors import VersionNotSupportedError
from opencode_a2a.protocol.versions import Line, negotiate, require


@pytest.mark.parametrize(
    ("header", "query", "line"),
    [
        (None, None, Line.V03),
        ("", "", Line.V03),
        ("1.0", None, Line.V1),
        ("1.0.7", None, Line.V1),
        ("0.3.0", None, Line.V03),
        (" 1.0 ", None, Line.V1),
        (None, "1.0", Line.V1),
        ("0.3", "1.0", Line.V03),
        ("", "1.0", Line.V1),
    ],
)
@pytest.mark.requirement("A2A-3.6")
def test_major_and_minor_decide_and_the_header_comes_first(
    header: str | None, query: str | None, line: Line
) -> None:
    assert negotiate(header, query, Line.V03) is line


@pytest.mark.requirement("A2A-3.6")
def test_the_default_is_what_the_settings_say() -> None:
    assert negotiate(None, None, Line.V1) is Line.V1


@pytest.mark.parametrize("asked", ["1.1", "1.9", "2.0", "0.2", "1", "latest", "1.0-rc1", "01.0"])
@pytest.mark.requirement("A2A-3.6")
def test_other_versions_are_refused_with_the_ones_that_would_do(asked: str) -> None:
    with pytest.raises(VersionNotSupportedError) as refused:
        negotiate(asked, None, Line.V03)

    assert refused.value.code == -32009
    assert refused.value.data["supported_protocol_versions"] == ["1.0", "0.3"]
    assert "A2A-Version" in refused.value.message


@given(st.text())
def test_any_text_is_a_line_or_a_short_refusal(asked: str) -> None:
    try:
        said = negotiate(asked, None, Line.V03).value
    except VersionNotSupportedError as refused:
        said = refused.message

    assert len(said) < 200


def test_a_method_of_the_other_line_names_the_header_to_send() -> None:
    require(Line.V1, Line.V1, "SendMessage")

    with pytest.raises(VersionNotSupportedError, match=r"A2A-Version: 1\.0"):
        require(Line.V1, Line.V03, "SendMessage")
