"""What a caller may still spend today, and why a message is refused when that is nothing.

The figures are OpenCode's: a model without a price costs nothing, and has to be limited by tokens.
A message is admitted while anything is left; the turn that crosses the limit is not stopped.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.errors import BudgetExhaustedError
from opencode_a2a.ids import Principal
from opencode_a2a.rights import Budget
from opencode_a2a.store import spending
from opencode_a2a.store.spending import DAY_MS, Spent
from opencode_a2a.tasks.state import State
from opencode_a2a.telemetry import AUDIT, now_ms

RUNNING = (State.SUBMITTED, State.WORKING)
RUNNING_RETRY_SECONDS = 5
"""When to try again if it is not known when a turn will end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a caller has used today and may still use; None where there is no limit."""

    cost: float
    cost_per_day: float | None
    cost_left: float | None
    tokens: int
    tokens_per_day: int | None
    tokens_left: int | None
    running: int
    turns: int | None
    resets_at: str


def figures(spent: Spent, running: int, budget: Budget) -> Figures:
    cost, cost_per_day = round(spent.cost, 6), budget.cost_per_day or None
    tokens_per_day = budget.tokens_per_day or None
    return Figures(
        cost,
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


def _resets_at(now: int) -> str:
    """Return when the next day begins, in UTC."""
    next_day = (spending.day_of(now) + 1) * DAY_MS
    return datetime.fromtimestamp(next_day / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_spent(connection: Connection, principal: Principal, budget: Budget) -> None:
    """Raise BudgetExhaustedError if a caller has nothing left of today's budget."""
    if budget.cost_per_day or budget.tokens_per_day:
        now = now_ms()
        spent = spending.read(connection, principal, spending.day_of(now))
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
    """Raise BudgetExhaustedError if a caller has too many turns, with the one that is asked for."""
    most = budget.turns
    if 0 < most < running:
        text = f"This caller has {most} turns running, which is the limit; wait for one to end"
        raise _refusal("turns", text, most, None, None, RUNNING_RETRY_SECONDS)


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
    """Leave a record of a refusal; in the task of the request, which the record then names."""
    limit = str(error.data["budget"])
    metrics.BUDGET_REJECTED.labels(limit).inc()
    AUDIT.info("budget refused", principal=principal, limit=limit)
