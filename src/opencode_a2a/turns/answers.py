"""What a person may answer to an interrupt, and what it means. Pure.

Any A2A client can answer with a plain message: a word, an option, a number, free text, or a data
part that says the same in a form for programs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import orjson

from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InterruptTypeMismatchError,
    InvalidParamsError,
)
from opencode_a2a.events import Interrupted, JsonObject, Question, Resolution, load_known
from opencode_a2a.ids import Owner
from opencode_a2a.messages import Message
from opencode_a2a.printable import visible_line
from opencode_a2a.rights import FULL, QUESTION, SHELL, Rights
from opencode_a2a.turns.shell import (
    can_be_wider,
    directory_of,
    exact_command,
    leads_elsewhere,
    says_more,
    wider_patterns,
)

Scope = Literal["task", "context"]


@dataclass(frozen=True, slots=True)
class PermissionReply:
    reply: Literal["once", "always", "reject"]
    message: str | None = None
    """The reason for a no. The model is given it, and then continues instead of stopping."""
    scope: Scope | None = None
    """With "once": where later requests that fit the patterns of this one are allowed too."""


@dataclass(frozen=True, slots=True)
class QuestionReply:
    answers: list[list[str]]


@dataclass(frozen=True, slots=True)
class QuestionRejection:
    pass


Reply = PermissionReply | QuestionReply | QuestionRejection
_KINDS = {kind.__name__: kind for kind in (PermissionReply, QuestionReply, QuestionRejection)}


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply to an interrupt, and who gives it."""

    reply: Reply
    by: str
    """A principal, ``Grant.by``, ``policy.RULE`` or ``interrupt_state.CLOCK``."""
    message: Message | None = None
    """The message that it came in."""
    rights: Rights = field(default=FULL, compare=False)
    """The rights of the credential that answers; checked before the answer is stored, and not
    stored with it."""

    @property
    def resolution(self) -> Resolution:
        """How the interrupt is settled when OpenCode takes this answer."""
        match self.reply:
            case PermissionReply(reply="once" | "always" as granted):
                return granted
            case QuestionReply():
                return "replied"
            case PermissionReply() | QuestionRejection():
                return "rejected"

    def dump(self) -> bytes:
        return orjson.dumps([type(self.reply).__name__, self.reply, self.by, self.message])

    @classmethod
    def load(cls, data: bytes) -> "Answer":
        """Read what ``dump`` wrote."""
        kind, reply, by, message = orjson.loads(data)
        return cls(load_known(_KINDS[kind], reply), by, message and Message.load(message))


def check_allowed(
    owner: Owner | None, asked: Interrupted, answer: Answer, *, allow_always: bool
) -> None:
    """Raise an error if a person may not give this answer to an interrupt."""
    reply = answer.reply
    kind = "permission" if isinstance(reply, PermissionReply) else "question"
    if kind != asked.type:
        raise InterruptTypeMismatchError(
            request_id=asked.request_id,
            expected_interrupt_type=kind,
            actual_interrupt_type=asked.type,
        )
    permission = asked.permission or QUESTION
    granted = kind == "permission" and answer.resolution != "rejected"
    if granted and answer.rights.narrow(permission, "ask") == "deny":
        raise AuthorizationForbiddenError(
            "This credential may not allow it; it can only be used to answer no"
        )
    match reply:
        case PermissionReply(reply="always") if not allow_always:
            text = '"always" is switched off here, since it holds for everybody; answer "once"'
            raise InvalidParamsError.of("reply", text, text)
        case PermissionReply(reply="always") if not says_more(asked):
            text = 'OpenCode does not say what "always" would allow; answer "once"'
            raise InvalidParamsError.of("reply", text, text)
        case PermissionReply(scope=str(scope)):
            problem = None
            if leads_elsewhere(asked):
                problem = "a symbolic link may lead elsewhere by then"
            elif not can_be_wider(asked):
                problem = "OpenCode does not say what else this would allow"
            elif owner is None or (scope == "task" and owner.task_id is None):
                problem = "the work was not begun by a task"
            elif answer.by != owner.principal:
                problem = "only the caller of the task can do that"
            elif reply.reply != "once":
                problem = f'it goes with "once", not with "{reply.reply}"'
            if problem is not None:
                text = f'The permission cannot be given for a {scope}: {problem}; answer "once"'
                raise InvalidParamsError.of("scope", text, text)
        case QuestionReply(answers=answers) if len(answers) != len(asked.questions):
            text = _one_list_each(asked)
            raise InvalidParamsError.of("answers", text, text)
        case _:
            pass


