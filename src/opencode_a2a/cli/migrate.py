"""``opencode-a2a migrate``: import the database of an earlier version.

The source is never changed. It can be run again: what was imported already is left alone.
"""

import asyncio
import sys
from pathlib import Path
from typing import NoReturn

import click

from opencode_a2a.cli.serve import config_option, load_settings
from opencode_a2a.config import DatabaseUrl, database_file, is_postgresql


class DatabaseUrlType(click.ParamType[str]):
    """The URL of a database, checked as the setting is."""

    name = "URL"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter[str](DatabaseUrl).validate_python(value)
        except ValidationError as error:
            text = error.errors()[0]["msg"].removeprefix("Value error, ")
            self.fail(text, param, ctx)


@click.command()
@click.option(
    "--from", "source", type=DatabaseUrlType(), required=True, help="The database to take over."
)
@click.option(
    "--to",
    "target",
    type=DatabaseUrlType(),
    help="The database to fill.  [that of the settings]",
)
@config_option
def migrate(source: str, target: str | None, config: Path | None) -> None:
    """Import finished tasks, the sessions of contexts and their owners from an earlier version.

    The service has to be stopped meanwhile, the earlier one too. Nothing is written to the source.
    """
    settings = load_settings({}, config)
    file, url = database_file(source), target or settings.database_url
    into = database_file(url)
    if is_postgresql(source):
        fail("tasks are taken over from SQLite only; to move a PostgreSQL, use pg_dump")
    if file is None or not file.is_file():
        fail(f"there is no database {file or 'in memory'}")
    if into is None and not is_postgresql(url):
        fail("the settings keep tasks in memory; name a database with --to")
    if into is not None and into.exists() and into.samefile(file):
        fail("both databases are the same file; name another one with --to")

    from opencode_a2a.store.database import DatabaseError  # half a second to import
    from opencode_a2a.tasks.earlier import ImportFailedError, import_database

    days = settings.tasks.task_retention_days
    try:
        report = asyncio.run(import_database(file, url, days))
    except (DatabaseError, ImportFailedError) as error:
        fail(str(error))
    for kind, number in report.taken.items():
        click.echo(f"{kind}: {number} taken")
    for kind, number in report.left.items():
        click.echo(f"{kind}: {number} left")
    click.echo(f"{file} is unchanged; the tasks are in {into or report.target}")


def fail(text: str) -> NoReturn:
    """Say why nothing was imported, and exit as for wrong usage."""
    click.echo(f"opencode-a2a: {text}", err=True)
    sys.exit(2)
