"""Callers with a token of an identity provider, or with an API key."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
import pytest_asyncio
from a2a.client import ClientCallContext
from a2a.client.auth import CredentialService
from a2a.types import AgentCard, Message, Part, Role, SendMessageRequest, TaskState
from google.protobuf.json_format import ParseDict

from opencode_a2a.config import OidcSettings
from opencode_a2a.web import oidc
from tests.support.answers import NOT_FOUND, Task, Wire
from tests.support.caller import Caller
from tests.support.foreign import javascript_client
from tests.support.front import Serve, sdk_client, started
from tests.support.issuer import AUDIENCE, LocalIssuer
from tests.support.opencode import FakeOpenCode
from tests.support.service import TOKEN, Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "an-api-key-for-the-tests-of-one-caller"
METADATA = "/.well-known/oauth-protected-resource"


class Wallet(CredentialService):
    """What the SDK is given to choose from."""

    def __init__(self, **secrets: str) -> None:
        self.secrets = secrets

    async def get_credentials(
        self, security_scheme_name: str, context: ClientCallContext | None
    ) -> str | None:
        return self.secrets.get(security_scheme_name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(
    shared_opencode: FakeOpenCode, provider: LocalIssuer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Running]:
    """A service that takes tokens, API keys and its one bearer token."""
    key = {"scheme": "api_key", "principal": "robot", "token": KEY}
    variables = {
        "A2A_OIDC_ISSUER": provider.url,
        "A2A_OIDC_AUDIENCE": AUDIENCE,
        "A2A_OIDC_REQUIRED_SCOPES": "a2a",
        "A2A_OIDC_TOKEN_URL": f"{provider.url}/token",
        "A2A_ENABLE_SESSION_SHELL": "true",
        "A2A_STATIC_AUTH_CREDENTIALS": orjson.dumps([key]).decode(),
    }
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OidcSettings, "clock_skew_seconds", 0)
        async with started(shared_opencode, state, **variables) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def anyone(guarded: Running) -> AsyncGenerator[httpx2.AsyncClient]:
    """A client without a credential."""
    async with httpx2.AsyncClient(base_url=guarded.url, trust_env=False) as http:
        yield http


Calling = Callable[..., Caller]


@pytest.fixture
def calling(guarded: Running, anyone: httpx2.AsyncClient, wire: Wire) -> Calling:
    """Make callers, each with headers of its own."""

    def make(**headers: str) -> Caller:
        caller = Caller(guarded, wire)
        caller.http = anyone
        del caller.headers["Authorization"]
        caller.headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        return caller

    return make


@pytest.mark.requirement("ours-tokens")
@pytest.mark.parametrize("scheme", ["oidc", "oauth2", "apiKeyAuth", "bearerAuth"])
async def test_the_python_sdk_signs_in_by_what_the_card_says(
    guarded: Running, opencode: FakeOpenCode, provider: LocalIssuer, wire: Wire, scheme: str
) -> None:
    secrets = {"apiKeyAuth": KEY, "bearerAuth": TOKEN}
    secret = secrets.get(scheme) or provider.mint(scope="a2a")

    async with sdk_client(guarded, wire, by_card=Wallet(**{scheme: secret})) as agent:
        message = Message(
            role=Role.ROLE_USER,
            parts=[Part(text="hello")],
            message_id=secret[-20:] + scheme + wire.value,
        )
        async with asyncio.timeout(60):
            events = [e async for e in agent.send_message(SendMessageRequest(message=message))]

    assert events[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED


@pytest.mark.live
@pytest.mark.requirement("ours-tokens")
async def test_the_javascript_sdk_calls_with_a_token(
    guarded: Running, opencode: FakeOpenCode, provider: LocalIssuer, wire: Wire
) -> None:
    async with javascript_client(guarded, wire, provider.mint(scope="a2a")) as client:
        sent = Task(await client.call("send", text="hello"))

    assert (sent.state, sent.text) == ("completed", "one two three four")


@pytest.mark.requirement("ours-tokens")
@pytest.mark.requirement("ours-api-keys")
async def test_callers_do_not_meet(
    calling: Calling, opencode: FakeOpenCode, provider: LocalIssuer
) -> None:
    ann = calling(Authorization=f"Bearer {provider.mint('ann', scope='a2a')}")
    robot = calling(X_API_Key=KEY)
    # The name of a static caller is no name of the provider's.
    false = calling(Authorization=f"Bearer {provider.mint('robot', scope='a2a')}")
    again = calling(Authorization=f"Bearer {provider.mint('ann', scope='x a2a')}")

    tasks = {name: await one.send("hello") for name, one in (("ann", ann), ("robot", robot))}

    assert (await again.get(tasks["ann"].id)).state == "completed"
    for other in (robot, false):
        (await other.ask("get", {"id": tasks["ann"].id})).refuses(NOT_FOUND)
    (await false.ask("get", {"id": tasks["robot"].id})).refuses(NOT_FOUND)


@pytest.mark.requirement("ours-tokens")
async def test_a_refusal_says_how_to_get_in(
    guarded: Running, anyone: httpx2.AsyncClient, provider: LocalIssuer
) -> None:
    where = f'resource_metadata="{guarded.url}{METADATA}"'

    async def challenge(token: str | None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = await anyone.get("/health", headers=headers)
        return answer.status_code, answer.headers.get_list("www-authenticate")[0]

    status, said = await challenge(None)
    assert (status, said) == (401, f'Bearer realm="opencode-a2a", {where}')
    status, said = await challenge(provider.mint(exp=int(time.time()) - 60, scope="a2a"))
    assert status == 401
    assert where in said
    assert 'error="invalid_token", error_description="The token has expired' in said
    status, said = await challenge(provider.mint(scope="other"))
    assert (status, said) == (403, 'Bearer error="insufficient_scope", scope="a2a"')
    metadata = (await anyone.get(METADATA)).json()
    assert metadata["authorization_servers"] == [provider.url]
    assert metadata["resource"] == guarded.url
    assert {"a2a", "a2a:session_shell"} <= set(metadata["scopes_supported"])


@pytest.mark.requirement("ours-tokens")
async def test_expired_tokens_lock_nobody_out(
    guarded: Running, anyone: httpx2.AsyncClient, provider: LocalIssuer
) -> None:
    past = int(time.time()) - 60
    old = [provider.mint(f"user {n}", exp=past, scope="a2a") for n in range(25)]

    answers = [await anyone.get("/health", headers={"Authorization": f"Bearer {t}"}) for t in old]

    assert {answer.status_code for answer in answers} == {401}


@pytest.mark.requirement("ours-tokens")
async def test_a_scope_grants_a_method(
    guarded: Running, anyone: httpx2.AsyncClient, provider: LocalIssuer
) -> None:
    async def shell(scope: str) -> Any:
        call = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "opencode.sessions.shell",
            "params": {"session_id": "ses_none", "request": {"agent": "build", "command": "ls"}},
        }
        token = provider.mint(scope=scope)
        answer = await anyone.post("/", json=call, headers={"Authorization": f"Bearer {token}"})
        return answer.json()["error"]["data"]["type"]

    assert await shell("a2a a2a:session_shellx") == "AUTHORIZATION_FORBIDDEN"
    assert await shell("a2a a2a:session_shell") != "AUTHORIZATION_FORBIDDEN"


@pytest.mark.requirement("ours-tokens")
@pytest.mark.parametrize("wire", [Wire.REST], ids=["HTTP+JSON"])
async def test_a_stream_outlives_its_token(
    calling: Calling, opencode: FakeOpenCode, provider: LocalIssuer
) -> None:
    token = provider.mint(scope="a2a", exp=int(time.time()) + 2)
    caller = calling(Authorization=f"Bearer {token}")
    hold = opencode.hold(count=2)

    async with caller.stream("hello") as following, asyncio.timeout(60):
        await hold.reached.wait()
        while (await caller.http.get("/health", headers=caller.headers)).status_code == 200:  # noqa: ASYNC110 # time
            await asyncio.sleep(0.05)
        opencode.release()
        await following.until_state("completed")


@pytest.mark.requirement("ours-tokens")
@pytest.mark.requirement("ours-api-keys")
async def test_the_cards_and_openapi_offer_every_way_in(
    guarded: Running, anyone: httpx2.AsyncClient, provider: LocalIssuer
) -> None:
    modern = (
        await anyone.get("/.well-known/agent-card.json", headers={"A2A-Version": "1.0"})
    ).json()
    old = (await anyone.get("/.well-known/agent.json")).json()
    hybrid = (await anyone.get("/.well-known/agent-card.json")).json()
    headers = {"X-API-Key": KEY}
    openapi = (await anyone.get("/openapi.json", headers=headers)).json()

    discovery = f"{provider.url}/.well-known/openid-configuration"
    card = ParseDict(modern, AgentCard())
    schemes = card.security_schemes
    assert set(schemes) == {"oidc", "oauth2", "bearerAuth", "apiKeyAuth"}
    assert schemes["oidc"].open_id_connect_security_scheme.open_id_connect_url == discovery
    assert schemes["apiKeyAuth"].api_key_security_scheme.name == "X-API-Key"
    flows = schemes["oauth2"].oauth2_security_scheme.flows
    assert flows.client_credentials.token_url == f"{provider.url}/token"
    needed = {n: list(v.list) for one in card.security_requirements for n, v in one.schemes.items()}
    assert needed == {"oidc": ["a2a"], "oauth2": ["a2a"], "bearerAuth": [], "apiKeyAuth": []}
    assert old["securitySchemes"]["oidc"] == {
        "type": "openIdConnect",
        "openIdConnectUrl": discovery,
    }
    assert old["securitySchemes"]["apiKeyAuth"] == {
        "type": "apiKey",
        "in": "header",
        "name": "X-API-Key",
    }
    assert {"oidc": ["a2a"]} in old["security"]
    assert openapi["components"]["securitySchemes"] == old["securitySchemes"]
    assert openapi["security"] == old["security"]
    assert METADATA in openapi["paths"]
    assert set(hybrid["securitySchemes"]) == set(schemes)


@pytest.mark.requirement("ours-tokens")
async def test_the_extended_cards_say_which_scope_a_capability_needs(
    guarded: Running, anyone: httpx2.AsyncClient
) -> None:
    async def extended(wire: Wire) -> Any:
        answer = await Caller(guarded, wire).ask("card", {})
        return answer.body["result"] if wire.rpc else answer.body

    modern, old, hybrid = [await extended(w) for w in (Wire.RPC, Wire.RPC03, Wire.REST03)]

    def skills(card: Any) -> dict[str, Any]:
        return {skill["id"]: skill for skill in card["skills"]}

    card = ParseDict(modern, AgentCard())
    (shell,) = [skill for skill in card.skills if skill.id == "opencode.sessions.session_shell"]
    needed = {
        n: list(v.list) for one in shell.security_requirements for n, v in one.schemes.items()
    }
    both = ["a2a", "a2a:session_shell"]
    assert needed == {"oidc": both, "oauth2": both, "bearerAuth": [], "apiKeyAuth": []}
    assert {"oidc": both} in skills(old)["opencode.sessions.session_shell"]["security"]
    mixed = skills(hybrid)["opencode.sessions.session_shell"]
    assert {"security", "securityRequirements"} <= set(mixed)
    assert [one.split(":")[0] for one in mixed["examples"]] == ["opencode.sessions.shell"]
    (sessions,) = [
        one["params"]
        for one in modern["capabilities"]["extensions"]
        if one["uri"].endswith("#opencode-session-management-v1")
    ]
    assert sessions["required_scopes"] == {"opencode.sessions.shell": ["a2a:session_shell"]}
    # What needs no capability is open to every caller.
    gated = [name for name, skill in skills(modern).items() if "securityRequirements" in skill]
    assert gated == ["opencode.sessions.session_shell"]


@pytest.mark.requirement("ours-tokens")
async def test_the_metadata_of_an_agent_below_a_path_are_where_clients_look(
    opencode: FakeOpenCode, provider: LocalIssuer, tmp_path: Path
) -> None:
    variables = {
        "A2A_OIDC_ISSUER": provider.url,
        "A2A_OIDC_AUDIENCE": AUDIENCE,
        "A2A_PATH_PREFIX": "/agents/coder",
    }
    async with (
        started(opencode, tmp_path, **variables) as below,
        httpx2.AsyncClient(base_url=below.url, trust_env=False) as http,
    ):
        refused = await http.get("/agents/coder/health")
        inserted = await http.get(f"{METADATA}/agents/coder")
        appended = await http.get(f"/agents/coder{METADATA}")
        elsewhere = await http.get(f"{METADATA}/agents/coders")

    where = f'resource_metadata="{below.url}{METADATA}/agents/coder"'
    assert where in refused.headers["www-authenticate"]
    assert inserted.json()["resource"] == f"{below.url}/agents/coder"
    assert inserted.content == appended.content
    assert elsewhere.status_code == 401


@pytest.mark.requirement("ours-api-keys")
async def test_an_api_key_stands_alone(anyone: httpx2.AsyncClient, provider: LocalIssuer) -> None:
    bearer = ("Authorization", f"Bearer {TOKEN}")
    key = ("X-API-Key", KEY)
    tries: list[tuple[list[tuple[str, str]], int]] = [
        ([key], 200),
        ([bearer], 200),
        ([key, bearer], 401),
        ([key, key], 401),
        ([("X-API-Key", TOKEN)], 401),
        ([("Authorization", f"Bearer {KEY}")], 401),
        ([("X-API-Key", "")], 401),
        ([("X-API-Key", provider.mint(scope="a2a"))], 401),
    ]

    for headers, status in tries:
        assert (await anyone.get("/health", headers=headers)).status_code == status, headers


@pytest.mark.requirement("ours-tokens")
@pytest.mark.requirement("ours-api-keys")
async def test_codes_of_the_console_are_for_secrets_that_stay(
    anyone: httpx2.AsyncClient, provider: LocalIssuer
) -> None:
    token = {"Authorization": f"Bearer {provider.mint(scope='a2a')}"}

    refused = await anyone.post("/console/codes", headers=token)
    code = (await anyone.post("/console/codes", headers={"X-API-Key": KEY})).json()["code"]
    begun = await anyone.post("/console/session", headers={"Authorization": f"Bearer {code}"})
    session = {"Authorization": f"Bearer {begun.json()['token']}"}
    used = await anyone.get("/health", headers=session)
    ended = await anyone.delete("/console/session", headers={"X-API-Key": KEY})

    assert (refused.status_code, used.status_code, ended.status_code) == (401, 200, 204)


@pytest.mark.requirement("ours-tokens")
async def test_the_service_starts_without_its_provider(
    serve: Serve, provider: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "RETRY_SECONDS", 1.0)
    provider.mode = "broken"
    try:
        service = await serve(A2A_OIDC_ISSUER=provider.url, A2A_OIDC_AUDIENCE=AUDIENCE)
    finally:
        provider.mode = "well"
    token = {"Authorization": f"Bearer {provider.mint()}"}

    async with httpx2.AsyncClient(base_url=service.url, trust_env=False) as http:
        ready = await http.get("/readyz")
        early = await http.get("/health", headers=token)
        static = await http.get("/health", headers={"Authorization": f"Bearer {TOKEN}"})
        async with asyncio.timeout(60):
            while (await http.get("/health", headers=token)).status_code == 503:  # noqa: ASYNC110 # as a client does
                await asyncio.sleep(0.1)
            late = await http.get("/health", headers=token)

    assert (ready.status_code, ready.json()["checks"]["issuer"]) == (503, "failed")
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    assert (static.status_code, late.status_code) == (200, 200)
