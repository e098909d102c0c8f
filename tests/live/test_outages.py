"""What breaks in the middle of a turn, and what is left of the turn then: all of it."""

import asyncio
import signal
import uuid
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.types import Prompt, TextInput
from tests.conftest import Stages
from tests.live.conftest import EVERYTHING_ASKED, Serve
from tests.support.answers import RefusedError, Task
from tests.support.backstage import Backstage, script, until_restarted
from tests.support.caller import Caller
from tests.support.proxy import Proxy
from tests.support.replicas import until
from tests.support.service import serving, settings_for

pytestmark = pytest.mark.live

BASH = {"tool": "bash", "input": {"command": "echo ran", "description": "d"}}


@pytest.fixture(scope="module")
def fragile(stages: Stages) -> Generator[Backstage]:
    """An OpenCode that may be killed; it asks before it runs a command."""
    with stages("fragile", EVERYTHING_ASKED) as running:
        yield running


@pytest.fixture
async def wire(backstage: Backstage) -> AsyncGenerator[Proxy]:
    """The connection between the service and OpenCode."""
    async with Proxy(backstage.url) as proxy:
        yield proxy


@pytest.fixture
async def far(serve: Serve, wire: Proxy) -> Caller:
    """A caller of a service whose OpenCode is behind a wire that can be cut."""
    service = await serve(OPENCODE_BASE_URL=wire.url)
    # Until OpenCode has answered for the first time, messages are refused while it is away.
    fleet = service.service.fleet
    assert fleet is not None
    await until(lambda: fleet.first.up)
    return Caller(service)


async def begun_and_told(caller: Caller, backstage: Backstage, gate: str) -> Task:
    """Begin a turn that has told half of a part, and stands at a gate."""
    actions = ({"think": "hm"}, {"say": "half "}, {"gate": gate}, {"say": "whole"})
    begun = await caller.begin(script(*actions))
    async with caller.subscribe(begun.id) as following:
        await following.until_text("half ")
    await backstage.reached(gate)
    return begun


@pytest.mark.both_drivers
async def test_a_cut_in_the_middle_of_a_part_loses_and_repeats_nothing(
    far: Caller, wire: Proxy, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())
    begun = await begun_and_told(far, backstage, gate)

    async with far.subscribe(begun.id) as following:
        wire.break_off()
        await backstage.open(gate)
        await following.rest()

    stored = await far.get(begun.id)
    assert stored.state == "completed"
    assert stored.text == following.task.text == "half whole"
    assert stored.reasoning == following.task.reasoning == "hm"


async def test_a_session_whose_making_was_answered_in_vain_is_found_again(
    far: Caller, wire: Proxy, opencode: Driver, backstage: Backstage
) -> None:
    at = Location(directory=str(backstage.workspace))
    before = {one.id for one in await opencode.sessions(at=at)}
    wire.losing = dict.fromkeys((b"POST /session?", b"POST /api/session "), 5)

    task = await far.send(script({"say": "at last"}))

    assert (task.state, task.text) == ("completed", "at last")
    assert {one.id for one in await opencode.sessions(at=at)} - before == {task.session_id}
    assert min(wire.losing.values()) < 5


@pytest.mark.both_drivers
async def test_an_answer_that_ends_while_the_wire_is_down_is_read_back(
    far: Caller, wire: Proxy, backstage: Backstage, opencode: Driver
) -> None:
    gate = str(uuid.uuid4())
    begun = await begun_and_told(far, backstage, gate)
    session_id = SessionId((await far.get(begun.id)).session_id)

    wire.down = True
    wire.break_off()
    await backstage.open(gate)
    await _idle(opencode, backstage, session_id)
    wire.down = False
    ended = await far.ended(begun.id)

    assert ended.state == "completed"
    assert ended.text == "half whole"


async def test_a_prompt_asked_while_the_wire_is_down_is_found(
    serve: Serve, asking_backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())
    async with Proxy(asking_backstage.url) as wire:
        person = Caller(await serve(asking_backstage, OPENCODE_BASE_URL=wire.url))
        begun = await person.begin(script({"say": "a "}, {"gate": gate}, BASH, {"say": "done"}))
        await asking_backstage.reached(gate)
        wire.down = True
        wire.break_off()
        await asking_backstage.open(gate)
        wire.down = False
        await person.wait(begun.id, "input_required")
        ended = await person.send("once", task=begun.id)

    assert ended.state == "completed"
    assert ended.text == "a \n\ndone"


