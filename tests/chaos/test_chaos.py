"""A short run of what ``make chaos`` does for longer."""

import os

import pytest

from tests.chaos.campaign import campaign, report
from tests.chaos.history import violations

SECONDS = float(os.environ.get("OPENCODE_A2A_TEST_CHAOS", "30"))
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
