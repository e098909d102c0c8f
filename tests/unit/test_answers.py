"""What a person's message means as the answer to a prompt."""

import re
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.errors import InvalidParamsError
from opencode_a2a.events import Interrupted, Json, Question, QuestionOption
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, SessionId, TaskId
from opencode_a2a.messages import Message, Part
from opencode_a2a.turns.answers import (
    Answer,
    NotUnderstoodError,
    OutdatedAnswerError,
    PermissionReply,
    PlanDecision,
    QuestionRejection,
    QuestionReply,
    Reply,
    Scope,
    accepted,
    check_allowed,
    understand,
    understand_plan_answer,
)

OPTIONS = [QuestionOption("Red", "warm"), QuestionOption("Dark blue"), QuestionOption("7")]
COLOR = Question("Which colour?", "Colour", OPTIONS, custom=False)
COLORS = Question("Which colours?", "Colours", OPTIONS, multiple=True, custom=False)
FREE = Question("What name?", "Name")
SESSION = SessionId("ses_1")
BASH = Interrupted(
    RequestId("per_1"), "permission", SESSION, permission="bash", patterns=["ls"], number=1
)
EDIT = Interrupted(RequestId("per_2"), "permission", SESSION, permission="edit", number=2)
AGAIN = replace(BASH, request_id=RequestId("per_3"), number=3)
"""The same as BASH once more."""
ALL_TOLD = 99


def ask(*questions: Question, number: int = 1) -> Interrupted:
    return Interrupted(
        RequestId("que_1"), "question", SESSION, questions=list(questions), number=number
    )


def text(words: str) -> Message:
    return Message("m", "user", [Part("text", text=words)])


def data(value: Json) -> Message:
    return Message("m", "user", [Part("data", data=value)])


def meaning(message: Message, *pending: Interrupted) -> Reply:
    return understand(message, pending, ALL_TOLD).reply


def named(words: str, *pending: Interrupted, told: int = ALL_TOLD) -> list[int | None]:
    """Return the numbers of the requests that a text allows."""
    meaning = understand(text(words), pending, told)
    assert meaning.reply == PermissionReply("once")
    return [asked.number for asked in meaning.asked]


@pytest.mark.parametrize(
    ("words", "reply"),
    [
        ("once", PermissionReply("once")),
        ("  Yes. ", PermissionReply("once")),
        ("OK!", PermissionReply("once")),
        ("always", PermissionReply("always")),
        ("no", PermissionReply("reject")),
        ("reject: use git instead", PermissionReply("reject", "use git instead")),
        ("no, that is\ndangerous", PermissionReply("reject", "that is\ndangerous")),
    ],
)
def test_words_allow_and_refuse_a_permission(words: str, reply: PermissionReply) -> None:
    assert meaning(text(words), BASH) == reply


@pytest.mark.parametrize(
    "words", ["", "   ", "perhaps", "yes, but only the first", "once more", "👍", "yesno", "1"]
)
def test_other_words_are_no_permission_and_the_person_is_told_which_are(words: str) -> None:
    with pytest.raises(NotUnderstoodError, match='"once"'):
        meaning(text(words), BASH)


MIB = 2**20


