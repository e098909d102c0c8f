"""Records event streams of the installed OpenCode (``make record``), to qualify a new version.

Plays each scenario below with the scripted model in a session of its own, and writes what
``/global/event`` tells of it to ``tests/transcripts/<version>/<name>.jsonl``: one event a line,
``_t`` seconds after the first, without noise, paths rewritten. Then it compares with another
version's recordings; ``docs/opencode.md`` says what to look for.
"""

import argparse
import asyncio
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.errors import UpstreamError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import ModelRef, RequestId, SessionId
from opencode_a2a.opencode.client import Location, OpenCode1
from opencode_a2a.opencode.feed import Frames
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a.opencode.types import (
    CommandCall,
    FileInput,
    InputPart,
    OutputFormat,
    PermissionRule,
    Prompt,
    Session,
    SessionDraft,
    ShellCall,
    SubtaskInput,
    TextInput,
)
from opencode_a2a_demo.script import enclose
from opencode_a2a_demo.server import MODEL, PROVIDER, DemoModel, opencode_config

TRANSCRIPTS = Path(__file__).parent.parent / "tests" / "transcripts"
QUIET_SECONDS = 1.5
"""A scenario is over when no event came for this long after its session became idle."""
PATIENCE = 60.0
NOISE = re.compile(
    r"sync|server\.heartbeat|plugin\.|catalog\.|integration\.|reference\.|lsp\.|file\."
)
UNORDERED = frozenset(
    {
        "server.connected",
        "session.updated",
        "session.diff",
        "session.status busy",
        "message.updated user",
    }
)
"""Sent beside the turn, at a moment that differs from run to run; not compared."""
CONFIG: JsonObject = {"permission": {"bash": {"*": "allow", "whoami*": "ask"}, "doom_loop": "ask"}}
"""Rules of a session do not hold for its sub-agents, those of the configuration do."""


@dataclass
class Recorded:
    at: float
    line: JsonObject

    @property
    def label(self) -> str:
        return described(self.line)


def described(line: JsonObject) -> str:
    """Say in a few words what kind of event this is; what differs between runs is left out."""
    match line.get("payload", line):
        case {"type": "message.part.delta"}:
            return "delta"
        case {
            "type": str(kind),
            "properties": {"part": {"state": {"status": status}, "tool": tool}},
        }:
            return f"{kind} {tool} {status}"
        case {"type": str(kind), "properties": {"part": {"type": part}}}:
            return f"{kind} {part}"
        case {"type": str(kind), "properties": {"status": {"type": status}}}:
            return f"{kind} {status}"
        case {"type": str(kind), "properties": {"info": {"role": role}}}:
            return f"{kind} {role}"
        case {"type": str(kind)}:
            return kind
        case _:
            return "?"


def session_of(line: JsonObject) -> str | None:
    match line.get("payload"):
        case {"properties": {"sessionID": str(session)}}:
            return session
        case {"properties": {"info": {"id": str(session)}}} if session.startswith("ses_"):
            return session
        case {
            "properties": {"part": {"sessionID": str(session)}}
            | {"info": {"sessionID": str(session)}}
        }:
            return session  # before 1.4 nothing else names it
        case _:
            return None


