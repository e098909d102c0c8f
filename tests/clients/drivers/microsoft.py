"""Microsoft Agent Framework: a remote agent as an agent.

usage: python microsoft.py URL TOKEN {blocking,streaming}
"""

import asyncio
import sys

import httpx
from a2a.client import A2ACardResolver
from agent_framework_a2a import A2AAgent
from talk import Say, converse

url, token, delivery = sys.argv[1:]


async def begin() -> Say:
    http = httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60)
    card = await A2ACardResolver(http, url).get_agent_card()
    agent = A2AAgent(agent_card=card, http_client=http)
    session = agent.create_session()

    async def say(text: str) -> str:
        if delivery == "streaming":
            return (await agent.run(text, session=session, stream=True).get_final_response()).text
        return (await agent.run(text, session=session)).text

    return say


asyncio.run(converse(begin))
