"""Declarations: what they say of themselves, and that everything made of them agrees."""

import builtins
import typing
from dataclasses import replace
from typing import Any, get_args, get_origin

import orjson
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, RootModel

from opencode_a2a.a2a import render
from opencode_a2a.a2a.encoding import V1
from opencode_a2a.cli import main
from opencode_a2a.config import Settings, load
from opencode_a2a.errors import (
    InvalidFieldError,
    MissingFieldError,
    PaginationModeError,
    ServiceError,
)
from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    FileChange,
    Finished,
    Interrupted,
    Outcome,
    PlanGrew,
    Progressed,
    Question,
    QuestionOption,
    ReasoningGrew,
    ResultGiven,
    Resumed,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
    TurnEvent,
    Usage,
    UsageCounted,
)
from opencode_a2a.extensions import EXTENSIONS, METHODS
from opencode_a2a.extensions.call import Call
from opencode_a2a.extensions.metadata import SESSION_BINDING, STREAM_HINTS
from opencode_a2a.extensions.params import (
    Done,
    Items,
    Listing,
    OfSession,
    Placed,
    PublishedSchema,
    SessionDone,
    read,
    read_result,
    write,
)
from opencode_a2a.extensions.registry import NOTHING, Access
from opencode_a2a.extensions.sessions import SESSIONS, Messages, SessionListParams, StatusItem
from opencode_a2a.ids import ContextId, MessageId, Principal, RequestId, SessionId, TaskId
from opencode_a2a.log.state import Accepted, TaskRef, TaskState
from opencode_a2a.messages import Message, Part
from opencode_a2a.server.card import Cards
from opencode_a2a.server.contracts import ALL_EXTENSIONS, wire_contract
from tools.docs import errors_page, methods_page, specifications_page

ON = load({}, {"A2A_ENABLE_SESSION_SHELL": "true", "A2A_ENABLE_WORKSPACE_MUTATIONS": "true"})


def slug(title: str) -> str:
    """Return the anchor that a heading gets on the page."""
    return title.lower().replace(" ", "-")


@pytest.mark.parametrize("extension", ALL_EXTENSIONS, ids=lambda extension: extension.key)
def test_the_uri_of_an_extension_leads_to_its_section(extension: Any) -> None:
    page = specifications_page(ALL_EXTENSIONS)

    assert extension.anchor == slug(f"{extension.title} v1")
    assert f"\n## {extension.title} v1\n" in page
    assert extension.uri.endswith(f"docs/extension-specifications.md#{extension.anchor}")
    assert all(alias.startswith("urn:") for alias in extension.aliases)


def test_no_name_stands_for_two_things() -> None:
    names = [name for e in ALL_EXTENSIONS for name in (e.uri, *e.aliases)]

    assert len(names) == len(set(names))
    assert len(METHODS) == len({method.name for method in METHODS})


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_says_what_it_is(method: Any) -> None:
    assert method.summary.endswith(".")
    assert method.result.model_fields
    assert method.condition or method.access not in (Access.MUTATE, Access.OPERATE)
    assert (method.capability is None) == (method.access is not Access.OPERATE)
    for error in method.all_errors:
        assert issubclass(error, ServiceError)
        assert error.code == -32601 or not -32100 < error.code <= -32000
        assert error.data_fields or error.code == -32603


