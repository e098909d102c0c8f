"""Permissions and questions of a real OpenCode, put to a person and answered by plain A2A."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from a2a.client import ClientConfig, ClientFactory
from a2a.client.card_resolver import A2ACardResolver
from a2a.types import Message, Part, Role, SendMessageRequest, StreamResponse, TaskState
from structlog.testing import capture_logs

from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.opencode.driver import Driver, Location
from tests.live.conftest import Serve, two_wires
from tests.support.answers import RefusedError, Task, Wire
from tests.support.backstage import Backstage, past_service, script
from tests.support.caller import Caller
from tests.support.service import TOKEN, Running, serving, settings_for

pytestmark = pytest.mark.live

BASH = {"tool": "bash", "input": {"command": "echo ran", "description": "Say it"}}
FETCH = {"tool": "webfetch", "input": {"url": "http://127.0.0.1:9/p", "format": "text"}}
DONE = {"say": "done"}
COLOR = {
    "question": "Which colour?",
    "header": "Colour",
    "options": [
        {"label": "Red", "description": "like blood"},
        {"label": "Blue", "description": "like the sky"},
    ],
}


def question(*questions: Any) -> Any:
    return {"tool": "question", "input": {"questions": list(questions)}}


@pytest.fixture
async def asking(asking_backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Running]:
    """The service in front of an OpenCode that asks."""
    async with serving(settings_for(asking_backstage, tmp_path)) as running:
        yield running


@pytest.fixture
def person(asking: Running) -> Caller:
    """Whoever is asked."""
    return Caller(asking)


@pytest.fixture
async def lists(asking_backstage: Backstage) -> AsyncGenerator[Driver]:
    """OpenCode's own API, with what it has pending."""
    stage = asking_backstage
    async with past_service(stage.url, stage.password) as driver:
        yield driver


async def pending(lists: Driver, stage: Backstage, *tasks: Task) -> list[str]:
    """Return what OpenCode still asks in the sessions of these tasks."""
    at, sessions = Location(directory=str(stage.workspace)), [task.session_id for task in tasks]
    asked = [*await lists.permissions(at=at), *await lists.questions(at=at)]
    return [request.id for request in asked if request.session_id in sessions]


# Asked


