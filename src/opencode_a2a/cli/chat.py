"""``opencode-a2a chat``: a conversation with an agent."""

import click


@click.command()
@click.argument("url")
@click.option("--context", metavar="ID", help="Go on in this context: a conversation.")
def chat(url: str, context: str | None) -> None:
    """Talk to the agent at URL.

    What the agent asks (a question, a permission) is shown, and your next line answers it.
    Ctrl-C cancels the turn, a second one leaves; /new begins a new conversation, /quit or Ctrl-D
    leaves. Credentials are found as by `call`.
    """
    from opencode_a2a.cli.conversation import Conversation, line_editing
    from opencode_a2a.cli.screen import clean
    from opencode_a2a.cli.talk import talk_to

    with talk_to(url) as talk, line_editing():
        card = talk.peer.card
        click.echo(clean(f"{card.name} {card.version}".strip()), err=True)
        conversation = Conversation(talk, context)
        conversation.hold()
    if conversation.context_id:
        then = f"opencode-a2a chat {talk.url} --context {clean(conversation.context_id)}"
        click.echo(f"go on with: {then}", err=True)
