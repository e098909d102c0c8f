"""What a server of OpenCode 2 offers, by the contract that it serves itself.

Releases of 2.x have renamed paths and fields within days, and their versions do not tell. So the
driver asks the contract for every name that is known to differ. Pure.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, get_args

from pydantic import AliasChoices, BaseModel

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.jsonguard import as_object
from opencode_a2a.opencode.v2.messages import Message2

Endpoint = tuple[str, str]
"""A method in lower case and a path, whose parameters are written ``{}``."""
Names = tuple[Endpoint, ...]
"""What one call is called in different releases, the newest first."""

SESSION: Final = "/api/session/{}"
RENAME: Final[Names] = ("patch", SESSION), ("post", f"{SESSION}/rename")
RULES: Final[Names] = ("patch", SESSION), ("post", f"{SESSION}/permissions")
UNREVERT: Final[Names] = ("delete", f"{SESSION}/revert"), ("post", f"{SESSION}/revert/clear")
INBOX: Final[Names] = ("get", f"{SESSION}/inbox"), ("get", f"{SESSION}/pending")
TAKE_BACK: Final[Names] = (
    ("delete", f"{SESSION}/inbox/{{}}"),
    ("delete", f"{SESSION}/pending/{{}}"),
)
SHELLS: Final = "get", "/api/shell"
END_SHELL: Final = "delete", "/api/shell/{}"
OUTPUT: Final = "get", "/api/shell/{}/output"
UNINSTRUCT: Final = "delete", f"{SESSION}/instructions/entries/{{}}"
DIFF: Final = "get", f"{SESSION}/diff"
DEFAULT_MODEL: Final = "get", "/api/model/default"
CONFIG: Final = "get", "/api/config"
VCS: Final = "get", "/api/vcs"
REPLY: Final = "post", f"{SESSION}/permission/{{}}/reply"
NEEDED: Final[tuple[Names, ...]] = (
    (("post", "/api/session"),),
    (("get", "/api/session"),),
    (("get", "/api/session/active"),),
    (("get", SESSION),),
    (("delete", SESSION),),
    (("get", f"{SESSION}/message"),),
    (("post", f"{SESSION}/prompt"),),
    (("post", f"{SESSION}/wait"),),
    (("post", f"{SESSION}/interrupt"),),
    (("post", f"{SESSION}/agent"),),
    (("post", f"{SESSION}/model"),),
    (REPLY,),
    (("post", f"{SESSION}/form/{{}}/reply"),),
    (("post", f"{SESSION}/form/{{}}/cancel"),),
    (("get", "/api/permission/request"),),
    (("get", "/api/form/request"),),
    (("get", "/api/event"),),
    (("get", "/api/agent"),),
    (("get", "/api/location"),),
)
"""Calls without which no turn can run, or no session be kept. A server that lacks one is not used
at all, so that what one feature alone needs does not stand here."""
OPTIONAL: Final[tuple[tuple[Names, str], ...]] = (
    ((SHELLS,), "commands in the background are not waited for, and a cancel does not end them"),
    ((END_SHELL,), "a cancel does not end commands in the background"),
    ((OUTPUT,), "the output of a command is told when it has ended"),
    (INBOX, "a cancel takes no waiting prompt back, and the next turn begins with it"),
    (TAKE_BACK, "a cancel takes no waiting prompt back, and the next turn begins with it"),
    ((UNINSTRUCT,), "the system text of a message stays for later ones"),
    ((DIFF,), "of the files that a turn changed, only those of edit and patch are told"),
    ((DEFAULT_MODEL,), "a model that a message names stays for later ones"),
    ((CONFIG,), "a turn with narrow rights that names no agent is run by build"),
    ((VCS,), "the branch of the working tree is not told"),
)
"""Calls that are left out where a server lacks them (``has``), and what is off then. Any other call
is refused by ``Calls2.send``."""
UNTOLD: Final = frozenset({"error.status", "content.state.error.status"})
"""Fields that are read where a release has them; previews have the status in the words."""
_METHODS: Final = ("get", "post", "put", "patch", "delete")


@dataclass(frozen=True, slots=True)
class Contract:
    """What a server says that it offers."""

    endpoints: Mapping[Endpoint, frozenset[str]]
    """Each with the fields that the body of a request may have."""
    unnamed: tuple[str, ...] = ()
    """The fields of stored messages that are read, but that the server does not name. If it calls
    them otherwise, they have their defaults: a turn would cost nothing."""

    @classmethod
    def of(cls, document: JsonObject) -> Self:
        """Read an OpenAPI document; what cannot be read is not there."""
        schemas = as_object(as_object(document.get("components")).get("schemas"))
        paths = as_object(document.get("paths"))
        listing = as_object(paths.get("/api/session/{sessionID}/message")).get("get")
        answer = as_object(as_object(as_object(listing).get("responses")).get("200"))
        page = _properties(_schema(answer), schemas)
        messages = [schema for name, schema in page if name == "data"]
        unnamed = [one for one in _unnamed(Message2, messages, schemas) if one not in UNTOLD]
        return cls(dict(_endpoints(paths, schemas)), tuple(unnamed))

    def has(self, method: str, path: str) -> bool:
        return (method, path) in self.endpoints

    def takes(self, method: str, path: str, field: str) -> bool:
        """Whether the body of a call may have a field."""
        return field in self.endpoints.get((method, path), ())

    def first(self, names: Names, field: str | None = None) -> Endpoint:
        """Return the first of the names that the server has; with ``field``, that takes it.

        If it has none of them, return the last: a call by that name says what is missing.
        """
        known = (one for one in names if one in self.endpoints)
        return next((one for one in known if field is None or self.takes(*one, field)), names[-1])

    def serves(self, method: str, path: str) -> bool:
        """Whether the server has a call at a path in which the parameters have values."""
        asked = path.split("/")
        return any(one == method and _leads(name.split("/"), asked) for one, name in self.endpoints)

    @property
    def finish_unnamed(self) -> bool:
        """Whether the server may call the reason why an answer ended otherwise than ``finish``."""
        return "finish" in self.unnamed

    @property
    def missing(self) -> list[str]:
        """The calls that turns need and the server does not have."""
        called = [self.first(names) for names in NEEDED]
        return [f"{method.upper()} {path}" for method, path in called if not self.has(method, path)]

    @property
    def lacking(self) -> tuple[str, ...]:
        """The calls that are left out because the server does not have them, and what is off."""
        called = [(*self.first(names), off) for names, off in OPTIONAL]
        return tuple(
            f"{method.upper()} {path} ({off})"
            for method, path, off in called
            if not self.has(method, path)
        )


def _leads(name: Sequence[str], asked: Sequence[str]) -> bool:
    """Whether a path with parameters stands for another; ``*`` at its end stands for any rest."""
    if name[-1] == "*":
        return [*name[:-1]] == [*asked[: len(name) - 1]]
    return len(name) == len(asked) and all(
        one in ("{}", step) for one, step in zip(name, asked, strict=True)
    )


def _endpoints(paths: JsonObject, schemas: JsonObject) -> Iterator[tuple[Endpoint, frozenset[str]]]:
    for path, calls in paths.items():
        name = re.sub(r"\{[^}]*\}", "{}", path)
        for method, call in as_object(calls).items():
            if method in _METHODS:
                body = _schema(as_object(as_object(call).get("requestBody")))
                fields = frozenset(field for field, _ in _properties(body, schemas))
                yield (method, name), fields


def _schema(content: JsonObject) -> Json:
    """Return the schema of the body of a request or of a response."""
    return as_object(as_object(content.get("content")).get("application/json")).get("schema")


def _properties(
    schema: Json, schemas: JsonObject, within: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Json]]:
    """Yield the fields of an object, or of the entries of a list, with their schemas."""
    given = as_object(schema)
    named = given.get("$ref")
    if isinstance(named, str):
        name = named.rpartition("/")[2]
        if name not in within:
            yield from _properties(schemas.get(name), schemas, within | {name})
        return
    yield from as_object(given.get("properties")).items()
    for key in ("anyOf", "oneOf", "allOf"):
        options = given.get(key)
        for option in options if isinstance(options, list) else ():
            yield from _properties(option, schemas, within)
    yield from _properties(given["items"], schemas, within) if "items" in given else ()


def _unnamed(
    model: type[BaseModel], described: Iterable[Json], schemas: JsonObject, path: str = ""
) -> Iterator[str]:
    """Yield the fields of a model that no schema names. Without any named field, none is missed."""
    named: dict[str, list[Json]] = {}
    for one in described:
        for name, schema in _properties(one, schemas):
            named.setdefault(name, []).append(schema)
    for name, field in model.model_fields.items() if named else ():
        alias = field.validation_alias or name
        spellings = alias.choices if isinstance(alias, AliasChoices) else [alias]
        known = [one for spelling in spellings for one in named.get(str(spelling), ())]
        called = f"{path}{spellings[0]}"
        if not known:
            yield called
        for inner in _models(field.annotation):
            yield from _unnamed(inner, known, schemas, f"{called}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that the type of a field consists of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models(one)
