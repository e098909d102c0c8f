"""The trace of a turn is complete, whatever happens to the processes that run it."""

import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from opencode_a2a.events import JsonObject
from tests.conftest import UNTRACKED, Stages
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.collector import Collector, attributes, collecting
from tests.support.program import Program
from tests.support.receiver import receiving
from tests.support.service import variables_for

pytestmark = pytest.mark.live

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
INTERNAL, CLIENT = 1, 3


@pytest.fixture(scope="module")
def stage(stages: Stages) -> Generator[Backstage]:
    rules: JsonObject = {"*": "allow", "echo asked *": "ask"}
    with stages("traces", {"permission": {"bash": rules}, **UNTRACKED}) as running:
        yield running


def command(text: str) -> Any:
    return {"tool": "bash", "input": {"command": text, "description": "Run it"}}


async def test_the_trace_of_a_turn_is_complete_over_a_kill(
    stage: Backstage, tmp_path: Path
) -> None:
    secret = uuid.uuid4().hex

    async with collecting() as collector, receiving() as receiver:
        variables = variables_for(
            stage, tmp_path,
            A2A_PUSH_ALLOW_PRIVATE_HOSTS="true", A2A_OTEL_ENABLED="true",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_RESOURCE_ATTRIBUTES="team=blue",
        )  # fmt: skip
        async with Program(variables) as program:
            caller = Caller(program)
            caller.headers |= {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
            sent = caller.message(
                script(
                    [command(f"echo free {secret}")],
                    [command(f"echo asked {secret}")],
                    [{"say": f"done {secret}"}],
                )
            )
            hook: JsonObject = {"url": receiver.url, "id": "c"}
            sent["configuration"] = {"returnImmediately": True, "taskPushNotificationConfig": hook}
            task = (await caller.ask("send", sent)).task["id"]
            await receiver.until(lambda it: "input_required" in it.states)

            before = len(receiver.received)
            await program.kill()
            await program.start()

            answering = Caller(program)
            await answering.send("yes", task=task)
            told = await receiver.ended()
            await collector.until(lambda it: bool(it.named("invoke_agent")))
            await program.stop()  # sends what is left

    (turn,), (resume,), (wait,) = map(collector.named, ("invoke_agent", "a2a.resume", "a2a.wait"))
    tools, hooks = collector.named("execute_tool bash"), collector.named("POST webhook")
    spans, ours = collector.spans, turn.span_id

    # One tree, in the trace of the caller, with every part of the turn.
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert turn.parent_span_id.hex() == SPAN
    assert {span.parent_span_id for span in spans.values() if span is not turn} == {ours}
    assert len(spans) == 3 + len(tools) + len(hooks)
    assert {span.trace_state for span in spans.values()} == {"vendor=1"}

    # The turn, and the process that went on with it.
    about = attributes(turn)
    assert about["gen_ai.operation.name"] == "invoke_agent"
    assert about["a2a.task.id"] == task
    assert about["a2a.task.state"] == "completed"
    assert about["gen_ai.usage.output_tokens"] > 0
    assert [event.name for event in turn.events] == ["a2a.prompt_sent", "a2a.first_text"]
    assert [link.span_id for link in resume.links] == [ours]
    assert attributes(resume)["a2a.link"] == "resumed"
    assert turn.start_time_unix_nano < resume.start_time_unix_nano < turn.end_time_unix_nano

    # Tools and the person, on both sides of the kill.
    assert len(tools) == 2
    assert attributes(wait) | {"a2a.wait.kind": "permission", "a2a.wait.by": "person"} == (
        attributes(wait)
    )
    assert wait.start_time_unix_nano < resume.start_time_unix_nano < wait.end_time_unix_nano

    # Each notification names the span that was sent of it. Those just before the kill may be lost:
    # they are not in the log.
    assert {span.kind for span in hooks} == {CLIENT}
    assert {span.kind for span in (turn, resume, wait, *tools)} == {INTERNAL}
    assert [one.state for one in told[before:]][-2:] == ["working", "completed"]
    for one in told[before:]:
        trace, span = one.headers["traceparent"].split("-")[1:3]
        assert (trace, spans[span].name) == (TRACE, "POST webhook")

    resources = [one.resource for request in collector.requests for one in request.resource_spans]
    named = {(one.key, one.value.string_value) for res in resources for one in res.attributes}
    assert {("service.name", "opencode-a2a"), ("team", "blue")} <= named
    assert no_content(collector, secret)


def no_content(collector: Collector, secret: str) -> bool:
    return all(secret.encode() not in body for body in collector.bodies)
