"""Whether OpenCode has worked out what a turn changed. Pure.

``turn`` asks before it reads the diff. OpenCode works it out anew after every step and once
more after the turn, and does not wait for it: a diff that is read too early lacks the last
changes. Each time ends with an update of the prompt's message.
"""

from collections.abc import Iterable

from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.opencode.events import MessageUpdated, PartUpdated
from opencode_a2a.opencode.feed import FeedItem
from opencode_a2a.opencode.types import (
    AssistantMessage,
    Message,
    PatchPart,
    UserMessage,
    UserSummary,
)


class Changes:
    def __init__(self, root: SessionId) -> None:
        self._root = root
        self._steps: set[MessageId] = set()
        self._told = 0
        self._any = False

    def hear(self, items: Iterable[FeedItem]) -> None:
        for item in items:
            match item:
                case PartUpdated(part=PatchPart(), session_id=self._root):
                    self._any = True
                case MessageUpdated(session_id=self._root):
                    self._message(item.info)
                case _:
                    pass

    def _message(self, info: Message) -> None:
        match info:
            case AssistantMessage(summary=False):
                self._steps.add(info.id)
            case UserMessage(summary=UserSummary()):
                self._told += 1
            case _:
                pass

    @property
    def known(self) -> bool:
        """Whether nothing changed, or the diff is up to date."""
        return not self._any or self._told > len(self._steps)