class NotUnderstoodError(Exception):
    """The message is not an answer to a pending request; the text says what would be."""


class OutdatedAnswerError(NotUnderstoodError):
    """The message answers a request that is not pending, or one that was not shown before."""


class ContradictionError(NotUnderstoodError):
    """The message says more than one thing, and which of them counts is not for us to choose."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a message means: the interrupts that it answers, and the reply to them."""

    asked: tuple[Interrupted, ...]
    reply: Reply


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """What a person wants done with a plan: carry it out, change it, or drop it."""

    wanted: Literal["go", "revise", "cancel"]
    remark: str | None = None
    """A remark for the agent that carries the plan out."""


_WORDS: dict[str, Literal["once", "always", "reject"]] = {
    **dict.fromkeys(("once", "yes", "y", "ok", "okay", "allow", "approve", "approved"), "once"),
    "always": "always",
    **dict.fromkeys(("reject", "rejected", "no", "n", "deny", "denied", "refuse"), "reject"),
}
_GO = frozenset({"go", *(word for word, reply in _WORDS.items() if reply == "once")})
_REJECTIONS = frozenset({"reject", "dismiss", "skip"})
_REQUEST_ID = re.compile(r"(?:per|que|frm)_[0-9A-Za-z]+")
# Blanks are taken possessively: otherwise each of many would be tried as the end of each group.
_NUMBERS = r"#?\d{1,9}(?:(?:\s*+,\s*+(?:and\s++)?|\s++and\s++|\s++)#?\d{1,9})*"
_SAID = re.compile(
    rf"(?:(?P<before>{_NUMBERS})(?:\s*+[:.)])?\s++|(?P<all_before>all)(?:\s*+[:,])?\s++)?"
    r"(?P<word>[a-z]++)"
    rf"(?:(?:\s*+,)?\s++(?:to\s++)?(?:(?P<all_after>all)|(?P<after>{_NUMBERS}))"
    r"(?=\s*+(?:$|[:,.;!-]|for\s)))?"
    r"(?:(?:\s*+,)?\s++for\s++(?:this|the)\s++(?P<scope>task|conversation|context|session))?"
    r"(?:\s++(?:to\s++)?(?P<all_last>all))?"
    r"(?P<rest>(?:[\s:,.;!-].*)?)",
    re.DOTALL | re.IGNORECASE,
)
"""An answer to permissions: ``yes``, ``1 yes``, ``no 2: why``, ``yes 1 and 3``, ``yes to all``,
``yes for this task``."""
_SCOPES: dict[str, Scope] = {
    "task": "task",
    **dict.fromkeys(("conversation", "context", "session"), "context"),
}
_NUMBERED = re.compile(r"#?(?P<number>\d{1,9})(?P<sign>\s*+[:.)])?\s++(?P<rest>.*)", re.DOTALL)
"""An answer to a question among several requests: ``2: Red``."""
_FEW_WORDS = re.compile(r"[\w./@%+=:~*-]+( [\w./@%+=:~*-]+){0,2}")
"""A pattern that cannot be taken for a part of a sentence that it stands in."""
_ROOM = 500
"""Characters of what a broader answer allows for which the sentence about answers has room."""


def understand(message: Message, pending: Sequence[Interrupted], last_seen: int) -> Meaning:
    """Return what a message means; raise NotUnderstoodError if that is not certain.

    An answer may name requests by number or id. One that names none is for the request that was
    shown: ``last_seen`` is the highest number that it may be for (``SeenRequests.newest_in_time``).
    It is not for requests that came later, even if the one that was shown is settled.

    Text and data parts may say the same twice; a message that says two things says nothing.
    """
    if any(part.kind in ("raw", "url") for part in message.parts):
        raise NotUnderstoodError("An answer is text or data, without files.")
    meanings: list[Meaning] = []
    for part in message.parts:
        if part.kind == "data":
            if not isinstance(part.data, dict):
                raise NotUnderstoodError('The data of an answer is an object, such as {"reply": …}')
            meanings.append(_from_data(part.data, pending, last_seen))
    if not meanings or message.text.strip():
        meanings.append(_from_text(message.text.strip(), pending, last_seen))
    if any(meaning != meanings[0] for meaning in meanings):
        raise ContradictionError(f"The parts of the message differ. {ONE_ANSWER}")
    return meanings[0]


