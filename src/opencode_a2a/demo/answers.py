"""What the demo model answers when no script tells it: a few requests are recognised.

``server`` asks for these; they are scripts like any other, so the tools they call are run by
OpenCode and the summaries quote real results.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from opencode_a2a.demo.chat import ChatMessage
from opencode_a2a.demo.script import Action, Call, Reply, Say, Script, Think, digest_of

RESULT = "{{result}}"
"""Stands for the last tool result in what is said."""
_PACE = 0.015
_LOOK_AT = 2000
_TITLE_PROMPT = "You are a title generator"
_SUMMARY_PROMPT = "You are a context summarization agent"
_QUOTED = re.compile(r"[\"'`“]([^\"'`”]+)[\"'`”]")
_FILE = r"[`'\"]?(?P<file>[\w./-]*[\w-]\.\w+|README|LICENSE|Makefile|Dockerfile)\b"
_REAL_MODEL = (
    "To get a real model, configure a provider in OpenCode (for example with an API key such as "
    "`ANTHROPIC_API_KEY` or `OPENAI_API_KEY`, or `opencode auth login`) and start without `--demo`."
)
_RUN_TESTS = (
    "if grep -qs '^test:' Makefile; then make test; "
    "elif [ -f package.json ]; then npm test; "
    "elif [ -f go.mod ]; then go test ./...; "
    "elif ls tests test_*.py >/dev/null 2>&1; then python3 -m pytest -q; "
    "else echo 'no tests found here'; fi"
)

Build = Callable[[str, re.Match[str]], Sequence[Reply]]


@dataclass(frozen=True, slots=True)
class Recognised:
    """A kind of request, the tool that it takes, and the replies to it."""

    pattern: re.Pattern[str]
    tool: str
    build: Build


def _say(text: str) -> Say:
    return Say(say=text, delay=_PACE)


def _use(thought: str, tool: str, given: dict[str, JsonValue], summary: str) -> list[Reply]:
    first: tuple[Action, ...] = (Think(think=thought, delay=_PACE), Call(tool=tool, input=given))
    return [
        first,
        (_say(f"{summary}\n\n```\n{RESULT}\n```\n\n(I am the demo model: scripted, no AI.)"),),
    ]


def _list_files(text: str, found: re.Match[str]) -> list[Reply]:
    thought = "The user wants to see the files. A shell command shows them."
    given: dict[str, JsonValue] = {"command": "ls -la", "description": "Lists the files"}
    return _use(thought, "bash", given, "These are the files here:")


def _run_tests(text: str, found: re.Match[str]) -> list[Reply]:
    thought = "The user wants the tests run. I look which kind of project this is."
    given: dict[str, JsonValue] = {"command": _RUN_TESTS, "description": "Runs the tests"}
    return _use(thought, "bash", given, "I ran the tests. The output was:")


def _write_file(text: str, found: re.Match[str]) -> list[Reply]:
    quoted = [part for part in _QUOTED.findall(text) if part != found["file"]]
    content = quoted[0] if quoted else "Written by the demo model."
    thought = f"The user wants a file {found['file']}."
    given: dict[str, JsonValue] = {"filePath": found["file"], "content": f"{content}\n"}
    return _use(thought, "write", given, f"I wrote {found['file']}:")


def _read_file(text: str, found: re.Match[str]) -> list[Reply]:
    thought = f"The user wants to see {found['file']}. I read it."
    return _use(thought, "read", {"filePath": found["file"]}, f"This is {found['file']}:")


def _ask(text: str, found: re.Match[str]) -> list[Reply]:
    options: list[JsonValue] = [
        {"label": "Tea", "description": "Green or black"},
        {"label": "Coffee", "description": "With or without milk"},
    ]
    question: JsonValue = {"question": "Tea or coffee?", "header": "Drink", "options": options}
    thought = "The user wants to be asked. I use the question tool."
    return _use(thought, "question", {"questions": [question]}, "Thank you. You answered:")


def _plan(text: str, found: re.Match[str]) -> list[Reply]:
    steps = (("Understand the request", "completed"), ("Do it", "in_progress"))
    todos: list[JsonValue] = [{"content": c, "status": s, "priority": "medium"} for c, s in steps]
    thought = "The user wants a plan. I write a list."
    return _use(thought, "todowrite", {"todos": todos}, "This is the plan:")


def _delegate(text: str, found: re.Match[str]) -> list[Reply]:
    given: dict[str, JsonValue] = {
        "description": "Look around",
        "prompt": "List the files here.",
        "subagent_type": "general",
    }
    thought = "The user wants a sub-agent to work. I give it a small task."
    return _use(thought, "task", given, "The sub-agent reported:")


def _ask_agent(text: str, found: re.Match[str]) -> list[Reply]:
    given: dict[str, JsonValue] = {"agent": found["agent"], "message": found["message"].strip()}
    thought = f"The user wants the agent {found['agent']} to be asked."
    return _use(thought, "a2a_call", given, f"I asked {found['agent']}:")


def _recognised(pattern: str, tool: str, build: Build) -> Recognised:
    return Recognised(re.compile(pattern, re.IGNORECASE), tool, build)


_KNOWN = (
    _recognised(r"\bask (?:the )?agent (?P<agent>[\w.-]+)\s*(?::|to\b)(?P<message>.+)",
                "a2a_call", _ask_agent),
    _recognised(r"\bask (me|a question)\b", "question", _ask),
    _recognised(r"\b(delegate|sub-?agent)\b", "task", _delegate),
    _recognised(r"\brun\b.{0,40}\btests?\b", "bash", _run_tests),
    _recognised(rf"\b(?:write|create|make)\b.{{0,60}}?\s{_FILE}", "write", _write_file),
    _recognised(r"\b(?:list|show|which|what)\b.{0,40}\b(?:files|folder|directory)\b|^ls\b",
                "bash", _list_files),
    _recognised(rf"\b(?:show|read|open|cat|print)\b.{{0,40}}?\s{_FILE}", "read", _read_file),
    _recognised(r"\b(?:make|write|show)\b.{0,20}\b(?:plan|todo)", "todowrite", _plan),
)  # fmt: skip


def demo_script(text: str, tools: frozenset[str]) -> Script:
    """The replies to a text without a script, with the tools that are offered."""
    for kind in _KNOWN:
        found = kind.pattern.search(text, 0, _LOOK_AT) if kind.tool in tools else None
        if found:
            return Script(tuple(kind.build(text, found)), digest_of(text))
    return Script((_introduction(),), digest_of(text))


def _introduction() -> Reply:
    return (
        Think(think="No real model is configured, so I say what I am.", delay=_PACE),
        _say(
            "I am the demo model: scripted answers, no AI behind them. Everything around me is "
            "real: the A2A service, OpenCode and its tools.\n\n"
            "Try: “list the files here”, “show README.md”, “run the tests”, “create a file "
            "hello.txt with 'hello'”, “ask me something”, “make a plan”, “use a sub-agent”.\n\n"
            f"{_REAL_MODEL}"
        ),
    )


NOTHING_LEFT: Reply = (_say("There is nothing left to do."),)


def errand(messages: Sequence[ChatMessage]) -> Reply | None:
    """The reply to what OpenCode asks for itself: a title or a summary; never a script."""
    system = next((m.text for m in messages if m.role == "system"), "")
    if system.startswith(_TITLE_PROMPT):
        return (Say(say=_title(messages[-1].text)),)
    if system.startswith(_SUMMARY_PROMPT):
        return (Say(say=_SUMMARY),)
    return None


def _title(text: str) -> str:
    words = re.sub(r"@@.*", "", text, flags=re.DOTALL).split()
    return " ".join(words[:6])[:50] or "Scripted conversation"


_SUMMARY = """## Objective
- Summary by the demo model.

## Important Details
- (none)

## Work State
### Completed
- (none)

### Active
- (none)

### Blocked
- (none)

## Next Move
1. Continue.

## Relevant Files
- (none)
"""
