"""Traces: what they show, what they never show, and that nothing depends on them."""

from pathlib import Path

import orjson
import pytest

from tests.support.caller import Caller
from tests.support.collector import Collector, attributes, collecting
from tests.support.opencode import FakeOpenCode
from tests.support.ports import free_port
from tests.support.program import Program
from tests.support.service import variables_for

pytestmark = pytest.mark.asyncio(loop_scope="module")


def traced(opencode: FakeOpenCode, place: Path, url: str, **more: str) -> dict[str, str]:
    exporting = {"A2A_OTEL_ENABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": url}
    return variables_for(opencode, place, **exporting, **more)


async def test_a_turn_is_not_hurt_by_a_collector_that_is_away(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    opencode.play("tool-completed")
    variables = traced(opencode, tmp_path, f"http://127.0.0.1:{free_port()}")
    async with Program(variables) as program:
        task = await Caller(program).send("hello")
        again = await Caller(program).send("hello")
        status = await program.stop()

    assert (task.state, again.state, status) == ("completed", "completed", 0)
    assert "Traceback" not in "\n".join(program.lines)


async def test_what_was_said_is_in_a_trace_only_if_the_setting_says_so(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    async def trace(place: Path, **more: str) -> Collector:
        opencode.play("tool-completed")
        async with (
            collecting() as collector,
            Program(traced(opencode, place, collector.url, **more)) as program,
        ):
            task = await Caller(program).send("a secret question")
            assert task.state == "completed"
            await program.stop()  # sends what is left
        return collector

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    without = await trace(tmp_path / "a")
    spoken = await trace(tmp_path / "b", A2A_OTEL_CONTENT="true")

    for collector in (without, spoken):
        (turn,) = collector.named("invoke_agent")
        (tool,) = collector.named("execute_tool")
        assert tool.parent_span_id == turn.span_id
        assert not turn.parent_span_id
    assert not any(b"secret question" in body for body in without.bodies)
    keys = {key for span in without.spans.values() for key in attributes(span)}
    assert not {key for key in keys if "message" in key or "arguments" in key or "result" in key}
    (turn,), (tool,) = spoken.named("invoke_agent"), spoken.named("execute_tool")
    said = orjson.loads(attributes(turn)["gen_ai.input.messages"])
    assert said[0]["parts"] == [{"type": "text", "content": "a secret question"}]
    assert orjson.loads(attributes(tool)["gen_ai.tool.call.arguments"])
    assert attributes(turn)["gen_ai.output.messages"]


@pytest.mark.parametrize(("flags", "exported"), [("00", 0), ("01", 1)])
async def test_the_sampler_of_the_specification_decides(
    opencode: FakeOpenCode, tmp_path: Path, flags: str, exported: int
) -> None:
    opencode.play("plain-text")
    async with (
        collecting() as collector,
        Program(traced(opencode, tmp_path, collector.url)) as program,
    ):
        caller = Caller(program)
        caller.headers["traceparent"] = f"00-{'a' * 32}-{'b' * 16}-{flags}"
        await caller.send("hello")
        await program.stop()

    assert len(collector.named("invoke_agent")) == exported
