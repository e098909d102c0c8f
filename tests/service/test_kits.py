"""Cases of the official kits about push, signed cards and the extended card, under their ids.

The kits (a2a-tck, and ACTS, its declarative successor) are in no package registry. Each case does
here what it does there, on both bindings where it is for both, and looks at least at the same.
"""

import asyncio
import base64
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
import pytest_asyncio
from a2a.types import AgentCard, StreamResponse
from google.protobuf.json_format import Parse

from opencode_a2a.events import JsonObject
from tests.support.answers import NOT_FOUND, Wire
from tests.support.caller import Caller
from tests.support.certificates import private_key
from tests.support.front import started
from tests.support.issuer import AUDIENCE, LocalIssuer
from tests.support.opencode import FakeOpenCode
from tests.support.receiver import receiving
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOOK = "https://hooks.invalid/tck-push-webhook"
"""Where the kits name a host that cannot be reached from everywhere."""
NOBODY = "00000000-0000-0000-0000-000000000000"
LETTER = Path(__file__).parent.parent / "support" / "js" / "letter.mjs"
BOTH = pytest.mark.parametrize("wire", [Wire.RPC, Wire.REST], indirect=True)
OLDER = pytest.mark.parametrize("wire", [Wire.RPC03, Wire.REST03], indirect=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    shared_opencode: FakeOpenCode,
    provider: LocalIssuer,
    tmp_path_factory: pytest.TempPathFactory,
    database: str,
) -> AsyncGenerator[Running]:
    state = tmp_path_factory.mktemp("state")
    variables = {
        "A2A_PUSH_ALLOW_PRIVATE_HOSTS": "true",
        "A2A_SIGNING_KEY_FILE": str(private_key(state / "signing.pem")),
        "A2A_OIDC_ISSUER": provider.url,
        "A2A_OIDC_AUDIENCE": AUDIENCE,
        "A2A_OIDC_REQUIRED_SCOPES": "a2a",
    }
    async with started(shared_opencode, state, **variables) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def anyone(service: Running) -> AsyncGenerator[httpx2.AsyncClient]:
    """A client without a credential."""
    headers = {"A2A-Version": "1.0", "Accept": "application/json"}
    async with httpx2.AsyncClient(base_url=service.url, headers=headers, trust_env=False) as http:
        yield http


@BOTH
@pytest.mark.requirement("PUSH-CREATE-001")
@pytest.mark.requirement("PUSH-CREATE-002")
@pytest.mark.requirement("PUSH-GET-001")
@pytest.mark.requirement("PUSH-GET-002")
@pytest.mark.requirement("PUSH-LIST-001")
@pytest.mark.requirement("PUSH-DEL-001")
@pytest.mark.requirement("PUSH-DEL-002")
async def test_configurations_of_a_completed_task(caller: Caller) -> None:
    for text in ("tck one", "tck two"):  # under one id for the message, and for the configuration
        sent = caller.message(text, messageId="tck-complete-task")
        task = (await caller.ask("send", sent)).task
        config = {"taskId": task["id"], "id": "tck-push", "url": HOOK}
        assert task["status"]["state"] == "TASK_STATE_COMPLETED"

        made = await caller.ask("push create", config)
        read = await caller.ask("push get", config)
        (await caller.ask("push get", {**config, "id": "tck-nonexistent"})).refuses(NOT_FOUND)
        listed = await caller.ask("push list", {"taskId": task["id"]})
        gone = await caller.ask("push delete", config)
        (await caller.ask("push get", config)).refuses(NOT_FOUND)
        again = await caller.ask("push delete", config)

        assert made.result == read.result == config
        assert listed.result["configs"] == [config]
        assert gone.result == again.result == {}


