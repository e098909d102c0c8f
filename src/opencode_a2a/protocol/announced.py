"""The extensions that the metadata of this service amount to, and their names through time.

``card`` lists them, the bindings tell a caller which of those it asked for are active. Metadata
work without asking; the header is a courtesy.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opencode_a2a.events import Json, JsonObject

_PAGE = "https://github.com/Intelligent-Internet/opencode-a2a/blob/main/docs/extension-specifications.md"


@dataclass(frozen=True, slots=True)
class Announcement:
    """One extension: its URI, older names, and what each card says of it."""

    uri: str
    description: str
    aliases: tuple[str, ...] = ()
    public: JsonObject = field(default_factory=dict[str, Json])
    extended: JsonObject = field(default_factory=dict[str, Json])


def _aliases(founding: str, later: str) -> tuple[str, ...]:
    return founding, f"urn:opencode-a2a:extension:{later}:v1"


SESSION_BINDING = Announcement(
    uri=f"{_PAGE}#shared-session-binding-v1",
    description="Continue a known OpenCode session, in a chosen directory.",
    aliases=_aliases("urn:a2a:session-binding/v1", "session-binding"),
    public={
        "metadata_field": "metadata.shared.session.id",
        "behavior": "prefer_metadata_binding_else_create_session",
        "supported_metadata": ["shared.session.id", "opencode.directory", "opencode.workspace.id"],
        "provider_private_metadata": ["opencode.directory", "opencode.workspace.id"],
    },
    extended={
        "session_metadata_field": "metadata.shared.session",
        "session_fields": ["id", "title"],
        "notes": [
            "Without a session id the context continues its session, or gets a new one.",
            "A session that belongs to another caller looks like one that does not exist.",
        ],
    },
)
MODEL_SELECTION = Announcement(
    uri=f"{_PAGE}#shared-model-selection-v1",
    description="Choose the model for one message.",
    aliases=_aliases("urn:a2a:model-selection/v1", "model-selection"),
    public={
        "metadata_field": "metadata.shared.model",
        "behavior": "prefer_metadata_model_else_upstream_default",
        "applies_to_methods": [
            *("message/send", "message/stream"),
            *("SendMessage", "SendStreamingMessage"),
        ],
        "supported_metadata": ["shared.model.providerID", "shared.model.modelID"],
        "provider_private_metadata": [],
        "fields": ["providerID", "modelID"],
    },
    extended={"notes": ["Both fields are needed; half a pair is an error."]},
)
STREAM_HINTS = Announcement(
    uri=f"{_PAGE}#shared-stream-hints-v1",
    description="What a chunk or status is: block type, progress, interrupt, session, usage.",
    aliases=_aliases("urn:a2a:stream-hints/v1", "stream-hints"),
    public={
        "artifact_metadata_field": "metadata.shared.stream",
        "progress_metadata_field": "metadata.shared.progress",
        "interrupt_metadata_field": "metadata.shared.interrupt",
        "session_metadata_field": "metadata.shared.session",
        "usage_metadata_field": "metadata.shared.usage",
        "block_types": ["text", "reasoning", "tool_call"],
        "stream_fields": ["block_type", "message_id", "sequence"],
        "progress_fields": ["type", "status"],
        "interrupt_fields": ["request_id", "type", "phase"],
        "session_fields": ["id", "title"],
        "usage_fields": ["input_tokens", "output_tokens", "total_tokens"],
    },
    extended={
        "block_contracts": {
            "text": {"part": "text", "fields": ["text"]},
            "reasoning": {"part": "text", "fields": ["text"]},
            "tool_call": {
                "part": "data",
                "fields": [
                    *("call_id", "tool", "status", "title"),
                    *("input", "output", "error", "metadata"),
                ],
            },
        },
        "stream_fields": ["block_type", "source", "message_id", "event_id", "sequence"],
        "progress_fields": [
            *("type", "status", "part_id", "title", "subtitle", "reason", "todos"),
        ],
        "interrupt_fields": [
            *("request_id", "type", "phase", "session_id", "details"),
            *("asked_at", "expires_at", "default", "resolution", "by", "reason"),
        ],
        "usage_fields": [
            *("input_tokens", "output_tokens", "total_tokens", "reasoning_tokens"),
            *("cache_tokens.read_tokens", "cache_tokens.write_tokens", "cost", "children"),
        ],
    },
)
METADATA_EXTENSIONS = (SESSION_BINDING, MODEL_SELECTION, STREAM_HINTS)


def activated(header: str | None, announced: Iterable[Announcement]) -> list[str]:
    """Return which of the extensions a caller asked for are active, by the names it used."""
    if not header:
        return []
    names = {name for one in announced for name in (one.uri, *one.aliases)}
    asked = dict.fromkeys(name.strip() for name in header.split(","))
    return [name for name in asked if name in names]