@pytest.mark.parametrize(
    "words",
    [
        *("no" + blank * MIB + "because" for blank in (" ", "\n", "\u3000")),
        *(before + " " * MIB + "_" for before in ("1", "all", "yes", "yes 1,", "no for", "no to")),
        *("yes" + " " * MIB + rest for rest in (", _", ": _", "1 2 _", "for this _")),
        *(again * (MIB // len(again)) + "_" for again in ("1 ", "1,", "y", "1 and ", "no\n")),
        "yes" + " 1" * (MIB // 2) + "_",
        "no: " + "\n".join(["1" + " " * 1000 + "_"] * 1000),
    ],
    ids=lambda words: f"{words[:6]!r}",
)
def test_the_longest_message_is_understood_in_time(words: str) -> None:
    began = time.process_time()
    with suppress(NotUnderstoodError):
        meaning(text(words), BASH)

    assert time.process_time() - began < 5


APPROVALS = {"once", "yes", "y", "ok", "okay", "allow", "approve", "approved", "always"}
ADDED = {"to", "all", "1", "for", "this", "the", "task", "conversation", "context", "session"}
PIECES = st.sampled_from(
    ["yes", "once", "no", "to", "all", "1", "2", "#1", ",", ":", "but", "file"]
)


@given(st.text() | st.lists(PIECES, max_size=5).map(" ".join))
def test_no_text_allows_anything_but_the_words_for_it(words: str) -> None:
    try:
        reply = meaning(text(words), BASH)
    except NotUnderstoodError:
        return
    assert isinstance(reply, PermissionReply)
    if reply.reply != "reject":
        assert set(re.findall(r"\w+", words.lower())) <= APPROVALS | ADDED


@pytest.mark.parametrize(
    ("value", "reply"),
    [
        ({"reply": "once"}, PermissionReply("once")),
        ({"reply": " ALWAYS "}, PermissionReply("always")),
        ({"reply": "reject", "message": "no"}, PermissionReply("reject", "no")),
        ({"reply": "reject", "message": "  "}, PermissionReply("reject")),
        ({"reply": "once", "request_id": "per_1"}, PermissionReply("once")),
    ],
)
def test_a_data_part_says_the_same_for_programs(value: Json, reply: Reply) -> None:
    assert meaning(data(value), BASH) == reply


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"reply": 1},
        {"reply": "perhaps"},
        {"answers": [["x"]]},
        {"reply": "once", "request_id": "per_9"},
        {"reply": "once", "request_id": 1},
    ],
)
def test_a_data_part_that_does_not_fit_is_refused(value: Json) -> None:
    with pytest.raises(NotUnderstoodError):
        meaning(data(value), BASH)


@given(st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.lists(st.text())))
def test_no_data_part_raises_anything_else(value: dict[str, Json]) -> None:
    for asked in (BASH, ask(COLOR)):
        with suppress(NotUnderstoodError):
            understand(data(value), [asked], ALL_TOLD)


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("Red", [["Red"]]),
        ("dark BLUE", [["Dark blue"]]),
        ("2", [["Dark blue"]]),
        ("7", [["7"]]),  # a label beats a number
    ],
)
def test_an_option_is_chosen_by_label_or_number(words: str, answers: list[list[str]]) -> None:
    assert meaning(text(words), ask(COLOR)) == QuestionReply(answers)


@pytest.mark.parametrize(
    "words", ["green", "0", "4", "-1", "²", "Red, Dark blue", "99999999999", "9" * 5000]
)
def test_what_is_no_option_is_refused_where_own_words_are_not_wanted(words: str) -> None:
    with pytest.raises(NotUnderstoodError, match="label or number"):
        meaning(text(words), ask(COLOR))


def test_several_options_are_chosen_with_commas() -> None:
    assert meaning(text("red, 2"), ask(COLORS)) == QuestionReply([["Red", "Dark blue"]])
    with pytest.raises(NotUnderstoodError):
        meaning(text("red, green"), ask(COLORS))


def test_own_words_are_kept_as_they_are() -> None:
    assert meaning(text(" a, b\nc "), ask(FREE)) == QuestionReply([["a, b\nc"]])


def test_several_questions_take_a_line_each() -> None:
    several = ask(COLOR, FREE)

    assert meaning(text("1\n\nsomething else\n"), several) == QuestionReply(
        [["Red"], ["something else"]]
    )
    with pytest.raises(NotUnderstoodError, match="2 questions"):
        meaning(text("1"), several)


@pytest.mark.parametrize("words", ["reject", "Dismiss", "skip"])
def test_a_question_can_be_dismissed(words: str) -> None:
    assert meaning(text(words), ask(COLOR)) == QuestionRejection()
    assert meaning(text(words), ask(COLOR, FREE)) == QuestionRejection()
    assert meaning(data({"reply": words}), ask(COLOR)) == QuestionRejection()


