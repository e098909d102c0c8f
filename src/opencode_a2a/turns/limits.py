"""Time in a turn: when to look again, when the turn is over, and when it is given up.

``turn`` asks. A turn may take any time; silence, an endless loop of steps, a retry far ahead and
what the settings limit end it.
"""

import asyncio

from opencode_a2a.config import Settings
from opencode_a2a.events import Failure, FailureType
from opencode_a2a.opencode.reader import Reader
from opencode_a2a.opencode.turn_state import TurnState
from opencode_a2a.opencode.types import StatusRetry
from opencode_a2a.telemetry import now_ms

TICK_SECONDS = 5.0
"""Seconds between two looks at a turn that has only just become quiet."""
LONGEST_TICK_SECONDS = 20.0
"""The same for a turn that has been quiet for long."""
DRAIN_SECONDS = 2.0
"""Seconds in which events may still arrive after the end of the turn is known."""
UNBEGUN_SECONDS = 15.0
"""Seconds that an OpenCode which gets no CPU time may take from storing a message to working on
it."""

SILENT = "OpenCode has been silent for {:.0f} s; the turn was stopped. Send the message again."
LONG = "The turn took longer than {:.0f} s and was stopped. Ask for less at once."
COSTLY = "The turn has cost {:.4g} and may cost {:g}; it was stopped."
ENDLESS = "The model was asked {} times without coming to an end; the turn was stopped."
RETRY_FAR = "The model provider asks to wait too long ({}); the turn was stopped. Try again later."


class TurnLimits:
    """The times of one turn, on the clock of the event loop, and what follows from them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.turn
        self._longest = settings.opencode.timeout_stream
        self.tick = min(TICK_SECONDS, settings.turn.silence_seconds, self._longest or TICK_SECONDS)
        """Seconds without an event after which the turn is looked at."""
        self.now = asyncio.get_running_loop().time
        self._began = self.heard = self.now()
        """When the turn last gave a sign of life."""
        self.doubted = self._began
        """When a report of OpenCode turned out to be wrong or stale. Snapshots requested before
        this moment do not count."""
        self.compared = self._began
        """When the turn was last compared with OpenCode's store."""
        self.ended: float | None = None
        """When the end of the turn was first known."""
        self.unlisted = False
        """OpenCode could not list its pending requests, so that one may have been missed."""
        self._retry: StatusRetry | None = None
        """The last retry that was judged near enough to wait for."""

    # When to look again

    @property
    def quiet(self) -> float:
        """Seconds since the last sign of life."""
        return self.now() - self.heard

    @property
    def pause(self) -> float:
        """Seconds until the next look at the turn.

        The longer it has been quiet, the less a moment matters: a thousand turns that wait for
        their models should cost next to nothing.
        """
        return max(self.tick, min(self.quiet / 2, LONGEST_TICK_SECONDS))

    @property
    def comparison_due(self) -> bool:
        """Whether to compare with the store: events get lost without a gap as well.

        That is after 5 s, 20 s, 80 s, since each comparison reads the messages of the session.
        """
        return self.now() - self.compared >= (self.tick if self.unlisted else self.quiet * 3 / 4)

    # When it is over

    def drained(self, state: TurnState) -> bool:
        """Whether the events have caught up with the end of the turn, or are too late.

        OpenCode answers the prompt call before it has sent the last events.
        """
        if self.ended is None:
            self.ended = self.now()
        late = self.now() - self.ended >= DRAIN_SECONDS
        return late or (state.complete and state.messages.diff_known)

    def idle_is_the_end(self, state: TurnState, *, prompt_running: bool) -> bool:
        """Whether a session that OpenCode does not list as busy is done with the turn.

        An OpenCode that gets no CPU time stores and announces a message seconds before it lists the
        session, so a second sign is needed: the answer to the prompt, its last message, or, where
        neither can come any more, that it has had the time to begin.
        """
        if prompt_running:
            return state.complete
        messages = state.messages
        if (messages.answers and not messages.unanswered) or state.tree.last_error is not None:
            return True
        return self.now() - max(self.heard, self.doubted) > UNBEGUN_SECONDS

    # When it is given up

    @property
    def silence(self) -> Failure | None:
        """Why to give the turn up, when OpenCode has been silent for too long."""
        seconds = self._settings.silence_seconds
        if self.quiet <= seconds:
            return None
        return Failure(FailureType.UPSTREAM_TIMEOUT, SILENT.format(seconds))

    def exceeded(self, reader: Reader) -> Failure | None:
        """Return why to give up a turn that does not end by itself."""
        steps = len(reader.state.messages.answers)
        if steps > self._settings.max_steps:
            return Failure(FailureType.UPSTREAM_ENDLESS, ENDLESS.format(steps))
        most = self._settings.max_cost
        if most and (cost := reader.state.cost) >= most:
            return Failure(FailureType.BUDGET_EXHAUSTED, COSTLY.format(cost, most))
        retry = reader.state.tree.retry
        if retry is not None and retry is not self._retry:
            # Judged once, when it is heard: the wall clock may jump while it is waited for.
            self._retry = retry
            if retry.next - now_ms() > self._settings.max_retry_wait_seconds * 1000:
                return Failure(FailureType.UPSTREAM_QUOTA_EXCEEDED, RETRY_FAR.format(retry.message))
        if self._longest is not None and self.now() - self._began > self._longest:
            return Failure(FailureType.UPSTREAM_TIMEOUT, LONG.format(self._longest))
        return None
