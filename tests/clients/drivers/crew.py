"""CrewAI: the delegation to a remote agent, as its agents run it, without a model of their own.

usage: python crew.py URL TOKEN {polling,streaming}
"""

import asyncio
import sys

from crewai.a2a.auth import BearerTokenAuth
from crewai.a2a.config import A2AClientConfig
from crewai.a2a.updates import PollingConfig, StreamingConfig
from crewai.a2a.utils.delegation import aexecute_a2a_delegation
from talk import Say, converse

url, token, delivery = sys.argv[1:]


async def begin() -> Say:
    config = A2AClientConfig(
        endpoint=f"{url}/.well-known/agent-card.json",
        auth=BearerTokenAuth(token=token),
        updates=StreamingConfig() if delivery == "streaming" else PollingConfig(interval=0.2),
    )
    history = []
    turns = 0
    task_id = context_id = None

    async def say(text: str) -> str:
        nonlocal history, turns, task_id, context_id
        turns += 1
        # As crewai.a2a.wrapper._delegate_to_a2a has it.
        result = await aexecute_a2a_delegation(
            endpoint=str(config.endpoint),
            auth=config.auth,
            timeout=config.timeout,
            task_description=text,
            context_id=context_id,
            task_id=task_id,
            conversation_history=history,
            turn_number=turns,
            updates=config.updates,
            transport=config.transport,
            accepted_output_modes=config.accepted_output_modes,
        )
        history = result.get("history", [])
        if history:
            task_id = history[-1].task_id or task_id
            context_id = history[-1].context_id or context_id
        return result.get("result") or result.get("error") or ""

    return say


asyncio.run(converse(begin))
