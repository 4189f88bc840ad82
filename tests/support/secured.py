"""Keys, bundles and a coordinator behind TLS, as `antiphon invite` makes them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from antiphon.cli.invite import invite
from antiphon.core.checks import TokenRules
from antiphon.core.config import RunConfig
from antiphon.core.trust.access_tokens import Scope, TokenClaims
from antiphon.lineage.store.artifact_store import open_store
from antiphon.net.rpc.serving import Security, stop_server
from antiphon.net.security.access_tokens import make_token, new_token_id
from antiphon.net.security.credentials import Credentials, load_credentials
from antiphon.net.security.keys import TOKEN_KEY, ensure_key, write_private
from antiphon.services.coordinator.audit_queue import AuditQueue
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import JOURNAL_NAME, coordinator_guard, start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.system.clock import wall_clock
from tests.support.light_parties import LightPrompts
from tests.support.loop_model import RUN_ID

SECRET = bytes(range(32))
"""Draws the groups to audit; the same ones in every test."""


@dataclass
class House:
    """A home's keys."""

    keys: Path

    @property
    def services(self) -> Credentials:
        return load_credentials(self.keys / "services")

    def worker(self, name: str, **claims: object) -> Credentials:
        """Return the bundle of a worker with a fresh token; `claims` replace those of a good one."""
        bundle = self.keys / "workers" / name
        write_private(bundle / "token", self.token(name, **claims).encode())
        return load_credentials(bundle)

    def token(self, worker: str, **claims: object) -> str:
        good: dict[str, object] = {
            "token_id": new_token_id(),
            "run_id": RUN_ID,
            "worker_name": worker,
            "scopes": (Scope.LEASE, Scope.SUBMIT, Scope.PULL),
            "expires_at": int(datetime.now(UTC).timestamp()) + 3600,
            "max_leases": 8,
        }
        made = TokenClaims(**{**good, **claims})  # type: ignore[arg-type]
        return make_token(made, ensure_key(self.keys, TOKEN_KEY))


def make_house(folder: Path, workers: Sequence[str] = ("w",)) -> House:
    invite(*workers, keys=folder)
    return House(folder)


@dataclass
class SecuredSite:
    """A coordinator that speaks TLS alone."""

    address: str
    state_machine: RunStateMachine
    trust: AuditQueue
    clients: list[CoordinatorClient] = field(default_factory=list)

    def client(self, credentials: Credentials | None, address: str | None = None) -> CoordinatorClient:
        client = CoordinatorClient(address or self.address, timeout_s=10.0, credentials=credentials)
        self.clients.append(client)
        return client


@asynccontextmanager
async def secured(
    config: RunConfig, folder: Path, house: House, rules: TokenRules | None = None
) -> AsyncIterator[SecuredSite]:
    store = open_store(folder / "store", config.record)
    state_machine = RunStateMachine(
        config,
        RUN_ID,
        Journal(folder / JOURNAL_NAME, RUN_ID),
        store,
        LightPrompts(rules),
        asyncio.get_running_loop().time,
    )
    await state_machine.start()
    credentials = house.services
    security = Security(credentials, coordinator_guard(state_machine, credentials, wall_clock))
    trust = AuditQueue(state_machine, SECRET)
    service = CoordinatorService(state_machine, credentials.learner_key or b"", trust)
    server, port = await start_coordinator(service, "127.0.0.1", 0, security)
    site = SecuredSite(f"127.0.0.1:{port}", state_machine, trust)
    try:
        yield site
    finally:
        for client in site.clients:
            await client.close()
        await stop_server(server, grace_s=0.1)
        await state_machine.close()


__all__ = ["House", "Scope", "SecuredSite", "make_house", "secured"]
