"""Methods about a caller's webhooks: list deliveries, and retry those that failed for good.

Webhooks are set by operations of A2A (``tasks.webhooks``), and served by ``push.loop``.
"""

from typing import get_args
from urllib.parse import urlsplit

from opencode_a2a.a2a.types import timestamp
from opencode_a2a.errors import TaskNotFoundError, WebhookNotFoundError
from opencode_a2a.extensions.call import Call
from opencode_a2a.extensions.params import Done, Id, Items, Payload, Routed
from opencode_a2a.extensions.registry import Access, Condition, Extension
from opencode_a2a.store.webhooks import HookState

WEBHOOKS = Extension(
    key="webhooks",
    title="OpenCode webhooks",
    anchor="opencode-webhooks-v1",
    summary="List webhook deliveries and retry those that failed for good.",
    skill="opencode.webhooks.query",
    tags=("push", "webhooks"),
    notes=(
        "Webhooks are set by the push notification operations of A2A, or with a message.",
        "What a receiver answered is never told, only how an attempt ended.",
    ),
)
MOST_WEBHOOKS = 1000
_ENABLED = Condition("A2A_PUSH_ENABLED", lambda settings: settings.push.enabled, default=True)


class WebhooksParams(Routed):
    task_id: Id | None = None


class WebhookParams(Routed):
    task_id: Id
    id: Id


class WebhookItem(Payload):
    task_id: str
    id: str
    url: str
    """Without its query, which may hold a secret."""
    state: HookState
    attempts: int
    """That failed since the last that succeeded."""
    last_outcome: str | None = None
    failing_since: str | None = None
    next_at: str | None = None


class WebhookDone(Done):
    task_id: str
    id: str


@WEBHOOKS.method("opencode.webhooks.list", Access.READ, condition=_ENABLED, local=True)
async def list_webhooks(call: Call, params: WebhooksParams) -> Items[WebhookItem]:
    """List the caller's webhooks, of one task or of all; the newest first, at most a thousand.

    One that is `failed` was given up; its `last_outcome` says why: `http_503`, `timeout`,
    `unreachable`, `unknown_host`, `refused_address`, `tls`, or `error` for a fault of the service.
    """
    found = await call.deps.webhooks.page(call.principal, params.task_id, MOST_WEBHOOKS)

    def at(moment: int | None) -> str | None:
        return None if moment is None else timestamp(moment)

    items = [
        WebhookItem(
            task_id=task_id,
            id=row.config_id,
            url=urlsplit(row.url)._replace(query="", fragment="").geturl(),
            state=row.state,
            attempts=row.attempts,
            last_outcome=row.last_outcome,
            failing_since=at(row.failing_since),
            next_at=at(row.next_at),
        )
        for task_id, row in found
        if row.state in get_args(HookState)  # else the row is damaged
    ]
    return Items(items=items)


@WEBHOOKS.method(
    "opencode.webhooks.retry",
    Access.CONTROL,
    WebhookNotFoundError,
    example={"task_id": "t-1", "id": "c-1"},
    condition=_ENABLED,
    local=True,
)
async def retry_webhook(call: Call, params: WebhookParams) -> WebhookDone:
    """Try a webhook again at once, from the first change that its receiver has not taken.

    One that is done stays as it is: its secrets are erased.
    """
    try:
        log = await call.deps.tasks.log(call.principal, params.task_id)
        await call.deps.webhooks.retry(log, params.id)
    except TaskNotFoundError:
        raise WebhookNotFoundError(task_id=params.task_id, id=params.id) from None
    return WebhookDone(task_id=params.task_id, id=params.id)
