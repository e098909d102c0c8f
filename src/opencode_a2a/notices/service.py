"""What ``app`` puts together if ``A2A_NOTIFY`` is set."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.routing import BaseRoute

from opencode_a2a.config import ISSUED_PRINCIPAL, Settings
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.ids import Principal
from opencode_a2a.messages import MessageIds
from opencode_a2a.notices import pages
from opencode_a2a.notices.links import Signer, stored_secret
from opencode_a2a.notices.sender import NoticeSender
from opencode_a2a.rights import Budget
from opencode_a2a.store.database import Database
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.web.auth import AcceptedCredential
from opencode_a2a.web.browser import StaticFile


@dataclass(frozen=True, slots=True)
class Notices:
    settings: Settings
    database: Database
    signer: Signer
    sender: NoticeSender
    anonymous = pages.ANONYMOUS

    @property
    def files(self) -> Mapping[str, StaticFile]:
        return pages.files()

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

        return pages.LinkPages(
            self.settings,
            self.signer,
            self.database,
            tasks,
            methods,
            new_message_id,
            budget_of,
        ).routes()


async def start_notices(settings: Settings, database: Database) -> Notices:
    """Find or make the key of the links."""
    try:
        secret = await stored_secret("link", settings, database)
    except StoreUnavailableError:
        raise database.went_away from None
    signer = Signer(secret, settings.public_url)
    return Notices(settings, database, signer, NoticeSender(settings, signer, database))
