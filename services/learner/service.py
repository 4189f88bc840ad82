"""Learner service: one step at a time, each committed before it is believed.

Training runs on one thread of its own, and looking after snapshots on another: status and health are
answered meanwhile. A version that is to be published is on the disk before its step is committed. A call
that is repeated joins the one under way, and a step that was trained but whose commit went astray is
committed again, never trained twice. After a loss that is no number the weights of the version before are
back, and the run is paused; a step of a client is skipped instead. When the step is skipped meanwhile, its
batch is dropped for the empty one that replaces it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.api.learner import (
    CallReply,
    Learner,
    LearnerStatus,
    SavedReply,
    SnapshotReply,
    StepReply,
    StepResult,
)
from antiphon.core.client_records import CLIENT, Scores
from antiphon.core.config import RunConfig
from antiphon.core.config_sections import LoopSection
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import AntiphonError, ContractError, IntegrityError, UnavailableError
from antiphon.core.loop.staleness import is_published
from antiphon.core.metrics import batch_metrics
from antiphon.core.patience import Patience
from antiphon.core.records import BatchRef, IntArray, SnapshotManifest, StepCommit
from antiphon.core.trust.audit import NARROWEST_DRIFT, SampleStatistics
from antiphon.lineage.rollout_table import decode_timings
from antiphon.lineage.saved_weights import SavedNote
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.net.rpc.retry import OUTAGE_S, retry_unavailable
from antiphon.services.learner.training import Publishing, TrainedStep, Training, read_weights
from antiphon.system import failpoints

if TYPE_CHECKING:  # torch, which a simulated learner does without
    from antiphon.services.learner.client_calls import ClientCalls

MOST_WAIT_S = 30.0
"""Longest that a call is held open."""
NO_OUTAGE = 0.0
"""Of calls that the flow waits for: it hears at once that the coordinator is blocked and asks again."""
OUTCOME_S = 60.0
"""How long a result is kept for a caller that does not come back for it."""

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class SharedCalls:
    """Calls by name; each is under way at most once."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._closing = False

    def running(self) -> list[str]:
        """Return the names of what is under way."""
        return [name for name, task in self._under_way.items() if not task.done()]

    def close(self) -> None:
        """Cancel what is under way."""
        self._closing = True
        for task in list(self._under_way.values()):
            task.cancel()

    async def once(self, name: str, begin: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Join the call of that name that is under way, or begin it, and return its result."""
        task = await self.join(name, begin, None)
        return task.result()

    async def join(
        self, name: str, begin: Callable[[], Coroutine[Any, Any, _T]], wait_s: float | None
    ) -> "asyncio.Task[_T]":
        """Join the call of that name that is under way, or begin it, for up to `wait_s` seconds.

        A caller that gives up leaves the work going: a thread cannot be called back, and the next caller
        will want its result. The caller that finds it done takes it away.
        """
        task = self._under_way.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(begin(), name=name)
            self._under_way[name] = task
            task.add_done_callback(lambda done: self._ended(name, done))
        await asyncio.wait({task}, timeout=None if wait_s is None else min(max(0.0, wait_s), MOST_WAIT_S))
        if task.done():
            self._forget(name, task)
        return task

    def _ended(self, name: str, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("call.failed", call=name, error=str(error))
        if not self._closing:
            asyncio.get_running_loop().call_later(OUTCOME_S, self._forget, name, task)

    def _forget(self, name: str, task: asyncio.Task[Any]) -> None:
        if self._under_way.get(name) is task:
            del self._under_way[name]


POLL_S = 10.0
"""How long one question for a batch stays open at the coordinator."""
LOOK_S = 30.0
"""Seconds between two looks at what is announced."""
_Drifts = Mapping[str, tuple[SampleStatistics, ...]]
"""Group -> how far the workers' logprobs were from the learner's."""


class LearnerService(Learner):
    """Trains, commits, checkpoints and publishes the policy of one run."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Training,
        publisher: Publishing,
        store: ArtifactStore,
        coordinator: Coordinator,
        prepare: Callable[[], None] | None = None,
        audits: bool = False,
        client: "ClientCalls | None" = None,
    ) -> None:
        """Prepare; the engine is made by `restore`. `server.open_learner` knows the production parts.

        The trainer is called on the training thread alone, and there `prepare` once before anything else.
        With `audits` the coordinator learns whose logprobs differ from the learner's own. `client` does what
        the client of a run asks, where one drives it.
        """
        self._config = config
        self._store = store
        self._coordinator = coordinator
        self._trainer = trainer
        self._publisher = publisher
        self.origin = ""
        """host:port under which the chunks are served; set once the port is known."""
        self._training = ThreadPoolExecutor(1, "train", prepare)
        self._publishing = ThreadPoolExecutor(1, "publish")
        self._scoring = ThreadPoolExecutor(1, "score")
        self._turn = asyncio.Lock()
        self._calls = SharedCalls()
        self._restored = asyncio.Event()
        self._announced: dict[int, str] = {}
        self._version = -1
        self._audits = audits
        self._client = client
        self._last_commit: StepCommit | None = None
        self._trained: tuple[str, TrainedStep] | None = None
        """Digest of a batch that was trained on and not committed yet, and what that led to."""
        self._uncommitted: StepCommit | None = None
        self._state = "idle"
        self._last_end_s: float | None = None

    async def close(self) -> None:
        """End what is under way and drop the engine."""
        self._calls.close()
        await self._on_thread(self._trainer.stop)
        self._training.shutdown()
        self._publishing.shutdown()
        self._scoring.shutdown()

    async def await_step(self, step: int, wait_s: float) -> StepReply:
        task = await self._calls.join(f"step {step}", lambda: self._step(step), wait_s)
        return StepReply(self._trainer.progress.read(), task.result() if task.done() else None)

    async def await_snapshot(self, version: int, wait_s: float) -> SnapshotReply:
        task = await self._calls.join(f"publish {version}", lambda: self._publish(version), wait_s)
        publishing = self._publisher if self._restored.is_set() else self._trainer
        return SnapshotReply(publishing.progress.read(), task.result() if task.done() else None)

    async def await_call(
        self, step: int, place: int, digest: str, forward_only: bool, wait_s: float
    ) -> CallReply:
        client = self._clients()

        async def call() -> tuple[int, bool]:
            await self._restored.wait()
            async with self._turn:
                if step < self._version and client.answered(digest):
                    return 0, True
                if step != self._version:
                    raise ContractError(
                        f"a call since version {step} cannot be done; the learner holds version "
                        f"{self._version}"
                    )
                if self._trainer.version != self._version:  # a step ended half way
                    await self._restore()
                self._trainer.progress.begin(f"doing call {place} since version {step}", "micro-batch")
                self._state = "training"
                try:
                    return await self._on_thread(partial(client.call, place, digest, forward_only))
                finally:
                    self._state = "idle"
                    self._trainer.progress.end()

        name = f"call {step} {place} {digest} {forward_only}"
        task = await self._calls.join(name, call, wait_s)
        return CallReply(self._trainer.progress.read(), *(task.result() if task.done() else ()))

    async def await_saved(
        self, kind: str, name: str, version: int, wait_s: float, expires_at: float | None = None
    ) -> SavedReply:
        client = self._clients()

        async def save() -> SavedNote:
            await self._restored.wait()
            async with self._turn:
                if self._trainer.version != self._version:  # a step ended half way, or was not committed
                    await self._restore()
                note = client.note(kind, name)
                if note is not None and note.version == version:
                    return client.again(kind, name, version, note.digest, expires_at)
                if kind != "weights":
                    stored = self._publisher.stored()
                    stored = {v: d for v, d in stored.items() if v <= self._version}
                    return client.pin(name, version, stored, expires_at)
                if version != self._version:
                    raise ContractError(
                        f"version {version} cannot be saved; the learner holds version {self._version}"
                    )
                self._trainer.progress.begin(f"saving version {version} as {name}", "byte")
                try:
                    saving = partial(client.save, name, self._held_digest(), expires_at)
                    return await self._on_thread(saving)
                finally:
                    self._trainer.progress.end()

        task = await self._calls.join(f"save {kind} {name} {version} {expires_at}", save, wait_s)
        done = (task.result().digest, task.result().bytes) if task.done() else ()
        return SavedReply(self._trainer.progress.read(), *done)

    async def drop_saved(self, kind: str, name: str) -> None:
        client = self._clients()
        async with self._turn:
            await asyncio.to_thread(client.drop, kind, name)

    async def score(self, version: int, token_ids: IntArray, top: int) -> Scores:
        model, loop = self._clients().model, asyncio.get_running_loop()

        async def score() -> Scores:
            return await loop.run_in_executor(self._scoring, model.scores, version, token_ids, top)

        # Who asks again after a deadline joins it.
        return await self._calls.once(f"score {version} {top} {digest_bytes(token_ids.tobytes())}", score)

    def _held_digest(self) -> str:
        """Return the digest of the weights of the version that is held."""
        if self._last_commit is not None:
            return self._last_commit.weights_digest
        return self._publisher.stored()[0]  # of a client's run it stays

    def _clients(self) -> "ClientCalls":
        if self._client is None:
            raise ContractError(
                f"this run has environment.name={self._config.environment.name}; only one with "
                f"environment.name={CLIENT} does what a client asks"
            )
        return self._client

    async def step(self, step: int) -> StepResult:
        """Make a step, however long it takes; errors as those of `await_step`."""
        return await self._calls.once(f"step {step}", lambda: self._step(step))

    async def publish(self, version: int) -> SnapshotManifest:
        """Publish a version, however long it takes; errors as those of `await_snapshot`."""
        return await self._calls.once(f"publish {version}", lambda: self._publish(version))

    async def restore(self) -> int:
        """Return to the coordinator's committed version: newest checkpoint, then recorded batches.

        Calls that come meanwhile wait for it. Snapshots that are stored are announced from the present origin
        before, so that workers continue.

        Raises:
            IntegrityError: when steps that are repeated give other digests than the committed ones.
        """

        async def restore() -> int:
            async with self._turn:
                committed = await self._restore()
                self._restored.set()
                return committed

        return await self._calls.once("restore", restore)

    async def status(self) -> LearnerStatus:
        running = self._calls.running()
        publishes = self._state == "idle" and any(name.startswith("publish ") for name in running)
        state, works = ("publishing", self._publisher) if publishes else (self._state, self._trainer)
        return LearnerStatus(self._version, state, works.progress.read())

    async def publish_again(self, all_of_them: bool = False) -> None:
        """Announce every snapshot in the store from the present origin, unless it was already.

        A learner that was started again has another port; the announced manifests must name it.
        """
        wanted = {version for version in self._publisher.stored() if version <= self._version}
        if self._published(self._version):
            wanted.add(self._version)
        for version in sorted(wanted):
            # Another call may meanwhile have had the oldest of them removed.
            if all_of_them or self._announced.get(version) != self.origin:
                await self._reach(f"publishing version {version}", partial(self.publish, version))

    async def keep_announced(self) -> None:
        """Announce every snapshot again whenever the newest is said to come from elsewhere, until cancelled.

        A learner that ended may have announced a snapshot in words that reach the coordinator only after
        those of its successor: workers would look for chunks where nobody is, until the next version.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                manifest = await self._coordinator.latest_manifest(None)
                if manifest is not None and manifest.origin != self.origin:
                    _log.warning("learner.announces_again", version=manifest.version, said=manifest.origin)
                    await self.publish_again(all_of_them=True)
            except AntiphonError as error:
                _log.warning("learner.not_announced", reason=str(error))

    async def _step(self, step: int) -> StepResult:
        loop, progress = asyncio.get_running_loop(), self._trainer.progress
        await self._restored.wait()
        async with self._turn:
            if step < self._version:
                return await self._recorded(step)
            if step > self._version:
                raise ContractError(
                    f"step {step} is not the next one; the learner holds version {self._version}"
                )
            made = None
            while made is None:
                batch = await self._batch(step)
                begun_s = loop.time()
                self._state = "training"
                try:
                    made = await self._make(batch)
                finally:
                    self._state = "idle"
            commit, drifts = made
            await self._report_drifts(batch, drifts)
            ended_s = loop.time()
            idle_s = 0.0 if self._last_end_s is None else begun_s - self._last_end_s
            self._last_end_s = ended_s
            if self._version % self._config.learner.checkpoint_interval == 0:
                progress.begin(f"saving version {self._version}", "byte")
                await self._on_thread(self._trainer.save)
            progress.end()
            return StepResult(commit, idle_s, ended_s - begun_s)

    async def _make(self, batch: BatchRef) -> tuple[StepCommit, _Drifts] | None:
        """Train on a batch, write the version and commit it; None when the step was skipped meanwhile.

        What an earlier call got done of it is not done again. Over an altered batch or a loss that is no
        number the run is paused, unless a client drives it, with the weights of the version before back.
        """
        step, progress, trainer = batch.step, self._trainer.progress, self._trainer
        if self._trained is not None and self._trained[0] != batch.digest:
            await self._restore()  # that step was skipped meanwhile
        progress.begin(f"training step {step}", "micro-batch")
        try:
            if self._trained is None:
                held = await self._on_thread(lambda: trainer.train(step, self._store.get(batch.digest)))
                self._trained = batch.digest, held
            trained = self._trained[1]
            if self._uncommitted is None:
                digest, metrics = await self._on_thread(partial(self._read, trained))
                if trained.loaded:
                    await self._on_thread(trainer.save)
                self._uncommitted = StepCommit(
                    step=step,
                    version=trained.version,
                    weights_digest=digest,
                    batch_digest=batch.digest,
                    metrics={**metrics, **batch_metrics(batch)},
                    published=self._published(trained.version),
                    exactness=trained.exactness,
                )
            commit = self._uncommitted
            progress.begin(f"committing step {step}", "answer of the coordinator")
            failpoints.reach("learner.commit.before")
            committing = partial(self._coordinator.commit_step, commit)
            await self._reach(f"committing step {step}", committing, NO_OUTAGE)
        except IntegrityError as error:
            asking = partial(self._coordinator.await_stage, "reward", step, 0.0)
            reply = await self._reach(f"asking for the batch of step {step}", asking)
            skipped = reply.batch is None or reply.batch.digest != batch.digest
            if self._uncommitted is not None and not skipped:
                raise  # the coordinator refused the commit
            reason = (
                f"step {step} on batch {batch.digest[:12]} was not committed: {error}; or skip the "
                f"step with `antiphon skip RUN {step} --reason TEXT`; then start the run again"
            )
            if skipped:
                _log.warning("batch.dropped", step=step, digest=batch.digest[:12])
            elif self._client is not None:
                # Its client hears of it and takes other steps, for which the run must go on.
                reason = (
                    f"step {step} was not made: {error}; nothing was trained, version {step + 1} is version "
                    f"{step} again"
                )
                skipping = partial(self._coordinator.skip_step, step, reason, "learner")
                await self._reach(f"skipping step {step}", skipping)
            else:
                _log.error("step.refused", step=step, batch=batch.digest, reason=reason)
                await self._reach("pausing the run", partial(self._coordinator.pause, reason))
            if trainer.version != self._version:
                await self._restore()
            if skipped:
                return None
            raise IntegrityError(reason) from error
        failpoints.reach("learner.commit.after")
        self._version, self._last_commit = commit.version, commit
        self._uncommitted = self._trained = None
        progress.add()
        return commit, trained.drifts

    async def _report_drifts(self, batch: BatchRef, drifts: _Drifts) -> None:
        """Report groups whose logprobs are further off than the best fleet's rounding."""
        far = {
            group_id: samples
            for group_id, samples in drifts.items()
            if max(sample.drift for sample in samples) > NARROWEST_DRIFT
        }
        if not self._audits or not far:
            return
        rows = decode_timings(await asyncio.to_thread(self._store.get, batch.timings_digest))
        workers = {row.group_id: row.worker_id for row in rows}
        try:
            for group_id, samples in far.items():
                await self._coordinator.submit_audit(group_id, samples, workers.get(group_id, ""))
        except (UnavailableError, ContractError) as error:
            _log.warning("drift.unreported", step=batch.step, reason=str(error))  # the next step reports

    async def _recorded(self, step: int) -> StepResult:
        commit = self._last_commit
        if commit is None or commit.step != step:
            found = await self._reach("reading the commits", partial(self._coordinator.commits, step - 1))
            commit = next((entry for entry in found if entry.step == step), None)
        if commit is None:
            raise IntegrityError(
                f"the learner holds version {self._version}, but step {step} was never committed; restore it"
            )
        return StepResult(commit, idle_s=0.0, train_s=0.0)

    async def _batch(self, step: int) -> BatchRef:
        clock, services = asyncio.get_running_loop().time, self._config.services
        progress, patience, counter = self._trainer.progress, Patience(clock()), None
        wait_s = min(POLL_S, services.stall_timeout_s)
        asking = partial(self._coordinator.await_stage, "reward", step, wait_s)
        while True:
            asked = clock()
            reply = await self._reach(f"pulling the batch of step {step}", asking, NO_OUTAGE)
            # Nothing could move while the coordinator was away or blocked; that had a patience of its own.
            patience.excuse(max(0.0, clock() - asked - POLL_S))
            if reply.batch is not None:
                return reply.batch
            if reply.halted:  # the coordinator answers at once until the run is started again
                raise IntegrityError(reply.halted)
            progress.begin(
                f"waiting for the batch of step {step}: {reply.waiting_for}", "token, group or reward"
            )
            progress.add(counter is not None and reply.counter != counter)
            counter = reply.counter
            still_s = patience.still_s(counter, clock(), absent=reply.no_workers)
            if still_s >= (services.empty_fleet_timeout_s if reply.no_workers else services.stall_timeout_s):
                raise UnavailableError(f"the batch did not come: {reply.stalled('reward', step, still_s)}")

    async def _publish(self, version: int) -> SnapshotManifest:
        await self._restored.wait()
        if not self.origin:
            raise ContractError("the learner serves no chunks yet; publish once it is ready")
        return await self._announce(version)

    async def _announce(self, version: int) -> SnapshotManifest:
        loop, progress = asyncio.get_running_loop(), self._publisher.progress
        progress.begin(f"publishing version {version}", "byte")
        failpoints.reach("learner.publish.before")
        manifest = await loop.run_in_executor(
            self._publishing, self._publisher.manifest, version, self.origin
        )
        progress.begin(f"announcing version {version}", "answer of the coordinator")
        failpoints.reach("learner.announce.before")
        announcing = partial(self._coordinator.announce_snapshot, manifest)
        await self._reach(f"announcing version {version}", announcing, NO_OUTAGE)
        progress.add()
        self._announced[version] = manifest.origin
        _log.info("snapshot.published", version=version, bytes=manifest.full_bytes)
        return manifest

    async def _restore(self) -> int:
        progress = self._trainer.progress
        self._state = "restoring"
        progress.begin("restoring: reading the commits", "answer of the coordinator")
        commits = await self._reach("reading the commits", partial(self._coordinator.commits, -1))
        if self.origin and not self._restored.is_set():
            for version in sorted(committed_snapshots(self._publisher.stored(), commits)):
                await self._announce(version)
        try:
            await self._replay(commits)
        finally:
            self._state = "idle"
        self._version = len(commits)
        self._last_commit = commits[-1] if commits else None
        self._uncommitted = self._trained = None
        _log.info("learner.restored", version=self._version)
        return self._version

    async def _replay(self, commits: Sequence[StepCommit]) -> None:
        """Bring the trainer to the last commit; compare every digest on the way, write what is missing."""
        progress, trainer, loop = self._trainer.progress, self._trainer, self._config.loop
        progress.begin("restoring: loading weights", "byte")
        stored = committed_snapshots(self._publisher.stored(), commits)
        oldest = len(commits) - loop.unpublished_limit * loop.publish_interval
        if self._config.scores_earlier:
            oldest = -1  # the steps that follow a version may score tokens with it
        first = partial(first_version, loop, len(commits), stored, trainer.newest_checkpoint)

        async def check(held: TrainedStep) -> None:
            wanted = held.version > oldest and held.version not in stored
            digest, _ = await self._on_thread(partial(self._read, held, wanted))
            progress.add()
            if held.version and (committed := commits[held.version - 1].weights_digest) != digest:
                raise IntegrityError(
                    f"version {held.version} was committed with weights {committed}, but repeating "
                    f"its steps gave {digest}; the machine, the libraries or learner.threads differ "
                    "from those of the run"
                )

        held = await self._on_thread(lambda: trainer.start(first()))
        await check(held)
        for commit in commits[held.version :]:
            progress.begin(f"restoring: step {commit.step} of {len(commits)}", "micro-batch")
            payload = await asyncio.to_thread(self._store.get, commit.batch_digest)
            held = await self._on_thread(partial(trainer.train, commit.step, payload))
            await check(held)
            _log.info("step.repeated", step=commit.step)

    def _read(self, held: TrainedStep, wanted: bool = True) -> tuple[str, dict[str, float]]:
        wanted = wanted and self._published(held.version)
        return read_weights(held, self._publisher, self._trainer.progress, wanted)

    def _published(self, version: int) -> bool:
        return is_published(version, self._config.loop.publish_interval, self._config.run.steps)

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._training, work)

    async def _reach(self, what: str, attempt: Callable[[], Awaitable[_T]], outage_s: float = OUTAGE_S) -> _T:
        return await retry_unavailable(
            what, attempt, self._config.services.stall_timeout_s, outage_s=outage_s
        )


