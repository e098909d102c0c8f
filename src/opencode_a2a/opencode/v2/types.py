"""What OpenCode 2 returns, as far as it is read: the fields that ``v2.client`` makes values of.

Messages, permissions and forms are in ``v2.messages``.
"""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from opencode_a2a.events import Json as Json  # pydantic looks here for what AnyObject consists of
from opencode_a2a.ids import MessageId, ModelRef, SessionId
from opencode_a2a.opencode.types import (
    AnyObject,
    Capabilities,
    Fields,
    ModelLimit,
    Readable,
    Revert,
    SessionTime,
    Shown,
    ShownText,
    Wire,
)
from opencode_a2a.opencode.v2.messages import Rule2

T = TypeVar("T")


class Data(Wire, Generic[T]):
    """The form in which 2.x returns nearly everything."""

    data: T


class Cursor2(Wire):
    next: str | None = None


class Page2(Wire, Generic[T]):
    data: T
    cursor: Annotated[Cursor2, Fields] = Cursor2()


class Place2(Wire):
    directory: str


class Capabilities2(Wire):
    tools: Annotated[bool | None, Shown] = None
    input: Readable[str] = Field(default_factory=list[str])

    def known(self) -> Capabilities:
        attachment = any(one != "text" for one in self.input) if self.input else None
        return Capabilities(toolcall=self.tools, attachment=attachment)


class Model2(Wire):
    id: str
    provider_id: str
    name: ShownText = ""
    status: Annotated[str | None, Shown] = None
    capabilities: Annotated[Capabilities2, Fields] = Capabilities2()
    limit: Annotated[ModelLimit, Fields] = ModelLimit()


class Chosen2(Wire):
    data: Model2 | None = None


class SessionModel2(Wire):
    """The model of a session, with its variant."""

    id: str
    provider_id: str
    variant: Annotated[str | None, Shown] = None

    @property
    def ref(self) -> ModelRef:
        return ModelRef(self.provider_id, self.id)

    @property
    def chosen(self) -> tuple[ModelRef, str | None]:
        """Model and variant; where no variant was chosen, the preview calls it ``default``."""
        return self.ref, None if self.variant == "default" else self.variant


class Session2(Wire):
    id: SessionId
    project_id: ShownText = ""
    title: ShownText = ""
    parent_id: SessionId | None = None
    agent: Annotated[str | None, Shown] = None
    model: Annotated[SessionModel2 | None, Shown] = None
    time: Annotated[SessionTime, Fields] = SessionTime()
    location: Place2
    revert: Annotated[Revert | None, Shown] = None
    metadata: Annotated[AnyObject | None, Shown] = None
    permissions: Readable[Rule2] = Field(default_factory=list[Rule2])


class Agent2(Wire):
    id: str
    mode: Literal["primary", "subagent", "all"]
    description: Annotated[str | None, Shown] = None
    hidden: bool = False
    model: Annotated[ModelRef | None, Shown] = None
    permissions: Readable[Rule2] = Field(default_factory=list[Rule2])


class Provider2(Wire):
    id: str
    name: ShownText = ""


class Project2(Wire):
    id: str
    canonical: ShownText = ""
    directory: ShownText = ""
    vcs: Annotated[str | None, Shown] = None


class Entry2(Wire):
    path: str
    type: Literal["file", "directory"]


class ShellMetadata2(Wire):
    session_id: SessionId | None = None


class Shell2(Wire):
    id: str
    status: ShownText = ""
    metadata: Annotated[ShellMetadata2, Fields] = ShellMetadata2()


class Output2(Wire):
    output: ShownText = ""
    cursor: int = 0


class McpStatus2(Wire):
    status: ShownText = ""
    error: Annotated[str | None, Shown] = None


class Mcp2(Wire):
    name: str
    status: Annotated[McpStatus2, Fields] = McpStatus2()


class Branches2(Wire):
    current: str | None = None
    default: str | None = None


class Vcs2(Wire):
    branch: Annotated[Branches2, Fields] = Branches2()


class ConfigInfo2(Wire):
    default_agent: Annotated[str | None, Shown] = Field(default=None, alias="default_agent")


class Document2(Wire):
    info: Annotated[ConfigInfo2, Fields] = ConfigInfo2()


class Named2(Wire):
    id: MessageId
