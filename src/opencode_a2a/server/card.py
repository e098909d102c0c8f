"""The agent card, as clients of each version read it.

The documents are made once and served as they are. The public card has a hybrid form, which clients
of both versions can read, unless a setting says otherwise; with ``A2A-Version: 1.0`` it has the
pure 1.0 form, at the earlier path the pure 0.3 form. It claims only what the service does. If a
signing key is configured, the forms with 1.0 are signed; 0.3 does not define which bytes to sign.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Literal

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from opencode_a2a.a2a.signatures import sign_card, without_empty
from opencode_a2a.a2a.types import VERSION_HEADER, Version
from opencode_a2a.clock import now_ms
from opencode_a2a.config import CardForm, Settings
from opencode_a2a.errors import Missing, ServiceError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions import EXTENSIONS
from opencode_a2a.extensions.registry import Method
from opencode_a2a.media import INPUT_MODES, OUTPUT_MODES
from opencode_a2a.printable import joined
from opencode_a2a.rights import Action, Capability
from opencode_a2a.server.contracts import (
    BINDINGS,
    CARD_PATH,
    CATALOG_PATH,
    EARLIER_CARD_PATH,
    RESOURCE_PATH,
    declared,
    protected_resource,
    security_requirements,
    security_schemes,
    spoken_versions,
)
from opencode_a2a.signing import JWKS_PATH, SigningKeys

AGENT_SKILL, COMMAND_SKILL = "opencode.agent.", "opencode.command."
"""Prefixes of the ids of skills that are OpenCode's agents and commands."""
SKILLS_SECONDS = 10.0
"""How long the list of agents and commands is used before OpenCode is asked again."""
SKILLS_PATIENCE_SECONDS = 2.0


class Document:
    """A document of discovery, encoded once, with its ETag."""

    def __init__(
        self, content: JsonObject, *, private: bool, media_type: str = "application/json"
    ) -> None:
        self.content = content
        self._media_type = media_type
        self._body = orjson.dumps(content)
        self._headers = {
            "etag": f'W/"{hashlib.sha256(self._body).hexdigest()[:32]}"',
            "cache-control": f"{'private' if private else 'public'}, max-age=300",
            "vary": f"{'Authorization, ' if private else ''}{VERSION_HEADER}",
        }

    def respond(self, request: Request, modified: str, version: Version) -> Response:
        headers = self._headers | {"last-modified": modified, VERSION_HEADER.lower(): version.value}
        known = request.headers.get("if-none-match")
        since = request.headers.get("if-modified-since")
        fresh = False
        if known is not None:
            tags = {tag.strip().removeprefix("W/") for tag in known.split(",")}
            fresh = "*" in tags or headers["etag"].removeprefix("W/") in tags
        elif since is not None:
            with suppress(TypeError, ValueError):  # not a date, or one without a time zone
                fresh = parsedate_to_datetime(since) >= parsedate_to_datetime(modified)
        if fresh:
            return Response(status_code=304, headers=headers)
        return Response(self._body, headers=headers, media_type=self._media_type)


@dataclass(frozen=True, slots=True)
class OpenCodeSkill:
    """One of OpenCode's agents or commands, which the extended card lists as a skill."""

    kind: Literal["agent", "command"]
    name: str
    description: str | None


