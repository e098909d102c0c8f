"""What the demo model answers without a script: it recognises a few kinds of requests.

``server`` asks for these; they are scripts like any other, so OpenCode runs the tools they call
and the summaries quote real results.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from opencode_a2a_demo.chat import ChatMessage
from opencode_a2a_demo.script import OTHERWISE, Call, Reply, Say, Script, Think, digest_of

RESULT = "{{result}}"
"""Stands for the last tool result in what is said."""
_PACE = 0.015
_REFUSED = re.compile(
    r"The user (rejected|dismissed|has specified a rule)"
    r'|\{"error":\{"type":"(tool\.execution|aborted|permission)'  # OpenCode 2
)
"""How OpenCode begins the result of a tool that it was not allowed to run."""
_LOOK_AT = 2000
_BEGINNING = 200
_TITLE_PROMPT = "You are a title generator"
_SUMMARY_PROMPTS = (
    "You are a context summarization agent",
    "You are an anchored context summarization assistant",
)
_SUMMARY_WANTED = "anchored summary"
"""How OpenCode 2 asks for a summary, in the first words of a message."""
_QUOTED = re.compile(r"[\"'`“]([^\"'`”]+)[\"'`”]")
_FILE = r"[`'\"]?(?P<file>[\w./-]*[\w-]\.\w+|README|LICENSE|Makefile|Dockerfile)\b"
_RUN_TESTS = (
    "if grep -qs '^test:' Makefile; then make test; "
    "elif [ -f package.json ]; then npm test; "
    "elif [ -f go.mod ]; then go test ./...; "
    "elif ls tests test_*.py >/dev/null 2>&1; then python3 -m pytest -q; "
    "else echo 'no tests found here'; fi"
)
_DISCLAIMER = "(I am the demo model: scripted, no AI.)"
_QUESTION: JsonValue = {
    "question": "Tea or coffee?",
    "header": "Drink",
    "options": [
        {"label": "Tea", "description": "Green or black"},
        {"label": "Coffee", "description": "With or without milk"},
    ],
}
_TODOS: JsonValue = [
    {"content": "Understand the request", "status": "completed", "priority": "medium"},
    {"content": "Do it", "status": "in_progress", "priority": "medium"},
]
_SUBTASK: Mapping[str, JsonValue] = {
    "description": "Look around",
    "prompt": "List the files here.",
    "subagent_type": "general",
}


@dataclass(frozen=True, slots=True)
class Recognised:
    """A kind of request, the tool that it takes, and what is thought and said around the call.

    Braces stand for what the pattern found, ``{content}`` for the first text in quotes.
    """

    tool: str
    pattern: str
    given: Mapping[str, JsonValue]
    thought: str
    summary: str

    def script(self, text: str) -> Script | None:
        found = re.search(self.pattern, text[:_LOOK_AT], re.IGNORECASE)
        if found is None:
            return None
        words = {name: word.strip() for name, word in found.groupdict().items()}
        quoted = (part for part in _QUOTED.findall(text) if part != words.get("file"))
        words["content"] = next(quoted, "Written by the demo model.")
        given = {
            name: value.format_map(words) if isinstance(value, str) else value
            for name, value in self.given.items()
        }
        said = f"{self.summary.format_map(words)}\n\n```\n{RESULT}\n```\n\n{_DISCLAIMER}"
        think = Think(think=self.thought.format_map(words), delay=_PACE)
        call = Call(tool=self.tool, input=given)
        return Script(((think, call), (_say(said),)), digest_of(text))


_KNOWN = (
    Recognised("a2a_call", r"\bask (?:the )?agent (?P<agent>[\w.-]+)\s*(?::|to\b)(?P<message>.+)",
               {"agent": "{agent}", "message": "{message}"},
               "The user wants the agent {agent} to be asked.", "I asked {agent}:"),
    Recognised("question", r"\bask (?:me|a question)\b", {"questions": [_QUESTION]},
               "The user wants to be asked. I use the question tool.", "Thank you. You answered:"),
    Recognised("task", r"\b(?:delegate|sub-?agent)\b", _SUBTASK,
               "The user wants a sub-agent to work. I give it a small task.",
               "The sub-agent reported:"),
    Recognised("bash", r"\brun\b.{0,40}\btests?\b",
               {"command": _RUN_TESTS, "description": "Runs the tests"},
               "The user wants the tests run. I look which kind of project this is.",
               "I ran the tests. The output was:"),
    Recognised("write", rf"\b(?:write|create|make)\b.{{0,60}}?\s{_FILE}",
               {"filePath": "{file}", "content": "{content}\n"},
               "The user wants a file {file}.", "I wrote {file}:"),
    Recognised("bash", r"\b(?:list|show|which|what)\b.{0,40}\b(?:files|folder|directory)\b|^ls\b",
               {"command": "ls -la", "description": "Lists the files"},
               "The user wants to see the files. A shell command shows them.",
               "These are the files here:"),
    Recognised("read", rf"\b(?:show|read|open|cat|print)\b.{{0,40}}?\s{_FILE}",
               {"filePath": "{file}"},
               "The user wants to see {file}. I read it.", "This is {file}:"),
    Recognised("todowrite", r"\b(?:make|write|show)\b.{0,20}\b(?:plan|todo)", {"todos": _TODOS},
               "The user wants a plan. I write a list.", "This is the plan:"),
)  # fmt: skip


def filled(text: str, result: str) -> str:
    """Put the last tool result into a text, and say so if the tool was refused."""
    if _REFUSED.match(result) and text.endswith(_DISCLAIMER):
        return f"That was not done:\n\n```\n{result}\n```\n\n{_DISCLAIMER}"
    return text.replace(RESULT, result)


def _say(text: str) -> Say:
    return Say(say=text, delay=_PACE)


def demo_script(text: str, tools: frozenset[str]) -> Script:
    """Return the replies to a text without a script, with the tools that are offered."""
    scripts = (
        kind.script(text) for kind in _KNOWN if {kind.tool, OTHERWISE.get(kind.tool)} & tools
    )
    found = next((script for script in scripts if script is not None), None)
    return found or Script((_introduction(tools),), digest_of(text))


def _introduction(tools: frozenset[str]) -> Reply:
    plan = "“make a plan”, " if "todowrite" in tools else ""  # OpenCode 2 has no such tool
    return (
        Think(think="No real model is configured, so I say what I am.", delay=_PACE),
        _say(
            "I am the demo model: scripted answers, no AI behind them. Everything around me is "
            "real: the A2A service, OpenCode and its tools.\n\n"
            "Try: “list the files here”, “show README.md”, “run the tests”, “create a file "
            f"hello.txt with 'hello'”, “ask me something”, {plan}“use a sub-agent”.\n\n"
            "To get a real model, configure a provider in OpenCode (for example with an API key "
            "such as `ANTHROPIC_API_KEY` or `OPENAI_API_KEY`, or `opencode auth login`) and start "
            "without `--demo`."
        ),
    )


NOTHING_LEFT: Reply = (_say("There is nothing left to do."),)


def errand(messages: Sequence[ChatMessage]) -> Reply | None:
    """Return the reply to what OpenCode asks for itself, a title or a summary; never a script."""
    system = next((m.text for m in messages if m.role == "system"), "")
    if system.startswith(_TITLE_PROMPT):
        words = re.sub(r"@@.*", "", messages[-1].text, flags=re.DOTALL).split()
        return (Say(say=" ".join(words[:6])[:50] or "Scripted conversation"),)
    if system.startswith(_SUMMARY_PROMPTS) or _SUMMARY_WANTED in messages[-1].text[:_BEGINNING]:
        return (Say(say=_SUMMARY),)
    return None


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