ONE_ANSWER = "Send one answer in a message."


def _from_text(text: str, pending: Sequence[Interrupted], last_seen: int) -> Meaning:
    """Return what the text of a message means."""
    first, _, rest = text.partition(" ")
    if _REQUEST_ID.fullmatch(first.rstrip(":")):
        asked = _with_id(first.rstrip(":"), pending)
        return Meaning((asked,), _reply(rest.strip(), asked))
    said = _SAID.fullmatch(text)
    if said is not None and said["word"].lower() in _WORDS:
        numbers = _numbers(said)
        # To a question that accepts free text, "12 no" may be an answer in itself.
        if numbers and min(numbers) <= max((last_seen, *(asked.number or 0 for asked in pending))):
            named = _with_numbers(numbers, pending)
        elif _all(said):
            named = _every_permission(pending, last_seen)
        else:
            named = _the_one_seen(pending, last_seen)
            if numbers and named[0].type == "permission":  # a number is never ignored
                named = _with_numbers(numbers, pending)
        if named[0].type == "question":
            answer = _NUMBERED.fullmatch(text) if numbers else None
            return Meaning(named, _question(answer["rest"] if answer else text, named[0]))
        if (numbers and _all(said)) or (said["before"] and said["after"]):
            raise ContradictionError(f"The answer names its requests twice. {ONE_ANSWER}")
        return Meaning(named, _permission(said, named[0]))
    numbered = _NUMBERED.fullmatch(text)
    if numbered is not None and (len(pending) > 1 or numbered["sign"] or text.startswith("#")):
        found = [one for one in pending if one.number == int(numbered["number"])]
        if found and found[0].type == "question":
            return Meaning((found[0],), _question(numbered["rest"].strip(), found[0]))
    named = _the_one_seen(pending, last_seen)
    return Meaning(named, _reply(text, named[0]))


def _numbers(said: re.Match[str]) -> list[int]:
    """Return the numbers of the requests that an answer names."""
    return [int(number) for number in re.findall(r"\d+", said["before"] or said["after"] or "")]


def _all(said: re.Match[str]) -> bool:
    """Whether an answer is for all requests."""
    return bool(said["all_before"] or said["all_after"] or said["all_last"])


ALONE = 'Send "go" or "cancel" alone, without files or data.'


def understand_plan_answer(message: Message, asked: Interrupted, last_seen: int) -> PlanDecision:
    """Return what a message wants done with a plan; anything but "go" and "cancel" changes it.

    A "go" with a condition is a change: only text after a colon is a remark.
    """
    for part in message.parts:
        match part.data:
            case {"reply": str(word), **rest} if word.strip().lower() in {*_GO, "cancel"}:
                if rest.get("request_id") is not None:
                    _with_id(rest["request_id"], [asked])
                match rest.get("number"):
                    case None:
                        if rest.get("request_id") is None:
                            _only_seen([asked], last_seen)
                    case int(number) if not isinstance(number, bool):
                        _with_numbers([number], [asked])
                    case _:
                        raise NotUnderstoodError("number: should be the number of the plan")
                if len(message.parts) > 1:
                    raise NotUnderstoodError(ALONE)
                if word.strip().lower() == "cancel":
                    return PlanDecision("cancel")
                remark = rest.get("message")
                return PlanDecision("go", remark.strip() if isinstance(remark, str) else None)
            case _:
                pass
    text = message.text.strip()
    said = _SAID.fullmatch(re.sub(r"^go ahead\b", "go", text, flags=re.IGNORECASE))
    if said is None or said["word"].lower() not in _GO or said["scope"]:
        _only_seen([asked], last_seen)
        cancels = text.rstrip(".!").lower() == "cancel"
        return PlanDecision("cancel" if cancels else "revise")
    if numbers := [
        int(number) for number in re.findall(r"\d+", f"{said['before']} {said['after']}")
    ]:
        _with_numbers(numbers, [asked])
    else:
        _only_seen([asked], last_seen)
    rest = said["rest"].strip(" \t\r\n.!")
    if rest and not rest.startswith(":"):
        return PlanDecision("revise")
    if len(message.parts) > 1:
        raise NotUnderstoodError(ALONE)
    return PlanDecision("go", rest.removeprefix(":").strip() or None)


def knows_input(asked: Interrupted) -> bool:
    """Whether it is known what a permission is for: its patterns, and the input of its call."""
    called = asked.call_id is None or (asked.tool_input is not None and not in_program(asked))
    return called and bool(asked.patterns)