def sample(annotation: Any) -> Any:
    """Return a value of a type, by the names of the fields; nothing optional is left out."""
    if isinstance(annotation, type) and issubclass(annotation, RootModel):
        return {"id": "x"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {n: sample(info.annotation) for n, info in annotation.model_fields.items()}
    match get_origin(annotation), get_args(annotation):
        case (typing.Literal, (first, *_)):
            return first
        case (typing.Annotated, (inner, *_)):
            return sample(inner)
        case (builtins.list, (inner,)):
            return [sample(inner)]
        case (builtins.dict, (_, inner)):
            return {"key": sample(inner)}
        case (_, kinds) if kinds:
            return sample(next(kind for kind in kinds if kind is not type(None)))
        case _:
            return {str: "x", int: 1, float: 1.5, bool: True}[annotation]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_result_can_be_read_from_another_replica(method: Any) -> None:
    whole = orjson.dumps(sample(method.result))
    written = write(method.result.model_validate_json(whole, by_alias=False, by_name=True))

    assert {*written} == {*method.result.model_fields}
    assert write(read_result(method.result, written)) == written


def test_what_a_later_version_adds_to_a_result_is_ignored() -> None:
    sent: Any = {"items": [{"session_id": "ses_1", "type": "busy", "later": 1}], "later": 1}

    result = read_result(Items[StatusItem], sent)

    assert result == Items(items=[StatusItem(session_id="ses_1", type="busy")])


def test_only_methods_that_read_are_merged() -> None:
    extension = replace(SESSIONS, methods={})

    def merge(_: Placed, results: list[Done]) -> Done:
        return results[0]

    with pytest.raises(TypeError, match="merge is for methods that read"):

        @extension.method("opencode.sessions.end", Access.CONTROL, merge=merge)
        async def end(  # pyright: ignore[reportUnusedFunction] - it is refused
            call: Call, params: Placed
        ) -> Done:
            """End all sessions."""
            return Done()


def test_the_reference_has_every_method_and_every_error() -> None:
    methods, errors = methods_page(EXTENSIONS), errors_page()

    for method in METHODS:
        assert f"\n### `{method.name}`\n" in methods
        for error in method.all_errors:
            assert f"| {error.reason} | {error.code} |" in errors


@pytest.mark.parametrize("settings", [Settings(), ON], ids=["default", "on"])
def test_all_surfaces_agree_about_what_is_switched_on(settings: Settings) -> None:
    wire: Any = wire_contract(settings)
    card: Any = Cards(settings, 0).shown("hybrid", extended=True)
    listed = {
        name
        for extension in card["capabilities"]["extensions"]
        for name in extension["params"].get("methods", [])
    }

    assert listed == set(wire["extensions"]["jsonrpc_methods"])
    off = {method.name for method in METHODS if method.state(settings) != "enabled"}
    assert off == set(wire["extensions"]["conditionally_available_methods"])
    assert bool(off) == (settings is not ON)
    skills = orjson.dumps(card["skills"]).decode()
    assert not [name for name in off if f'"{name}:' in skills]


def test_all_wrong_fields_are_listed_at_once() -> None:
    with pytest.raises(MissingFieldError) as missing:
        read(OfSession, {}, "1.0")
    with pytest.raises(InvalidFieldError) as mixed:
        read(OfSession, {"directory": 5, "nonsense": 1}, "1.0")
    with pytest.raises(PaginationModeError) as paged:
        read(SessionListParams, {"page": 1}, "1.0")

    assert missing.value.data == {"field": "session_id", "fields": ["session_id"]}
    assert {v.field for v in mixed.value.violations} == {"session_id", "directory", "nonsense"}
    assert paged.value.data["supported"] == ["limit"]
    assert paged.value.data["unsupported"] == ["page"]


def test_only_the_older_line_may_nest_its_filters() -> None:
    nested = read(SessionListParams, {"query": {"limit": 3, "search": "x"}}, "0.3")

    assert (nested.limit, nested.search) == (3, "x")
    with pytest.raises(InvalidFieldError):
        read(SessionListParams, {"query": {"limit": 3}}, "1.0")
    with pytest.raises(InvalidFieldError, match="ambiguous"):
        read(Listing, {"query": {"limit": 3}, "limit": 4}, "0.3")
    with pytest.raises(InvalidFieldError):
        read(Listing, {"query": {"query": {"limit": 3}}}, "0.3")


def test_the_program_prints_what_a_service_would_publish() -> None:
    run = CliRunner().invoke

    public, extended, listed = (
        run(main, ["card"]),
        run(main, ["card", "--extended"]),
        run(main, ["methods"]),
    )

    uris = [extension.uri for extension in ALL_EXTENSIONS]
    uris += [alias for extension in ALL_EXTENSIONS for alias in extension.aliases]
    for printed in (public, extended):
        card = orjson.loads(printed.stdout)
        assert [one["uri"] for one in card["capabilities"]["extensions"]] == uris
    assert [line.split("\t")[0] for line in listed.stdout.splitlines()] == [m.name for m in METHODS]
    assert "(disabled_by_configuration: A2A_ENABLE_SESSION_SHELL)" in listed.stdout


# --- metadata that are declared, and metadata that are written --------------------------------

REF = TaskRef(TaskId("t"), ContextId("c"), Principal("ann"))
SESSION, MESSAGE = SessionId("ses_1"), MessageId("msg_1")
ASKED = Interrupted(
    RequestId("per_1"),
    "permission",
    SESSION,
    permission="bash",
    patterns=["ls"],
    asked_at=1,
    expires_at=2,
    default="the request is rejected and the turn continues",
    number=1,
    links_unknown=True,
    questions=[Question("q?", "Q", [QuestionOption("a")])],
)
EVENTS: list[TurnEvent] = [
    SessionBound(SESSION, "/w", "Title"),
    Started(),
    Progressed("step-start", "done", "prt_1", "title", "subtitle", "reason", [{"content": "x"}]),
    ReasoningGrew(MESSAGE, "prt_1", "hm", opens=True),
    TextGrew(MESSAGE, "prt_2", "yes", opens=True),
    ToolChanged(
        MESSAGE,
        "prt_3",
        "call",
        "bash",
        "completed",
        "ls",
        {"command": "ls"},
        "out",
        None,
        {"e": 0},
    ),
    ToolChanged(MESSAGE, "prt_4", "call", "bash", "error", error="no"),
    ASKED,
    Resumed(RequestId("per_1"), "permission", "rejected", "ann", "because", "task"),
    UsageCounted(Usage(1, 2, 3, 4, 5, 0.5), Usage(1)),
    ChannelReplaced(Channel.TEXT, MESSAGE, [("prt_2", "yes, or no")]),
    PlanGrew(MESSAGE, "prt_5", "first this", opens=True),
    ChannelClosed(Channel.TEXT, MESSAGE),
    DiffChanged([FileChange("a.py", "modified", 1, 2)], "--- a.py"),
    ResultGiven({"answer": 42}),
    Finished(Outcome.COMPLETED, MESSAGE, "stop"),
]
"""An event of each class, with every field that is shown."""


def test_the_events_are_of_all_classes_that_a_turn_reports() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(TurnEvent))


