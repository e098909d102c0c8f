"""The spans of a task, folded from its log."""

import pytest

from opencode_a2a.events import (
    Failure,
    FailureType,
    Finished,
    Interrupted,
    Outcome,
    Progressed,
    Resumed,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import ContextId, MessageId, Principal, RequestId, SessionId, TaskId
from opencode_a2a.log.state import Accepted, LogEvent, Recovered, TaskRef, TaskState
from opencode_a2a.messages import Answered, Message, Part
from opencode_a2a.otel.spans import Span, TaskSpans, turn_id

REF = TaskRef(TaskId("task"), ContextId("context"), Principal("ann"), created_at=0)
TEXT = MessageId("msg_1")
HELLO = Message("m", "user", [Part("text", text="a secret")])
BOUND = SessionBound(SessionId("ses_1"), model="acme/large", agent="build")
ASKED = Interrupted(RequestId("per_1"), "permission", SessionId("ses_1"))
PLAN = Interrupted(RequestId("plan_1"), "plan", SessionId("ses_1"))
DONE = Finished(Outcome.COMPLETED, finish="stop")


def tool(status: str, part: str = "prt_1") -> ToolChanged:
    assert status in ("running", "completed", "error")
    return ToolChanged(TEXT, part, "call_1", "bash", status, input={"command": "rm secret"})


def folded(*events: LogEvent, spans: TaskSpans | None = None) -> list[Span]:
    """Return the spans that end with each event; they come a second apart."""
    state, spans = TaskState(REF), spans or TaskSpans(REF)
    ended: list[Span] = []
    for second, event in enumerate(events):
        ended += spans.apply(state.apply(event, second * 1000), state)
    return ended


def test_a_turn_has_its_tools_and_waits_inside() -> None:
    used = UsageCounted(Usage(10, 5, 2, 3, 1, 0.5), Usage(output=1))

    ended = folded(
        Accepted(HELLO), BOUND, Started(), tool("running"), ASKED,
        Resumed(RequestId("per_1"), "permission", "once", "ann"), tool("completed"),
        TextGrew(TEXT, "prt_2", "done", opens=True), used, tool("completed"), DONE,
    )  # fmt: skip

    wait, ran, turn = ended
    assert [one.name for one in ended] == ["a2a.wait", "execute_tool bash", "invoke_agent build"]
    assert [(one.start, one.end) for one in ended] == [(4000, 5000), (3000, 6000), (0, 10_000)]
    assert (wait.parent, ran.parent, turn.parent) == (turn.id, turn.id, None)
    assert turn.events == [("a2a.prompt_sent", 2000), ("a2a.first_text", 7000)]
    assert turn.attributes == {
        "gen_ai.conversation.id": "context",
        "a2a.task.id": "task",
        "gen_ai.operation.name": "invoke_agent",
        "a2a.turn": 1,
        "opencode.session.id": "ses_1",
        "gen_ai.agent.name": "build",
        "gen_ai.provider.name": "acme",
        "gen_ai.request.model": "large",
        "gen_ai.response.model": "large",
        "gen_ai.usage.input_tokens": 14,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.cache_creation.input_tokens": 1,
        "a2a.usage.cost": 0.5,
        "a2a.task.state": "completed",
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert wait.attributes["a2a.wait.outcome"] == "once"
    assert wait.attributes["a2a.wait.by"] == "person"
    assert "ann" not in str(ended)
    assert "secret" not in str(ended)


def test_a_plan_is_a_turn_a_wait_and_another_turn() -> None:
    approved = Resumed(RequestId("plan_1"), "plan", "approved", "ann")

    planned, wait, built = folded(
        Accepted(HELLO), BOUND, Started(), PLAN, Answered(HELLO), approved, Started(), DONE
    )

    assert [planned.id, built.id] == [turn_id("task", 1), turn_id("task", 2)]
    assert (planned.end, wait.start, wait.end, built.start) == (3000, 3000, 5000, 5000)
    assert wait.attributes["a2a.wait.kind"] == "plan"


def test_a_sign_in_is_a_wait_between_two_turns() -> None:
    refused = Finished(Outcome.AUTH_REQUIRED)

    first, wait, second = folded(
        Accepted(HELLO), Started(), refused, Answered(HELLO), Started(), DONE
    )

    assert (first.error, wait.attributes["a2a.wait.kind"]) == (False, "sign_in")
    assert (first.end, wait.start, wait.end, second.start) == (2000, 2000, 3000, 3000)


def test_the_end_of_a_turn_ends_what_it_still_did() -> None:
    failure = Finished(Outcome.FAILED, failure=Failure(FailureType.UPSTREAM_TIMEOUT, "a secret"))

    ran, turn, wait = folded(Accepted(HELLO), Started(), tool("running"), ASKED, failure)

    assert ran.attributes["error.type"] == "aborted"
    assert (turn.error, turn.attributes["error.type"]) == (True, "UPSTREAM_TIMEOUT")
    assert wait.end == turn.end == 4000


@pytest.mark.parametrize("kills", [1, 2])
def test_each_process_that_goes_on_is_linked_to_the_one_before(kills: int) -> None:
    *earlier, last, turn = folded(
        Accepted(HELLO), Started(), *[Recovered("x"), Progressed("retry", "again")] * kills, DONE
    )

    assert turn.id == turn_id("task", 1)
    assert [one.link for one in (*earlier, last)] == [turn.id, *(one.id for one in earlier)]
    assert {one.parent for one in (*earlier, last)} == {turn.id}
    assert last.end == turn.end


def test_a_task_that_is_handed_over_has_a_span_of_each_owner() -> None:
    first, second = TaskSpans(REF), TaskSpans(REF)
    folded(Accepted(HELLO), Started(), spans=first)
    folded(Accepted(HELLO), Started(), spans=second)

    left = first.leave(1000)
    second.resume(1500, "taken over", "taken_over")
    (owned,) = second.leave(3000)

    assert left == []
    assert (owned.link, owned.start, owned.end) == (turn_id("task", 1), 1500, 3000)
    assert owned.attributes["a2a.link"] == "taken_over"
