"""Attachments that OpenCode can handle, and the form in which it gets them.

Both ways to send one use this: messages (``server.operations``) and the prompts of the session
methods (``extensions.messages``). A media type that OpenCode does not know would make the session
unusable for good. So textual files are sent as ``text/plain``, and everything that is neither text
nor image nor PDF is refused.
"""

import base64
import binascii
import codecs
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from opencode_a2a.messages import PromptPart

IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
INPUT_MODES = ("text/plain", "application/json", "application/pdf", *IMAGE_TYPES)
"""Media types that the card lists; other textual types are accepted too."""
DIFF_TYPE = "text/x-diff"
OUTPUT_MODES = ("text/plain", "application/json", "text/markdown", DIFF_TYPE)
"""Media types of the agent's answers."""
_TEXTUAL = frozenset(
    f"application/{name}"
    for name in (
        "json", "json5", "jsonl", "ndjson", "x-ndjson", "xml", "yaml", "x-yaml", "toml", "csv",
        "javascript", "x-javascript", "ecmascript", "typescript", "sql", "graphql", "markdown",
        "x-sh", "x-shellscript", "x-httpd-php", "x-python", "x-ruby", "x-perl", "x-tex", "rtf",
    )
)  # fmt: skip
_UNKNOWN = "application/octet-stream"


def accepts(modes: Iterable[str], media_type: str) -> bool:
    """Whether output modes, such as ``text/*``, include a media type."""
    family = media_type.partition("/")[0] + "/*"
    return any(mode in (media_type, family) for mode in modes)


class UnfitError(Exception):
    """A file cannot be sent to OpenCode; the text says why, and what is possible."""


def read_data_url(url: str) -> bytes:
    """Return the bytes in a ``data:`` URL; refuse any other URL."""
    scheme, _, rest = url.partition(":")
    head, comma, content = rest.partition(",")
    if scheme.lower() != "data" or not comma:
        raise UnfitError("must be a data: URL with the bytes of the file, or an http(s) URL")
    _, *flags = (piece.strip() for piece in head.split(";"))
    data = unquote_to_bytes(content)
    if "base64" not in (flag.lower() for flag in flags):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error:
        raise UnfitError("must hold valid base64") from None


def fit_file(data: bytes, declared: str | None, filename: str | None) -> PromptPart:
    """Return a file in a form that OpenCode accepts; its bytes must match the declared type."""
    if not data:
        raise UnfitError("is an empty file")
    media_type = (declared or _UNKNOWN).partition(";")[0].strip().lower()
    detected = _sniff(data)
    if media_type == "image/jpg":
        media_type = "image/jpeg"
    if media_type == _UNKNOWN:
        media_type = detected or "text/plain"
    if is_textual(media_type):
        data = data.removeprefix(codecs.BOM_UTF8)
        try:
            data.decode()
        except UnicodeDecodeError:
            raise UnfitError(
                f"is not {media_type} in UTF-8; supported are text, images and PDF"
            ) from None
        if b"\0" in data:
            raise UnfitError(f"is not {media_type}: it holds zero bytes")
        encoded = base64.b64encode(data).decode()
        return PromptPart(media_type="text/plain", data=encoded, filename=filename)
    if media_type not in IMAGE_TYPES and media_type != "application/pdf":
        raise UnfitError(
            f"has the media type {media_type[:64]}; supported are text, images and PDF"
        )
    if detected != media_type:
        raise UnfitError(
            f"is declared as {media_type}, but its bytes are {detected or 'something else'}"
        )
    return PromptPart(
        media_type=media_type, data=base64.b64encode(data).decode(), filename=filename
    )


def is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


def is_textual(media_type: str) -> bool:
    return (
        media_type.startswith("text/")
        or media_type in _TEXTUAL
        or media_type.endswith(("+json", "+xml", "+yaml"))
    )


def _sniff(data: bytes) -> str | None:
    """Recognize an image or PDF by the bytes that a decoder needs to begin."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and b"IEND" in data[-16:]:
        return "image/png"
    if data.startswith(b"\xff\xd8\xff") and len(data) > 100:
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")) and len(data) > 13:
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP" and len(data) > 16:
        return "image/webp"
    if data.startswith(b"%PDF-"):
        return "application/pdf"
    return None