def written() -> dict[str, set[str]]:
    """Return the fields of all shared metadata that a whole turn is told with."""
    found: dict[str, set[str]] = {}
    for told in _updates():
        _collect(told, found)
    return found


def _updates() -> list[Any]:
    state = TaskState(REF)
    entries = [state.apply(Accepted(Message("m", "user", [Part("text", text="x")])), 1)]
    entries += [state.apply(event, 1) for event in EVENTS]
    encoded = [V1.entry(entry, REF) for entry in entries]
    return [orjson.loads(one) for one in encoded if one] + [render.task(state)]


def _collect(value: Any, found: dict[str, set[str]]) -> None:
    if isinstance(value, list):
        for one in value:  # pyright: ignore[reportUnknownVariableType]
            _collect(one, found)
    if not isinstance(value, dict):
        return
    for name, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
        if name == "shared":
            for group, fields in inner.items():  # pyright: ignore
                found.setdefault(str(group), set()).update(map(str, fields))  # pyright: ignore
        _collect(inner, found)


def test_the_declared_metadata_are_those_that_are_written() -> None:
    shown, more = STREAM_HINTS.public, STREAM_HINTS.extended
    declared_: Any = shown(Settings(), NOTHING) | more(Settings(), NOTHING)
    session: Any = SESSION_BINDING.extended(Settings(), NOTHING)

    groups = [
        place.removeprefix("metadata.shared.")
        for name, place in declared_.items()
        if name.endswith("_metadata_field") and place.startswith("metadata.shared.")
    ]

    assert written() == {
        group: {field.partition(".")[0] for field in declared_[f"{group}_fields"]}
        for group in groups
    }
    assert session["session_fields"] == declared_["session_fields"]
    lists: dict[str, list[str]] = {
        name: fields for name, fields in declared_.items() if name.endswith("_fields")
    }
    assert {name: fields for name, fields in lists.items() if len({*fields}) < len(fields)} == {}


def test_a_published_result_requires_what_is_always_written() -> None:
    for result in (SessionDone(session_id="ses_1"), Messages(items=[])):
        schema = result.model_json_schema(
            by_alias=False, mode="serialization", schema_generator=PublishedSchema
        )
        assert set(schema["required"]) == set(write(result))


def test_the_declared_blocks_are_those_that_are_written() -> None:
    declared_: Any = STREAM_HINTS.extended(Settings(), NOTHING)["block_contracts"]
    blocks: dict[str, set[str]] = {}
    for told in _updates():
        artifact = told.get("artifactUpdate", {}).get("artifact")
        if artifact:
            # The diff and the result by schema are artifacts of their own, not blocks.
            kind = artifact["metadata"]["shared"]["stream"].get("block_type")
            whole = artifact["artifactId"].partition(":")[2] in ("diff", "result")
            assert whole == (kind is None)
            if whole:
                continue
            part = artifact["parts"][0]
            content = part["data"] if "data" in part else {"text": part["text"]}
            blocks.setdefault(kind, set()).update(content)

    assert blocks == {kind: set(told["fields"]) for kind, told in declared_.items()}