def committed_snapshots(stored: Mapping[int, str], commits: Sequence[StepCommit]) -> set[int]:
    """Return the versions whose stored weights are the committed ones.

    A version may have been written and not committed, and its step skipped since. Version 0 has no
    commit; the coordinator knows what it was announced with.

    Args:
        stored: version -> digest of its stored weights.
        commits: of all steps, in order.
    """
    committed = {commit.version: commit.weights_digest for commit in commits}
    return {version for version, digest in stored.items() if not version or committed.get(version) == digest}


def first_version(
    loop: LoopSection,
    committed: int,
    stored: Collection[int],
    newest_checkpoint: Callable[[int], int | None],
) -> int:
    """Return the newest version to start from, so that no snapshot still needed is skipped.

    Args:
        loop: says which versions are published, and how old one may be that still samples.
        committed: steps so far.
        stored: versions with a snapshot.
        newest_checkpoint: returns the newest version up to another one with a sound checkpoint, or None.
    """
    oldest = max(0, committed - loop.max_staleness)
    needed = range(oldest + -oldest % loop.publish_interval, committed + 1, loop.publish_interval)
    first = min((version for version in needed if version not in stored), default=committed)
    # Going back to the base weights repeats the whole run. Elastic mode continues from the newest
    # snapshot instead; fixed mode cannot sample its next step without the one that is missing.
    return first if loop.mode == "fixed" or newest_checkpoint(first) is not None else committed
