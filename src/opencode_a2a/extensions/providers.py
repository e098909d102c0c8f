"""Methods that list what a prompt can name: providers, models, agents and commands."""

import time

from opencode_a2a.extensions.call import Call
from opencode_a2a.extensions.params import Flag, Items, Payload, Placed, Routed, Text
from opencode_a2a.extensions.registry import Access, Extension, aliases
from opencode_a2a.opencode.types import Command, Provider, ProviderCatalogue

PROVIDERS = Extension(
    key="provider_discovery",
    title="OpenCode provider discovery",
    anchor="opencode-provider-discovery-v1",
    summary="List the providers, models, agents and commands that a prompt can name.",
    aliases=aliases("urn:opencode-a2a:provider-discovery/v1", "provider-discovery"),
    skill="opencode.providers.query",
    tags=("providers", "models"),
    notes=(
        "Keys and options of providers are never told.",
        "A malformed entry of OpenCode's catalogue is left out, the others stay.",
    ),
)


CATALOGUE_SECONDS = 60.0
"""How long a catalogue is kept."""


async def _catalogue(call: Call) -> ProviderCatalogue:
    """Return every provider that OpenCode knows; kept for a while, since it is seven megabytes."""
    now, kept = time.monotonic(), call.deps.catalogues
    for location in [one for one, (read, _) in kept.items() if now - read >= CATALOGUE_SECONDS]:
        del kept[location]
    if call.at not in kept:
        found = await call.opencode.provider_catalogue(at=call.at)
        kept[call.at] = now, found
    return kept[call.at][1]


class ProviderItem(Payload):
    provider_id: str
    name: str
    connected: bool
    model_count: int
    source: str | None = None
    default_model_id: str | None = None


class Providers(Items[ProviderItem]):
    default_by_provider: dict[str, str]
    connected: list[str]


class ModelItem(Payload):
    provider_id: str
    model_id: str
    name: str
    default: bool
    connected: bool
    status: str | None = None
    context_window: int | None = None
    max_output_tokens: int | None = None
    supports_reasoning: bool | None = None
    supports_tool_call: bool | None = None
    supports_attachments: bool | None = None


class Models(Items[ModelItem]):
    default_by_provider: dict[str, str]
    connected: list[str]


class ProvidersParams(Routed):
    connected: Flag | None = None


@PROVIDERS.method("opencode.providers.list", Access.READ, example={"connected": True})
async def list_providers(call: Call, params: ProvidersParams) -> Providers:
    """List the providers that OpenCode knows, and which of them can be used now."""
    catalogue = await _catalogue(call)
    items = [
        ProviderItem(
            provider_id=provider.id,
            name=provider.name,
            connected=provider.id in catalogue.connected,
            model_count=len(provider.models),
            source=provider.source,
            default_model_id=catalogue.default.get(provider.id),
        )
        for provider in _chosen(catalogue, None, params.connected)
    ]
    return Providers(
        items=items, default_by_provider=catalogue.default, connected=catalogue.connected
    )


class ModelsParams(ProvidersParams):
    provider_id: Text | None = None


@PROVIDERS.method("opencode.models.list", Access.READ, example={"connected": True})
async def list_models(call: Call, params: ModelsParams) -> Models:
    """List models, of all providers or of one."""
    catalogue = await _catalogue(call)
    items = [
        ModelItem(
            provider_id=provider.id,
            model_id=model.id,
            name=model.name,
            default=catalogue.default.get(provider.id) == model.id,
            connected=provider.id in catalogue.connected,
            status=model.status,
            context_window=model.limit.context,
            max_output_tokens=model.limit.output,
            supports_reasoning=model.capabilities.reasoning,
            supports_tool_call=model.capabilities.toolcall,
            supports_attachments=model.capabilities.attachment,
        )
        for provider in _chosen(catalogue, params.provider_id, params.connected)
        for model in provider.models.values()
    ]
    return Models(items=items, default_by_provider=catalogue.default, connected=catalogue.connected)


def _chosen(
    catalogue: ProviderCatalogue, provider_id: str | None, connected: bool | None
) -> list[Provider]:
    return [
        provider
        for provider in catalogue.all
        if provider_id in (None, provider.id)
        and connected in (None, provider.id in catalogue.connected)
    ]


class ModelName(Payload):
    provider_id: str
    model_id: str


class AgentItem(Payload):
    name: str
    mode: str
    selectable: bool
    native: bool
    hidden: bool
    description: str | None = None
    model: ModelName | None = None


@PROVIDERS.method("opencode.agents.list", Access.READ)
async def list_agents(call: Call, params: Placed) -> Items[AgentItem]:
    """List the agents; ``selectable`` ones can be named in a prompt."""
    return Items[AgentItem].of(items=await call.opencode.agents(at=call.at))


@PROVIDERS.method("opencode.commands.list", Access.READ)
async def list_commands(call: Call, params: Placed) -> Items[Command]:
    """List the commands that ``opencode.sessions.command`` can run."""
    return Items(items=await call.opencode.commands(at=call.at))