def test_an_option_that_is_called_reject_is_an_option() -> None:
    question = Question("Merge?", "Merge", [QuestionOption("Reject")])

    assert meaning(text("reject"), ask(question)) == QuestionReply([["Reject"]])


def test_answers_as_data_are_lists_of_strings() -> None:
    several = ask(COLORS, FREE)

    assert meaning(data({"answers": [["Red", " "], ["x"]]}), several) == QuestionReply(
        [["Red"], ["x"]]
    )
    misfits: list[Json] = ["x", [["a"], ["b"], ["c"]], ["a"], [[1]], [[None]]]
    for wrong in misfits:
        with pytest.raises(NotUnderstoodError):
            meaning(data({"answers": wrong}), several)


def test_an_answer_that_names_a_request_is_never_taken_for_another() -> None:
    for words in ("per_1 once", "per_1: no"):
        with pytest.raises(OutdatedAnswerError, match="Pending now: 2"):
            understand(text(words), [EDIT], ALL_TOLD)


def test_with_several_pending_the_answer_names_the_one_it_means() -> None:
    both = (BASH, EDIT)

    assert meaning(text("per_2: no"), *both) == PermissionReply("reject")
    assert named("per_1 once", *both) == [1]
    assert meaning(data({"reply": "once", "request_id": "per_2"}), *both) == PermissionReply("once")
    for unclear in (text("once"), data({"reply": "once"})):
        with pytest.raises(NotUnderstoodError, match=r"\(1, 2\).*yes to all"):
            understand(unclear, both, ALL_TOLD)
    with pytest.raises(OutdatedAnswerError):
        understand(text("per_3 once"), both, ALL_TOLD)


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("1 yes", [1]),
        ("yes 1", [1]),
        ("2: OK", [2]),
        ("#2 yes", [2]),
        ("yes, 2", [2]),
        ("yes to 2.", [2]),
        ("yes 1, 2", [1, 2]),
        ("Yes 1 and 2!", [1, 2]),
        ("1, 2: yes", [1, 2]),
        ("yes to all", [1, 2]),
        ("yes all", [1, 2]),
        ("all: yes", [1, 2]),
    ],
)
def test_requests_are_named_by_their_numbers(words: str, numbers: list[int]) -> None:
    assert named(words, BASH, EDIT) == numbers


@pytest.mark.parametrize(
    ("words", "scope", "numbers"),
    [
        ("yes for this task", "task", [1]),
        ("Yes, for the task.", "task", [1]),
        ("1 yes for this conversation", "context", [1]),
        ("yes 1 for this context", "context", [1]),
        ("always for this session", "context", [1]),
        ("allow for this task to all", "task", [1]),
        ("yes to all for this task", "task", [1]),
    ],
)
def test_a_permission_is_given_for_a_task_or_a_conversation(
    words: str, scope: Scope, numbers: list[int]
) -> None:
    found = understand(text(words), [BASH], ALL_TOLD)

    assert found.reply == PermissionReply("once", None, scope)
    assert [asked.number for asked in found.asked] == numbers


@pytest.mark.parametrize(
    "words",
    ["yes for this", "yes for this tasks", "yes for every task", "yes for this task only x"],
)
def test_a_scope_that_is_not_one_is_not_guessed(words: str) -> None:
    with pytest.raises(NotUnderstoodError):
        meaning(text(words), BASH)


def test_a_scope_as_data_goes_with_once() -> None:
    assert meaning(data({"reply": "once", "scope": "task"}), BASH) == PermissionReply(
        "once", None, "task"
    )
    for wrong in ({"reply": "reject", "scope": "task"}, {"reply": "once", "scope": "world"}):
        with pytest.raises(NotUnderstoodError):
            meaning(data({**wrong}), BASH)


def test_a_refusal_by_number_has_its_reason() -> None:
    refusal = understand(text("no 2: use git"), (BASH, EDIT), ALL_TOLD)

    assert (refusal.asked, refusal.reply) == ((EDIT,), PermissionReply("reject", "use git"))
    assert meaning(text("no 2 files are enough"), BASH) == PermissionReply(
        "reject", "2 files are enough"
    )


