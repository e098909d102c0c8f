"""What the rules of the service answer, and what happens when nobody does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.events import Interrupted, Question
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.turns.answers import PermissionReply, QuestionReply
from opencode_a2a.turns.interrupts import Action, DefaultAction, Policy, Rule

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


def policy(*rules: tuple[str, str, Action], default: DefaultAction = "end-turn") -> Policy:
    return Policy(60, 60, default, rules=tuple(Rule(*rule) for rule in rules))


def test_without_rules_a_person_is_asked() -> None:
    assert policy().action(bash("ls")) == "ask"


def test_the_last_rule_that_fits_decides() -> None:
    rules = policy(("bash", "*", "deny"), ("bash", "git *", "allow"), ("bash", "git push*", "ask"))

    assert rules.action(bash("rm x")) == "deny"
    assert rules.action(bash("git status")) == "allow"
    assert rules.action(bash("git push -f")) == "ask"


def test_a_rule_is_for_its_permission_only() -> None:
    assert policy(("bash", "*", "allow")).action(bash("a.py", permission="edit")) == "ask"
    assert policy(("*", "*", "allow")).action(bash("a.py", permission="edit")) == "allow"


@pytest.mark.parametrize(
    ("patterns", "action"),
    [
        (["git log", "git diff"], "allow"),
        (["git log", "make"], "ask"),
        (["git log", "make", "rm x"], "deny"),
    ],
)
def test_every_command_of_a_compound_has_to_be_allowed(patterns: list[str], action: str) -> None:
    rules = policy(("bash", "git *", "allow"), ("bash", "rm *", "deny"))

    assert rules.action(bash(*patterns)) == action


def test_a_permission_without_patterns_is_matched_as_a_star() -> None:
    assert policy(("deploy", "*", "allow")).action(bash(permission="deploy")) == "allow"
    assert policy(("deploy", "x*", "allow")).action(bash(permission="deploy")) == "ask"


def test_a_question_is_never_answered_by_a_rule() -> None:
    assert policy(("*", "*", "allow")).action(QUESTION) == "ask"


@given(st.lists(st.text(min_size=1), min_size=1))
def test_nothing_is_allowed_that_no_rule_names(patterns: list[str]) -> None:
    rules = policy(("bash", "make test", "allow"))

    allowed = rules.action(bash(*patterns)) == "allow"
    assert allowed == all(pattern == "make test" for pattern in patterns)


def test_at_the_deadline_the_turn_ends_or_goes_on() -> None:
    assert policy().expiry(bash("ls")) is None
    assert policy().expiry(QUESTION) is None

    goes_on = policy(default="reject-and-continue")
    refused = goes_on.expiry(bash("ls"))
    assert isinstance(refused, PermissionReply)
    assert refused.reply == "reject"
    assert refused.message  # without one OpenCode would end the turn
    answered = goes_on.expiry(QUESTION)
    assert isinstance(answered, QuestionReply)
    assert len(answered.answers) == 2
