"""The mapping that forgets its oldest entries."""

from opencode_a2a.bounds import Recent


def test_the_oldest_entries_are_forgotten() -> None:
    recent = Recent[str, int](2)

    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3
    recent.setdefault("c", 4)

    assert list(recent.items()) == [("a", 3), ("c", 4)]
