"""A message that starts or continues a task: what it consists of, and how it is recorded.

``tasks.sending`` and ``tasks.continuing`` have the rules. A message is recorded with the
transaction that accepts or refuses it, so that a repeat is recognised: it leads to the task of the
first, and one that was refused for good stays refused.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, NamedTuple

import orjson
from pydantic import ConfigDict, Field
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
from opencode_a2a.log.log import ReadableLog
from opencode_a2a.messages import NO_ROUTING, Message, PushConfig, Routing, TurnRequest
from opencode_a2a.rights import UNLIMITED, Budget
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.sessions import PLAN_FIELD

FIRST_ROUTING = frozenset({"session_id", "directory", "workspace_id", "model", "hops"})
"""The fields of a routing that 2.0.0 had."""
ROUTING = tuple(one.name for one in fields(Routing))


@dataclass(frozen=True, slots=True)
class SendCommand:
    """A message that starts a task, or continues the one it names."""

    __pydantic_config__ = ConfigDict(serialize_by_alias=True)

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
    trace: str | None = None
    """The trace that the message came with, as ``telemetry.Trace`` stores it."""
    seen_at_sender: Annotated[Mapping[TaskId, int], Field(alias="seen")] = field(
        default_factory=dict[TaskId, int]
    )
    """In a forwarded message: by task, what ``SeenRequests.newest_in_time`` says at the replica
    that it came to. A mapping because 2.0 reads one; it has one entry at most. The alias is its
    name in the mail, which replicas of 2.0 know."""
    sign_in: int | None = None
    """The sign-in (``Status.sign_in``) that the message is about: it is refused if the task waits
    for another, or for none. It does not identify the message."""

    @property
    def digest(self) -> bytes:
        """A hash of the content: a repeat has the same message id and the same digest.

        For a message on a task, message and task are the content: a client that repeats it may
        have learnt the context meanwhile.
        """
        content: tuple[object, ...] = (self.message, self.task_id)
        if self.task_id is None:
            routing = self.request.routing
            # For 2.0, until 3.0: a field that was added since counts only if it is set, so that a
            # repeat of a message that such a version took is recognised.
            counted = {
                name: value
                for name in ROUTING
                if (value := getattr(routing, name)) != getattr(NO_ROUTING, name)
                or name in FIRST_ROUTING
            }
            content += (
                self.context_id,
                orjson.Fragment(orjson.dumps(counted)),  # in the order of its fields
                self.output_modes,
            )
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).digest()


class Handled(NamedTuple):
    """What ``Submitted`` says, as replicas send it to each other: with the id of the task alone."""

    task_id: TaskId
    seq: int
    repeat: bool = False


class AnswerExpectedError(UnsupportedOperationError):
    """A message is not the answer that tasks of its context wait for; ``task_ids`` names them.

    ``server.operations`` adds the questions of these tasks.
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


def message_write(
    command: SendCommand,
    log: ReadableLog,
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
    refused = None if refusal is None else dump_refusal(refusal)

    def write(connection: Connection) -> None:
        for digest in digests:
            task_rows.add_message(connection, *message, task_no, digest, refused)
        if request is not None:
            task_rows.set_request(connection, task_no, orjson.dumps(request))

    return write


def dump_refusal(refusal: ServiceError) -> bytes:
    """Encode a refusal for ``load_refusal``, also that of an earlier version.

    An error between replicas has a form of its own (``dump_error`` in ``cluster.mailbox``).
    """
    name = next(name for name, kind in REFUSALS.items() if isinstance(refusal, kind))
    wrong = [(violation.field, violation.description) for violation in refusal.violations]
    return orjson.dumps([name, refusal.message, wrong, refusal.data])


def load_refusal(refusal: bytes) -> ServiceError:
    """Return the refusal that is stored with a message."""
    name, text, wrong, data = orjson.loads(refusal)
    violations = tuple(Violation(*violation) for violation in wrong)
    return REFUSALS[name](text, violations=violations, **data)


async def earlier_task(
    database: Database, command: SendCommand, task_id: str | None = None
) -> TaskRow | None:
    """Return the task that this very message led to before; raise its refusal again.

    With ``task_id`` also if the message named that task then, and does not do so now.
    """
    message = (command.principal, command.message.message_id)
    digests = dict.fromkeys((command.digest, replace(command, task_id=task_id).digest))

    def read(connection: Connection) -> tuple[TaskRow, bytes | None] | None:
        found = (task_rows.find_message(connection, *message, digest) for digest in digests)
        return next(filter(None, found), None)

    row, refusal = await database.read(read) or (None, None)
    if refusal is not None:
        raise load_refusal(refusal)
    return row


# Whether its prompt can be run

UNASKED = (
    "A command can run shell commands without permission, and this credential or profile has to "
    "ask for, or refrain from, changes; send a message without metadata.opencode.command"
)
UNATTENDED = (
    "cannot be used where nobody is waited for (unattended); set metadata.opencode.agent to plan "
    "to get a plan as the answer"
)


async def check_prompt(principal: Principal, request: TurnRequest, turns: SharedTurns) -> None:
    """Refuse a prompt that cannot be run, or not with these rights, before it is stored."""
    routing = request.routing
    if routing.command is not None:
        if (request.rights & turns.rights).changes != "allow":
            raise AuthorizationForbiddenError(UNASKED)
        if any(part.text is None for part in request.prompt):
            raise InvalidParamsError.of(
                "message.parts", "must be text alone: a command takes no files"
            )
    await turns.sessions.check(principal, routing, request.text)
    check_attended(request)


def check_attended(request: TurnRequest) -> None:
    """Refuse a plan where nobody is there to approve it."""
    if request.routing.plan and not request.rights.waits:
        raise InvalidParamsError.of(PLAN_FIELD, UNATTENDED)
