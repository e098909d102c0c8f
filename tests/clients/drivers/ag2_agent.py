"""AG2: a remote agent as the model of an agent; what it asks is put to a person by a hook.

usage: python ag2_agent.py URL TOKEN {polling,streaming}
"""

import asyncio
import sys

from ag2 import Agent
from ag2.a2a import A2AConfig
from ag2.events import HumanInputRequest
from talk import Say, converse

url, token, delivery = sys.argv[1:]


async def begin() -> Say:
    asked: asyncio.Queue[str] = asyncio.Queue()
    answered: asyncio.Queue[str] = asyncio.Queue()

    async def ask_person(event: HumanInputRequest) -> str:
        asked.put_nowait(event.content)
        return await answered.get()

    config = A2AConfig(
        card_url=url,
        headers={"Authorization": f"Bearer {token}"},
        streaming=delivery == "streaming",
    )
    agent = Agent("opencode", config=config, hitl_hook=ask_person)
    running: asyncio.Task[str] | None = None

    async def answer(text: str) -> str:
        return (await agent.ask(text)).body or ""

    async def say(text: str) -> str:
        nonlocal running
        if running is None:
            running = asyncio.create_task(answer(text))
        else:
            answered.put_nowait(text)
        question = asyncio.create_task(asked.get())
        await asyncio.wait((running, question), return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return question.result()
        question.cancel()
        ended, running = running, None
        return ended.result()

    return say


asyncio.run(converse(begin))
