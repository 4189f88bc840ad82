"""A client's run among faults: stopped services, steps that cannot be, saves at one moment, half folders."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from antiphon.api.client_run import ModelInfo, ModelOrder
from antiphon.api.learner import CallReply, SnapshotReply, StepReply, StepResult
from antiphon.core.client_records import AdamParameters, CallResult, Datum, TrainingCall
from antiphon.core.config import build_config
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.records import StepCommit
from antiphon.core.status import LearnerProgress
from antiphon.lineage.client_steps import decode_call, encode_result
from antiphon.lineage.saved_weights import MODEL, order_of
from antiphon.runs.client_runs import CALLS, HomeClientRuns, LiveClientRun
from antiphon.runs.clients import ClientLoop
from antiphon.services.stages import LoopStages

IDLE = LearnerProgress("idle", 0, "step")
EMPTY = "empty"
ROW = np.ones(2, np.int32)


def call(weight: float = 1.0, forward_only: bool = False) -> TrainingCall:
    weights = {"weights": np.full(2, weight, np.float32)}
    return TrainingCall("cross_entropy", {}, (Datum(ROW, ROW.astype(np.int64), weights),), forward_only)


class Services:
    """A coordinator and a learner: what is sealed never changes."""

    def __init__(self, run_dir: Path) -> None:
        self.calls = run_dir / CALLS
        self.sealed: list[str] = []
        self.made: list[str] = []
        self.asked = asyncio.Event()
        self.away = False

    async def seal_client_step(self, step: int, digest: str, trajectories: int, tokens: int) -> None:
        if step == len(self.made) == len(self.sealed):
            self.sealed.append(digest)
        elif step >= len(self.sealed) or self.sealed[step] != digest:
            raise ContractError(f"step {step} has another batch")

    async def await_step(self, step: int, wait_s: float) -> StepReply:
        if self.away:
            await asyncio.Event().wait()
        assert step < len(self.sealed)
        if step == len(self.made):
            self.made.append(self.sealed[step])
        commit = StepCommit(step, step + 1, "w", self.sealed[step], {"grad_norm": 1.0}, True)
        return StepReply(IDLE, StepResult(commit, 0.0, 0.0))

    async def await_snapshot(self, version: int, wait_s: float) -> SnapshotReply:
        assert version <= len(self.made)
        return SnapshotReply(IDLE, SimpleNamespace())  # type: ignore[arg-type]

    async def await_call(self, step: int, place: int, digest: str, forward: bool, wait_s: float) -> CallReply:
        said = decode_call((self.calls / digest).read_bytes())
        result = CallResult(tuple(np.zeros(2, np.float32) for _ in said.data), {"loss:sum": 1.0})
        (self.calls / f"{digest}.out").write_bytes(encode_result(result))
        return CallReply(IDLE, place + 1, True)


def living(
    folder: Path, work: Callable[[LiveClientRun, Services, ClientLoop], Coroutine[Any, Any, None]]
) -> None:
    """Have something done with a run whose services are in memory."""

    async def do() -> None:
        services, clients = Services(folder), ClientLoop()
        stages = LoopStages(build_config({}), services, services)  # type: ignore[arg-type]
        live = SimpleNamespace(
            committed=0, store_root=folder / "store", run_dir=folder, home=folder.parent, clients=clients,
            coordinator=services, learner=services, stages=stages,
        )  # fmt: skip
        run = LiveClientRun(live, ModelOrder(0), ModelInfo("r", 0, 9, 9, "", ""))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(20):
                await work(run, services, clients)
        finally:
            if not run.left:
                clients.close()

    asyncio.run(do())


def test_services_stopped_in_a_call_are_away_and_not_a_call_that_ends_nowhere(tmp_path: Path) -> None:
    async def work(run: LiveClientRun, services: Services, clients: ClientLoop) -> None:
        services.away = True
        stepping = asyncio.create_task(run.step(0, [call()], AdamParameters()))
        while not services.sealed:
            await asyncio.sleep(0.001)
        run.left = True
        await asyncio.to_thread(clients.close)
        with pytest.raises(UnavailableError, match="were stopped"):
            await stepping
        with pytest.raises(UnavailableError, match="were stopped"):
            await run.step(0, [call()], AdamParameters())

    living(tmp_path, work)


def test_calls_that_no_step_takes_leave_no_files(tmp_path: Path) -> None:
    async def work(run: LiveClientRun, services: Services, clients: ClientLoop) -> None:
        for number in range(5):
            assert (await run.call(0, call(float(number), forward_only=True))).metrics["loss:sum"] == 1.0
        assert not list(services.calls.iterdir())

    living(tmp_path, work)


@pytest.mark.parametrize("left", [(), ("config.yaml",)])
def test_a_folder_that_a_killed_door_half_made_becomes_the_run(
    tmp_path: Path, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    for name in left:
        (folder / name).write_text("run: {}\n")

    async def opened(self: HomeClientRuns, run_id: str) -> str:
        assert (folder / MODEL).exists() and "client" in (folder / "config.yaml").read_text()
        return run_id

    monkeypatch.setattr(HomeClientRuns, "open", opened)
    config = build_config({"environment": {"name": "client"}, "loop": {"mode": "elastic"}})

    async def create() -> None:
        assert await HomeClientRuns(config, tmp_path).create("r", ModelOrder(0)) == "r"

    asyncio.run(create())
    assert order_of(folder) == ModelOrder(0)


def test_a_run_whose_services_gave_up_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / MODEL).write_text("{}")
    closed: list[str] = []

    async def enter(self: HomeClientRuns, run_id: str, folder: Path, place: Any) -> Any:
        place.live = SimpleNamespace(stop_reason="", close=lambda: closed.append(run_id))
        return SimpleNamespace(left=False, live=place.live)

    monkeypatch.setattr(HomeClientRuns, "_enter", enter)

    async def work() -> None:
        runs: Any = HomeClientRuns(build_config({}), tmp_path)
        first = await runs.open("r")
        assert await runs.open("r") is first and not closed
        first.live.stop_reason = "learner failed 5 times"
        second = await runs.open("r")
        assert second is not first and first.left and closed == ["r"]

    asyncio.run(work())
