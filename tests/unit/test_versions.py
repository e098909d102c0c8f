"""Which line a request speaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.a2a.types import Version, negotiate, require
from opencode_a2a.errors import VersionNotSupportedError


@pytest.mark.parametrize(
    ("header", "query", "line"),
    [
        (None, None, Version.V03),
        ("", "", Version.V03),
        ("1.0", None, Version.V1),
        ("1.0.7", None, Version.V1),
        ("0.3.0", None, Version.V03),
        (" 1.0 ", None, Version.V1),
        (None, "1.0", Version.V1),
        ("0.3", "1.0", Version.V03),
        ("", "1.0", Version.V1),
    ],
)
@pytest.mark.requirement("A2A-3.6")
def test_major_and_minor_decide_and_the_header_comes_first(
    header: str | None, query: str | None, line: Version
) -> None:
    assert negotiate(header, query, Version.V03) is line


@pytest.mark.requirement("A2A-3.6")
def test_the_default_is_what_the_settings_say() -> None:
    assert negotiate(None, None, Version.V1) is Version.V1


@pytest.mark.parametrize("asked", ["1.1", "1.9", "2.0", "0.2", "1", "latest", "1.0-rc1", "01.0"])
@pytest.mark.requirement("A2A-3.6")
def test_other_versions_are_refused_with_the_ones_that_would_do(asked: str) -> None:
    with pytest.raises(VersionNotSupportedError) as refused:
        negotiate(asked, None, Version.V03)

    assert refused.value.code == -32009
    assert refused.value.data["supported_protocol_versions"] == ["1.0", "0.3"]
    assert "A2A-Version" in refused.value.message


@given(st.text())
def test_any_text_is_a_line_or_a_short_refusal(asked: str) -> None:
    try:
        said = negotiate(asked, None, Version.V03).value
    except VersionNotSupportedError as refused:
        said = refused.message

    assert len(said) < 200


def test_a_method_of_the_other_line_names_the_header_to_send() -> None:
    require(Version.V1, Version.V1, "SendMessage")

    with pytest.raises(VersionNotSupportedError, match=r"A2A-Version: 1\.0"):
        require(Version.V1, Version.V03, "SendMessage")
