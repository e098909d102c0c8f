"""The tables, and the numbered steps that bring the tables of earlier versions up to date.

A new database gets the tables as they are declared here; an older one gets them by the steps that
it lacks. Steps only go forward, and a database of a newer program is refused.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex
from sqlalchemy.sql.compiler import DDLCompiler

from opencode_a2a.ids import MAIN

metadata = sa.MetaData()


# An engine whose database needs another name for one of these types says so with ``@compiles``.


class Number(sa.BigInteger):
    """The number of a row, which the database may give it."""


class Text(sa.String):
    """A text that is compared by its bytes."""


class PartialIndex(sa.Index):
    """An index of the rows that meet a condition.

    SQLAlchemy has options for that, one for each kind of database, and to give one is to import all
    drivers that it knows for that kind.
    """

    def __init__(self, name: str, *columns: str, where: str) -> None:
        super().__init__(name, *columns)
        self.where = where


@compiles(CreateIndex)
def _create_index(made: CreateIndex, compiler: DDLCompiler, **options: Any) -> str:
    text = compiler.visit_create_index(made, **options)  # pyright: ignore[reportUnknownMemberType] # not typed
    return f"{text} WHERE {made.element.where}" if isinstance(made.element, PartialIndex) else text


OPEN_STATES = ("submitted", "working", "input_required", "auth_required")
"""The states of tasks that have not ended; ``log.state`` knows what they mean."""
OPEN = f"state IN ({', '.join(map(repr, OPEN_STATES))})"
"""The condition of ``tasks_open``. A query has to contain it word for word to use that index."""

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("no", Number, primary_key=True, autoincrement=True),
    sa.Column("id", Text, nullable=False, unique=True),
    sa.Column("principal", Text, nullable=False),
    sa.Column("context_id", Text, nullable=False),
    sa.Column("state", Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
    sa.Column("output_modes", sa.LargeBinary),
    sa.Column("status", sa.LargeBinary, nullable=False),
    sa.Column("request", sa.LargeBinary, comment="the prompt to send next; NULL once it ended"),
    sa.Column("archive", sa.LargeBinary, comment="artifacts and history of an ended task"),
    sa.Column(
        "upstream", Text, nullable=False, server_default=MAIN, comment="the OpenCode that runs it"
    ),
    sa.Index("tasks_by_time", "principal", "updated_at", "no"),
    sa.Index("tasks_by_context", "principal", "context_id", "updated_at", "no"),
    sa.Index("tasks_by_state", "principal", "state", "updated_at", "no"),
    sa.Index("tasks_ended", "updated_at", "state"),
    PartialIndex("tasks_open", "upstream", "no", where=OPEN),
    sqlite_autoincrement=True,
)

tallies = sa.Table(
    "tallies",
    metadata,
    sa.Column("principal", Text, primary_key=True),
    sa.Column("state", Text, primary_key=True),
    sa.Column("n", sa.Integer, nullable=False),
    PartialIndex("tallies_open", "state", where="n > 0"),
    sqlite_with_rowid=False,
)

messages = sa.Table(
    "messages",
    metadata,
    sa.Column("principal", Text, primary_key=True),
    sa.Column("message_id", Text, primary_key=True),
    sa.Column("task_no", Number, nullable=False),
    sa.Column("digest", sa.LargeBinary, primary_key=True, comment="of the message's content"),
    sa.Column("refusal", sa.LargeBinary, comment="the error, if it was refused as an answer"),
    sa.Index("messages_by_task", "task_no"),
    sqlite_with_rowid=False,
)

# A row holds consecutive entries of one task: an index with a key for each entry would cost more
# than the entries themselves.
entries = sa.Table(
    "entries",
    metadata,
    sa.Column("no", Number, primary_key=True, autoincrement=True),
    sa.Column("task_no", Number, nullable=False),
    sa.Column("first_seq", sa.Integer, nullable=False),
    sa.Column("last_seq", sa.Integer, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Index("entries_by_task", "task_no", "first_seq", unique=True),
)

links = sa.Table(
    "links",
    metadata,
    sa.Column("principal", Text, primary_key=True),
    sa.Column("context_id", Text, primary_key=True),
    sa.Column(
        "place", Text, primary_key=True, comment="workspace or directory; empty for the root"
    ),
    sa.Column("session_id", Text, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
    sa.Index("links_by_session", "session_id"),
    sqlite_with_rowid=False,
)

owners = sa.Table(
    "owners",
    metadata,
    sa.Column("session_id", Text, primary_key=True),
    sa.Column("principal", Text, nullable=False),
    sa.Column("claimed_until", sa.BigInteger, comment="NULL once the owner is confirmed"),
    sa.Column(
        "upstream", Text, nullable=False, server_default=MAIN, comment="the OpenCode that has it"
    ),
    sqlite_with_rowid=False,
)

interrupts = sa.Table(
    "interrupts",
    metadata,
    sa.Column("request_id", Text, primary_key=True),
    sa.Column("task_id", Text, nullable=False, comment="empty for work without a task"),
    sa.Column("context_id", Text, nullable=False),
    sa.Column("principal", Text, nullable=False),
    sa.Column("type", Text, nullable=False),
    sa.Column("asked", sa.LargeBinary, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sa.Column("resolution", Text),
    sa.Column("settled_at", sa.BigInteger),
    sa.Column("settled_by", Text),
    sa.Column("answer", sa.LargeBinary, comment="the latest, stored before OpenCode gets it"),
    sa.Column("number", sa.Integer, comment="in the task, if a person was asked"),
    sa.Column("rights", sa.LargeBinary, comment="of the work that asks"),
    sa.Index("interrupts_pending", "principal", "resolution", "expires_at"),
    sa.Index("interrupts_by_task", "task_id", "number"),
    sqlite_with_rowid=False,
)

grants = sa.Table(
    "grants",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("principal", Text, nullable=False),
    sa.Column("context_id", Text, nullable=False),
    sa.Column("task_id", Text, nullable=False, comment="empty for the whole context"),
    sa.Column("directory", Text, nullable=False),
    sa.Column("permission", Text, nullable=False),
    sa.Column("patterns", sa.LargeBinary, nullable=False),
    sa.Column("request_id", Text, nullable=False, comment="the interrupt whose answer gave it"),
    sa.Column("given_at", sa.BigInteger, nullable=False),
    sa.Column("revoked_at", sa.BigInteger),
    sa.Index("grants_by_context", "principal", "context_id"),
    sqlite_with_rowid=False,
)

spending = sa.Table(
    "spending",
    metadata,
    sa.Column("principal", Text, primary_key=True),
    sa.Column("day", sa.Integer, primary_key=True, comment="days since the epoch, UTC"),
    sa.Column("cost", sa.Double, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

places = sa.Table(
    "places",
    metadata,
    sa.Column("name", Text, primary_key=True, comment="id of a workspace, or directory"),
    sa.Column("principal", Text, nullable=False),
    sa.Column("upstream", Text, comment="the OpenCode that has it"),
    sqlite_with_rowid=False,
)

UNKNOWN_CHANGE = 2**62
"""In ``webhooks.changed``: nobody has noted the last change, which has to be found in the log."""
BEHIND = "state = 'active' AND acked < changed"
"""The condition of ``webhooks_due``. A query has to contain it word for word to use that index."""

subscriptions = sa.Table(
    "subscriptions",
    metadata,
    sa.Column("endpoint", Text, primary_key=True, comment="of the push service of a browser"),
    sa.Column("principal", Text, nullable=False),
    sa.Column("public_key", Text, nullable=False),
    sa.Column("secret", Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Index("subscriptions_by_principal", "principal"),
)
"""Browsers to which messages for a principal are pushed."""

# A webhook is a reader of a task's log whose position is stored; see ``store.webhooks``.
webhooks = sa.Table(
    "webhooks",
    metadata,
    sa.Column("no", Number, primary_key=True, autoincrement=True),
    sa.Column("task_no", Number, nullable=False),
    sa.Column("config_id", Text, nullable=False, comment="unique for the task only"),
    sa.Column("key", Text, nullable=False, comment="begins the id of each notification"),
    sa.Column("principal", Text, nullable=False),
    sa.Column("version", Text, nullable=False, comment="of A2A, in which notifications are sent"),
    sa.Column("url", Text, nullable=False),
    sa.Column("scheme", Text),
    sa.Column("credentials", Text, comment="NULL once it is no longer needed"),
    sa.Column("token", Text, comment="likewise"),
    sa.Column(
        "acked", sa.BigInteger, nullable=False, comment="the last entry that the receiver has taken"
    ),
    sa.Column("state", Text, nullable=False, comment="active, done or failed"),
    sa.Column("attempts", sa.Integer, nullable=False, comment="failed ones since the last success"),
    sa.Column("failing_since", sa.BigInteger),
    sa.Column("next_at", sa.BigInteger),
    sa.Column("last_outcome", Text),
    sa.Column(
        "changed",
        sa.BigInteger,
        nullable=False,
        server_default=str(UNKNOWN_CHANGE),
        comment="the last entry that changed the state of the task",
    ),
    sa.Column("claimed_by", sa.BigInteger, comment="the replica that serves it just now"),
    sa.Index("webhooks_by_task", "task_no", "config_id", unique=True),
    sa.Index("webhooks_by_principal", "principal", "state"),
    PartialIndex("webhooks_active", "no", where="state = 'active'"),
    PartialIndex("webhooks_due", "next_at", where=BEHIND),
    sqlite_autoincrement=True,
)

# The processes that share the database; none if it is not shared.
replicas = sa.Table(
    "replicas",
    metadata,
    sa.Column("no", Number, primary_key=True, autoincrement=True),
    sa.Column("name", Text, nullable=False),
    sa.Column("version", Text, nullable=False, comment="of the program"),
    sa.Column("started", sa.DateTime(timezone=True), nullable=False),
    sa.Column("seen", sa.DateTime(timezone=True), nullable=False, comment="when it committed last"),
    sa.Column(
        "commits", sa.BigInteger, nullable=False, comment="counted first in each transaction"
    ),
    sa.Column("gone", sa.DateTime(timezone=True), comment="when it was declared gone"),
    sa.Column("key", Text, comment="drawn at random: its number may be used again after a loss"),
    sa.Column("lists", sa.LargeBinary, comment="the upstreams in its settings"),
    sa.Column(
        "format", sa.Integer, nullable=False, server_default="0", comment="of the calls it sends"
    ),
    sa.Column(
        "claims",
        sa.Integer,
        nullable=False,
        server_default="0",
        comment="0: it serves the webhooks of its tasks without claiming them",
    ),
    sa.Column(
        "short_lease",
        sa.Double,
        comment="seconds without a commit after which it is gone, if its lock is free",
    ),
    sa.Column("lease", sa.Double, comment="seconds without a commit after which it is gone"),
    sqlite_autoincrement=True,
)

# The OpenCodes, each of which one of these processes runs at a time.
upstreams = sa.Table(
    "upstreams",
    metadata,
    sa.Column("name", Text, primary_key=True),
    sa.Column("owner", Number, comment="the replica that runs it; NULL once handed over"),
    sa.Column("state", Text, nullable=False, comment="up, away or lost, as its owner sees it"),
    sa.Column("drain", sa.Integer, nullable=False, comment="1: new contexts begin elsewhere"),
    sa.Column("serves", sa.LargeBinary, comment="directories; NULL for all"),
    sa.Column("room", sa.Integer, nullable=False, comment="turns at once; 0: no limit"),
    sa.Column("tasks", sa.Integer, nullable=False, comment="open ones, as its owner counts them"),
    sa.Column("changed", sa.DateTime(timezone=True), nullable=False, comment="of the state"),
    sqlite_with_rowid=False,
)

# Calls that a replica forwards to the one that runs an OpenCode.
mail = sa.Table(
    "mail",
    metadata,
    sa.Column("no", Number, primary_key=True, autoincrement=True),
    sa.Column("upstream", Text, nullable=False, comment="the OpenCode whose owner is called"),
    sa.Column("sender", Number, nullable=False, comment="the replica that waits for the reply"),
    sa.Column("taker", Number, comment="the replica that runs the call"),
    sa.Column(
        "again", sa.Integer, nullable=False, comment="1 and 2: a new owner may run it once more"
    ),
    sa.Column("kind", Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("reply", sa.LargeBinary),
    sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    sa.Index("mail_by_upstream", "upstream", "no"),
    sqlite_autoincrement=True,
)

# How many requests callers made lately, as each replica counted them.
rates = sa.Table(
    "rates",
    metadata,
    sa.Column("key", sa.LargeBinary, primary_key=True),
    sa.Column("slot", sa.Integer, primary_key=True, comment="of the replica that counted"),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("n", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)

# Codes and sessions of the console that have ended, and the secret that signs them, shared by all
# replicas.
sign_ins = sa.Table(
    "sign_ins",
    metadata,
    sa.Column("digest", sa.LargeBinary, primary_key=True),
    sa.Column(
        "until", sa.BigInteger, nullable=False, comment="when it would have ended by itself, in ms"
    ),
    sa.Column("secret", sa.LargeBinary),
    sqlite_with_rowid=False,
)

version = sa.Table(
    "schema_version",
    metadata,
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column(
        "oldest", sa.Integer, nullable=False, comment="the oldest schema that a program must know"
    ),
    sa.Column("checked", sa.Integer, nullable=False, server_default="0"),
)


class SchemaTooNewError(Exception):
    """The database was written by a newer program."""


class ForeignTablesError(Exception):
    """The database has tables of the same names that another program made."""


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
    (  # several processes on one database; from here on steps are for PostgreSQL too
        """CREATE TABLE replicas (
            no INTEGER PRIMARY KEY AUTOINCREMENT, name VARCHAR NOT NULL, version VARCHAR NOT NULL,
            started TIMESTAMP NOT NULL, seen TIMESTAMP NOT NULL, commits BIGINT NOT NULL,
            gone TIMESTAMP
        )""",
        "ALTER TABLE schema_version ADD COLUMN oldest INTEGER NOT NULL DEFAULT 5",
        "DROP INDEX entries_by_task",
        "CREATE UNIQUE INDEX entries_by_task ON entries (task_no, first_seq)",
    ),
    (  # short numbers, and permissions that a person gives for a task or a context
        "ALTER TABLE interrupts ADD COLUMN number INTEGER",
        "CREATE INDEX interrupts_by_task ON interrupts (task_id, number)",
        """CREATE TABLE grants (
            id VARCHAR NOT NULL, principal VARCHAR NOT NULL, context_id VARCHAR NOT NULL,
            task_id VARCHAR NOT NULL, directory VARCHAR NOT NULL, permission VARCHAR NOT NULL,
            patterns BLOB NOT NULL, request_id VARCHAR NOT NULL, given_at BIGINT NOT NULL,
            revoked_at BIGINT, PRIMARY KEY (id)
        ) WITHOUT ROWID""",
        "CREATE INDEX grants_by_context ON grants (principal, context_id)",
    ),
    (  # what work without a task may do, and answers that stay refused
        "ALTER TABLE interrupts ADD COLUMN rights BLOB",
        "ALTER TABLE messages ADD COLUMN refusal BLOB",
    ),
    (  # several OpenCodes behind one service
        f"ALTER TABLE tasks ADD COLUMN upstream VARCHAR NOT NULL DEFAULT '{MAIN}'",
        f"ALTER TABLE owners ADD COLUMN upstream VARCHAR NOT NULL DEFAULT '{MAIN}'",
    ),
    (  # push notifications
        """CREATE TABLE webhooks (
            no INTEGER PRIMARY KEY AUTOINCREMENT, task_no BIGINT NOT NULL,
            config_id VARCHAR NOT NULL, key VARCHAR NOT NULL, principal VARCHAR NOT NULL,
            version VARCHAR NOT NULL, url VARCHAR NOT NULL, scheme VARCHAR, credentials VARCHAR,
            token VARCHAR, acked BIGINT NOT NULL, state VARCHAR NOT NULL,
            attempts INTEGER NOT NULL, failing_since BIGINT, next_at BIGINT, last_outcome VARCHAR
        )""",
        "CREATE UNIQUE INDEX webhooks_by_task ON webhooks (task_no, config_id)",
        "CREATE INDEX webhooks_by_principal ON webhooks (principal, state)",
        "CREATE INDEX webhooks_due ON webhooks (state, next_at)",
    ),
    (  # what callers have used
        """CREATE TABLE spending (
            principal VARCHAR NOT NULL, day INTEGER NOT NULL, cost DOUBLE PRECISION NOT NULL,
            tokens BIGINT NOT NULL, PRIMARY KEY (principal, day)
        ) WITHOUT ROWID""",
    ),
    (  # several replicas at a time
        "ALTER TABLE replicas ADD COLUMN lists BLOB",
        "ALTER TABLE places ADD COLUMN upstream VARCHAR",
        """CREATE TABLE upstreams (
            name VARCHAR NOT NULL, owner BIGINT, state VARCHAR NOT NULL, drain INTEGER NOT NULL,
            serves BLOB, room INTEGER NOT NULL, tasks INTEGER NOT NULL,
            changed TIMESTAMP WITH TIME ZONE NOT NULL, PRIMARY KEY (name)
        ) WITHOUT ROWID""",
        """CREATE TABLE mail (
            no INTEGER PRIMARY KEY AUTOINCREMENT, upstream VARCHAR NOT NULL,
            sender BIGINT NOT NULL, taker BIGINT, again INTEGER NOT NULL, kind VARCHAR NOT NULL,
            body BLOB NOT NULL, reply BLOB, at TIMESTAMP WITH TIME ZONE NOT NULL
        )""",
        "CREATE INDEX mail_by_upstream ON mail (upstream, no)",
        """CREATE TABLE rates (
            key BLOB NOT NULL, slot INTEGER NOT NULL, at BIGINT NOT NULL, n INTEGER NOT NULL,
            PRIMARY KEY (key, slot)
        ) WITHOUT ROWID""",
        """CREATE TABLE sign_ins (
            digest BLOB NOT NULL, until BIGINT NOT NULL, secret BLOB, PRIMARY KEY (digest)
        ) WITHOUT ROWID""",
    ),
    # the open tasks of all principals, counted without those that have none
    ("CREATE INDEX tallies_open ON tallies (state) WHERE n > 0",),
    # No query uses it, and every attempt to send a notification had to change it.
    ("DROP INDEX webhooks_due",),
    # the format of the calls between replicas; earlier programs say none
    ("ALTER TABLE replicas ADD COLUMN format INTEGER NOT NULL DEFAULT 0",),
    (  # what is open among all that is kept, and the contexts of a session
        "CREATE INDEX tasks_open ON tasks (upstream, no) WHERE state IN"
        " ('submitted', 'working', 'input_required', 'auth_required')",
        "CREATE INDEX links_by_session ON links (session_id)",
        "CREATE INDEX webhooks_active ON webhooks (no) WHERE state = 'active'",
    ),
    # a replica is known by more than its number, which a database that lost rows may give again
    ("ALTER TABLE replicas ADD COLUMN key VARCHAR",),
    (  # webhooks that any replica claims; 4611686018427387904 stands for a log to be looked at
        "ALTER TABLE webhooks ADD COLUMN changed BIGINT NOT NULL DEFAULT 4611686018427387904",
        "ALTER TABLE webhooks ADD COLUMN claimed_by BIGINT",
        "ALTER TABLE replicas ADD COLUMN claims INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX webhooks_due ON webhooks (next_at)"
        " WHERE state = 'active' AND acked < changed",
    ),
    (  # browsers to which messages are pushed
        "CREATE TABLE subscriptions (endpoint VARCHAR NOT NULL PRIMARY KEY,"
        " principal VARCHAR NOT NULL, public_key VARCHAR NOT NULL, secret VARCHAR NOT NULL,"
        " created_at BIGINT NOT NULL)",
        "CREATE INDEX subscriptions_by_principal ON subscriptions (principal)",
    ),
    # a replica that was killed is known by the lock of its connection
    ("ALTER TABLE replicas ADD COLUMN short_lease DOUBLE PRECISION",),
    # each replica is judged by its own lease; earlier programs do not state theirs
    ("ALTER TABLE replicas ADD COLUMN lease DOUBLE PRECISION",),
)
"""The statements that lead from each version of the schema to the next.

