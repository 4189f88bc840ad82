"""What the door keeps has an end: expired weights, samplers without weights, sessions that are over."""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.api.client_run import SavedVersion
from antiphon.core.errors import UnavailableError
from antiphon.services.door import door as door_module
from antiphon.system.clock import wall_clock
from tests.services.door.test_door import talk
from tests.support.client_runs import MemoryRuns
from tests.support.tinker_client import BASE, TinkerClient, sampling, step, training


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "TICK_S", 0.02)
    monkeypatch.setattr(door_module, "EXPIRY_S", 0.02)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


def rows(home: Path, table: str) -> list[str]:
    """Return the ids that the journal of a door has."""
    (path,) = home.rglob("journal.sqlite")
    with sqlite3.connect(path) as file:
        return [name for (name,) in file.execute(f"SELECT id FROM {table}")]


def test_weights_of_a_closed_run_go_when_their_time_is_over_and_nothing_is_started(tmp_path: Path) -> None:
    runs = MemoryRuns()

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        for number, more in enumerate(({"ttl_seconds": 0.3}, {"ttl_seconds": 0.3}, {}), 1):
            saving = {"model_id": model, "seq_id": number, "path": f"p{number}"}
            await client.done("save_weights", saving | more)
        await client.post("unload_model", {"model_id": model})
        runs.faults = [("drop", UnavailableError("another process has it"))]  # it is tried again
        await until(lambda: len(runs.kept) == 1)
        assert not runs.up and not runs.faults

    talk(tmp_path, client, runs=runs)
    assert [one.name for one in runs.kept] == ["p3"]


def test_a_name_that_is_saved_again_while_its_expiry_is_looked_at_stays(tmp_path: Path) -> None:
    class Late(MemoryRuns):
        """Lists as expired what a client saves again right after."""

        again = False

        def saved(self, run_id: str | None = None) -> Sequence[SavedVersion]:
            found = super().saved(run_id)
            over = [one for one in found if one.expires_at is not None and one.expires_at <= wall_clock()]
            for one in over:
                self.kept[one.saved] = replace(one, expires_at=None)
                self.again = True
            return found

    runs = Late()

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        await client.done("save_weights", {"model_id": model, "seq_id": 1, "path": "p", "ttl_seconds": 0.1})
        await until(lambda: runs.again)
        await client.done("save_weights", {"model_id": model, "seq_id": 2, "path": "q", "ttl_seconds": 0.1})
        await until(lambda: all(one.expires_at is None for one in runs.kept.values()))

    talk(tmp_path, client, runs=runs)
    assert sorted(one.name for one in runs.kept) == ["p", "q"] and not runs.dropped


def test_a_loop_of_500_samplers_leaves_a_few(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(session := await client.session())
        for number in range(500):
            sampler = await client.sampler(model, 1 + number, number)
            await client.done("asample", sampling(sampler, 0))
        kept = [f"{session}:sample:{number}" for number in (497, 498, 499)]

        async def left() -> list[str]:
            return list((await client.ask("GET", f"sessions/{session}"))[1]["sampler_ids"])

        async with asyncio.timeout(20):
            while await left() != kept:
                await asyncio.sleep(0.01)
        assert (await client.ask("POST", "asample", sampling(f"{session}:sample:0", 0)))[0] == 404
        assert (await client.ask("GET", f"samplers/{session}:sample:0"))[0] == 404
        await client.done("asample", sampling(kept[0], 1))
        await until(lambda: len(rows(tmp_path, "things")) == 5 and not rows(tmp_path, "futures"))

    runs = talk(tmp_path, client, max_staleness=1, future_ttl_s=0.1)
    assert len(runs.kept) == 3


def test_a_finished_session_is_forgotten_and_its_model_can_still_be_loaded(tmp_path: Path) -> None:
    heard: list[str] = []

    async def client(client: TinkerClient) -> None:
        other = await client.session()
        model = await client.model(session := await client.session())
        await client.sampler(model, 1, 0)
        saved = await client.done("save_weights", {"model_id": model, "seq_id": 2, "path": "end"})
        await client.post("forward_backward", training(model, 3))
        late = await client.post("optim_step", step(model, 9))  # nobody sends those before it
        new = {"session_id": other, "sampling_session_seq_id": 0, "base_model": BASE}
        await client.post("create_sampling_session", new)
        for name in (session, other):
            await client.post(f"sessions/{name}/finish", {"reason": {"type": "success"}})
        await until(lambda: [one.name for one in client.runs.kept] == ["end"])
        await until(lambda: len(rows(tmp_path, "things")) == 2)
        await until(lambda: not rows(tmp_path, "futures"))
        assert late["request_id"] not in rows(tmp_path, "futures")
        assert (await client.ask("GET", f"sessions/{other}"))[0] == 404
        heard.extend((model, saved["path"]))

    async def again(client: TinkerClient) -> None:
        model, path = heard
        await client.done("optim_step", step(model, 4))
        loading = {"session_id": await client.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        assert (await client.done("load_weights", loading))["path"] == path

    runs = talk(tmp_path, client, future_ttl_s=0.2)
    talk(tmp_path, again, runs=runs)


def test_a_model_goes_with_its_run_and_a_silent_session_stays(tmp_path: Path) -> None:
    runs = MemoryRuns()

    async def client(client: TinkerClient) -> None:
        silent = await client.model(await client.session())
        model = await client.model(session := await client.session())
        run_id = "probe-" + model.replace(":train:", "-")
        await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        await until(lambda: not runs.up)
        del runs.all[run_id]
        await until(lambda: sorted(rows(tmp_path, "things")) == sorted([silent, silent.partition(":")[0]]))
        await client.done("optim_step", step(silent, 1))

    talk(tmp_path, client, runs=runs, future_ttl_s=0.2, session_timeout_s=0.2)
