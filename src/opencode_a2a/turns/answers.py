"""What a person may answer to an interrupt, and what it means. Pure.

Any A2A client can answer with a plain message: a word, an option, a number, a free text, or
a data part with the same in a form for programs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from opencode_a2a.events import Interrupted, JsonObject, Question, Resolution
from opencode_a2a.messages import Message


@dataclass(frozen=True, slots=True)
class PermissionReply:
    reply: Literal["once", "always", "reject"]
    message: str | None = None
    """Given to the model when the answer is no; it then goes on instead of stopping."""


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
    """Return which interrupt a message answers, and how; raise NotUnderstoodError otherwise.

    It is the only one that is pending, or the one whose id the message begins with.
    """
    for part in message.parts:
        if isinstance(part.data, dict):
            return _from_data(part.data, pending)
    text = message.text.strip()
    first, _, rest = text.partition(" ")
    named, ids = first.rstrip(":"), ", ".join(asked.request_id for asked in pending)
    asked = next((asked for asked in pending if asked.request_id == named), None)
    if asked is not None:
        text = rest.strip()
    elif _REQUEST_ID.fullmatch(named):
        raise NotUnderstoodError(
            f"The request {named} is no longer pending. What is asked now: {ids}"
        )
    elif len(pending) == 1:
        asked = pending[0]
    else:
        raise NotUnderstoodError(
            f"Several requests are pending; begin the answer with the id of the one you mean: {ids}"
        )
    if not text:
        raise NotUnderstoodError(f"The message is empty. {accepted(asked)}")
    if asked.type == "question":
        return asked, _question(text, asked)
    match = _LEADING_WORD.fullmatch(text)
    reply = _WORDS.get(match[1].lower()) if match else None
    if match is None or reply is None:
        raise NotUnderstoodError(accepted(asked))
    reason = match[2].strip()
    if reason and reply != "reject":
        # "yes, but only the first file" is no permission for all of it.
        raise NotUnderstoodError(f"A permission has no conditions. {accepted(asked)}")
    return asked, PermissionReply(reply, reason or None)


def accepted(asked: Interrupted) -> str:
    """Say what would be understood."""
    if asked.type == "permission":
        always = ' "always" to allow it from now on,' if asked.allows_always else ""
        return (
            f'Answer "once" (or "yes") to allow it this time,{always} '
            'or "reject" (or "no"), with a reason after a colon if you like.'
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
    if text.isascii() and text.isdigit() and 0 < int(text) <= len(question.options):
        return question.options[int(text) - 1].label
    return None


def _from_data(data: JsonObject, pending: Sequence[Interrupted]) -> tuple[Interrupted, Reply]:
    """Understand a data part; its fields are those of the methods that answer."""
    named = data.get("request_id")
    if named is None and len(pending) == 1:
        named = pending[0].request_id
    asked = next((asked for asked in pending if asked.request_id == named), None)
    if asked is None:
        ids = ", ".join(asked.request_id for asked in pending)
        raise NotUnderstoodError(f'"request_id" must be one of: {ids}')
    match data:
        case {"reply": str(word)} if asked.type == "permission":
            reply = _WORDS.get(word.strip().lower())
            if reply is None:
                raise NotUnderstoodError('"reply" must be "once", "always" or "reject".')
            reason = data.get("message")
            reason = reason.strip() if isinstance(reason, str) else None
            return asked, PermissionReply(reply, reason or None)
        case {"reply": str(word)} if word.strip().lower() in _REJECTIONS:
            return asked, QuestionRejection()
        case {"answers": list(answers)} if asked.type == "question":
            found: list[list[str]] = []
            for answer in answers:
                listed = answer if isinstance(answer, list) else [None]
                texts = [value for value in listed if isinstance(value, str)]
                if len(texts) < len(listed):
                    raise NotUnderstoodError('"answers" must be a list of lists of strings.')
                found.append([text.strip() for text in texts if text.strip()])
            if len(found) > len(asked.questions):
                raise NotUnderstoodError(f"There are only {len(asked.questions)} questions.")
            return asked, QuestionReply(found)
        case _:
            wanted = (
                '{"reply": "once" | "always" | "reject"}'
                if asked.type == "permission"
                else '{"answers": [["label", …], …]}, one list for each question'
            )
            raise NotUnderstoodError(f"The data part must be {wanted}.")
