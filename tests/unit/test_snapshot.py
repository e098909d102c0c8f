"""What turns read from OpenCode: once for all of them, and not before it is complete."""

import asyncio

import pytest

from opencode_a2a.ids import MessageId
from opencode_a2a.opencode.client import HERE, Location
from opencode_a2a.opencode.events import MessageUpdated, PartUpdated
from opencode_a2a.opencode.reader import TurnReader
from opencode_a2a.opencode.types import PatchPart, UserMessage
from opencode_a2a.turns.snapshot import DirectoryQuery, is_overtaken
from tests.support.opencode_state import recording, recordings


async def test_an_answer_is_shared_by_those_it_is_new_enough_for() -> None:
    asked: list[Location] = []

    async def ask(location: Location) -> int:
        asked.append(location)
        return len(asked)

    query, now = DirectoryQuery(ask), asyncio.get_running_loop().time()

    assert await asyncio.gather(query.of(HERE, now), query.of(HERE, now)) == [1, 1]
    assert await query.of(Location("/elsewhere"), now) == 2
    assert await query.of(HERE, now + 1) == 3


def test_what_opencode_adds_to_a_turn_does_not_overtake_it() -> None:
    turn = [one for one in recordings() if one.name == "compaction-auto"][-1]
    messages = [*turn.states[-1].messages]
    at = [one.info.id for one in messages].index(turn.prompt)
    added = [one.info.id for one in messages[at + 1 :] if one.info.role == "user"]

    assert added
    assert not is_overtaken(messages[at:], [turn.prompt])
    assert is_overtaken(messages, [MessageId("msg_unknown")])


def test_only_a_prompt_that_is_not_of_the_turn_overtakes_it() -> None:
    first, second = [r for r in recordings() if r.name == "concurrent-two-prompts"][:2]
    messages = first.states[-1].messages

    assert is_overtaken(messages, [first.prompt])
    assert not is_overtaken(messages, [first.prompt, second.prompt])


def test_a_turn_that_changes_nothing_has_nothing_to_wait_for() -> None:
    turn = recording("tool-completed")
    state = TurnReader(turn.root, turn.prompt).state

    for event in turn.events:
        state.apply_event(event)

    assert state.messages.diff_known


@pytest.mark.parametrize("name", ["write-edit"])
def test_the_diff_is_known_with_the_last_update_of_the_prompt(name: str) -> None:
    turn = recording(name)
    patch = max(
        at
        for at, event in enumerate(turn.events)
        if isinstance(event, PartUpdated) and isinstance(event.part, PatchPart)
    )
    last = max(
        at
        for at, event in enumerate(turn.events)
        if isinstance(event, MessageUpdated) and isinstance(event.info, UserMessage)
    )
    state = TurnReader(turn.root, turn.prompt).state

    known: list[bool] = []
    for event in turn.events:
        state.apply_event(event)
        known.append(state.messages.diff_known)

    assert not any(known[patch:last])
    assert all(known[last:])
