"""``chat``: a conversation at the terminal, with the agent's questions answered in between.

``cli.call`` declares the command, and ``talk`` runs the turns; nothing here uses the network. Lines
that begin with a slash are commands, and are never sent to the model.
"""

import contextlib
import difflib
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import click

from opencode_a2a.cli.screen import at_terminal, make_screen, report_end, show_question, task_table
from opencode_a2a.cli.talk import (
    PASTE_SECONDS,
    CanceledError,
    RefusedError,
    Talk,
    exit_status,
    file_part,
)
from opencode_a2a.events import Interrupted, Json, JsonObject, Usage
from opencode_a2a.ids import ModelRef
from opencode_a2a.jsonguard import as_object, items_in, text_in
from opencode_a2a.messages import Part
from opencode_a2a.peers.received import WAITING, PeerTask, state_word
from opencode_a2a.printable import command, one_line, spent, visible, visible_line

_REPLIES = {
    "o": "once",
    "y": "once",
    "a": "always",
    "r": "reject",
    "n": "reject",
    "t": "yes for this task",
    "c": "yes for this conversation",
}
_PLAN = re.compile(r"/plan\s+(?=\S)")
_KEYS = "[y] allow once   [n] deny   [e] deny with a reason"
_WIDER = frozenset("tca")
_WIDER_KEYS = "[t] allow for this task   [c] for this conversation"
_HISTORY_LINES = 1000
_REFLEX_SECONDS = 0.3
"""Time after a question in which nobody can have read it."""


Run = Callable[["Conversation", str], None]


@dataclass(frozen=True, slots=True)
class SlashCommand:
    usage: str
    summary: str
    run: Run


SLASH_COMMANDS: dict[str, SlashCommand] = {}
"""The slash commands by name, in the order in which ``/help`` lists them."""


def slash(usage: str, summary: str) -> Callable[[Run], Run]:
    """Make a method the command that ``usage`` begins with."""

    def declare(run: Run) -> Run:
        SLASH_COMMANDS[usage.split()[0]] = SlashCommand(usage, summary, run)
        return run

    return declare


