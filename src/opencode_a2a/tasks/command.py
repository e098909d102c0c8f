"""A message that a caller sends: what identifies it, how it is recorded, and what came of it.

``server.operations`` makes a ``SendCommand``, ``tasks.sending`` decides what becomes of it. A
message is recorded with the transaction that takes or refuses it, so that a repeat is recognised.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

import orjson
from sqlalchemy.engine import Connection

from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    InvalidParamsError,
    ServiceError,
    UnsupportedOperationError,
    Violation,
)
from opencode_a2a.ids import Principal, TaskId
from opencode_a2a.messages import ANYWHERE, Message, PushConfig, TurnRequest
from opencode_a2a.rights import UNLIMITED, Budget
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Write
from opencode_a2a.tasks.log import TaskLog
from opencode_a2a.tasks.mailbox import known_fields
from opencode_a2a.tasks.state import load_request

FIRST_ROUTING = frozenset({"session_id", "directory", "workspace_id", "model", "hops"})
"""The fields of a routing that 2.0.0 had."""
ANYWHERE_FIELDS = asdict(ANYWHERE)


@dataclass(frozen=True, slots=True)
class SendCommand:
    """A message that starts a task, or continues the one it names."""

    principal: Principal
    message: Message
    request: TurnRequest
    """The turn to run, if the message leads to one."""
    task_id: str | None = None
    context_id: str | None = None
    output_modes: tuple[str, ...] | None = None
    push: PushConfig | None = None
    """The webhook to store with the message. It does not identify it: a repeat may name another."""
    budget: Budget = UNLIMITED
    seen: Mapping[TaskId, int] = field(default_factory=dict[TaskId, int])
    """In a forwarded message: what the replica that it came to has shown (``Tails.seen``)."""

    @property
    def digest(self) -> bytes:
        """A hash of the content: a repeat has the same message id and the same digest.

        For a message on a task, message and task are the content: a client that repeats it may
        have learnt the context meanwhile.
        """
        content: tuple[object, ...] = (self.message, self.task_id)
        if self.task_id is None:
            routing = asdict(self.request.routing)
            # A field that a later version added counts only if it is set: a repeat of a message
            # that an earlier version took has to be recognised.
            for name in routing.keys() - FIRST_ROUTING:
                if routing[name] == ANYWHERE_FIELDS[name]:
                    del routing[name]
            content += (
                self.context_id,
                orjson.Fragment(orjson.dumps(routing)),  # in the order of its fields
                self.output_modes,
            )
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).digest()

    def dump(self) -> bytes:
        """Write the command down for another replica, with the secrets of its webhook."""
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "request"}
        return orjson.dumps(rest) + b"\n" + orjson.dumps(self.request)

    @classmethod
    def load(cls, data: bytes) -> "SendCommand":
        rest, _, request = data.partition(b"\n")
        sent = orjson.loads(rest)
        modes, push = sent["output_modes"], sent["push"]
        loaded = {
            "message": Message.load(sent["message"]),
            "request": load_request(request),
            "output_modes": None if modes is None else tuple(modes),
            "push": None if push is None else PushConfig(**known_fields(PushConfig, push)),
            "budget": Budget(**known_fields(Budget, sent["budget"])),
        }
        return cls(**known_fields(cls, sent | loaded))


@dataclass(frozen=True, slots=True)
class Submitted:
    """The task that a message led to, and where its log was before the message."""

    log: TaskLog
    seq: int
    repeat: bool = False
    """The message was here before; nothing was done for it now."""


class AnswerExpectedError(UnsupportedOperationError):
    """A message is not the answer that tasks of its context wait for; ``task_ids`` names them.

    ``server.operations`` adds what they ask.
    """

    @property
    def task_ids(self) -> list[str]:
        match self.data.get("task_ids"):
            case list() as ids:
                return [str(task_id) for task_id in ids]
            case _:
                return []


REFUSALS: Mapping[str, type[ServiceError]] = {
    "ANSWER_EXPECTED": AnswerExpectedError,
    **{
        kind.reason: kind
        for kind in (
            *(AuthorizationForbiddenError, InterruptNotFoundError, InterruptTypeMismatchError),
            *(InvalidParamsError, UnsupportedOperationError),
        )
    },
}
"""The errors that refuse an answer for good, by the name they are stored under: sent again, the
same message must not answer something else."""
FINAL_REFUSALS = tuple(REFUSALS.values())


def record(
    command: SendCommand,
    log: TaskLog,
    request: TurnRequest | None = None,
    refusal: ServiceError | None = None,
) -> Write:
    """Return the write that records a message on a task, with its next turn or its refusal.

    A repeat may name the task or only the context, whatever the message did.
    """
    message, task_no = (command.principal, command.message.message_id), log.no
    on_task = replace(command, task_id=log.ref.id)
    in_context = replace(command, task_id=None, context_id=log.ref.context_id)
    digests = dict.fromkeys(variant.digest for variant in (command, on_task, in_context))
    refused = None
    if refusal is not None:
        name = next(name for name, kind in REFUSALS.items() if isinstance(refusal, kind))
        wrong = [(violation.field, violation.description) for violation in refusal.violations]
        refused = orjson.dumps([name, refusal.message, wrong, refusal.data])

    def write(connection: Connection) -> None:
        for digest in digests:
            task_rows.add_message(connection, *message, task_no, digest, refused)
        if request is not None:
            task_rows.set_request(connection, task_no, orjson.dumps(request))

    return write


def load_refusal(refusal: bytes) -> ServiceError:
    """Return the refusal that ``record`` wrote."""
    name, text, wrong, data = orjson.loads(refusal)
    violations = tuple(Violation(*violation) for violation in wrong)
    return REFUSALS[name](text, violations=violations, **data)
