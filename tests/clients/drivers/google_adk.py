"""Google's Agent Development Kit: a remote agent behind its runner.

Shown is what ADK keeps of a run, in its session and as the result of an ``AgentTool``: the texts of
all events that are not partial, thoughts apart. The prompt of a call that waits for a person is
shown too; the next text is the response to it.

usage: python google_adk.py URL TOKEN {legacy,new} {blocking,streaming}
"""

import asyncio
import sys

import httpx
from a2a.client import ClientConfig, ClientFactory
from google.adk.agents.remote_a2a_agent import AGENT_CARD_WELL_KNOWN_PATH, RemoteA2aAgent
from google.adk.runners import InMemoryRunner
from google.genai import types
from talk import Say, converse

url, token, converter, delivery = sys.argv[1:]


async def begin() -> Say:
    http = httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60)
    config = ClientConfig(
        httpx_client=http,
        streaming=delivery == "streaming",
        supported_protocol_bindings=["JSONRPC", "HTTP+JSON"],  # as ADK's own factory has it
    )
    agent = RemoteA2aAgent(
        name="opencode",
        agent_card=f"{url}{AGENT_CARD_WELL_KNOWN_PATH}",
        a2a_client_factory=ClientFactory(config),
        use_legacy=converter == "legacy",
    )
    runner = InMemoryRunner(agent=agent, app_name="clients")
    session = await runner.session_service.create_session(app_name="clients", user_id="person")
    waiting: list[types.FunctionCall] = []

    async def say(text: str) -> str:
        parts = [types.Part(text=text)]
        if waiting:
            call = waiting.pop()
            response = types.FunctionResponse(id=call.id, name=call.name, response={"result": text})
            parts = [types.Part(function_response=response)]
        shown: list[str] = []
        async for event in runner.run_async(
            user_id="person",
            session_id=session.id,
            new_message=types.Content(role="user", parts=parts),
        ):
            if event.partial:
                continue
            texts = [event.error_message or ""]
            for part in event.content.parts or [] if event.content else []:
                if part.text and not part.thought:
                    texts.append(part.text)
                elif call := part.function_call:
                    waiting.append(call)
                    texts += [str(value) for value in (call.args or {}).values()]
            shown.append("".join(texts))
        return "\n".join(filter(None, shown))

    return say


asyncio.run(converse(begin))