async def test_a_prompt_that_opencode_cannot_list_is_found_when_it_can_again(
    serve: Serve, asking_backstage: Backstage
) -> None:
    fetch = {"tool": "webfetch", "input": {"url": "http://127.0.0.1:9/", "format": "text"}}
    gate = str(uuid.uuid4())
    async with Proxy(asking_backstage.url) as wire:
        person = Caller(await serve(asking_backstage, OPENCODE_BASE_URL=wire.url))
        spoiler = await person.send(script(fetch))
        begun = await person.begin(script({"say": "a "}, {"gate": gate}, BASH, {"say": "done"}))
        await asking_backstage.reached(gate)
        wire.down = True
        wire.break_off()
        await asking_backstage.open(gate)
        wire.down = False
        await person.cancel(spoiler.id)
        await person.wait(begun.id, "input_required")
        ended = await person.send("once", task=begun.id)

    assert ended.state == "completed"


async def test_a_message_sent_while_opencode_is_away_waits_for_it(far: Caller, wire: Proxy) -> None:
    wire.down = True
    wire.break_off()
    begun = await far.begin(script({"say": "late"}))
    wire.down = False
    ended = await far.ended(begun.id)

    assert ended.state == "completed"
    assert ended.text == "late"


async def test_a_cancel_without_opencode_is_told_as_unconfirmed(
    far: Caller, wire: Proxy, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())
    begun = await begun_and_told(far, backstage, gate)

    wire.down = True
    wire.break_off()
    canceled = await far.cancel(begun.id)
    await backstage.open(gate)

    assert canceled.state == "canceled"
    assert "did not confirm" in canceled.said
    assert canceled.text == "half "


async def test_a_task_that_waits_for_opencode_can_be_canceled(far: Caller, wire: Proxy) -> None:
    wire.down = True
    wire.break_off()
    begun = await far.begin(script({"say": "never"}))

    canceled = await far.cancel(begun.id)

    assert canceled.state == "canceled"


async def test_a_restart_in_the_middle_of_a_turn_goes_on_where_it_was(
    backstage: Backstage, tmp_path: Path
) -> None:
    settings, gate = settings_for(backstage, tmp_path), str(uuid.uuid4())
    async with serving(settings) as service:
        begun = await begun_and_told(Caller(service), backstage, gate)

    async with serving(settings) as service:
        caller = Caller(service)
        before = await caller.get(begun.id)
        await backstage.open(gate)
        ended = await caller.ended(begun.id)

    assert before.text == "half "
    assert ended.state == "completed"
    assert ended.text == "half whole"
    assert ended.reasoning == "hm"


async def test_a_turn_that_ended_while_the_service_was_down_is_completed(
    backstage: Backstage, tmp_path: Path, opencode: Driver
) -> None:
    settings, gate = settings_for(backstage, tmp_path), str(uuid.uuid4())
    async with serving(settings) as service:
        caller = Caller(service)
        begun = await begun_and_told(caller, backstage, gate)
        session_id = SessionId((await caller.get(begun.id)).session_id)
    await backstage.open(gate)
    await _idle(opencode, backstage, session_id)

    async with serving(settings) as service:
        ended = await Caller(service).ended(begun.id)

    assert ended.text == "half whole"
    assert ended.state == "completed"


async def test_a_stream_can_be_resumed_after_a_restart(
    backstage: Backstage, tmp_path: Path
) -> None:
    settings, gate = settings_for(backstage, tmp_path), str(uuid.uuid4())
    async with serving(settings) as service:
        caller = Caller(service)
        async with caller.stream(
            script({"say": "half "}, {"gate": gate}, {"say": "whole"})
        ) as first:
            await first.until_text("half ")
    last = first.updates[-1].id

    async with (
        serving(settings) as service,
        Caller(service).subscribe(first.task.id, after=last) as second,
    ):
        await backstage.open(gate)
        second.updates[:0] = first.updates
        await second.rest()

    assert second.task.state == "completed"
    assert second.task.text == "half whole"