@pytest.mark.parametrize("words", ["1 yes", "yes 1", "yes 1, 2", "#1: once", "3 yes"])
def test_a_number_that_is_not_pending_is_never_taken_for_another(words: str) -> None:
    with pytest.raises(OutdatedAnswerError, match="Pending now: 2"):
        understand(text(words), [EDIT], 3)
    with pytest.raises(OutdatedAnswerError):
        understand(data({"reply": "once", "number": 1}), [EDIT], 3)


@pytest.mark.parametrize("words", ["7 yes", "yes 7", "#7: once", "yes 7 for this task", "7 no"])
def test_a_number_that_was_never_given_is_not_taken_for_what_is_asked(words: str) -> None:
    with pytest.raises(OutdatedAnswerError, match="Pending now: 2"):
        understand(text(words), [EDIT], 2)


def test_requests_for_the_same_are_answered_together_as_far_as_they_were_shown() -> None:
    assert named("yes", BASH, AGAIN) == [1, 3]
    assert named("yes", BASH, AGAIN, told=1) == [1]
    assert named("3 yes", BASH, EDIT, AGAIN) == [3, 1]
    assert named("1 yes", BASH, EDIT, AGAIN) == [1]
    other = replace(AGAIN, metadata={"command": "rm x"})
    with pytest.raises(NotUnderstoodError, match="Several"):
        named("yes", BASH, other)
    unread, again = replace(BASH, patterns=[]), replace(AGAIN, patterns=[])
    with pytest.raises(NotUnderstoodError, match="Several"):
        named("yes", unread, again)
    assert named("1 yes", unread, again) == [1]


OWNER = Owner(TaskId("task"), ContextId("context"), Principal("ann"))
WIDER = replace(BASH, permission="edit", always=["*"])


@pytest.mark.parametrize(
    "wider", [PermissionReply("always"), PermissionReply("once", None, "task")]
)
@pytest.mark.parametrize("unread", [{"patterns": []}, {"always": []}])
def test_a_permission_that_could_not_be_read_is_allowed_once_or_not_at_all(
    wider: PermissionReply, unread: dict[str, list[str]]
) -> None:
    asked = replace(WIDER, **unread)

    check_allowed(OWNER, WIDER, Answer(wider, "ann"), allow_always=True)
    check_allowed(OWNER, asked, Answer(PermissionReply("once"), "ann"), allow_always=True)
    with pytest.raises(InvalidParamsError, match='answer "once"'):
        check_allowed(OWNER, asked, Answer(wider, "ann"), allow_always=True)
    assert "for this task" in accepted(WIDER)
    assert "for this task" not in accepted(asked)


def test_a_plain_answer_is_for_what_was_shown_and_nothing_else() -> None:
    assert named("yes", BASH, EDIT, told=1) == [1]
    assert named("yes to all", BASH, EDIT, told=1) == [1]
    for words in ("yes", "yes to all", "once"):
        with pytest.raises(OutdatedAnswerError):
            named(words, EDIT, told=1)
    assert named("2 yes", EDIT, told=1) == [2]


def test_a_question_among_others_is_answered_by_its_number() -> None:
    free = ask(FREE, number=3)

    assert meaning(text("3: Ada"), BASH, free) == QuestionReply([["Ada"]])
    assert meaning(text("3 Ada"), BASH, free) == QuestionReply([["Ada"]])
    assert meaning(text("3 apples"), free) == QuestionReply([["3 apples"]])
    assert meaning(text("yes"), free) == QuestionReply([["yes"]])
    with pytest.raises(OutdatedAnswerError):
        meaning(text("1 yes"), free)


def test_an_answer_with_a_file_is_refused() -> None:
    message = Message("m", "user", [Part("text", text="yes"), Part("raw", raw="eA==")])

    with pytest.raises(NotUnderstoodError):
        meaning(message, BASH)


