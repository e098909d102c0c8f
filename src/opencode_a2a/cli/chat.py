"""``opencode-a2a chat``: a conversation with an agent."""

import sys

import click

from opencode_a2a.cli.params import WORDS


@click.command()
@click.argument("url", type=WORDS)
@click.option("--context", metavar="ID", type=WORDS, help="Go on in this context: a conversation.")
def chat(url: str, context: str | None) -> None:
    """Talk to the agent at URL.

    What the agent asks (a question, a permission) is shown, and your lines answer it until it is
    settled; what was typed before it could be read does not. A paste of several lines is one
    message. Ctrl-C cancels the turn, a second one leaves; /new begins a new conversation, /quit or
    Ctrl-D leaves. Credentials are found as by `call`.

    Exit status: that of `call` for the last turn, 1 also if the credential is refused.
    """
    from opencode_a2a.cli.conversation import Conversation, line_editing
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.printable import command, one_line

    with talk_to(url) as talk, line_editing():
        card = talk.peer.card
        click.echo(one_line(f"{card.name} {card.version}"), err=True)
        conversation = Conversation(talk, context)
        status = conversation.hold()
    if conversation.context_id:
        then = command("chat", talk.url, "--context", conversation.context_id)
        click.echo(f"go on with: {then}", err=True)
    sys.exit(status)