def in_program(asked: Interrupted) -> bool:
    """Whether a program of the model makes the call: OpenCode 2 then tells only the program."""
    return asked.tool == PROGRAM and asked.permission != PROGRAM


PROGRAM = "execute"
"""The tool that runs programs of the model, which can call other tools."""


def same_request(one: Interrupted, other: Interrupted) -> bool:
    """Whether two permissions ask for exactly the same, so that one answer holds for both.

    They do not if what their calls are given is not known, nor if one call asks twice.
    """

    def content(asked: Interrupted) -> tuple[object, ...]:
        what = (asked.permission, asked.patterns, asked.always, asked.metadata)
        return (*what, asked.tool, asked.tool_input, asked.directory)

    def call(asked: Interrupted) -> tuple[str | None, ...]:
        return asked.session_id, asked.call_message_id, asked.call_id

    known = knows_input(one) and (one.call_id is None or call(one) != call(other))
    return known and one.type == other.type == "permission" and content(one) == content(other)


def groups(pending: Sequence[Interrupted]) -> list[tuple[Interrupted, ...]]:
    """Return the requests in groups that ask for exactly the same."""
    found: list[list[Interrupted]] = []
    for asked in pending:
        alike = next((group for group in found if same_request(group[0], asked)), None)
        if alike is None:
            found.append([asked])
        else:
            alike.append(asked)
    return [tuple(group) for group in found]


def _names(pending: Sequence[Interrupted]) -> str:
    return ", ".join(str(group[-1].number or group[-1].request_id) for group in groups(pending))


def _with_id(request_id: object, pending: Sequence[Interrupted]) -> Interrupted:
    for asked in pending:
        if asked.request_id == request_id:
            return asked
    raise OutdatedAnswerError(
        f"The request {str(request_id)[:64]} is no longer pending. Pending now: {_names(pending)}"
    )


def _with_numbers(
    numbers: Sequence[int], pending: Sequence[Interrupted]
) -> tuple[Interrupted, ...]:
    """Return the requests with these numbers, each with earlier requests for exactly the same.

    Requests for the same are shown as one, by the highest number among them.
    """
    found: dict[str, Interrupted] = {}
    for number in numbers:
        named = next((asked for asked in pending if asked.number == number), None)
        if named is None:
            raise OutdatedAnswerError(
                f"Request {number} is not pending. Pending now: {_names(pending)}"
            )
        earlier = (one for one in pending if (one.number or 0) < number)
        for asked in (named, *(one for one in earlier if same_request(one, named))):
            found[asked.request_id] = asked
    kinds = {asked.type for asked in found.values()}
    if len(kinds) > 1 or (kinds == {"question"} and len(found) > 1):
        raise NotUnderstoodError("Answer a question in a message of its own.")
    return tuple(found.values())


def _only_seen(pending: Sequence[Interrupted], last_seen: int) -> list[Interrupted]:
    """Return the requests that were shown in time; raise an error if there are none."""
    found = [asked for asked in pending if (asked.number or 0) <= last_seen]
    if not found:
        number = _names(pending[-1:])
        raise OutdatedAnswerError(
            "The pending request was not shown to you before this answer, or only a moment before "
            "it, just after another was settled, so the answer may be meant for something else. "
            f'Read the request, then answer it by its number, such as "{number} yes".'
        )
    return found


def _every_permission(pending: Sequence[Interrupted], last_seen: int) -> tuple[Interrupted, ...]:
    found = tuple(asked for asked in _only_seen(pending, last_seen) if asked.type == "permission")
    if not found:
        raise NotUnderstoodError(f"No permission is asked for. {accepted(pending[0])}")
    return found


def _the_one_seen(pending: Sequence[Interrupted], last_seen: int) -> tuple[Interrupted, ...]:
    """Return the one request that was shown, with requests for exactly the same."""
    found = groups(_only_seen(pending, last_seen))
    if len(found) > 1:
        raise NotUnderstoodError(
            "Several requests are pending; begin the answer with the number of the one you mean "
            f'({_names(pending)}), such as "{_names(pending[:1])} yes", or answer "yes to all"'
        )
    return found[0]


def _reply(text: str, asked: Interrupted) -> Reply:
    """Return the reply to one request; ``text`` no longer has the request's number or id."""
    if not text:
        raise NotUnderstoodError(f"The message is empty. {accepted(asked)}")
    if asked.type == "question":
        return _question(text, asked)
    said = _SAID.fullmatch(text)
    if said is None or said["word"].lower() not in _WORDS:
        raise NotUnderstoodError(accepted(asked))
    return _permission(said, asked)


