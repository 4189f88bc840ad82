"""Client runs: the runs that clients drive through the door, each a run folder with services of its own.

`LiveRun` starts and watches the services, as of any run; here is what stands in the place of the flow: a
client's calls, put into files that the learner reads, and its steps, sealed at the coordinator.
"""

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import structlog

from antiphon.api.client_run import ClientRun, ClientRuns, ModelInfo, ModelOrder, SavedVersion
from antiphon.api.learner import CallReply, SavedReply, StepResult
from antiphon.core.client_checks import check_adam
from antiphon.core.client_records import (
    CLIENT,
    AdamParameters,
    CallResult,
    LoadOrder,
    SampledReply,
    SampleRequest,
    SavedWeights,
    Scores,
    TrainingCall,
)
from antiphon.core.config import RunConfig, dump_config, load_config
from antiphon.core.config_sections import MOST_STEPS
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.records import SnapshotManifest, StepCommit, Trajectory
from antiphon.core.status import LearnerProgress
from antiphon.lineage.client_steps import decode_result, encode_call, encode_step
from antiphon.lineage.saved_weights import (
    MODEL,
    drop_saved,
    find_saved,
    order_of,
    read_saved,
    saved_of,
    write_order,
)
from antiphon.lineage.starts import FILE as STARTS
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.models.codec import resolve_model_path
from antiphon.models.directory import expected_tensors
from antiphon.models.learning_rate import with_learning_rate
from antiphon.runs import directory
from antiphon.runs.live_run import LiveRun, claim_place
from antiphon.runs.preflight import preflight
from antiphon.system.clock import wall_clock
from antiphon.system.files import write_atomically

