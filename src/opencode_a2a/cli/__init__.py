"""The program and its commands, each imported only when it runs.

Commands parse, call and report; the work is done in other packages. ``--help`` and ``--version``
must be fast, so nothing heavy is imported here.
"""

import difflib
import gc
import os
import sys
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from opencode_a2a import __version__
from opencode_a2a.printable import colours

COMMANDS = {
    "serve": ("serve", "Run the service, with or without starting OpenCode."),
    "console": ("console", "Open the web console in the browser, signed in."),
    "call": ("call", "Send a message to an agent and print the answer."),
    "chat": ("call", "Talk to an agent."),
    "tasks": ("call", "List the tasks of an agent."),
    "task": ("call", "Print or follow a task of an agent."),
    "cancel": ("call", "Cancel a task of an agent."),
    "ping": ("call", "Check that a service is ready."),
    "opencode": ("launch", "Start an OpenCode that runs by itself, for a service."),
    "init": ("setup", "Ask a few questions and write the settings file."),
    "migrate": ("setup", "Import the tasks of an earlier version."),
    "doctor": ("doctor", "Check what the service needs, and name remedies."),
    "notify": ("notices", "Send a test message to where people are told of tasks."),
    "card": ("show", "Print the agent card for the current settings."),
    "methods": ("show", "List the methods beyond A2A, and which are enabled."),
    "settings": ("show", "Print the settings in effect and where they come from."),
    "completion": ("show", "Print the completion script for a shell."),
    "version": ("show", "Print the version."),
}
"""Each command's module in this package, and its line in the overview."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports them when needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        # Imports leave no garbage; to look for it again and again is a tenth of their time, and
        # another tenth if it is done once afterwards.
        gc.disable()
        module = import_module(f"opencode_a2a.cli.{COMMANDS[cmd_name][0]}")
        gc.freeze()
        gc.enable()
        command = vars(module)[cmd_name]
        if not isinstance(command, click.Command):
            raise TypeError(f"{cmd_name} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command for an unknown name."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}."
            ctx.fail(f"No such command '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; Ctrl-C while the service is being loaded stops it as it does later."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if sys.argv[1:2] != ["serve"]:
                raise
            click.echo("Stopped.", err=True)
            ctx.exit()

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands without importing them."""
        offered = [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        # The completions of the group itself are its options.
        return [*offered, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(__version__, "-v", "--version", message="%(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Turn an OpenCode server into an agent that any A2A client can talk to."""
    if not colours(os.environ):
        ctx.color = False
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