@BOTH
@pytest.mark.requirement("PUSH-CFG-001")
@pytest.mark.requirement("PUSH-CFG-002")
@pytest.mark.requirement("PUSH-CFG-003")
@pytest.mark.requirement("PUSH-ERR-001")
@pytest.mark.requirement("PUSH-IDEM-001")
async def test_configurations_whose_id_the_service_chooses(caller: Caller) -> None:
    task = (await caller.ask("send", caller.message("tck-complete-task for push"))).task["id"]

    made = (await caller.ask("push create", {"taskId": task, "url": HOOK})).result
    named = {"taskId": task, "id": made["id"]}
    read = (await caller.ask("push get", named)).result
    (await caller.ask("push get", {"taskId": task, "id": NOBODY})).refuses(NOT_FOUND)
    gone = [(await caller.ask("push delete", named)).result for _ in range(2)]

    assert isinstance(made["id"], str)
    assert read == made == {**named, "url": HOOK}
    assert gone == [{}, {}]


@BOTH
@pytest.mark.requirement("PUSH-DELIVER-001")
@pytest.mark.requirement("PUSH-DELIVER-002")
@pytest.mark.requirement("PUSH-DELIVER-003")
@pytest.mark.requirement("SEC-PUSH-001")
async def test_deliveries(caller: Caller, opencode: FakeOpenCode) -> None:
    opencode.play("permission-once")
    secret = {"scheme": "Bearer", "credentials": "tck-test-token-auth"}
    async with receiving() as inline, receiving() as later:
        config = {"id": "tck-push", "url": inline.url, "authentication": secret}
        sent = caller.message("TCK prerequisite task creation")
        sent["configuration"] = {"taskPushNotificationConfig": config}
        task = (await caller.ask("send", sent)).task["id"]
        config = {"taskId": task, "url": later.url, "authentication": secret}
        assert (await caller.ask("push create", config)).result["id"]
        await caller.ask("send", caller.message("once", taskId=task))
        told = [await receiver.ended() for receiver in (inline, later)]

    for one in (one for received in told for one in received):
        assert one.headers["authorization"] == "Bearer tck-test-token-auth"
        update = Parse(one.body, StreamResponse()).status_update
        assert (update.task_id, update.context_id != "") == (task, True)
    assert [received[-1].state for received in told] == ["completed"] * 2


@OLDER
@pytest.mark.requirement("0.3-push-config")
async def test_configurations_of_the_older_line(caller: Caller) -> None:
    """The kit of 0.3, test_push_notification_config_methods.py."""
    rpc = caller.wire.rpc
    task, empty = [
        (await caller.ask("send", caller.message(f"Task {n}"))).task["id"] for n in range(2)
    ]
    wanted: JsonObject = {"url": HOOK, "token": "", "authentication": {}}
    named = {"id": task, "pushNotificationConfigId": task} if rpc else {"id": task, "taskId": task}

    def asked(task_id: str) -> JsonObject:
        return {"taskId": task_id, "pushNotificationConfig": wanted}

    made = (await caller.ask("push create", asked(task))).result
    read = (await caller.ask("push get", {"id": task} if rpc else named)).result
    (await caller.ask("push create", asked("nonexistent-task-id"))).refuses(NOT_FOUND)
    nobody = {"id": "nonexistent-task-id", "taskId": "nonexistent-task-id"}
    (await caller.ask("push get", nobody)).refuses(NOT_FOUND)
    listed = (await caller.ask("push list", {"id": task, "taskId": task})).result
    nothing = (await caller.ask("push list", {"id": empty, "taskId": empty})).result
    gone = (await caller.ask("push delete", named)).result
    (await caller.ask("push get", named)).refuses(NOT_FOUND)

    assert made == read
    assert made["pushNotificationConfig"]["url"] == HOOK
    assert listed == ([made] if rpc else {"configs": [made]})
    assert nothing == ([] if rpc else {"configs": []})
    assert gone == (None if rpc else {})
    name = {"taskId": task} if rpc else {"name": f"tasks/{task}/pushNotificationConfigs/{task}"}
    assert made.items() >= name.items()