A step never changes once it is on the main branch: there are databases that have taken it. A test
keeps the digest of each (``tests/support/steps.txt``).

They spell out their tables, since the declarations above may have changed after they were written.
They are written for SQLite; ``Engine.spelling`` says what another database says instead.
"""
OLDEST = 5
"""The oldest version of the schema whose program can use the newest schema.

Steps only add, or drop an index that no query needs, so that programs of the version before can
keep running while others are upgraded. A step that changes something which a program relies on has
to raise this to its own number.
"""


def check_version(connection: Connection) -> int:
    """Return the version of the schema, 0 for none; raise if this program cannot use it."""
    inspector = sa.inspect(connection)
    if not inspector.has_table(version.name):
        for table in metadata.sorted_tables:
            if inspector.has_table(table.name):
                raise ForeignTablesError(
                    f"the table {table.name} was not made by this program; use another database, "
                    "or a schema of its own"
                )
        return 0
    current = connection.scalar(sa.select(version.c.version)) or 0
    if current > len(STEPS):
        oldest = connection.scalar(sa.select(version.c.oldest))
        if oldest is None or oldest > len(STEPS):
            raise SchemaTooNewError(
                f"the database has schema {current}, this program knows {len(STEPS)}: "
                "use the program that wrote it, or another database"
            )
    return current


def migrate(connection: Connection, spelling: Mapping[str, str]) -> None:
    """Bring the database to the newest schema, in the transaction of the connection."""
    current = check_version(connection)
    if current == 0:
        metadata.create_all(connection, checkfirst=False)
        connection.execute(version.insert().values(version=len(STEPS), oldest=OLDEST))
    elif current < len(STEPS):
        for step in STEPS[current:]:
            take_step(connection, step, spelling)
        connection.execute(version.update().values(version=len(STEPS), oldest=OLDEST))


def take_step(connection: Connection, step: tuple[str, ...], spelling: Mapping[str, str]) -> None:
    for statement in step:
        for word, other in spelling.items():
            statement = statement.replace(word, other)
        connection.exec_driver_sql(statement)