class Recorder:
    """All events so far, and a way to wait for those to come."""

    def __init__(self) -> None:
        self.events: list[Recorded] = []
        self._frames = Frames()
        self._told = asyncio.Event()

    def take(self, chunk: bytes) -> None:
        now = asyncio.get_running_loop().time()
        for data in self._frames.split(chunk):
            line: JsonObject = orjson.loads(data)
            event = Recorded(now, line)
            if not NOISE.match(event.label):
                self.events.append(event)
        self._told.set()

    async def next(self, wanted: Callable[[Recorded], bool], after: int) -> int:
        """Wait for an event from a place on, and return the place behind it."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for place in range(after, len(self.events)):
                    if wanted(self.events[place]):
                        return place + 1
                after = len(self.events)
                self._told.clear()
                await self._told.wait()

    async def quiet(self) -> None:
        """Wait until there is no event for a while."""
        count = -1
        while count != len(self.events):
            count = len(self.events)
            await asyncio.sleep(QUIET_SECONDS)


@dataclass
class Stage:
    """Where a scenario is played: a session and its events."""

    opencode: OpenCode1
    recorder: Recorder
    session: Session
    workspace: Path
    place: int
    """Events before this one were waited for already."""
    start: int
    """Where the recording begins."""

    @property
    def at(self) -> Location:
        return Location(str(self.workspace))

    async def prompt(self, *replies: Json, **fields: object) -> None:
        text = enclose(self.placed(list(replies)))
        await self.send(TextInput(text=text), **fields)

    async def send(self, part: InputPart, **fields: object) -> None:
        prompt = Prompt.model_validate({"parts": [part], **fields})
        await self.opencode.prompt_async(self.session.id, prompt, at=self.at)

    def placed(self, replies: list[Json]) -> list[Json]:
        """Let a script name files in the workspace."""
        text = orjson.dumps(replies).replace(b"/workspace", str(self.workspace).encode())
        return orjson.loads(text)

    async def until(self, label: str, *, anywhere: bool = False) -> Recorded:
        """Wait for the next event with this label, of the session unless anywhere."""

        def wanted(event: Recorded) -> bool:
            ours = anywhere or session_of(event.line) == self.session.id
            return ours and event.label.startswith(label)

        self.place = await self.recorder.next(wanted, self.place)
        return self.recorder.events[self.place - 1]

    async def idle(self) -> None:
        await self.until("session.idle")

    async def begin_here(self) -> None:
        """Leave out of the recording what was only to prepare it."""
        await self.recorder.quiet()
        self.place = self.start = len(self.recorder.events)

    async def abort(self) -> None:
        await self.opencode.abort_session(self.session.id, at=self.at)

    async def asked(self, kind: Literal["permission", "question"]) -> RequestId:
        event = await self.until(f"{kind}.asked", anywhere=True)
        match event.line["payload"]:
            case {"properties": {"id": str(request)}}:
                return RequestId(request)
            case _:
                raise AssertionError("a request without an id")


Play = Callable[[Stage], Awaitable[None]]
Rule = tuple[str, str, Literal["allow", "ask", "deny"]]


@dataclass(frozen=True)
class Scenario:
    play: Play
    rules: tuple[Rule, ...] = ()


# Ways to play


def says(*replies: Json, prompts: int = 1, **fields: object) -> Play:
    """Prompt, and wait for the end."""

    async def play(stage: Stage) -> None:
        for _ in range(prompts):
            await stage.prompt(*replies, **fields)
        await stage.idle()

    return play


def permits(
    *replies: Literal["once", "always", "reject"], script: list[Json], message: str | None = None
) -> Play:
    """Prompt, and answer as many permissions."""

    async def play(stage: Stage) -> None:
        await stage.prompt(*script)
        for reply in replies:
            request = await stage.asked("permission")
            await stage.opencode.reply_permission(request, reply, message, at=stage.at)
        await stage.idle()

    return play


def answers(*labels: str) -> Play:
    """Have a question asked, and answer it; without an answer reject it."""

    async def play(stage: Stage) -> None:
        await stage.prompt(*ASKS)
        request = await stage.asked("question")
        if labels:
            await stage.opencode.reply_question(request, [list(labels)], at=stage.at)
        else:
            await stage.opencode.reject_question(request, at=stage.at)
        await stage.idle()

    return play


def aborted(at: str, *script: Json) -> Play:
    """Prompt, and abort at the first event of a kind."""

    async def play(stage: Stage) -> None:
        await stage.prompt(*script)
        await stage.until(at, anywhere=True)
        await stage.abort()

    return play


def fails(**fields: object) -> Play:
    """Send a prompt that OpenCode takes and cannot run."""

    async def play(stage: Stage) -> None:
        await stage.prompt({"say": "never"}, **fields)
        await stage.until("session.error")

    return play


def two(*first: Json, second: Json, abort: bool = False) -> Play:
    """Send a second prompt in the middle of the first."""

    async def play(stage: Stage) -> None:
        await stage.prompt(*first)
        await stage.until("message.part.updated")
        await stage.until("message.part.updated")
        await stage.prompt(second)
        await stage.until("message.updated user")
        if abort:
            await stage.abort()
        else:
            await stage.idle()

    return play


async def bad_image(stage: Stage) -> None:
    await stage.send(FileInput(mime="image/png", url="data:image/png;base64,bm9wZQ=="))
    await stage.recorder.quiet()


async def deleted(stage: Stage) -> None:
    await stage.prompt({"say": SLOW, "delay": 0.1})
    await stage.until("delta")
    await stage.opencode.delete_session(stage.session.id, at=stage.at)


async def summarized(stage: Stage) -> None:
    await stage.prompt({"say": "something to sum up"})
    await stage.idle()
    await stage.begin_here()
    model = ModelRef(PROVIDER, MODEL)
    await stage.opencode.summarize_session(stage.session.id, model, at=stage.at)


async def commanded(stage: Stage) -> None:
    call = CommandCall(command="review", arguments=enclose([{"say": "reviewed"}]))
    await stage.opencode.run_command(stage.session.id, call, at=stage.at)


async def shelled(stage: Stage) -> None:
    model = ModelRef(provider_id=PROVIDER, model_id=MODEL)
    call = ShellCall(command="echo from the shell", agent="build", model=model)
    await stage.opencode.run_shell(stage.session.id, call, at=stage.at)


async def delegated(stage: Stage) -> None:
    prompt = "do " + enclose([{"say": "sub answer"}])
    await stage.send(SubtaskInput(prompt=prompt, description="sub", agent="general"))
    await stage.idle()


async def reverted(stage: Stage) -> None:
    await stage.prompt(WRITE, {"say": "written"})
    await stage.idle()
    await stage.begin_here()
    messages = (await stage.opencode.messages(stage.session.id, at=stage.at)).items
    await stage.opencode.revert_session(stage.session.id, messages[0].info.id, at=stage.at)
    await stage.prompt({"say": "something else"})
    await stage.idle()


# What is played


def bash(command: str) -> JsonObject:
    return {"tool": "bash", "input": {"command": command, "description": "d"}}


def task(*script: Json) -> JsonObject:
    call: JsonObject = {"description": "do sub", "subagent_type": "general", "prompt": "go"}
    return {"tool": "task", "input": call, "script": list(script)}


AFTER: JsonObject = {"say": "after"}
SLOW = "slow " * 40
PATH_NEW = "/workspace/new.txt"
WRITE: JsonObject = {"tool": "write", "input": {"filePath": PATH_NEW, "content": "one\ntwo\n"}}
EDIT: JsonObject = {
    "tool": "edit",
    "input": {"filePath": PATH_NEW, "oldString": "two", "newString": "2"},
}
QUESTION: JsonObject = {
    "question": "Which color?",
    "header": "Color",
    "options": [{"label": "Red", "description": "r"}, {"label": "Blue", "description": "b"}],
}
ASKS: list[Json] = [{"tool": "question", "input": {"questions": [QUESTION]}}, AFTER]
TODOS: list[Json] = [{"content": "step one", "status": "in_progress", "priority": "high"}]
ASK_BASH: tuple[Rule, ...] = (("bash", "*", "ask"),)
SAME: list[Json] = [[bash("echo same"), bash("echo same"), bash("echo same")], [AFTER]]
SCHEMA = OutputFormat.model_validate(
    {"type": "json_schema", "schema": {"type": "object", "properties": {"n": {"type": "number"}}}}
)
LONG: JsonObject = {"usage": {"prompt": 99_000, "completion": 100}}

SCENARIOS: dict[str, Scenario] = {
    "plain-text": Scenario(says({"say": "one two three four", "delay": 0.1})),
    "reasoning-text": Scenario(says({"think": "let me think"}, {"say": "the answer"})),
    "structured-output": Scenario(
        says({"tool": "StructuredOutput", "input": {"n": 5}}, AFTER, format=SCHEMA)
    ),
    "structured-output-missing": Scenario(says({"say": "just text"}, format=SCHEMA)),
    "command": Scenario(commanded),
    "shell": Scenario(shelled),
    "subtask-part": Scenario(delegated),
    "revert": Scenario(reverted),
    # Tools
    "tool-completed": Scenario(
        says({"think": "run"}, {"say": "Running. "}, bash("echo 1; sleep 1; echo 2"), AFTER)
    ),
    "tool-error-bash-exit": Scenario(says(bash("echo bad >&2; exit 3"), AFTER)),
    "tool-error-read-missing": Scenario(
        says({"tool": "read", "input": {"filePath": "/workspace/nope.txt"}}, AFTER)
    ),
    "tool-error-unknown-tool": Scenario(says({"tool": "no_such_tool", "input": {"x": 1}}, AFTER)),
    "tool-error-bad-args": Scenario(says({"tool": "bash", "input": {"cmd": "ls"}}, AFTER)),
    "tool-error-malformed-json": Scenario(says({"tool": "bash", "raw": '{"command": "ls'}, AFTER)),
    "write-edit": Scenario(says([WRITE], [EDIT], [AFTER])),
    "todo": Scenario(says({"tool": "todowrite", "input": {"todos": TODOS}}, AFTER)),
    "doom-loop": Scenario(permits("once", script=SAME)),
    # Permissions and questions
    "permission-once": Scenario(permits("once", script=[bash("ls -la"), AFTER]), ASK_BASH),
    "permission-always": Scenario(permits("always", script=[bash("ls -la"), AFTER]), ASK_BASH),
    "permission-reject": Scenario(permits("reject", script=[bash("uname"), AFTER]), ASK_BASH),
    "permission-reject-message": Scenario(
        permits("reject", script=[bash("uname"), AFTER], message="not now"), ASK_BASH
    ),
    "permission-deny-rule": Scenario(says(bash("id"), AFTER), (("bash", "*", "deny"),)),
    "permission-deny-pattern": Scenario(says(bash("rm -rf x"), AFTER), (("bash", "rm *", "deny"),)),
    "permission-external-directory": Scenario(
        permits("once", script=[{"tool": "read", "input": {"filePath": "/workspace/../x"}}, AFTER]),
        (("external_directory", "*", "ask"),),
    ),
    "permission-two-parallel-reject-first": Scenario(
        permits("reject", script=[[bash("date"), bash("hostname")], [AFTER]]), ASK_BASH
    ),
    "permission-two-parallel-always-first": Scenario(
        permits("always", script=[[bash("sha1sum a"), bash("sha1sum b")], [AFTER]]), ASK_BASH
    ),
    "permission-abort-while-pending": Scenario(
        aborted("permission.asked", bash("uptime"), AFTER), ASK_BASH
    ),
    "question-answered": Scenario(answers("Red")),
    "question-rejected": Scenario(answers()),
    "question-abort": Scenario(aborted("question.asked", *ASKS)),
    # Sub-agents
    "subagent": Scenario(
        says(
            {"say": "delegating "},
            task({"say": "child working "}, bash("echo child"), {"say": "child result"}),
            {"say": "parent done"},
        )
    ),
    "subagent-permission": Scenario(
        permits("once", script=[task(bash("whoami"), {"say": "child result"}), AFTER])
    ),
    "subagent-abort": Scenario(aborted("delta", task({"say": SLOW, "delay": 0.1}), AFTER)),
    # Ends from outside
    "abort-mid-stream": Scenario(aborted("delta", {"think": "hmm "}, {"say": SLOW, "delay": 0.1})),
    "abort-during-tool": Scenario(
        aborted("message.part.updated bash running", bash("echo started; sleep 30"), AFTER)
    ),
    "abort-during-retry": Scenario(
        aborted("session.status retry", {"error": 429, "retry_after": 60})
    ),
    "delete-while-busy": Scenario(deleted),
    # The model fails
    "error-400": Scenario(says({"error": 400, "message": "Bad param x"})),
    "error-401": Scenario(says({"error": 401, "message": "Incorrect API key provided"})),
    "error-404-model": Scenario(says({"error": 404, "message": "The model does not exist"})),
    "error-429-retry-after": Scenario(
        says({"error": 429, "retry_after": 1, "times": 2}, {"say": "recovered"})
    ),
    "error-429-quota": Scenario(
        says({"error": 429, "code": "insufficient_quota", "times": 1}, {"say": "recovered"})
    ),
    "error-500": Scenario(says({"error": 500, "times": 1}, {"say": "recovered"})),
    "error-503-overloaded": Scenario(says({"error": 503, "times": 1}, {"say": "recovered"})),
    "error-context-length": Scenario(says({"error": "context_length", "times": 1}, AFTER)),
    "error-malformed-chunk": Scenario(says({"say": "partial "}, {"malformed": True})),
    "error-drop-before-output": Scenario(says({"drop": True, "times": 1}, AFTER)),
    "error-drop-mid-stream": Scenario(
        says(
            {"say": "partial words ", "delay": 0.1}, {"drop": True, "times": 1}, {"say": "the rest"}
        )
    ),
    "error-drop-after-tool-call": Scenario(
        says(
            [{"say": "going "}, bash("echo x"), {"wait": 1.5}, {"drop": True, "times": 1}], [AFTER]
        )
    ),
    "error-in-stream": Scenario(
        says({"say": "partial "}, {"stream_error": "exploded", "times": 1}, {"say": "rest"})
    ),
    "finish-length": Scenario(says({"say": "cut off"}, {"finish": "length"})),
    "finish-content-filter": Scenario(says({"say": "cut off"}, {"finish": "content_filter"})),
    # Several prompts, long conversations
    "compaction-summarize": Scenario(summarized),
    "compaction-auto": Scenario(says([bash("echo 1"), LONG], [AFTER])),
    "concurrent-two-prompts": Scenario(two({"say": SLOW, "delay": 0.05}, second={"say": "second"})),
    "concurrent-prompt-during-tools": Scenario(
        two([bash("sleep 2")], [bash("echo A2")], [{"say": "A"}], second={"say": "B only"})
    ),
    "concurrent-abort-with-queued": Scenario(
        two({"say": SLOW, "delay": 0.1}, second={"say": "never"}, abort=True)
    ),
    "prompt-async-three": Scenario(says({"say": "R R R ", "delay": 0.1}, prompts=3)),
    # Prompts that cannot be run
    "async-unknown-agent": Scenario(fails(agent="nobody")),
    "async-unknown-model": Scenario(fails(model=ModelRef(provider_id="none", model_id="none"))),
    "async-unknown-model-same-provider": Scenario(
        fails(model=ModelRef(provider_id=PROVIDER, model_id="none"))
    ),
    "async-bad-image": Scenario(bad_image),
}


# Recording


async def record(names: list[str], directory: Path, command: str) -> tuple[str, list[str]]:
    """Play the scenarios; return OpenCode's version and the names of those that failed."""
    base = Path(tempfile.mkdtemp(prefix="record-"))
    try:
        workspace = base / "workspace"
        workspace.mkdir()
        make_repository(workspace)
        return await _record(names, directory, command, workspace)
    finally:
        shutil.rmtree(base)


