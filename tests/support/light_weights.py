"""Light snapshots: one tensor, no payload, and a source that notes what was asked of it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from antiphon.core.digests import digest_bytes
from antiphon.core.dissemination.reports import NetworkLog
from antiphon.core.records import SnapshotManifest
from antiphon.core.seeds import generator
from tests.support.light_engine import END_TOKEN, VOCABULARY

ENDLESS = -40.0
"""Added to the end token's logit: completions run until max_tokens."""
SHORT = 3.0
"""Added to the end token's logit: completions end after a token or two."""


def light_bias(version: int, end: float = 0.0) -> npt.NDArray[np.float64]:
    """Return the toy policy of a version, [VOCABULARY]."""
    bias = generator("light-weights", version).normal(size=VOCABULARY)
    bias[END_TOKEN] = end
    return bias


def light_manifest(run_id: str, version: int) -> SnapshotManifest:
    """Return the manifest of a toy snapshot."""
    return SnapshotManifest(
        run_id=run_id,
        version=version,
        weights_digest=digest_bytes(f"light-{version}".encode()),
        tensors=(),
        full_bytes=8 * VOCABULARY,
        payloads=(),
        origin="127.0.0.1:1",
    )


class LightSource:
    """A WeightSource without payloads; `end` gives each version's bias of the end token."""

    def __init__(self, end: Callable[[int], float] = lambda version: 0.0) -> None:
        self.fetched: list[int] = []
        self.opened: list[int] = []
        self.failures: list[Exception] = []
        """Raised by the next fetches, one each."""
        self.damaged: list[Exception] = []
        """Raised by the next openings, one each."""
        self.kept: list[int] = []
        self._end = end
        self.bytes_fetched = 0
        self.network = NetworkLog()
        self.arriving = 0
        """Bytes that come with each fetch, whole or not."""

    async def fetch(self, manifest: SnapshotManifest, find: object = None) -> None:
        await asyncio.sleep(0)
        self.bytes_fetched += self.arriving
        if self.failures:
            raise self.failures.pop(0)
        self.fetched.append(manifest.version)

    def open(self, manifest: SnapshotManifest) -> Mapping[str, npt.NDArray[np.float64]]:
        if self.damaged:
            raise self.damaged.pop(0)
        self.opened.append(manifest.version)
        return {"bias": light_bias(manifest.version, self._end(manifest.version))}

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        self.kept = [manifest.version for manifest in kept]