class Cards:
    """All forms of the public and the extended card of a deployment.

    The extended card lists OpenCode's agents and commands. OpenCode is asked for them when a client
    reads that card, at most every few seconds; while it is unreachable, the card keeps the last
    list.
    """

    def __init__(
        self,
        settings: Settings,
        modified_at: int,
        ask_skills: Callable[[], Awaitable[list[OpenCodeSkill]]] | None = None,
        keys: SigningKeys | None = None,
        missing: Callable[[], Missing] = frozenset,
    ) -> None:
        """Ask ``missing``, whenever a card is read, what callers would ask OpenCode for in vain."""
        self._settings = settings
        self._keys = keys
        self._modified = self._extended_modified = _http_date(modified_at)
        self._ask_skills, self._ask_missing = ask_skills, missing
        self._of_opencode: list[OpenCodeSkill] = []
        self._missing = missing()
        self._public, self._extended = self._made(extended=False), self._made(extended=True)
        self._asked_at = -math.inf
        self._asking = asyncio.Lock()
        self._catalog = Document(
            _catalog(settings), private=False, media_type="application/ai-catalog+json"
        )
        self._resource: Document | None = None
        if settings.oidc.issuer:
            self._resource = Document(protected_resource(settings), private=False)

    def _made(self, *, extended: bool) -> dict[CardForm, Document]:
        known = self._of_opencode if extended else ()
        return _forms(self._settings, self._keys, self._missing, known, extended=extended)

    def _update(self) -> None:
        """Make the cards again if OpenCode was exchanged for one that can do more or less."""
        if (missing := self._ask_missing()) != self._missing:
            self._missing = missing
            self._public, self._extended = self._made(extended=False), self._made(extended=True)
            self._modified = self._extended_modified = _http_date(now_ms())

    async def refresh(self) -> None:
        """Update the extended card if OpenCode's agents or commands have changed."""
        self._update()
        if self._ask_skills is None:
            return
        async with self._asking:
            if time.monotonic() < self._asked_at + SKILLS_SECONDS:
                return
            try:
                async with asyncio.timeout(SKILLS_PATIENCE_SECONDS):
                    found = await self._ask_skills()
            except (TimeoutError, ServiceError):
                found = self._of_opencode
            self._asked_at = time.monotonic()
            if found != self._of_opencode:
                self._of_opencode = found
                self._extended = self._made(extended=True)
                self._extended_modified = _http_date(now_ms())

    def extended(self, version: Version) -> JsonObject:
        """Return the extended card as the result of a JSON-RPC call."""
        return self._extended[version.value].content

    def shown(self, form: CardForm, *, extended: bool = False) -> JsonObject:
        """Return a form of the public or the extended card."""
        return (self._extended if extended else self._public)[form].content

    def respond_extended(self, request: Request, version: Version) -> Response:
        # REST clients of 0.3 read the card as ProtoJSON: the hybrid form is right for both.
        form = "1.0" if version is Version.V1 else "hybrid"
        return self._extended[form].respond(request, self._extended_modified, version)

    def routes(self) -> list[BaseRoute]:
        """Return the routes of discovery, which need no credential."""

        async def discover(request: Request) -> Response:
            asked = request.headers.get(VERSION_HEADER, "").strip()
            form = "1.0" if asked.startswith("1.0") else self._settings.a2a.card_form
            version = Version.V1 if form == "1.0" else Version.V03
            self._update()
            return self._public[form].respond(request, self._modified, version)

        async def discover03(request: Request) -> Response:
            self._update()
            return self._public["0.3"].respond(request, self._modified, Version.V03)

        async def catalog(request: Request) -> Response:
            return self._catalog.respond(request, self._modified, Version.V1)

        async def resource(request: Request) -> Response:
            if self._resource is None:
                raise HTTPException(404)
            return self._resource.respond(request, self._modified, Version.V1)

        routes: list[BaseRoute] = [
            Route(CARD_PATH, discover, methods=["GET"]),
            Route(EARLIER_CARD_PATH, discover03, methods=["GET"]),
            Route(CATALOG_PATH, catalog, methods=["GET"]),
            Route(RESOURCE_PATH, resource, methods=["GET"]),
        ]
        if self._keys is not None:
            keys = Document(self._keys.jwks, private=False, media_type="application/jwk-set+json")

            async def published(request: Request) -> Response:
                return keys.respond(request, self._modified, Version.V1)

            routes.append(Route(JWKS_PATH, published, methods=["GET"]))
        return routes


def _catalog(settings: Settings) -> JsonObject:
    """Return the AI Catalog (specification 1.0 of ai-catalog.io): this one agent.

    Name, description and version are left to the card, as the specification asks.
    """
    agent: JsonObject = {
        "identifier": settings.public_url,
        "type": "application/a2a-agent-card+json",
        "url": f"{settings.public_url}{CARD_PATH}",
    }
    return {"specVersion": "1.0", "entries": [agent]}


