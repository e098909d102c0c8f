"""The agent card, as clients of each line read it.

``app`` states the facts once; the documents are made and compressed at start and served as they
are. The public card is readable by both lines, with ``A2A-Version: 1.0`` it is the pure 1.0
form, at the old address the pure 0.3 form. Only what the service does is in it.
"""

import gzip
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Literal

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from opencode_a2a.a2a.types import EVERY_VERSION, VERSION_HEADER, Version
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.server.announced import METADATA_EXTENSIONS, Announcement
from opencode_a2a.server.content import INPUT_MODES, OUTPUT_MODES

BINDINGS = ("HTTP+JSON", "JSONRPC")
"""The preferred one first."""
DISCOVERY = ("/.well-known/agent-card.json", "/.well-known/agent.json")
"""Where the public card is, and where it was."""
_Form = Literal["1.0", "0.3", "hybrid"]


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the settings say about this agent."""

    name: str
    description: str
    version: str
    public_url: str
    documentation_url: str | None = None
    bearer: bool = True
    basic: bool = False
    demo: bool = False
    project: str | None = None
    lines: tuple[Version, ...] = EVERY_VERSION
    """Protocol lines that are spoken."""
    extensions: tuple[Announcement, ...] = METADATA_EXTENSIONS
    skills: tuple[JsonObject, ...] = ()
    """Skills beside the chat, for the extended card."""


class Document:
    """A card ready to be sent."""

    def __init__(self, content: JsonObject, *, private: bool) -> None:
        self.content = content
        self._body = orjson.dumps(content)
        self._gzipped = gzip.compress(self._body, mtime=0)
        self._headers = {
            "etag": f'W/"{hashlib.sha256(self._body).hexdigest()[:32]}"',
            "cache-control": f"{'private' if private else 'public'}, max-age=300",
            "vary": f"{'Authorization, ' if private else ''}Accept-Encoding, {VERSION_HEADER}",
        }

    def respond(self, request: Request, modified: str, version: Version) -> Response:
        headers = self._headers | {"last-modified": modified, VERSION_HEADER.lower(): version.value}
        if _is_fresh(request, headers["etag"], modified):
            return Response(status_code=304, headers=headers)
        body = self._body
        if _takes_gzip(request.headers.get("accept-encoding", "")):
            body, headers["content-encoding"] = self._gzipped, "gzip"
        return Response(body, headers=headers, media_type="application/json")


class Cards:
    """All forms of the public and the extended card."""

    def __init__(self, facts: CardFacts, modified_at: int) -> None:
        moment = datetime.fromtimestamp(modified_at // 1000, UTC)
        self._modified = format_datetime(moment, usegmt=True)
        self._public = _forms(facts, extended=False)
        self._extended = _forms(facts, extended=True)

    def extended(self, version: Version) -> JsonObject:
        """Return the extended card as the result of a JSON-RPC call."""
        return self._extended[version.value].content

    @property
    def public(self) -> JsonObject:
        """The public card in the form that clients of either line can read."""
        return self._public["hybrid"].content

    @property
    def hybrid(self) -> JsonObject:
        """The extended card in the form that clients of either line can read."""
        return self._extended["hybrid"].content

    def respond_extended(self, request: Request, line: Version) -> Response:
        # REST clients of 0.3 read the card as ProtoJSON: the hybrid form is right for both
        form = "1.0" if line is Version.V1 else "hybrid"
        return self._extended[form].respond(request, self._modified, line)

    def routes(self) -> list[BaseRoute]:
        """Return the open routes of discovery."""
        places = zip(DISCOVERY, (self._discover, self._discover03), strict=True)
        return [Route(path, discover, methods=["GET"]) for path, discover in places]

    async def _discover(self, request: Request) -> Response:
        pure = request.headers.get(VERSION_HEADER, "").strip().startswith("1.0")
        line = Version.V1 if pure else Version.V03
        return self._public["1.0" if pure else "hybrid"].respond(request, self._modified, line)

    async def _discover03(self, request: Request) -> Response:
        return self._public["0.3"].respond(request, self._modified, Version.V03)


def _forms(facts: CardFacts, *, extended: bool) -> dict[_Form, Document]:
    schemes: dict[str, JsonObject] = {}
    if facts.bearer:
        schemes["bearerAuth"] = {"scheme": "bearer", "bearerFormat": "opaque"}
    if facts.basic:
        schemes["basicAuth"] = {"scheme": "basic"}
    both, capabilities = _both(facts, extended=extended), _capabilities(facts, extended=extended)
    pure, old = _only1(facts, schemes), _only03(facts, schemes)
    modern: JsonObject = {"capabilities": capabilities | {"extendedAgentCard": True}}
    mixed: JsonObject = {name: _scheme1(it) | _scheme03(it) for name, it in schemes.items()}
    forms: dict[_Form, JsonObject] = {
        "1.0": {**both, **pure, **modern},
        "0.3": {**both, **old, "capabilities": capabilities},
        "hybrid": {**both, **old, **pure, **modern, "securitySchemes": mixed},
    }
    if len(facts.lines) == 1:
        forms = dict.fromkeys(forms, forms["1.0" if Version.V1 in facts.lines else "0.3"])
    return {name: Document(form, private=extended) for name, form in forms.items()}


def _both(facts: CardFacts, *, extended: bool) -> JsonObject:
    card: JsonObject = {
        "name": f"{facts.name} (demo model)" if facts.demo else facts.name,
        "description": _description(facts),
        "version": facts.version,
        "defaultInputModes": [*INPUT_MODES],
        "defaultOutputModes": [*OUTPUT_MODES],
        "skills": _skills(facts, extended=extended),
    }
    if facts.documentation_url:
        card["documentationUrl"] = facts.documentation_url
    return card


def _only1(facts: CardFacts, schemes: dict[str, JsonObject]) -> JsonObject:
    return {
        "supportedInterfaces": [
            {"url": facts.public_url, "protocolBinding": binding, "protocolVersion": line.value}
            for line in Version
            if line in facts.lines
            for binding in BINDINGS
        ],
        "securitySchemes": {name: _scheme1(scheme) for name, scheme in schemes.items()},
        "securityRequirements": [{"schemes": {name: {"list": []}}} for name in schemes],
    }


def _only03(facts: CardFacts, schemes: dict[str, JsonObject]) -> JsonObject:
    return {
        "protocolVersion": "0.3.0",
        "url": facts.public_url,
        "preferredTransport": BINDINGS[0],
        "additionalInterfaces": [
            {"url": facts.public_url, "transport": binding} for binding in BINDINGS
        ],
        "securitySchemes": {name: _scheme03(scheme) for name, scheme in schemes.items()},
        "security": [{name: []} for name in schemes],
        "supportsAuthenticatedExtendedCard": True,
    }


def _scheme1(scheme: JsonObject) -> JsonObject:
    return {"httpAuthSecurityScheme": scheme}


def _scheme03(scheme: JsonObject) -> JsonObject:
    return {"type": "http", **scheme}


def _capabilities(facts: CardFacts, *, extended: bool) -> JsonObject:
    listed: list[Json] = [
        {
            "uri": extension.uri,
            "description": extension.description,
            "required": False,
            "params": extension.public | (extension.extended if extended else {}),
        }
        for extension in facts.extensions
    ]
    # Whoever looks for an earlier name finds it; in few words, since the public card is small.
    earlier: list[Json] = [
        {
            "uri": alias,
            "required": False,
            "params": {"alias_of": f"#{extension.uri.partition('#')[2]}"},
        }
        for extension in facts.extensions
        for alias in extension.aliases
    ]
    return {"streaming": True, "pushNotifications": False, "extensions": [*listed, *earlier]}


def _description(facts: CardFacts) -> str:
    sentences = [facts.description]
    if facts.demo:
        sentences.append("A scripted demo model answers, not a real one.")
    sentences.append(
        f"A2A {' and '.join(facts.lines)} over HTTP+JSON and JSON-RPC, with streaming; "
        "all callers share the workspace of one OpenCode server."
    )
    if facts.project:
        sentences.append(f"Project: {facts.project}.")
    return " ".join(sentences)


def _skills(facts: CardFacts, *, extended: bool) -> list[Json]:
    chat: JsonObject = {
        "id": "opencode.chat",
        "name": "OpenCode",
        "description": "Read, explain, write and run code in a workspace, and answer questions "
        "about it. A message in the same context continues the session.",
        "tags": ["coding", "chat", "opencode"],
        "inputModes": [*INPUT_MODES],
        "outputModes": [*OUTPUT_MODES],
    }
    if not extended:
        return [chat]
    where = f" of {facts.project}" if facts.project else ""
    chat["examples"] = [
        f"Explain the structure{where or ' of this repository'}.",
        "Find the cause of the failing test and fix it.",
    ]
    return [chat, *facts.skills]


def _is_fresh(request: Request, etag: str, modified: str) -> bool:
    asked = request.headers.get("if-none-match")
    if asked is not None:
        tags = {tag.strip().removeprefix("W/") for tag in asked.split(",")}
        return "*" in tags or etag.removeprefix("W/") in tags
    since = request.headers.get("if-modified-since")
    if since is None:
        return False
    try:
        return parsedate_to_datetime(since) >= parsedate_to_datetime(modified)
    except (TypeError, ValueError):
        return False


def _takes_gzip(accepted: str) -> bool:
    for item in accepted.lower().split(","):
        coding, _, weight = item.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
