"""What a deployment publishes is what it does: each statement is looked up and tried.

The statements stand in the public card, the extended card, the OpenAPI document and the profile.
Every test walks several deployments.
"""

import base64
import sqlite3
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
import pytest_asyncio
from pydantic.alias_generators import to_camel

from opencode_a2a.a2a.operations import OPERATIONS, PUSH_OPERATIONS
from opencode_a2a.a2a.types import Version
from opencode_a2a.config import VARIABLES
from opencode_a2a.errors import ServiceError
from opencode_a2a.extensions import METHODS
from opencode_a2a.schemas import MAX_BYTES
from opencode_a2a.server.contracts import ALL_EXTENSIONS
from tests.support.caller import Caller
from tests.support.front import started
from tests.support.opencode import FakeOpenCode
from tests.support.service import TOKEN, Running

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.requirement("I17"),
    pytest.mark.usefixtures("opencode"),
]

OVERRIDE = VARIABLES["A2A_ALLOW_DIRECTORY_OVERRIDE"]
PASSWORD = "a-password-of-some-length"  # noqa: S105 - not a secret
ANN = [{"scheme": "basic", "username": "ann", "password": PASSWORD}]
BASIC = {"A2A_BEARER_TOKEN": "", "A2A_STATIC_AUTH_CREDENTIALS": orjson.dumps(ANN).decode()}
EVERYTHING = {
    "A2A_ENABLE_SESSION_SHELL": "true",
    "A2A_ENABLE_WORKSPACE_MUTATIONS": "true",
    "A2A_BEARER_TOKEN": "",
    "A2A_STATIC_AUTH_CREDENTIALS": orjson.dumps(
        [
            {
                "scheme": "bearer",
                "principal": "ann",
                "token": TOKEN,
                "capabilities": ["session_shell", "workspace_mutation"],
            }
        ]
    ).decode(),
}
BOB = "a-token-for-bob-who-may-do-less"
TWO = [
    *orjson.loads(EVERYTHING["A2A_STATIC_AUTH_CREDENTIALS"]),
    {"scheme": "bearer", "principal": "bob", "token": BOB},
]
PRINCIPALS = {**EVERYTHING, "A2A_STATIC_AUTH_CREDENTIALS": orjson.dumps(TWO).decode()}
DEPLOYMENTS: dict[str, dict[str, str]] = {
    "default": {},
    "no root": {"OPENCODE_WORKSPACE_ROOT": ""},
    "no override": {"A2A_ALLOW_DIRECTORY_OVERRIDE": "false"},
    "always": {"A2A_ALLOW_ALWAYS": "true"},
    "1.0 only": {"A2A_SUPPORTED_PROTOCOL_VERSIONS": "1.0", "A2A_PROTOCOL_VERSION": "1.0"},
    "0.3 only": {"A2A_SUPPORTED_PROTOCOL_VERSIONS": "0.3", "A2A_PROTOCOL_VERSION": "0.3"},
    "basic only": BASIC,
    "small bodies": {"A2A_MAX_REQUEST_BODY_BYTES": "2000"},
    "read-only": {"A2A_PROFILE": "read-only", **EVERYTHING},
    "ask": {"A2A_PROFILE": "ask", **EVERYTHING},
    "everything": EVERYTHING,
    "push off": {"A2A_PUSH_ENABLED": "false"},
    "fleet": {},
    "principals": PRINCIPALS,
}