def _http_date(at: int) -> str:
    return format_datetime(datetime.fromtimestamp(at // 1000, UTC), usegmt=True)


def _forms(
    settings: Settings,
    keys: SigningKeys | None,
    missing: Missing,
    of_opencode: Sequence[OpenCodeSkill],
    *,
    extended: bool,
) -> dict[CardForm, Document]:
    """Return the forms of a card: one for each version, and the hybrid one."""
    versions = spoken_versions(settings)
    preferred03 = BINDINGS[Version.V03][0]
    schemes = security_schemes(settings)
    mixed: JsonObject = {name: {one.kind: one.v1, **one.v03} for name, one in schemes.items()}
    required1, required03 = _required(settings)
    only1: JsonObject = {
        "supportedInterfaces": [
            {
                "url": binding.url(settings),
                "protocolBinding": binding.name,
                "protocolVersion": version.value,
            }
            for version in versions
            for binding in BINDINGS[Version.V1]
            if binding in BINDINGS[version]
        ],
        "securitySchemes": {name: {one.kind: one.v1} for name, one in schemes.items()},
        **required1,
    }
    only03: JsonObject = {
        "protocolVersion": "0.3.0",
        "url": preferred03.url(settings),
        "preferredTransport": preferred03.name,
        "additionalInterfaces": [
            {"url": binding.url(settings), "transport": binding.name}
            for binding in BINDINGS[Version.V03]
        ],
        "securitySchemes": {name: one.v03 for name, one in schemes.items()},
        **required03,
        "supportsAuthenticatedExtendedCard": True,
    }
    both = _common(settings)
    skills1: list[Json] = []
    skills03: list[Json] = []
    skills: list[Json] = []
    for skill, capability in _skills(settings, missing, of_opencode, extended=extended):
        needs1, needs03 = _required(settings, capability)
        if needs1 == required1:  # the requirement of the whole card
            needs1, needs03 = {}, {}
        skills1.append({**skill, **needs1})
        skills03.append({**skill, **needs03})
        skills.append({**skill, **needs03, **needs1})
    capabilities = _capabilities(settings, missing, extended=extended)
    modern: JsonObject = {"capabilities": capabilities | {"extendedAgentCard": True}}
    forms: dict[CardForm, JsonObject] = {
        "1.0": {**both, **only1, **modern, "skills": skills1},
        "0.3": {**both, **only03, "capabilities": capabilities, "skills": skills03},
        "hybrid": {**both, **only03, **only1, **modern, "securitySchemes": mixed, "skills": skills},
    }
    if keys is not None and Version.V1 in versions:
        pure, url = forms["1.0"], f"{settings.public_url}{JWKS_PATH}"
        # Verifiers differ in what they take for the signed content: the fields of the 1.0 schema,
        # the same without empty values, or the document as it is. One valid signature is enough
        # for them.
        for name in ("1.0", "hybrid"):
            payloads = (pure, without_empty(pure), forms[name])
            forms[name] = {**forms[name], "signatures": sign_card(keys.current, payloads, url)}
    if len(versions) == 1:
        forms = dict.fromkeys(forms, forms[versions[0].value])
    return {name: Document(form, private=extended) for name, form in forms.items()}


def _required(
    settings: Settings, capability: Capability | None = None
) -> tuple[JsonObject, JsonObject]:
    """Return the security requirements, as 1.0 and as 0.3 write them."""
    ways = security_requirements(settings, capability)
    required1: list[Json] = [
        {"schemes": {name: {"list": [*scopes]} if scopes else {} for name, scopes in way.items()}}
        for way in ways
    ]
    required03: list[Json] = [{name: [*scopes] for name, scopes in way.items()} for way in ways]
    return {"securityRequirements": required1}, {"security": required03}


def _common(settings: Settings) -> JsonObject:
    """Return the fields that are the same in both versions."""
    a2a = settings.a2a
    sentences, bindings = [a2a.description], joined([one.label for one in BINDINGS[Version.V1]])
    if a2a.demo:
        sentences.append("A scripted demo model answers, not a real one.")
    sentences.append(
        f"A2A {' and '.join(spoken_versions(settings))} over {bindings}, with streaming; all "
        f"callers share {_shared(settings)}."
    )
    if a2a.project:
        sentences.append(f"Project: {a2a.project}.")
    card: JsonObject = {
        "name": f"{a2a.title} (demo model)" if a2a.demo else a2a.title,
        "description": " ".join(sentences),
        "version": a2a.version,
        "defaultInputModes": [*INPUT_MODES],
        "defaultOutputModes": [*OUTPUT_MODES],
    }
    return card | ({"documentationUrl": a2a.documentation_url} if a2a.documentation_url else {})


def _shared(settings: Settings) -> str:
    """Return what the callers share."""
    count = len(settings.fleet)
    return (
        "the workspace of one OpenCode server"
        if count == 1
        else f"the workspaces of {count} OpenCode servers"
    )


_CHAT: Mapping[Action, str] = {
    "deny": "Read and explain code in a workspace, and answer questions about it.",
    "ask": "Read, explain, write and run code in a workspace, asking before each change, and "
    "answer questions about it.",
    "allow": "Read, explain, write and run code in a workspace, and answer questions about it.",
}
"""The description of the skill that messages stand for, by what the profile allows to change."""


def _skills(
    settings: Settings, missing: Missing, of_opencode: Sequence[OpenCodeSkill], *, extended: bool
) -> Iterator[tuple[JsonObject, Capability | None]]:
    """Yield the skills, each with the capability that it needs."""
    chat: JsonObject = {
        "id": "opencode.chat",
        "name": "OpenCode",
        "description": f"{_CHAT[settings.auth.rights.changes]} A message in the same context "
        "continues the session.",
        "tags": ["coding", "chat", "opencode"],
        "inputModes": [*INPUT_MODES],
        "outputModes": [*OUTPUT_MODES],
    }
    if extended:
        chat["examples"] = [
            f"Explain the structure of {settings.a2a.project or 'this repository'}.",
            "Find the cause of the failing test"
            + ("." if settings.auth.rights.changes == "deny" else " and fix it."),
        ]
    yield chat, None
    for extension in EXTENSIONS if extended else ():
        if extension.skill is None:
            continue
        by_capability: dict[Capability | None, list[Method]] = {}
        for method in extension.enabled(settings, missing):
            by_capability.setdefault(method.capability, []).append(method)
        for capability, methods in by_capability.items():
            skill: JsonObject = {
                "id": extension.skill,
                "name": extension.title,
                "description": f"{extension.summary} JSON-RPC methods, listed in the extension.",
                "tags": ["opencode", *extension.tags],
                "inputModes": ["application/json"],
                "outputModes": ["application/json"],
                "examples": [f"{method.name}: {method.summary}" for method in methods[:8]],
            }
            if capability is not None:
                family, _, _ = (extension.skill or "").rpartition(".")
                skill["id"] = f"{family}.{capability}"
                skill["name"] = f"{extension.title}: {capability}"
                skill["description"] = (
                    f"JSON-RPC methods for credentials that grant {capability}, listed in the "
                    "extension."
                )
            yield skill, capability
    for one in of_opencode:
        about = one.description or f"The {one.kind} {one.name} of OpenCode."
        chosen = f"Chosen for a message by metadata.opencode.{one.kind}"
        if one.kind == "command":
            chosen += "; the text of the message is what it is called with"
        offered: JsonObject = {
            "id": f"{AGENT_SKILL if one.kind == 'agent' else COMMAND_SKILL}{one.name}",
            "name": one.name,
            "description": f"{about} {chosen}.",
            "tags": ["coding", one.kind, "opencode"],
            "inputModes": [*INPUT_MODES] if one.kind == "agent" else ["text/plain"],
            "outputModes": [*OUTPUT_MODES],
        }
        yield offered, None


def _capabilities(settings: Settings, missing: Missing, *, extended: bool) -> JsonObject:
    listed: list[Json] = [
        {
            "uri": extension.uri,
            "description": extension.summary,
            "params": extension.public_params(settings, missing)
            | (extension.extended_params(settings, missing) if extended else {}),
        }
        for extension in declared(missing)
    ]
    # Clients that look for an earlier URI find it; briefly, to keep the public card small.
    earlier: list[Json] = [
        {"uri": alias, "params": {"alias_of": f"#{extension.anchor}"}}
        for extension in declared(missing)
        for alias in extension.aliases
    ]
    return {
        "streaming": True,
        "pushNotifications": settings.push.enabled,
        "extensions": [*listed, *earlier],
    }
