"""Additions: further messages for a turn that runs, queued until OpenCode has them.

``tasks`` adds them, ``turn`` sends them. When each is sent depends on its delivery: ``steer`` at
once, ``interrupt`` after what runs has been stopped, ``queue`` when the turn would end.
"""

import asyncio
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from opencode_a2a.events import Progressed
from opencode_a2a.ids import MessageId
from opencode_a2a.messages import Added, Delivery
from opencode_a2a.opencode.types import MessageWithParts


@dataclass(eq=False, slots=True)
class Addition:
    """A further message for a turn, until OpenCode has it."""

    added: Added
    stored: bool = False
    """Whether it is stored, and so may be sent."""
    cleared: bool = False
    """Whether the running work has been stopped for it."""
    sent: bool = False
    call: asyncio.Task[MessageWithParts] | None = None
    """The prompt call that it was last sent with."""
    tries: int = 0

    @property
    def prompt_id(self) -> MessageId:
        return self.added.request.user_message_id

    @property
    def delivery(self) -> Delivery:
        return self.added.request.delivery or "steer"

    def progress(self, status: str, reason: str | None = None) -> Progressed:
        """Return the event that tells the readers of the task what became of it."""
        message = self.added.message
        return Progressed(
            "message", status, message.message_id, message.subject, self.delivery, reason
        )


class Additions:
    """The messages that were added to a turn and that OpenCode is not known to have."""

    def __init__(self, added: Sequence[Added]) -> None:
        """Begin with those that an earlier process stored."""
        self._waiting = [Addition(one, stored=True) for one in added]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Addition]:
        return iter(self._waiting)

    def add(self, added: Added) -> Addition:
        """Queue a message that is about to be stored."""
        addition = Addition(added)
        self._waiting.append(addition)
        return addition

    def remove(self, addition: Addition) -> None:
        self._waiting.remove(addition)

    def take_delivered(self, prompts: Container[MessageId]) -> list[Addition]:
        """Remove those whose prompts OpenCode has, and return them."""
        delivered = [one for one in self._waiting if one.prompt_id in prompts]
        self._waiting = [one for one in self._waiting if one.prompt_id not in prompts]
        return delivered

    def next(self, *, failed: bool) -> Addition | None:
        """Return the message to send next; a turn that failed is not continued by a queued one."""
        for delivery in ("interrupt", "steer", "queue"):
            for addition in self._waiting:
                if addition.delivery == delivery and not (failed and delivery == "queue"):
                    return addition
        return None