class Deployment:
    """A running service, and all that it says of itself."""

    def __init__(self, name: str, service: Running, opencode: FakeOpenCode) -> None:
        self.name = name
        self.service = service
        self.opencode = opencode
        self.line = "0.3" if name == "0.3 only" else "1.0"
        self.caller: Caller = Caller(service)
        if name == "basic only":
            value = base64.b64encode(f"ann:{PASSWORD}".encode()).decode()
            self.caller = Caller(service, authorization=f"Basic {value}")
        self.public: Any = None
        self.extended: Any = None
        self.openapi: Any = None

    async def read(self) -> None:
        old = self.line == "0.3"
        self.public = await self._get("/.well-known/agent-card.json")
        self.extended = await self._get("/v1/card" if old else "/extendedAgentCard")
        self.openapi = await self._get("/openapi.json")

    async def _get(self, path: str) -> Any:
        headers = {**self.caller.headers, "A2A-Version": self.line}
        answer = await self.service.http.get(path, headers=headers)
        assert answer.status_code == 200, answer.content
        return orjson.loads(answer.content)

    def said(self, key: str) -> Any:
        """Return what the extended card says of an extension; the OpenAPI document agrees."""
        (uri,) = (extension.uri for extension in ALL_EXTENSIONS if extension.key == key)
        listed = self.extended["capabilities"]["extensions"]
        (params,) = (one["params"] for one in listed if one["uri"] == uri)
        published = self.openapi["paths"]["/"]["post"]["x-a2a-extension-contracts"][key]
        assert {**published, "uri": None} == {**params, "uri": None}
        return params

    async def answer(self, method: str, params: Any) -> Any:
        answer = await self.caller.answer(method, params, self.line)
        if "error" in answer:
            check_data(answer["error"]["data"])
        return answer

    async def refused_fields(self, method: str, params: Any) -> set[str]:
        """Return the fields that a method finds wrong."""
        error = (await self.answer(method, params)).get("error", {"data": {}})
        text = orjson.dumps(error["data"]).decode()
        violations = _found(orjson.loads(text), "field")
        return {one for one in violations if isinstance(one, str)}

    def message(self, text: str = "hello", **fields: Any) -> Any:
        if self.line == "1.0":
            said = {"role": "ROLE_USER", "parts": [{"text": text}]}
        else:
            said = {"kind": "message", "role": "user", "parts": [{"kind": "text", "text": text}]}
        params = {"message": {"messageId": str(uuid.uuid4()), **said}}
        return params | fields

    async def send(self, **fields: Any) -> Any:
        method = "SendMessage" if self.line == "1.0" else "message/send"
        return await self.answer(method, self.message(**fields))


def _found(value: Any, key: str) -> Iterator[Any]:
    """Yield all values that stand under a key, wherever that is."""
    if isinstance(value, dict):
        for name, inner in value.items():  # pyright: ignore[reportUnknownVariableType] # any JSON
            if name == key:
                yield inner
            yield from _found(inner, key)
    elif isinstance(value, list):
        for inner in value:  # pyright: ignore[reportUnknownVariableType] # any JSON
            yield from _found(inner, key)


def check_data(data: Any) -> None:
    """Check that an error carries only the data that its class declares."""
    every: list[type[ServiceError]] = [ServiceError]
    for kind in every:
        every += kind.__subclasses__()
    if "type" in data:
        reason, sent = data["type"], {to_camel(name) for name in data} - {"type"}
    else:
        info, *more = data
        reason, sent = info["reason"], {*info["metadata"], *(["violations"] if more else [])}
    declared = {name for kind in every if kind.reason == reason for name in kind.data_fields}
    assert sent <= set(map(to_camel, declared)), (reason, sent)


def words(value: Any) -> set[str]:
    """Return every text in a document: keys, values and what stands inside of them."""
    return set(orjson.dumps(value).decode().replace('"', " ").replace("\\", " ").split())


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=DEPLOYMENTS)
async def deployment(
    request: pytest.FixtureRequest,
    shared_opencode: FakeOpenCode,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Deployment]:
    state, changes = tmp_path_factory.mktemp("state"), DEPLOYMENTS[request.param]
    async with FakeOpenCode(shared_opencode.workspace).running() as other:
        if request.param == "fleet":
            # New conversations begin at the one that plays what the tests want.
            first = {"name": "a", "url": shared_opencode.url}
            entries = [first, {"name": "b", "url": other.url, "drain": True}]
            changes = {"OPENCODE_UPSTREAMS": orjson.dumps(entries).decode()}
        async with started(shared_opencode, state, **changes) as service:
            found = Deployment(request.param, service, shared_opencode)
            await found.read()
            yield found


async def test_a_directory_may_be_chosen_exactly_where_that_is_said(
    deployment: Deployment,
) -> None:
    below = deployment.opencode.workspace / "below"
    below.mkdir(exist_ok=True)
    said = deployment.said("compatibility_profile")["runtime_features"]["directory_binding"]

    answer = await deployment.send(metadata={"opencode": {"directory": str(below)}})

    wrong = await deployment.refused_fields("opencode.sessions.list", {"directory": "below"})

    assert said["allow_override"] == (deployment.name not in ("no root", "no override"))
    assert ("OPENCODE_WORKSPACE_ROOT" in str(answer)) == (deployment.name == "no root")
    # The page of the settings says what the setting cannot do without a root.
    assert "Without a workspace root" in str(OVERRIDE.info.description)
    assert ("result" in answer) == said["allow_override"], answer
    listed = deployment.said("session_binding")["supported_metadata"]
    assert ("opencode.directory" in listed) == said["allow_override"]
    assert wrong == (set() if said["allow_override"] else {"directory"})