async def test_a_foreign_prompt_in_the_same_session_does_not_end_up_in_the_task(
    caller: Caller, backstage: Backstage, opencode: Driver
) -> None:
    gate = str(uuid.uuid4())
    begun = await begun_and_told(caller, backstage, gate)
    session_id = SessionId((await caller.get(begun.id)).session_id)
    here = Location(directory=str(backstage.workspace))

    foreign = Prompt(parts=[TextInput(text=script({"say": "foreign"}))])
    await opencode.prompt_async(session_id, foreign, at=here)
    await backstage.open(gate)
    ended = await caller.ended(begun.id)

    assert ended.state == "completed"
    assert ended.text == "half whole"


@pytest.mark.both_drivers
async def test_a_killed_opencode_fails_the_turn_with_a_reason_and_serves_the_next(
    fragile: Backstage, serve: Serve
) -> None:
    caller, gate = Caller(await serve(fragile)), str(uuid.uuid4())
    begun = await begun_and_told(caller, fragile, gate)

    await fragile.kill()
    ended = await caller.ended(begun.id)
    after = await caller.send(script({"say": "back"}), context=ended.context_id)

    assert ended.state == "failed"
    assert ended.error_type == "UPSTREAM_INTERRUPTED"
    assert "again" in ended.said
    assert (ended.reasoning, ended.text) == ("hm", "half ")
    assert after.state == "completed"
    assert after.text == "back"
    assert after.session_id == ended.session_id


@pytest.mark.both_drivers
async def test_a_killed_opencode_forgets_its_prompts_and_the_task_says_so(
    fragile: Backstage, serve: Serve
) -> None:
    caller = Caller(await serve(fragile))
    asked = await caller.send(script(BASH, {"say": "done"}))

    async with caller.subscribe(asked.id) as following:
        await fragile.kill()
        await following.rest()

    resolved = [u.interrupt for u in following.updates if u.interrupt][-1]
    assert asked.state == "input_required"
    assert resolved["resolution"] == "void"
    assert following.task.state == "failed"
    assert "Send the message again, and it asks again." in following.task.said


@pytest.mark.both_drivers
async def test_an_answer_for_an_opencode_that_hangs_is_kept_until_it_goes_on(
    fragile: Backstage, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opencode_a2a.turns.interrupts.CONFIRM_SECONDS", 1.0)
    caller = Caller(await serve(fragile))
    count = {"tool": "bash", "input": {"command": "echo ran >> runs", "description": "d"}}
    asked = await caller.send(script(count, {"say": "done"}))

    await fragile.kill(signal.SIGSTOP)
    try:
        async with asyncio.timeout(10):
            with pytest.raises(RefusedError, match="The answer is stored"):
                await caller.begin("once", task=asked.id)
    finally:
        await fragile.kill(signal.SIGCONT)
    ended = await caller.ended(asked.id)

    assert (ended.state, ended.text) == ("completed", "done")
    assert ended.history[1:] == ["once"]
    assert (fragile.workspace / "runs").read_text() == "ran\n"


@pytest.mark.opencode2_only
async def test_an_opencode_that_is_stopped_is_not_taken_for_a_refusal(
    fragile: Backstage, serve: Serve
) -> None:
    """OpenCode 2 ends a turn in the same way when a person refuses and when it is stopped."""
    caller = Caller(await serve(fragile))
    asked = await caller.send(script(BASH, {"say": "done"}))

    pid = await fragile.kill(signal.SIGTERM)
    ended = await caller.ended(asked.id)
    async with asyncio.timeout(60):
        await fragile.call(until_restarted(fragile.opencode, pid))
    again = await caller.send(script(BASH, {"say": "done"}), context=asked.context_id)
    refused = await caller.send("no", task=again.id)

    assert (asked.state, ended.state, again.state) == ("input_required", "failed", "input_required")
    assert "again" in ended.said
    assert refused.state == "rejected"


async def _idle(opencode: Driver, backstage: Backstage, session_id: SessionId) -> None:
    """Wait, by OpenCode's own word, until a session has nothing to do."""
    here = Location(directory=str(backstage.workspace))
    while session_id in await opencode.session_status(at=here):
        pass
