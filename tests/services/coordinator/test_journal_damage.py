"""Power loss and full disks: what was acknowledged is there, nothing is torn, and a run goes on."""

import asyncio
import errno
import io
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import structlog

from antiphon.core.checks import submission_digest
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.loop import events as e
from antiphon.core.requests import LeaseRequest
from antiphon.services.coordinator.journal.databases import open_sql_store
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal, TrainedRow
from antiphon.services.coordinator.journal.store import WriteBatch, Written
from antiphon.services.coordinator.server import serve_coordinator
from antiphon.system.logs import configure_logs
from tests.support.light_parties import LightWorker, hello, reward_all, sample_lease, served, train_all
from tests.support.loop_model import RUN_ID, light_manifest, make_config

TRANSACTIONS = 60
SECTOR_BYTES = 512
"""Disks write whole sectors; the log is cut between any two of them."""


def test_a_torn_end_of_the_log_costs_only_what_was_not_acknowledged(tmp_path: Path, test_seed: int) -> None:
    """The log is cut at many places, and bits in it are flipped: no transaction is ever half there."""
    path, log = tmp_path / JOURNAL_NAME, tmp_path / f"{JOURNAL_NAME}-wal"
    sizes: list[int] = []

    async def write() -> None:
        journal = Journal(path, RUN_ID)
        for number in range(TRANSACTIONS):
            row = TrainedRow(number, number + 1, "a" * 64, "b" * 64, (f"g{number}",))
            await journal.enqueue([e.StepOpened(number)], {f"p{number}": bytes([number]) * 700}, trained=row)
            sizes.append(log.stat().st_size)
        # As a loss of power leaves it: the log was never brought into the database.
        for name in (path, log):
            shutil.copy(name, tmp_path / f"kept-{name.name}")
        await journal.close()

    asyncio.run(write())
    whole = (tmp_path / f"kept-{log.name}").read_bytes()
    rng = np.random.default_rng(test_seed)
    begun = sizes[0]
    cuts = sorted({*range(begun, len(whole), SECTOR_BYTES * 29), *sizes[::6], len(whole)})
    for cut in cuts:
        found = reopen(tmp_path, whole[:cut])
        done = sum(size <= cut for size in sizes)
        assert found == done, f"cut at {cut}: {found} of {done} transactions"
    for _ in range(40):
        at = int(rng.integers(begun, len(whole)))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        found = reopen(tmp_path, bytes(damaged))
        assert found >= sum(size <= at for size in sizes) - 1, f"bit flipped at {at}"


def reopen(folder: Path, log: bytes) -> int:
    """Return how many transactions are there, and check that each is whole and none is missing before it."""
    place = folder / "cut" / JOURNAL_NAME
    shutil.rmtree(place.parent, ignore_errors=True)
    place.parent.mkdir()
    shutil.copy(folder / f"kept-{JOURNAL_NAME}", place)
    place.with_name(f"{JOURNAL_NAME}-wal").write_bytes(log)
    with closing(sqlite3.connect(place)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = [seq for (seq,) in database.execute("SELECT seq FROM events ORDER BY seq")]
        payloads = {name for (name,) in database.execute("SELECT name FROM payloads")}
        trained = {group for (group,) in database.execute("SELECT group_id FROM trained")}
    count = len(found)
    assert found == list(range(1, count + 1))
    assert payloads == {f"p{number}" for number in range(count)}
    assert trained == {f"g{number}" for number in range(count)}
    return count


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "antiphon-test", str(folder)]
    mounted = (
        subprocess.run(command, capture_output=True, text=True, timeout=30.0) if os.geteuid() == 0 else None
    )
    if mounted is None or mounted.returncode != 0:
        why = "only root may mount one" if mounted is None else mounted.stderr.strip()
        pytest.skip(f"needs a file system with a size limit: {why}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30.0)


def test_a_full_disk_holds_the_run_up_and_nothing_is_lost(small_disk: Path) -> None:
    """Lease grant stops, status says why, and the run ends as if nothing had been once there is space."""
    config = make_config(steps=6, lease_s=30.0, filter_="none")

    async def act() -> None:
        async with served(config, small_disk) as site:
            site.service.state_machine.journal._retry_s = 0.05
            crew = [LightWorker(site.client(), f"w{i}", np.random.default_rng(i)) for i in range(2)]
            for worker in crew:
                worker.delay_s = 0.02
            tasks = [asyncio.ensure_future(worker.run()) for worker in crew]
            tasks.append(asyncio.ensure_future(reward_all(site.client(), np.random.default_rng(5))))
            training = asyncio.ensure_future(train_all(site.client(), config, site.store))
            watching = site.client()
            while (await watching.status()).committed_steps < 1:
                await asyncio.sleep(0.01)
            ballast = fill(small_disk)
            async with asyncio.timeout(60.0):
                while "no space" not in (status := await watching.status()).waiting.lower():
                    fill(small_disk, ballast)
                    await asyncio.sleep(0.02)
            granted = status.groups_leased + status.groups_to_reward + status.groups_ready
            worker_id = "w0-1"
            with pytest.raises(UnavailableError, match=r"(?i)no space"):
                await watching.lease_group(LeaseRequest(worker_id, 0, 9, 0.0))
            again = await watching.status()
            assert again.groups_leased + again.groups_to_reward + again.groups_ready <= granted
            assert not training.done() and again.committed_steps < config.run.steps
            ballast.unlink()
            async with asyncio.timeout(120.0):
                refs = await training
            assert len(refs) == config.run.steps
            assert site.service.state_machine.blocked_reason == ""
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            acknowledged = {g: submission_digest(s) for w in crew for g, s in w.acknowledged.items()}
            submitted = [event async for event in watching.watch_events(0, follow=False)]
            recorded = {
                event.group_id: event.payload_digest
                for event in (e.load_event(row.kind, row.data_json) for row in submitted)
                if isinstance(event, e.GroupSubmitted)
            }
            assert acknowledged.items() <= recorded.items()
        with closing(sqlite3.connect(small_disk / JOURNAL_NAME)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)

    asyncio.run(act())


def fill(folder: Path, ballast: Path | None = None) -> Path:
    """Take all the space there is."""
    ballast = ballast or folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for block in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * block)
            except OSError:
                continue
    return ballast