@given(st.sampled_from([BASH, ask(COLOR), ask(COLORS, FREE)]))
def test_what_is_accepted_is_told_for_every_prompt(asked: Interrupted) -> None:
    assert "reject" in accepted(asked)


def test_what_a_grant_for_a_command_would_cover_is_told_with_its_directory() -> None:
    asked = replace(BASH, directory="/work", always=["make *"])

    def told(**given: Json) -> str:
        return accepted(replace(asked, tool_input={"command": "make", **given}))

    assert "to allow plain commands (no" in told()
    assert "to allow plain commands (no" in told(workdir="/work")
    assert "to allow plain commands in / (no" in told(workdir="/")
    assert 'to allow all that the request lists under "yes for this task"' in told(
        workdir="/x\u202e"
    )


# Plans


PLAN = Interrupted(RequestId("plan_msg_1"), "plan", SESSION, number=4)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("go", PlanDecision("go")),
        ("Go!", PlanDecision("go")),
        ("go ahead", PlanDecision("go")),
        ("yes", PlanDecision("go")),
        ("4 go", PlanDecision("go")),
        ("go: without the tests", PlanDecision("go", "without the tests")),
        ("yes: but mind\nthe gap", PlanDecision("go", "but mind\nthe gap")),
        ("cancel", PlanDecision("cancel")),
        # A condition, or anything else, changes nothing on disk.
        ("go but skip the tests", PlanDecision("revise")),
        ("yes, but only the first file", PlanDecision("revise")),
        ("yes for this conversation", PlanDecision("revise")),
        ("going on like this is wrong", PlanDecision("revise")),
        ("no", PlanDecision("revise")),
        ("no: go", PlanDecision("revise")),
        ("cancel the second step", PlanDecision("revise")),
        ("always", PlanDecision("revise")),
        ("", PlanDecision("revise")),
    ],
)
def test_only_a_go_without_conditions_approves_a_plan(said: str, meant: PlanDecision) -> None:
    assert (
        understand_plan_answer(Message("m", "user", [Part("text", text=said)]), PLAN, ALL_TOLD)
        == meant
    )


def test_a_plan_is_approved_by_data() -> None:
    data: Json = {"reply": "go", "message": "gently", "request_id": "plan_msg_1"}

    decision = understand_plan_answer(
        Message("m", "user", [Part("data", data=data)]), PLAN, ALL_TOLD
    )

    assert decision == PlanDecision("go", "gently")


def test_a_plan_is_dropped_by_data() -> None:
    # Who names it need not have been shown it by this task.
    data: Json = {"reply": "cancel", "request_id": "plan_msg_1"}

    decision = understand_plan_answer(Message("m", "user", [Part("data", data=data)]), PLAN, 0)

    assert decision == PlanDecision("cancel")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (Part("text", text="go"), 3),  # it was not shown before the answer
        (Part("text", text="3 go"), ALL_TOLD),
        (Part("data", data={"reply": "go", "request_id": "plan_msg_0"}), ALL_TOLD),
        (Part("data", data={"reply": "go", "number": 3}), ALL_TOLD),
        (Part("data", data={"reply": "cancel", "request_id": "plan_msg_0"}), ALL_TOLD),
    ],
)
def test_an_answer_to_something_else_decides_about_no_plan(part: Part, told: int) -> None:
    with pytest.raises(OutdatedAnswerError):
        understand_plan_answer(Message("m", "user", [part]), PLAN, told)


@pytest.mark.parametrize(
    "parts",
    [
        [Part("text", text="go"), Part("raw", raw="eA==", filename="x")],
        [Part("data", data={"reply": "go"}), Part("text", text="only the first step")],
        [Part("data", data={"reply": "go", "number": "4"})],
    ],
)
def test_a_go_with_something_else_is_not_understood(parts: list[Part]) -> None:
    with pytest.raises(NotUnderstoodError):
        understand_plan_answer(Message("m", "user", parts), PLAN, ALL_TOLD)


def message(*parts: Json) -> Message:
    """Return a message with a part for each value: text for a string, data for the rest."""
    made = [Part("text", text=p) if isinstance(p, str) else Part("data", data=p) for p in parts]
    return Message("m", "user", made)


