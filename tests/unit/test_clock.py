"""The time of day that several processes share."""

from collections.abc import Iterator

import pytest

from opencode_a2a import clock
from opencode_a2a.clock import SHARED_CLOCK, SharedClock, now_ms


class Machine:
    """The clocks of a machine, in milliseconds."""

    def __init__(self) -> None:
        self.monotonic, self.day = 5_000, 1_000_000

    def monotonic_ns(self) -> int:
        return self.monotonic * 1_000_000

    def time_ns(self) -> int:
        return self.day * 1_000_000


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    monkeypatch.setattr(clock, "time", machine)
    yield machine
    SHARED_CLOCK.reset()


def told(machine: Machine, at: int, taken: int = 0) -> None:
    """Answer the question for the time that was asked a while ago."""
    SHARED_CLOCK.follow(at, (machine.monotonic - taken) * 1_000_000)


def test_the_time_is_the_databases_whatever_that_of_the_machine_is(machine: Machine) -> None:
    assert now_ms() == 1_000_000
    told(machine, 7_000_000)
    machine.monotonic += 250
    machine.day -= 3_600_000

    assert now_ms() == 7_000_250
    SHARED_CLOCK.reset()
    assert now_ms() == machine.day


def test_an_answer_that_took_long_does_not_move_the_time(machine: Machine) -> None:
    told(machine, 7_000_000)
    machine.monotonic += 1_000
    told(machine, 7_000_980, taken=100)  # read some time in the last 100 ms

    assert now_ms() == 7_001_000
    told(machine, 7_001_005)
    assert now_ms() == 7_001_005
    told(machine, 7_000_900, taken=50)  # at most 7,000,950 now
    assert SHARED_CLOCK.ahead == 7_000_950 - machine.monotonic


def test_the_time_does_not_go_back_when_it_is_corrected(machine: Machine) -> None:
    told(machine, 7_000_000)
    assert now_ms() == 7_000_000
    told(machine, 6_999_000)

    assert now_ms() == 7_000_000
    machine.monotonic += 1_500
    assert now_ms() == 7_000_500


def test_a_clock_of_the_database_that_is_set_back_by_far_is_followed(machine: Machine) -> None:
    told(machine, 7_000_000)
    assert now_ms() == 7_000_000
    told(machine, 7_000_000 - SharedClock.FOLLOWED_MS - 1)

    assert now_ms() == 7_000_000 - SharedClock.FOLLOWED_MS - 1
