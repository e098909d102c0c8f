"""Strands Agents: a remote agent as an agent.

usage: python strands_agents.py URL TOKEN
"""

import asyncio
import sys

import httpx
from a2a.client import ClientConfig
from strands.agent.a2a_agent import A2AAgent
from talk import Say, converse

url, token = sys.argv[1:]


async def begin() -> Say:
    http = httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60)
    agent = A2AAgent(endpoint=url, client_config=ClientConfig(httpx_client=http))

    async def say(text: str) -> str:
        return str(await agent.invoke_async(text)).removesuffix("\n")

    return say


asyncio.run(converse(begin))
