"""Patterns for texts of others need a time that grows with the text, and no faster."""

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from opencode_a2a.jsonguard import loads
from opencode_a2a.opencode import translate
from opencode_a2a.printable import visible
from opencode_a2a.telemetry import mask_text

MANY = 200_000


def read_document(text: str) -> object:
    return loads(text.encode())


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (mask_text, "x://" + ":" * MANY),
        (mask_text, "x://" + "a:" * MANY),
        (mask_text, "x://" * MANY),
        (translate.redact, "a." * MANY),
        (translate.redact, "a-" * MANY),
        (translate.redact, "a://" * MANY),
        (visible, "\u13a0" * MANY),
        (visible, "\ua4d0\u0416" * MANY),
        (visible, "\n\t" * MANY),
        (read_document, "[" * 65 + '"' + '\\"' * MANY),
        (read_document, "[" * 65 + '"' + '\\"' * MANY + "\\"),
    ],
    ids=lambda given: given.__name__ if callable(given) else f"{given[-4:]!a}",
)
def test_a_long_text_is_read_in_time(read: Callable[[str], object], text: str) -> None:
    began = time.process_time()
    with suppress(ValueError):
        read(text)

    assert time.process_time() - began < 5
