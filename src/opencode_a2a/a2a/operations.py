"""The operations of A2A: names in both versions, HTTP verbs and paths, params and results.

The bindings of the server, the peer client, the OpenAPI document and the published contracts read
this table. ``server.operations`` has the functions that run the operations.
"""

from dataclasses import dataclass

from opencode_a2a.a2a.types import (
    NoParams,
    PushListParams,
    PushRef,
    PushRequest,
    SendRequest,
    TaskParams,
    Version,
)
from opencode_a2a.log.state import Query

PREFIXES = {Version.V1: "", Version.V03: "/v1"}
"""The beginning of all paths of a version."""
RPC_PATH = "/"


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """One operation of A2A; compared by identity."""

    name: str
    """The method of JSON-RPC in 1.0; logs and errors use it too."""
    v03: str | None
    """The method of JSON-RPC in 0.3."""
    verbs: tuple[str, ...]
    path: str
    """The path below the prefix of a version. The extended card has several: ``CARD_PATHS``."""
    takes: type = NoParams
    """The type of the params, for which ``Encoding.read`` has a function."""
    returns: str = "Task"
    """The name of the result's schema in the OpenAPI document."""
    streams: bool = False
    body: bool = False
    """Whether HTTP requests carry the params in their body and path, not in path and query."""

    def named(self, version: Version) -> str | None:
        """Return the method of JSON-RPC in a version, if that version has the operation."""
        return self.name if version is Version.V1 else self.v03


_PUSH = "/tasks/{taskId}/pushNotificationConfigs"

SEND_MESSAGE = Operation(
    "SendMessage",
    v03="message/send",
    verbs=("POST",),
    path="/message:send",
    takes=SendRequest,
    body=True,
    returns="SendResponse",
)
SEND_STREAMING_MESSAGE = Operation(
    "SendStreamingMessage",
    v03="message/stream",
    verbs=("POST",),
    path="/message:stream",
    takes=SendRequest,
    body=True,
    streams=True,
)
GET_TASK = Operation(
    "GetTask", v03="tasks/get", verbs=("GET",), path="/tasks/{id}", takes=TaskParams
)
LIST_TASKS = Operation(
    "ListTasks", v03=None, verbs=("GET",), path="/tasks", takes=Query, returns="TaskPage"
)
CANCEL_TASK = Operation(
    "CancelTask", v03="tasks/cancel", verbs=("POST",), path="/tasks/{id}:cancel", takes=TaskParams
)
SUBSCRIBE_TO_TASK = Operation(
    "SubscribeToTask",
    v03="tasks/resubscribe",
    verbs=("GET", "POST"),
    path="/tasks/{id}:subscribe",
    takes=TaskParams,
    streams=True,
)
GET_EXTENDED_CARD = Operation(
    "GetExtendedAgentCard",
    v03="agent/getAuthenticatedExtendedCard",
    verbs=("GET",),
    path="/extendedAgentCard",
    returns="Card",
)
CREATE_PUSH_CONFIG = Operation(
    "CreateTaskPushNotificationConfig",
    v03="tasks/pushNotificationConfig/set",
    verbs=("POST",),
    path=_PUSH,
    takes=PushRequest,
    body=True,
    returns="PushConfig",
)
GET_PUSH_CONFIG = Operation(
    "GetTaskPushNotificationConfig",
    v03="tasks/pushNotificationConfig/get",
    verbs=("GET",),
    path=f"{_PUSH}/{{id}}",
    takes=PushRef,
    returns="PushConfig",
)
LIST_PUSH_CONFIGS = Operation(
    "ListTaskPushNotificationConfigs",
    v03="tasks/pushNotificationConfig/list",
    verbs=("GET",),
    path=_PUSH,
    takes=PushListParams,
    returns="PushConfigs",
)
DELETE_PUSH_CONFIG = Operation(
    "DeleteTaskPushNotificationConfig",
    v03="tasks/pushNotificationConfig/delete",
    verbs=("DELETE",),
    path=f"{_PUSH}/{{id}}",
    takes=PushRef,
    returns="Nothing",
)
PUSH_OPERATIONS = (CREATE_PUSH_CONFIG, GET_PUSH_CONFIG, LIST_PUSH_CONFIGS, DELETE_PUSH_CONFIG)
OPERATIONS = (
    SEND_MESSAGE,
    SEND_STREAMING_MESSAGE,
    GET_TASK,
    LIST_TASKS,
    CANCEL_TASK,
    SUBSCRIBE_TO_TASK,
    *PUSH_OPERATIONS,
    GET_EXTENDED_CARD,
)

CORE_METHODS = {
    name: (operation, version)
    for operation in OPERATIONS
    for version in Version
    if (name := operation.named(version))
}
"""The methods of JSON-RPC, with the version that each belongs to."""


ROUTES: dict[str, dict[str, Operation]] = {}
"""The operations of HTTP+JSON by path and verb, for each version below its prefix."""
# A router tries paths in this order: ``{id}:cancel`` has to come before ``{id}``.
for _operation in sorted(
    OPERATIONS,
    key=lambda one: (one.path.count("/"), ":" not in one.path, one.path, "GET" not in one.verbs),
):
    if _operation is not GET_EXTENDED_CARD:
        ROUTES.setdefault(_operation.path, {}).update(dict.fromkeys(_operation.verbs, _operation))

CARD_PATHS = (
    (GET_EXTENDED_CARD.path, Version.V1),
    ("/v1/card", Version.V03),
    ("/agent/authenticatedExtendedCard", Version.V03),
)
"""The paths of the extended card, and the version of the card at each."""