class Conversation:
    """One context at an agent, from the first line until the person leaves."""

    def __init__(self, talk: Talk, context_id: str | None) -> None:
        self.context_id = context_id
        self._talk = talk
        self._waiting: PeerTask | None = None
        """The task that waits for an answer; every line goes to it until that is settled."""
        self._model: ModelRef | None = None
        self._agent: str | None = None
        self._files: list[Part] = []
        """What goes along with the next message."""
        self._used: dict[str, Usage] = {}
        """What each task of the conversation has used."""
        self._patch: str | None = None
        """The last changes that an agent reported."""

    def hold(self) -> int:
        """Go on until the person leaves: end of input, /quit, or Ctrl-C twice.

        Return the exit status: that of the last turn, 3 if a question was left open.
        """
        status = 0
        # A Ctrl-C that comes between two steps is the second one, or as good as that.
        with contextlib.suppress(KeyboardInterrupt, EOFError):
            stopped = False
            while True:
                try:
                    status = self._turn(self._read())
                    stopped = False
                except CanceledError as error:
                    stopped, status = True, error.exit_code
                    click.echo(f"{error.message}; Ctrl-C again leaves", err=True)
                except RefusedError:
                    raise
                except click.ClickException as error:
                    status = 1
                    wide = shutil.get_terminal_size().columns
                    said = f"Error: {error.format_message()}"
                    click.echo(fill(said, wide, break_long_words=False), err=True)
                except KeyboardInterrupt:
                    if stopped:
                        break
                    stopped = True
                    waiting, self._waiting = self._waiting, None
                    canceled = ""
                    if waiting:
                        status = CanceledError.exit_code
                        canceled = f"{self._talk.cancel(waiting)}; "
                    click.echo(f"\n{canceled}Ctrl-C again leaves", err=True)
        if self._waiting is None:
            return status
        then = command("call", *self._talk.named, "--task", self._waiting.task_id or "", "…")
        click.echo(f"The agent still waits; answer with: {then}", err=True)
        return exit_status(self._waiting.status.state)

    def _turn(self, parts: list[Part]) -> int:
        task = self._waiting or PeerTask()
        task_id = task.task_id if self._waiting else None
        planned = _PLAN.match(parts[0].text or "") if not task_id else None
        if planned is not None:
            parts = [Part("text", text=(parts[0].text or "")[planned.end() :]), *parts[1:]]
        try:
            self._talk.ask(
                parts,
                task,
                make_screen(),
                task_id=task_id,
                context_id=self.context_id,
                metadata=None if self._waiting else self._metadata(plan=planned is not None),
                steers=True,
            )
        except CanceledError:
            self._waiting = None
            raise
        except click.ClickException:
            if self._waiting:
                # The answer did not get through; the agent may no longer wait for one.
                with contextlib.suppress(click.ClickException):
                    found = self._talk.run(self._talk.peer.task(task_id or ""))
                    if found.status.state not in WAITING:
                        self._waiting = None
                        word = state_word(found.status.state)
                        text = f"The agent no longer waits for an answer; the task is {word}."
                        click.echo(text, err=True)
            raise
        finally:
            self.context_id = task.context_id or self.context_id
            self._patch = task.patch or self._patch
            if task.usage is not None:
                self._used[task.task_id or ""] = task.usage
        self._waiting = task if task.status.state in WAITING else None
        if self._waiting:
            permission = task.asked is not None and task.asked.type == "permission"
            wider = permission and task.asked is not None and task.asked.always
            keys = f"{_KEYS}\n{_WIDER_KEYS}" if wider else _KEYS
            show_question(task, keys if permission and not task.several else None)
        else:
            report_end(self._talk, task)
        return exit_status(task.status.state)

    def _metadata(self, *, plan: bool) -> JsonObject | None:
        """Return what a new task is to be done with."""
        metadata: JsonObject = {}
        opencode: JsonObject = {"plan": True} if plan else {}
        if self._model is not None:
            model: JsonObject = {
                "providerID": self._model.provider_id,
                "modelID": self._model.model_id,
            }
            metadata["shared"] = {"model": model}
        if self._agent is not None:
            opencode["agent"] = self._agent
        if opencode:
            metadata["opencode"] = opencode
        return metadata or None

    def _read(self) -> list[Part]:
        """Return what to send: a message, or the answer to what the agent asked."""
        if self._waiting:
            discard_early_input()
        while True:
            task = self._waiting
            asked = task and task.asked
            if task and asked and len(asked.questions) > 1:
                return self._answers(asked)
            text = read_message("answer> " if task else "> ")
            if re.match(r"/[A-Za-z]*(\s|$)", text) and (task or not _PLAN.match(text)):
                self._run(text)
                continue
            text = text.strip()
            if text and asked and asked.type == "permission":
                if reply := self._reply(text, asked):
                    return [Part("text", text=reply)]
                continue
            if text or self._files:
                files, self._files = self._files, []
                return [*([Part("text", text=text)] if text else []), *files]

    def _answers(self, asked: Interrupted) -> list[Part]:
        answers: list[Json] = []
        for question in asked.questions:
            line = read_message(f"{one_line(question.header or question.question)}> ").strip()
            given = [item.strip() for item in line.split(",")] if question.multiple else [line]
            # Numbers stand for options.
            labels = {str(n): option.label for n, option in enumerate(question.options, 1)}
            answers.append([labels.get(item, item) for item in given if item])
        return [Part("data", data={"request_id": asked.request_id, "answers": answers})]

    def _reply(self, text: str, asked: Interrupted) -> str | None:
        """Return the answer to a permission, which names the one that was read.

        One letter must not allow more than what was asked: None if the person is not sure.
        """
        short = re.fullmatch(r"(#?\d+ +)?([a-z])", text, re.IGNORECASE)
        key = short[2].lower() if short else ""
        reply = text
        if short and key == "e":
            reason = read_message("reason> ").strip()
            reply = (short[1] or "") + (f"no: {reason}" if reason else "no")
        elif short and key in _REPLIES:
            if key in _WIDER and (wider := self._wider(asked, key, short[1])):
                click.echo(f"That also allows, without asking again: {wider}", err=True)
                if read_message("sure? [y/N]> ").strip().lower() not in ("y", "yes"):
                    return None
            reply = (short[1] or "") + _REPLIES[key]
        if self._waiting and self._waiting.several:
            return reply  # the person names what is meant
        # Name the permission that was read: another may be asked by the time of the answer.
        named = re.search(r"\b(all|\d+)\b", text.partition(":")[0])
        return reply if named else f"{asked.number or asked.request_id} {reply}"

    def _wider(self, asked: Interrupted, key: str, number: str | None) -> str | None:
        """Return what an answer of one letter allows besides the request; None if nothing.

        ``asked`` is the one that was read if no other is named.
        """
        named = int(number.strip("# ")) if number else asked.number
        if not asked.always and named == asked.number:
            return None
        if key == "a" and named == asked.number:  # OpenCode's own, for everybody
            return ", ".join(map(visible_line, asked.always))
        text = self._waiting and self._waiting.scope_text
        if text is None or named != asked.number:  # only the text of another is known here
            return f"what request {named} says"
        return visible_line(text)

    # Commands

    def _run(self, text: str) -> None:
        name, *rest = text.split(maxsplit=1)
        slashed = SLASH_COMMANDS.get("/quit" if name == "/exit" else name)
        if slashed is not None:
            try:
                slashed.run(self, rest[0].strip() if rest else "")
            except RefusedError:
                raise
            except click.ClickException as error:  # it is no turn: the exit status stays as it is
                click.echo(f"Error: {error.message}", err=True)
            return
        close = difflib.get_close_matches(name, SLASH_COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands."
        click.echo(
            f"There is no command {one_line(name, 30)}; {hint} "
            "To send it as it is, begin with a space.",
            err=True,
        )

    @slash("/help", "list these commands")
    def _help(self, _: str) -> None:
        width = max(len(one.usage) for one in SLASH_COMMANDS.values())
        for one in SLASH_COMMANDS.values():
            click.echo(f"  {one.usage:<{width}}  {one.summary}", err=True)
        click.echo(
            "While the agent works, what you enter is sent to it. A paste is one message, and so "
            "are lines that end with \\. Ctrl-C cancels the turn.",
            err=True,
        )

    @slash("/new", "begin a new conversation")
    def _new(self, _: str) -> None:
        if self._waiting:
            click.echo("Answer first, or cancel the task with /cancel.", err=True)
            return
        self.context_id, self._files = None, []
        self._used.clear()
        click.echo("A new conversation.", err=True)

    @slash("/tasks", "list the tasks at the agent")
    def _tasks(self, _: str) -> None:
        found = self._talk.tasks(None, 20)
        rows = task_table(found, shutil.get_terminal_size().columns) if found else ["no tasks"]
        click.echo("\n".join(rows), err=True)

    @slash("/task ID", "show a task; the beginning of its id is enough")
    def _task(self, task_id: str) -> None:
        if not task_id:
            click.echo("Name a task: /task ID; /tasks lists them.", err=True)
            return
        found = self._talk.run(self._talk.peer.task(self._talk.whole_id(task_id), 10))
        click.echo(one_line(f"{found.task_id}  {state_word(found.status.state)}", 300), err=True)
        seen, screen = PeerTask(), make_screen()
        for event in seen.take(found):
            screen.show(event)
        screen.close()

    @slash("/plan TEXT", "have OpenCode plan first; go then carries it out")
    def _plan(self, _: str) -> None:
        text = "Answer first" if self._waiting else "Say what to plan: /plan TEXT"
        click.echo(text, err=True)

    @slash("/model [PROVIDER/MODEL]", "use another model from now on; without a name, list them")
    def _choose_model(self, name: str) -> None:
        if not name:
            answer = self._talk.run(
                self._talk.peer.invoke("opencode.models.list", {"connected": True})
            )
            for item in items_in(answer, "items"):
                model = text_in(item, "model_id", "id")
                shown = one_line(f"{text_in(item, 'provider_id')}/{model}", 200)
                click.echo(f"  {shown}", err=True)
            click.echo(f"Now: {self._model or 'as OpenCode is configured'}", err=True)
            return
        model = ModelRef.parse(name)
        if model is None:
            click.echo("A model is named PROVIDER/MODEL; /model lists them.", err=True)
            return
        self._model = model
        click.echo(f"From the next message on, {model} answers.", err=True)

    @slash("/agent [NAME]", "let another agent of OpenCode's work; without a name, list them")
    def _choose_agent(self, name: str) -> None:
        if name:
            self._agent = name
            click.echo(f"From the next message on, the agent {one_line(name)} works.", err=True)
            return
        answer = self._talk.run(self._talk.peer.invoke("opencode.agents.list", {}))
        for item in items_in(answer, "items"):
            if as_object(item).get("mode") != "subagent" and not item.get("hidden"):
                described = f"{text_in(item, 'name')}  {text_in(item, 'description') or ''}"
                click.echo(f"  {one_line(described, 150)}", err=True)
        click.echo(f"Now: {self._agent or 'as OpenCode is configured'}", err=True)

    @slash("/cancel", "cancel the task that waits for an answer")
    def _cancel(self, _: str) -> None:
        waiting, self._waiting = self._waiting, None
        said = self._talk.cancel(waiting) if waiting else "Nothing waits; Ctrl-C cancels a turn."
        click.echo(said, err=True)

    @slash("/diff", "show the last changes whole")
    def _diff(self, _: str) -> None:
        if self._patch is None:
            click.echo("No changes were reported in this conversation.", err=True)
        elif at_terminal():
            from opencode_a2a.cli.live import print_diff  # only at a terminal

            print_diff(self._patch)
        else:
            click.echo(visible(self._patch), err=True)

    @slash("/cost", "say what this conversation has used")
    def _cost(self, _: str) -> None:
        used = sum(self._used.values(), Usage())
        said = spent(None, used.read, used.written, used.cost)
        click.echo(said or "Nothing was reported yet.", err=True)

    @slash("/file PATH", "send a file along with the next message")
    def _file(self, path: str) -> None:
        if not path:
            click.echo("Name a file: /file PATH", err=True)
            return
        part = file_part(Path(path).expanduser())
        self._files.append(part)
        click.echo(f"{one_line(part.filename or path)} goes along with the next message.", err=True)

    @slash("/quit", "leave (also Ctrl-D)")
    def _quit(self, _: str) -> None:
        raise EOFError


def read_message(prompt: str) -> str:
    """Return what a person enters: a line, or the lines of a paste; EOFError to leave.

    The prompt is for people: neither a script nor a copy of stdout gets to see it.
    """
    if not sys.stdin.isatty():
        prompt = ""
    elif not sys.stdout.isatty():
        click.echo(prompt, err=True, nl=False)
        prompt = ""
    try:
        lines = [input(prompt)]
        while (pasted := _is_pending(PASTE_SECONDS)) or lines[-1].endswith("\\"):
            if not pasted:
                lines[-1] = lines[-1][:-1]
            lines.append(input("… " if prompt and not pasted else ""))
        text = "\n".join(lines).rstrip()
        text.encode()
    except UnicodeError:
        raise click.ClickException("not sent: the input should be valid UTF-8") from None
    return text


def discard_early_input() -> None:
    """Drop what was typed before the question could be read: it answers something else."""
    if not sys.stdin.isatty():
        return
    try:
        import termios
    except ImportError:  # not on every platform
        return
    time.sleep(_REFLEX_SECONDS)
    if _is_pending(0):
        click.echo("What was typed before the question is dropped.", err=True)
    termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _is_pending(seconds: float) -> bool:
    """Whether a person's terminal has more input, or gets it within this time."""
    if os.name != "posix" or not sys.stdin.isatty():
        return False
    return bool(select.select([sys.stdin], [], [], seconds)[0])


@contextlib.contextmanager
def line_editing(history: Path) -> Generator[None]:
    """Give ``input`` a history that lasts and pastes of several lines, if a person types."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # not on every platform
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)