def _permission(said: re.Match[str], asked: Interrupted) -> PermissionReply:
    reply = _WORDS[said["word"].lower()]
    reason = said["rest"].strip().lstrip(":,.;!-").strip()
    if reason and reply != "reject":
        # "yes, but only the first file" does not permit all of it.
        raise NotUnderstoodError(f"A permission has no conditions. {accepted(asked)}")
    if any(_also_answers(line) for line in reason.splitlines()):
        raise ContradictionError(f"The message holds several answers. {ONE_ANSWER}")
    scope = _SCOPES[said["scope"].lower()] if said["scope"] else None
    if scope and reply == "always":
        reply = "once"  # "always for this task" is not for other tasks
    return PermissionReply(reply, reason or None, scope if reply == "once" else None)


def _also_answers(line: str) -> bool:
    """Whether a line in the reason of a refusal is an answer itself, of another kind or request."""
    first, _, rest = line.strip().partition(" ")
    named = _REQUEST_ID.fullmatch(first.rstrip(":"))
    said = _SAID.fullmatch(rest.strip() if named else line.strip())
    if said is None or said["word"].lower() not in _WORDS or said["rest"].strip(" .!"):
        return False
    refuses = _WORDS[said["word"].lower()] == "reject"
    return not refuses or bool(named or _numbers(said) or _all(said))


def only_an_answer(message: Message) -> bool:
    """Whether a message makes sense as the answer to an interrupt and as nothing else."""
    for part in message.parts:
        if isinstance(part.data, dict) and ("reply" in part.data or "request_id" in part.data):
            return True
    text = message.text.strip()
    named = text.partition(" ")[0].rstrip(":")
    if _REQUEST_ID.fullmatch(named):
        return True
    said = _SAID.fullmatch(text)
    if said is None or said["word"].lower() not in {*_WORDS, "go"}:
        return False
    which = ("before", "after", "all_before", "all_after", "all_last", "scope")
    return not said["rest"].strip(" .!") or any(said[name] for name in which)


def wider_grant(asked: Interrupted) -> tuple[str, bool]:
    """Return all that "yes for this task" would allow, and whether it fits into a sentence.

    Nothing of it is cut: the model chooses the patterns and the directory, and what is not shown
    would be granted all the same. Nor may they read like words of the sentence. Whoever leaves it
    out of a sentence has to list it.
    """
    patterns = [*map(visible_line, wider_patterns(asked))]
    covered, words = ", ".join(patterns), patterns
    text = f"what fits {covered}"
    if asked.permission == SHELL:
        place = directory_of(asked)
        within = "" if place in (None, asked.directory) else f" in {visible_line(place)}"
        words = [*patterns, visible_line(place)] if within and place else patterns
        exact = "" if exact_command(asked) is None else "exactly this"
        plain = f"plain commands{within} (no redirection, pipe, …) that fit {covered}"
        if not covered:
            plain = f" command{within}"
        text = f"{exact} and {plain}" if exact and covered else f"{exact}{plain}"
    elif covered == "*":
        text = f"every use of {visible_line(asked.permission or '')}"
    return text, len(text) <= _ROOM and all(map(_FEW_WORDS.fullmatch, words))


def accepted(asked: Interrupted) -> str:
    """Return the sentence that says which answers are understood."""
    if asked.type == "plan":
        return (
            'Answer "go" (or "yes") to have it carried out, with a remark after a colon if you '
            'like, or say what to change for a new plan. "cancel" ends the task.'
        )
    if asked.type == "permission":
        always = ' "always" to allow it from now on,' if asked.allows_always else ""
        unheard = "" if asked.tells_reason else " (this OpenCode does not give it to the model)"
        if can_be_wider(asked):
            allowed, has_room = wider_grant(asked)
            if not has_room:
                allowed = 'all that the request lists under "yes for this task"'
            always = (
                ' "yes for this task" or "yes for this conversation" to allow '
                f"{allowed} without being asked again,{always}"
            )
        return (
            f'Answer "once" (or "yes") to allow it this time,{always} '
            f'or "reject" (or "no"), with a reason after a colon if you like{unheard}.'
        )
    free = any(question.custom for question in asked.questions)
    lines = ["Answer with an option's label or number" + (", or in your own words" if free else "")]
    if len(asked.questions) > 1:
        lines.append("one line for each question")
    return "; ".join(lines) + '; or "reject" to dismiss the question.'