@pytest.mark.requirement("I23")
@pytest.mark.parametrize(
    "parts",
    [
        ("no", {"reply": "once"}),
        ({"reply": "once"}, "no"),
        ({"reply": "once"}, {"reply": "reject"}),
        ({"reply": "reject"}, {"reply": "once"}),
        ({"reply": "once"}, {"reply": "once", "scope": "task"}),
        ({"reply": "once", "number": 1}, {"reply": "once", "number": 2}),
        ({"reply": "once", "request_id": "per_1", "number": 2},),
        ({"reply": "once", "request_id": "per_1", "all": True},),
        ({"reply": "once", "number": 1, "all": True},),
        ({"reply": "once", "number": 1, "answers": [["no"]]},),
        ({"reply": "once", "number": 1, "message": "but only the first file"},),
        ({"reply": "once", "number": 1}, ["no"]),
        ({"reply": "once", "number": 1}, "I do not want this"),
        ({"reply": "once", "number": 1}, {}),
        ("1 yes", {"reply": "reject", "number": 1}),
        ("1 yes", {"reply": "once", "number": 2}),
        ("1 yes", 7),
        ("1 yes", "1 no"),
        ("1 no", "1 yes"),
        ("1 no", "2 yes"),
        ("1 no\n2 yes",),
        ("per_1 no\nper_2 yes",),
        ("1 no, yes",),
        ("1 no: too slow\nok",),
        ("1 yes 2",),
        ("1 yes to all",),
        ("all yes 1",),
    ],
)
def test_a_message_that_says_two_things_says_nothing(parts: tuple[Json, ...]) -> None:
    with pytest.raises(NotUnderstoodError):
        understand(message(*parts), [BASH, EDIT], ALL_TOLD)


@pytest.mark.parametrize(
    ("parts", "reply"),
    [
        (("1 yes", {"reply": "once", "number": 1}), PermissionReply("once")),
        (({"reply": "once", "number": 1, "request_id": "per_1"},), PermissionReply("once")),
        (({"reply": "reject", "number": 1}, "no 1"), PermissionReply("reject")),
        (("1 no", "no, it is slow"), PermissionReply("reject", "no, it is slow")),
        (("1 no", "use git"), PermissionReply("reject", "use git")),
        (("", {"reply": "once", "number": 1}), PermissionReply("once")),
    ],
)
def test_a_message_may_say_the_same_twice(parts: tuple[Json, ...], reply: Reply) -> None:
    assert understand(message(*parts), [BASH, EDIT], ALL_TOLD).reply == reply


@given(st.lists(st.sampled_from(["yes", "no", "always"]), min_size=2, max_size=4), st.data())
def test_parts_that_differ_never_allow_anything(words: list[str], draw: st.DataObject) -> None:
    kinds = draw.draw(st.lists(st.booleans(), min_size=len(words), max_size=len(words)))
    both = zip(words, kinds, strict=True)
    parts: list[Json] = [{"reply": word} if kind else word for word, kind in both]

    try:
        reply = understand(message(*parts), [BASH], ALL_TOLD).reply
    except NotUnderstoodError:
        return

    assert isinstance(reply, PermissionReply)
    assert reply.reply == "reject" or len(set(words)) == 1


@pytest.mark.parametrize("answers", [[], [["Red"]], [["Red"], ["7"], ["7"]]])
def test_an_answer_has_one_list_for_each_question(answers: Json) -> None:
    both = ask(COLOR, FREE)

    with pytest.raises(NotUnderstoodError, match="one list for each question"):
        meaning(data({"answers": answers}), both)


@pytest.mark.parametrize("value", [{"reply": "perhaps"}, {}])
def test_always_is_offered_only_where_it_is_allowed(value: Json) -> None:
    for asked in (BASH, replace(BASH, allows_always=True)):
        with pytest.raises(NotUnderstoodError) as refused:
            meaning(data(value), asked)
        assert ("always" in str(refused.value)) is asked.allows_always
