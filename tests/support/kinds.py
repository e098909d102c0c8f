"""Servers that answer as the kinds of OpenCode do, and as other programs do.

The answers are in ``tests/kinds/answers.json``. Each kind says how its answers are known: ``run``
means that they were recorded from that program, ``read`` that they were put together from what
users and maintainers report. The contracts there hold only what a driver has to look at; those of
2.0.4 and later are that of the branch, changed as reported.
"""

from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import orjson

from opencode_a2a.net.exchange import HttpResponse

KINDS: dict[str, Any] = orjson.loads(
    (Path(__file__).parents[1] / "kinds" / "answers.json").read_bytes()
)


def answer_of(name: str, path: str) -> HttpResponse:
    """Return what a kind answers at a path."""
    answers = KINDS[name]["answers"]
    status, media_type, content = answers.get(path, answers["*"])
    body = content.encode() if isinstance(content, str) else orjson.dumps(content)
    return HttpResponse(status, {"content-type": media_type} if media_type else {}, body)


@contextmanager
def answering(name: str, port: int = 0) -> Generator[str]:
    """Run a server that answers as a kind does, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            response = answer_of(name, self.path)
            self.send_response(response.status)
            for header, value in response.headers.items():
                self.send_header(header, value)
            self.send_header("content-length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

        def log_message(self, *_: object) -> None:  # type: ignore[override] # nothing is logged
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