async def test_always_is_listed_exactly_where_it_is_taken(deployment: Deployment) -> None:
    deployment.opencode.play("permission-always")
    said = deployment.said("interrupt_callback")["permission_reply_values"]
    schemas = deployment.openapi["components"]["schemas"]
    shown = next(
        one["properties"]["reply"] for name, one in schemas.items() if "Permission" in name
    )
    always = ["always"] if deployment.name == "always" else []
    assert said == ["once", *always, "reject"]
    assert shown["enum"] == said
    if deployment.name == "read-only":
        return  # nobody is asked for what is denied
    task = (await deployment.send())["result"]
    task = task.get("task", task)
    asked = task["metadata"]["shared"]["interrupt"]["request_id"]
    reply = "a2a.interrupt.permission.reply"

    wrong = await deployment.answer(reply, {"request_id": asked, "reply": "perhaps"})
    answer = await deployment.answer(reply, {"request_id": asked, "reply": "always"})

    offered = wrong["error"]["message"].partition(";")[0]
    assert [word for word in ("once", "always", "reject") if f"'{word}'" in offered] == [
        "once",
        "reject",
    ]
    assert ("result" in answer) == ("always" in said), answer


async def test_a_question_is_settled_by_as_many_answers_as_is_said(deployment: Deployment) -> None:
    deployment.opencode.play("question-answered")
    said = deployment.said("interrupt_callback")["question_reply_contract"]["order"]
    task = (await deployment.send())["result"]
    asked = task.get("task", task)["metadata"]["shared"]["interrupt"]
    reply, request = "a2a.interrupt.question.reply", {"request_id": asked["request_id"]}

    for few in ([], [["Red"]], [["Red"], ["S"], ["S"]]):
        assert await deployment.refused_fields(reply, {**request, "answers": few}) == {"answers"}
    whole = await deployment.answer(reply, {**request, "answers": [["Red"], ["S"]]})

    assert "one array for each question" in said
    assert len(asked["details"]["questions"]) == 2
    assert "result" in whole


async def test_every_error_of_a_call_is_one_that_its_method_lists(deployment: Deployment) -> None:
    wrong = {"INVALID_PARAMS", "INVALID_FIELD", "MISSING_FIELD"}
    for key, said in [(one.key, deployment.said(one.key)) for one in ALL_EXTENSIONS]:
        for method, contract in said.get("method_contracts", {}).items():
            if method not in said["methods"]:
                continue
            error = (await deployment.answer(method, {"no_such_field": 5}))["error"]
            data = error["data"]
            reason = data["type"] if "type" in data else data[0]["reason"]
            assert reason in contract["errors"], (key, method)
            assert wrong & set(contract["errors"]) <= {"INVALID_FIELD", "MISSING_FIELD"}, method


async def test_every_method_takes_the_routing_fields_that_it_lists(deployment: Deployment) -> None:
    place = {"directory": ".", "workspace": {"id": "wrk_1deb3fc6b000iKn0wo4MZ7ksDZ"}}
    sent = {"directory": ".", "metadata": {"opencode": place}, "no_such_field": 5}
    every = {"metadata.opencode.workspace.id", "metadata.opencode.directory", "directory"}
    for key in ("session_query", "provider_discovery", "workspace_control", "interrupt_recovery"):
        said = deployment.said(key)
        common = set(every)
        for method in said["methods"]:
            listed = set(said["method_contracts"][method]["routing_fields"])
            common &= listed

            wrong = await deployment.refused_fields(method, sent)

            assert "no_such_field" in wrong, method
            free = deployment.name not in ("no root", "no override")
            chosen = every if free else {"metadata.opencode.workspace.id"}
            assert listed == chosen - wrong, method
        assert set(said["routing_fields"]) == common


