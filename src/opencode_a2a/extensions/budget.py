"""The caller's budget: what is used today and what is left. ``tasks.budget`` enforces it."""

from dataclasses import asdict

from opencode_a2a.extensions.call import Call
from opencode_a2a.extensions.params import Payload, Routed
from opencode_a2a.extensions.registry import Access, Extension

BUDGET = Extension(
    key="budget",
    title="OpenCode budget",
    anchor="opencode-budget-v1",
    summary="See what the caller has used today, and may still use.",
    notes=(
        "Costs are OpenCode's, days are UTC. What is null has no limit.",
        "A message beyond the budget is refused with BUDGET_EXHAUSTED and the time at which it "
        "resets; the turn that crosses it is not stopped.",
    ),
)


class BudgetUse(Payload):
    nullable = frozenset({"cost_per_day", "cost_left", "tokens_per_day", "tokens_left", "turns"})

    cost: float
    cost_per_day: float | None = None
    cost_left: float | None = None
    tokens: int
    """Of all kinds: read, written, reasoned, and in the cache."""
    tokens_per_day: int | None = None
    tokens_left: int | None = None
    running: int
    """Running turns, and work that was begun through extension methods."""
    turns: int | None = None
    """How many of them there may be at once."""
    resets_at: str


@BUDGET.method("opencode.budget.get", Access.READ, local=True)
async def get_budget(call: Call, params: Routed) -> BudgetUse:
    """Return what the caller has used today, what is left, and when the next day begins."""
    figures = await call.deps.tasks.budgets.figures(call.principal, call.caller.budget)
    return BudgetUse(**asdict(figures))
