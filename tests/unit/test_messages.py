"""Ids of prompts."""

from opencode_a2a.ids import MessageId
from opencode_a2a.messages import MessageIds


def test_an_id_of_a_prompt_shows_whose_it_is() -> None:
    our_ids, their_ids = MessageIds(b"one"), MessageIds(b"another")
    ours, theirs = [our_ids() for _ in range(100)], their_ids()

    assert [*map(our_ids.made, ours)] == [True] * 100
    assert not our_ids.made(theirs)
    assert not our_ids.made(MessageId(ours[0][:-1]))
    assert sorted(ours) == ours


def test_an_id_that_an_earlier_version_made_is_known() -> None:
    assert MessageIds(b"one").made(MessageId("msg_0123456789ab0000000ycW5XOn"))
