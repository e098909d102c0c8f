"""The routes of the service: cards, both bindings of A2A with the methods beyond it, OpenAPI."""

from contextlib import suppress

from starlette.routing import BaseRoute

from opencode_a2a.a2a.types import Version
from opencode_a2a.app.parts import Parts
from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings
from opencode_a2a.errors import NotInOpenCodeError
from opencode_a2a.extensions import EXTENSIONS
from opencode_a2a.extensions.call import Deps
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.net.egress import Egress, Fetcher
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.types import Command
from opencode_a2a.server.card import Cards, OpenCodeSkill
from opencode_a2a.server.contracts import EXTENSION_NAMES, spoken_versions
from opencode_a2a.server.http import BindingOptions
from opencode_a2a.server.jsonrpc import RpcBinding
from opencode_a2a.server.openapi import openapi_routes
from opencode_a2a.server.operations import Operations
from opencode_a2a.server.rest import RestBinding
from opencode_a2a.server.sse import Streams
from opencode_a2a.signing import SigningKeys


def method_dispatcher(settings: Settings, parts: Parts) -> Dispatcher:
    """Return the methods beyond A2A, and declare the calls that other replicas may forward."""
    deps = Deps(
        fleet=parts.fleet,
        workspace=parts.workspace,
        tasks=parts.tasks,
        webhooks=parts.webhooks,
        fetch=Fetcher(settings.a2a, Egress(lookups=parts.sender.lookups)),
    )
    return Dispatcher(EXTENSIONS, deps, settings)


def make_cards(settings: Settings, parts: Parts, keys: SigningKeys | None) -> Cards:
    async def agents() -> list[OpenCodeSkill]:
        at = Location.of(settings.workspace)
        opencode = parts.fleet.serving(at.directory).turns.opencode
        found, commands = await opencode.agents(at=at), list[Command]()
        with suppress(NotInOpenCodeError):  # the agents are there all the same
            commands = await opencode.commands(at=at)
        return [
            *(OpenCodeSkill("agent", a.name, a.description) for a in found if a.selectable),
            *(OpenCodeSkill("command", one.name, one.description) for one in commands),
        ]

    return Cards(settings, now_ms(), agents, keys, lambda: parts.fleet.missing)


def make_operations(parts: Parts, cards: Cards, methods: Dispatcher) -> Operations:
    """Return the operations of A2A, which every binding runs, over HTTP or not."""
    return Operations(
        parts.tasks, cards, methods.deps.fetch, parts.webhooks, parts.sender, parts.new_message_id
    )


def protocol_routes(
    settings: Settings,
    parts: Parts,
    streams: Streams,
    cards: Cards,
    operations: Operations,
    methods: Dispatcher,
) -> list[BaseRoute]:
    """Return the routes of A2A and of the methods beyond it."""
    options = BindingOptions(
        Version(settings.a2a.protocol_version),
        settings.stream,
        streams,
        EXTENSION_NAMES,
        spoken_versions(settings),
        settings.a2a.context_header,
    )
    return [
        *RpcBinding(operations, methods, options).routes(),
        *RestBinding(operations, cards, options).routes(),
        *cards.routes(),
        *openapi_routes(settings, lambda: parts.fleet.missing),
    ]