async def _record(
    names: list[str], directory: Path, command: str, workspace: Path
) -> tuple[str, list[str]]:
    failed: list[str] = []
    async with DemoModel() as model:
        managed = ManagedOpenCode(
            OpenCodeSettings(command=command, startup_timeout=90),
            os.environ,
            config={**opencode_config(model.url), **CONFIG},
            state=workspace.parent / "state",
            directory=workspace,
        )
        async with (
            managed,
            OpenCode1(managed.url, password=managed.password) as opencode,
        ):
            recorder = Recorder()
            listening = asyncio.create_task(opencode.events(recorder.take))
            await recorder.next(lambda event: event.label == "server.connected", 0)
            # The event of the first session of a directory comes before anybody can hear it.
            await opencode.create_session(SessionDraft(title="first"), at=Location(str(workspace)))
            for name in names:
                lines = await _play(name, opencode, recorder, workspace)
                if lines is None:
                    failed.append(name)
                else:
                    write(directory / managed.version / f"{name}.jsonl", lines)
            listening.cancel()
            await asyncio.wait([listening])
            return managed.version, failed


async def _play(
    name: str, opencode: OpenCode1, recorder: Recorder, workspace: Path
) -> list[bytes] | None:
    scenario, first = SCENARIOS[name], len(recorder.events)
    rules = [PermissionRule(permission=p, pattern=w, action=a) for p, w, a in scenario.rules]
    draft = SessionDraft(title=name, permission=rules or None)
    session = await opencode.create_session(draft, at=Location(str(workspace)))
    stage = Stage(opencode, recorder, session, workspace, first, first)
    try:
        await scenario.play(stage)
        await recorder.quiet()
    except (TimeoutError, UpstreamError) as error:
        print(f"failed    {name}: {error!r}")
        return None
    return list(told_of(session.id, recorder.events[stage.start :], workspace))


