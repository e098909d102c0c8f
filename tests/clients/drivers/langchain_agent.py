"""LangChain: a remote agent as a runnable.

usage: python langchain_agent.py URL TOKEN {blocking,streaming}
"""

import asyncio
import sys
import uuid

from langchain_remote_a2a_agent import RemoteAgent
from talk import Say, converse

url, token, delivery = sys.argv[1:]


async def begin() -> Say:
    agent = RemoteAgent(
        name="opencode",
        agent_card_url=f"{url}/.well-known/agent-card.json",
        headers={"Authorization": f"Bearer {token}"},
        use_streaming=delivery != "blocking",
    )
    config = {"configurable": {"thread_id": str(uuid.uuid4())}}

    async def say(text: str) -> str:
        if delivery == "streaming":
            pieces = [piece async for piece in agent.astream(text, config)]
            return "".join(message.content for piece in pieces for message in piece["messages"])
        return (await agent.ainvoke(text, config))["messages"][-1].content

    return say


asyncio.run(converse(begin))
