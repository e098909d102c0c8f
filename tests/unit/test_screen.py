"""What a person sees of a turn at a terminal: cut into blocks, cleaned, in place."""

import io
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from opencode_a2a.cli import live
from opencode_a2a.cli.live import Blocks, LiveScreen, Prose, diff_text
from opencode_a2a.events import JsonObject
from opencode_a2a.messages import Part
from opencode_a2a.peers.received import AnswerGrew, FileGiven, ThoughtGrew, ToolReported
from opencode_a2a.printable import money, span, spent, tokens

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
