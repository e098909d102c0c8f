"""Rights: a request can narrow what credential and deployment allow, and nothing widens it."""

from fnmatch import fnmatchcase
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.opencode.types import PermissionRule
from opencode_a2a.rights import FULL, PROFILES, READING, Action, Rights, unmatched
from opencode_a2a.turns.sessions import narrowed

WIDTH = {"deny": 0, "ask": 1, "allow": 2}
NAMES = ("bash", "edit", "read", "webfetch", "task", "question", "echo_say", "doom_loop", "new")
SUBJECTS = ("git status", "rm x", "a.env", "*")
ALL = [*PROFILES.values()]
rights = st.sampled_from(ALL)
rule = st.builds(
    PermissionRule,
    permission=st.sampled_from(("*", "b*", *NAMES)),
    pattern=st.sampled_from(("*", "git *", "rm *", "*.env")),
    action=st.sampled_from(("allow", "ask", "deny")),
)


def decide(rules: list[PermissionRule], name: str, subject: str) -> Action:
    """Decide as OpenCode does: the last rule that fits, and without any it asks."""
    fitting = [r for r in rules if r.covers(name) and fnmatchcase(subject, r.pattern)]
    return fitting[-1].action if fitting else "ask"


@pytest.mark.requirement("I23")
@given(st.lists(rule, max_size=6), rights, rights, rights)
def test_nothing_is_allowed_that_agent_deployment_credential_or_message_forbids(
    base: list[PermissionRule], deployment: Rights, credential: Rights, message: Rights
) -> None:
    together = deployment & credential & message
    session = [*base, *narrowed(together, base)]

    for name, subject in product(NAMES, SUBJECTS):
        own, action = decide(base, name, subject), decide(session, name, subject)
        assert WIDTH[action] <= WIDTH[own]
        for one in (deployment, credential, message, together):
            assert WIDTH[action] <= WIDTH[one.narrow(name, own)]
            if not one.waits:
                assert action != "ask"
                assert name != "question" or action == "deny"
            if one.changes == "deny" and name not in READING:
                assert action == "deny"


@given(st.lists(rule, max_size=6))
def test_reading_stays_as_the_agent_has_it(base: list[PermissionRule]) -> None:
    for profile in ("read-only", "ask"):
        session = [*base, *narrowed(PROFILES[profile], base)]
        for name, subject in product(("read", "webfetch", "doom_loop"), SUBJECTS):
            assert decide(session, name, subject) == decide(base, name, subject)


@given(st.lists(rule, max_size=6), rights, rights)
def test_rules_of_an_earlier_message_do_not_widen_those_of_a_later_one(
    base: list[PermissionRule], earlier: Rights, later: Rights
) -> None:
    session = [*base, *narrowed(earlier, base), *narrowed(later, base)]

    for name, subject in product(NAMES, SUBJECTS):
        assert decide(session, name, subject) == decide(
            [*base, *narrowed(later, base)], name, subject
        )


def test_rights_have_one_meaning_in_any_order() -> None:
    for one, other, third in product(ALL, repeat=3):
        assert one & other == other & one
        assert (one & other) & third == one & (other & third)
        assert one & one == one
        assert one & other <= one
        assert one <= FULL


def test_asking_where_nobody_is_there_is_refusing() -> None:
    assert PROFILES["ask"] & PROFILES["unattended"] == Rights("deny", waits=False)


def test_a_sub_agent_is_denied_where_changes_are_limited() -> None:
    """OpenCode hands down no rule that asks, and a resumed sub-agent keeps its own rules."""
    for profile in ("read-only", "ask"):
        rules = narrowed(PROFILES[profile], [_any("allow")])
        assert decide(rules, "task", "general") == "deny"


def test_an_unattended_agent_keeps_what_it_may_do_unasked_and_so_do_its_sub_agents() -> None:
    rules = narrowed(PROFILES["unattended"], [_any("allow"), _rule("bash", "*", "ask")])

    actions = [decide(rules, name, "x") for name in ("edit", "bash", "task", "question")]
    assert actions == ["allow", "deny", "allow", "deny"]
    # A sub-agent gets what is denied: that must not be everything.
    assert _any("deny") not in rules


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("bsh", "bash"), ("edits", "edit"), ("write", "edit"), ("shell", "bash")),
        *(("subagent", "task"), ("web_fetch", "webfetch"), ("zzz_tool", None), ("que*", None)),
    ],
)
def test_a_rule_that_nothing_is_asked_by_is_found(name: str, meant: str | None) -> None:
    assert [*unmatched([name, "bash", "*", "web*", "doom_loop"])] == [(name, meant)]


def test_a_rule_for_a_tool_from_outside_is_one_that_fits() -> None:
    assert [*unmatched(["echo_say", "echo_*", "mytool"], ["echo_*", "mytool"])] == []


def _any(action: Action) -> PermissionRule:
    return _rule("*", "*", action)


def _rule(permission: str, pattern: str, action: Action) -> PermissionRule:
    return PermissionRule(permission=permission, pattern=pattern, action=action)
