"""Agno: its own client of A2A, and how its remote agents make a run of what it says.

usage: python agno_client.py URL TOKEN {blocking,streaming}
"""

import asyncio
import sys

from agno.client.a2a import A2AClient
from agno.client.a2a.utils import map_stream_events_to_run_events, map_task_result_to_run_output
from talk import Say, converse

url, token, delivery = sys.argv[1:]


async def begin() -> Say:
    client = A2AClient(url, timeout=60, protocol="json-rpc")
    headers = {"Authorization": f"Bearer {token}"}
    context: str | None = None

    async def say(text: str) -> str:
        nonlocal context
        if delivery == "blocking":
            result = await client.send_message(text, context_id=context, headers=headers)
            context = result.context_id
            return map_task_result_to_run_output(result, "opencode").content or ""
        shown = ""
        events = client.stream_message(text, context_id=context, headers=headers)
        async for event in map_stream_events_to_run_events(events, "opencode"):
            context = event.session_id or context
            if event.event == "RunContent":
                shown += event.content or ""
        return shown

    return say


asyncio.run(converse(begin))
