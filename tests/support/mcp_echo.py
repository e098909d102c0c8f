"""A tool server for OpenCode that has one tool: it says what it was given.

Run as a program it speaks the Model Context Protocol on standard input and output.
"""

import json
import sys
from typing import Any

TOOL = {
    "name": "say",
    "description": "Say a word.",
    "inputSchema": {"type": "object", "properties": {"word": {"type": "string"}}},
}


def answer(method: str, params: Any) -> Any:
    match method:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "echo", "version": "1"},
            }
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": f"said {params['arguments']['word']}"}]}
        case _:
            return {}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = answer(request["method"], request.get("params"))
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
