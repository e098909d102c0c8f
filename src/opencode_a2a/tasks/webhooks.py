"""The webhooks of tasks: set, find, retry and delete them.

Any replica does this for any task, since nothing but the database knows a webhook. Changes of state
are sent by ``push.loop``, which is told by ``Database.dispatch`` that there is something to do, and
by ``Database.notify`` in other replicas.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy import ColumnElement
from sqlalchemy.engine import Connection

from opencode_a2a.config import PushSettings
from opencode_a2a.errors import LimitExceededError, StoreUnavailableError, TaskNotFoundError
from opencode_a2a.ids import Principal
from opencode_a2a.log.log import ReadableLog
from opencode_a2a.log.state import TaskRef
from opencode_a2a.messages import PushConfig
from opencode_a2a.store import webhooks
from opencode_a2a.store.database import Database
from opencode_a2a.store.webhooks import HookRow, Replaced
from opencode_a2a.telemetry import AUDIT

SNAPSHOTS = "0.3"
"""The version whose notifications show the whole task."""


class Webhooks:
    def __init__(self, database: Database, settings: PushSettings) -> None:
        self.settings = settings
        self._database = database
        self.notices_for: Callable[[Principal], Sequence[str]] | None = None
        """Returns the names of the targets that tell a person of the tasks of a principal."""

    # Setting

    async def put(self, log: ReadableLog, config: PushConfig, *, anew: bool = True) -> HookRow:
        """Set a webhook, and send it the changes of the task from now on.

        If the task has ended or waits for a person, its present state is sent at once: that may
        have happened just before. Without ``anew`` an equal webhook stays as it is, with the
        changes that its receiver has not taken yet.
        """
        state = await log.firm_state()
        present = state.status.state.terminal or state.status.state.interrupted
        acked = state.last_change - 1 if present else state.last_change

        def write(connection: Connection) -> tuple[HookRow, Replaced | None, bool]:
            equal = None if anew else _find_equal(connection, log, config)
            if equal is not None:
                return equal, None, False
            self._check_limits(connection, log.no, log.ref, config)
            return *webhooks.put(connection, _new_row(log.no, log.ref, config, acked)), True

        def stored(outcome: tuple[HookRow, Replaced | None, bool]) -> None:
            row, replaced, new = outcome
            if new:
                self.note_set(row, log.ref, replaced)

        # The caller may have gone away by the time it is stored.
        outcome = await self._database.write_in_time(write, stored)
        stored(outcome)
        return outcome[0]

    def insert(
        self, connection: Connection, task_no: int, ref: TaskRef, config: PushConfig | None
    ) -> HookRow | None:
        """Store with a new task where a person is told of it, and the webhook that it comes with.

        Call ``note_set`` with the webhook once that is committed. Raise LimitExceededError, which
        refuses the task.
        """
        for name in self.notices_for(ref.principal) if self.notices_for else ():
            url = f"{webhooks.NOTICE}://{name}"
            row = HookRow(
                task_no=task_no,
                config_id=url,  # those of callers have no slash
                key=secrets.token_hex(8),
                principal=ref.principal,
                version=webhooks.NOTICE,
                url=url,
                acked=0,
                changed=0,
            )
            webhooks.add(connection, row)
        if config is None:
            return None
        self._check_limits(connection, task_no, ref, config)
        row, _ = webhooks.put(connection, replace(_new_row(task_no, ref, config, 0), changed=0))
        return row

    def write_with_message(
        self, log: ReadableLog, config: PushConfig
    ) -> Callable[[Connection], tuple[HookRow, Replaced | None] | None]:
        """Return the write that stores a webhook with a message on an existing task.

        The webhook is sent the changes after the message. The write returns the webhook if it is
        new, and the one that it replaces: call ``note_if_stored`` afterwards. It raises nothing,
        since the same transaction stores entries of other tasks: call ``check_limits`` before.
        """
        acked = log.state.last_change

        def write(connection: Connection) -> tuple[HookRow, Replaced | None] | None:
            if _find_equal(connection, log, config) is not None:
                return None
            return webhooks.put(connection, _new_row(log.no, log.ref, config, acked))

        return write

    def note_set(self, row: HookRow, ref: TaskRef, replaced: Replaced | None = None) -> None:
        """Take note that a webhook of a task is stored, and stop sending to the one it replaces."""
        if replaced is not None:
            self._tell("d", replaced.no, replaced.claimed_by)
        host = urlsplit(row.url).hostname
        AUDIT.info("webhook set", principal=row.principal, task_id=ref.id, host=host)
        self._database.dispatch("w")

    async def note_if_stored(
        self, row: HookRow, replaced: Replaced | None, log: ReadableLog
    ) -> None:
        """Take note of a webhook, unless the transaction that wrote it has failed.

        If the database is unreachable, nobody knows; the webhook is served all the same.
        """
        with suppress(StoreUnavailableError):
            if any(one.key == row.key for one in await self.of_task(log)):
                self.note_set(row, log.ref, replaced)

    async def check_limits(self, log: ReadableLog, config: PushConfig) -> None:
        """Raise LimitExceededError if a message may not bring this webhook to its task."""

        def check(connection: Connection) -> None:
            if _find_equal(connection, log, config) is None:
                self._check_limits(connection, log.no, log.ref, config)

        await self._database.read(check)

    def _check_limits(
        self, connection: Connection, task_no: int, ref: TaskRef, config: PushConfig
    ) -> None:
        config_id = _config_id(config, ref) or ""
        of_task, mine = webhooks.counts(connection, task_no, config_id, ref.principal)
        if of_task >= self.settings.max_per_task:
            raise LimitExceededError(
                "The task has as many push notification configurations as it may have; "
                "delete one, or replace one by its id",
                limit=self.settings.max_per_task,
            )
        if mine >= self.settings.max_per_principal:
            raise LimitExceededError(
                "Too many push notification configurations are in use; wait for tasks to end, or "
                "delete some",
                limit=self.settings.max_per_principal,
            )

    # Webhooks that exist

    async def of_task(self, log: ReadableLog) -> list[HookRow]:
        """Return the webhooks of a task, oldest first."""
        return await self._database.read(webhooks.of_task, log.no)

    async def find(self, log: ReadableLog, config_id: str | None) -> HookRow:
        """Return a webhook of a task, or its oldest; raise TaskNotFoundError."""
        return _named(await self.of_task(log), config_id)

    async def page(
        self, principal: Principal, task_id: str | None, most: int
    ) -> list[tuple[str, HookRow]]:
        """Return the webhooks of a caller with the ids of their tasks, newest first."""
        return await self._database.read(webhooks.page, principal, task_id, most)

    async def delete(self, log: ReadableLog, config_id: str) -> None:
        """Delete a webhook, if it is there, and stop sending to it."""
        deleted = await self._database.write(webhooks.delete, log.no, config_id)
        if deleted is not None:
            AUDIT.info("webhook deleted", principal=log.ref.principal, task_id=log.ref.id)
            self._tell("d", deleted.no, deleted.claimed_by)

    async def retry(self, log: ReadableLog, config_id: str) -> None:
        """Try a webhook at once that was given up, or waits for its next attempt."""

        def again(connection: Connection) -> tuple[int, int | None]:
            no = _named(webhooks.of_task(connection, log.no), config_id).no
            return no, webhooks.try_again(connection, no)

        def told(outcome: tuple[int, int | None]) -> None:
            self._tell("w", *outcome)

        told(await self._database.write_in_time(again, told))

    def unread(self) -> ColumnElement[bool]:
        """Return the condition that the log of a row of ``tasks`` is kept for its webhooks."""
        served = self.settings.enabled or self.notices_for is not None
        return webhooks.unread() if served else sa.false()

    def _tell(self, kind: str, no: int, claimed_by: int | None) -> None:
        """Have the delivery of a webhook hurried (``w``) or ended (``d``), wherever it is."""
        text = f"{kind},{no}"
        self._database.dispatch(text)
        if claimed_by not in (None, self._database.replica):
            self._database.notify(text)


def _new_row(task_no: int, ref: TaskRef, config: PushConfig, acked: int) -> HookRow:
    return HookRow(
        task_no=task_no,
        config_id=_config_id(config, ref) or str(uuid4()),
        key=secrets.token_hex(8),
        principal=ref.principal,
        version=config.version,
        url=config.url,
        acked=acked,
        scheme=config.scheme,
        credentials=config.credentials,
        token=config.token,
    )


def _config_id(config: PushConfig, ref: TaskRef) -> str | None:
    """Return the id of a webhook, if it is decided: in 0.3 a task has one, with the task's id."""
    return config.id or (ref.id if config.version == SNAPSHOTS else None)


def _find_equal(connection: Connection, log: ReadableLog, config: PushConfig) -> HookRow | None:
    """Return the active webhook of a task that equals a configuration."""
    wanted = (config.version, config.url, config.scheme, config.credentials, config.token)
    for row in webhooks.of_task(connection, log.no):
        named = _config_id(config, log.ref) in (None, row.config_id)
        alike = (row.version, row.url, row.scheme, row.credentials, row.token) == wanted
        if row.state == "active" and named and alike:
            return row
    return None


def _named(rows: Sequence[HookRow], config_id: str | None) -> HookRow:
    for row in rows:
        if config_id in (None, row.config_id):
            return row
    raise TaskNotFoundError("The task has no push notification configuration with this id")
