"""Client runs: a step that cannot be made is told to its client, and the next one follows."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from antiphon.api.client_run import ModelInfo, ModelOrder
from antiphon.api.coordinator import StageReply
from antiphon.api.learner import CallReply, SnapshotReply, StepReply, StepResult
from antiphon.core.client_records import AdamParameters, CallResult, SavedWeights
from antiphon.core.config import RunConfig, dump_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.records import BatchRef, StepCommit
from antiphon.core.status import LearnerProgress
from antiphon.lineage.client_steps import encode_result, encode_step
from antiphon.lineage.saved_weights import MODEL, NOTE, SavedNote, saved_folder, write_note, write_order
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.runs import client_runs, directory
from antiphon.runs.client_runs import HomeClientRuns, LiveClientRun, _Place
from antiphon.runs.clients import ClientLoop
from antiphon.runs.live_run import LiveRun
from tests.support.client_calls import client_config, make_call

ADAM = AdamParameters()
FAR = replace(ADAM, learning_rate=1e11)
EMPTY = digest_bytes(b"")
PROGRESS = LearnerProgress("", 0, "")


class Services:
    """Coordinator and learner of one run: a step of `FAR` is skipped, as the learner asks for."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store, self.calls = store, store.root.parent / "calls"
        self.sealed: dict[int, str] = {}
        self.committed: list[StepCommit] = []

    async def seal_client_step(self, step: int, digest: str, rows: int, tokens: int) -> None:
        if self.sealed.setdefault(step, digest) != digest or step > len(self.committed):
            raise ContractError(f"step {step} has batch {self.sealed[step][:12]}, not {digest[:12]}")

    async def await_stage(self, stage: str, step: int, wait_s: float) -> StageReply:
        batch = BatchRef(step, self.sealed[step], "", 0, 0, 0, 0, 0, 0.0, {}, 0.0)
        return StageReply(True, batch=batch)

    async def await_step(self, step: int, wait_s: float) -> StepReply:
        digest = self.sealed[step]
        if digest != EMPTY and b"100000000000.0" in self._store.get(digest):
            self.sealed[step] = EMPTY
            raise IntegrityError(f"step {step} was not made")
        if step == len(self.committed):
            self.committed.append(StepCommit(step, step + 1, digest, digest, {"loss": 1.0}, True))
        return StepReply(PROGRESS, StepResult(self.committed[step], 0.0, 0.0))

    async def await_call(self, step: int, place: int, digest: str, forward: bool, wait_s: float) -> CallReply:
        result = encode_result(CallResult((), {"place:max": place}))
        (self.calls / f"{digest}.out").write_bytes(result)
        return CallReply(PROGRESS, place, True)

    async def await_snapshot(self, version: int, wait_s: float) -> SnapshotReply:
        return SnapshotReply(PROGRESS, SimpleNamespace())  # type: ignore[arg-type]


