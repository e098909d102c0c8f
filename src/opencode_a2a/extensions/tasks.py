"""The method that finds tasks; A2A lists them by state, context and time alone."""

from typing import Annotated, ClassVar

from pydantic import StringConstraints

from opencode_a2a.a2a import render
from opencode_a2a.events import JsonObject
from opencode_a2a.extensions.call import Call
from opencode_a2a.extensions.messages import A2ATask
from opencode_a2a.extensions.params import DEFAULT_LIMIT, Items, Limit, Routed
from opencode_a2a.extensions.registry import Access, Extension

TASKS = Extension(
    key="tasks",
    title="OpenCode tasks",
    anchor="opencode-tasks-v1",
    summary="Find tasks by their titles, among all that are kept.",
    notes=(
        "The title of a task is the beginning of its first message, or what OpenCode calls its "
        "session.",
        "Listing tasks by state, context and time is an operation of A2A.",
    ),
)


class TaskSearchParams(Routed):
    example: ClassVar[JsonObject] = {"text": "flaky test"}

    text: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200)]
    limit: Limit = DEFAULT_LIMIT


@TASKS.method("opencode.tasks.search", Access.READ, local=True)
async def search_tasks(call: Call, params: TaskSearchParams) -> Items[A2ATask]:
    """Find the tasks whose titles contain all words of a text, or whose ids begin with it.

    The newest come first, without artifacts and history. A supervisor finds everybody's.
    """
    whose = None if call.caller.supervises else call.principal
    found = await call.deps.tasks.search(whose, params.text, params.limit)
    shown = (render.task(state, 0, artifacts=False, reader=call.principal) for state in found)
    return Items(items=[A2ATask.spelled(task, call.version) for task in shown])