def told_of(session: SessionId, events: list[Recorded], workspace: Path) -> Iterator[bytes]:
    """Yield the lines about a session and its descendants."""
    family = {str(session)}
    for event in events:
        match event.line.get("payload"):
            case {"properties": {"info": {"parentID": str(parent), "id": str(child)}}}:
                family |= {child} if parent in family else set[str]()
            case _:
                pass
        if session_of(event.line) in family:
            line = orjson.dumps({"_t": round(event.at - events[0].at, 3), **event.line})
            yield rewritten(line, workspace)


def rewritten(line: bytes, workspace: Path) -> bytes:
    """Return a line without the machine's own paths."""
    line = line.replace(str(workspace).encode(), b"/workspace")
    return line.replace(str(workspace.parent).encode(), b"/outside")


def write(path: Path, lines: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    print(f"recorded  {path.stem}: {len(lines)} events")


def make_repository(directory: Path) -> None:
    """Make a git repository with one commit: OpenCode keeps track of changes only in one."""
    (directory / "hello.txt").write_text("hello\n")
    (directory.parent / "x").write_text("outside\n")
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "First"]):
        subprocess.run(["git", *command], cwd=directory, check=True)  # noqa: S603, S607


# Comparing


def load(path: Path) -> list[JsonObject]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def sequence(lines: list[JsonObject]) -> list[str]:
    """Return the kinds of events in order; a row of the same kind counts once."""
    labels = [described(line) for line in lines]
    labels = [label for label in labels if not (NOISE.match(label) or label in UNORDERED)]
    if labels[:1] == ["session.created"]:  # some recordings begin later
        del labels[0]
    return [label for at, label in enumerate(labels) if at == 0 or labels[at - 1] != label]


