"""What a person may answer to a prompt, and what it means. Pure.

Any A2A client can answer with a plain message: a word, an option, a number, a free text, or
a data part with the same in a form for programs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from opencode_a2a.events import Interrupted, Json, JsonObject, Question, Resolution
from opencode_a2a.messages import Message


@dataclass(frozen=True, slots=True)
class PermissionReply:
    reply: Literal["once", "always", "reject"]
    message: str | None = None
    """Told to the model when the answer is no; it then goes on instead of stopping."""


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
    """A reply to an interrupt, and whose it is: a principal's, a rule's or the deadline's."""

    reply: Reply
    by: str
    message: Message | None = None
    """The message that it came in."""

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
        return cls(_KINDS[kind](**reply), by, message and Message.load(message))


class NotUnderstoodError(Exception):
    """The answer means nothing here; the text says what would."""


_WORDS: dict[str, Literal["once", "always", "reject"]] = {
    **dict.fromkeys(("once", "yes", "y", "ok", "okay", "allow", "approve", "approved"), "once"),
    "always": "always",
    **dict.fromkeys(("reject", "rejected", "no", "n", "deny", "denied", "refuse"), "reject"),
}
_REJECTIONS = frozenset({"reject", "dismiss", "skip"})
_REQUEST_ID = re.compile(r"(?:per|que)_[0-9A-Za-z]+")
_LEADING_WORD = re.compile(r"\s*([A-Za-z]+)\s*(?:[:,.;!-]+\s*|\s+|$)(.*)", re.DOTALL)


def understand(message: Message, pending: Sequence[Interrupted]) -> tuple[Interrupted, Reply]:
    """Return which prompt a message answers, and how; raise NotUnderstoodError otherwise."""
    for part in message.parts:
        if isinstance(part.data, dict):
            return _from_data(part.data, pending)
    text = message.text.strip()
    asked, text = _named(text, pending)
    if not text:
        raise NotUnderstoodError(f"The message is empty. {accepted(asked)}")
    if asked.type == "permission":
        return asked, _permission(text, asked)
    return asked, _question(text, asked)


def accepted(asked: Interrupted) -> str:
    """Say what would be understood."""
    if asked.type == "permission":
        always = ' "always" to allow it from now on,' if asked.allows_always else ""
        return (
            f'Answer "once" (or "yes") to allow it this time,{always} '
            'or "reject" (or "no"), with a reason after a colon if you like.'
        )
    lines = ["Answer with an option's label or number" + _free(asked.questions)]
    if len(asked.questions) > 1:
        lines.append("one line for each question")
    return "; ".join(lines) + '; or "reject" to dismiss the question.'


def _free(questions: Sequence[Question]) -> str:
    return ", or in your own words" if any(question.custom for question in questions) else ""


def _named(text: str, pending: Sequence[Interrupted]) -> tuple[Interrupted, str]:
    """Find the prompt that is meant: the only one, or the one whose id comes first."""
    first, _, rest = text.partition(" ")
    for asked in pending:
        if first.rstrip(":") == asked.request_id:
            return asked, rest.strip()
    if _REQUEST_ID.fullmatch(first.rstrip(":")):
        raise NotUnderstoodError(
            f"The request {first.rstrip(':')} is no longer pending. What is asked now: "
            + ", ".join(asked.request_id for asked in pending)
        )
    if len(pending) == 1:
        return pending[0], text
    raise NotUnderstoodError(
        "Several prompts are pending; begin the answer with the id of the one you mean: "
        + ", ".join(asked.request_id for asked in pending)
    )


def _permission(text: str, asked: Interrupted) -> PermissionReply:
    match = _LEADING_WORD.fullmatch(text)
    reply = _WORDS.get(match[1].lower()) if match else None
    if match is None or reply is None:
        raise NotUnderstoodError(accepted(asked))
    rest = match[2].strip()
    if rest and reply != "reject":
        # "yes, but only the first file" is no permission for all of it.
        raise NotUnderstoodError(f"A permission has no conditions. {accepted(asked)}")
    return PermissionReply(reply, rest or None)


def _question(text: str, asked: Interrupted) -> Reply:
    questions = asked.questions
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(questions) > 1:
        if text.lower() in _REJECTIONS:
            return QuestionRejection()
        if len(lines) != len(questions):
            raise NotUnderstoodError(f"There are {len(questions)} questions. {accepted(asked)}")
        return QuestionReply(
            [_choice(line, q, asked) for line, q in zip(lines, questions, strict=True)]
        )
    question = questions[0]
    if text.lower() in _REJECTIONS and _label(text, question) is None:
        return QuestionRejection()
    return QuestionReply([_choice(text, question, asked)])


def _choice(text: str, question: Question, asked: Interrupted) -> list[str]:
    whole = _label(text, question)
    if whole is not None:
        return [whole]
    if question.multiple:
        labels = [_label(piece.strip(), question) for piece in text.split(",")]
        found = [label for label in labels if label is not None]
        if found and len(found) == len(labels):
            return found
    if question.custom:
        return [text]
    raise NotUnderstoodError(accepted(asked))


def _label(text: str, question: Question) -> str | None:
    """Return the option that a text means, by label or by number."""
    for option in question.options:
        if option.label.casefold() == text.casefold():
            return option.label
    if text.isascii() and text.isdigit() and 0 < int(text) <= len(question.options):
        return question.options[int(text) - 1].label
    return None


def _from_data(data: JsonObject, pending: Sequence[Interrupted]) -> tuple[Interrupted, Reply]:
    asked = _by_id(data.get("request_id"), pending)
    match data:
        case {"reply": str(word)} if asked.type == "permission":
            reply = _WORDS.get(word.strip().lower())
            if reply is None:
                raise NotUnderstoodError('"reply" must be "once", "always" or "reject".')
            return asked, PermissionReply(reply, _text(data.get("message")))
        case {"reply": str(word)} if word.strip().lower() in _REJECTIONS:
            return asked, QuestionRejection()
        case {"answers": list(answers)} if asked.type == "question":
            return asked, QuestionReply(strings(answers, asked))
        case _:
            wanted = (
                '{"reply": "once" | "always" | "reject"}'
                if asked.type == "permission"
                else '{"answers": [["label", …], …]}, one list for each question'
            )
            raise NotUnderstoodError(f"The data part must be {wanted}.")


def _by_id(named: Json, pending: Sequence[Interrupted]) -> Interrupted:
    for asked in pending:
        if named == asked.request_id or (named is None and len(pending) == 1):
            return asked
    ids = ", ".join(asked.request_id for asked in pending)
    raise NotUnderstoodError(f'"request_id" must be one of: {ids}')


def _text(value: Json) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def strings(answers: Sequence[Json], asked: Interrupted) -> list[list[str]]:
    """Check that there is a list of strings for each question; blanks are dropped."""
    found: list[list[str]] = []
    for answer in answers:
        if not isinstance(answer, list):
            raise NotUnderstoodError('"answers" must be a list of lists of strings.')
        texts = [value for value in answer if isinstance(value, str)]
        if len(texts) != len(answer):
            raise NotUnderstoodError('"answers" must be a list of lists of strings.')
        found.append([text.strip() for text in texts if text.strip()])
    if len(found) > len(asked.questions):
        raise NotUnderstoodError(f"There are only {len(asked.questions)} questions.")
    return found
