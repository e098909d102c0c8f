"""Reads a caller's message: the prompt that its parts make, its metadata, its output modes.

``operations`` does so before it submits the message, so that one that OpenCode cannot handle is
refused before anything has happened. ``media`` knows which files OpenCode can handle.
"""

import base64
from collections.abc import Iterable, Iterator
from datetime import datetime
from urllib.parse import urlsplit

import orjson

from opencode_a2a.errors import (
    ContentTypeNotSupportedError,
    InvalidParamsError,
    UnsupportedOperationError,
    Violation,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import ModelRef, Principal
from opencode_a2a.media import (
    INPUT_MODES,
    OUTPUT_MODES,
    UnfitError,
    accepts,
    fit_file,
    is_json,
    is_textual,
)
from opencode_a2a.messages import (
    Delivery,
    Message,
    Part,
    PromptPart,
    Routing,
)
from opencode_a2a.net.egress import Fetch, Fetched, FetchResult, TooManyFilesError, lookups_of
from opencode_a2a.printable import visible_line
from opencode_a2a.rights import FULL, PROFILES, Rights
from opencode_a2a.schemas import SchemaError, check_schema
from opencode_a2a.server.card import AGENT_SKILL, COMMAND_SKILL
from opencode_a2a.validation import listed

# --- parts ------------------------------------------------------------------------------------


class _UnreadableError(UnfitError):
    """The part is of a supported kind, but its content cannot be read."""


async def read_prompt(
    message: Message, fetch: Fetch, principal: Principal
) -> tuple[PromptPart, ...]:
    """Return the prompt that a message makes; raise an error that lists all unusable parts."""
    urls = [part.url for part in message.parts if part.url and _unusable(part.url) is None]
    fetched: list[FetchResult] = []
    try:
        if urls:
            with lookups_of(principal):
                fetched = await fetch(urls)
    except TooManyFilesError as error:
        raise InvalidParamsError.of("message.parts", str(error)) from None
    files = iter(fetched)
    parts: list[PromptPart] = []
    refused: list[tuple[Violation, UnfitError]] = []
    for index, part in enumerate(message.parts):
        declared = (part.media_type or "").partition(";")[0].strip().lower()
        try:
            if part.kind == "text":
                if declared and not is_textual(declared):
                    raise UnfitError(
                        f"is text, but has the media type {declared[:64]}; name a textual one"
                    )
                parts.append(PromptPart(text=part.text))
            elif part.kind == "data":
                if declared and not is_json(declared):
                    raise UnfitError(
                        f"is data, but has the media type {declared[:64]}; use application/json"
                    )
                name = f" {part.filename}" if part.filename else ""
                text = orjson.dumps(part.data, option=orjson.OPT_INDENT_2).decode()
                parts.append(PromptPart(text=f"Structured data{name} (JSON):\n{text}"))
            elif part.kind == "raw":
                content = base64.b64decode(part.raw or "")
                parts.append(fit_file(content, part.media_type, part.filename))
            else:
                parts.append(_fetched_part(part, files))
        except UnfitError as error:
            name = f"({visible_line(part.filename[:128])}) " if part.filename else ""
            refused.append((Violation(f"message.parts[{index}]", f"{name}{error}"), error))
    if refused:
        violations = tuple(violation for violation, _ in refused)
        if all(isinstance(error, _UnreadableError) for _, error in refused):
            raise InvalidParamsError(listed(violations), violations=violations)
        raise ContentTypeNotSupportedError(
            listed(violations),
            violations=violations,
            supported_media_types=[*INPUT_MODES, "text/*"],
        )
    if not any(part.data or (part.text or "").strip() for part in parts):
        text = "must hold something other than blank text"
        raise InvalidParamsError.of("message.parts", text, "The message is blank")
    return tuple(parts)


def _unusable(url: str) -> UnfitError | None:
    """Return why a URL cannot be fetched, without trying it; None if it may be."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return _UnreadableError("has a malformed URL")
    if parts.scheme.lower() in ("http", "https") and parts.hostname:
        return None
    return UnfitError("has a URL that is not http or https; send the file itself as bytes")


def _fetched_part(part: Part, files: Iterator[FetchResult]) -> PromptPart:
    """Return a part that is a URL as the file behind it: the next one, if it could be fetched."""
    if (unusable := _unusable(part.url or "")) is not None:
        raise unusable
    if not isinstance(file := next(files), Fetched):
        raise _UnreadableError(f"has a URL that cannot be used: {file}")
    name = part.filename or urlsplit(part.url or "").path.rpartition("/")[2] or None
    return fit_file(file.data, part.media_type or file.media_type, name)


# --- metadata ---------------------------------------------------------------------------------


def read_metadata(
    params: JsonObject | None, message: JsonObject | None
) -> tuple[Routing, Delivery | None, int | None]:
    """Return how to run the turn, how to deliver to a running one, and which sign-in is meant.

    The metadata of the params win over those of the message.
    """
    sources = _Sources(("metadata", params), ("message.metadata", message))
    routing = Routing(
        session_id=sources.text("shared", "session", "id"),
        directory=sources.text("opencode", "directory"),
        workspace_id=sources.text("opencode", "workspace", "id"),
        model=sources.model(),
        agent=(sources.text("opencode", "agent") or "").removeprefix(AGENT_SKILL) or None,
        command=(sources.text("opencode", "command") or "").removeprefix(COMMAND_SKILL) or None,
        rights=sources.rights(),
        output_schema=sources.output_schema(),
        plan=sources.flag("opencode", "plan"),
        new_task=sources.flag("opencode", "new_task"),
    )
    delivery, sign_in = sources.delivery(), sources.sign_in()
    if sources.wrong:
        raise InvalidParamsError(
            f"Invalid metadata: {listed(sources.wrong)}", violations=tuple(sources.wrong)
        )
    return routing, delivery, sign_in


class _Sources:
    """Reads metadata from the params and the message, in order, and collects violations."""

    def __init__(self, *places: tuple[str, JsonObject | None]) -> None:
        self._places = [(name, value) for name, value in places if value]
        self.wrong: list[Violation] = []

    def text(self, *path: str) -> str | None:
        found = (self._text_at(name, value, *path) for name, value in self._places)
        return next(filter(None, found), None)

    def flag(self, *path: str) -> bool:
        for name, value in self._places:
            place, found = self._at(name, value, *path)
            if isinstance(found, bool):
                return found
            if found is not None:
                self._report(place, "must be true or false")
        return False

    def delivery(self) -> Delivery | None:
        match self.text("shared", "delivery"):
            case None | "steer" | "queue" | "interrupt" as delivery:
                return delivery
            case _:
                text = "must be steer, queue or interrupt"
                return self._report("metadata.shared.delivery", text)

    def sign_in(self) -> int | None:
        """Return the sign-in that the message is about, by since when the task waits for it."""
        text = self.text("opencode", "sign_in")
        try:
            at = text and datetime.fromisoformat(text)
        except ValueError:
            at = None
        if text and not (at and at.tzinfo):
            wanted = "must be the timestamp of the status that asks for a sign-in"
            return self._report("metadata.opencode.sign_in", wanted)
        return round(at.timestamp() * 1000) if at else None

    def rights(self) -> Rights:
        """Return the rights that both places leave: metadata can only narrow them."""
        rights = FULL
        for name, value in self._places:
            profile = self._text_at(name, value, "opencode", "profile")
            if profile is None:
                continue
            if profile in PROFILES:
                rights &= PROFILES[profile]
            else:
                known = ", ".join(PROFILES)
                self._report(f"{name}.opencode.profile", f"must be one of {known}")
        return rights

    def output_schema(self) -> JsonObject | None:
        """Return the schema that the answer has to fit, under our name or OpenCode's."""
        for name, value in self._places:
            place, schema = self._at(name, value, "shared", "output", "schema")
            if schema is None:
                kind = self._text_at(name, value, "opencode", "format", "type")
                place, schema = self._at(name, value, "opencode", "format", "schema")
                if kind not in (None, "text", "json_schema"):
                    self._report(f"{name}.opencode.format.type", "must be text or json_schema")
                elif (kind == "json_schema") != (schema is not None):
                    text = "is required if, and only if, the type is json_schema"
                    self._report(place, text)
            if schema is None:
                continue
            if not isinstance(schema, dict):
                return self._report(place, "must be a JSON schema: an object")
            try:
                check_schema(schema)
            except SchemaError as error:
                return self._report(".".join((place, *map(str, error.path))), str(error))
            return schema
        return None

    def model(self) -> ModelRef | None:
        for name, value in self._places:
            provider = self._text_at(name, value, "shared", "model", "providerID")
            model = self._text_at(name, value, "shared", "model", "modelID")
            if provider and model:
                return ModelRef(provider, model)
            if provider or model:
                missing = "modelID" if provider else "providerID"
                self._report(f"{name}.shared.model.{missing}", "is required: a model is a pair")
                return None
        return None

    def _text_at(self, name: str, value: Json, *path: str) -> str | None:
        name, value = self._at(name, value, *path)
        if value is not None and not isinstance(value, str):
            return self._report(name, "must be a string")
        return (value or "").strip() or None

    def _at(self, name: str, value: Json, *path: str) -> tuple[str, Json]:
        """Return the full name of a field, and its value or None."""
        for step in path:
            if not isinstance(value, dict):
                self._report(name, "must be an object")
                return name, None
            name, value = f"{name}.{step}", value.get(step)
            if value is None:
                return name, None
        return name, value

    def _report(self, field: str, description: str) -> None:
        violation = Violation(field, description)
        if violation not in self.wrong:
            self.wrong.append(violation)


# --- output modes -----------------------------------------------------------------------------


def read_output_modes(accepted: Iterable[str]) -> tuple[str, ...] | None:
    """Return the media types that the caller accepts, sorted; None if every type is accepted.

    Whoever accepts one of the card's types is answered, in plain text even if that is not among
    them: CrewAI lists JSON alone, and reads text.
    """
    plain = (mode.partition(";")[0].strip().lower() for mode in accepted)
    # Older clients name the kinds of parts instead of media types.
    known = {"*": "*/*", "text": "text/plain", "data": "application/json"}
    modes = sorted({known.get(mode, mode) for mode in plain} - {""})
    if not modes or "*/*" in modes:
        return None
    if not any(accepts(modes, answered) for answered in OUTPUT_MODES):
        raise UnsupportedOperationError(
            "The agent answers in none of these types: acceptedOutputModes must hold text/plain, "
            "or another type of the card",
            accepted_output_modes=list(modes),
            required_output_modes=["text/plain"],
            supported_output_modes=list(OUTPUT_MODES),
        )
    return tuple(modes)
