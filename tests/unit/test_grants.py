"""What a grant allows: what the person said, there, and nothing else."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import sqlalchemy as sa
from hypothesis import example, given
from hypothesis import strategies as st

from opencode_a2a.events import Interrupted, Json
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, SessionId, TaskId
from opencode_a2a.store import grants as grant_rows
from opencode_a2a.store import schema
from opencode_a2a.store.database import Database
from opencode_a2a.store.grants import GrantRow
from opencode_a2a.turns.policy import Grant, Grants, add_grant, fits
from opencode_a2a.turns.shell import can_be_wider, is_plain
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
    tool_input={},
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


def command(line: str, *patterns: str, **tool_input: Json) -> Interrupted:
    """Return the request for a command line, with what OpenCode makes of it."""
    return replace(
        ASKED,
        patterns=[*patterns] or [line],
        metadata={"command": line},
        tool_input={"command": line, **tool_input},
    )


ECHO = replace(FOR_TASK, patterns=("echo *", "git status *", "sh *", "cat *", "pytest *"))


@pytest.mark.requirement("I23")
@pytest.mark.parametrize(
    "line",
    [
        "echo evil > any/file", "echo evil >> f", "echo evil >| f", "echo evil 2> f", "echo x &> f",
        "echo x>f", "echo evil>f", "cat < secret", "cat <<< x", "cat <<EOF\nx\nEOF",
        "echo x | sh", "echo x |& sh", "echo x && echo y", "echo x || echo y", "echo x; echo y",
        "echo x & echo y", "echo x\necho y", "echo x\recho y", "echo x \\\n> f", "echo $(cat f)",
        "echo `cat f`", 'echo "$(cat f)"', 'echo "`cat f`"', "echo $SECRET", "echo ${x:=y}",
        "echo $((a[0]))", "echo <(cat f)", "echo >(sh)", "(echo x)", "{ echo x; }", "echo 'x",
        "PATH=/tmp echo x", "PATH=/tmp; git status", "export PATH=/tmp\ngit status", "git statusx",
        "echo() { sh; }", "echo 'a\\' '; sh x; '", "! echo x", "time echo x", "echo x #\nsh",
        "if echo x; then sh y; fi", "for i in 1; do echo x; done", "echo *(e:sh:)", "echo\tx",
        "git  status", " \x00echo x", "echo x\x00; sh", "coproc echo x", "echo x ;sh y",
    ],
)  # fmt: skip
def test_a_pattern_covers_plain_commands_alone(line: str) -> None:
    for patterns in ([line], ["echo x"], ["git status"], []):
        asked = replace(command(line), patterns=patterns)
        assert not ECHO.covers(ANN, asked)
        assert not ECHO.covers(ANN, replace(asked, metadata={}))
        assert not ECHO.covers(ANN, replace(asked, tool_input=None))
    assert not ECHO.covers(ANN, replace(ASKED, patterns=[line]))  # nothing else is known of it


@pytest.mark.parametrize(
    "line",
    [
        "echo", "echo x", "echo 'a; b > c | $(d)'", 'echo "a; b > c | d"', "git status -s",
        "echo a\\;b", "echo *.py {a,b} ~ # done", "cat 'it is' \"here\"", "pytest -k 'a and not b'",
    ],
)  # fmt: skip
def test_a_plain_command_is_covered(line: str) -> None:
    assert ECHO.covers(ANN, command(line))


@pytest.mark.requirement("I23")
@pytest.mark.parametrize("workdir", ["/elsewhere", "/work/sub", "sub", ""])
def test_a_command_in_another_directory_is_asked_for(workdir: str) -> None:
    assert ECHO.covers(ANN, command("pytest -q"))
    assert ECHO.covers(ANN, command("pytest -q", workdir="/work"))
    assert not ECHO.covers(ANN, command("pytest -q", workdir=workdir))


@pytest.mark.requirement("I23")
@pytest.mark.parametrize("line", ["pytest -q", "pytest -q | tail"])
@pytest.mark.parametrize("workdir", ["/elsewhere", "/work/sub", "sub", "../work", ""])
def test_a_grant_is_for_the_directory_that_the_command_was_to_run_in(
    line: str, workdir: str
) -> None:
    asked = replace(command(line, workdir=workdir), always=["pytest *"])

    with sa.create_engine("sqlite://").begin() as connection:
        schema.metadata.create_all(connection)
        grant = add_grant(connection, ANN, asked, "task", 1)

    assert grant.covers(ANN, asked)
    assert grant.covers(ANN, command("pytest -x", workdir=workdir))
    for other in (None, "/work", "/work/sub/", "/", "./sub", 7):
        assert not grant.covers(ANN, command(line, workdir=other))
        assert not grant.covers(ANN, command("pytest -x", workdir=other))
    assert not grant.covers(ANN, command(line))


def test_a_directory_that_is_none_is_asked_for() -> None:
    asked = replace(command("pytest", workdir=7), always=["pytest *"])

    with sa.create_engine("sqlite://").begin() as connection:
        schema.metadata.create_all(connection)
        grant = add_grant(connection, ANN, asked, "task", 1)

    assert not grant.covers(ANN, asked)


def test_text_of_the_command_is_no_wildcard() -> None:
    assert not replace(FOR_TASK, patterns=("e* *",)).covers(ANN, command("eval x"))
    assert not replace(FOR_TASK, patterns=("? *",)).covers(ANN, command("w x"))


def test_a_command_line_that_no_pattern_covers_is_allowed_again_as_it_is() -> None:
    line = "cd src && pytest -q 2>&1 | tail -5"
    asked = replace(command(line, "pytest -q 2>&1", "tail -5"), always=["pytest *", "tail *"])
    again = replace(asked, request_id=RequestId("per_2"))

    with sa.create_engine("sqlite://").begin() as connection:
        schema.metadata.create_all(connection)
        grant = add_grant(connection, ANN, asked, "task", 1)
        second = add_grant(connection, ANN, command("pytest > x", "pytest > x"), "task", 1)

    assert grant.covers(ANN, again)
    assert grant.covers(ANN, command("pytest -x"))
    assert not grant.covers(ANN, command(f"{line} x"))
    assert not grant.covers(ANN, command(line, workdir="/elsewhere"))
    assert not grant.covers(ANN, replace(again, tool_input=None))  # it may run elsewhere
    assert not second.covers(ANN, again)


@pytest.mark.requirement("I24")
@pytest.mark.parametrize("blank", ["\u00a0", "\u2003", "\u3000", "\x1c", "\x85", "\r", " ", "\n"])
@pytest.mark.parametrize("line", ["true && sh run.sh", "sh 'run.sh", "true && sh run.sh\\"])
def test_a_blank_at_an_end_makes_a_command_line_another_one(line: str, blank: str) -> None:
    both = (line, line + blank), (line + blank, line), (line, blank + line)
    for allowed, other in both:
        asked = replace(command(allowed, "sh run.sh"), always=["sh *"])
        with sa.create_engine("sqlite://").begin() as connection:
            schema.metadata.create_all(connection)
            grant = add_grant(connection, ANN, asked, "task", 1)

        assert grant.exact == allowed
        assert grant.covers(ANN, asked)
        assert not grant.covers(ANN, command(other, "sh run.sh"))


@pytest.mark.parametrize("line", ["\n git status -s", "git status -s\n\t "])
def test_blanks_of_the_shell_around_a_plain_command_say_nothing(line: str) -> None:
    assert ECHO.covers(ANN, command(line))


@given(st.text(" abe'\"\\$`;&|<>()\n*#x-", max_size=12))
def test_nothing_that_the_shell_acts_on_is_plain(rest: str) -> None:
    line = f"echo {rest}"
    if not is_plain(line):
        return

    outside = re.sub(r"""\\.|'[^']*'|"[^"]*\"""", "", line)
    assert not set(outside) & set(";&|<>()$`\n")