CALLS = "calls"
"""Folder of a run with the files of the calls since its newest step, and what came of them."""
_ORDER = "order.json"
"""In it: the digests of these calls, by place, and the step that they are for."""
POLL_S = 10.0
"""Longest single long poll."""
MODULES = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
"""What `ModelOrder.targets` are called in a model, by the last part of a module's name."""

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class LiveClientRun(ClientRun):
    """A run whose services are up."""

    def __init__(self, run: LiveRun, order: ModelOrder, info: ModelInfo) -> None:
        """Speak for a run that was entered."""
        self._run, self._order, self._info = run, order, info
        self._version = run.committed
        self._calls = run.run_dir / CALLS
        self._calls.mkdir(exist_ok=True)
        self._turn = asyncio.Lock()
        self.left = False
        """Whether its services are stopped: callers that still hold it open the run again."""

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def version(self) -> int:
        return self._version

    async def publish(self) -> None:
        """Announce the newest version; workers can hold it then."""

        async def ask() -> tuple[LearnerProgress, SnapshotManifest | None]:
            reply = await self._run.learner.await_snapshot(self._version, POLL_S)
            return reply.progress, reply.manifest

        await self._poll("publish", ask)

    async def sample(self, request: SampleRequest, wait_s: float) -> SampledReply:
        coordinator = self._run.coordinator
        await self._reach("coordinator.request_samples", partial(coordinator.request_samples, request))
        asking = partial(coordinator.await_samples, request.request_id, wait_s)
        return await self._reach("coordinator.await_samples", asking)

    async def sequences(self, request_id: str) -> tuple[Trajectory, ...]:
        asking = partial(self._run.coordinator.await_samples, request_id, 0.0)
        try:
            return (await self._reach("coordinator.await_samples", asking)).trajectories
        except ContractError:
            return ()

    async def score(self, version: int, token_ids: Sequence[int], top: int) -> Scores:
        asking = partial(self._run.learner.score, version, np.asarray(token_ids, dtype=np.int32), top)
        return await self._reach("learner.score", asking)

    async def call(self, place: int, call: TrainingCall) -> CallResult:
        payload = await asyncio.to_thread(encode_call, call)
        digest = digest_bytes(payload)
        async with self._turn:
            step = self._version
            path = self._calls / digest
            await asyncio.to_thread(write_atomically, path, payload)
            digests = self._given(step)
            if not call.forward_only:
                if place > len(digests):
                    raise ContractError(f"call {place} was given, but only {len(digests)} before it")
                if digests[place : place + 1] != [digest]:
                    digests = [*digests[:place], digest]
                    said = json.dumps({"step": step, "digests": digests}).encode()
                    await asyncio.to_thread(write_atomically, self._calls / _ORDER, said)
            at = place
            while True:
                held = await self._called(step, at, digests[at] if at < place else digest, call.forward_only)
                if held is not None:  # the learner began again meanwhile
                    at = held
                elif at == place:
                    break
                else:
                    at += 1
            answer = self._calls / f"{digest}.out"
            result = decode_result(await asyncio.to_thread(answer.read_bytes))
            if call.forward_only:  # no step comes to need it, or may ever come to remove it
                path.unlink()
                answer.unlink()
            return result

    async def step(self, step: int, calls: Sequence[TrainingCall], adam: AdamParameters) -> dict[str, float]:
        check_adam(adam)
        tokens = sum(int(datum.targets.size) for call in calls for datum in call.data)
        rows = sum(len(call.data) for call in calls)
        payload = await asyncio.to_thread(encode_step, calls, adam)
        return await self._step(step, payload, rows, tokens)

    async def load(self, step: int, source: SavedWeights, optimizer: bool) -> None:
        found = find_saved(self._run.home, source)
        source.check_trainable()
        if found.order.rank != self._order.rank or found.order.targets != self._order.targets:
            raise ContractError(
                f"{source.path} has adapters of rank {found.order.rank}, this model of {self._order.rank}; "
                "create the model from that path"
            )
        order = LoadOrder(source, optimizer, found.digest)
        await self._step(step, await asyncio.to_thread(encode_step, (), order), 0, 0)

    async def save(self, saved: SavedWeights, ttl_s: float | None) -> SavedVersion:
        expires = None if ttl_s is None else wall_clock() + ttl_s
        asked = (saved.kind, saved.name, self._version, POLL_S, expires)

        async def ask() -> tuple[LearnerProgress, SavedReply | None]:
            reply = await self._run.learner.await_saved(*asked)
            return reply.progress, None if reply.digest is None else reply

        await self._poll(f"save {saved.name}", ask)
        return await asyncio.to_thread(find_saved, self._run.home, saved)

    async def drop(self, saved: SavedWeights) -> None:
        """Have the learner give up saved weights."""
        dropping = partial(self._run.learner.drop_saved, saved.kind, saved.name)
        await self._reach("learner.drop_saved", dropping)

    async def _step(self, step: int, payload: bytes, rows: int, tokens: int) -> dict[str, float]:
        async with self._turn:
            if step > self._version:
                raise ContractError(f"step {step} is not the next one; the model has version {self._version}")
            store = ArtifactStore(self._run.store_root)  # keeps `antiphon gc` out until the step is sealed
            digest = await asyncio.to_thread(store.put, payload)
            sealing = partial(self._run.coordinator.seal_client_step, step, digest, rows, tokens)
            refusal: Exception | None = None
            try:
                await self._reach("coordinator.seal_client_step", sealing)
                commit = await self._made(step)
            except (ContractError, IntegrityError) as error:
                # What nobody can train on was skipped; the step is made without it, so that others follow.
                if step != self._version or await self._sealed(step) in (None, digest):
                    raise
                refusal = error
                try:
                    commit = await self._made(step)
                except IntegrityError:  # of what an earlier call sealed, which is skipped only now
                    commit = await self._made(step)
            self._version = max(self._version, step + 1)
            await self.publish()
            if step + 1 == self._version:
                await asyncio.to_thread(self._forget_calls)
            if commit.batch_digest != digest:
                raise refusal or ContractError(f"step {step} was skipped, nothing was trained; do it again")
            return dict(commit.metrics)

    async def _sealed(self, step: int) -> str | None:
        """Return the digest of the batch that a step has."""
        asking = partial(self._run.coordinator.await_stage, "reward", step, 0.0)
        batch = (await self._reach("coordinator.await_stage", asking)).batch
        return None if batch is None else batch.digest

    async def _made(self, step: int) -> StepCommit:
        """Have the learner make a step."""

        async def ask() -> tuple[LearnerProgress, StepResult | None]:
            reply = await self._run.learner.await_step(step, POLL_S)
            return reply.progress, reply.result

        return (await self._poll(f"step {step}", ask)).commit

    async def _called(self, step: int, place: int, digest: str, forward_only: bool) -> int | None:
        """Have a call done; None, or how many calls the learner holds where that is fewer than `place`."""

        async def ask() -> tuple[LearnerProgress, CallReply | None]:
            reply = await self._run.learner.await_call(step, place, digest, forward_only, POLL_S)
            over = reply.done or (not forward_only and reply.held < place)
            return reply.progress, reply if over else None

        reply = await self._poll(f"call {place} of step {step}", ask)
        return None if reply.done else reply.held

    def _given(self, step: int) -> list[str]:
        """Return the digests of the calls since the newest step."""
        try:
            said = json.loads((self._calls / _ORDER).read_bytes())
        except (FileNotFoundError, ValueError):
            return []
        return list(said["digests"]) if said["step"] == step else []

    def _forget_calls(self) -> None:
        for path in self._calls.iterdir():
            path.unlink(missing_ok=True)

    async def _reach(self, what: str, attempt: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        return await self._asked(self._run.stages.reach(what, attempt))

    async def _poll(self, what: str, ask: Callable[[], Awaitable[tuple[LearnerProgress, _T | None]]]) -> _T:
        """Ask the learner until it has done something; as long as its counter moves it is waited for."""
        return await self._asked(self._run.stages.done_by_learner(what, f"learner: {what}", ask))

    async def _asked(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Have the run's own loop, on which its channels live, do something.

        Raises:
            UnavailableError: when the services are stopped, or were meanwhile; the run is to be opened again.
        """
        stopped = UnavailableError(f"the services of {self._info.run_id} were stopped; ask again")
        if self.left:
            work.close()
            raise stopped
        begun = self._run.clients.begin(work)
        try:
            return await asyncio.wrap_future(begun)
        except asyncio.CancelledError:
            if self.left and not cast("asyncio.Task[Any]", asyncio.current_task()).cancelling():
                raise stopped from None
            raise


@dataclass(slots=True)
class _Place:
    """One of `door.models` places."""

    thread: ThreadPoolExecutor
    """Enters and leaves the run, always the same thread."""
    live: LiveRun | None = None
    run: LiveClientRun | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class HomeClientRuns(ClientRuns):
    """The client-driven runs of a home."""

    def __init__(self, config: RunConfig, home: Path) -> None:
        """Hold what runs are made from; `open_client_runs` checks it."""
        self._config, self._home = config, home
        self._places: dict[str, _Place] = {}

    async def create(self, run_id: str, order: ModelOrder) -> ClientRun:
        self._check_place(run_id)
        folder = self._home / "runs" / run_id
        known = (folder / MODEL).exists()  # written last: a killed process may have left the rest
        if not known and not (folder / STARTS).exists():
            config = await asyncio.to_thread(config_of, self._config, order)
            place = directory.RunPlace(run_id, folder, resumed=folder.exists())
            await asyncio.to_thread(directory.create, place, config)
            if place.resumed:
                write_atomically(folder / "config.yaml", dump_config(config).encode())
            write_order(folder, order)
        elif known and order_of(folder) != order:
            raise ContractError(f"model {run_id} was created with other settings; give it another name")
        return await self.open(run_id)

    async def open(self, run_id: str) -> ClientRun:
        folder = self._home / "runs" / run_id
        if not (folder / MODEL).exists():
            raise ContractError(f"there is no model {run_id} here; create it first")
        place = self._places.get(run_id)
        if place is not None and place.live is not None and place.live.stop_reason:  # its services gave up
            _log.warning("model.begins_again", run=run_id, reason=place.live.stop_reason)
            await self.close(run_id)
            place = None
        if place is None:
            self._check_place(run_id)
            place = self._places[run_id] = _Place(ThreadPoolExecutor(1, f"run-{run_id}"))
        async with place.lock:
            if self._places.get(run_id) is not place:  # it was left while this waited
                return await self.open(run_id)
            if place.run is None:
                try:
                    place.run = await self._enter(run_id, folder, place)
                except BaseException:
                    await self._leave(run_id, place)
                    raise
            return place.run

    def _check_place(self, run_id: str) -> None:
        section = self._config.door
        if run_id not in self._places and len(self._places) >= section.models:
            raise ContractError(
                f"all {section.models} places for models are taken, by {', '.join(self._places)}; end that "
                "client's session, wait until a client that is gone was silent for door.session_timeout_s="
                f"{section.session_timeout_s:g}, or serve more with door.models"
            )

    async def close(self, run_id: str) -> None:
        if (place := self._places.get(run_id)) is not None:
            async with place.lock:
                await self._leave(run_id, place)

    async def close_all(self) -> None:
        """Stop the services of all runs."""
        await asyncio.gather(*map(self.close, list(self._places)))

    def runs(self) -> Sequence[str]:
        # All of the home, with whichever configuration they were made.
        return [path.name for path in directory.list_runs(self._home) if (path / MODEL).exists()]

    def saved(self, run_id: str | None = None) -> Sequence[SavedVersion]:
        if run_id is not None:
            return saved_of(self._home / "runs" / run_id)
        found: list[SavedVersion] = []
        for run in self.runs():
            try:
                found += saved_of(self._home / "runs" / run)
            except (ContractError, IntegrityError) as error:  # what other runs saved is there nevertheless
                _log.warning("saved.unreadable", run=run, reason=str(error))
        return sorted(found, key=lambda one: one.at)

    def find(self, saved: SavedWeights) -> SavedVersion | None:
        return read_saved(self._home / "runs" / saved.run_id, saved)

    async def drop(self, saved: SavedWeights) -> None:
        if (place := self._places.get(saved.run_id)) is not None:
            async with place.lock:
                run = place.run
            if run is not None:
                return await run.drop(saved)
        folder = self._home / "runs" / saved.run_id
        if not folder.exists():
            return None
        try:
            with directory.lock(folder):  # its learner is down: nothing else writes there
                return await asyncio.to_thread(drop_saved, folder, saved.kind, saved.name)
        except ConfigError as error:  # it is about to begin or to end, or another process has it
            raise UnavailableError(str(error)) from error

    async def _enter(self, run_id: str, folder: Path, place: _Place) -> LiveClientRun:
        config = load_config(folder / "config.yaml")
        resumed = (folder / STARTS).exists()

        def enter() -> LiveRun:
            found = directory.RunPlace(run_id, folder, resumed)
            live = place.live = claim_place(found, config, self._home)
            live.__enter__()
            return live

        _log.info("model.opening", run=run_id)
        live = await asyncio.get_running_loop().run_in_executor(place.thread, enter)
        order = order_of(folder)
        run = LiveClientRun(live, order, await asyncio.to_thread(info_of, config, run_id, order))
        await run.publish()
        _log.info("model.open", run=run_id, version=run.version)
        return run

    async def _leave(self, run_id: str, place: _Place) -> None:
        self._places.pop(run_id, None)
        if place.run is not None:
            place.run.left = True
        live, place.live, place.run = place.live, None, None
        try:
            if live is not None:
                await asyncio.get_running_loop().run_in_executor(place.thread, live.close)
        finally:
            place.thread.shutdown(wait=False)
            del live
            gc.collect()  # its parts refer to each other, and keep `antiphon gc` out as long as they exist


@contextmanager
def open_client_runs(config: RunConfig, home: Path) -> Iterator[HomeClientRuns]:
    """Serve the client-driven runs of a home; close them with `close_all` before the block ends.

    Raises:
        ConfigError: for a configuration that cannot be used; nothing is started then.
    """
    if config.environment.name != CLIENT:
        raise ConfigError(
            f"environment.name={config.environment.name} has prompts of its own, so `antiphon run` trains "
            f"it; the door needs environment.name={CLIENT}"
        )
    config = config_of(config, ModelOrder(rank=0))
    preflight(config, home)
    yield HomeClientRuns(config, home)


def config_of(config: RunConfig, order: ModelOrder) -> RunConfig:
    """Return the configuration of the run of one model.

    Raises:
        ContractError: when a rank cannot be, or a target is none of the model's.
    """
    if order.rank > config.door.most_rank:
        raise ContractError(
            f"rank {order.rank} is larger than door.most_rank={config.door.most_rank}; ask for a smaller one"
        )
    if unknown := {*order.targets} - {*MODULES, "unembed"}:
        raise ContractError(f"adapters of {min(unknown)} are unknown; name some of attn, mlp, unembed")
    said = config.model_dump()
    said["run"]["steps"] = MOST_STEPS
    if order.seed is not None:
        said["run"]["seed"] = order.seed % 2**63
    if order.rank:
        said["learner"]["lora"] |= {"rank": order.rank, "targets": modules_of(config, order.targets)}
    return with_learning_rate(RunConfig.model_validate(said))


def modules_of(config: RunConfig, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the modules of the model that get adapters; () for all of its layers.

    The unembedding gets none: as all weights outside of layers it stays as it is.

    Raises:
        ContractError: when nothing is left.
    """
    parts = {*targets} & {*MODULES}
    if not targets or parts == {*MODULES}:
        return ()
    there = {
        name.split(".")[-2]
        for name in expected_tensors(Path(resolve_model_path(config.model.path)))
        if name.endswith(".weight") and "." in name
    }
    found = tuple(module for part in sorted(parts) for module in MODULES[part] if module in there)
    if not found:
        raise ContractError(
            f"the model has no module for adapters of {', '.join(sorted(targets))}; train attn or mlp"
        )
    return found


def info_of(config: RunConfig, run_id: str, order: ModelOrder) -> ModelInfo:
    """Return what clients are told of a model."""
    folder = Path(resolve_model_path(config.model.path))
    said: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    return ModelInfo(
        run_id=run_id,
        rank=order.rank,
        vocabulary_size=int(said["vocab_size"]),
        max_tokens=config.rollout.max_model_tokens,
        architecture=str(said.get("model_type", "")),
        tokenizer=str(folder.absolute()),
    )