@pytest.mark.parametrize(
    ("permission", "call", "shown"),
    [
        ("bash", BASH, "echo ran"),
        (
            "edit",
            {
                "tool": "edit",
                "input": {"filePath": "hello.txt", "oldString": "hello", "newString": "bye"},
            },
            "-hello",
        ),
        ("external_directory", {"tool": "read", "input": {"filePath": "/etc/hostname"}}, "/etc"),
        ("webfetch", FETCH, "http://127.0.0.1:9/p"),
        (
            "todowrite",
            {
                "tool": "todowrite",
                "input": {"todos": [{"content": "x1", "status": "pending", "priority": "low"}]},
            },
            "x1",
        ),
        ("echo_say", {"tool": "echo_say", "input": {"word": "w0rd"}}, "w0rd"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
async def test_a_permission_is_put_to_a_person_with_all_that_it_is_about(
    person: Caller, permission: str, call: Any, shown: str
) -> None:
    asked = await person.send(script(call, DONE))

    assert asked.state == "input_required"
    assert f"({permission})" in asked.said
    assert shown in asked.said
    assert '"once"' in asked.said
    interrupt = asked.interrupt
    until = interrupt["expires_at"]
    assert (interrupt["type"], interrupt["phase"]) == ("permission", "asked")
    assert interrupt["details"]["permission"] == permission
    assert interrupt["details"]["tool"]["input"]
    assert (
        f"If nobody answers by {until}, the request is rejected and the turn continues."
        in asked.said
    )

    ended = await person.send("reject: not now", task=asked.id)
    assert ended.state == "completed"
    assert ended.tools[0]["status"] == "error"
    assert ended.text == "done"


async def test_a_request_says_where_a_symbolic_link_leads(
    person: Caller, asking_backstage: Backstage, tmp_path: Path
) -> None:
    workspace = asking_backstage.workspace
    (tmp_path / "secret.txt").write_text("a\n")
    (workspace / "leads").symlink_to(tmp_path)
    names = ("leads/secret.txt", "leads/new/deep.txt", "plain.txt")
    calls = [{"tool": "write", "input": {"filePath": name, "content": "b\n"}} for name in names]

    said = [(await person.send(script(call, DONE))).said for call in calls]
    (workspace / "leads").unlink()

    for name, text in zip(names[:2], said, strict=False):
        real = tmp_path.joinpath(*Path(name).parts[1:])
        assert "A symbolic link leads from " in text
        assert f"{name} to {real}\n" in text
        assert f"Change of {name}" not in text  # as if it was inside
    assert "symbolic" not in said[2]


async def test_the_same_call_over_and_over_is_asked_about(person: Caller) -> None:
    call = {"tool": "read", "input": {"filePath": "hello.txt"}}

    asked = await person.send(script(call, call, call, DONE))

    assert asked.state == "input_required"
    assert asked.interrupt["details"]["permission"] == "doom_loop"
    ended = await person.send("yes", task=asked.id)
    assert ended.state == "completed"
    assert ended.text == "done"


@two_wires
async def test_a_blocking_caller_is_asked_and_answers_by_text(asking: Running, wire: Wire) -> None:
    person = Caller(asking, wire)

    asked = await person.send(script({"say": "before"}, BASH, DONE))
    ended = await person.send("yes", task=asked.id)

    assert asked.state == "input_required"
    assert asked.text == "before"
    assert ended.state == "completed"
    assert ended.tools[0]["output"] == "ran\n"
    assert ended.text == "before\n\ndone"
    assert ended.history[-1] == "yes"
    assert "interrupt" not in ended.shared


@two_wires
async def test_a_background_caller_finds_the_prompt_and_answers_by_data(
    asking: Running, wire: Wire
) -> None:
    person = Caller(asking, wire)

    begun = await person.begin(script(BASH, DONE))
    asked = await person.wait(begun.id, "input_required")
    answered = await person.send({"reply": "once"}, task=asked.id, blocking=False)
    ended = await person.ended(begun.id)

    assert answered.state in ("working", "completed")
    assert ended.state == "completed"
    assert ended.tools[0]["output"] == "ran\n"


@pytest.mark.both_drivers
@two_wires
async def test_a_stream_stops_at_the_prompt_and_goes_on_with_the_answer(
    asking: Running, wire: Wire
) -> None:
    person = Caller(asking, wire)

    async with person.stream(script({"say": "before"}, BASH, DONE)) as first:
        await first.rest()
    asked = first.task
    async with person.stream("once", task=asked.id) as second:
        await second.rest()

    assert first.states[-1] == "input_required"
    assert first.updates[-1].interrupt["phase"] == "asked"
    if not wire.modern:
        assert first.updates[-1].status["final"] is True
    assert second.updates[0].task is not None
    assert second.states[-1] == "completed"
    assert second.task.text == "before\n\ndone"
    assert second.task.tools[0]["output"] == "ran\n"


async def test_a_subscriber_sees_the_prompt_come_and_go(person: Caller) -> None:
    begun = await person.begin(script(BASH, DONE))

    async with person.subscribe(begun.id) as following:
        await following.until_state("input_required")
        await person.send("once", task=begun.id, blocking=False)
        await following.rest()

    resolved = [u.interrupt for u in following.updates if u.interrupt][-1]
    assert following.states[-3:] == ["input_required", "working", "completed"]
    assert resolved["phase"] == "resolved"
    assert resolved["resolution"] == "once"


@pytest.mark.both_drivers
async def test_a_sub_agent_asks_through_the_task_that_started_it(person: Caller) -> None:
    call = {
        "tool": "task",
        "input": {"description": "look", "subagent_type": "general", "prompt": "look"},
        "script": [BASH, {"say": "child saw {{result}}"}],
    }

    asked = await person.send(script(call, DONE))
    ended = await person.send("once", task=asked.id)

    assert asked.state == "input_required"
    assert asked.interrupt["session_id"] != asked.session_id
    assert asked.interrupt["details"]["tool"]["input"]["command"] == "echo ran"
    assert asked.interrupt["details"]["origin"] == {"type": "sub-agent", "title": "look"}
    assert "\nAsked by the sub-agent:\n    look\n" in asked.said
    assert ended.state == "completed"
    assert "child saw ran" in ended.tools[0]["output"]


# Questions


@pytest.mark.parametrize(
    ("answer", "understood"),
    [
        ("Red", "Red"),
        ("2", "Blue"),
        ("blue", "Blue"),
        ("a deep green", "a deep green"),
        ({"answers": [["Red"]]}, "Red"),
    ],
    ids=["label", "number", "case", "own words", "data"],
)
async def test_a_question_is_answered_in_any_of_these_ways(
    person: Caller, answer: Any, understood: str
) -> None:
    asked = await person.send(script(question(COLOR), {"say": "{{result}}"}))
    ended = await person.send(answer, task=asked.id)

    assert asked.state == "input_required"
    for shown in ("Which colour?", "1. Red - like blood", "2. Blue - like the sky"):
        assert shown in asked.said
    assert ended.state == "completed"
    assert understood in ended.text


@pytest.mark.both_drivers
async def test_several_options_and_several_questions_are_answered_line_by_line(
    person: Caller,
) -> None:
    many = COLOR | {"question": "Which colours?", "multiple": True}
    plain: Any = {"question": "How large?", "header": "Size", "options": []}

    asked = await person.send(script(question(many, plain), {"say": "{{result}}"}))
    ended = await person.send("1, Blue\nvery large", task=asked.id)

    assert asked.interrupt["details"]["questions"][0]["multiple"] is True
    assert "Red, Blue" in ended.text
    assert "very large" in ended.text


@pytest.mark.both_drivers
async def test_a_dismissed_question_ends_the_turn_as_rejected(person: Caller) -> None:
    asked = await person.send(script(question(COLOR), DONE))
    ended = await person.send("reject", task=asked.id)

    assert ended.state == "rejected"
    assert "refused" in ended.said
    assert ended.history[-1] == "reject"


# Refused


@pytest.mark.both_drivers
async def test_a_rejected_permission_ends_the_turn_and_says_so(person: Caller) -> None:
    asked = await person.send(script(BASH, DONE))
    ended = await person.send("no", task=asked.id)

    assert ended.state == "rejected"
    assert ended.error_type == "UPSTREAM_REQUEST_REJECTED"
    assert "refused" in ended.said
    assert ended.tools[0]["status"] == "error"
    assert ended.history[-1] == "no"
    again = await person.send(script({"say": "differently"}), context=ended.context_id)
    assert again.text == "differently"
    assert again.session_id == ended.session_id


# Answers that do not fit


@pytest.mark.parametrize(
    "nonsense",
    ["purple", "yes, but only once", {"reply": "perhaps"}, {"answers": [["Red"]]}, "   "],
    ids=["word", "condition", "data", "other kind", "blank"],
)
async def test_nonsense_leaves_the_prompt_pending_and_says_what_is_accepted(
    person: Caller, nonsense: Any
) -> None:
    asked = await person.send(script(BASH, DONE))

    with pytest.raises(RefusedError) as refused:
        await person.send(nonsense, task=asked.id)

    assert refused.value.code == -32602
    assert "once" in refused.value.message or nonsense == "   "
    assert (await person.get(asked.id)).state == "input_required"
    assert (await person.send("once", task=asked.id)).state == "completed"


@pytest.mark.both_drivers
async def test_always_is_refused_unless_the_setting_allows_it(person: Caller) -> None:
    asked = await person.send(script(BASH, DONE))

    with pytest.raises(RefusedError) as refused:
        await person.send("always", task=asked.id)
    ended = await person.send("once", task=asked.id)

    assert "always" not in asked.said.lower()
    assert refused.value.code == -32602
    assert "always" in refused.value.message
    assert ended.state == "completed"


async def test_always_holds_for_the_directory_when_the_setting_allows_it(
    serve: Serve, asking_backstage: Backstage
) -> None:
    directory = asking_backstage.workspace / str(uuid.uuid4())
    directory.mkdir()
    here = {"opencode": {"directory": str(directory)}}
    person = Caller(await serve(asking_backstage, A2A_ALLOW_ALWAYS="true"))

    asked = await person.send(script(BASH, DONE), metadata=here)
    ended = await person.send("always", task=asked.id)
    unasked = await person.send(script(BASH, DONE), metadata=here)

    assert '"always"' in asked.said
    assert asked.interrupt["details"]["always"] == ["echo *"]
    assert ended.state == "completed"
    assert unasked.state == "completed"


async def test_always_counts_for_every_request_that_opencode_settles_with_the_first(
    serve: Serve, asking_backstage: Backstage
) -> None:
    directory = asking_backstage.workspace / str(uuid.uuid4())
    directory.mkdir()
    here = {"opencode": {"directory": str(directory)}}
    settings = {"A2A_ALLOW_ALWAYS": "true", "A2A_CONSOLE_ANSWERS": "false"}
    person = Caller(await serve(asking_backstage, **settings))
    work = script(*commands("a", "b"), DONE)
    asked = await both_asked(person, await person.begin(work, metadata=here))

    ended = await person.send("always to all", task=asked.id, message_id="answer")
    again = await person.send("always to all", task=asked.id, message_id="answer")

    assert (ended.state, again.state) == ("completed", "completed")
    assert ended.history[1:] == again.history[1:] == ["always to all"]


async def test_a_late_and_a_doubled_answer_are_refused(person: Caller) -> None:
    asked = await person.send(script(BASH, DONE))

    answers = await asyncio.gather(
        person.send("once", task=asked.id),
        person.send("once", task=asked.id),
        return_exceptions=True,
    )
    with pytest.raises(RefusedError) as late:
        await person.send("once", task=asked.id)

    taken = [answer for answer in answers if isinstance(answer, Task)]
    assert [task.state for task in taken] == ["completed"]
    assert sum(isinstance(answer, RefusedError) for answer in answers) == 1
    assert late.value.code == -32004


async def test_the_same_answer_sent_again_is_the_same_answer(person: Caller) -> None:
    asked = await person.send(script(BASH, DONE))

    first = await person.send("once", task=asked.id, message_id="answer")
    again = await person.send("once", task=asked.id, message_id="answer")

    assert first.state == again.state == "completed"
    assert again.history.count("once") == 1


async def test_nobody_else_can_answer_or_see_the_task(
    serve: Serve, asking_backstage: Backstage
) -> None:
    credentials = [
        {"scheme": "bearer", "principal": name, "token": f"token-of-{name}-for-tests"}
        for name in ("ann", "bob")
    ]
    service = await serve(
        asking_backstage,
        A2A_BEARER_TOKEN="",
        A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(credentials).decode(),
    )
    ann = Caller(service, token="token-of-ann-for-tests")  # noqa: S106
    bob = Caller(service, token="token-of-bob-for-tests")  # noqa: S106
    asked = await ann.send(script(BASH, DONE))

    with pytest.raises(RefusedError) as refused:
        await bob.send("once", task=asked.id)
    with pytest.raises(RefusedError) as missing:
        await bob.send("once", task=str(uuid.uuid4()))

    assert refused.value.error == missing.value.error
    assert (await ann.send("once", task=asked.id)).state == "completed"


# Several at once


def commands(*names: str) -> list[Any]:
    return [{"tool": "bash", "input": {"command": f"echo {n}", "description": "d"}} for n in names]


async def both_asked(person: Caller, begun: Task) -> Task:
    async with person.subscribe(begun.id) as following:
        await following.until(lambda u: bool(u.status) and "2 requests" in str(u.status))
    return await person.get(begun.id)


@pytest.mark.both_drivers
async def test_parallel_prompts_are_all_listed_and_answered_one_by_one(person: Caller) -> None:
    asked = await both_asked(person, await person.begin(script(*commands("a", "b"), DONE)))

    with pytest.raises(RefusedError) as refused:
        await person.send("once", task=asked.id)
    left = await person.send({"reply": "once", "number": 2}, task=asked.id)
    with pytest.raises(RefusedError) as late:
        await person.send("yes 2", task=asked.id)
    ended = await person.send("1 once", task=asked.id)

    assert "1, 2" in refused.value.message
    assert left.state == "input_required"
    assert "Request 2" not in left.said
    assert left.interrupt["number"] == 1
    assert (late.value.code, "Request 1" in late.value.message) == (-32004, True)
    assert ended.state == "completed"
    assert sorted(tool["output"] for tool in ended.tools) == ["a\n", "b\n"]


async def test_yes_to_all_is_for_those_that_were_shown(person: Caller) -> None:
    asked = await both_asked(
        person, await person.begin(script(commands("a", "b"), commands("c"), [DONE]))
    )

    left = await person.send("yes to all", task=asked.id)
    ended = await person.send("3 yes", task=asked.id)

    assert (left.state, left.interrupt["number"]) == ("input_required", 3)
    assert "echo c" in left.said
    assert ended.state == "completed"
    assert ended.history[1:] == ["yes to all", "3 yes"]


async def test_equal_prompts_are_shown_once_and_answered_together(person: Caller) -> None:
    begun = await person.begin(script(*commands("same", "same"), DONE))
    async with person.subscribe(begun.id) as following:
        await following.until(lambda u: bool(u.status) and "2 times" in str(u.status))

    ended = await person.send("yes", task=begun.id)

    assert ended.state == "completed"
    assert [tool["output"] for tool in ended.tools] == ["same\n", "same\n"]


@pytest.mark.requirement("I23")
async def test_a_yes_that_is_typed_twice_does_not_allow_what_is_asked_next(
    person: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UNREAD_SECONDS", "SETTLED_SECONDS"):  # however slow the machine is
        monkeypatch.setattr(f"opencode_a2a.log.seen.{name}", 600.0)
    first = await person.send(script(commands("a"), commands("b"), [DONE]))

    answers = await asyncio.gather(
        *(person.send("yes", task=first.id) for _ in range(2)), return_exceptions=True
    )
    second = await person.get(first.id)

    with pytest.raises(RefusedError) as again:  # the second request was shown only now
        await person.send("yes", task=first.id)

    refused = [one for one in answers if isinstance(one, RefusedError)]
    assert len(refused) == 1
    assert (second.state, second.interrupt["number"]) == ("input_required", 2)
    assert "echo b" in again.value.message
    ended = await person.send("no 2", task=first.id)
    assert ended.state == "rejected"


@pytest.mark.requirement("I23")
async def test_a_yes_for_a_prompt_that_has_just_expired_does_not_allow_the_next(
    serve: Serve, asking_backstage: Backstage
) -> None:
    person = Caller(await serve(asking_backstage, A2A_INTERRUPT_REQUEST_TTL_SECONDS="3"))
    begun = await person.begin(script(commands("a"), commands("b"), [DONE]))
    late = str(uuid.uuid4())

    async with person.subscribe(begun.id) as following:
        await following.until(lambda u: bool(u.interrupt) and u.interrupt.get("number") == 2)
        with pytest.raises(RefusedError) as refused:
            await person.send("yes", task=begun.id, message_id=late)
        with pytest.raises(RefusedError):
            await person.send("yes", task=begun.id, message_id=late)
    ended = await person.send("yes 2", task=begun.id)

    assert (refused.value.code, "echo b" in refused.value.message) == (-32004, True)
    assert ended.state == "completed"
    assert [tool["status"] for tool in ended.tools] == ["error", "completed"]


@pytest.mark.both_drivers
async def test_rejecting_one_of_several_settles_them_all(
    person: Caller, lists: Driver, asking_backstage: Backstage
) -> None:
    begun = await person.begin(script(*commands("a", "b"), DONE))
    async with person.subscribe(begun.id) as following:
        await following.until(lambda u: bool(u.status) and "2 requests" in str(u.status))
        request = following.updates[-1].interrupt["request_id"]
        ended = await person.send({"reply": "reject", "request_id": request}, task=begun.id)

    assert ended.state == "rejected"
    assert not await pending(lists, asking_backstage, ended)


# Settled without a person


@pytest.mark.both_drivers
async def test_at_the_deadline_the_model_goes_on_without_an_answer(
    serve: Serve, asking_backstage: Backstage
) -> None:
    person = Caller(await serve(asking_backstage, A2A_INTERRUPT_REQUEST_TTL_SECONDS="0.5"))

    begun = await person.begin(script(BASH, DONE))
    async with person.subscribe(begun.id) as following:
        await following.rest()

    resolved = [u.interrupt for u in following.updates if u.interrupt][-1]
    assert resolved["resolution"] == "expired"
    assert resolved["by"] == "deadline"
    assert following.task.state == "completed"
    assert following.task.text == "done"


async def test_a_question_past_its_deadline_is_answered_with_that(
    serve: Serve, asking_backstage: Backstage
) -> None:
    person = Caller(await serve(asking_backstage, A2A_INTERRUPT_REQUEST_TTL_SECONDS="0.5"))

    begun = await person.begin(script(question(COLOR), {"say": "{{result}}"}))
    ended = await person.ended(begun.id)

    assert ended.state == "completed"
    assert "Nobody answered in time" in ended.text


async def test_at_the_deadline_the_turn_ends_if_so_set(
    serve: Serve, asking_backstage: Backstage, lists: Driver
) -> None:
    service = await serve(
        asking_backstage,
        A2A_INTERRUPT_REQUEST_TTL_SECONDS="0.5",
        A2A_INTERRUPT_DEFAULT_ACTION="end-turn",
    )
    person = Caller(service)

    begun = await person.begin(script(BASH, DONE))
    ended = await person.ended(begun.id)

    assert ended.state == "failed"
    assert ended.error_type == "INTERRUPT_EXPIRED"
    assert "in time" in ended.said
    assert not await pending(lists, asking_backstage, ended)


@pytest.mark.both_drivers
@pytest.mark.parametrize(
    ("action", "status", "output"), [("allow", "allowed", "ran\n"), ("deny", "denied", None)]
)
async def test_a_rule_answers_by_itself_and_is_told(
    serve: Serve, asking_backstage: Backstage, action: str, status: str, output: str | None
) -> None:
    rules = [
        {"permission": "bash", "pattern": "*", "action": "ask"},
        {"permission": "bash", "pattern": "echo *", "action": action},
    ]
    service = await serve(asking_backstage, A2A_PERMISSION_RULES=orjson.dumps(rules).decode())
    person = Caller(service)

    with capture_logs() as logs:
        async with person.stream(script(BASH, DONE)) as following:
            await following.rest()

    assert following.states == ["submitted", "working", "completed"]
    told = [progress for progress in following.progress if progress["type"] == "permission"]
    assert [(one["status"], one["title"]) for one in told] == [(status, "bash: echo ran")]
    assert following.task.tools[0].get("output") == output
    assert following.task.text == "done"
    (record,) = [entry for entry in logs if entry["event"] == "interrupt settled"]
    assert record["by"] == "rule"


async def test_every_prompt_leaves_one_audit_record(person: Caller) -> None:
    with capture_logs() as logs:
        asked = await person.send(script(BASH, DONE))
        await person.send("once", task=asked.id)

    (record,) = [entry for entry in logs if entry["event"] == "interrupt settled"]
    assert record["request_id"] == asked.interrupt["request_id"]
    assert record["task_id"] == asked.id
    assert record["permission"] == "bash"
    assert record["patterns"] == ["echo ran"]
    assert record["resolution"] == "once"
    assert record["by"] == record["principal"]


@pytest.mark.both_drivers
async def test_a_reply_from_elsewhere_is_told_with_what_it_was(
    person: Caller, lists: Driver
) -> None:
    asked = await person.send(script(BASH, DONE))

    async with person.subscribe(asked.id) as following:
        directory = Location(directory=await _directory(lists, asked))
        request = RequestId(asked.interrupt["request_id"])
        await lists.reply_permission(request, "reject", "better not", at=directory)
        await following.rest()

    resolved = [u.interrupt for u in following.updates if u.interrupt][-1]
    assert (resolved["resolution"], resolved["by"]) == ("rejected", "elsewhere")
    assert following.task.state == "completed"
    assert following.task.text == "done"


async def _directory(lists: Driver, task: Task) -> str:
    return (await lists.session(SessionId(task.session_id))).directory


@pytest.mark.both_drivers
async def test_canceling_leaves_nothing_pending(
    person: Caller, lists: Driver, asking_backstage: Backstage
) -> None:
    permission = await person.send(script(BASH, DONE))
    asked = await person.send(script(question(COLOR), DONE))

    canceled = [await person.cancel(task.id) for task in (permission, asked)]

    assert [task.state for task in canceled] == ["canceled", "canceled"]
    assert "interrupt" not in canceled[0].shared
    assert not await pending(lists, asking_backstage, *canceled)
    with pytest.raises(RefusedError):
        await person.send("once", task=permission.id)


# Durable


@pytest.mark.both_drivers
@pytest.mark.parametrize("call", [BASH, FETCH], ids=["bash", "webfetch"])
async def test_a_restart_keeps_the_prompt_and_its_deadline(
    asking_backstage: Backstage, tmp_path: Path, call: Any
) -> None:
    # OpenCode cannot list its prompts while one for a webfetch without timeout is among them.
    settings = settings_for(asking_backstage, tmp_path)
    async with serving(settings) as service:
        asked = await Caller(service).send(script({"say": "before"}, call, DONE))

    async with serving(settings) as service:
        person = Caller(service)
        still = await person.wait(asked.id, "input_required")
        ended = await person.send("once", task=asked.id)

    assert still.interrupt == asked.interrupt
    assert ended.state == "completed"
    assert ended.text == "before\n\ndone"
    assert ended.tools[0]["status"] in ("completed", "error")


async def test_a_deadline_that_passed_while_the_service_was_down_is_kept(
    asking_backstage: Backstage, tmp_path: Path
) -> None:
    settings = settings_for(asking_backstage, tmp_path, A2A_INTERRUPT_REQUEST_TTL_SECONDS="1")
    async with serving(settings) as service:
        asked = await Caller(service).send(script(BASH, DONE))
    assert asked.state == "input_required"

    async with serving(settings) as service:
        ended = await Caller(service).ended(asked.id)

    assert ended.state == "completed"
    assert ended.text == "done"
    assert ended.tools[0]["status"] == "error"


async def test_a_prompt_answered_while_the_service_was_down_is_settled(
    asking_backstage: Backstage, tmp_path: Path, lists: Driver
) -> None:
    settings = settings_for(asking_backstage, tmp_path)
    async with serving(settings) as service:
        asked = await Caller(service).send(script(BASH, DONE))
    here = Location(directory=await _directory(lists, asked))
    await lists.reply_permission(RequestId(asked.interrupt["request_id"]), "once", at=here)

    async with serving(settings) as service:
        ended = await Caller(service).ended(asked.id)

    assert ended.state == "completed"
    assert ended.text == "done"
    assert ended.tools[0]["output"] == "ran\n"


# A client that knows nothing of us


@pytest.mark.both_drivers
async def test_the_stock_client_of_the_sdk_sees_the_prompt_and_answers_it(
    asking: Running,
) -> None:
    def message(text: str, task_id: str = "") -> SendMessageRequest:
        said = Message(
            role=Role.ROLE_USER,
            message_id=str(uuid.uuid4()),
            parts=[Part(text=text)],
            task_id=task_id,
        )
        return SendMessageRequest(message=said)

    async def last(request: SendMessageRequest) -> StreamResponse:
        updates = [update async for update in client.send_message(request)]
        return updates[-1]

    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with asyncio.timeout(60), httpx.AsyncClient(headers=headers, timeout=30) as http:
        card = await A2ACardResolver(http, asking.url).get_agent_card()
        for interface in card.supported_interfaces:  # the port is chosen by the test
            interface.url = asking.url + "/"
        client = ClientFactory(ClientConfig(httpx_client=http)).create(card)
        asked = (await last(message(script(BASH, DONE)))).status_update
        done = (await last(message("once", task_id=asked.task_id))).status_update

    assert asked.status.state == TaskState.TASK_STATE_INPUT_REQUIRED
    assert "echo ran" in asked.status.message.parts[0].text
    assert done.status.state == TaskState.TASK_STATE_COMPLETED
