"""The scripted model: reading scripts, choosing replies, and its HTTP face over a real socket."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from opencode_a2a_demo.answers import demo_script, errand, filled
from opencode_a2a_demo.chat import CallId, ChatMessage, ToolCall
from opencode_a2a_demo.script import (
    Call,
    Drop,
    Fail,
    Reply,
    Say,
    ScriptError,
    Think,
    enclose,
    find_script,
    last_prompt,
    parse_replies,
    place_after,
)
from opencode_a2a_demo.server import DemoModel, opencode_config

TEXT = st.text(max_size=30)
AROUND = TEXT.filter(lambda text: "@" not in text)
DIGEST = "abc123"
BASH: JsonValue = {"tool": "bash", "input": {"command": "ls"}}


def replies_in(text: str) -> tuple[Reply, ...]:
    script = find_script(text)
    assert script is not None
    return script.replies


def assistant(text: str = "", *calls: CallId | str) -> ChatMessage:
    ids = [ToolCall(id=str(call)) for call in calls]
    return ChatMessage(role="assistant", content=text, tool_calls=ids)


# Reading a script


@given(before=AROUND, said=st.lists(TEXT, min_size=1, max_size=4), after=AROUND)
def test_a_script_survives_inside_any_text(before: str, said: list[str], after: str) -> None:
    text = before + enclose([{"say": each} for each in said]) + after

    assert replies_in(text) == (tuple(Say(say=each) for each in said),)


@given(text=TEXT, chunk=st.none() | st.integers(1, 9), repeat=st.integers(1, 3))
def test_the_pieces_of_a_text_are_the_text(text: str, chunk: int | None, repeat: int) -> None:
    action = Say(say=text, chunk=chunk, repeat=repeat)

    assert "".join(action.pieces(text)) == text * repeat


@given(said=TEXT, depth=st.integers(0, 4))
def test_a_sub_agent_is_given_its_own_script(said: str, depth: int) -> None:
    script: JsonValue = [{"say": said}]
    for level in range(depth):
        given_input: JsonValue = {"description": "d", "prompt": f"go ]]@@ {level}"}
        script = [{"tool": "task", "input": given_input, "script": script}]

    text = enclose(script)
    for _ in range(depth):
        ((call,),) = replies_in(text)
        assert isinstance(call, Call)
        text = json.loads(call.arguments)["prompt"].replace("]]@@", "", 1)

    assert replies_in(text) == ((Say(say=said),),)


def test_a_nested_script_may_also_stand_in_the_prompt_itself() -> None:
    prompt = f"go {enclose([{'say': 'child'}])}"
    text = enclose([{"tool": "task", "input": {"prompt": prompt}}, {"say": "parent"}])

    (call,), answer = replies_in(text)

    assert isinstance(call, Call)
    assert replies_in(json.loads(call.arguments)["prompt"]) == ((Say(say="child"),),)
    assert answer == (Say(say="parent"),)


def test_text_after_a_call_belongs_to_the_next_reply() -> None:
    text = enclose([{"think": "hm"}, BASH, BASH, {"drop": True, "times": 1}, {"say": "done"}])

    call = Call(tool="bash", input={"command": "ls"})
    assert replies_in(text) == (
        (Think(think="hm"), call, call, Drop(drop=True, times=1)),
        (Say(say="done"),),
    )


def test_inner_lists_are_replies() -> None:
    replies = parse_replies(json.dumps([[BASH], [BASH], [{"say": "done"}]]))

    assert [len(reply) for reply in replies] == [1, 1, 1]


def test_a_script_can_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "greet.json").write_text('[{"say": "hello"}]')

    script = find_script("please @@script:greet@@", tmp_path)

    assert script is not None
    assert script.replies == ((Say(say="hello"),),)


@pytest.mark.parametrize(
    "text",
    [
        '@@[{"say": "a"',
        '@@[{"say": "a"}] and no end',
        '@@[{"sing": "a"}]@@',
        '@@[{"say": 5}]@@',
        '@@[{"say": "a", "volume": 3}]@@',
        '@@[{"say": "a"}, {"error": 500}]@@',
        '@@[{"error": 200}]@@',
        '@@[{"wait": NaN}]@@',
        "@@script:nowhere@@",
        "@@" + "[" * 100_000,
    ],
)
def test_a_script_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ScriptError):
        find_script(text)


@pytest.mark.parametrize("text", ["hello", "@@ -1,3 +1,4 @@ def f():", "a@@b", "@@script:../x@@"])
def test_other_text_has_no_script(text: str) -> None:
    assert find_script(text) is None


# Choosing the reply


@pytest.mark.parametrize(
    ("answers", "place"),
    [
        ([], 0),
        ([assistant("text")], 1),
        ([assistant("", CallId(DIGEST, 0, 1, 0))], 1),
        # A connection dropped after a call makes two answers of one reply.
        ([assistant("", CallId(DIGEST, 0, 1, 0)), assistant("", CallId(DIGEST, 0, 2, 0))], 1),
        ([assistant("", CallId(DIGEST, 0, 1, 0)), assistant("", CallId(DIGEST, 1, 1, 0))], 2),
        # What OpenCode called by itself, or an attempt that was cut, is no reply.
        ([assistant("", "call_other"), assistant("")], 0),
    ],
)
def test_the_place_is_read_from_the_answers(answers: Sequence[ChatMessage], place: int) -> None:
    assert place_after(answers, DIGEST) == place


def test_a_note_of_opencode_is_not_the_prompt() -> None:
    prompt = ChatMessage(role="user", content="do it")
    note = ChatMessage(role="user", content="Continue if you have next steps, or stop")

    found = last_prompt([prompt, assistant("yes"), note])

    assert (found.text, found.continued) == ("do it", True)
    assert list(found.answers) == [assistant("yes"), note]


def test_a_reminder_of_opencode_is_not_part_of_the_prompt() -> None:
    reminder = "<system-reminder>\n# Plan Mode\nLaunch a sub-agent\n</system-reminder>"
    prompt = ChatMessage(role="user", content=f"hello\n{reminder}")

    assert last_prompt([prompt]).text == "hello"


def test_titles_and_summaries_never_run_the_script() -> None:
    scripted = ChatMessage(role="user", content=f"Fix it {enclose([{'say': 'no'}])}")
    title = ChatMessage(role="system", content="You are a title generator. You output")
    summary = ChatMessage(role="system", content="You are a context summarization agent. You")

    assert errand([title, scripted]) == (Say(say="Fix it"),)
    assert errand([scripted]) is None
    summarised = str(errand([summary, scripted]))
    assert "## Objective" in summarised
    assert "@@" not in summarised


@pytest.mark.parametrize(
    ("text", "tool", "given_input"),
    [
        ("list the files here", "bash", {"command": "ls -la"}),
        ("Show me the file README.md please", "read", {"filePath": "README.md"}),
        ("read src/a.py", "read", {"filePath": "src/a.py"}),
        ("write a file x.txt with 'hi'", "write", {"filePath": "x.txt", "content": "hi\n"}),
        ("ask me something", "question", {}),
        ("make a plan", "todowrite", {}),
        ("use a sub-agent", "task", {"subagent_type": "general"}),
        ("please run the tests", "bash", {}),
    ],
)
def test_the_demo_uses_a_tool(text: str, tool: str, given_input: dict[str, str]) -> None:
    offered = frozenset({"bash", "read", "write", "question", "todowrite", "task"})

    (think, call), answer = demo_script(text, offered).replies

    assert isinstance(think, Think)
    assert isinstance(call, Call)
    assert call.tool == tool
    assert given_input.items() <= call.input.items()
    assert len(answer) == 1


@given(TEXT)
def test_the_demo_without_tools_says_what_it_is(text: str) -> None:
    ((think, said),) = demo_script(text, frozenset()).replies

    assert isinstance(think, Think)
    assert isinstance(said, Say)
    assert "demo model" in said.say


# Over HTTP


@pytest.fixture
async def model() -> AsyncIterator[DemoModel]:
    async with asyncio.timeout(60), DemoModel() as model:
        yield model


@pytest.fixture
async def http(model: DemoModel) -> AsyncIterator[httpx2.AsyncClient]:
    root = model.url.removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=root, headers={"x-session-id": "ses_1"}) as client:
        yield client


def body(script: JsonValue, *after: JsonValue, stream: bool = True) -> dict[str, JsonValue]:
    user: JsonValue = {"role": "user", "content": [{"type": "text", "text": enclose(script)}]}
    return {"model": "demo", "stream": stream, "messages": [user, *after]}


async def events(http: httpx2.AsyncClient, sent: dict[str, JsonValue]) -> list[str]:
    """The data of each event up to the end, or to where the connection breaks."""
    told: list[str] = []
    try:
        async with http.stream("POST", "/v1/chat/completions", json=sent) as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream"
            async for line in response.aiter_lines():
                told += [line.removeprefix("data: ")] if line else []
    except httpx2.TransportError:
        told.append("<broken>")
    return told


async def ask(http: httpx2.AsyncClient, script: JsonValue, *after: JsonValue) -> httpx2.Response:
    sent = body(script, *after, stream=False)
    return await http.post("/v1/chat/completions", json=sent)


def said_in(response: httpx2.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


def deltas(told: list[str]) -> list[JsonValue]:
    chunks = [json.loads(data) for data in told if data.startswith("{")]
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


async def test_a_stream_has_thoughts_text_usage_and_an_end(http: httpx2.AsyncClient) -> None:
    usage: JsonValue = {"usage": {"prompt": 100, "completion": 20, "cached": 10, "reasoning": 5}}

    told = await events(http, body([{"think": "hm"}, {"say": "one two"}, usage]))

    assert deltas(told) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "one "},
        {"content": "two"},
        {},
    ]
    *_, finish, used, done = told
    assert json.loads(finish)["choices"][0]["finish_reason"] == "stop"
    assert json.loads(used)["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 10},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }
    assert done == "[DONE]"


async def test_calls_are_streamed_and_their_results_quoted(http: httpx2.AsyncClient) -> None:
    script: JsonValue = [BASH, {"tool": "read", "raw": "{oops"}, {"say": "got {{result}}"}]

    told = await events(http, body(script))
    first, second = (delta for delta in deltas(told) if "tool_calls" in str(delta))
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    calls: list[JsonValue] = [*json.loads(json.dumps(first["tool_calls"]))]
    answered: JsonValue = {"role": "assistant", "content": "", "tool_calls": calls}
    result: JsonValue = {"role": "tool", "tool_call_id": "x", "content": "a.txt"}
    answer = await ask(http, script, answered, result)

    assert '"finish_reason":"tool_calls"' in told[-3]
    assert [call["function"] for call in json.loads(json.dumps(calls))] == [
        {"name": "bash", "arguments": '{"command": "ls"}'}
    ]
    assert json.loads(json.dumps(second["tool_calls"]))[0]["function"]["arguments"] == "{oops"
    assert said_in(answer) == "got a.txt"


@pytest.mark.parametrize(
    "refusal",
    [
        "The user rejected permission to use this specific tool call.",
        "The user has specified a rule which prevents you from using this specific tool call.",
        "The user dismissed this question",
        '{"error":{"type":"tool.execution","message":"Unable to write hello.txt"}}',
    ],
)
def test_the_demo_does_not_claim_what_was_refused(refusal: str) -> None:
    [_, [said]] = demo_script("write a file x.txt with 'hi'", frozenset({"write"})).replies
    assert isinstance(said, Say)

    assert filled(said.say, "Wrote file successfully.").startswith("I wrote x.txt:")
    assert filled(said.say, refusal).startswith(f"That was not done:\n\n```\n{refusal}\n```")


async def test_a_whole_answer_has_the_same_content(http: httpx2.AsyncClient) -> None:
    answer = await ask(http, [{"think": "hm"}, {"say": "hi"}, BASH, {"finish": "length"}])

    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "hi"
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "bash"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (400, 400, "bad_request"),
        (401, 401, "invalid_api_key"),
        (404, 404, "model_not_found"),
        (429, 429, "rate_limit_exceeded"),
        (500, 500, None),
        (503, 503, None),
        ("context_length", 400, "context_length_exceeded"),
    ],
)
async def test_an_error_comes_so_often_and_then_the_answer(
    http: httpx2.AsyncClient, error: int | str, status: int, code: str | None
) -> None:
    script: JsonValue = [{"error": error, "times": 2}, {"say": "recovered"}]

    failures = [await ask(http, script), await ask(http, script)]
    answer = await ask(http, script)

    assert [failure.status_code for failure in failures] == [status, status]
    assert failures[0].json()["error"]["code"] == code
    assert "retry-after" not in failures[0].headers
    assert said_in(answer) == "recovered"


async def test_counting_starts_afresh_per_session_and_after_the_end(
    http: httpx2.AsyncClient,
) -> None:
    script: JsonValue = [{"error": 429, "times": 1, "retry_after": 7}, {"say": "fine"}]

    failure = await ask(http, script)
    elsewhere = await http.post(
        "/v1/chat/completions",
        json=body(script, stream=False),
        headers={"x-session-id": "ses_2"},
    )
    statuses = [(await ask(http, script)).status_code for _ in range(3)]

    assert failure.headers["retry-after"] == "7"
    assert elsewhere.status_code == 429
    assert statuses == [200, 429, 200]


async def test_a_connection_is_dropped_before_the_output(http: httpx2.AsyncClient) -> None:
    script: JsonValue = [{"drop": True, "times": 1}, {"say": "recovered"}]

    with pytest.raises(httpx2.RemoteProtocolError):
        await http.post("/v1/chat/completions", json=body(script))

    assert said_in(await ask(http, script)) == "recovered"


async def test_a_connection_is_dropped_in_the_middle(http: httpx2.AsyncClient) -> None:
    script: JsonValue = [{"say": "some"}, {"drop": True, "times": 1}, {"say": "more"}]

    cut, whole = await events(http, body(script)), await events(http, body(script))

    assert deltas(cut)[1:] == [{"content": "some"}]
    assert cut[-1] == "<broken>"
    assert deltas(whole)[1:] == [{"content": "some"}, {"content": "more"}, {}]


async def test_a_stream_can_be_faulty(http: httpx2.AsyncClient) -> None:
    malformed = await events(http, body([{"say": "a"}, {"malformed": True}, {"say": "b"}]))
    failed = await events(http, body([{"say": "a"}, {"stream_error": "boom"}]))
    endless = await events(http, body([{"say": "a"}, {"finish": None}]))

    with pytest.raises(json.JSONDecodeError):
        json.loads(malformed[2])
    assert json.loads(failed[-1])["error"]["message"] == "boom"
    assert 'finish_reason":"' not in "".join(endless)
    assert endless[-1] == "[DONE]"


async def test_a_missing_finish_reason_can_be_limited(http: httpx2.AsyncClient) -> None:
    script: JsonValue = [{"finish": None, "times": 2}, {"say": "a"}]

    answers = [await ask(http, script) for _ in range(3)]

    reasons = [answer.json()["choices"][0]["finish_reason"] for answer in answers]
    assert reasons == [None, None, "stop"]


async def test_a_reply_waits_at_a_gate_until_it_is_opened(
    http: httpx2.AsyncClient, model: DemoModel
) -> None:
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(ask(http, [{"gate": "g"}, {"say": "through"}]))
        state = await http.get("/control/gates/g", params={"wait": "10"})
        assert state.json() == {"name": "g", "reached": True, "open": False}
        assert not answer.done()
        opened = await http.post("/control/gates/g")

    assert opened.json() == {"name": "g", "reached": True, "open": True}
    assert said_in(answer.result()) == "through"
    assert model.gate("g").opened.is_set()


async def test_a_client_that_goes_away_ends_a_reply_that_hangs(http: httpx2.AsyncClient) -> None:
    script: JsonValue = [{"say": "a"}, {"hang": True, "times": 1}, {"say": "b"}]

    async with http.stream("POST", "/v1/chat/completions", json=body(script)) as response:
        async for line in response.aiter_lines():
            if '"a"' in line:
                break

    assert said_in(await ask(http, script)) == "ab"


async def test_the_model_ends_while_replies_hang() -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        async with DemoModel() as model:
            root = model.url.removesuffix("/v1")
            http = httpx2.AsyncClient(base_url=root)
            told = group.create_task(events(http, body([{"say": "a"}, {"gate": "never"}])))
            await model.gate("never").reached.wait()
        await told
        await http.aclose()

    assert told.result()[-1] == "<broken>"


async def test_a_script_goes_on_after_a_compaction(http: httpx2.AsyncClient) -> None:
    script: JsonValue = [{"error": "context_length", "times": 1}, {"say": "one"}, BASH]
    note: JsonValue = {"role": "user", "content": "Continue if you have next steps, or stop"}
    start: JsonValue = {"role": "user", "content": "What did we do so far?"}
    compacted: JsonValue = {"model": "demo", "messages": [start, note]}

    failure = await ask(http, script)
    resumed = await http.post("/v1/chat/completions", json=compacted)
    nothing = await http.post("/v1/chat/completions", json=compacted)

    assert failure.status_code == 400
    assert said_in(resumed) == "one"
    assert said_in(nothing) == "There is nothing left to do."


async def test_requests_are_remembered(http: httpx2.AsyncClient, model: DemoModel) -> None:
    await ask(http, [{"say": "a"}])

    (seen,) = model.requests
    assert (seen.session, seen.purpose, seen.place) == ("ses_1", "prompt", 0)


async def test_models_are_listed(http: httpx2.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()

    assert [model["id"] for model in listed["data"]] == ["demo"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"messages": []}',
        b'{"messages": [{"content": "no role"}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "user", "content": "@@[{\\"sing\\": 1}]@@"}]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
async def test_bad_input_is_refused_in_the_shape_of_openai(
    http: httpx2.AsyncClient, content: bytes
) -> None:
    refused = await http.post("/v1/chat/completions", content=content)

    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.json()["error"]["message"]


async def test_other_paths_methods_and_sizes_are_refused_alike(http: httpx2.AsyncClient) -> None:
    refused = [
        await http.get("/v1/nothing"),
        await http.get("/v1/chat/completions"),
        await http.post("/v1/chat/completions", content=b" " * (33 * 1024 * 1024)),
        await http.get("/control/gates/g", params={"wait": "long"}),
    ]

    assert [each.status_code for each in refused] == [404, 405, 413, 400]
    assert all(each.json()["error"]["message"] for each in refused)


def test_opencode_is_given_the_demo_model_and_no_other() -> None:
    config = opencode_config("http://127.0.0.1:1/v1")

    assert config["enabled_providers"] == ["demo"]
    assert config["model"] == config["small_model"] == "demo/demo"
    assert "Demo model (scripted)" in json.dumps(config)
    assert "http://127.0.0.1:1/v1" in json.dumps(config)
    [model] = config["provider"]["demo"]["models"].values()
    assert set(model["cost"].values()) == {0}


async def test_it_runs_by_itself() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "opencode_a2a_demo", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60), httpx2.AsyncClient() as http:
            url = (await process.stdout.readline()).decode().split()[-1]
            listed = await http.get(f"{url}/models")
    finally:
        process.terminate()
        await process.communicate()

    assert listed.status_code == 200


def test_an_error_needs_no_times() -> None:
    assert replies_in(enclose([{"error": 503}])) == ((Fail(error=503),),)
