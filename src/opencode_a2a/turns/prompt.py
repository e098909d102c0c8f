"""The prompt: what is sent to OpenCode, to which model, and the call that carries it.

``turn`` sends one for each turn, and once more if OpenCode turns out not to have taken it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.ids import MessageId, ModelRef, SessionId
from opencode_a2a.messages import PromptPart, Routing
from opencode_a2a.opencode.client import OpenCode
from opencode_a2a.opencode.types import FileInput, InputPart, MessageWithParts, Prompt, TextInput
from opencode_a2a.turns.sessions import KNOWN_SESSIONS, BoundSession


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a turn prompts, and where: stored with the task, so that a restart can go on with it."""

    prompt: tuple[PromptPart, ...]
    routing: Routing
    user_message_id: MessageId


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

    async def send(
        self, session: BoundSession, request: TurnRequest, canceled: Callable[[], bool]
    ) -> MessageWithParts:
        """Prompt a session, unless the turn is canceled first; OpenCode answers at its end."""
        session_id, named, default = session.session_id, request.routing.model, self._defaults.model
        if named is None:
            # None leaves it to OpenCode.
            model = default or self._before.pop(session_id, None)
        else:
            model = named
            if default is None and session_id not in self._before:
                before = (await self._opencode.session(session_id)).model
                if before is None:
                    config = await self._opencode.config(at=session.location)
                    before = ModelRef.parse(config.model)
                self._before[session_id] = before
                if len(self._before) > KNOWN_SESSIONS:
                    self._before.popitem(last=False)
        if canceled():  # while the model was asked for: OpenCode need not hear of it
            raise asyncio.CancelledError
        inputs: list[InputPart] = []
        for part in request.prompt:
            if part.text is not None:
                inputs.append(TextInput(text=part.text))
            else:
                mime = part.media_type or "text/plain"
                url = f"data:{mime};base64,{part.data}"
                inputs.append(FileInput(mime=mime, url=url, filename=part.filename))
        prompt = Prompt(
            parts=inputs,
            message_id=request.user_message_id,
            model=model,
            agent=self._defaults.agent,
            system=self._defaults.system,
            variant=self._defaults.variant,
        )
        return await self._opencode.prompt(session_id, prompt, at=session.location)
