"""Relay, the serving side: chunks of a payload that is still arriving are handed on as they come."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from antiphon.api.snapshots import Place
from antiphon.core.errors import UnavailableError
from antiphon.core.records import Payload
from antiphon.system.wakeup import Wakeup
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.service import BroadcastService, following

STALL_S = 30.0
"""Longest wait for a chunk that is on its way while nothing arrives: longer than receivers have patience."""


class Arrivals:
    """Wakes those who wait for chunks of a payload."""

    def __init__(self) -> None:
        self._waiting: dict[str, Wakeup] = {}
        self._count: Counter[str] = Counter()
        """Who waits, by payload. Peers may name any payload: what nobody waits for takes no memory."""

    def notify(self, payload_digest: str) -> None:
        if (wakeup := self._waiting.get(payload_digest)) is not None:
            wakeup.notify()

    async def wait(self, payload_digest: str, timeout_s: float) -> bool:
        """Wait until something of a payload arrives; False when `timeout_s` seconds passed without."""
        wakeup = self._waiting.setdefault(payload_digest, Wakeup())
        self._count[payload_digest] += 1
        try:
            return await wakeup.wait(timeout_s)
        finally:
            self._count[payload_digest] -= 1
            if not self._count[payload_digest]:
                del self._count[payload_digest]
                self._waiting.pop(payload_digest, None)


class RelayService(BroadcastService):
    """Serves a payload store that receives at the same time."""

    def __init__(
        self,
        store: PayloadStore,
        arrivals: Arrivals,
        stall_s: float = STALL_S,
        uplink_bytes_per_s: float | None = None,
    ) -> None:
        """Serve `store`.

        Args:
            store: of this process.
            arrivals: of the same store's transfers.
            stall_s: longest wait for a chunk that is on its way, while nothing of its payload arrives.
            uplink_bytes_per_s: cap on what all receivers together get, so that sampling keeps its share.
        """
        super().__init__(store, uplink_bytes_per_s)
        self._arrivals = arrivals
        self._stall_s = stall_s

    async def where(self) -> Place:
        """Return no place: files are linked from the origin alone, and no peer learns a worker's paths."""
        return Place(Path(), "")

    async def _find(self, digest: str) -> Payload:
        """Return a payload that is here, or begins to arrive in time: children may hear of it first."""
        try:
            return await super()._find(digest)
        except UnavailableError:
            if not await self._arrivals.wait(digest, self._stall_s):
                raise
        return await super()._find(digest)

    async def _next(self, payload: Payload, left: Sequence[int], most: int) -> range:
        """Return the first of these chunks that are here: one that is late keeps no other back."""
        while True:
            held = self._store.held(payload)
            if here := [index for index in left if held[index]]:
                return following(here, most)
            if not await self._arrivals.wait(payload.digest, self._stall_s):
                raise UnavailableError(
                    f"chunk {left[0]} of payload {payload.digest} did not arrive here for "
                    f"{self._stall_s:g} s; take it from another holder"
                )