async def test_only_methods_of_the_versions_spoken_are_named(deployment: Deployment) -> None:
    wire = deployment.said("wire_contract")
    spoken = {Version(version) for version in wire["supported_protocol_versions"]}
    documents = (deployment.public, deployment.extended, deployment.openapi)
    said = {word.strip(".,:;()") for document in documents for word in words(document)}
    for line in Version:
        named = said & {name for method in OPERATIONS if (name := method.named(line))}
        assert bool(named) == (line in spoken), named
    for method in wire["all_jsonrpc_methods"]:
        version = "0.3" if "/" in method else "1.0"
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"no_such_field": 5}}
        headers = {**deployment.caller.headers, "A2A-Version": version}
        if method.startswith(("opencode.", "a2a.")):
            headers["A2A-Version"] = deployment.line
        answer = await deployment.service.http.post("/", json=body, headers=headers)
        assert answer.status_code == 200
        streams = answer.headers["content-type"] == "text/event-stream"
        told = orjson.loads(answer.content.removeprefix(b"data: ") if streams else answer.content)
        assert told.get("error", {"code": 0})["code"] not in (-32601, -32009), method


async def test_features_of_a_version_are_there(deployment: Deployment) -> None:
    versions = deployment.said("wire_contract")["protocol_compatibility"]["versions"]
    for version, said in versions.items():
        prefix = "" if version == "1.0" else "/v1"
        headers = {**deployment.caller.headers, "A2A-Version": version}
        rest = await deployment.service.http.get(f"{prefix}/tasks", headers=headers)
        rpc = await deployment.caller.answer("ListTasks", {}, version)
        assert rest.status_code == 200
        listed = "result" in rpc
        assert listed == ("task list" in said["supported_features"])
        assert listed != ("task list over HTTP+JSON only" in said["supported_features"])


async def test_the_security_schemes_are_those_that_open_the_door(deployment: Deployment) -> None:
    schemes: dict[str, Any] = deployment.openapi["components"]["securitySchemes"]
    card = deployment.extended["securitySchemes"]
    required = {name for one in deployment.openapi["security"] for name in one}
    ann = "Basic " + base64.b64encode(f"ann:{PASSWORD}".encode()).decode()
    tries = {"bearerAuth": f"Bearer {TOKEN}", "basicAuth": ann}

    async with httpx2.AsyncClient(base_url=deployment.service.url, trust_env=False) as http:
        for name, value in tries.items():
            answer = await http.get("/health", headers={"Authorization": value})
            assert (answer.status_code == 200) == (name in schemes), name
        challenges = (await http.get("/health")).headers.get_list("www-authenticate")

    assert set(card) == set(schemes) == required
    assert {one.split(" ")[0].lower() + "Auth" for one in challenges} == set(schemes)


async def test_errors_carry_the_data_that_is_declared(
    shared_opencode: FakeOpenCode, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    stored = {"A2A_TASK_STORE_BACKEND": "database", "A2A_TASK_STORE_DATABASE_URL": url}
    async with started(shared_opencode, tmp_path, **stored) as service:
        deployment = Deployment("default", service, shared_opencode)
        await deployment.read()
        said = deployment.said("interrupt_recovery")
        with closing(sqlite3.connect(tmp_path / "tasks.db")) as other:
            other.execute("DROP TABLE interrupts")
            other.commit()

        refused = await deployment.caller.refused("opencode.permissions.list", {})

    told = said["errors"]["error_data_fields"][refused.reason]
    assert refused.reason == "TASK_STORE_UNAVAILABLE"
    assert set(refused.data) == set(told) == {"operation"}


async def test_the_two_scopes_of_recovery_agree(deployment: Deployment) -> None:
    scope = deployment.said("interrupt_recovery")["recovery_scope"]
    retained = deployment.said("compatibility_profile")["extension_retention"]
    (uri,) = (one.uri for one in ALL_EXTENSIONS if one.key == "interrupt_recovery")

    assert retained[uri]["implementation_scope"] == scope["data_source"]
    assert retained[uri]["identity_scope"] == scope["identity_scope"]


async def test_every_name_of_an_extension_is_in_both_cards_and_works(
    deployment: Deployment,
) -> None:
    for card in (deployment.public, deployment.extended):
        listed = {one["uri"]: one for one in card["capabilities"]["extensions"]}
        for extension in ALL_EXTENSIONS:
            assert extension.uri in listed
            for alias in extension.aliases:
                assert listed[alias]["params"] == {"alias_of": f"#{extension.anchor}"}
        header = "A2A-Extensions" if deployment.line == "1.0" else "X-A2A-Extensions"
        asked = {header: ", ".join(listed), "A2A-Version": deployment.line}
        method = "GetTask" if deployment.line == "1.0" else "tasks/get"
        sent = await deployment.send()
        task = sent["result"].get("task", sent["result"])
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"id": task["id"]}}
        answer = await deployment.service.http.post(
            "/", json=body, headers={**deployment.caller.headers, **asked}
        )
        assert answer.headers[header] == ", ".join(listed)


