"""``opencode-a2a serve``: run the service, with or without starting OpenCode.

Every setting except a secret has a flag, made from its declaration in ``config``.
"""

import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import CompletionItem

import opencode_a2a.telemetry  # noqa: F401 # pyright: ignore[reportUnusedImport] - first, see there
from opencode_a2a.config import (
    GROUPS,
    RETIRED,
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
    "a2a.public_url": "--public-url",
    "opencode.managed_server": "--managed",
    "opencode.workspace_root": "--workspace",
    "opencode.ask": "--ask",
}
"""Settings with a second, shorter flag."""
TYPED = f"{__name__}.typed"
"""Where the context of a command keeps the short flags that were typed, by keys of settings."""
COMMON = (*SHORT, "opencode.base_url", "log.level")
"""Settings whose flags ``--help`` shows."""
WITHOUT_VALUE = {"opencode.ask": "all"}
"""Values of flags that may be given without one, except switches."""


class SettingOption(click.Option):
    """A flag made from a setting; a switch needs no value."""

    def __init__(self, setting: Setting) -> None:
        # The name of a variable in Python, then the short flag, which is the one to show.
        names = [setting.key.replace(".", "__"), *filter(None, [SHORT.get(setting.key)])]
        super().__init__(
            [*names, setting.flag],
            is_flag=False,
            flag_value="true" if setting.switch else WITHOUT_VALUE.get(setting.key),
            metavar="|".join(setting.choices) or ("[=false]" if setting.switch else "VALUE"),
            help=setting.help + (f"  [{setting.default}]" if setting.default else ""),
        )
        self.setting = setting

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the values where there is a list of them; ``load`` checks what is given."""
        if self.setting.choices or self.setting.switch:
            words = self.setting.choices or ("true", "false")
            return [CompletionItem(word) for word in words if word.startswith(incomplete)]
        if self.setting.field.endswith(("_root", "_dir")):
            return [CompletionItem(incomplete, type="dir")]
        return super().shell_complete(ctx, incomplete)


class SettingsCommand(click.Command):
    """A command that takes every setting as a flag: a few in its help, all with ``--help-all``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type] # click's own
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                help="Show all flags, and exit.",
                callback=self._help_all,
            )
        )
        self.params += [SettingOption(one) for one in SETTINGS.values() if not one.secret]
        self.params += [
            click.Option([key.replace(".", "__"), one.flag], hidden=True)
            for key, one in RETIRED.items()
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note the short flags that were typed, for errors to name."""
        words = {word.partition("=")[0] for word in args}
        ctx.meta[TYPED] = {key: flag for key, flag in SHORT.items() if flag in words}
        return super().parse_args(ctx, args)

    def _help_all(self, ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            ctx.meta[__name__] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        everything = ctx.meta.get(__name__, False)
        plain = [p.get_help_record(ctx) for p in params if not isinstance(p, SettingOption)]
        given = [p for p in params if isinstance(p, SettingOption)]
        common = [p.get_help_record(ctx) for p in given if p.setting.key in COMMON]
        with formatter.section("Options"):
            rows = plain if everything else [*common, *plain]
            formatter.write_dl([record for record in rows if record])
        if not everything:
            return
        for name, group in GROUPS.items():
            options = [p for p in given if p.setting.group == name]
            with formatter.section((group.__doc__ or name).partition(".")[0].partition(":")[0]):
                formatter.write_dl([r for p in options if (r := p.get_help_record(ctx))])


def read_settings(
    flags: Mapping[str, str | None], config: Path | None, *, auto_demo: bool, served: bool = True
) -> Settings:
    """Return the settings; ``flags`` are by the names that click gives them."""
    given = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    context = click.get_current_context(silent=True)
    typed: dict[str, str] = context.meta.get(TYPED, {}) if context else {}
    settings = load(given, os.environ, config, typed, served=served)
    if auto_demo and not provider_configured(settings, os.environ):
        settings = load({**given, "a2a.demo": "true"}, os.environ, config, typed)
    return settings


def load_settings(
    flags: Mapping[str, str | None],
    config: Path | None,
    *,
    auto_demo: bool = False,
    silent: bool = False,
    served: bool = True,
) -> Settings:
    """Return the settings, or print everything that is wrong and exit as for wrong usage.

    ``flags`` are by the names that click gives them; warnings are printed unless told otherwise.
    """
    try:
        settings = read_settings(flags, config, auto_demo=auto_demo, served=served)
    except SettingsError as error:
        for problem in error.problems:
            click.echo(problem, err=True)
        sys.exit(2)
    for warning in () if silent else settings.warnings:
        click.echo(f"warning: {warning}", err=True)
    return settings


def config_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--config`` to a command."""
    kind = click.Path(dir_okay=False, path_type=Path)
    text = "TOML file with settings (or A2A_CONFIG); default: your own settings file, if it exists."
    return click.option("--config", type=kind, metavar="FILE", help=text)(command)


def auto_demo_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--auto-demo`` to a command."""
    text = "Use the demo model if OpenCode has no provider of its own."
    return click.option("--auto-demo", is_flag=True, help=text)(command)


@click.command(cls=SettingsCommand)
@config_option
@auto_demo_option
@click.option("--open", "opens", is_flag=True, help="Open the web console when it is ready.")
def serve(config: Path | None, auto_demo: bool, opens: bool, **flags: str | None) -> None:
    """Run the service until it is stopped.

    Without flags it starts OpenCode in the current directory, and listens on 127.0.0.1:8000.

    \b
      opencode-a2a serve --demo --open        try it, without a key
      opencode-a2a serve --workspace ~/shop   let it work on a project
      opencode-a2a serve --ask                ask before commands, edits and web requests
      OPENCODE_BASE_URL=http://127.0.0.1:4096 opencode-a2a serve   use a running OpenCode

    Every setting is a flag (--help-all), a variable, and a key of the settings file; secrets are
    only the latter two. Flags win over variables, variables over the file.
    """
    settings = load_settings(flags, config, auto_demo=auto_demo, silent=True)
    # Before 2.0 the database was by default in the directory that the service was started in.
    given_url = settings.tasks.task_store_database_url
    warnings = [*settings.warnings]
    with suppress(OSError):  # the directory is gone, or somebody else's
        places = [] if given_url else [Path.cwd(), settings.workspace or Path.cwd()]
        for file in dict.fromkeys(place / "opencode-a2a.db" for place in places):
            if file.is_file():
                then = import_command(settings, file)
                remedy = f"to keep its tasks run `{then}`, then delete the file"
                warnings.append(f"{file} is no longer used; {remedy}")
    settings = settings.model_copy(update={"warnings": tuple(warnings)})

    gc.disable()  # as in ``LazyGroup``; ``app`` has most of what a start imports
    from opencode_a2a.app import serve as run
    from opencode_a2a.cli.console import open_console_of

    gc.freeze()
    gc.enable()

    sys.exit(run(settings, (lambda: open_console_of(settings.local_url)) if opens else None))