def test_a_payload_that_rotted_is_not_believed(tmp_path: Path) -> None:
    config = make_config(steps=1)

    async def act() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            worker_id = (await client.register(hello())).worker_id
            (lease,) = (await client.lease_group(LeaseRequest(worker_id, 0, 1, 1.0))).leases
            await client.submit_group(sample_lease(lease, worker_id, 0))
        with closing(sqlite3.connect(tmp_path / JOURNAL_NAME)) as database:
            (body,) = database.execute(
                "SELECT body FROM payloads WHERE name = ?", (lease.group_id,)
            ).fetchone()
            rotten = bytearray(body)
            rotten[len(rotten) // 2] ^= 1
            database.execute("UPDATE payloads SET body = ? WHERE name = ?", (bytes(rotten), lease.group_id))
            database.commit()
        async with served(config, tmp_path) as site:
            with pytest.raises(IntegrityError, match=r"payload|group"):
                await site.service.pull_for_reward("judge", 1, 0.0)

    asyncio.run(act())


class BrokenLog(io.TextIOBase):
    """A log that takes no line, and is not asked twice."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("raises", [False, True], ids=["dropped", "raised"])
def test_a_log_on_the_same_full_disk_loses_no_batch(
    tmp_path: Path, raises: bool, monkeypatch: pytest.MonkeyPatch, logs_as_they_were: None
) -> None:
    """Even where a log line raises, nothing is acknowledged behind a batch whose end nobody knows."""
    configure_logs()
    monkeypatch.setattr("sys.stderr", BrokenLog())
    if raises:
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    store = open_sql_store(tmp_path / JOURNAL_NAME, RUN_ID)
    write, full = store.write, True

    def write_if_there_is_space(batch: WriteBatch) -> Written:
        if full:
            raise UnavailableError("no space is left for the journal")
        return write(batch)

    monkeypatch.setattr(store, "write", write_if_there_is_space)

    async def act() -> int:
        nonlocal full
        journal = Journal(store, RUN_ID, retry_s=0.01)
        first = journal.enqueue([e.StepOpened(0)])
        await asyncio.wait([first], timeout=0.1)
        acknowledged, full = 0, False
        for written in (lambda: first, lambda: journal.enqueue([e.StepOpened(1)])):
            try:
                await asyncio.wait_for(written(), 10.0)
                acknowledged += 1
            except (IntegrityError, OSError):
                assert raises
        with suppress(OSError):
            await journal.close()
        return acknowledged

    acknowledged = asyncio.run(act())
    assert acknowledged == (0 if raises else 2)
    store.close()
    again = Journal(tmp_path / JOURNAL_NAME, RUN_ID)
    assert len(list(again.replay())) >= acknowledged
    asyncio.run(again.close())


def test_an_event_that_cannot_be_written_ends_the_journal_before_any_of_its_decision(tmp_path: Path) -> None:
    async def act() -> None:
        journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID)
        earlier = journal.enqueue([e.StepOpened(0)])
        pinned = e.RunOpened(RUN_ID, {"model.path": "/data/caf\udce9"})
        with pytest.raises(IntegrityError, match=r"cannot hold step\.opened, run\.opened"):
            journal.enqueue([e.StepOpened(1), pinned])
        with pytest.raises(IntegrityError, match="cannot hold"):
            await earlier
        with pytest.raises(IntegrityError, match="cannot hold"):
            journal.enqueue([e.StepOpened(2)])
        await journal.close()

    asyncio.run(act())


@pytest.mark.parametrize("lost", [JOURNAL_NAME, f"{JOURNAL_NAME}-wal"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_journal_is_noticed_at_the_next_write(tmp_path: Path, lost: str, replaced: bool) -> None:
    async def act() -> None:
        journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID)
        await journal.enqueue([e.StepOpened(0)])
        (tmp_path / lost).rename(tmp_path / "elsewhere")
        if replaced:
            shutil.copy(tmp_path / "elsewhere", tmp_path / lost)
        with pytest.raises(IntegrityError, match=r"journal\.db or its log was removed or replaced"):
            await journal.enqueue([e.StepOpened(1)])
        with pytest.raises(IntegrityError, match="was removed"):
            journal.enqueue([e.StepOpened(2)])
        await journal.close()

    asyncio.run(act())


def test_a_coordinator_that_is_started_again_without_its_journal_does_not_begin_again(tmp_path: Path) -> None:
    config = make_config()
    starting = serve_coordinator(
        config, RUN_ID, tmp_path, tmp_path, "127.0.0.1", 0, lambda port: None, wait_for_journal=True
    )
    with pytest.raises(IntegrityError, match="was removed or replaced"):
        asyncio.run(starting)
    assert not (tmp_path / JOURNAL_NAME).exists()
