"""Extensions as the cards announce them, and which of them a caller asked for.

``card`` lists them, the bindings tell a caller which of those it asked for are active. They
work without asking; the header is a courtesy.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opencode_a2a.config import Settings
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions import metadata
from opencode_a2a.extensions.registry import Extension


@dataclass(frozen=True, slots=True)
class Announcement:
    """One extension: its URI, older names, and what each card says of it."""

    uri: str
    description: str
    aliases: tuple[str, ...] = ()
    public: JsonObject = field(default_factory=dict[str, Json])
    extended: JsonObject = field(default_factory=dict[str, Json])


def announce(extension: Extension) -> Announcement:
    """Return a declared extension as the cards of a service with default settings have it."""
    default = Settings()
    public, extended = extension.public(default), extension.extended(default)
    return Announcement(extension.uri, extension.summary, extension.aliases, public, extended)


SESSION_BINDING = announce(metadata.SESSION_BINDING)
METADATA_EXTENSIONS = (
    SESSION_BINDING,
    announce(metadata.MODEL_SELECTION),
    announce(metadata.STREAM_HINTS),
)


def activated(header: str | None, announced: Iterable[Announcement]) -> list[str]:
    """Return which of the extensions a caller asked for are active, by the names it used."""
    if not header:
        return []
    names = {name for one in announced for name in (one.uri, *one.aliases)}
    asked = dict.fromkeys(name.strip() for name in header.split(","))
    return [name for name in asked if name in names]
