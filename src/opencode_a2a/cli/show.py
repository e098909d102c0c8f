"""Commands that print what is known without a running service."""

from pathlib import Path

import click

from opencode_a2a import __version__
from opencode_a2a.cli.serve import config_option, load_settings
from opencode_a2a.config import SETTINGS, Setting, Settings, show
from opencode_a2a.telemetry import mask_url


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
        value = _value(effective, setting)
        click.echo(f"{setting.variable}={value}\t{effective.sources.get(setting.key, 'default')}")


def _value(effective: Settings, setting: Setting) -> str:
    group = dict(effective)[setting.group]
    return mask_url(show(dict(group)[setting.field]))
