"""What our methods return in A2A's own terms, in the spelling of a line.

``extensions`` asks for it through ``calls.Spelling``; nothing here knows the methods.
"""

from opencode_a2a.a2a import metadata
from opencode_a2a.a2a.spelling import spell_message, spell_state
from opencode_a2a.a2a.texts import moment
from opencode_a2a.a2a.versions import Dialect, Version
from opencode_a2a.events import Interrupted, JsonObject
from opencode_a2a.ids import ContextId, Principal, SessionId, TaskId
from opencode_a2a.messages import Message
from opencode_a2a.tasks.state import State, TaskRef

_DIALECTS = {Version.V1: Dialect.V1, Version.V03: Dialect.V03}


class Views:
    """Tasks, messages and prompts as both lines write them."""

    def task(
        self, session_id: SessionId, context_id: str, at: int, about: JsonObject, line: str
    ) -> JsonObject:
        """Return a session as a task that has ended."""
        dialect = _DIALECTS[Version(line)]
        state = spell_state(State.COMPLETED, dialect)
        told: JsonObject = {
            "id": session_id,
            "contextId": context_id,
            "status": {"state": state, "timestamp": moment(at)},
            "metadata": about,
        }
        return {"kind": "task", **told} if dialect is Dialect.V03 else told

    def message(self, message: Message, context_id: str, line: str) -> JsonObject:
        ref = TaskRef(TaskId(""), ContextId(context_id), Principal(""))
        spelled = spell_message(message, ref, _DIALECTS[Version(line)]) or {}
        return {name: value for name, value in spelled.items() if name != "taskId"}

    def interrupt(self, asked: Interrupted) -> JsonObject:
        return metadata.asked(asked)
