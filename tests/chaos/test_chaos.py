"""A short run of what ``make chaos`` does for longer."""

import os

import pytest

from tests.chaos.campaign import campaign, report, restarts
from tests.chaos.history import History, silences, violations

SECONDS = float(os.environ.get("OPENCODE_A2A_TEST_CHAOS", "30"))
HAND_OVER_SECONDS, TAKE_OVER_SECONDS = 2.0, 6.0
"""The longest pauses in a text when a replica is stopped, and when it is killed."""
SEED = int(os.environ.get("OPENCODE_A2A_TEST_SEED", "11"))


@pytest.mark.requirement("I2")
@pytest.mark.requirement("I4")
@pytest.mark.requirement("I6")
@pytest.mark.requirement("I18")
@pytest.mark.requirement("I19")
@pytest.mark.requirement("I20")
async def test_clients_see_one_truth_while_parts_of_the_cluster_die() -> None:
    history = await campaign(SEED, SECONDS, clients=16)

    found = violations(history)

    print(report(history, found))  # shown when the test fails
    assert found == []
    assert len(history.faults) > 3
    assert any(task.state == "completed" for task in history.tasks)


async def test_texts_go_on_visibly_while_replicas_are_restarted_and_killed() -> None:
    history = await restarts(SEED, streams=20)

    found = violations(history)
    late = [
        f"{task} showed nothing for {until - since:.1f} s"
        for task, since, until in silences(history)
        if until - since > history.allowed(_limit(history, since, until), since, until)
    ]
    print(report(history, found))  # shown when the test fails
    assert found == []
    assert late == []
    assert [one.kind for one in history.faults] == ["term", "term", "term", "kill"]
    assert [task.state for task in history.tasks] == ["completed"] * 20


def _limit(history: History, since: float, until: float) -> float:
    kills = [one for one in history.faults if one.kind == "kill"]
    near = any(one.at <= until and one.until >= since for one in kills)
    return TAKE_OVER_SECONDS if near else HAND_OVER_SECONDS
