"""Weights of a worker: what is being put together stays until that is over."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError
from antiphon.core.records import SnapshotManifest
from antiphon.services.rollout import weights as weights_module
from antiphon.services.rollout.weights import WeightSync
from antiphon.system.wakeup import Wakeup
from tests.support.loop_model import light_manifest, make_config


class Source:
    """Puts weights together when it is told to, and finds them damaged."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.kept: list[set[int]] = []
        self.sync: WeightSync
        self.bytes_fetched = 0
        self.told: list[str | None] = []
        """What heartbeats would say at the begin of each fetch."""

    async def fetch(self, manifest: SnapshotManifest, find: object) -> None:
        self.told.append(self.sync.failing and self.sync.failing.reason)
        if len(self.told) < 3:
            raise IntegrityError("chunk 3 was altered")

    def open(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        self.begun.set()
        assert self.go_on.wait(30.0)
        raise IntegrityError("a chunk is damaged")

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        self.kept.append({manifest.version for manifest in kept})


class Announced:
    """A coordinator that knows every version."""

    async def latest_manifest(self, version: int) -> SnapshotManifest:
        return light_manifest(version)


async def no_delay() -> None: ...


def make_sync(source: Source, config: RunConfig, learner_key: bytes = b"") -> WeightSync:
    source.sync = WeightSync(
        cast("Any", Announced()),
        cast("Any", source),
        cast("Any", None),
        config,
        light_manifest(0).run_id,
        lambda: (0, 0),
        Wakeup(),
        Wakeup(),
        no_delay,
        learner_key,
    )
    return source.sync


def test_a_manifest_between_that_nobody_signed_is_not_used() -> None:
    async def act() -> None:
        config = make_config(max_staleness=0)
        assert await make_sync(Source(), config)._find(1) == light_manifest(1)
        assert await make_sync(Source(), config, learner_key=bytes(32))._find(1) is None

    asyncio.run(act())


def test_a_snapshot_that_does_not_come_intact_is_told_until_it_does() -> None:
    async def act() -> None:
        source = Source()
        sync = make_sync(source, make_config(max_staleness=0))
        sync.note_newest(1)
        await asyncio.wait_for(sync._fetch(1), 30.0)
        said = "version 1 was not fetched: chunk 3 was altered"
        assert source.told == [None, said, said]
        assert sync.failing is None and sorted(sync._complete) == [1]

    asyncio.run(act())


def test_newer_snapshots_do_not_prune_the_one_that_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "MOST_PAUSE_S", 0.0)
    config = make_config(max_staleness=0)
    config = config.model_copy(
        update={"broadcast": config.broadcast.model_copy(update={"snapshots_kept": 2})}
    )
    source = Source()

    async def act() -> None:
        sync = make_sync(source, config)
        sync._complete[1] = light_manifest(1)
        swapping = asyncio.ensure_future(sync._swap(1))
        await asyncio.to_thread(source.begun.wait, 30.0)
        for version in range(2, 6):
            sync._complete[version] = light_manifest(version)
            sync._prune()
        assert all(1 in kept for kept in source.kept)
        source.go_on.set()
        await asyncio.wait_for(swapping, 30.0)  # it is fetched again, and the worker lives
        assert sorted(sync._complete) == [4, 5]
        sync._complete.clear()
        await sync._swap(1)  # pruned before it began: nothing to do

    asyncio.run(act())
