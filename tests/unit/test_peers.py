"""Calling other agents: what is told, what is spelt, where a secret goes, what is kept open."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opencode_a2a.a2a import v03
from opencode_a2a.a2a.operations import GET_TASK, SEND_MESSAGE
from opencode_a2a.a2a.types import Version
from opencode_a2a.config import ClientSettings, HttpBinding
from opencode_a2a.events import Interrupted, Json, JsonObject, Question, QuestionOption
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.log.state import State
from opencode_a2a.messages import Message, Part
from opencode_a2a.net.egress import Egress, OriginCredential, origin
from opencode_a2a.peers.client import (
    Interface,
    PeerCard,
    build_request,
    card_urls,
    choose,
    read_card,
    read_json,
    send_params,
)
from opencode_a2a.peers.received import (
    AnswerGrew,
    AnswerReplaced,
    Artifact,
    ErrorCode,
    FileGiven,
    MalformedError,
    PeerError,
    PeerEvent,
    PeerTask,
    Received,
    ReceivedStatus,
    ReceivedTask,
    ReceivedUpdate,
    TaskOpened,
    TaskStatusChanged,
    ThoughtGrew,
    ToolReported,
    read_error,
    read_event,
    read_task,
)

OPEN = Egress(allow_private=True)
CHUNKS = st.lists(st.tuples(st.text(max_size=5), st.sampled_from(["delta", "whole", "task"])))


def channel(name: str) -> JsonObject:
    return {"shared": {"stream": {"block_type": name}}}


def artifact(text: str, name: str = "a", metadata: JsonObject | None = None) -> Artifact:
    return Artifact(name, [Part("text", text=text)], None, metadata or {})


def given_whole(artifact: Artifact) -> ReceivedUpdate:
    return ReceivedUpdate("t", "c", artifact=artifact)


def grew(text: str, name: str = "a", metadata: JsonObject | None = None) -> ReceivedUpdate:
    return ReceivedUpdate("t", "c", artifact=artifact(text, name, metadata), append=True)


def status(
    state: State | None, text: str | None = None, metadata: JsonObject | None = None
) -> ReceivedStatus:
    said = Message("m", "agent", [Part("text", text=text)], metadata) if text else None
    return ReceivedStatus(state, said)


def update(
    state: State, text: str | None = None, metadata: JsonObject | None = None
) -> ReceivedUpdate:
    return ReceivedUpdate("t", "c", status(state, text), metadata=metadata or {})


def told(task: PeerTask, *events: Received) -> list[PeerEvent]:
    """What a task reports of events, without the opening of the task."""
    news = [new for event in events for new in task.take(event)]
    return [new for new in news if not isinstance(new, TaskOpened)]


def answer_of(news: Iterator[PeerEvent]) -> str:
    return "".join(new.text for new in news if isinstance(new, AnswerGrew))


@given(CHUNKS)
@example([("a", "delta"), ("a", "whole"), ("", "task")])
def test_answer_text_is_told_once_however_it_arrives(chunks: list[tuple[str, str]]) -> None:
    task, whole, heard = PeerTask(), "", ""
    for chunk, way in chunks:
        whole += chunk
        match way:
            case "delta":
                event: Received = grew(chunk)
            case "whole":
                event = given_whole(artifact(whole))
            case _:
                event = ReceivedTask("t", "c", status(State.WORKING), [artifact(whole)])
        heard += answer_of(task.take(event))

    assert heard == whole == task.answer


def test_text_taken_back_by_the_peer_is_told_as_a_replacement() -> None:
    task = PeerTask()
    told(task, grew("first try"))

    assert told(task, given_whole(artifact("second"))) == [AnswerReplaced("a", "second")]
    assert task.answer == "second"


@given(st.text("ab", min_size=1), st.data())
def test_text_that_a_killed_service_gives_again_is_told_once(
    whole: str, data: st.DataObject
) -> None:
    task, heard, at = PeerTask(), "", 0
    for _ in range(data.draw(st.integers(1, 5))):  # each time it has stored less than it has told
        end = data.draw(st.integers(at, len(whole)))
        heard += answer_of(task.take(grew(whole[at:end])))
        at = data.draw(st.integers(0, end))
        again = ReceivedTask("t", "c", status(State.WORKING), [artifact(whole[:at])])
        heard += answer_of(task.take(again))

    heard += answer_of(task.take(grew(whole[at:])))
    ended = told(task, ReceivedUpdate("t", "c", status=status(State.COMPLETED)))

    assert heard == whole == task.answer
    assert not [one for one in ended if isinstance(one, AnswerReplaced)]


def test_text_that_does_not_come_again_is_taken_back_at_the_end() -> None:
    task = PeerTask()
    told(task, grew("first try"))

    assert told(task, given_whole(artifact("first"))) == []
    ended = told(task, ReceivedUpdate("t", "c", status=status(State.COMPLETED)))

    assert ended[0] == AnswerReplaced("a", "first")
    assert task.answer == "first"


def test_text_that_comes_again_in_another_form_is_told_as_a_replacement() -> None:
    task = PeerTask()
    told(task, grew("one two three"))
    told(task, given_whole(artifact("one")))

    assert told(task, grew(" two")) == []
    assert told(task, grew(" four")) == [AnswerReplaced("a", "one two four")]
    assert told(task, grew(" five")) == [AnswerGrew("a", " five")]


def test_reasoning_tools_and_files_stay_out_of_the_answer() -> None:
    task = PeerTask()
    call: JsonObject = {"call_id": "c1", "tool": "bash", "status": "running", "title": "ls"}
    tool = Artifact("t1", [Part("data", data=call)], None, channel("tool_call"))
    diff = Part("text", text="+x", media_type="text/x-diff", filename="changes.diff")

    news = told(
        task,
        grew("hm", "r", channel("reasoning")),
        given_whole(tool),
        given_whole(tool),
        grew("yes", "a", channel("text")),
        given_whole(Artifact("d", [diff], "diff")),
        ReceivedTask("t", "c", status(None), [Artifact("d", [diff], "diff")]),
    )

    assert [type(new) for new in news] == [ThoughtGrew, ToolReported, AnswerGrew, FileGiven]
    assert task.answer == "yes"


def test_reasoning_that_begins_anew_is_told_from_its_beginning() -> None:
    task = PeerTask()
    told(task, grew("the plan", "r", channel("reasoning")))

    anew = Artifact("r", [Part("text", text="now carry it out")], None, channel("reasoning"))
    assert told(task, given_whole(anew)) == [ThoughtGrew("now carry it out")]


def test_an_answer_that_is_only_the_last_status_is_still_an_answer() -> None:
    task = PeerTask()

    news = told(task, update(State.WORKING, "busy"), update(State.COMPLETED, "done it"))

    assert news == [
        TaskStatusChanged(State.WORKING, "busy"),
        AnswerGrew("status", "done it"),
        TaskStatusChanged(State.COMPLETED, "done it"),
    ]


TODOS: list[Json] = [
    {"content": "look", "status": "completed"},
    {"content": "mend", "status": "in_progress"},
]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (
            {"type": "retry", "status": "waiting", "title": "No API", "subtitle": "attempt 4"},
            "Retrying: No API, attempt 4",
        ),
        ({"type": "queue", "status": "waiting", "title": "Busy"}, "Queued: Busy"),
        ({"type": "compaction", "status": "running"}, "Compacting the conversation: running"),
        ({"type": "todo", "status": "updated", "todos": TODOS}, "Plan: mend, 1 of 2 done"),
        ({"type": "new", "status": "here"}, "new: here"),
        ({"type": "message", "status": "delivered", "title": "Hurry"}, "Message delivered (Hurry)"),
        (
            {"type": "message", "status": "refused", "title": "Hurry", "reason": "Too late"},
            "Message refused: Too late (Hurry)",
        ),
    ],
)
def test_progress_is_told_each_time_it_changes_and_when_it_is_over(
    progress: JsonObject, text: str
) -> None:
    task = PeerTask()
    ordinary: JsonObject = {"type": "step-start", "status": "running"}
    told = [
        event
        for one in (ordinary, progress, progress, ordinary)
        for event in task.take(
            ReceivedUpdate(
                "t", "c", ReceivedStatus(State.WORKING), metadata={"shared": {"progress": one}}
            )
        )
    ]

    texts = [event.text for event in told if isinstance(event, TaskStatusChanged)]
    assert texts == [None, text, None]


def test_a_last_status_beside_an_answer_is_not_the_answer() -> None:
    task = PeerTask()
    told(task, grew("the answer"), update(State.COMPLETED, "Completed."))
    assert task.answer == "the answer"


def test_a_primed_task_tells_only_news_and_its_old_prompt_ends_nothing() -> None:
    task = PeerTask()
    before = ReceivedTask("t", "c", status(State.INPUT_REQUIRED, "which?"), [artifact("so far ")])
    task.prime(before)

    assert told(task, before) == []
    assert not task.settled
    assert told(task, grew("more"), update(State.COMPLETED)) == [
        AnswerGrew("a", "more"),
        TaskStatusChanged(State.COMPLETED, None),
    ]


def test_an_interrupt_of_opencode_is_read_with_its_questions() -> None:
    told_of: JsonObject = {
        "request_id": "que_1",
        "type": "question",
        "session_id": "ses_1",
        "details": {
            "questions": [
                {
                    "header": "Colour",
                    "question": "Which?",
                    "options": [{"label": "red", "description": "warm"}],
                    "multiple": True,
                    "custom": False,
                }
            ]
        },
    }

    news = told(
        PeerTask(), update(State.INPUT_REQUIRED, "Which?", {"shared": {"interrupt": told_of}})
    )

    question = Question("Which?", "Colour", [QuestionOption("red", "warm")], True, False)
    asked = Interrupted(RequestId("que_1"), "question", SessionId("ses_1"), questions=[question])
    assert news == [TaskStatusChanged(State.INPUT_REQUIRED, "Which?", asked=asked)]


@pytest.mark.parametrize(
    ("binding", "version", "expected"),
    [
        (HttpBinding.JSONRPC, Version.V1, {"text": "hi"}),
        (HttpBinding.JSONRPC, Version.V03, {"kind": "text", "text": "hi"}),
        (HttpBinding.HTTP_JSON, Version.V1, {"text": "hi"}),
        (HttpBinding.HTTP_JSON, Version.V03, {"text": "hi"}),
    ],
)
def test_a_message_is_spelt_as_its_version_and_binding_want(
    binding: HttpBinding, version: Version, expected: JsonObject
) -> None:
    at = Interface("http://x", binding, version)
    said = Message("m", "user", [Part("text", text="hi")])

    request = build_request(at, SEND_MESSAGE, send_params(said, None, "ctx", waits=False))

    body = read_json(request.body or b"")
    params = body["params"] if binding is HttpBinding.JSONRPC else body
    assert isinstance(params, dict)
    message = params["message"]
    assert isinstance(message, dict)
    parts = message.get("parts", message.get("content"))
    assert parts == [expected]
    assert message["contextId"] == "ctx"


def test_an_id_from_outside_cannot_leave_its_place_in_the_path() -> None:
    at = Interface("http://x/", HttpBinding.HTTP_JSON, Version.V1, "te/nant")

    request = build_request(at, GET_TASK, {"id": "../a?b#c", "historyLength": 0})

    assert request.url == "http://x/te%2Fnant/tasks/..%2Fa%3Fb%23c?historyLength=0"


def test_states_of_both_versions_and_both_spellings_are_understood() -> None:
    def state(name: str) -> State | None:
        task: JsonObject = {"id": "t", "status": {"state": name}}
        return read_task(v03.upgrade(task)).status.state

    assert state("TASK_STATE_INPUT_REQUIRED") is state("input-required") is State.INPUT_REQUIRED
    assert state("TASK_STATE_CANCELLED") is state("canceled") is State.CANCELED
    assert state("TASK_STATE_INVENTED") is None


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        ({"kind": "text", "text": "hi"}, Part("text", text="hi")),
        ({"text": "hi"}, Part("text", text="hi")),
        (
            {"kind": "file", "file": {"bytes": "AA==", "mimeType": "a/b", "name": "n"}},
            Part("raw", raw="AA==", media_type="a/b", filename="n"),
        ),
        ({"file": {"fileWithBytes": "AA=="}}, Part("raw", raw="AA==")),
        ({"kind": "file", "file": {"uri": "http://x"}}, Part("url", url="http://x")),
        ({"file": {"fileWithUri": "http://x"}}, Part("url", url="http://x")),
        ({"kind": "data", "data": {"data": 1}}, Part("data", data={"data": 1})),
        ({"data": {"data": {"a": 1}}}, Part("data", data={"a": 1})),
    ],
)
@pytest.mark.parametrize("kinds", [True, False])
def test_a_message_of_either_spelling_of_0_3_is_read(
    sent: JsonObject, part: Part, kinds: bool
) -> None:
    event: JsonObject = (
        {"kind": "message", "messageId": "m", "role": "agent", "parts": [sent]}
        if kinds
        else {"msg": {"messageId": "m", "role": "ROLE_AGENT", "content": [sent]}}
    )

    read = read_event(v03.upgrade_event(event))

    assert isinstance(read, ReceivedUpdate)
    assert read.artifact == Artifact("m", [part])


@pytest.mark.parametrize(
    "body", [b"[]", b"{", b"\xff", b'{"a":' * 70 + b"1" + b"}" * 70, b"[" * 100_000]
)
def test_json_that_no_honest_agent_sends_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedError):
        read_json(body)


def test_half_a_character_of_a_peer_is_replaced() -> None:
    said = read_json(rb'{"text": "a \ud83d b"}')

    assert said == {"text": "a \N{REPLACEMENT CHARACTER} b"}


@pytest.mark.parametrize(
    "value", [{}, {"kind": "task"}, {"task": {}}, {"statusUpdate": {"status": {}}}, {"task": 3}]
)
def test_an_event_without_what_it_needs_is_refused(value: JsonObject) -> None:
    with pytest.raises(MalformedError):
        read_event(v03.upgrade_event(value))


HYBRID: JsonObject = {
    "name": "A",
    "url": "http://x/old",
    "protocolVersion": "0.3.0",
    "preferredTransport": "JSONRPC",
    "supportedInterfaces": [
        {"url": "x:1", "protocolBinding": "GRPC", "protocolVersion": "1.0"},
        {"url": "http://x/r", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"},
        {"url": "http://x/j", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
        {"url": "http://x/j", "protocolBinding": "JSONRPC", "protocolVersion": "0.3"},
        {"url": "http://x/n", "protocolBinding": "JSONRPC", "protocolVersion": "2.0"},
    ],
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ClientSettings(), ("http://x/r", Version.V1)),
        (ClientSettings(use_client_preference=True), ("http://x/j", Version.V1)),
        (ClientSettings(supported_transports=(HttpBinding.JSONRPC,)), ("http://x/j", Version.V1)),
        (ClientSettings(protocol_version="0.3"), ("http://x/j", Version.V03)),
    ],
)
def test_the_interface_follows_the_peers_order_unless_ours_is_to_win(
    settings: ClientSettings, expected: tuple[str, Version]
) -> None:
    chosen = choose(read_card(HYBRID), settings, OPEN)
    assert (chosen.url, chosen.version) == expected


def test_a_card_of_0_3_gives_its_main_and_its_further_interfaces() -> None:
    card = read_card(
        {
            "name": "A",
            "url": "http://x/j",
            "protocolVersion": "0.3.0",
            "additionalInterfaces": [{"url": "http://x/r", "transport": "HTTP+JSON"}],
        }
    )
    assert card.interfaces == (
        Interface("http://x/j", HttpBinding.JSONRPC, Version.V03),
        Interface("http://x/r", HttpBinding.HTTP_JSON, Version.V03),
    )


def test_a_card_that_offers_nothing_we_speak_is_an_invalid_card() -> None:
    with pytest.raises(PeerError) as caught:
        choose(PeerCard("A", "", "", True, ()), ClientSettings(), OPEN)
    assert caught.value.code is ErrorCode.INVALID_CARD


@pytest.mark.parametrize(
    ("url", "first"),
    [
        ("http://x", "http://x/.well-known/agent-card.json"),
        ("http://x/", "http://x/.well-known/agent-card.json"),
        ("http://x/a/", "http://x/a/.well-known/agent-card.json"),
        ("http://x/.well-known/agent-card.json", "http://x/.well-known/agent-card.json"),
        ("http://x/.well-known/agent.json?v=1", "http://x/.well-known/agent.json?v=1"),
        ("http://x/cards/mine.json", "http://x/cards/mine.json"),
    ],
)
def test_the_well_known_path_is_added_to_a_base_and_never_twice(url: str, first: str) -> None:
    assert card_urls(url, OPEN)[0] == first


@pytest.mark.parametrize("url", ["ftp://x", "x", "http://", "http://u:p@x", "http://x:99999"])
def test_a_url_that_cannot_be_called_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(PeerError) as caught:
        card_urls(url, OPEN)
    assert caught.value.code is ErrorCode.INVALID_INPUT


@pytest.mark.parametrize(
    "elsewhere",
    [
        "https://a.test/x",
        "http://a.test:81/",
        "http://b.test/",
        "http://a.test.evil/",
        "http://sub.a.test",
    ],
)
def test_a_secret_belongs_to_one_origin(elsewhere: str) -> None:
    credential = OriginCredential.bearer("http://a.test/path", "canary")

    assert credential.headers("http://A.test:80/other") == {"Authorization": "Bearer canary"}
    assert credential.headers(elsewhere) == {}
    assert "canary" not in repr(credential)


def test_basic_credentials_are_taken_plain_and_in_base64() -> None:
    plain = OriginCredential.basic("http://x", "user:pass")
    assert plain == OriginCredential.basic("http://x", "dXNlcjpwYXNz")
    assert plain.headers("http://x") == {"Authorization": "Basic dXNlcjpwYXNz"}


@pytest.mark.parametrize("value", ["", "nonsense", "dXNlcg=="])
def test_what_is_no_basic_credential_is_refused_without_being_shown(value: str) -> None:
    with pytest.raises(ValueError, match="user:password"):
        OriginCredential.basic("http://x", value)


@pytest.mark.parametrize("token", ["", " ", "a\nb", "a\x00", "ä"])
def test_a_token_that_would_break_a_header_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="one line"):
        OriginCredential.bearer("http://x", token)


def test_an_origin_always_names_its_port() -> None:
    assert origin("https://X.test/a") == origin("https://x.test:443") == "https://x.test:443"


@pytest.mark.parametrize(
    ("status_code", "code"),
    [
        (400, "a2a_invalid_input"),
        (401, "a2a_peer_auth_failed"),
        (403, "a2a_peer_permission_denied"),
        (404, "a2a_unsupported_operation"),
        (405, "a2a_unsupported_operation"),
        (408, "a2a_timeout"),
        (409, "a2a_unsupported_operation"),
        (429, "a2a_retryable_unavailable"),
        (500, "a2a_unavailable"),
        (501, "a2a_unsupported_operation"),
        (502, "a2a_retryable_unavailable"),
        (503, "a2a_retryable_unavailable"),
        (504, "a2a_retryable_unavailable"),
    ],
)
def test_http_statuses_have_their_codes(status_code: int, code: str) -> None:
    error = read_error(status_code, {})
    assert error is not None
    assert (error.code, error.http_status) == (code, status_code)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (-32601, "a2a_unsupported_operation"),
        (-32004, "a2a_unsupported_operation"),
        (-32602, "a2a_invalid_input"),
        (-32603, "a2a_retryable_unavailable"),
        (-32001, "a2a_call_failed"),
        (-31999, "a2a_call_failed"),
    ],
)
def test_json_rpc_errors_have_their_codes(number: int, code: str) -> None:
    error = read_error(200, {"error": {"code": number, "message": "x"}})
    assert error is not None
    assert (error.code, error.rpc_code) == (code, number)


def test_an_error_reason_of_the_specification_beats_the_status() -> None:
    details: Json = [{"reason": "TASK_NOT_FOUND"}]
    error = read_error(404, {"error": {"code": 404, "message": "gone", "details": details}})
    assert error is not None
    assert (error.code, error.rpc_code) == (ErrorCode.CALL_FAILED, -32001)


def test_the_words_of_a_peer_in_an_error_are_cut_and_harmless() -> None:
    error = read_error(200, {"error": {"code": -32001, "message": "\x1b[2J" + "x" * 10_000}})
    assert error is not None
    assert error.message.isprintable()
    assert len(error.message) < 600
