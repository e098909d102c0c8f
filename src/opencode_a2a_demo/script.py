"""What the scripted model does, and how far it has come.

A script stands in the user's text between ``@@`` signs and is a JSON list of actions
(docs/demo-model.md). ``server`` plays it. Everything here is pure: which reply comes next is
read from the messages of the request alone.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from opencode_a2a_demo.chat import CallId, ChatMessage, FinishReason, Tokens

_START = re.compile(r"@@(?:(?=\[\s*[\[{])|script:(?P<name>[\w-]{1,100})@@)")
_END = re.compile(r"\s*@@")
_WORDS = re.compile(r"\s*\S+\s?|\s+")
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)
"""What OpenCode adds to a prompt, such as the rules of its plan agent."""
_NOTES = (
    "Continue if you have next steps",
    "The previous request exceeded the provider's size limit",
    "Summarize the task tool output above",
    "What did we do so far?",
    "Attached media from tool result",
    "<shell id=",
    "<subagent id=",
)
"""How the texts begin that OpenCode itself adds in the user's name during a turn."""


class ScriptError(ValueError):
    """The script cannot be read; the text says why."""


class Action(BaseModel):
    """One thing to do. With ``times`` it is done in that many requests, and then left out."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    times: PositiveInt | None = None


class Spoken(Action):
    delay: Annotated[float, Field(ge=0, le=60)] = 0
    chunk: PositiveInt | None = None
    repeat: Annotated[int, Field(ge=1, le=1_000_000)] = 1

    def pieces(self, text: str) -> Iterator[str]:
        """Words, or pieces of ``chunk`` characters; together they are the text."""
        for _ in range(self.repeat):
            if self.chunk is None:
                yield from _WORDS.findall(text)
            else:
                yield from (text[at : at + self.chunk] for at in range(0, len(text), self.chunk))


class Say(Spoken):
    say: str


class Think(Spoken):
    think: str


class Call(Action):
    """Call a tool; ``raw`` replaces the arguments' JSON, ``script`` is put into the prompt."""

    tool: str
    input: dict[str, JsonValue] = {}
    raw: str | None = None
    script: JsonValue = None

    @property
    def arguments(self) -> str:
        if self.raw is not None:
            return self.raw
        if self.script is None:
            return json.dumps(self.input)
        prompt = f"{self.input.get('prompt', '')} {enclose(self.script)}".lstrip()
        return json.dumps({**self.input, "prompt": prompt})


OTHERWISE = {"bash": "shell", "task": "subagent", "filePath": "path", "subagent_type": "agent"}
"""Tools and arguments that OpenCode 2 calls otherwise than OpenCode 1."""


def as_offered(call: Call, offered: frozenset[str]) -> Call:
    """Return a call as OpenCode 2 wants it, if that is what offers the tools."""
    if "shell" not in offered and "subagent" not in offered:
        return call
    given = {OTHERWISE.get(name, name): value for name, value in call.input.items()}
    return call.model_copy(update={"tool": OTHERWISE.get(call.tool, call.tool), "input": given})


class Usage(Action):
    usage: Tokens


class Finish(Action):
    """End with this reason; None leaves the reason out."""

    finish: FinishReason | None


class Fail(Action):
    """Answer with an HTTP error instead of a stream."""

    error: Annotated[int, Field(ge=400, le=599)] | Literal["context_length"]
    message: str | None = None
    type: str | None = None
    code: str | None = None
    retry_after: str | int | None = None


class Drop(Action):
    """Close the connection."""

    drop: Literal[True]


class StreamError(Action):
    """Send an error object inside the stream, then end it."""

    stream_error: str


class Malformed(Action):
    """Send a chunk that is not JSON."""

    malformed: Literal[True]


class Wait(Action):
    """Be silent for some seconds; before any output the response has not even begun."""

    wait: Annotated[float, Field(ge=0, le=86_400)]


class Hang(Action):
    """Be silent until the client goes away."""

    hang: Literal[True]


class Gate(Action):
    """Be silent until the gate of this name is opened."""

    gate: Annotated[str, Field(pattern=r"^[\w.-]{1,100}$")]


