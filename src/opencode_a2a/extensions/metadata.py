"""Extensions that are metadata of messages: session binding, model selection, stream hints, ….

They have no methods: ``server.content`` reads the metadata of requests, ``a2a.render`` writes those
of answers, and a test compares the declarations here with both.
"""

from opencode_a2a.a2a.operations import SEND_MESSAGE, SEND_STREAMING_MESSAGE
from opencode_a2a.a2a.types import Version
from opencode_a2a.config import Settings
from opencode_a2a.errors import Missing
from opencode_a2a.events import FailureType, Json
from opencode_a2a.extensions.registry import Extension, aliases
from opencode_a2a.rights import PROFILES
from opencode_a2a.schemas import MAX_BYTES, MAX_DEPTH, MAX_NODES


def _sending(settings: Settings) -> list[Json]:
    """Return the names of the methods that send a message, in the versions that are spoken."""
    spoken = map(Version, settings.a2a.supported_protocol_versions)
    return [op.named(one) for one in spoken for op in (SEND_MESSAGE, SEND_STREAMING_MESSAGE)]


def _private(settings: Settings, missing: Missing) -> list[Json]:
    """Return the metadata of our own that say where and how a message is worked on."""
    offered: dict[str, bool] = {
        "opencode.directory": settings.directory_override,
        "opencode.workspace.id": "workspaces" not in missing,
        "opencode.agent": True,
        "opencode.command": True,
        "opencode.plan": "rules" not in missing,
        "opencode.new_task": True,
        "opencode.sign_in": True,
    }
    return [name for name, offers in offered.items() if offers]


