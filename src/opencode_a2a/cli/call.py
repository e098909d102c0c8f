"""``opencode-a2a call``: send one message to an agent and print its answer."""

import base64
import math
import mimetypes
import os
import sys
from pathlib import Path

import click

from opencode_a2a.cli.params import WORDS
from opencode_a2a.messages import Part

_FILE_LIMIT = 20 * 1024 * 1024


@click.command()
@click.argument("url", type=WORDS)
@click.argument("text", type=WORDS)
@click.option("--context", metavar="ID", type=WORDS, help="Go on in this context: a conversation.")
@click.option("--task", metavar="ID", type=WORDS, help="Go on with this task, or answer it.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send a file along; may be given several times.",
)
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds to wait for the end.",
)
@click.option("--no-stream", is_flag=True, help="Wait for the whole answer instead of streaming.")
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
def call(
    url: str,
    text: str,
    context: str | None,
    task: str | None,
    files: tuple[Path, ...],
    timeout: float,
    no_stream: bool,
    as_json: bool,
) -> None:
    """Send TEXT to the agent at URL and print the answer as it arrives.

    URL is the agent's base address or that of its card. TEXT may be "-" for standard input.
    The credential comes from A2A_CLIENT_BEARER_TOKEN or A2A_CLIENT_BASIC_AUTH; for a service of
    yours on this machine the token that it generated is found by itself.

    With --json the last line is the event "interrupted" or "finished"; it holds the state, the
    whole answer, task_id and context_id.

    Exit status: 0 completed, 1 failed, 2 wrong usage, 3 input or sign-in required, 130 canceled
    with Ctrl-C.
    """
    if math.isnan(timeout):
        raise click.UsageError("--timeout should be a number of seconds")

    from opencode_a2a.cli.screen import printed
    from opencode_a2a.cli.talk import Turn, exit_status, talk_to
    from opencode_a2a.peers.answer import PeerTask

    parts = _parts(_input() if text == "-" else text, files)
    account = PeerTask()
    turn = Turn(parts, account, task, context, not no_stream, timeout)
    with talk_to(url) as talk, printed(talk.url, account, as_json) as shown:
        talk.take(turn, shown)
    sys.exit(exit_status(account.status.state))


def _parts(text: str, files: tuple[Path, ...]) -> list[Part]:
    if not text.strip() and not files:
        raise click.UsageError("there is nothing to send: TEXT is empty")
    words = [Part("text", text=text)] if text.strip() else []
    return [*words, *(_file(path) for path in files)]


def _input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise click.UsageError("standard input should be valid UTF-8") from None


def _file(path: Path) -> Part:
    name = os.fsencode(path.name).decode(errors="replace")
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_LIMIT + 1)  # a device has no size, and no end
    except OSError as error:
        raise click.UsageError(f"cannot read {name}: {error.strerror}") from error
    if len(content) > _FILE_LIMIT:
        raise click.UsageError(f"{name} is larger than {_FILE_LIMIT // 1024**2} MiB")
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Part("raw", raw=base64.b64encode(content).decode(), media_type=media_type, filename=name)
