"""What the rules of the service answer, and what happens when nobody does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.config import AnswerRule, InterruptSettings
from opencode_a2a.events import Interrupted, Question
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.turns.answers import PermissionReply, QuestionReply
from opencode_a2a.turns.policy import Action, expiry, rule_action

QUESTION = Interrupted(
    RequestId("que_1"), "question", SessionId("ses_1"), questions=[Question("?", "?")] * 2
)


def bash(*patterns: str, permission: str = "bash") -> Interrupted:
    return Interrupted(
        RequestId("per_1"),
        "permission",
        SessionId("ses_1"),
        permission=permission,
        patterns=list(patterns),
    )


ENDS = InterruptSettings(interrupt_default_action="end-turn")
GOES_ON = InterruptSettings(interrupt_default_action="reject-and-continue")
Given = tuple[str, str, Action]


def decide(asked: Interrupted, *rules: Given) -> Action:
    """Return what these rules do, each a permission, a pattern and an action."""
    made = [AnswerRule(permission=name, pattern=like, action=do) for name, like, do in rules]
    return rule_action(InterruptSettings(permission_rules=tuple(made)), asked)


def test_without_rules_a_person_is_asked() -> None:
    assert decide(bash("ls")) == "ask"


def test_the_last_rule_that_fits_decides() -> None:
    rules: tuple[Given, ...] = (
        ("bash", "*", "deny"),
        ("bash", "git *", "allow"),
        ("bash", "git push*", "ask"),
    )

    assert decide(bash("rm x"), *rules) == "deny"
    assert decide(bash("git status"), *rules) == "allow"
    assert decide(bash("git push -f"), *rules) == "ask"


def test_a_rule_is_for_its_permission_only() -> None:
    assert decide(bash("a.py", permission="edit"), ("bash", "*", "allow")) == "ask"
    assert decide(bash("a.py", permission="edit"), ("*", "*", "allow")) == "allow"


@pytest.mark.parametrize(
    ("patterns", "action"),
    [
        (["git log", "git diff"], "allow"),
        (["git log", "make"], "ask"),
        (["git log", "make", "rm x"], "deny"),
    ],
)
def test_every_command_of_a_compound_has_to_be_allowed(patterns: list[str], action: str) -> None:
    rules: tuple[Given, ...] = (("bash", "git *", "allow"), ("bash", "rm *", "deny"))

    assert decide(bash(*patterns), *rules) == action


def test_a_request_whose_patterns_cannot_be_read_is_never_allowed_by_a_rule() -> None:
    assert decide(bash(), ("*", "*", "allow")) == "ask"
    assert decide(bash(), ("bash", "*", "allow"), ("bash", "rm *", "deny")) == "ask"
    assert decide(bash(), ("bash", "*", "deny")) == "deny"


def test_a_question_is_never_answered_by_a_rule() -> None:
    assert decide(QUESTION, ("*", "*", "allow")) == "ask"


@given(st.lists(st.text(min_size=1), min_size=1))
def test_nothing_is_allowed_that_no_rule_names(patterns: list[str]) -> None:
    allowed = decide(bash(*patterns), ("bash", "make test", "allow")) == "allow"
    assert allowed == all(pattern == "make test" for pattern in patterns)


def test_at_the_deadline_the_turn_ends_or_goes_on() -> None:
    assert expiry(ENDS, bash("ls")) is None
    assert expiry(ENDS, QUESTION) is None

    refused = expiry(GOES_ON, bash("ls"))
    assert isinstance(refused, PermissionReply)
    assert refused.reply == "reject"
    assert refused.message  # without one OpenCode would end the turn
    answered = expiry(GOES_ON, QUESTION)
    assert isinstance(answered, QuestionReply)
    assert len(answered.answers) == 2