class Stages:
    async def reach(self, what: str, attempt: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await attempt()

    async def done_by_learner(self, what: str, said: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        return (await ask())[1]


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(ArtifactStore(tmp_path / "store"))


@pytest.fixture
def run(services: Services, tmp_path: Path) -> Iterator[LiveClientRun]:
    loop = ClientLoop()
    live: Any = SimpleNamespace(
        committed=0,
        home=tmp_path,
        store_root=tmp_path / "store",
        run_dir=tmp_path,
        clients=loop,
        stages=Stages(),
        coordinator=services,
        learner=services,
    )
    yield LiveClientRun(live, ModelOrder(rank=0), ModelInfo("run", 0, 32, 100, "", ""))
    loop.close()


def test_a_step_that_cannot_be_made_fails_once_and_the_next_ones_follow(
    run: LiveClientRun, services: Services
) -> None:
    async def body() -> None:
        assert await run.step(0, [make_call()], ADAM) == {"loss": 1.0}
        with pytest.raises(IntegrityError, match="step 1 was not made"):
            await run.step(1, [make_call()], FAR)
        assert run.version == 2
        assert await run.step(2, [make_call()], ADAM) == {"loss": 1.0}
        with pytest.raises(ContractError, match=r"eps=0\.0 cannot be"):
            await run.step(3, [make_call()], replace(ADAM, eps=0.0))
        assert run.version == len(services.committed) == 3 and not services.sealed.keys() - {0, 1, 2}

    asyncio.run(body())


@pytest.mark.parametrize("skipped", [True, False], ids=["skipped", "not-skipped"])
def test_what_a_killed_door_left_sealed_does_not_stop_the_model(
    run: LiveClientRun, services: Services, skipped: bool
) -> None:
    async def body() -> None:
        digest = services._store.put(encode_step([make_call()], FAR))
        services.sealed[0] = EMPTY if skipped else digest
        with pytest.raises(ContractError, match="step 0 has batch"):
            await run.step(0, [make_call()], ADAM)
        assert await run.step(1, [make_call()], ADAM) == {"loss": 1.0}

    asyncio.run(body())


def test_what_a_closed_run_saved_is_dropped_unless_another_process_has_the_run(tmp_path: Path) -> None:
    run_dir, saved = tmp_path / "runs" / "one", SavedWeights("one", "weights", "a")
    folder = saved_folder(run_dir, "weights", "a")
    folder.mkdir(parents=True)
    write_order(run_dir, ModelOrder(rank=0))
    write_note(folder, SavedNote(1, "0" * 64, 0, expires_at=0.0))
    runs = HomeClientRuns(client_config(Path("model")), tmp_path)
    with directory.lock(run_dir), pytest.raises(UnavailableError, match="one is already running"):
        asyncio.run(runs.drop(saved))
    assert [one.saved for one in runs.saved("one")] == [saved]
    asyncio.run(runs.drop(saved))
    assert not folder.exists() and runs.find(saved) is None
    asyncio.run(runs.drop(SavedWeights("never", "weights", "a")))
    assert not (tmp_path / "runs" / "never").exists()


def test_a_damaged_note_hides_nothing_of_other_runs(tmp_path: Path) -> None:
    runs = HomeClientRuns(client_config(Path("model")), tmp_path)
    for run_id, note in (("one", "["), ("two", "")):
        folder = saved_folder(tmp_path / "runs" / run_id, "weights", "a")
        folder.mkdir(parents=True)
        write_order(tmp_path / "runs" / run_id, ModelOrder(rank=0))
        (tmp_path / "runs" / run_id / "config.yaml").write_bytes(dump_config(runs._config).encode())
        write_note(folder, SavedNote(1, "0" * 64, 0))
        if note:
            (folder / NOTE).write_text(note)
    assert [one.saved.run_id for one in runs.saved()] == ["two"]
    with pytest.raises(IntegrityError, match="is not readable"):
        runs.saved("one")


def test_weights_that_can_only_be_sampled_from_are_refused_before_a_step_is_sealed(
    run: LiveClientRun, services: Services, tmp_path: Path
) -> None:
    source = SavedWeights("other", "sampler_weights", "a")
    folder = tmp_path / "runs" / "other"
    folder.mkdir(parents=True)
    write_order(folder, ModelOrder(rank=0))
    kept = saved_folder(folder, source.kind, source.name)
    kept.mkdir(parents=True)
    write_note(kept, SavedNote(1, "0" * 64, 0))
    with pytest.raises(ContractError, match=r"other/sampler_weights/a can only be sampled from"):
        asyncio.run(run.load(0, source, False))
    assert not services.sealed


def test_calls_that_only_look_leave_no_files(run: LiveClientRun, services: Services) -> None:
    async def body() -> None:
        await run.call(0, make_call())
        kept = set(services.calls.iterdir())
        for seed in range(3):
            await run.call(1, make_call(seed, forward_only=True))
        assert set(services.calls.iterdir()) == kept and len(kept) == 3

    asyncio.run(body())


def test_who_waits_for_a_place_that_is_left_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / MODEL).touch()
    runs, tried = HomeClientRuns(client_config(Path("model")), tmp_path), list[Any]()

    async def enter(run_id: str, folder: Path, place: Any) -> Any:
        tried.append(place)
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(place.thread, str)
        if len(tried) == 1:
            raise ConfigError("it cannot be started")
        return run_id

    monkeypatch.setattr(runs, "_enter", enter)

    async def body() -> None:
        first, second = await asyncio.gather(runs.open("one"), runs.open("one"), return_exceptions=True)
        assert isinstance(first, ConfigError) and second == "one" and tried[0] is not tried[1]

    asyncio.run(body())


def test_a_model_whose_creation_was_cut_off_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    runs, opened = HomeClientRuns(client_config(Path("model")), tmp_path), list[str]()

    async def opens(run_id: str) -> Any:
        opened.append(run_id)

    def same(config: RunConfig, order: ModelOrder) -> RunConfig:
        return config

    monkeypatch.setattr(runs, "open", opens)  # it would start the services
    monkeypatch.setattr(client_runs, "config_of", same)
    folder = tmp_path / "runs" / "one"
    folder.mkdir()  # a killed process left this, and no configuration
    for order in (ModelOrder(rank=0), ModelOrder(rank=0)):
        asyncio.run(runs.create("one", order))
        assert (folder / MODEL).exists() and (folder / "config.yaml").exists()
    (folder / MODEL).unlink()
    asyncio.run(runs.create("one", ModelOrder(rank=0)))
    assert client_runs.order_of(folder) == ModelOrder(rank=0)
    with pytest.raises(ContractError, match="was created with other settings"):
        asyncio.run(runs.create("one", ModelOrder(rank=4)))
    assert opened == ["one"] * 3


def test_a_model_without_a_free_place_leaves_no_folder(tmp_path: Path) -> None:
    runs = HomeClientRuns(client_config(Path("model")), tmp_path)
    with ThreadPoolExecutor(1) as thread:
        runs._places["first"] = _Place(thread)
        with pytest.raises(ContractError, match=r"taken, by first; .* door.session_timeout_s=120, or serve"):
            asyncio.run(runs.create("second", ModelOrder(rank=0)))
    assert not (tmp_path / "runs").exists()


def test_nothing_of_a_run_is_left_once_it_was_closed(tmp_path: Path) -> None:
    """What is left holds the store's lock, so that `antiphon gc` would wait for the door to end."""

    class Run:
        def __init__(self) -> None:
            self.itself = self

        def close(self) -> None:
            """Nothing."""

    runs, live = HomeClientRuns(client_config(Path("model")), tmp_path), Run()
    runs._places["one"] = _Place(ThreadPoolExecutor(1), cast("LiveRun", live))
    left = weakref.ref(live)
    del live
    gc.disable()
    try:
        asyncio.run(runs.close("one"))
        assert left() is None and not runs._places
    finally:
        gc.enable()
