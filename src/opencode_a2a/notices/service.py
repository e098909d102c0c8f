"""What ``app`` puts together if ``A2A_NOTIFY`` is set."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute

from opencode_a2a.config import ISSUED_PRINCIPAL, Settings
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.ids import Principal
from opencode_a2a.messages import MessageIds
from opencode_a2a.net.egress import Egress
from opencode_a2a.notices import pages
from opencode_a2a.notices.links import Signer, stored_secret
from opencode_a2a.notices.sender import NoticeSender
from opencode_a2a.rights import Budget
from opencode_a2a.store.database import Database
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.web.auth import AcceptedCredential
from opencode_a2a.web.browser import POLICY, StaticFile, static_files

if TYPE_CHECKING:
    from opencode_a2a.notices.webpush import BrowserTarget

DEVICE = "/notices"
"""The page at which a browser is subscribed."""
DEVICE_POLICY = POLICY.replace("trusted-types 'none'", "trusted-types worker")
"""It may name one script to the browser: the worker that shows messages."""


@dataclass(frozen=True, slots=True)
class Notices:
    settings: Settings
    database: Database
    signer: Signer
    sender: NoticeSender
    browsers: "BrowserTarget | None"
    """The target ``webpush``, if it is switched on."""
    anonymous = pages.ANONYMOUS

    @property
    def files(self) -> Mapping[str, StaticFile]:
        if self.browsers is None:
            return pages.files()
        device = static_files(Path(__file__).parent / "device", DEVICE)
        index = device[DEVICE]._replace(policy=DEVICE_POLICY)
        return {**pages.files(), **device, DEVICE: index}

    def routes(
        self,
        tasks: TaskService,
        methods: Dispatcher,
        new_message_id: MessageIds,
        credentials: Iterable[AcceptedCredential],
    ) -> list[BaseRoute]:
        """Return the routes of the page behind a link."""
        budgets = {one.caller.principal: one.caller.budget for one in credentials}
        issues = self.settings.oidc.issuer is not None

        def budget_of(principal: Principal) -> Budget | None:
            if issues and principal.startswith(ISSUED_PRINCIPAL):
                return self.settings.limits.budget
            return budgets.get(principal)

        links = pages.LinkPages(
            self.settings,
            self.signer,
            self.database,
            tasks,
            methods,
            new_message_id,
            budget_of,
        )
        return [*links.routes(), *(self.browsers.routes() if self.browsers else ())]

    async def aclose(self) -> None:
        await self.sender.aclose()
        if self.browsers is not None:
            await self.browsers.aclose()


async def start_notices(settings: Settings, database: Database) -> Notices:
    """Find or make the keys of links and of pushed messages."""
    browsers: BrowserTarget | None = None
    try:
        signer = Signer(await stored_secret("link", settings, database), settings.public_url)
        for entry in settings.notices.notify:
            if entry.kind == "webpush":
                from opencode_a2a.notices import webpush  # it needs an optional library

                rules = Egress((), settings.push.allow_private_hosts)
                secret = await stored_secret("vapid", settings, database)
                seconds = settings.push.timeout_seconds
                browsers = webpush.BrowserTarget(secret, entry.contact, database, rules, seconds)
    except StoreUnavailableError:
        raise database.went_away from None
    sender = NoticeSender(settings, signer, database, browsers)
    return Notices(settings, database, signer, sender, browsers)
