"""``card``, ``methods``, ``settings``, ``completion`` and ``version``: known without a service."""

import json
from pathlib import Path
from typing import get_args

import click

from opencode_a2a import __version__
from opencode_a2a.cli.serve import config_option, load_settings
from opencode_a2a.clock import now_ms
from opencode_a2a.config import SETTINGS, CardForm, SettingsError, settings_schema, show
from opencode_a2a.signing import signing_keys
from opencode_a2a.telemetry import mask_url

SHELLS = "bash zsh fish".split()  # noqa: SIM905 - a word alone would be OpenCode's permission


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


@click.command()
@config_option
@click.option("--all", "everything", is_flag=True, help="Print the defaults too.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the settings file instead.")
def settings(config: Path | None, everything: bool, schema: bool) -> None:
    """Print the settings that are set and where they come from; secrets are masked."""
    if schema:
        click.echo(json.dumps(settings_schema(), indent=2))
        return
    effective = load_settings({}, config, served=False)
    given = effective.sources
    for setting in SETTINGS.values():
        if everything or setting.key in given:
            value = mask_url(show(dict(dict(effective)[setting.group])[setting.field]))
            click.echo(f"{setting.variable}={value}\t{given.get(setting.key, 'default')}")
    if not everything:
        left = len(SETTINGS) - sum(key in given for key in SETTINGS)
        click.echo(f"{left} settings have their defaults; --all prints them.", err=True)


@click.command()
@config_option
@click.option("--extended", is_flag=True, help="Print the card that authenticated callers get.")
@click.option(
    "--form", type=click.Choice(get_args(CardForm)), help="Form to print; default: A2A_CARD_FORM."
)
def card(config: Path | None, extended: bool, form: CardForm | None) -> None:
    """Print the agent card for the current settings."""
    from opencode_a2a.server.card import Cards  # takes most of a second to import

    effective = load_settings({}, config, served=False)
    try:
        cards = Cards(effective, now_ms(), keys=signing_keys(effective.signing))
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    shown = cards.shown(form or effective.a2a.card_form, extended=extended)
    click.echo(json.dumps(shown, indent=2))


@click.command()
@config_option
def methods(config: Path | None) -> None:
    """List the methods beyond A2A: name, access, and the setting that switches them off."""
    from opencode_a2a.extensions import METHODS  # takes most of a second to import

    effective = load_settings({}, config, served=False)
    for method in METHODS:
        state = method.state(effective)
        off = f" ({state}: {method.condition.variable})" if method.condition else ""
        note = off if state != "enabled" else ""
        click.echo(f"{method.name}\t{method.access}\t{method.summary}{note}")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, flags, values and task IDs in a shell.

    \b
      bash  opencode-a2a completion bash > ~/.local/share/bash-completion/completions/opencode-a2a
      zsh   opencode-a2a completion zsh > _opencode-a2a    (in a directory of $fpath)
      fish  opencode-a2a completion fish > ~/.config/fish/completions/opencode-a2a.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    main = ctx.find_root().command
    click.echo(kind(main, {}, "opencode-a2a", "_OPENCODE_A2A_COMPLETE").source())
