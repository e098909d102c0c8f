"""Tasks that were not run: copies of one that ended, in the database of a service."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import orjson

COLUMNS = "principal, context_id, state, created_at, output_modes, archive, upstream"


def add_copies(state: Path, task_id: str, titles: Sequence[str]) -> list[str]:
    """Add ended tasks with these titles, each newer than all before it; return their ids."""
    (file,) = state.rglob("tasks.db")
    database = sqlite3.connect(file, timeout=30)
    with database:
        ((principal, kept, status),) = database.execute(
            "SELECT principal, state, status FROM tasks WHERE id = ?", [task_id]
        )
        ((newest,),) = database.execute("SELECT max(updated_at) FROM tasks")
        ids = [f"{number:08x}-copy-of-{task_id}" for number in range(len(titles))]
        for number, (new, title) in enumerate(zip(ids, titles, strict=True), 1):
            at = newest + number
            told = orjson.dumps(orjson.loads(status) | {"subject": title, "title": None, "at": at})
            database.execute(
                f"INSERT INTO tasks (id, status, updated_at, {COLUMNS})"  # noqa: S608 - constants
                f" SELECT ?, ?, ?, {COLUMNS} FROM tasks WHERE id = ?",
                [new, told, at, task_id],
            )
        database.execute(
            "UPDATE tallies SET n = n + ? WHERE principal = ? AND state = ?",
            [len(titles), principal, kept],
        )
    database.close()
    return ids
