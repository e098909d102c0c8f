"""Names for the kinds of identifiers, so that one is never passed for another, and the caller.

Used by every layer; nothing here knows what a credential looks like. Of the wire formats only
OpenCode's ids are known: their shape, which sorts by time, and how a model is named.
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
"""A permission or question that OpenCode asked: ``per_…`` or ``que_…``."""
TaskId = NewType("TaskId", str)
ContextId = NewType("ContextId", str)
Principal = NewType("Principal", str)
"""Who a credential belongs to; everything stored has one as its owner."""

MAIN = "main"
"""The name of an OpenCode that is the only one."""

SCOPE_KEY = "caller"
"""In the scope of a request: its ``Caller``, put there by ``web.auth``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller, and what its credential may do."""

    principal: Principal
    capabilities: frozenset[Capability] = frozenset()
    credential_id: str | None = None
    rights: Rights = FULL
    """What the agent may do for the caller, whatever a request says."""
    supervises: bool = False
    """Whether the caller may read, answer and cancel the tasks of all principals."""
    budget: Budget = UNLIMITED


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """For whom work is done, and who is asked when it needs an answer."""

    task_id: TaskId | None
    """None when the work was begun by method."""
    context_id: ContextId
    principal: Principal
    rights: Rights = FULL
    """What the work may do at the most, whatever rules and people say."""


@dataclass(frozen=True, slots=True, config=ConfigDict(populate_by_name=True))
class ModelRef:
    """Which model. OpenCode's prompts and messages say ``modelID``, its sessions ``id``."""

    provider_id: Annotated[str, Field(alias="providerID")]
    model_id: Annotated[
        str,
        Field(validation_alias=AliasChoices("modelID", "id"), serialization_alias="modelID"),
    ]

    def __str__(self) -> str:
        return f"{self.provider_id}/{self.model_id}"

    @classmethod
    def parse(cls, text: str | None) -> "ModelRef | None":
        """Read ``provider/model``, as OpenCode's configuration has it."""
        provider, _, model = (text or "").partition("/")
        return cls(provider, model) if provider and model else None


ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Of the random end of OpenCode's ids."""


def scoped_id(session_id: SessionId, given: str) -> str:
    """Return the id under which a session stores what a caller calls ``given``.

    OpenCode stores a message or a part over whatever has the same id, in any session. This one
    no other session can have. The same name leads to the same id, and ids keep their order.
    """
    digest = hashlib.sha256(f"{session_id} {given}".encode()).digest()
    kind, _, rest = given.partition("_")
    return f"{kind}_{rest[:12]}" + "".join(ALPHABET[byte % 62] for byte in digest[:14])
