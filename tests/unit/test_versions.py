"""Which version a request speaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.a2a.types import Version, negotiate, only_v1
from opencode_a2a.errors import VersionNotSupportedError
from opencode_a2a.events import Json


@pytest.mark.parametrize(
    ("asked", "version"),
    [
        ("", Version.V03),
        ("1.0", Version.V1),
        ("1.0.7", Version.V1),
        ("0.3.0", Version.V03),
    ],
)
@pytest.mark.requirement("A2A-3.6")
def test_major_and_minor_decide(asked: str, version: Version) -> None:
    assert negotiate(asked, Version.V03) is version


@pytest.mark.requirement("A2A-3.6")
def test_the_default_is_what_the_settings_say() -> None:
    assert negotiate("", Version.V1) is Version.V1


def test_what_belongs_to_a_version_needs_no_wish() -> None:
    assert negotiate("", Version.V03, belongs=Version.V1) is Version.V1
    assert negotiate("", Version.V1, belongs=Version.V03) is Version.V03


@pytest.mark.parametrize("asked", ["", "0.3"])
def test_what_belongs_to_a_version_that_is_off_is_refused(asked: str) -> None:
    with pytest.raises(VersionNotSupportedError, match=r"only 1\.0 is supported here"):
        negotiate(asked, Version.V1, (Version.V1,), belongs=Version.V03)


@pytest.mark.parametrize(
    ("params", "only"),
    [
        ({"message": {"role": "ROLE_USER", "parts": [{"text": "a"}]}}, True),
        ({"message": {"role": "ROLE_USER", "parts": [{"kind": "text", "text": "a"}]}}, False),
        ({"message": {"role": "ROLE_USER", "content": [{"text": "a"}]}}, False),
        ({"message": {"role": "user", "parts": [{"text": "a"}]}}, False),
        ({"message": 1}, False),
        ([], False),
    ],
)
def test_only_a_whole_message_of_1_0_is_taken_for_one(params: Json, only: bool) -> None:
    assert only_v1(params) is only


@pytest.mark.parametrize("asked", ["1.1", "1.9", "2.0", "0.2", "1", "latest", "1.0-rc1", "01.0"])
@pytest.mark.requirement("A2A-3.6")
def test_other_versions_are_refused_with_the_ones_that_would_do(asked: str) -> None:
    with pytest.raises(VersionNotSupportedError) as refused:
        negotiate(asked, Version.V03)

    assert refused.value.code == -32009
    assert refused.value.data["supported_protocol_versions"] == ["1.0", "0.3"]
    assert "A2A-Version" in refused.value.message


@given(st.text())
def test_any_text_is_a_line_or_a_short_refusal(asked: str) -> None:
    try:
        said = negotiate(asked, Version.V03).value
    except VersionNotSupportedError as refused:
        said = refused.message

    assert len(said) < 200


def test_a_method_of_the_other_line_names_the_header_to_send() -> None:
    assert negotiate("1.0", Version.V03, belongs=Version.V1) is Version.V1

    with pytest.raises(VersionNotSupportedError, match=r"A2A-Version: 1\.0"):
        negotiate("0.3", Version.V03, belongs=Version.V1, what="SendMessage")
