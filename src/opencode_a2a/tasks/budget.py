"""Budgets: how much a caller has spent today and may still spend.

The figures are OpenCode's: a model without a price costs nothing, and has to be limited by tokens.
A message is admitted while anything is left; the turn that crosses the limit is not stopped.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.clock import now_ms
from opencode_a2a.cluster.fleet import Fleet
from opencode_a2a.errors import BudgetExhaustedError
from opencode_a2a.ids import Principal
from opencode_a2a.log.state import State
from opencode_a2a.rights import Budget
from opencode_a2a.store import callers
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.callers import DAY_MS, Spent
from opencode_a2a.store.database import Database
from opencode_a2a.telemetry import AUDIT

RUNNING = (State.SUBMITTED, State.WORKING)
RUNNING_RETRY_SECONDS = 5
"""Advice to a caller who has too many turns: nobody knows when one of them will end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The usage of a caller today, and how much is left; None where there is no limit."""

    cost: float
    cost_per_day: float | None
    cost_left: float | None
    tokens: int
    tokens_per_day: int | None
    tokens_left: int | None
    running: int
    turns: int | None
    resets_at: str

    @classmethod
    def of(cls, spent: Spent, running: int, budget: Budget) -> "Figures":
        cost_per_day, tokens_per_day = budget.cost_per_day or None, budget.tokens_per_day or None
        return cls(
            round(spent.cost, 6),
            cost_per_day,
            # The turn that crosses a limit is not stopped, so more may be used than there was.
            None if cost_per_day is None else round(max(0.0, cost_per_day - spent.cost), 6),
            spent.tokens,
            tokens_per_day,
            None if tokens_per_day is None else max(0, tokens_per_day - spent.tokens),
            running,
            budget.turns or None,
            _resets_at(now_ms()),
        )


class Budgets:
    """Reads the usage of callers, and refuses work that exceeds their budget."""

    def __init__(self, database: Database, fleet: Fleet) -> None:
        self._database = database
        self._fleet = fleet

    async def check(self, principal: Principal, budget: Budget, *, begins_turn: bool) -> None:
        """Raise BudgetExhaustedError if a caller may give no more work, or begin no turn, now.

        Work for a turn that runs already does not count against the number of turns.
        """

        def read(connection: Connection) -> int:
            check_spent(connection, principal, budget)
            return task_rows.tally(connection, RUNNING, principal)

        if budget.cost_per_day or budget.tokens_per_day or budget.turns:
            try:
                running = await self._database.read(read)
                if begins_turn:
                    # The caller begins an errand before anything else is awaited.
                    check_turns(running + self._fleet.errands_of(principal) + 1, budget)
            except BudgetExhaustedError as error:
                note_refusal(principal, error)
                raise

    async def spent(self, principal: Principal | None) -> Spent:
        """Return today's usage by the turns of a principal, or of all principals."""
        day = callers.day_of(now_ms())
        if principal is None:
            return await self._database.read(callers.spending_of_all, day)
        return await self._database.read(callers.spending_of, principal, day)

    async def figures(self, principal: Principal, budget: Budget) -> Figures:
        """Return the usage of a caller today, and how much is left."""
        day = callers.day_of(now_ms())

        def read(connection: Connection) -> tuple[Spent, int]:
            running = task_rows.tally(connection, RUNNING, principal)
            return callers.spending_of(connection, principal, day), running

        spent, running = await self._database.read(read)
        return Figures.of(spent, running + self._fleet.errands_of(principal), budget)


def _resets_at(now: int) -> str:
    """Return when the next day begins, in UTC."""
    next_day = (callers.day_of(now) + 1) * DAY_MS
    return datetime.fromtimestamp(next_day / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_spent(connection: Connection, principal: Principal, budget: Budget) -> None:
    """Raise BudgetExhaustedError if a caller has nothing left of today's budget."""
    if budget.cost_per_day or budget.tokens_per_day:
        now = now_ms()
        spent = callers.spending_of(connection, principal, callers.day_of(now))
        wait = (DAY_MS - now % DAY_MS) // 1000 + 1
        until = _resets_at(now)
        if 0 < budget.cost_per_day <= spent.cost:
            most = f"{budget.cost_per_day:g}"
            text = f"Today's budget of {most} is spent; it resets at {until}"
            raise _refusal("cost_per_day", text, budget.cost_per_day, spent, until, wait)
        if 0 < budget.tokens_per_day <= spent.tokens:
            text = f"Today's {budget.tokens_per_day} tokens are used up; they reset at {until}"
            most = budget.tokens_per_day
            raise _refusal("tokens_per_day", text, most, spent, until, wait)


def check_turns(running: int, budget: Budget) -> None:
    """Raise BudgetExhaustedError if a caller runs too many turns; ``running`` has the new one."""
    most = budget.turns
    if 0 < most < running:
        text = f"This caller has {most} turns running, which is the limit; wait for one to end"
        raise _refusal("turns", text, most, None, None, RUNNING_RETRY_SECONDS)


def check_new_turn(
    connection: Connection, principal: Principal, budget: Budget, errands: int
) -> None:
    """Raise BudgetExhaustedError if a caller, who runs some errands, may begin no turn now."""
    check_spent(connection, principal, budget)
    if budget.turns:
        running = task_rows.tally(connection, RUNNING, principal)
        check_turns(running + errands + 1, budget)


def _refusal(
    limit: str,
    text: str,
    most: float,
    spent: Spent | None,
    until: str | None,
    wait: int,
) -> BudgetExhaustedError:
    return BudgetExhaustedError(
        text,
        budget=limit,
        limit=most,
        cost=None if spent is None else round(spent.cost, 6),
        tokens=None if spent is None else spent.tokens,
        resets_at=until,
        retry_after_seconds=wait,
    ).with_headers(("Retry-After", str(wait)))


def note_refusal(principal: Principal, error: BudgetExhaustedError) -> None:
    """Count and audit a refusal; called in the request's task, so that the record names it."""
    limit = str(error.data["budget"])
    metrics.BUDGET_REJECTED.labels(limit).inc()
    AUDIT.info("budget refused", principal=principal, limit=limit)