SESSION_BINDING = Extension(
    key="session_binding",
    title="Shared session binding",
    anchor="shared-session-binding-v1",
    summary="Continue a known OpenCode session, in a chosen directory.",
    aliases=aliases("urn:a2a:session-binding/v1", "session-binding"),
    public=lambda settings, missing: {
        "metadata_field": "metadata.shared.session.id",
        "behavior": "prefer_metadata_binding_else_create_session",
        "supported_metadata": [
            "shared.session.id",
            "shared.delivery",
            *_private(settings, missing),
        ],
        "provider_private_metadata": _private(settings, missing),
    },
    extended=lambda _, __: {
        "session_metadata_field": "metadata.shared.session",
        "session_fields": ["id", "title"],
    },
    surface="core-runtime-metadata",
    notes=(
        "Without a session id the context continues its session, or gets a new one.",
        "opencode.agent names one of OpenCode's agents, or its skill in the extended card.",
        "opencode.command names one of OpenCode's commands, or its skill; the text of the message "
        "is what it is called with.",
        "opencode.plan set to true has the message planned first: the task waits with the plan as "
        'an artifact, and is carried out when it is answered with "go".',
        "A session that belongs to another caller looks like one that does not exist.",
        "A message without a task answers the task that waits in its context, or is refused with "
        "what that asks; opencode.new_task set to true starts a task instead.",
        "opencode.sign_in, the timestamp of an auth-required status, has a message refused if its "
        "task no longer waits for that sign-in.",
        "A message on a working task steers it; shared.delivery says otherwise: steer, queue or "
        "interrupt.",
    ),
)
MODEL_SELECTION = Extension(
    key="model_selection",
    title="Shared model selection",
    anchor="shared-model-selection-v1",
    summary="Choose the model for one message.",
    aliases=aliases("urn:a2a:model-selection/v1", "model-selection"),
    public=lambda settings, _: {
        "metadata_field": "metadata.shared.model",
        "behavior": "prefer_metadata_model_else_upstream_default",
        "supported_metadata": ["shared.model.providerID", "shared.model.modelID"],
        "provider_private_metadata": [],
        "fields": ["providerID", "modelID"],
        "applies_to_methods": _sending(settings),
    },
    surface="core-runtime-metadata",
    notes=("Both fields are needed; half a pair is an error.",),
)
RIGHTS = Extension(
    key="rights",
    title="OpenCode profiles",
    anchor="opencode-profiles-v1",
    summary="Narrow what the agent may do for one message.",
    requires="rules",
    public=lambda settings, _: {
        "metadata_field": "metadata.opencode.profile",
        "behavior": "narrow_only",
        "supported_metadata": ["opencode.profile"],
        "provider_private_metadata": ["opencode.profile"],
        "profiles": [*PROFILES],
        "applies_to_methods": _sending(settings),
    },
    extended=lambda settings, _: {"deployment_profile": settings.auth.profile},
    surface="core-runtime-metadata",
    notes=(
        "Deployment, credential and message each name a profile; what all three allow is done.",
        "A profile holds for one message; the next one of the context may name another.",
        "The methods that give a session work take the same metadata.",
    ),
)
OUTPUT_SCHEMA = Extension(
    key="output_schema",
    title="Shared output schema",
    anchor="shared-output-schema-v1",
    summary="Have the answer to a message as data that fits a JSON schema.",
    requires="schemas",
    public=lambda settings, _: {
        "metadata_field": "metadata.shared.output.schema",
        "behavior": "validated_data_artifact_else_failed_task",
        "supported_metadata": ["shared.output.schema", "opencode.format"],
        "provider_private_metadata": ["opencode.format"],
        "applies_to_methods": _sending(settings),
    },
    extended=lambda _, __: {
        "artifact_name": "result",
        "failure_type": FailureType.UPSTREAM_STRUCTURED_OUTPUT.value,
        "max_schema_bytes": MAX_BYTES,
        "max_schema_depth": MAX_DEPTH,
        "max_schema_values": MAX_NODES,
    },
    surface="core-runtime-metadata",
    notes=(
        "The schema describes an object, and refers only to itself, without recursion.",
        "The answer is the last artifact; the status message has it as text.",
        "An answer that does not fit fails the task, with what is wrong in the validator's words.",
    ),
)
_TOOL_FIELDS = ("call_id", "tool", "status", "title", "input", "output", "error", "metadata")
_INTERRUPT_FIELDS = (
    "request_id", "number", "type", "phase", "session_id", "details",
    "asked_at", "expires_at", "default", "waiting", "resolution", "by", "scope", "reason",
)  # fmt: skip
_DETAIL_FIELDS = (
    "permission", "patterns", "always", "replies", "scopes", "scope_text", "questions",
    "origin", "metadata", "tool", "links", "links_unknown", "changes", "tells_reason",
)  # fmt: skip
_USAGE_FIELDS = (
    "input_tokens", "output_tokens", "total_tokens", "reasoning_tokens",
    "cache_tokens.read_tokens", "cache_tokens.write_tokens", "cost", "children",
)  # fmt: skip
STREAM_HINTS = Extension(
    key="streaming",
    title="Shared stream hints",
    anchor="shared-stream-hints-v1",
    summary="What a chunk or status is: block type, progress, interrupt, session, usage.",
    aliases=aliases("urn:a2a:stream-hints/v1", "stream-hints"),
    public=lambda _, __: {
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
    extended=lambda _, __: {
        "block_contracts": {
            "text": {"part": "text", "fields": ["text"]},
            "reasoning": {"part": "text", "fields": ["text"]},
            "tool_call": {
                "part": "data",
                "fields": [*_TOOL_FIELDS],
            },
        },
        "stream_fields": ["block_type", "source", "message_id", "event_id", "sequence"],
        "progress_fields": ["type", "status", "part_id", "title", "subtitle", "reason", "todos"],
        "interrupt_fields": [*_INTERRUPT_FIELDS],
        "task_metadata_field": "metadata.opencode",
        "task_fields": [
            *("created_at", "title", "model", "agent", "directory"),
            *("error", "finish", "structured", "output_negotiation"),
        ],
        "interrupt_detail_fields": [*_DETAIL_FIELDS],
        "usage_fields": [*_USAGE_FIELDS],
    },
    surface="core-runtime-metadata",
    notes=("The metadata are always there; a reader who ignores them misses nothing.",),
)
