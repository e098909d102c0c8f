"""Types for the identifiers, so that one is never mistaken for another, and for the caller.

Every layer uses them; nothing here knows what a credential looks like. The only wire formats known
here are OpenCode's ids, whose shape sorts by time, and its names of models.
"""

import dataclasses
import hashlib
from typing import Annotated, NewType

from pydantic import AliasChoices, ConfigDict, Field
from pydantic.dataclasses import dataclass

from opencode_a2a.rights import FULL, UNLIMITED, Budget, Capability, Rights

SessionId = NewType("SessionId", str)
"""An OpenCode session: ``ses_…``."""
MessageId = NewType("MessageId", str)
"""An OpenCode message: ``msg_…``."""
RequestId = NewType("RequestId", str)
"""A permission or question that OpenCode asked: ``per_…``, ``que_…`` or, by 2.x, ``frm_…``."""
TaskId = NewType("TaskId", str)
ContextId = NewType("ContextId", str)
Principal = NewType("Principal", str)
"""The owner of a credential, and of everything that is stored for it."""

MAIN = "main"
"""The name of the OpenCode if there is only one."""

SCOPE_KEY = "caller"
"""Key in the scope of a request for its ``Caller``, which ``web.auth`` puts there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller and the rights of its credential."""

    principal: Principal
    capabilities: frozenset[Capability] = frozenset()
    credential_id: str | None = None
    rights: Rights = FULL
    """The most that the agent may do for the caller; a request can only narrow it."""
    supervises: bool = False
    """Whether the caller may read, answer and cancel the tasks of all principals."""
    budget: Budget = UNLIMITED


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """The principal that work is done for, and that is asked when it needs an answer."""

    task_id: TaskId | None
    """None if an extension method began the work."""
    context_id: ContextId
    principal: Principal
    rights: Rights = FULL
    """The most that the work may do, whatever rules and people allow."""


@dataclass(frozen=True, slots=True, config=ConfigDict(populate_by_name=True))
class ModelRef:
    """A provider's model. OpenCode's prompts and messages say ``modelID``, its sessions ``id``."""

    provider_id: Annotated[str, Field(alias="providerID")]
    model_id: Annotated[
        str,
        Field(validation_alias=AliasChoices("modelID", "id"), serialization_alias="modelID"),
    ]

    def __str__(self) -> str:
        return f"{self.provider_id}/{self.model_id}"

    @classmethod
    def parse(cls, text: str | None) -> "ModelRef | None":
        """Parse ``provider/model``, the form of OpenCode's configuration."""
        provider, _, model = (text or "").partition("/")
        return cls(provider, model) if provider and model else None


ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The characters of the random end of OpenCode's ids."""


def scoped_id(session_id: SessionId, given: str) -> str:
    """Return the id in OpenCode for a message or part that a caller names ``given``.

    OpenCode overwrites a message or part with the same id in any session. The returned id cannot
    occur in another session. It is the same for the same name, and keeps the order of the names.
    """
    digest = hashlib.sha256(f"{session_id} {given}".encode()).digest()
    kind, _, rest = given.partition("_")
    return f"{kind}_{rest[:12]}" + "".join(ALPHABET[byte % 62] for byte in digest[:14])