def fields(lines: list[JsonObject]) -> set[str]:
    """Return every field of every kind of event, by its path."""
    return {f"{described(line).split(' ')[0]}: {path}" for line in lines for path in _paths(line)}


def _paths(value: Json, path: str = "") -> Iterator[str]:
    match value:
        case {"payload": {"properties": properties}}:
            yield from _paths(properties)
        case {"properties": properties}:
            yield from _paths(properties)
        case dict():
            for key, inner in value.items():
                if path not in (".part.state.input", ".part.state.metadata", ".part.metadata"):
                    yield f"{path}.{key}"
                    yield from _paths(inner, f"{path}.{key}")
        case [first, *_]:
            yield from _paths(first, f"{path}[]")
        case _:
            pass


def compare(old: Path, new: Path) -> int:
    """Print how two versions' recordings differ; return how many scenarios do."""
    names = sorted(
        {path.stem for path in old.glob("*.jsonl")} & {p.stem for p in new.glob("*.jsonl")}
    )
    before: list[JsonObject] = []
    after: list[JsonObject] = []
    different = 0
    for name in names:
        was, now = load(old / f"{name}.jsonl"), load(new / f"{name}.jsonl")
        before += was
        after += now
        delta = list(difflib.unified_diff(sequence(was), sequence(now), lineterm="", n=1))[2:]
        different += bool(delta)
        print(f"{'different' if delta else 'same':<9} {name}", *delta, sep="\n    ")
    for title, paths in (
        ("fields no longer seen", fields(before) - fields(after)),
        ("fields not seen before", fields(after) - fields(before)),
    ):
        print(f"\n{title}:", *sorted(paths), sep="\n    ")
    print(f"\n{len(names)} scenarios compared, {different} with another sequence of events")
    return different


def earlier(version: str) -> Path | None:
    """Return the recordings of the newest other version."""
    others = [path for path in TRANSCRIPTS.iterdir() if path.is_dir() and path.name != version]
    return max(
        others, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)], default=None
    )


def installed(command: str) -> str:
    answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    return answer.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scenarios; all of them by default")
    parser.add_argument("--force", action="store_true", help="write over what is there")
    parser.add_argument("--into", type=Path, default=TRANSCRIPTS, help="another place to write to")
    parser.add_argument("--against", help="version to compare with; by default the newest other")
    parser.add_argument("--command", default="opencode", help="OpenCode's program")
    given = parser.parse_args()
    if unknown := set(given.names) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    here: Path = given.into / installed(given.command)
    kept = [] if given.force else [n for n in SCENARIOS if (here / f"{n}.jsonl").exists()]
    names = [name for name in given.names or SCENARIOS if name not in kept]
    if kept:
        print(f"{len(kept)} recordings of {here.name} are there and kept; --force records anew")
    failed: list[str] = []
    if names:
        _, failed = asyncio.run(record(names, given.into, given.command))
    other = TRANSCRIPTS / given.against if given.against else earlier(here.name)
    if other is not None and here.exists() and other != here:
        compare(other, here)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
