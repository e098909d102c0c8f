"""What a grant allows: what the person said, there, and nothing else."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import example, given
from hypothesis import strategies as st

from opencode_a2a.events import Interrupted
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, SessionId, TaskId
from opencode_a2a.store.database import Database
from opencode_a2a.turns.policy import Grant, Grants, fits, give
from tests.support import stores

RENAME = "ALTER TABLE {} RENAME TO {}"

ANN = Owner(TaskId("t1"), ContextId("c1"), Principal("ann"))
ASKED = Interrupted(
    RequestId("per_1"),
    "permission",
    SessionId("ses_1"),
    permission="bash",
    patterns=["git status -s"],
    always=["git status *"],
    directory="/work",
)
FOR_TASK = Grant(
    "g1", ANN.principal, ANN.context_id, ANN.task_id, "/work", "bash", ("git status *",),
    RequestId("per_0"), 1,
)  # fmt: skip
FOR_CONTEXT = replace(FOR_TASK, task_id=None)


@pytest.mark.parametrize(
    ("text", "pattern", "fitting"),
    [
        ("git status", "git status *", True),
        ("git status -s", "git status *", True),
        ("git statusx", "git status *", False),
        ("git log", "git status *", False),
        ("src/a.py", "*", True),
        ("a\nb", "*", True),
        ("a.py", "a?py", True),
        ("aXpy", "a.py", False),
        ("git status; rm x", "git status", False),
        ("x git status", "git status *", False),
        ("src\\a.py", "src/*", True),
    ],
)
def test_patterns_are_those_of_opencode(text: str, pattern: str, fitting: bool) -> None:
    assert fits(text, pattern) is fitting


def test_a_grant_is_for_its_task_or_for_all_tasks_of_its_context() -> None:
    other = replace(ANN, task_id=TaskId("t2"))

    assert FOR_TASK.covers(ANN, ASKED)
    assert not FOR_TASK.covers(other, ASKED)
    assert FOR_CONTEXT.covers(other, ASKED)
    assert FOR_CONTEXT.covers(replace(ANN, task_id=None), ASKED)
    assert not FOR_TASK.covers(replace(ANN, task_id=None), ASKED)


def test_all_commands_of_a_compound_have_to_be_allowed() -> None:
    assert not FOR_TASK.covers(ANN, replace(ASKED, patterns=["git status", "rm x"]))
    both = replace(FOR_TASK, patterns=("git status *", "rm *"))
    assert both.covers(ANN, replace(ASKED, patterns=["git status", "rm x"]))


def test_a_request_without_patterns_needs_a_grant_for_everything() -> None:
    assert not FOR_TASK.covers(ANN, replace(ASKED, patterns=[]))
    assert replace(FOR_TASK, patterns=("*",)).covers(ANN, replace(ASKED, patterns=[]))


def test_a_question_is_never_answered_by_a_grant() -> None:
    assert not replace(FOR_TASK, patterns=("*",)).covers(ANN, replace(ASKED, type="question"))


names = st.sampled_from(["a", "b", "ann", "bob"])
owners = st.builds(Owner, names.map(TaskId) | st.none(), names.map(ContextId), names.map(Principal))
texts = st.text("ab *?./\\", max_size=6)
requests = st.builds(
    Interrupted,
    st.just(RequestId("per_1")),
    st.sampled_from(["permission", "question"]),
    st.just(SessionId("ses_1")),
    permission=st.sampled_from(["bash", "edit"]) | st.none(),
    patterns=st.lists(texts, max_size=3),
    directory=st.sampled_from(["/work", "/work/sub"]) | st.none(),
)
grants = st.builds(
    Grant,
    st.just("g"),
    names.map(Principal),
    names.map(ContextId),
    names.map(TaskId) | st.none(),
    st.sampled_from(["/work", "/work/sub"]),
    st.sampled_from(["bash", "edit"]),
    st.lists(texts, min_size=1, max_size=3).map(tuple),
    st.just(RequestId("per_0")),
    st.just(1),
)


@pytest.mark.requirement("I23")
@given(grants, owners, requests)
@example(FOR_TASK, ANN, ASKED)
def test_a_grant_never_reaches_beyond_what_it_names(
    grant: Grant, owner: Owner, asked: Interrupted
) -> None:
    if not grant.covers(owner, asked):
        return

    assert asked.type == "permission"
    assert (owner.principal, owner.context_id) == (grant.principal, grant.context_id)
    assert grant.task_id is None or grant.task_id == owner.task_id
    assert (asked.permission, asked.directory) == (grant.permission, grant.directory)
    for pattern in asked.patterns or ["*"]:
        assert any(fits(pattern, allowed) for allowed in grant.patterns)
    # Whoever or whatever differs in one of these is not covered.
    for stranger in (
        replace(owner, principal=Principal("else")),
        replace(owner, context_id=ContextId("else")),
    ):
        assert not grant.covers(stranger, asked)
    for other in (replace(asked, permission="else"), replace(asked, directory="/else")):
        assert not grant.covers(owner, other)


@given(st.text(max_size=8), st.text(max_size=8))
def test_a_pattern_without_wildcards_fits_itself_alone(text: str, pattern: str) -> None:
    plain = pattern.replace("*", "").replace("?", "")

    assert fits(plain, plain)
    if fits(text, plain):
        assert text.replace("\\", "/") == plain.replace("\\", "/")


def test_a_pattern_of_many_stars_takes_no_longer_than_any_other() -> None:
    assert not fits("a" * 2_000, "*a" * 30 + "*b")
    assert fits("a" * 2_000 + "b", "*a" * 30 + "*b")


@pytest.mark.requirement("I15")
async def test_a_database_that_is_away_is_waited_for_when_a_permission_is_asked(
    tmp_path: Path,
) -> None:
    async with Database(stores.url(tmp_path)) as database:
        await database.write(give, ANN, ASKED, "context", 1)
        await database.write(lambda c: c.execute(sa.text(RENAME.format("grants", "away"))).close())

        asking = asyncio.create_task(Grants(database).covering(ANN, ASKED))
        await asyncio.wait([asking], timeout=0.2)
        await database.write(lambda c: c.execute(sa.text(RENAME.format("away", "grants"))).close())

        async with asyncio.timeout(60):
            grant = await asking
    assert grant is not None
    assert grant.request_id == ASKED.request_id
