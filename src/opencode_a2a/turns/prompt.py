"""The prompt: what is sent to OpenCode, to which model, and the call that carries it.

``turn`` sends one for each turn, and once more if OpenCode turns out not to have taken it.
"""

from collections import OrderedDict
from collections.abc import Sequence

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.ids import MessageId, ModelRef, SessionId
from opencode_a2a.messages import PromptPart
from opencode_a2a.opencode.client import OpenCode
from opencode_a2a.opencode.types import FileInput, InputPart, MessageWithParts, Prompt, TextInput
from opencode_a2a.turns.sessions import KNOWN_SESSIONS, BoundSession


class Prompts:
    """What all prompts share: the defaults of the deployment, and each session's own model.

    A model that a request names is meant for that request, but OpenCode goes on with it in the same
    session; the prompt after it therefore names the model from before.
    """

    def __init__(self, opencode: OpenCode, defaults: OpenCodeSettings) -> None:
        self._opencode = opencode
        self._defaults = defaults
        self._before: OrderedDict[SessionId, ModelRef | None] = OrderedDict()
        """The model of each session whose last prompt named another."""

    async def choose(self, session: BoundSession, named: ModelRef | None) -> ModelRef | None:
        """Return the model to send; None leaves it to OpenCode."""
        default, session_id = self._defaults.model, session.session_id
        if named is None:
            return default or self._before.pop(session_id, None)
        if default is None and session_id not in self._before:
            model = (await self._opencode.session(session_id)).model
            if model is None:
                model = ModelRef.parse((await self._opencode.config(at=session.location)).model)
            self._before[session_id] = model
            if len(self._before) > KNOWN_SESSIONS:
                self._before.popitem(last=False)
        return named

    async def send(
        self,
        session: BoundSession,
        message_id: MessageId,
        parts: Sequence[PromptPart],
        model: ModelRef | None,
    ) -> MessageWithParts:
        """Prompt a session; OpenCode answers when the turn has ended."""
        inputs: list[InputPart] = []
        for part in parts:
            if part.text is not None:
                inputs.append(TextInput(text=part.text))
            else:
                mime = part.media_type or "text/plain"
                url = f"data:{mime};base64,{part.data}"
                inputs.append(FileInput(mime=mime, url=url, filename=part.filename))
        prompt = Prompt(
            parts=inputs,
            message_id=message_id,
            model=model,
            agent=self._defaults.agent,
            system=self._defaults.system,
            variant=self._defaults.variant,
        )
        return await self._opencode.prompt(session.session_id, prompt, at=session.location)
