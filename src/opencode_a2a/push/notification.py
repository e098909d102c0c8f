"""What ``push.loop`` gives to a sender, and what it gets back.

``push.sender`` sends to webhooks, ``notices.sender`` to people.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from opencode_a2a.log.state import Entry, TaskRef, TaskState
from opencode_a2a.store.webhooks import HookRow


@dataclass(frozen=True, slots=True)
class Notification:
    """A change of state to send."""

    ref: TaskRef
    seq: int
    """The position of the webhook once the receiver has taken it."""
    ends: bool
    """Whether it is the last one of the task."""
    what: Entry | TaskState
    """The entry that changed the state; the task as it is now if the whole task is shown, or if
    the log with that entry is no longer kept."""
    whole: bool = False
    """Whether to show the whole task, or its status alone."""


# What became of one attempt: one of six things, each with a name for people, such as ``http_503``.
# What follows for the row is in ``Deliveries._after``.


@dataclass(frozen=True, slots=True)
class Taken:
    """The receiver has the notification."""

    name: str = "ok"


@dataclass(frozen=True, slots=True)
class Skipped:
    """There was nobody to tell; nothing was sent."""

    name: str


@dataclass(frozen=True, slots=True)
class Held:
    """Nothing may be sent for so many seconds, which is no failure."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The notification was not taken; another one may well be."""

    name: str
    retry_after: float | None = None
    """Seconds that the receiver wants us to wait."""


@dataclass(frozen=True, slots=True)
class Away:
    """The host could not be reached, so another notification would fail too."""

    name: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The receiver wants no more notifications."""

    name: str


Receipt = Taken | Skipped | Held | Failed | Away | Gone


class Sender(Protocol):
    async def send(
        self, row: HookRow, notification: Notification, shown: Callable[[], None], /
    ) -> Receipt:
        """Make one attempt to send a notification, within a time limit.

        If it shows what the task asks, ``shown`` is called as soon as it was sent: a person may
        answer before the receiver has replied.
        """
        ...
