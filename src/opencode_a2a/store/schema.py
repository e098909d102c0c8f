"""Tables, and the numbered steps that lead to them.

A new database gets the tables as they are declared here; an older one is taken there by the steps
it lacks. Steps only go forward, and a database written by a newer program is refused.
"""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

metadata = sa.MetaData()

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("no", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String, nullable=False, unique=True),
    sa.Column("principal", sa.String, nullable=False),
    sa.Column("context_id", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
    sa.Column("output_modes", sa.LargeBinary),
    sa.Column("status", sa.LargeBinary, nullable=False),
    sa.Column("request", sa.LargeBinary, comment="what is to be prompted; empty once it ended"),
    sa.Column("archive", sa.LargeBinary, comment="artifacts and history of an ended task"),
    sa.Index("tasks_by_time", "principal", "updated_at", "no"),
    sa.Index("tasks_by_context", "principal", "context_id", "updated_at", "no"),
    sa.Index("tasks_by_state", "principal", "state", "updated_at", "no"),
    sa.Index("tasks_ended", "updated_at", "state"),
    sqlite_autoincrement=True,
)

tallies = sa.Table(
    "tallies",
    metadata,
    sa.Column("principal", sa.String, primary_key=True),
    sa.Column("state", sa.String, primary_key=True),
    sa.Column("n", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)

messages = sa.Table(
    "messages",
    metadata,
    sa.Column("principal", sa.String, primary_key=True),
    sa.Column("message_id", sa.String, primary_key=True),
    sa.Column("task_no", sa.Integer, nullable=False),
    sa.Column("digest", sa.LargeBinary, primary_key=True, comment="of the message's content"),
    sa.Index("messages_by_task", "task_no"),
    sqlite_with_rowid=False,
)

# A row is a run of entries of one task: an index with one key per entry would cost more than
# the entries themselves.
entries = sa.Table(
    "entries",
    metadata,
    sa.Column("no", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("task_no", sa.Integer, nullable=False),
    sa.Column("first_seq", sa.Integer, nullable=False),
    sa.Column("last_seq", sa.Integer, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Index("entries_by_task", "task_no", "first_seq"),
)

links = sa.Table(
    "links",
    metadata,
    sa.Column("principal", sa.String, primary_key=True),
    sa.Column("context_id", sa.String, primary_key=True),
    sa.Column("place", sa.String, primary_key=True, comment="workspace or directory; empty: root"),
    sa.Column("session_id", sa.String, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

owners = sa.Table(
    "owners",
    metadata,
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("principal", sa.String, nullable=False),
    sa.Column("claimed_until", sa.BigInteger, comment="set while the claim is only pending"),
    sqlite_with_rowid=False,
)

interrupts = sa.Table(
    "interrupts",
    metadata,
    sa.Column("request_id", sa.String, primary_key=True),
    sa.Column("task_id", sa.String, nullable=False, comment="empty: no task follows the work"),
    sa.Column("context_id", sa.String, nullable=False),
    sa.Column("principal", sa.String, nullable=False),
    sa.Column("type", sa.String, nullable=False),
    sa.Column("asked", sa.LargeBinary, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sa.Column("resolution", sa.String),
    sa.Column("settled_at", sa.BigInteger),
    sa.Column("settled_by", sa.String),
    sa.Column("answer", sa.LargeBinary, comment="the latest one given, before OpenCode has it"),
    sa.Index("interrupts_pending", "principal", "resolution", "expires_at"),
    sqlite_with_rowid=False,
)

places = sa.Table(
    "places",
    metadata,
    sa.Column("name", sa.String, primary_key=True, comment="id of a workspace, or directory"),
    sa.Column("principal", sa.String, nullable=False),
    sqlite_with_rowid=False,
)

version = sa.Table(
    "schema_version",
    metadata,
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("checked", sa.Integer, nullable=False, server_default="0"),
)


class SchemaTooNewError(Exception):
    """The database was written by a newer program."""


STEPS: tuple[tuple[str, ...], ...] = (
    (),  # the first schema; a new database gets the tables as they are declared above
    (  # The digest is part of a message's key: an id may come again with other content.
        "DROP INDEX messages_by_task",
        "ALTER TABLE messages RENAME TO messages_before",
        """CREATE TABLE messages (
            principal VARCHAR NOT NULL, message_id VARCHAR NOT NULL, task_no INTEGER NOT NULL,
            digest BLOB NOT NULL, PRIMARY KEY (principal, message_id, digest)
        ) WITHOUT ROWID""",
        "INSERT INTO messages SELECT principal, message_id, task_no, digest FROM messages_before",
        "DROP TABLE messages_before",
        "CREATE INDEX messages_by_task ON messages (task_no)",
    ),
    (  # the owners of workspaces and worktrees
        """CREATE TABLE places (
            name VARCHAR NOT NULL, principal VARCHAR NOT NULL, PRIMARY KEY (name)
        ) WITHOUT ROWID""",
    ),
    # the answers that are stored before OpenCode is given them
    ("ALTER TABLE interrupts ADD COLUMN answer BLOB",),
)
"""The statements that lead from each version of the schema to the next.

They spell out their tables: the declarations above may have moved on since they were written.
"""


def migrate(connection: Connection) -> None:
    """Bring the database to the newest schema, all of it or nothing."""
    current = 0
    if sa.inspect(connection).has_table(version.name):
        current = connection.scalar(sa.select(version.c.version)) or 0
    if current > len(STEPS):
        raise SchemaTooNewError(
            f"the database has schema {current}, this program knows {len(STEPS)}: "
            "use the program that wrote it, or another database"
        )
    if current == 0:
        metadata.create_all(connection)
        connection.execute(version.insert().values(version=len(STEPS)))
    elif current < len(STEPS):
        for step in STEPS[current:]:
            for statement in step:
                connection.exec_driver_sql(statement)
        connection.execute(version.update().values(version=len(STEPS)))
