"""LiteLLM: an agent as a model, ``a2a/…``.

usage: python litellm_bridge.py URL TOKEN {blocking,streaming}
"""

import asyncio
import sys
from typing import Any

import litellm
from talk import Say, converse

url, token, delivery = sys.argv[1:]


async def begin() -> Say:
    messages: list[dict[str, str]] = []

    async def say(text: str) -> str:
        messages.append({"role": "user", "content": text})
        asked: dict[str, Any] = {
            "model": "a2a/opencode",
            "api_base": url,
            "api_key": token,
            "messages": messages,
        }
        if delivery == "streaming":
            stream = await litellm.acompletion(**asked, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            answer = "".join(pieces)
        else:
            answer = (await litellm.acompletion(**asked)).choices[0].message.content
        messages.append({"role": "assistant", "content": answer})
        return answer

    return say


asyncio.run(converse(begin))