async def test_the_behaviors_are_those_of_the_service(deployment: Deployment) -> None:
    wire = deployment.said("wire_contract")
    said = wire["service_behaviors"]
    profile = deployment.said("compatibility_profile")
    modern = deployment.line == "1.0"
    cancel = "CancelTask" if modern else "tasks/cancel"
    assert profile["service_behaviors"] == said

    assert said["terminal_states"]["behavior"] == "first_terminal_state_wins"
    done = await deployment.send(text="to be done")
    task = done["result"].get("task", done["result"])
    late = await deployment.answer(cancel, {"id": task["id"]})
    assert late["error"]["code"] == -32002

    assert said["accepted_output_modes"]["persistence"] == "stored_with_the_task"
    modes = {"acceptedOutputModes": ["text/plain"]}
    sent = await deployment.send(text="plain only", configuration=modes)
    kept = sent["result"].get("task", sent["result"])
    read = await deployment.answer("GetTask" if modern else "tasks/get", {"id": kept["id"]})
    negotiated = read["result"]["metadata"]["opencode"]["output_negotiation"]
    assert negotiated == {"accepted_output_modes": ["text/plain"]}

    bound = said["request_body"]["max_bytes"]
    body = b"x" * (bound + 1)
    headers = deployment.caller.headers
    large = await deployment.service.http.post("/", content=body, headers=headers)
    assert (large.status_code, said["request_body"]["http_status"]) == (413, 413)
    assert said["request_body"]["error_type"].encode() in large.content

    stops = said["streams"]["input_required"]
    assert stops["behavior"] == "stream_ends"
    assert stops["continue_with"]
    if deployment.name == "read-only":
        return  # nobody is asked for what is denied
    deployment.opencode.play("permission-once")
    stream = "SendStreamingMessage" if modern else "message/stream"
    call = {"jsonrpc": "2.0", "id": 1, "method": stream, "params": deployment.message("ask me")}
    asked = {**deployment.caller.headers, "A2A-Version": deployment.line}
    answer = await deployment.service.http.post("/", json=call, headers=asked)
    last = orjson.loads(answer.content.decode().strip().rpartition("data: ")[2])["result"]
    status = last["statusUpdate"] if modern else last
    assert status["status"]["state"] in ("TASK_STATE_INPUT_REQUIRED", "input-required")
    assert modern or status["final"] is True
    again = "SubscribeToTask" if modern else "tasks/resubscribe"
    assert again in stops["continue_with"]


async def test_every_method_that_is_listed_runs_and_no_other_does(deployment: Deployment) -> None:
    wire = deployment.said("wire_contract")
    listed = set(wire["all_jsonrpc_methods"])
    conditional = wire["extensions"]["conditionally_available_methods"]
    retained = deployment.said("compatibility_profile")["method_retention"]
    push = {name for one in PUSH_OPERATIONS for name in (one.name, one.v03) if name}
    for method in METHODS:
        answer = await deployment.answer(method.name, method.example)

        error = answer.get("error", {"code": 0, "message": ""})
        assert (error["code"] == -32601) == (method.name not in listed), (method.name, error)
        if method.name in listed:
            # A credential without a capability is refused; that the profile forbids it is not told
            # to each caller.
            assert error["code"] != -31007 or "capability" in error["message"], (method.name, error)
        else:
            said = conditional[method.name]
            assert f"({said['toggle']})" in error["message"]
            assert f"'{said['reason']}'" in str(error["data"])
            assert retained[method.name]["toggle"] == said["toggle"]
            assert retained[method.name]["availability"] == "disabled"
    assert bool(listed & push) == (deployment.name != "push off")
    assert bool(set(conditional) & push) == (deployment.name == "push off")
    url = {"url": "https://example.com/hook"}
    for name in push & set(retained):
        params: Any = {"taskId": "t-1", "id": "c-1"}
        if "/" in name:
            params = {"id": "t-1", "pushNotificationConfigId": "c-1"}
        if name == "CreateTaskPushNotificationConfig":
            params = {"taskId": "t-1", **url}
        elif name.endswith("/set"):
            params = {"taskId": "t-1", "pushNotificationConfig": url}
        elif name.endswith("Configs"):
            params = {"taskId": "t-1"}
        elif name.endswith("/list"):
            params = {"id": "t-1"}
        answer = await deployment.caller.answer(name, params, "0.3" if "/" in name else "1.0")
        expected = -32003 if deployment.name == "push off" else -32001
        assert answer["error"]["code"] == expected, answer
        refused = expected == -32003
        assert refused == (name not in listed)
        assert (retained[name]["availability"] == "disabled") == refused