@pytest.mark.requirement("I23")
def test_a_request_that_cannot_be_read_is_asked_for() -> None:
    everything = replace(FOR_TASK, patterns=("*",))
    deploys, asked = replace(everything, permission="deploy"), replace(ASKED, permission="deploy")
    exact = replace(everything, exact="pytest > x")

    assert deploys.covers(ANN, asked)
    assert not deploys.covers(ANN, replace(asked, patterns=[]))
    assert everything.covers(ANN, ASKED)
    assert not everything.covers(ANN, replace(command("git status"), patterns=[]))
    assert not everything.covers(ANN, replace(ASKED, tool_input=None))  # it may run elsewhere
    assert exact.covers(ANN, command("pytest > x"))
    assert not exact.covers(ANN, replace(command("pytest > x"), patterns=[]))


@pytest.mark.requirement("I24")
@pytest.mark.parametrize("permission", ["read", "edit", "external_directory", "bash"])
@pytest.mark.parametrize("how", [{"links": {"a": "/etc"}}, {"links_unknown": True}])
def test_a_file_that_a_link_leads_to_is_asked_for(permission: str, how: dict[str, Any]) -> None:
    grant = replace(FOR_TASK, permission=permission, patterns=("*",))
    asked = replace(ASKED, permission=permission)
    elsewhere = replace(asked, **how)

    assert grant.covers(ANN, asked)
    assert can_be_wider(asked)
    assert not grant.covers(ANN, elsewhere)
    assert not can_be_wider(elsewhere)


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
        assert asked.permission != "bash" or is_plain(pattern)
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
        await database.write(add_grant, ANN, ASKED, "context", 1)
        await database.write(lambda c: c.execute(sa.text(RENAME.format("grants", "away"))).close())

        asking = asyncio.create_task(Grants(database).covering(ANN, ASKED))
        await asyncio.wait([asking], timeout=0.2)
        await database.write(lambda c: c.execute(sa.text(RENAME.format("away", "grants"))).close())

        async with asyncio.timeout(60):
            grant = await asking
    assert grant is not None
    assert grant.request_id == ASKED.request_id


@pytest.mark.requirement("I24")
@pytest.mark.parametrize("line", ["echo *", "*", "git log *", "ls"])
def test_a_pattern_that_is_the_command_itself_allows_it_alone(line: str) -> None:
    asked = replace(command(line), metadata={}, always=[line])

    with sa.create_engine("sqlite://").begin() as connection:
        schema.metadata.create_all(connection)
        grant = add_grant(connection, ANN, asked, "task", 1)

    assert grant.covers(ANN, asked)
    for other in (f"{line[:-2]} /root SECRET", f"{line} x", "git log -1", "echo", "git log"):
        assert not grant.covers(
            ANN, replace(asked, tool_input={"command": other}, patterns=[other])
        )
    unknown = replace(asked, tool_input=None)
    assert not grant.covers(ANN, unknown)
    assert not can_be_wider(unknown)


async def test_a_grant_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    line = "a | b"
    stored = orjson.dumps(["git status *", line])
    row = GrantRow("g", "ann", "c1", "", "/work", "bash", stored, "per_0", 1)

    async with Database(stores.url(tmp_path)) as database:
        await database.write(grant_rows.add, row)
        (grant,) = await Grants(database).held(ANN.principal, [], 9)

    assert grant.covers(ANN, command(line))
    assert grant.covers(ANN, command("git status -s"))
    assert not grant.covers(ANN, command("git log"))
