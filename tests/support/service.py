"""The service on a socket in front of an OpenCode, live or not, and stock clients for it."""

import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx2

from opencode_a2a.app import Service
from opencode_a2a.config import Settings, load
from opencode_a2a.events import Json, JsonObject
from tests.support import stores
from tests.support.running import accepting

TOKEN = "a-token-for-the-tests-of-one-caller"  # noqa: S105 - not a secret


class Behind(Protocol):
    """What stands behind a service."""

    @property
    def url(self) -> str: ...
    @property
    def password(self) -> str: ...
    @property
    def workspace(self) -> Path: ...


class Reachable(Protocol):
    """A service with a plain HTTP client for it."""

    @property
    def http(self) -> httpx2.AsyncClient: ...


def variables_for(backstage: Behind, state: Path, **changes: str) -> dict[str, str]:
    """Return the environment variables of a service in front of an OpenCode."""
    return {
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(state),
        "A2A_TASK_STORE_DATABASE_URL": stores.url(state),
        "A2A_RATE_LIMIT_ENABLED": "false",
        "A2A_SHUTDOWN_GRACE_SECONDS": "5",
        "OPENCODE_BASE_URL": backstage.url,
        "OPENCODE_AUTH_PASSWORD": backstage.password,
        "OPENCODE_WORKSPACE_ROOT": str(backstage.workspace),
        **changes,
    }


def settings_for(backstage: Behind, state: Path, **changes: str) -> Settings:
    """Return settings as environment variables would give them."""
    return load({}, variables_for(backstage, state, **changes))


@dataclass
class Running:
    """A running service, with a plain HTTP client that has the credential."""

    url: str
    http: httpx2.AsyncClient
    service: Service


def message(text: str, *, configuration: JsonObject | None = None, **fields: Json) -> JsonObject:
    """Return the params of a 1.0 send with one text part."""
    message_id = fields.pop("messageId", None) or str(uuid.uuid4())
    params: JsonObject = {
        "message": {
            "messageId": message_id,
            "role": "ROLE_USER",
            "parts": [{"text": text}],
            **fields,
        }
    }
    if configuration is not None:
        params["configuration"] = configuration
    return params


class _Service(Service):
    """A service whose failure is told by the test, and does not end the process of the tests."""

    why = ""

    def end(self, part: str, error: BaseException) -> None:
        self.failed = True
        self.why += f"{part}: {error!r}\n"


@asynccontextmanager
async def serving(
    settings: Settings, headers: Mapping[str, str] | None = None, port: int = 0
) -> AsyncGenerator[Running]:
    """Run the service with these settings."""
    app = _Service(settings)
    sent = {"Authorization": f"Bearer {TOKEN}", **(headers or {})}
    async with (
        app.running(),
        accepting(app.server, port) as url,
        httpx2.AsyncClient(base_url=url, headers=sent, timeout=60, trust_env=False) as http,
    ):
        yield Running(url, http, app)
        assert not app.failed, app.why
