"""The extensions of A2A that this service offers: one file for each, each method declared once.

``registry`` is how they are declared, ``params`` what params and results are made of, ``call`` what
a handler works with, and ``dispatch`` runs it. How to add a method: docs/extending.md.
"""

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
from opencode_a2a.extensions.tasks import TASKS
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
    TASKS,
)
"""The extensions with metadata or methods; ``server.contracts`` adds those about the service."""
METHODS = [method for extension in EXTENSIONS for method in extension.methods.values()]
