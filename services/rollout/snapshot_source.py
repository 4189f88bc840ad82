"""Snapshot source: where a worker's weights come from, and where it keeps them.

Of all ways from the versions that are here to the one that is wanted it takes that of the fewest bytes: a
patch, a chain of them, or a full payload. Whatever the way, the file that results has the digest which the
version's manifest names. A payload that makes anything else is named in the log and not used again; the
others lead there too.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from antiphon.api.manifest import check_manifest, full_payload
from antiphon.core.broadcast.patches import choose_payloads
from antiphon.core.config import RunConfig
from antiphon.core.dissemination.reports import NetworkLog
from antiphon.core.errors import AntiphonError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.net.security.credentials import Credentials
from antiphon.services.rollout.weights import Find, WeightSource
from antiphon.weights.patch_payloads import restore_full, spare_threads
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import BroadcastClient
from antiphon.weights.transport import AskPlan, Connections, RelayTransport, Transport
from antiphon.weights.transports.lattica import FOLDER, LatticaTransport
from antiphon.weights.transports.object_store import ObjectStoreTransport, object_place

WAIT_SHARE = 0.1
"""Of services.stall_timeout_s: longest wait for one object, so that a worker looks again many times before it
gives up."""


class OriginOrObjectStore(Transport):
    """Payloads by one transport while the origin answers, else from the object store.

    Where the origin did not answer, it is asked again beside each transfer, and the answer counts for the
    next one.
    """

    def __init__(
        self, direct: Transport, object_store: Transport, credentials: Credentials | None = None
    ) -> None:
        """Prefer `direct`, which needs the origin; `credentials` are shown to it."""
        self._direct, self._object_store, self._credentials = direct, object_store, credentials
        self._asking: asyncio.Task[bool] | None = None

    async def link(self, manifest: SnapshotManifest, payload: Payload) -> bool:
        return await self._is_reached(manifest.origin) and await self._direct.link(manifest, payload)

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        transport = self._direct if await self._is_reached(manifest.origin) else self._object_store
        await transport.fetch(manifest, payload, arrived)

    async def _is_reached(self, origin: str) -> bool:
        before, self._asking = self._asking, asyncio.create_task(self._ask(origin))
        if before is not None:
            before.cancel()
            if before.cancelled() or not before.done() or not before.result():
                return False
        return await self._asking

    async def _ask(self, origin: str) -> bool:
        client = BroadcastClient(origin, credentials=self._credentials)
        try:
            await client.where()
        except AntiphonError as error:
            _log.info("origin.unreached", origin=origin, error=str(error))
            return False
        finally:
            await client.close()
        return True

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self._direct.close()
        await self._object_store.close()


def configured_transport(
    direct: Transport,
    store: PayloadStore,
    config: RunConfig,
    credentials: Credentials | None = None,
    network: NetworkLog | None = None,
) -> Transport:
    """Return `direct`, which needs the origin, or what the run's configuration says instead or beside it.

    `network` gets what the others measure.
    """
    section, network = config.broadcast, network or NetworkLog()
    if section.lattica_port is not None:
        timeout_s, folder = section.transfer_timeout_s, store.root / FOLDER
        direct = LatticaTransport(store, folder, timeout_s, credentials, network=network)
    if section.object_store is None:
        return direct
    place = object_place(section.object_store, section.object_endpoint)
    wait_s = WAIT_SHARE * config.services.stall_timeout_s
    objects = ObjectStoreTransport(store, place, section.transfer_timeout_s, wait_s, network)
    return objects if section.object_store_first else OriginOrObjectStore(direct, objects, credentials)


MOST_ASKED = 8
"""Manifests of versions in between that are asked for at most, to find a chain of patches."""
_log = structlog.get_logger(__name__)


async def no_manifest(version: int) -> SnapshotManifest | None:
    """Know of no other version."""
    return None


class SnapshotSource(WeightSource):
    """Snapshots that a transport brings into one payload store."""

    def __init__(
        self,
        store: PayloadStore,
        config: RunConfig,
        credentials: Credentials | None = None,
        *,
        ask_plan: AskPlan | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Keep payloads in `store`.

        They come from the origin of each manifest and from those whom `ask_plan` names, unless there is a
        `transport`; the configuration may name other ways, besides or instead.
        """
        self._store = store
        self._store.remove_leftovers()
        self.network, broadcast = NetworkLog(), config.broadcast
        direct = transport or RelayTransport(
            store,
            Connections(broadcast.streams, broadcast.transfer_timeout_s, credentials),
            broadcast.transfer_timeout_s,
            network=self.network,
            ask_plan=ask_plan,
            links=broadcast.links,
        )
        self._transport = configured_transport(direct, store, config, credentials, self.network)
        self._threads = spare_threads(config.rollout.threads)
        self._refused: set[str] = set()
        """Payloads that made something else than their manifest says."""
        self._using: list[SnapshotManifest] = []
        """What the transfer under way needs: nothing of it is pruned."""
        self.bytes_fetched = 0

    async def fetch(self, manifest: SnapshotManifest, find: Find = no_manifest) -> None:
        check_manifest(manifest)
        full = full_payload(manifest)
        if self._is_held(manifest) or len(manifest.payloads) == 1:
            await self._transport.fetch(manifest, full, self._arrived)
        elif await self._transport.link(manifest, full):
            self._arrived(full.payload_bytes)
        else:
            await self._take_cheapest(manifest, find)
        await asyncio.to_thread(self._store.put_manifest, manifest)  # a parent, also after a restart

    def _arrived(self, length: int) -> None:
        self.bytes_fetched += length

    async def _take_cheapest(self, manifest: SnapshotManifest, find: Find) -> None:
        """Bring a version here by the payloads with the fewest bytes, and by others where those fail."""
        known = await asyncio.to_thread(self._earlier, manifest)
        known[manifest.version] = manifest
        self._using = list(known.values())
        aside: set[str] = set()
        try:
            await self._look_between(manifest, known, find)
            self._using = list(known.values())
            while not self._store.has(full_payload(manifest).digest):
                unusable = self._refused | aside
                offered = {
                    version: _offered([one for one in found.payloads if one.digest not in unusable], known)
                    for version, found in known.items()
                }
                held = [
                    version for version, found in known.items() if self._store.has(full_payload(found).digest)
                ]
                version, payload = choose_payloads(held, manifest.version, offered)[0]
                if not await self._take(known[version], payload, known, manifest.version):
                    aside.add(payload.digest)
        finally:
            self._using = []

    def _earlier(self, manifest: SnapshotManifest) -> dict[int, SnapshotManifest]:
        """Return the versions that are here and that patches may begin at."""
        found = {}
        for version in self._store.versions():
            earlier = self._store.manifest(version)
            if _fits(earlier, manifest) and self._is_held(earlier):
                found[version] = earlier
        return found

    async def _look_between(
        self,
        manifest: SnapshotManifest,
        known: dict[int, SnapshotManifest],
        find: Find,
    ) -> None:
        """Add manifests of versions in between, where no patch of this one begins at a version held.

        That of the version which an adapter changes is added in any case.
        """
        held = known.keys() - {manifest.version}
        for one in manifest.payloads:
            if one.encoding == "lora" and one.parent is not None and one.parent not in known:
                await self._add(one.parent, manifest, known, find)
        if not held:
            return
        asked: set[int] = set()
        open_ends = _parents(manifest)
        while not open_ends & held and len(asked) < MOST_ASKED:
            wanted = {version for version in open_ends - asked if version > min(held)}
            if not wanted:
                return
            version = min(wanted)  # the longest way back
            asked.add(version)
            open_ends |= await self._add(version, manifest, known, find)

    async def _add(
        self, version: int, manifest: SnapshotManifest, known: dict[int, SnapshotManifest], find: Find
    ) -> set[int]:
        """Add the manifest of an earlier version, if it can be had, and return where its patches begin."""
        found = await find(version)
        if found is None or found.version != version or not _fits(found, manifest):
            return set()
        check_manifest(found)
        known[version] = found
        return _parents(found)

    async def _take(
        self, manifest: SnapshotManifest, payload: Payload, known: dict[int, SnapshotManifest], wanted: int
    ) -> bool:
        """Take one payload of the chain to the `wanted` version; False where others are to be tried.

        An earlier version that cannot be had is taken out of the `known` ones.

        Raises:
            UnavailableError: when it broke off in the middle: the rest comes at the next attempt.
            IntegrityError: as `fetch`, of the full payload.
        """
        if (payload.kind, payload.encoding) == ("full", "raw"):
            try:
                await self._transport.fetch(manifest, payload, self._arrived)
            except (UnavailableError, IntegrityError) as error:
                if manifest.version == wanted:
                    raise
                _log.warning("payload.unfetched", **_named(manifest, payload), reason=str(error))
                del known[manifest.version]
                return False
            await asyncio.to_thread(self._store.put_manifest, manifest)  # what adapters change is kept by it
            return True
        before = self.bytes_fetched
        try:
            await self._transport.fetch(manifest, payload, self._arrived)
        except (UnavailableError, IntegrityError) as error:
            if self.bytes_fetched > before:
                raise
            _log.warning("payload.unfetched", **_named(manifest, payload), reason=str(error))
            return False
        parent = None if payload.parent is None else known[payload.parent]
        try:
            await asyncio.to_thread(restore_full, self._store, manifest, payload, parent, self._threads)
        except IntegrityError as error:
            if parent is None or await asyncio.to_thread(self._is_sound, parent):
                _log.warning("payload.refused", **_named(manifest, payload), reason=str(error))
                self._refused.add(payload.digest)
                self._store.drop(payload.digest)
            return False
        await asyncio.to_thread(self._store.put_manifest, manifest)
        self.network.holds(full_payload(manifest).digest, self._store.has)  # it may be handed on
        return True

    def _is_held(self, manifest: SnapshotManifest) -> bool:
        """Tell whether a version's file is here; one that a broken disk cut short is dropped."""
        payload = full_payload(manifest)
        try:
            length = self._store.path(payload.digest).stat().st_size
        except FileNotFoundError:
            return False
        if length == payload.payload_bytes:
            return True
        error = f"its file has {length} bytes instead of {payload.payload_bytes}"
        _log.warning("snapshot.damaged", version=manifest.version, error=error)
        self._store.drop(payload.digest)
        return False

    def _is_sound(self, parent: SnapshotManifest) -> bool:
        try:
            self._store.checked(parent)
        except IntegrityError as error:
            _log.warning("snapshot.damaged", version=parent.version, error=str(error))
            self._store.drop(full_payload(parent).digest)
            return False
        return True

    def open(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        # torch, after the engine set it up
        from antiphon.weights.snapshot import open_snapshot

        try:
            return open_snapshot(manifest, self._store)
        except IntegrityError:
            self._store.drop(full_payload(manifest).digest)  # so that it is fetched again
            raise

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        self._store.prune([*kept, *self._using])

    async def close(self) -> None:
        """Let go of connections."""
        await self._transport.close()


def _fits(earlier: SnapshotManifest, manifest: SnapshotManifest) -> bool:
    return (
        earlier.run_id == manifest.run_id
        and earlier.version < manifest.version
        and earlier.tensors == manifest.tensors
    )


def _offered(payloads: list[Payload], known: Mapping[int, SnapshotManifest]) -> list[Payload]:
    """Return an adapter alone where what it changes can be had, which a worker has then for all versions."""
    return [one for one in payloads if one.encoding == "lora" and one.parent in known] or payloads


def _parents(manifest: SnapshotManifest) -> set[int]:
    return {payload.parent for payload in manifest.payloads if payload.parent is not None}


def _named(manifest: SnapshotManifest, payload: Payload) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "payload": payload.digest,
        "kind": payload.kind,
        "parent": payload.parent,
        "origin": manifest.origin,
    }
