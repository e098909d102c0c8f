"""``opencode-a2a notify``: send a test message to the targets of ``A2A_NOTIFY``."""

import asyncio
import secrets
import sys
from pathlib import Path

import click

from opencode_a2a.cli.serve import config_option, load_settings
from opencode_a2a.config import Settings

REMEDIES = {
    "timeout": "it does not answer; check the address, and whether a firewall is in the way",
    "unknown_host": "the host name cannot be found",
    "unreachable": "it cannot be reached; check the address",
    "tls": "the connection is not secure; check the address, and its certificate",
    "refused_address": "the address may not be called",
    "login_refused": "the server does not accept user name and password",
    "recipient_refused": "the server does not accept the recipient",
    "http_401": "it does not accept the token",
    "http_403": "it does not accept the token, or the topic or chat is not yours",
    "http_404": "there is nothing at this address; check the URL or the token",
    "http_400": "it does not understand the message; check the topic or chat",
}


@click.command()
@config_option
@click.option("--test", is_flag=True, required=True, help="Send a test message to every target.")
@click.option("--target", metavar="NAME", help="Send it to this target alone.")
def notify(config: Path | None, test: bool, target: str | None) -> None:
    """Send a test message to the targets of A2A_NOTIFY.

    It leads to the console, and is sent in quiet hours too. Takes the settings of `serve`. Exits
    with status 1 if a target did not take it.
    """
    settings = load_settings({}, config, silent=True)
    # Browsers are known to the service alone.
    names = [entry.name for entry in settings.notices.notify if entry.kind != "webpush"]
    if not names:
        raise click.UsageError("no target is configured that can be tested; set A2A_NOTIFY")
    if target is not None and target not in names:
        raise click.UsageError(f"there is no target {target}; there are {', '.join(names)}")
    outcomes = asyncio.run(_send(settings, [target] if target else names))
    for name, outcome in outcomes.items():
        if outcome == "ok":
            click.echo(f"{name}: sent")
        else:
            remedy = REMEDIES.get(outcome, "try again")
            click.echo(f"{name}: not sent ({outcome}); {remedy}", err=True)
    sys.exit(any(outcome != "ok" for outcome in outcomes.values()))


async def _send(settings: Settings, names: list[str]) -> dict[str, str]:
    from opencode_a2a.notices.targets import Http, Note, made_of

    url = f"{settings.public_url}/console"
    text = "This is a test message. Messages of tasks look like this one."
    key = f"test-{secrets.token_hex(8)}"
    note = Note(settings.a2a.title, text, url, "Open the console", urgent=False, key=key)
    seconds = settings.push.timeout_seconds
    http, outcomes = Http(seconds), dict[str, str]()
    try:
        for entry in settings.notices.notify:
            if entry.name in names:
                sent = await made_of(entry, http, seconds).send("", note)
                outcomes[entry.name] = sent.name
        return outcomes
    finally:
        await http.aclose()