_KINDS = (Say, Think, Call, Usage, Finish, Fail, Drop, StreamError, Malformed, Wait, Hang, Gate)
_VERBS: Mapping[str, type[Action]] = {next(iter(kind.__annotations__)): kind for kind in _KINDS}
"""The first field of an action is its verb."""
_Item = dict[str, JsonValue]
_ITEMS = TypeAdapter(list[_Item | list[_Item]], config=ConfigDict(defer_build=True))
_DECODER = json.JSONDecoder()
Reply = tuple[Action, ...]
"""What the model does in answer to one request."""


@dataclass(frozen=True, slots=True)
class Script:
    """Replies in order, and what tells this script from others."""

    replies: tuple[Reply, ...]
    digest: str

    def reply(self, place: int) -> Reply:
        return self.replies[place] if place < len(self.replies) else (Say(say="(end of script)"),)


def enclose(script: JsonValue) -> str:
    """The script as it stands in a text."""
    return f"@@{json.dumps(script)}@@"


def digest_of(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


def find_script(text: str, folder: Path | None = None) -> Script | None:
    """Read the scripts in a text as one; ``@@script:name@@`` is ``name.json`` in the folder."""
    replies: list[Reply] = []
    sources: list[str] = []
    at = 0
    while found := _START.search(text, at):
        if name := found["name"]:
            if folder is None:
                raise ScriptError(f"there is no script {name!r}: the model has no script folder")
            try:
                # The pattern of names has no dot and no slash: it cannot leave the folder.
                source = (folder / f"{name}.json").read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ScriptError(f"there is no script {name!r} in the script folder") from error
            at = found.end()
        else:
            try:
                _, end = _DECODER.raw_decode(text, found.end())
            except (ValueError, RecursionError) as error:
                raise ScriptError(f"the script is not JSON: {error}") from error
            closing = _END.match(text, end)
            if closing is None:
                raise ScriptError("the script is not closed: @@ is missing behind it")
            source, at = text[found.end() : end], closing.end()
        replies += parse_replies(source)
        sources.append(source)
    return Script(tuple(replies), digest_of("\n".join(sources))) if replies else None


def parse_replies(source: str) -> list[Reply]:
    """A reply is an inner list; it also ends where text, thought or an error follows a call."""
    try:
        items = _ITEMS.validate_json(source)
    except ValidationError as error:
        raise ScriptError(reason_of(error)) from error
    groups = [item if isinstance(item, list) else [item] for item in items]
    if not any(isinstance(item, list) for item in items):
        groups = [[item for group in groups for item in group]]
    replies: list[list[Action]] = []
    for group in groups:
        replies.append([])
        for item in group:
            verb = next((verb for verb in _VERBS if verb in item), None)
            if verb is None:
                raise ScriptError(f"an action has none of the verbs {', '.join(_VERBS)}")
            try:
                action, done = _VERBS[verb].model_validate(item), replies[-1]
            except ValidationError as error:
                raise ScriptError(f"in {verb!r}: {reason_of(error)}") from error
            if isinstance(action, Say | Think | Fail) and any(isinstance(a, Call) for a in done):
                replies.append([])
                done = replies[-1]
            if isinstance(action, Fail) and any(isinstance(a, Spoken) for a in done):
                raise ScriptError("an HTTP error cannot follow output: use stream_error or drop")
            done.append(action)
    return [tuple(reply) for reply in replies]


def reason_of(error: ValidationError) -> str:
    """Say in one line where the input is wrong, and how."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}".removeprefix(": ")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the user wants, and what came after it."""

    text: str
    answers: Sequence[ChatMessage]
    continued: bool
    """OpenCode itself spoke last in the user's name."""


def last_prompt(messages: Sequence[ChatMessage]) -> Prompt:
    continued = False
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].role != "user":
            continue
        text = _REMINDER.sub("", messages[at].text).rstrip()
        if text and not text.startswith(_NOTES):
            return Prompt(text, messages[at + 1 :], continued)
        continued = True
    return Prompt("", (), continued)


def place_after(answers: Sequence[ChatMessage], digest: str) -> int:
    """How many replies have been given: calls say it themselves, other answers count one each."""
    place = 0
    for message in answers:
        if message.role != "assistant" or message.empty:
            continue
        if not message.tool_calls:
            place += 1
            continue
        ids = (CallId.parse(call.id) for call in message.tool_calls)
        place = next((i.reply + 1 for i in ids if i and i.digest == digest), place)
    return place
