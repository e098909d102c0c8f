"""``opencode-a2a serve``: run the service, with or without starting OpenCode.

Every setting but a secret is a flag; the flags are made from the declarations in ``config``.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from opencode_a2a.config import (
    GROUPS,
    SETTINGS,
    Setting,
    Settings,
    SettingsError,
    import_command,
    load,
    provider_configured,
)

SHORT = {
    "a2a.host": "--host",
    "a2a.port": "--port",
    "a2a.demo": "--demo",
    "opencode.managed_server": "--managed",
    "opencode.ask": "--ask",
}
"""Settings with a second, shorter flag."""
WITHOUT_VALUE = {"opencode.ask": "all"}
"""What a flag without a value stands for, besides switches."""


class SettingOption(click.Option):
    """A flag made from a setting; a switch needs no value."""

    def __init__(self, setting: Setting) -> None:
        names = [setting.key.replace(".", "__"), setting.flag]
        super().__init__(
            [*names, *filter(None, [SHORT.get(setting.key)])],
            is_flag=False,
            flag_value="true" if setting.switch else WITHOUT_VALUE.get(setting.key),
            metavar="|".join(setting.choices) or ("[=false]" if setting.switch else "VALUE"),
            help=setting.help + (f"  [{setting.default}]" if setting.default else ""),
        )
        self.setting = setting


class ServeCommand(click.Command):
    """A command whose help shows the settings by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        plain = [p.get_help_record(ctx) for p in params if not isinstance(p, SettingOption)]
        with formatter.section("Options"):
            formatter.write_dl([record for record in plain if record])
        for name, group in GROUPS.items():
            options = [
                p for p in params if isinstance(p, SettingOption) and p.setting.group == name
            ]
            with formatter.section((group.__doc__ or name).partition(".")[0].partition(":")[0]):
                formatter.write_dl([r for p in options if (r := p.get_help_record(ctx))])


def load_settings(
    flags: Mapping[str, str], config: Path | None, *, auto_demo: bool = False
) -> Settings:
    """Return the settings, or print everything that is wrong and exit as for wrong usage."""
    try:
        settings = load(flags, os.environ, config)
        if auto_demo and not provider_configured(settings, os.environ):
            settings = load({**flags, "a2a.demo": "true"}, os.environ, config)
    except SettingsError as error:
        for problem in error.problems:
            click.echo(problem, err=True)
        sys.exit(2)
    for warning in settings.warnings:
        click.echo(f"warning: {warning}", err=True)
    return settings


def config_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--config`` to a command."""
    kind = click.Path(dir_okay=False, path_type=Path)
    text = "TOML file with settings, also as A2A_CONFIG."
    return click.option("--config", type=kind, metavar="FILE", help=text)(command)


@click.command(cls=ServeCommand)
@config_option
@click.option(
    "--auto-demo", is_flag=True, help="Use the demo model if OpenCode has no provider of its own."
)
def serve(config: Path | None, auto_demo: bool, **flags: str | None) -> None:
    """Run the service until it is stopped.

    Every setting is also a variable and a key of the file given by --config; secrets are only that.
    Flags win over variables, variables over the file.
    """
    given = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    settings = load_settings(given, config, auto_demo=auto_demo)
    # Before 2.0 the database was by default in the directory that the service was started in.
    given_url = settings.tasks.task_store_database_url
    places = [] if given_url else [Path.cwd(), settings.workspace or Path.cwd()]
    for file in dict.fromkeys(place / "opencode-a2a.db" for place in places):
        if not file.is_file():
            continue
        remedy = f"to keep its tasks run `{import_command(settings, file)}`, then delete the file"
        click.echo(f"warning: {file} is no longer used; {remedy}", err=True)

    from opencode_a2a.app import serve as run  # the server takes most of a second to import

    sys.exit(run(settings))


serve.params.extend(SettingOption(setting) for setting in SETTINGS.values() if not setting.secret)
