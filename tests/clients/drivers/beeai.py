"""BeeAI Framework: a remote agent as an agent.

usage: python beeai.py URL TOKEN {blocking,streaming}
"""

import asyncio
import sys

from beeai_framework.adapters.a2a.agents.agent import (
    A2AAgent,
    A2AAgentParameters,
    HttpxAsyncClientParameters,
)
from beeai_framework.memory import UnconstrainedMemory
from talk import Say, converse

url, token, delivery = sys.argv[1:]


async def begin() -> Say:
    headers = {"Authorization": f"Bearer {token}"}
    agent = A2AAgent(
        url=url,
        memory=UnconstrainedMemory(),
        parameters=A2AAgentParameters(
            httpx_async_client=HttpxAsyncClientParameters(headers=headers)
        ),
    )

    async def say(text: str) -> str:
        output = await agent.run(text, streaming=delivery == "streaming")
        return output.last_message.text

    return say


asyncio.run(converse(begin))
