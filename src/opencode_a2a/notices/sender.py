"""What a person is told of a task, and when.

``push.loop`` claims a row for each task and target, and gives it every change of the task's state
in the order of the log, once it is stored. Most changes are passed over; a request for a person is
told if it still waits, and so is the end. So there is one message for each request, and one for the
end. One is repeated if the service has not got the answer that it was taken, or dies before noting
that.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from opencode_a2a.a2a.texts import TITLES
from opencode_a2a.clock import now_ms
from opencode_a2a.config import InterruptSettings, NoticeEntry, QuietHours, Settings
from opencode_a2a.events import Interrupted
from opencode_a2a.ids import Principal
from opencode_a2a.log.state import Entry, State
from opencode_a2a.log.stored import load_task
from opencode_a2a.notices.links import Signer, Subject, sign_in_deadline, sign_in_id
from opencode_a2a.notices.targets import Http, Note, Target, made_of
from opencode_a2a.push.notification import Failed, Gone, Held, Notification, Receipt, Skipped
from opencode_a2a.store import interrupts, tasks
from opencode_a2a.store.database import Database
from opencode_a2a.store.webhooks import HookRow

_ENDED = {
    State.COMPLETED: "A task is completed",
    State.FAILED: "A task has failed",
    State.CANCELED: "A task was canceled",
    State.REJECTED: "A task was rejected",
}


class NoticeSender:
    """Tells people of tasks; one for the whole service."""

    def __init__(
        self, settings: Settings, signer: Signer, database: Database, browsers: Target | None
    ) -> None:
        """``browsers`` are the target ``webpush``, if it is switched on."""
        self._title = ": ".join(filter(None, (settings.a2a.title, settings.a2a.project)))
        self._interrupts: InterruptSettings = settings.interrupts
        self._signer = signer
        self._database = database
        seconds = settings.push.timeout_seconds
        self.http = Http(seconds)
        self._quiet: QuietHours | None = settings.notices.notify_quiet
        self._entries: Mapping[str, NoticeEntry] = {
            entry.name: entry for entry in settings.notices.notify
        }
        self.targets: dict[str, Target] = {
            name: browsers
            if browsers is not None and entry.kind == "webpush"
            else made_of(entry, self.http, seconds)
            for name, entry in self._entries.items()
        }

    def names_for(self, principal: Principal) -> Sequence[str]:
        """Return the names of the targets for the tasks of a principal."""
        return [name for name, entry in self._entries.items() if entry.concerns(principal)]

    async def send(
        self, row: HookRow, notification: Notification, _: Callable[[], None]
    ) -> Receipt:
        """Tell of a change of state, if there is something to tell; what is asked is not shown."""
        entry = self._entries.get(urlsplit(row.url).hostname or "")
        if entry is None or not entry.concerns(row.principal):
            # While settings are rolled out, another replica may have it.
            return (Failed if self._database.census.has_others else Gone)("no_target")
        note = await self._note(row, notification, entry)
        if note is None:
            return Skipped("skipped")
        if self._quiet is not None and (seconds := self._quiet.left(now_ms() / 1000)):
            return Held("quiet", seconds)
        return await self.targets[entry.name].send(row.principal, note)

    async def _note(
        self, row: HookRow, notification: Notification, entry: NoticeEntry
    ) -> Note | None:
        """Return what is to be told now; None if nobody has to know."""
        what, ref = notification.what, notification.ref
        key = f"{row.key}-{notification.seq}"
        status = what.status
        if status is not None and status.state.terminal:
            if "ends" not in entry.about:
                return None
            url = self._signer.task_url(ref.id)
            return Note(
                self._title, f"{_ENDED[status.state]}.", url, "Open the console", False, key
            )
        if "waits" not in entry.about or not isinstance(what, Entry) or status is None:
            return None
        if isinstance(what.event, Interrupted):
            asked = await self._database.read(interrupts.find, what.event.request_id)
            if asked is None or asked.task_id != ref.id or asked.resolution is not None:
                return None
            if asked.expires_at <= now_ms():
                return None
            subject = Subject(asked.request_id, asked.principal, asked.expires_at)
            deadline = asked.expires_at
            text = _asks(what.event)
        elif status.sign_in is not None:
            task = await self._database.read(tasks.load_by_number, row.task_no)
            if task is None or load_task(task).status.sign_in != status.sign_in:
                return None
            seconds = self._interrupts.interrupt_request_ttl_seconds
            subject = Subject(sign_in_id(ref.id, status.sign_in), ref.principal, status.sign_in)
            deadline = sign_in_deadline(status.sign_in, seconds)
            text = "The model provider refused the key; somebody has to sign in."
        else:
            return None
        text = f"{text} Answer by {self._clock(deadline)}."
        return Note(self._title, text, self._signer.link(subject), "See and answer", True, key)

    def _clock(self, at: int) -> str:
        """Return a time for people, in the time zone of the quiet hours or of this machine."""
        zone = ZoneInfo(self._quiet.zone) if self._quiet and self._quiet.zone else None
        return f"{datetime.fromtimestamp(at / 1000, zone).astimezone(zone):%H:%M %Z}"

    async def aclose(self) -> None:
        await self.http.aclose()


def _asks(asked: Interrupted) -> str:
    """Say what is asked, without a word of the agent."""
    if asked.type == "plan":
        return "OpenCode asks whether to carry out a plan."
    if asked.type == "question":
        count = len(asked.questions)
        return f"OpenCode asks {count} questions." if count > 1 else "OpenCode asks a question."
    # Other permissions are named by whoever made the tool.
    wants = TITLES.get(asked.permission or "", "use a tool")
    return f"OpenCode asks for permission to {wants}."
