"""Other people's clients, and what a person should see in them.

``python -m tests.clients`` runs them and writes ``seen.json`` and ``table.md``; ``tools/docs.py``
puts the table into ``docs/compatibility.md``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

HERE = Path(__file__).parent
SEEN = HERE / "seen.json"
TABLE = HERE / "table.md"

SCENES = ("plain", "answer", "question", "reply", "failure")
Seen = dict[str, dict[str, str]]
"""What each client showed in each scene."""


@dataclass(frozen=True)
class Client:
    """One way to use a client."""

    name: str
    environment: str
    """Where it is installed; the file of that name in ``requirements`` has its version."""
    driver: str | None
    """The script in ``drivers`` that talks through it; None for those that ``make test`` drives."""
    arguments: tuple[str, ...] = ()
    faults: dict[str, str] = field(default_factory=dict[str, str])
    """Scenes in which it shows something else, by a fault of its own, and which."""
    sometimes: frozenset[str] = frozenset()
    """Those of them in which the fault shows only sometimes."""
    program: str | None = None
    """What has to be on the path, since no package registry has it; without it, the client is not
    run, and the table keeps what was seen with it last."""

    @property
    def id(self) -> str:
        return " ".join((self.environment, *self.arguments))

    @property
    def version(self) -> str:
        """The version that is pinned, of the package that the environment is for."""
        file, pin = _PINS.get(
            self.environment,
            (
                HERE / "requirements" / f"{self.environment}.txt",
                rf"{self.environment}(?:\[[\w,]+\])?==",
            ),
        )
        found = re.search(rf"{pin}([\w.-]+)", file.read_text())
        assert found is not None, self.environment
        return found[1]


_ROOT = HERE.parent.parent
_PINS = {
    "a2a-cli": (HERE / "drivers" / "official_cli.py", "a2a-cli@"),
    "a2a-sdk": (_ROOT / "uv.lock", r'name = "a2a-sdk"\nversion = "'),
    "a2a-sdk-0.3": (_ROOT / "tests" / "support" / "sdk03" / "requirements.txt", "a2a-sdk=="),
    "js-sdk-1.0": (_ROOT / "package.json", '"a2a-sdk-1.0": "npm:@a2a-js/sdk@'),
    "js-sdk-0.3": (_ROOT / "package.json", '"a2a-sdk-0.3": "npm:@a2a-js/sdk@'),
    **{
        name: (HERE / "javascript" / "package.json", f'"{name}": "')
        for name in ("@google/gemini-cli-core", "@mastra/core", "a2a-ai-provider")
    },
}
"""Where the clients without a file of requirements are pinned, and what precedes the version."""

_NO_IDS = (
    "{} sends neither task nor context with a message: it begins a new conversation each time, and "
    "the question waits for an answer that never comes."
)
_LITELLM = "LiteLLM shows every text of a stream as the answer, the reasoning too."
_STRANDS = (
    "Strands joins the texts of all artifacts, the reasoning too, and puts each piece of a stream "
    "on a line of its own."
)
_BEEAI = (
    "BeeAI takes the artifact that was opened last in a stream for the answer, and reads no status "
    "of a task that has artifacts. `streaming=False` helps."
)
_CREWAI = "CrewAI puts a space after each piece of a stream."
_CREWAI_POLLING = (
    "CrewAI joins the status message and the texts of all artifacts: all is there twice."
)
_MICROSOFT = (
    "Agent Framework shows data as text: the answer is preceded by the reasoning and by tool calls "
    "as JSON."
)
_MICROSOFT_BLOCKING = f"{_MICROSOFT} The last of `response.messages` is the answer alone."
_MICROSOFT_FAILURE = (
    "Agent Framework reads no status of a task that has ended: without artifacts it shows the last "
    "message of the history, which is the user's own. It streams right."
)
_ADK = (
    "ADK keeps the piece of a stream that has `lastChunk`, which is empty, instead of adding the "
    "pieces up; it shows them while they come. `streaming=False` helps."
)
_GEMINI = (
    "Gemini CLI gives its model the messages and then all artifacts under headings, the reasoning, "
    "tool calls and the diff too."
)
_VERCEL = (
    "The provider for the Vercel AI SDK joins the status message and the texts of all artifacts."
)
_VERCEL_STREAM = (
    "The provider for the Vercel AI SDK joins the texts of all artifacts of a stream, the "
    "reasoning too, and reads no status: neither a question nor why a turn failed is shown."
)
_MASTRA = "Mastra joins the texts of all artifacts, the reasoning too, and the status message."
_MASTRA_STREAM = (
    "Mastra joins the texts of all artifacts of a stream, the reasoning too, and does not say why "
    "a turn failed."
)
_AG2 = "AG2 joins the texts of all artifacts, the reasoning too."
_AG2_POLLING = (
    "AG2 joins the texts of all artifacts, that of a question that was answered too, and the "
    "status message. It streams by default."
)
_AG2_EARLY = (
    "AG2 keeps an artifact as it is when it polls first, after half a second: the rest of a longer "
    "answer is missing. It streams by default."
)
_AG2_FAILURE = "AG2 raises an error that does not say why."
_AGNO = (
    "Agno looks for the answer among the messages of the history, where A2A does not put it, and "
    "sends no task with a message."
)
_AGNO_STREAM = "Agno takes the first event of a stream, which is the task, for its end."
_LANGCHAIN = "The package for LangChain joins the texts of all artifacts, the reasoning too."
_LANGCHAIN_QUESTION = (
    "The package for LangChain shows nothing of a task that has not ended, unless it streams."
)
_GO_CARD = (
    "The SDK for Go does not read a card of 1.0 that asks for a credential (its issue 430, open): "
    "it expects a list where the specification has an object. `--transport` helps, with which the "
    "command line reads no card, and so does `A2A_CARD_FORM=0.3`."
)
_CLI = "a2a-cli"
_CREW = "crewai"
_MS = "agent-framework-a2a"
_LC = "langchain-remote-a2a-agent"
_AI = "Vercel AI SDK, a2a-ai-provider"

CLIENTS: tuple[Client, ...] = (
    Client("a2a-sdk", "a2a-sdk", "python_sdk.py", ("blocking",)),
    Client("a2a-sdk", "a2a-sdk", "python_sdk.py", ("streaming",)),
    Client("a2a-sdk", "a2a-sdk-0.3", None, ("blocking",)),
    Client("a2a-sdk", "a2a-sdk-0.3", None, ("streaming",)),
    Client("@a2a-js/sdk", "js-sdk-1.0", None, ("blocking",)),
    Client("@a2a-js/sdk", "js-sdk-1.0", None, ("streaming",)),
    Client("@a2a-js/sdk", "js-sdk-0.3", None, ("blocking",)),
    Client("@a2a-js/sdk", "js-sdk-0.3", None, ("streaming",)),
    Client(
        "`a2a`, the command line",
        _CLI,
        "official_cli.py",
        ("card", "blocking"),
        dict.fromkeys(SCENES, _GO_CARD),
        program="a2a",
    ),
    *(
        Client(f"`a2a --transport {by}`", _CLI, "official_cli.py", (by, delivery), program="a2a")
        for by in ("rest", "jsonrpc")
        for delivery in ("blocking", "streaming")
    ),
    Client("google-adk, legacy converter", "google-adk", "google_adk.py", ("legacy", "blocking")),
    Client(
        "google-adk, legacy converter",
        "google-adk",
        "google_adk.py",
        ("legacy", "streaming"),
        {"plain": _ADK, "answer": _ADK, "reply": _ADK},
    ),
    Client("google-adk, new converter", "google-adk", "google_adk.py", ("new", "blocking")),
    Client(
        "google-adk, new converter",
        "google-adk",
        "google_adk.py",
        ("new", "streaming"),
        {"plain": _ADK, "answer": _ADK, "reply": _ADK},
    ),
    Client(
        "litellm, `a2a/…`",
        "litellm",
        "litellm_bridge.py",
        ("blocking",),
        {"reply": _NO_IDS.format("LiteLLM")},
    ),
    Client(
        "litellm, `a2a/…`",
        "litellm",
        "litellm_bridge.py",
        ("streaming",),
        {"answer": _LITELLM, "reply": _NO_IDS.format("LiteLLM")},
    ),
    Client(
        "strands-agents",
        "strands-agents",
        "strands_agents.py",
        faults={"plain": _STRANDS, "answer": _STRANDS, "reply": _NO_IDS.format("Strands")},
    ),
    Client("beeai-framework", "beeai-framework", "beeai.py", ("blocking",)),
    Client(
        "beeai-framework",
        "beeai-framework",
        "beeai.py",
        ("streaming",),
        {"answer": _BEEAI, "question": _BEEAI, "reply": _BEEAI},
        frozenset({"answer", "question", "reply"}),
    ),
    Client(
        _CREW,
        "crewai",
        "crew.py",
        ("polling",),
        {"answer": _CREWAI_POLLING, "reply": _CREWAI_POLLING},
    ),
    Client(
        _CREW,
        "crewai",
        "crew.py",
        ("streaming",),
        {"plain": _CREWAI, "reply": _CREWAI},
        frozenset({"reply"}),  # its text comes in one piece or in two
    ),
    Client(
        _MS,
        _MS,
        "microsoft.py",
        ("blocking",),
        {
            "answer": _MICROSOFT_BLOCKING,
            "reply": _MICROSOFT_BLOCKING,
            "failure": _MICROSOFT_FAILURE,
        },
    ),
    Client(
        _MS,
        _MS,
        "microsoft.py",
        ("streaming",),
        {"answer": _MICROSOFT, "reply": _MICROSOFT},
        frozenset({"reply"}),  # the call may be in the first event, which it does not show
    ),
    Client(
        "Gemini CLI",
        "@google/gemini-cli-core",
        "gemini_cli.mjs",
        ("streaming",),
        dict.fromkeys(("plain", "answer", "question", "reply"), _GEMINI),
    ),
    Client(_AI, "a2a-ai-provider", "vercel_ai.mjs", ("blocking",), {"question": _VERCEL}),
    Client(
        _AI,
        "a2a-ai-provider",
        "vercel_ai.mjs",
        ("streaming",),
        dict.fromkeys(("answer", "question", "reply", "failure"), _VERCEL_STREAM),
    ),
    *(
        client
        for version in ("0.3", "1.0")
        for client in (
            Client(
                f"Mastra, A2A {version}",
                "@mastra/core",
                "mastra.mjs",
                (version, "blocking"),
                dict.fromkeys(("answer", "question", "reply"), _MASTRA),
            ),
            Client(
                f"Mastra, A2A {version}",
                "@mastra/core",
                "mastra.mjs",
                (version, "streaming"),
                {"answer": _MASTRA_STREAM, "failure": _MASTRA_STREAM},
            ),
        )
    ),
    Client(
        "ag2",
        "ag2",
        "ag2_agent.py",
        ("polling",),
        {
            "plain": _AG2_EARLY,
            "answer": _AG2_POLLING,
            "reply": _AG2_POLLING,
            "failure": _AG2_FAILURE,
        },
        frozenset({"plain"}),
    ),
    Client(
        "ag2",
        "ag2",
        "ag2_agent.py",
        ("streaming",),
        {"answer": _AG2, "reply": _AG2, "failure": _AG2_FAILURE},
    ),
    Client("agno", "agno", "agno_client.py", ("blocking",), dict.fromkeys(SCENES, _AGNO)),
    Client("agno", "agno", "agno_client.py", ("streaming",), dict.fromkeys(SCENES, _AGNO_STREAM)),
    Client(
        _LC,
        _LC,
        "langchain_agent.py",
        ("blocking",),
        {"answer": _LANGCHAIN, "question": _LANGCHAIN_QUESTION, "reply": _LANGCHAIN},
    ),
    Client(_LC, _LC, "langchain_agent.py", ("streaming",), {"answer": _LANGCHAIN}),
)


TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|call_[0-9a-f]\w+")
"""What differs from run to run in a text that is shown."""


@dataclass(frozen=True)
class Expected:
    """What a person should see, as the service itself says it."""

    plain: str
    answer: str
    question: str
    reply: tuple[str, ...]
    failure: str

    def met(self, scene: str, shown: str) -> bool:
        """Whether a client shows what it should; space around it does not count."""
        shown = shown.strip()
        match scene:
            case "plain":
                return shown == self.plain
            case "answer":
                return shown == self.answer
            case "question":
                # What was said before it may stand before it.
                return shown.endswith(self.question) and shown.count(self.question) == 1
            case "reply":
                return shown in self.reply
            case _:
                return shown == self.failure


def load() -> tuple[Seen, Expected]:
    """Return what the last run saw, and what it should have seen."""
    stored = orjson.loads(SEEN.read_bytes())
    should = stored["expected"]
    return stored["seen"], Expected(**should | {"reply": tuple(should["reply"])})


def judge(seen: Seen, expected: Expected) -> Iterator[str]:
    """Return what is wrong: something else is shown and no fault of the client declared for it."""
    for client in CLIENTS:
        met = {scene: expected.met(scene, text) for scene, text in seen.get(client.id, {}).items()}
        for scene, right in met.items():
            if not right and scene not in client.faults:
                yield f"{client.id}: {scene} is shown as {seen[client.id][scene]!r}"
        # A fault that depends on how a stream is cut may not show in each of its scenes.
        for fault in dict.fromkeys(client.faults.values()):
            scenes = [scene for scene, known in client.faults.items() if known == fault]
            if all(met.get(scene) and scene not in client.sometimes for scene in scenes):
                yield f"{client.id}: {', '.join(scenes)} right now; take the fault off the list"


def table(seen: Seen, expected: Expected) -> Iterator[str]:
    """Return what people see in which client, as lines of a page."""
    notes: dict[str, int] = {}
    yield "| Client | Version | Delivery | Plain | Answer | Question | Reply | Failure |"
    yield "|---|---|---|---|---|---|---|---|"
    for client in CLIENTS:
        cells = [client.name, client.version, client.arguments[-1] if client.arguments else ""]
        for scene in SCENES:
            shown = seen.get(client.id, {}).get(scene)
            if shown is None:
                cells.append("not run")
            elif expected.met(scene, shown) and scene not in client.sometimes:
                cells.append("right")
            else:
                fault = client.faults.get(scene, f"It shows `{_line(shown)}`.")
                cells.append(f"[{notes.setdefault(fault, len(notes) + 1)}]")
        yield f"| {' | '.join(cells)} |"
    if notes:
        yield ""
        yield from (f"{number}. {note}" for note, number in notes.items())


def _line(shown: str) -> str:
    text = " ".join(shown.split()).replace("`", "'").replace("|", "/")
    return text if len(text) <= 100 else f"{text[:100]} …"