@pytest.mark.requirement("SEC-EXTCARD-001")
@pytest.mark.requirement("SEC-EXTCARD-002")
@pytest.mark.requirement("SEC-EXTCARD-004")
async def test_the_extended_card_is_for_those_who_may_see_it(
    anyone: httpx2.AsyncClient, service: Running, provider: LocalIssuer
) -> None:
    public = (await anyone.get("/.well-known/agent-card.json")).json()
    weak, good = (f"Bearer {provider.mint(scope=scope)}" for scope in ("other", "a2a"))

    alone = await anyone.get("/extendedAgentCard")
    wrong = await anyone.get("/extendedAgentCard", headers={"Authorization": "Bearer nonsense"})
    lacking = await anyone.get("/extendedAgentCard", headers={"Authorization": weak})
    allowed = await anyone.get("/extendedAgentCard", headers={"Authorization": good})
    caller = await Caller(service).ask("card", {})

    assert public["capabilities"]["extendedAgentCard"] is True
    assert [one.status_code for one in (alone, wrong, lacking)] == [401, 401, 403]
    for refused in (alone, wrong, lacking):
        assert refused.json()["error"]["message"]
        assert refused.headers["www-authenticate"].startswith("Bearer")
    assert allowed.status_code == caller.status == 200
    assert len(allowed.json()["skills"]) > len(public["skills"])


@pytest.mark.requirement("SEC-AUTH-001")
@pytest.mark.requirement("SEC-AUTH-004")
@pytest.mark.requirement("SEC-AUTH-006")
async def test_nothing_is_done_for_those_without_a_credential(
    anyone: httpx2.AsyncClient, service: Running
) -> None:
    caller = Caller(service, Wire.REST)
    (await caller.ask("get", {"id": NOBODY})).refuses(NOT_FOUND)
    message = caller.message("auth should be required")
    calls = [("SendMessage", message), ("GetTask", {"id": NOBODY})]

    rest = await anyone.get(f"/tasks/{NOBODY}")
    for method, params in calls:
        call = {"jsonrpc": "2.0", "id": "sec", "method": method, "params": params}
        answer = await anyone.post("/", json=call)
        assert (answer.status_code, "error" in answer.json()) == (401, True)

    assert (rest.status_code, "error" in rest.json()) == (401, True)


@pytest.mark.live
@pytest.mark.requirement("CARD-SIGN-001")
@pytest.mark.requirement("CARD-SIGN-002")
@pytest.mark.requirement("CARD-SIGN-003")
async def test_cards_are_signed_by_the_letter(anyone: httpx2.AsyncClient, service: Running) -> None:
    path = "/.well-known/agent-card.json"
    pure = (await anyone.get(path)).json()
    hybrid = (await anyone.get(path, headers={"A2A-Version": ""})).json()
    extended = (await Caller(service, Wire.REST).ask("card", {})).result
    cards: list[Any] = [pure, hybrid, extended]

    for card in cards:
        for one in card["signatures"]:
            header = orjson.loads(base64.urlsafe_b64decode(one["protected"] + "=="))
            assert header["alg"] == "ES256"
            assert header["kid"]
            assert header["jku"] == f"{service.url}/.well-known/jwks.json"
        # What is served is what is signed: nothing in it is left out by the canonical form.
        assert without_defaults(card, AgentCard.DESCRIPTOR) == card
    changed = [{**card, "name": "Another"} for card in cards]
    added = [{**card, "unsigned": 1} for card in cards]
    assert await verified([*cards, *changed, *added]) == [True] * 3 + [False] * 6


async def verified(cards: list[Any]) -> list[bool]:
    node = shutil.which("node")
    assert node is not None
    process = await asyncio.create_subprocess_exec(
        *(node, str(LETTER)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate(orjson.dumps(cards))
    return orjson.loads(said)


def without_defaults(value: Any, kind: Any) -> Any:
    """Return an object without what ProtoJSON leaves out: section 8.4.1, by the schema."""
    fields = {field.json_name: field for field in kind.fields}
    return {
        name: reduced(content, fields[name]) if name in fields else content
        for name, content in value.items()
        if name not in fields or fields[name].has_presence or content not in ("", 0, False, [], {})
    }


def reduced(content: Any, field: Any) -> Any:
    kind = field.message_type
    if kind is None or kind.full_name == "google.protobuf.Struct":
        return content
    if kind.GetOptions().map_entry:
        inner = kind.fields_by_name["value"]
        return {name: reduced(one, inner) for name, one in content.items()}
    if field.is_repeated:
        return [without_defaults(one, kind) for one in content]
    return without_defaults(content, kind)
