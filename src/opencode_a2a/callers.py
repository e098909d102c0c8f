"""The authenticated caller of a request.

``web.auth`` puts it into the ASGI scope under ``SCOPE_KEY``; ``server`` and ``extensions`` read it.
Nothing here knows what a credential looks like.
"""

from dataclasses import dataclass

from opencode_a2a.ids import Principal

SCOPE_KEY = "caller"
CAPABILITIES = frozenset({"session_shell", "workspace_mutation"})
"""What a credential can be allowed beyond the ordinary."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller, and what its credential may do."""

    principal: Principal
    capabilities: frozenset[str] = frozenset()
    credential_id: str | None = None