def _question(text: str, asked: Interrupted) -> Reply:
    questions, lines = asked.questions, [text]
    if len(questions) > 1:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
    # An option may be called "skip".
    option = len(questions) == 1 and _label(text, questions[0]) is not None
    if text.lower() in _REJECTIONS and not option:
        return QuestionRejection()
    if len(lines) != len(questions):
        raise NotUnderstoodError(f"There are {len(questions)} questions. {accepted(asked)}")
    answers: list[list[str]] = []
    for line, question in zip(lines, questions, strict=True):
        labels = [_label(line, question)]
        if labels == [None] and question.multiple:
            labels = [_label(piece.strip(), question) for piece in line.split(",")]
        found = [label for label in labels if label is not None]
        if len(found) < len(labels):
            if not question.custom:
                raise NotUnderstoodError(accepted(asked))
            found = [line]
        answers.append(found)
    return QuestionReply(answers)


def _label(text: str, question: Question) -> str | None:
    """Return the option that a text means, by label or by number."""
    for option in question.options:
        if option.label.casefold() == text.casefold():
            return option.label
    numbers = {str(number): option for number, option in enumerate(question.options, 1)}
    option = numbers.get(text.lstrip("0"))
    return None if option is None else option.label


def _from_data(data: JsonObject, pending: Sequence[Interrupted], last_seen: int) -> Meaning:
    """Return what a data part means; it has the fields of the methods that answer, or a number."""
    request_id, number, every = data.get("request_id"), data.get("number"), data.get("all")
    if (
        isinstance(number, bool)
        or not isinstance(number, int | None)
        or every not in (None, False, True)
    ):
        raise NotUnderstoodError('"number" must be a number, and "all" true or false.')
    if every and (request_id is not None or number is not None):
        raise ContradictionError(f"The data part names one request and all. {ONE_ANSWER}")
    if number is not None:
        named = _with_numbers([number], pending)
        if request_id is not None and named[0] != _with_id(request_id, pending):
            raise ContradictionError(f"The data part names two requests. {ONE_ANSWER}")
    elif request_id is not None:
        named = (_with_id(request_id, pending),)
    else:
        choose = _every_permission if every else _the_one_seen
        named = choose(pending, last_seen)
    return Meaning(named, _data_reply(data, named[0]))


def _data_reply(data: JsonObject, asked: Interrupted) -> Reply:
    if data.get("reply") is not None and data.get("answers") is not None:
        raise ContradictionError(f'The data part has both "reply" and "answers". {ONE_ANSWER}')
    words = '"once", "always" or "reject"' if asked.allows_always else '"once" or "reject"'
    match data:
        case {"reply": str(word)} if asked.type == "permission":
            reply = _WORDS.get(word.strip().lower())
            if reply is None:
                raise NotUnderstoodError(f'"reply" must be {words}.')
            reason, scope = data.get("message"), data.get("scope")
            reason = reason.strip() if isinstance(reason, str) else None
            if reason and reply != "reject":
                raise NotUnderstoodError(f"A permission has no conditions. {accepted(asked)}")
            if scope is not None and (reply != "once" or scope not in ("task", "context")):
                raise NotUnderstoodError('"scope" must be "task" or "context", with "once".')
            return PermissionReply(reply, reason or None, scope)
        case {"reply": str(word)} if word.strip().lower() in _REJECTIONS:
            return QuestionRejection()
        case {"answers": list(answers)} if asked.type == "question":
            found: list[list[str]] = []
            for answer in answers:
                listed = answer if isinstance(answer, list) else [None]
                texts = [value for value in listed if isinstance(value, str)]
                if len(texts) < len(listed):
                    raise NotUnderstoodError('"answers" must be a list of lists of strings.')
                found.append([text.strip() for text in texts if text.strip()])
            if len(found) != len(asked.questions):
                raise NotUnderstoodError(_one_list_each(asked))
            return QuestionReply(found)
        case _:
            wanted = (
                f'{{"reply": …}} with {words}'
                if asked.type == "permission"
                else '{"answers": [["label", …], …]}, one list for each question'
            )
            raise NotUnderstoodError(f"The data part must be {wanted}.")


def _one_list_each(asked: Interrupted) -> str:
    count = len(asked.questions)
    return f'"answers" must have one list for each question, of which there are {count}.'
