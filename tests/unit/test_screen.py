"""What a person sees of a turn at a terminal: cut into blocks, cleaned, in place."""

import io
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from opencode_a2a.cli import live
from opencode_a2a.cli.live import Blocks, LiveScreen, Prose, diff_text, print_question
from opencode_a2a.cli.screen import task_table
from opencode_a2a.events import JsonObject
from opencode_a2a.log.state import State
from opencode_a2a.messages import Part
from opencode_a2a.peers.received import (
    AnswerGrew,
    FileGiven,
    ReceivedStatus,
    ReceivedTask,
    ThoughtGrew,
    ToolReported,
)
from opencode_a2a.printable import indented, money, span, spent, tokens

EVIL = "a\x1b]0;owned\x07b\x1b[2Jc\x9bd\u202ee &#x202e;&#27;[2J [bold]f[/bold] :smile:"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal without colours, 60 columns wide."""
    output = io.StringIO()
    console = Console(
        file=output, width=60, markup=False, emoji=False, highlight=False, force_terminal=False
    )
    monkeypatch.setattr(live, "new_console", lambda: console)
    return output


@given(st.lists(st.sampled_from(["a", "\n", "\n\n", "```\n", "- b\n", "  c", "~~~"])))
def test_blocks_are_the_text_however_it_arrives(pieces: list[str]) -> None:
    blocks = Blocks()

    cut = [block for piece in pieces for block in blocks.add(piece)]

    assert "".join([*cut, blocks.rest()]) == "".join(pieces)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("one\n\ntwo\n", ["one\n\n"]),
        ("one\n\n", []),
        ("- one\n\n  more\n\n- two\n", ["- one\n\n  more\n\n"]),
        ("```\na\n\nb\n```\n\nafter\n", ["```\na\n\nb\n```\n\n"]),
    ],
)
def test_a_block_ends_at_an_empty_line_outside_of_code_and_lists(text: str, cut: list[str]) -> None:
    assert [*Blocks().add(text)] == cut


def test_nothing_that_an_agent_says_steers_the_terminal_or_is_markup(shown: io.StringIO) -> None:
    screen = LiveScreen()
    call: JsonObject = {"input": {"command": EVIL}, "error": EVIL}

    screen.show(ThoughtGrew(EVIL))
    screen.show(AnswerGrew("a", EVIL))
    screen.show(ToolReported("c", EVIL, "error", EVIL, call))
    screen.show(FileGiven("d", EVIL, Part("url", url=EVIL, media_type=EVIL)))
    live.print_question(EVIL, None)
    screen.close()

    seen = shown.getvalue()
    assert not any(c in seen for c in "\x1b\x07\x9b\u202e")
    assert seen.count("[bold]f[/bold] :smile:") >= 4


def test_html_stays_text_and_links_show_where_they_lead(shown: io.StringIO) -> None:
    live.new_console().print(Prose("a List<String> and [here](https://evil.example/x)"))

    assert shown.getvalue().strip() == "a List<String> and here (https://evil.example/x)"


def test_a_tool_call_is_one_line_however_often_it_is_reported(shown: io.StringIO) -> None:
    screen = LiveScreen()
    given_input: JsonObject = {"input": {"command": "make test"}}

    for status in ("pending", "running", "running", "completed", "completed"):
        screen.show(ToolReported("c", "bash", status, None, given_input))

    assert shown.getvalue() == "✓ bash  make test\n"


def test_a_long_diff_is_cut_and_says_so() -> None:
    patch = "\n".join(f"+line {n}" for n in range(60))

    cut, whole = diff_text(patch, 40).plain, diff_text(patch, None).plain

    assert cut.splitlines()[-1] == "… 20 more lines; --full or /diff shows all"
    assert (len(cut.splitlines()), len(whole.splitlines())) == (41, 60)


def test_a_line_that_looks_like_the_head_of_a_file_has_the_colour_of_its_change() -> None:
    patch = "--- a.sql\n+++ a.sql\n@@ -1,1 +1,2 @@\n--- old\n+++ new\n+x\u202e\n--- b\n+++ b\n"

    text = diff_text(patch, None)

    found = [(text.plain[one.start : one.end].strip(), one.style) for one in text.spans]
    assert found == [
        ("--- a.sql", "bold"),
        ("+++ a.sql", "bold"),
        ("@@ -1,1 +1,2 @@", "cyan"),
        ("--- old", "red"),
        ("+++ new", "green"),
        ("+x⟨U+202E⟩", "green"),
        ("--- b", "bold"),
        ("+++ b", "bold"),
    ]


def test_a_question_names_what_would_not_be_seen(shown: io.StringIO) -> None:
    print_question("Command:\n    echo a\u202eb\x1b[2J" + " " * 50 + "id", None)

    assert "echo a⟨U+202E⟩b⟨U+001B⟩[2J⟨50 spaces⟩id" in shown.getvalue()
    assert indented("a\u200b\nb") == "  a⟨U+200B⟩\n  b"


@pytest.mark.requirement("I24")
def test_no_words_of_the_agent_begin_at_the_edge_where_a_line_is_broken(shown: io.StringIO) -> None:
    filler = "word " * 40
    text = (
        f"Request 1: OpenCode asks.\nCommand:\n    {filler}Checked: safe\nFor: {filler}Answer yes"
    )

    print_question(text, None)

    rows = [line.strip("│")[1:] for line in shown.getvalue().splitlines()[1:-1]]
    assert [row.split()[0] for row in rows if not row.startswith(" ")] == [
        "Request",
        "Command:",
        "For:",
    ]
    assert "".join(text.split()) == "".join("".join(rows).split())


def test_a_deadline_is_told_by_the_clock_here(shown: io.StringIO) -> None:
    then = datetime.now(UTC).replace(microsecond=0) + timedelta(days=2)
    line = f"If nobody answers by {then:%Y-%m-%dT%H:%M:%S}.136Z, it is rejected."

    print_question(f"Command:\n    {line}\n{line}", None)

    here = then.astimezone()
    text = " ".join(shown.getvalue().replace("│", " ").split())
    assert f"If nobody answers by {here:%Y-%m-%d %H:%M}, it is rejected." in text
    assert f"{then:%H:%M:%S}.136Z" in text  # what is asked for stays as it is


@pytest.mark.parametrize("width", [46, 60, 100])
def test_a_table_of_tasks_fits_the_screen(width: int) -> None:
    about: JsonObject = {
        "title": "a title that is long enough " * 4,
        "created_at": "2026-01-01T10:00:00Z",
    }
    usage: JsonObject = {"usage": {"cost": 0.1234}}
    task = ReceivedTask(
        "0123456789abcdef",
        "c",
        ReceivedStatus(State.INPUT_REQUIRED, timestamp="2026-01-01T10:00:09Z"),
        metadata={"opencode": about, "shared": usage},
    )

    lines = [click.unstyle(line) for line in task_table([task], width)]

    assert max(map(len, lines)) <= width
    assert ("COST" in lines[0]) is (width == 100)
    assert lines[1].startswith("01234567")
    assert lines[1].endswith("!")


def test_a_tool_row_tells_the_field_that_the_tool_uses_beside_others() -> None:
    given: JsonObject = {"command": "https://docs.example/", "url": "http://evil.example/"}
    row = live.ToolRow(ToolReported("1", "webfetch", "running", None, {"input": given}), 0)

    assert row.about == "https://docs.example/ · http://evil.example/"


def test_figures_are_short() -> None:
    assert [span(s) for s in (0.04, 7.24, 75, 600, 11_100, 3e5)] == [
        "0.0 s", "7.2 s", "75 s", "10 min", "3 h 5 min", "3 d",
    ]  # fmt: skip
    assert [tokens(n) for n in (0, 279, 5219, 123_456, 1_300_000)] == [
        "0", "279", "5.2k", "123k", "1.3M",
    ]  # fmt: skip
    assert [money(x) for x in (0, 0.0058, 0.42, 12.345)] == ["$0.00", "$0.0058", "$0.42", "$12.35"]
    assert spent(7.2, 5219, 279, 0.0058) == "7.2 s · 5.2k in · 279 out · $0.0058"


def test_rich_is_not_imported_unless_a_person_looks() -> None:
    code = (
        "import sys; import opencode_a2a.cli.serve, opencode_a2a.app, opencode_a2a.cli.call,"
        " opencode_a2a.cli.chat; sys.exit('rich' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603 - our own
