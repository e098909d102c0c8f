"""What may be asked of the tasks: values that ``server`` makes and ``TaskService`` takes."""

from dataclasses import dataclass

from opencode_a2a.ids import Principal
from opencode_a2a.messages import ANYWHERE, Message, PromptPart, Routing
from opencode_a2a.tasks.state import State, TaskState


@dataclass(frozen=True, slots=True)
class SendCommand:
    """A message that starts a task, or goes on with the one it names."""

    principal: Principal
    message: Message
    prompt: tuple[PromptPart, ...]
    task_id: str | None = None
    context_id: str | None = None
    routing: Routing = ANYWHERE
    output_modes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """Which tasks to list; newest status first."""

    context_id: str | None = None
    state: State | None = None
    since: int | None = None
    """Milliseconds: only tasks whose status is from then or later."""
    size: int = 50
    token: str | None = None
    artifacts: bool = False
    history: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    tasks: list[TaskState]
    next_token: str
    """Empty on the last page."""
    size: int
    total: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last entry that a reader has: its number, and how often the task had been recovered."""

    seq: int
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.seq}.{self.epoch}" if self.epoch else str(self.seq)

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read what ``str`` wrote; raise ValueError for anything else."""
        seq, _, epoch = text.partition(".")
        if not (seq.isascii() and seq.isdigit() and len(seq) < 16):
            raise ValueError("not a cursor")
        if epoch and not (epoch.isascii() and epoch.isdigit() and len(epoch) < 10):
            raise ValueError("not a cursor")
        return cls(int(seq), int(epoch or 0))
