"""What this service offers beyond A2A: one file per extension, each method declared once."""

from opencode_a2a.extensions.budget import BUDGET
from opencode_a2a.extensions.interrupts import INTERRUPTS, RECOVERY
from opencode_a2a.extensions.metadata import (
    MODEL_SELECTION,
    OUTPUT_SCHEMA,
    RIGHTS,
    SESSION_BINDING,
    STREAM_HINTS,
)
from opencode_a2a.extensions.providers import PROVIDERS
from opencode_a2a.extensions.registry import Extension
from opencode_a2a.extensions.sessions import SESSIONS
from opencode_a2a.extensions.webhooks import WEBHOOKS
from opencode_a2a.extensions.workspaces import WORKSPACES

EXTENSIONS: tuple[Extension, ...] = (
    SESSION_BINDING,
    MODEL_SELECTION,
    STREAM_HINTS,
    RIGHTS,
    OUTPUT_SCHEMA,
    SESSIONS,
    PROVIDERS,
    INTERRUPTS,
    RECOVERY,
    WORKSPACES,
    WEBHOOKS,
    BUDGET,
)
"""All that have metadata or methods; the contracts about them are in ``server.contracts``."""
SKILLS = (SESSIONS, PROVIDERS, WORKSPACES, RECOVERY, INTERRUPTS, WEBHOOKS)
"""Those that the extended card lists as skills too, in this order."""
METHODS = [method for extension in EXTENSIONS for method in extension.methods.values()]
