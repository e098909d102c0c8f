"""``card``, ``methods``, ``settings`` and ``version``: what is known without a running service."""

import json
from pathlib import Path

import click

from opencode_a2a import __version__
from opencode_a2a.cli.serve import config_option, load_settings
from opencode_a2a.config import SETTINGS, SettingsError, show
from opencode_a2a.signing import signing_keys
from opencode_a2a.telemetry import mask_url, now_ms


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


@click.command()
@config_option
def settings(config: Path | None) -> None:
    """Print the settings in effect and where they come from; secrets are masked."""
    effective = load_settings({}, config)
    for setting in SETTINGS.values():
        value = mask_url(show(dict(dict(effective)[setting.group])[setting.field]))
        click.echo(f"{setting.variable}={value}\t{effective.sources.get(setting.key, 'default')}")


@click.command()
@config_option
@click.option("--extended", is_flag=True, help="The card that callers with a credential get.")
def card(config: Path | None, extended: bool) -> None:
    """Print the agent card that these settings give."""
    from opencode_a2a.server.card import Cards  # takes most of a second to import

    effective = load_settings({}, config)
    try:
        cards = Cards(effective, now_ms(), keys=signing_keys(effective.signing))
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    click.echo(json.dumps(cards.hybrid if extended else cards.public, indent=2))


@click.command()
@config_option
def methods(config: Path | None) -> None:
    """List the methods beyond A2A: name, access, and the setting that switches them off."""
    from opencode_a2a.extensions import METHODS  # takes most of a second to import

    effective = load_settings({}, config)
    for method in METHODS:
        state = method.state(effective)
        off = f" ({state}: {method.condition.variable})" if method.condition else ""
        note = off if state != "enabled" else ""
        click.echo(f"{method.name}\t{method.access}\t{method.summary}{note}")
