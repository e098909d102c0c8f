"""What a person reads when a task waits."""

from opencode_a2a.a2a.texts import interrupt_text
from opencode_a2a.a2a.types import timestamp
from opencode_a2a.events import Interrupted, Question, QuestionOption
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.turns.answers import accepted

AT = 1_794_733_200_123
BASH = Interrupted(
    RequestId("per_1"),
    "permission",
    SessionId("ses_1"),
    permission="bash",
    patterns=["git status", "rm -rf foo"],
    always=["git status *", "rm *"],
    metadata={"command": "git status && rm -rf foo"},
    expires_at=AT,
    default="the turn ends",
    allows_always=True,
)
EDIT = Interrupted(
    RequestId("per_2"),
    "permission",
    SessionId("ses_1"),
    permission="edit",
    patterns=["a.py"],
    metadata={"filepath": "/w/a.py", "diff": "--- a.py\n+++ a.py\n-x\n+y"},
)
CUSTOM_TOOL = Interrupted(
    RequestId("per_3"),
    "permission",
    SessionId("ses_1"),
    permission="deploy",
    patterns=["*"],
    tool="deploy",
    tool_input={"to": "production"},
)
COLOR = Question("Which color?", "Color", [QuestionOption("Red", "warm"), QuestionOption("Blue")])
ASK = Interrupted(RequestId("que_1"), "question", SessionId("ses_1"), questions=[COLOR])


def test_a_permission_shows_the_exact_command_the_answers_and_the_deadline() -> None:
    assert interrupt_text((BASH,)) == "\n".join(
        [
            "OpenCode asks for permission to run a command (bash).",
            "Command:",
            "    git status && rm -rf foo",
            "For: git status, rm -rf foo",
            "Always would mean: git status *, rm *",
            "",
            accepted(BASH),
            "If nobody answers by 2026-11-15T09:00:00.123Z, the turn ends.",
        ]
    )


def test_a_change_is_shown_as_the_patch_it_is() -> None:
    text = interrupt_text((EDIT,))

    assert "change a file (edit)" in text
    assert "    -x\n    +y" in text
    assert "If nobody answers" not in text


def test_a_tool_without_description_shows_its_input() -> None:
    assert 'Input of deploy:\n    {"to":"production"}' in interrupt_text((CUSTOM_TOOL,))


def test_a_question_lists_its_options_by_number() -> None:
    assert interrupt_text((ASK,)).splitlines()[:4] == [
        "OpenCode asks:",
        "Which color?",
        "  1. Red - warm",
        "  2. Blue",
    ]


def test_several_questions_are_numbered() -> None:
    both = Interrupted(
        RequestId("que_2"), "question", SessionId("ses_1"), questions=[COLOR, Question("Why?", "W")]
    )

    text = interrupt_text((both,))

    assert "Question 1: Which color?" in text
    assert "Question 2: Why?" in text


def test_several_requests_are_told_apart_by_their_ids() -> None:
    text = interrupt_text((BASH, ASK))

    assert text.startswith("2 requests wait for an answer; begin your message with the id")
    assert "\n\nper_1:\nOpenCode asks for permission" in text
    assert "\n\nque_1:\nOpenCode asks:" in text


def test_a_huge_patch_is_cut_and_says_so() -> None:
    huge = Interrupted(
        RequestId("per_4"),
        "permission",
        SessionId("ses_1"),
        permission="edit",
        metadata={"diff": "x" * 10_000},
    )

    text = interrupt_text((huge,))

    assert len(text) < 5000
    assert "6000 more characters" in text


def test_times_are_spelled_with_milliseconds_and_z() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00.000Z"
    assert timestamp(AT) == "2026-11-15T09:00:00.123Z"
