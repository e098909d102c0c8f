"""What this service offers beyond A2A: one file per extension, each method declared once."""

from opencode_a2a.config import Settings
from opencode_a2a.extensions.calls import Deps
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.extensions.interrupts import INTERRUPTS, RECOVERY
from opencode_a2a.extensions.metadata import MODEL_SELECTION, SESSION_BINDING, STREAM_HINTS
from opencode_a2a.extensions.providers import PROVIDERS
from opencode_a2a.extensions.registry import Extension
from opencode_a2a.extensions.sessions import SESSIONS
from opencode_a2a.extensions.workspaces import WORKSPACES

__all__ = ["EXTENSIONS", "Deps", "Dispatcher", "dispatcher"]

EXTENSIONS: tuple[Extension, ...] = (
    SESSION_BINDING,
    MODEL_SELECTION,
    STREAM_HINTS,
    SESSIONS,
    PROVIDERS,
    INTERRUPTS,
    RECOVERY,
    WORKSPACES,
)
"""All that have metadata or methods; the contracts about them are ``server.contracts``."""


def dispatcher(deps: Deps, settings: Settings) -> Dispatcher:
    """Return the methods as this deployment offers them."""
    return Dispatcher(EXTENSIONS, deps, settings)
