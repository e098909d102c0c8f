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

SCENES = ("answer", "question", "reply", "failure")
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
                rf"{self.environment}(?:\[\w+\])?==",
            ),
        )
        found = re.search(rf"{pin}([\w.]+)", file.read_text())
        assert found is not None, self.environment
        return found[1]


_ROOT = HERE.parent.parent
_PINS = {
    "a2a-sdk": (_ROOT / "uv.lock", r'name = "a2a-sdk"\nversion = "'),
    "a2a-sdk-0.3": (_ROOT / "tests" / "support" / "sdk03" / "requirements.txt", "a2a-sdk=="),
    "js-sdk-1.0": (_ROOT / "package.json", '"a2a-sdk-1.0": "npm:@a2a-js/sdk@'),
    "js-sdk-0.3": (_ROOT / "package.json", '"a2a-sdk-0.3": "npm:@a2a-js/sdk@'),
}
"""Where the clients of ``make test`` are pinned, and what stands before the version."""

_NO_IDS = (
    "{} sends neither task nor context with a message: it begins a new conversation each time, and "
    "the question waits for an answer that never comes."
)
_LITELLM = "LiteLLM shows every text of a stream as the answer, the reasoning too."
_BEEAI = (
    "BeeAI takes the artifact that was opened last in a stream for the answer, and reads no status "
    "of a task that has artifacts. `streaming=False` helps."
)
_CREWAI = "CrewAI joins the texts of all artifacts, the reasoning too."
_CREWAI_POLLING = (
    "CrewAI joins the status message and the texts of all artifacts: all is there twice."
)
_MICROSOFT = (
    "Agent Framework shows data as text: the answer is preceded by the reasoning and by tool calls "
    "as JSON. The last of `response.messages` is the answer alone."
)
_CREW = "crewai, `accepted_output_modes` with `text/plain`, which the agent answers in"
_MS = "agent-framework-a2a"

CLIENTS: tuple[Client, ...] = (
    Client("a2a-sdk", "a2a-sdk", "python_sdk.py", ("blocking",)),
    Client("a2a-sdk", "a2a-sdk", "python_sdk.py", ("streaming",)),
    Client("a2a-sdk", "a2a-sdk-0.3", None, ("blocking",)),
    Client("a2a-sdk", "a2a-sdk-0.3", None, ("streaming",)),
    Client("@a2a-js/sdk", "js-sdk-1.0", None, ("blocking",)),
    Client("@a2a-js/sdk", "js-sdk-1.0", None, ("streaming",)),
    Client("@a2a-js/sdk", "js-sdk-0.3", None, ("blocking",)),
    Client("@a2a-js/sdk", "js-sdk-0.3", None, ("streaming",)),
    Client("google-adk, legacy converter", "google-adk", "google_adk.py", ("legacy", "blocking")),
    Client("google-adk, legacy converter", "google-adk", "google_adk.py", ("legacy", "streaming")),
    Client("google-adk, new converter", "google-adk", "google_adk.py", ("new", "blocking")),
    Client("google-adk, new converter", "google-adk", "google_adk.py", ("new", "streaming")),
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
        faults={
            "answer": "Strands joins the texts of all artifacts, the reasoning too, and puts each "
            "piece of a stream on a line of its own.",
            "reply": _NO_IDS.format("Strands"),
        },
    ),
    Client("beeai-framework", "beeai-framework", "beeai.py", ("blocking",)),
    Client(
        "beeai-framework",
        "beeai-framework",
        "beeai.py",
        ("streaming",),
        {"answer": _BEEAI, "question": _BEEAI, "reply": _BEEAI},
    ),
    Client(
        _CREW,
        "crewai",
        "crew.py",
        ("polling",),
        {"answer": _CREWAI_POLLING, "reply": _CREWAI_POLLING},
    ),
    Client(_CREW, "crewai", "crew.py", ("streaming",), {"answer": _CREWAI}),
    Client(_MS, _MS, "microsoft.py", ("blocking",), {"answer": _MICROSOFT, "reply": _MICROSOFT}),
    Client(_MS, _MS, "microsoft.py", ("streaming",), {"answer": _MICROSOFT, "reply": _MICROSOFT}),
)


TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
"""What differs from run to run in a text that is shown."""


@dataclass(frozen=True)
class Expected:
    """What a person should see, as the service itself says it."""

    answer: str
    question: str
    reply: tuple[str, ...]
    failure: str

    def met(self, scene: str, shown: str) -> bool:
        """Whether a client shows what it should; space around it does not count."""
        shown = shown.strip()
        match scene:
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
        for scene, shown in seen.get(client.id, {}).items():
            met = expected.met(scene, shown)
            if met and scene in client.faults:
                yield f"{client.id}: {scene} is right now; take its fault off the list"
            elif not met and scene not in client.faults:
                yield f"{client.id}: {scene} is shown as {shown!r}"


def table(seen: Seen, expected: Expected) -> Iterator[str]:
    """Return what people see in which client, as lines of a page."""
    notes: dict[str, int] = {}
    yield "| Client | Version | Delivery | Answer | Question | Reply | Failure |"
    yield "|---|---|---|---|---|---|---|"
    for client in CLIENTS:
        cells = [client.name, client.version, client.arguments[-1] if client.arguments else ""]
        for scene in SCENES:
            shown = seen.get(client.id, {}).get(scene)
            if shown is None:
                cells.append("not run")
            elif expected.met(scene, shown):
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
