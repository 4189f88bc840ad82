"""Snapshots for tests: tensors written into a store and listed there, as a publisher does it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from antiphon.api.manifest import check_manifest, full_payload
from antiphon.api.snapshots import Broadcast, Place
from antiphon.core.broadcast.probe import probe_tokens
from antiphon.core.records import Probe, SnapshotManifest
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.service import BroadcastService
from antiphon.weights.snapshot import weights_of, write_snapshot
from antiphon.weights.transport import RelayTransport


def publish(
    store: PayloadStore,
    tensors: Mapping[str, torch.Tensor],
    version: int = 1,
    *,
    run_id: str = "run",
    chunk_bytes: int | None = None,
    origin: str = "127.0.0.1:1",
) -> SnapshotManifest:
    """Write a version and list it; return its manifest, which nobody signed."""
    manifest = write_snapshot(store, run_id, version, weights_of(tensors), chunk_bytes)
    manifest = replace(manifest, origin=origin)
    store.put_manifest(manifest)
    return manifest


@torch.no_grad()
def probe_of(model: Any) -> Probe:
    """Return what a Hugging Face model makes of the tokens of a probe."""
    tokens = torch.tensor(probe_tokens(model.config.vocab_size))
    found = torch.log_softmax(model(tokens[None]).logits[0, :-1].float(), -1)
    scores = found.gather(-1, tokens[1:, None])[:, 0]
    return Probe(tuple(tokens.tolist()), tuple(scores.tolist()), "float32")


class FarService(BroadcastService):
    """Serves a store whose files no receiver can reach."""

    async def where(self) -> Place:
        return Place(Path(), "")


async def fetch_snapshot(
    manifest: SnapshotManifest,
    source: Broadcast,
    store: PayloadStore,
    timeout_s: float,
    arrived: Callable[[int], None] = lambda length: None,
    links: bool = True,
) -> None:
    """Bring a snapshot's file into `store` from one holder, as a worker does that no one else serves."""
    check_manifest(manifest)
    transport = RelayTransport(store, lambda address: [source], timeout_s, links=links)
    await transport.fetch(manifest, full_payload(manifest), arrived)
