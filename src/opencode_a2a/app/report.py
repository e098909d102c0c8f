"""What a running service says about itself: ``/health``, and the records of its start and end."""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import structlog

from opencode_a2a import __version__, telemetry
from opencode_a2a.app.parts import Parts
from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings, show
from opencode_a2a.databases import database_file
from opencode_a2a.errors import ServiceError, UpstreamError
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import Caller
from opencode_a2a.opencode.connect import examine
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.process import UnsupportedOpenCodeError
from opencode_a2a.opencode.upstream import (
    HEALTH_SECONDS,
    Trouble,
    check_directory,
    facts,
    trouble,
)
from opencode_a2a.opencode.withholding import not_withheld
from opencode_a2a.printable import program
from opencode_a2a.server.contracts import PROFILE_SUMMARY, spoken_versions
from opencode_a2a.server.sse import Streams

logger = structlog.get_logger(__name__)

MODEL_SECONDS = 60.0
"""How long the name of OpenCode's model is kept before OpenCode is asked again."""


class ServiceReport:
    def __init__(
        self, settings: Settings, token_file: Path, parts: Parts, streams: Streams
    ) -> None:
        self._settings = settings
        self._token_file = token_file
        self._parts = parts
        self._fleet = parts.fleet
        self._web_push = parts.notices is not None and parts.notices.browsers is not None
        self._tasks = parts.tasks
        self._streams = streams
        self._trouble: str | None = None
        """Why no OpenCode could be used at the start, with the remedy."""
        self._model: str | None = None
        """The model that OpenCode uses unless it is told another, as far as it is known."""
        self._model_until = 0.0
        """The monotonic time until which that is kept."""

    # At the start and at the end

    async def examine_opencodes(self) -> None:
        """Find out why no OpenCode can be used; if only some cannot, log that.

        Raise UnsupportedOpenCodeError if a person has to act before any can be used.
        """
        members, troubles = [*self._fleet.members.values()], list[Trouble]()
        for member in members:
            turns = member.turns
            if member.server.managed is None:
                found = await trouble(turns.opencode, turns.settings)
                if found is None:
                    await check_directory(turns.opencode, turns.settings)
                    continue
                troubles.append(found)
                if len(members) > 1:
                    cause = found.sentence
                    logger.warning("OpenCode is not usable", upstream=member.name, cause=cause)
        if len(troubles) == len(members):
            if all(one.lasting for one in troubles):
                raise UnsupportedOpenCodeError(troubles[0].sentence)
            self._trouble = troubles[0].sentence

    def longest_wait(self) -> float:
        """Return for how many seconds the oldest task that waits for a person has been waiting."""
        states = [task.log.state.status for task in self._tasks.open.all()]
        since = min((one.at for one in states if one.state.interrupted), default=None)
        return (now_ms() - since) / 1000 if since is not None else 0.0

    def started(self) -> dict[str, object]:
        """Return what runs here and where it is, for the record of the start."""
        settings, url = self._settings, self._settings.public_url
        behind = self._fleet.first.server
        managed = behind.managed
        states = [task.log.state.status.state for task in self._tasks.open.all()]
        waiting = sum(state.interrupted for state in states)
        file = database_file(settings.database_url)
        return {
            "version": __version__,
            "url": url,
            "card": f"{url}/.well-known/agent-card.json",
            "protocol_versions": spoken_versions(settings),
            "opencode": behind.version,
            "opencode_url": None if managed else telemetry.mask_url(behind.url),
            "opencode_pid": managed.pid if managed else None,
            "upstreams": [*self._fleet.members],
            "workspace": str(settings.workspace) if settings.workspace else None,
            "token_file": None if settings.knows_callers else str(self._token_file),
            "database": str(file) if file else show(settings.database_url),
            "waiting": waiting,
            "running": len(states) - waiting,
            "problem": self._trouble,
            "program": program(),
        }

    async def opencode_answers(self) -> dict[str, object] | None:
        """Return the model of OpenCode, and what it does unasked; OpenCode may take a while."""
        if self._trouble is not None:
            return None
        for member in self._fleet.members.values():
            if member.server.managed is None:
                at, known = Location.of(member.turns.settings.workspace), member.server.password
                why = await not_withheld(member.turns.opencode, at, password=bool(known))
                if why is not None:
                    where = telemetry.mask_url(member.server.url)
                    logger.warning(
                        f"the agent of OpenCode at {where} may answer its own permissions: {why}"
                    )
        turns, settings = self._fleet.first.turns, self._settings
        found = await facts(turns.opencode, turns.settings)
        can_ask = {"demo": settings.a2a.demo, "can_ask": settings.opencode.managed_server}
        return found and {**asdict(found), **can_ask, "try": f"{program()} chat"}

    def stopping(self) -> dict[str, object]:
        """Return the tasks that are still open at the end, and how to continue them."""
        open_tasks = self._tasks.open.all()
        if not open_tasks:
            return {}
        states = [task.log.state for task in open_tasks]
        waiting = [state.ref.id for state in states if state.status.state.interrupted]
        working = [state.ref.id for state in states if not state.status.state.interrupted]
        notes: list[str] = []
        lasting = self._settings.tasks.task_store_backend == "database"
        if lasting:
            notes.append(f"After the next start, follow a task: {program()} task --follow TASK")
        if waiting and lasting:
            notes.append(f'Answer one that waits: {program()} call "yes" --task TASK')
        for member in self._fleet.members.values():
            managed, turns = member.server.managed, self._parts.turns_in(member)
            if managed is None or not turns:
                continue
            if managed.keep:
                notes.append(
                    f"OpenCode (pid {managed.pid}) keeps running for the tasks that wait; its "
                    "other turns are stopped. The next start takes it over if it has the same "
                    f"program, configuration and environment. To end it instead: kill {managed.pid}"
                )
            elif managed.ends_with_us and any(status.state.interrupted for status in turns):
                notes.append(
                    "OpenCode ends with this container, and so does what it asks: the tasks that "
                    "wait will fail. To keep them next time, run OpenCode in a container of its "
                    "own, with `opencode-a2a opencode`."
                )
            else:
                notes.append("OpenCode is stopped; its turns end as failed.")
        return {"waiting": waiting, "working": working, "notes": notes}

    # While it runs

    async def check_opencode(self) -> None:
        """Raise unless an OpenCode answers. One is enough: new tasks start there."""
        failures: list[str] = []
        for member in self._fleet.members.values():
            opencode = member.turns.opencode
            with suppress(TimeoutError, UpstreamError):
                async with asyncio.timeout(HEALTH_SECONDS):
                    await opencode.health()
                if member.up or not member.owned:
                    return
                # What answers may be another OpenCode by now, which cannot be used.
            # Why it does not answer as it did takes several calls to find out.
            _, why = await examine(
                opencode.raw_response, password=opencode.has_password, seconds=HEALTH_SECONDS
            )
            if why is None:
                return
            # A managed one that has ended is started again by this program itself.
            failures.append(str(why) if member.server.managed is None else why.what)
        if not self._fleet.census.any_up:  # otherwise another replica can start tasks
            raise UpstreamError(f"OpenCode cannot be used: {failures[0]}")

    async def health(self, caller: Caller) -> JsonObject:
        """Return the body of ``/health`` for a caller."""
        settings, model = self._settings, self._settings.opencode.model
        if model is None and time.monotonic() >= self._model_until:
            at = Location.of(settings.workspace)
            opencode = self._fleet.serving(at.directory).turns.opencode
            with suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(HEALTH_SECONDS):
                    self._model = (await opencode.config(at=at)).model
                    if self._model is None:
                        connected = await opencode.connected_providers(at=at)
                        names = (f"{p}/{m}" for p, m in connected.default.items())
                        self._model = next(names, None)
            self._model_until = time.monotonic() + MODEL_SECONDS
        spent = await self._tasks.budgets.spent(None if caller.supervises else caller.principal)
        budget = await self._tasks.budgets.figures(caller.principal, caller.budget)
        return {
            "status": "ok",
            "service": "opencode-a2a",
            "version": __version__,
            "opencode": {
                "managed": settings.opencode.managed_server,
                "version": self._fleet.first.turns.opencode.version,
            },
            "profile": PROFILE_SUMMARY,
            **self._replicas(),
            "workspace": str(settings.workspace) if settings.workspace else None,
            "model": str(model) if model else self._model,
            "cost_today": round(spent.cost, 6),
            "budget": asdict(budget),
            "demo": settings.a2a.demo,
            **({"web_push": True} if self._web_push else {}),
            "protocol_versions": list(settings.a2a.supported_protocol_versions),
            "task_store": settings.tasks.task_store_backend,
            "streams": len(self._streams),
        }

    def _replicas(self) -> JsonObject:
        """Return every OpenCode, and with several replicas those that run them."""
        members = self._fleet.members
        upstreams: dict[str, JsonObject] = {
            member.name: {
                "name": member.name,
                "state": member.state,
                "running": member.turns.running,
                "tasks": self._fleet.tasks[member.name],
                "drain": member.drain,
            }
            for member in members.values()
        }
        live = self._fleet.census.live
        if not live:
            return {"upstreams": [*upstreams.values()]}
        me, names = self._settings.replica_name, {one.no: one.name for one in live}
        for row in self._fleet.census.upstreams:
            if row.name in members and members[row.name].owned:
                upstreams[row.name]["owner"] = me
                continue
            owner = names.get(row.owner or 0)
            upstreams[row.name] = {
                "name": row.name,
                "state": row.state if owner or row.state == "lost" else "away",
                "running": None,  # only its owner knows
                "tasks": row.open_tasks,
                "drain": row.drain,
                "owner": owner,
            }
        return {
            "replica": me,
            "replicas": [{"name": one.name, "version": one.version} for one in live],
            "upstreams": [upstreams[name] for name in sorted(upstreams)],
        }