async def test_a_skill_stands_for_what_can_be_called(deployment: Deployment) -> None:
    listed = set(deployment.said("wire_contract")["all_jsonrpc_methods"])
    features = deployment.said("compatibility_profile")["runtime_features"]
    skills = {one["id"]: one for one in deployment.extended["skills"]}

    for skill in skills.values():
        if "JSON-RPC methods" in skill["description"]:
            assert skill["examples"]
            assert {one.partition(":")[0] for one in skill["examples"]} <= listed
    everything = deployment.name in ("everything", "principals")
    assert features["session_shell"]["enabled"] == everything
    assert ("opencode.sessions.session_shell" in skills) == everything
    assert ("opencode.webhooks.query" in skills) == (deployment.name != "push off")
    for card in (deployment.public, deployment.extended):
        chat = next(one for one in card["skills"] if one["id"] == "opencode.chat")
        assert ("write" in chat["description"]) == (deployment.name != "read-only")
        assert ("asking" in chat["description"]) == (deployment.name == "ask")


async def test_every_limit_of_a_schema_is_the_one_that_is_published(
    deployment: Deployment,
) -> None:
    said = deployment.said("output_schema")
    deepest, most = said["max_schema_depth"], said["max_schema_values"]

    def nested(depth: int) -> Any:
        """Return a schema whose innermost value lies this deep."""
        schema: Any = {"type": "object"}
        for _ in range((depth - 1) // 2):
            schema = {"type": "object", "properties": {"p": schema}}
        return schema if depth % 2 else {**schema, "properties": {"q": {"type": "object"}}}

    def wide(count: int) -> Any:
        return {"type": "object", "examples": [0] * (count - 3)}

    def long(size: int) -> Any:
        empty = {"type": "object", "description": ""}
        return {**empty, "description": "x" * (size - len(orjson.dumps(empty)))}

    tries = {"depth": (nested, deepest), "values": (wide, most), "bytes": (long, MAX_BYTES)}
    assert said["max_schema_bytes"] == MAX_BYTES
    for what, (schema, limit) in tries.items():
        for size, refused in ((limit, False), (limit + 1, True)):
            if deployment.name == "small bodies" and what != "depth":
                continue
            answer = await deployment.send(
                metadata={"shared": {"output": {"schema": schema(size)}}}
            )
            code = answer.get("error", {"code": 0})["code"]
            assert code == (-32602 if refused else 0), (what, size, answer)


async def test_one_message_id_with_other_content_is_a_new_message(deployment: Deployment) -> None:
    modern = deployment.line == "1.0"
    methods = deployment.said("wire_contract")["service_behaviors"]["methods"]
    said = methods["SendMessage" if modern else "message/send"]["idempotency"]

    async def send(text: str, message_id: str) -> str:
        params = deployment.message(text)
        params["message"]["messageId"] = message_id
        sent = await deployment.answer("SendMessage" if modern else "message/send", params)
        return sent["result"].get("task", sent["result"])["id"]

    first, again, other = [await send(text, "the-same") for text in ("one", "one", "two")]

    assert "message id and content" in said
    assert (first == again, first == other) == (True, False)


async def test_every_documented_page_answers_as_it_says(deployment: Deployment) -> None:
    paths: dict[str, Any] = deployment.openapi["paths"]
    plain = [path for path, verbs in paths.items() if "get" in verbs and "{" not in path]
    async with httpx2.AsyncClient(base_url=deployment.service.url, trust_env=False) as stranger:
        for path in plain:
            said = paths[path]["get"]
            known = [status for status in said["responses"] if status.isdigit()]
            version = "0.3" if path.startswith(("/v1", "/agent/")) else "1.0"
            headers = {**deployment.caller.headers, "A2A-Version": version}
            answer = await deployment.service.http.get(path, headers=headers)
            alone = await stranger.get(path, headers={"A2A-Version": version})
            assert str(answer.status_code) in known, (path, answer.content)
            assert (alone.status_code == 401) == (said.get("security") != []), path
        page = await stranger.get("/console")
        strange = await stranger.get("/livez", headers={"Host": "example.com"})
    assert page.status_code == 200
    assert "console" in deployment.openapi["info"]["description"]
    assert strange.status_code in (200, 421)


async def test_lists_take_the_form_that_only_03_has_where_that_is_said(
    deployment: Deployment,
) -> None:
    spoken = deployment.said("wire_contract")["supported_protocol_versions"]
    said = deployment.said("session_query")["method_contracts"]
    for name in ("opencode.sessions.list", "opencode.sessions.messages.list"):
        params = {"query": {"limit": 3}}
        if "messages" in name:
            params["session_id"] = "ses_e222241e6ffeQZbiYrXEPgqFtd"  # pyright: ignore[reportArgumentType] # any JSON
        declared = said[name]["params"].get("optional_in_0.3", [])
        for version in spoken:
            answer = await deployment.caller.answer(name, params, version)
            wrong = "query" in orjson.dumps(answer.get("error", {})).decode()
            assert wrong == (version == "1.0"), answer
        assert declared == (["query"] if "0.3" in spoken else [])


async def test_the_card_says_how_many_opencodes_there_are(deployment: Deployment) -> None:
    told = deployment.public["description"]

    assert ("the workspaces of 2 OpenCode servers" in told) == (deployment.name == "fleet")
    assert ("the workspace of one OpenCode server" in told) == (deployment.name != "fleet")


async def test_a_credential_may_call_what_needs_no_capability_and_sees_its_own(
    shared_opencode: FakeOpenCode, tmp_path: Path
) -> None:
    async with started(shared_opencode, tmp_path, **PRINCIPALS) as service:
        deployment = Deployment("principals", service, shared_opencode)
        await deployment.read()
        bob = Caller(service, token=BOB)
        task = (await deployment.send())["result"]["task"]
        for method in METHODS:
            answer = await bob.answer(method.name, method.example, "1.0")

            refused = answer.get("error", {"code": 0})["code"] == -31007
            assert refused == (method.capability is not None), (method.name, answer)
        session = task["metadata"]["shared"]["session"]["id"]
        others = await bob.answer("GetTask", {"id": task["id"]}, "1.0")
        theirs = await bob.answer("opencode.sessions.get", {"session_id": session}, "1.0")
        listed = await bob.answer("ListTasks", {}, "1.0")

    assert [answer["error"]["code"] for answer in (others, theirs)] == [-32001, -31001]
    assert task["id"] not in orjson.dumps(listed).decode()


async def test_a_task_carries_only_the_fields_that_are_listed(deployment: Deployment) -> None:
    (listed,) = {tuple(one) for one in _found(deployment.extended["capabilities"], "task_fields")}
    seen: set[str] = set()
    modes = {"acceptedOutputModes": ["text/plain"]}
    for recording in ("plain-text", "finish-length", "error-400"):
        deployment.opencode.play(recording)
        sent = (await deployment.send(configuration=modes))["result"]
        seen |= set(sent.get("task", sent)["metadata"]["opencode"])

    assert seen <= set(listed)
    assert {"created_at", "title", "output_negotiation", "error", "finish"} <= seen


async def test_health_names_the_profile_that_is_published(deployment: Deployment) -> None:
    answer = await deployment.service.http.get("/health", headers=deployment.caller.headers)

    assert orjson.loads(answer.content)["profile"] == deployment.said("wire_contract")["profile"]


async def test_the_record_of_the_start_names_the_versions_spoken(deployment: Deployment) -> None:
    spoken = deployment.said("wire_contract")["supported_protocol_versions"]

    named: Any = deployment.service.service.report.started()["protocol_versions"]

    assert set(named) == set(spoken)


class Limits:
    """The limits of a schema, each with a value on either side of it."""

    def __init__(self, schemas: Any) -> None:
        self._schemas = schemas

    def sample(self, schema: Any) -> Any:
        """Return a small value that fits a schema."""
        schema = self._meant(schema)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        match schema.get("type"):
            case "object":
                needed, fields = schema.get("required", ()), schema.get("properties", {})
                return {name: self.sample(fields[name]) for name in needed}
            case "array":
                return [self.sample(schema["items"])] * schema.get("minItems", 0)
            case "string":
                beginning = schema.get("pattern", "").partition("[")[0].removeprefix("^")
                return f"{beginning}x"
            case "boolean":
                return True
            case _:
                return schema.get("minimum", 0)

    def of(self, schema: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the path of each limit, and the whole value with it kept and with it passed."""
        schema = self._meant(schema)
        for kept, passed in self._edges(schema):
            yield "", kept, passed
        for name, inner in schema.get("properties", {}).items():
            for choice in self._choices(inner):
                given: Any = value.get(name)
                inside = self._meant(choice).get("type") == "object"
                fits: Any = given if given and inside else self.sample(choice)
                for path, kept, passed in self.of(choice, fits):
                    where = (
                        f"{name}.{path}".rstrip(".") if not path.startswith("[") else name + path
                    )
                    yield where, {**value, name: kept}, {**value, name: passed}
        if schema.get("type") == "array":
            for choice in self._choices(schema["items"]):
                for path, kept, passed in self.of(choice, self.sample(choice)):
                    yield f"[0].{path}".rstrip("."), [kept], [passed]

    def _edges(self, schema: Any) -> Iterator[tuple[Any, Any]]:
        match schema:
            case {"type": "string", **bounds}:
                text = self.sample(schema)
                if "maxLength" in bounds:
                    most = bounds["maxLength"]
                    yield text + "x" * (most - len(text)), text + "x" * (most + 1 - len(text))
                if bounds.get("minLength"):
                    yield text, ""
                if "pattern" in bounds:
                    beginning = text.removesuffix("x")
                    assert bounds["pattern"] == f"^{beginning}[A-Za-z0-9]{{1,128}}$"
                    yield beginning + "x" * 128, beginning + "x" * 129
                if "pattern" in bounds or "enum" in bounds:
                    yield text, "no such word"
            case {"type": "integer", **bounds}:
                if "maximum" in bounds:
                    yield bounds["maximum"], bounds["maximum"] + 1
                if "minimum" in bounds:
                    yield bounds["minimum"], bounds["minimum"] - 1
            case {"type": "array", **bounds}:
                one = self.sample(self._choices(schema["items"])[0])
                if "maxItems" in bounds:
                    yield [one] * bounds["maxItems"], [one] * (bounds["maxItems"] + 1)
                if "minItems" in bounds:
                    yield [one], []
            case _:
                pass

    def _choices(self, schema: Any) -> list[Any]:
        schema = self._resolved(schema)
        listed = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        return [one for one in listed if one.get("type") != "null"] or [schema]

    def _meant(self, schema: Any) -> Any:
        return self._resolved(self._choices(schema)[0])

    def _resolved(self, schema: Any) -> Any:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


async def test_every_limit_of_a_field_is_the_one_that_is_published(
    shared_opencode: FakeOpenCode, tmp_path: Path
) -> None:
    tried: set[str] = set()
    async with started(shared_opencode, tmp_path, **EVERYTHING) as service:
        deployment = Deployment("everything", service, shared_opencode)
        await deployment.read()
        schemas = deployment.openapi["components"]["schemas"]
        limits = Limits(schemas)
        for method in METHODS:
            schema = schemas[f"Request.{method.name}"]["properties"]["params"]
            shared = {one for one in tried if one.startswith("metadata")}
            for path, kept, passed in limits.of(schema, method.example):
                if path in shared:
                    continue  # the same type in every method
                # One field that no method has keeps each from being run.
                within = await deployment.refused_fields(method.name, {**kept, "odd": 1})
                beyond = await deployment.refused_fields(method.name, {**passed, "odd": 1})

                assert path not in within, (method.name, path)
                assert path in beyond, (method.name, path)
                tried.add(path)
        for operation, params in (
            ("ListTasks", {}),
            ("GetTask", {"id": "t-1"}),
            ("SendMessage", deployment.message()),
            ("CreateTaskPushNotificationConfig", {"taskId": "t-1", "url": "https://example.com"}),
            ("tasks/get", {"id": "t-1"}),
        ):
            schema = schemas[f"Request.{operation.replace('/', '.')}"]["properties"]["params"]
            for path, _, passed in limits.of(schema, params):
                version = "0.3" if "/" in operation else "1.0"
                answer = await deployment.caller.answer(operation, passed, version)

                named = {one.replace("[0]", "") for one in _found(answer["error"]["data"], "field")}
                assert answer["error"]["code"] == -32602, (operation, path, answer)
                assert path.replace("[0]", "") in named, (operation, path, named)
                tried.add(path)
    assert {"limit", "answers[0]", "request.messageID", "message.parts", "pageSize"} <= tried
