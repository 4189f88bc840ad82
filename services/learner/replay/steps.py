"""Replay of steps: recorded steps executed again by the learner's own code, from artifacts alone.

It is the code that repeats steps after a crash (`services.learner.step`), fed from a copy of a
run's ledger instead of the run's store and journal. It starts at the nearest pinned checkpoint or
at the base model, and compares what comes out; a difference is reported, not raised, and the steps
after it are still executed. Everything runs on one thread whose numerics are pinned.

Weights that the ledger records by digest alone are made again so (`weights_of`). The digest decides: whatever
else a replay compares, only weights of the recorded digest are handed out.
"""

import math
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch
from safetensors.torch import save_file

from antiphon.core.client_records import CLIENT
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.metrics import LEARNER_METRICS
from antiphon.core.reporting.replay_checks import (
    LogprobCheck,
    ReplaySummary,
    StepCheck,
    compare_metrics,
    is_near,
)
from antiphon.lineage.client_steps import loads_weights
from antiphon.lineage.documents.manifest import build_manifest, source_tree
from antiphon.lineage.documents.replay_copy import ReplayCopy, environment_differences
from antiphon.lineage.run_log import is_timing
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, pin_numerics
from antiphon.services.learner.earlier_policies import EarlierPolicies
from antiphon.services.learner.ranks.followers import Followers
from antiphon.services.learner.ranks.group import join
from antiphon.services.learner.replay.base import base_model, load_version
from antiphon.services.learner.replay.rollouts import RolloutScorer
from antiphon.services.learner.saved import SavedFolder
from antiphon.services.learner.step import Trainer, checkpoint_ranks, config_digest, device_name
from antiphon.services.learner.training import TrainedStep
from antiphon.weights.adapter import write_merged
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import write_snapshot

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class Replayer:
    """Executes recorded steps again; methods may be called from any thread, one at a time."""

    def __init__(
        self,
        copy: ReplayCopy,
        *,
        model: Path | None = None,
        threads: int | None = None,
        ranks: int | None = None,
        own_checkpoints: Path | None = None,
        rollouts: bool = False,
    ) -> None:
        """Prepare; nothing is loaded before `start` or `score`.

        Args:
            copy: the run's artifacts; never written to.
            model: folder of the base model, when the copy's own is not to be used.
            threads: CPU threads, when not those of the record.
            ranks: how many train together, when not those of the record: sums of gradients round otherwise.
            own_checkpoints: the run's checkpoint folder on the machine it ran on; unlike a copy's
                it is trusted to hold pickles.
            rollouts: whether trajectories will be scored: versions that the copy does not keep are then made
                again from as far back as a batch may name, and stay in a temporary folder until `close`.
        """
        if rollouts and copy.config.environment.name == CLIENT:
            raise ConfigError(
                f"--rollouts cannot be with {copy.run_id}: what its client trained on does not say which "
                "version sampled it; replay its steps without --rollouts"
            )
        if rollouts and copy.config.rollout.logprobs == "learner":
            raise ConfigError(
                f"--rollouts cannot be with {copy.run_id}: its engines gave no log-probabilities to compare; "
                "replay its steps without --rollouts"
            )
        self._copy = copy
        self._given = model
        self._remade = frozenset(copy.recorded_by_digest() if rollouts or copy.config.scores_earlier else ())
        self._made: dict[int, Path] = {}
        self._own = own_checkpoints
        recorded = copy.config.learner.threads
        self._threads = recorded if threads is None else threads
        if self._threads < 1:
            raise ConfigError(f"--threads {threads} is not possible; give 1 or more")
        recorded_ranks = copy.config.learner.ranks
        section = copy.config.learner.model_copy(update={"ranks": recorded_ranks if ranks is None else ranks})
        if section.ranks < 1:
            raise ConfigError(f"--ranks {ranks} is not possible; give 1 or more")
        if section.ranks > 1 and copy.config.scores_earlier:
            raise ConfigError(
                f"--ranks {ranks} is not possible: one rank computes the log-probabilities of {copy.run_id}"
            )
        self._config = copy.config.model_copy(update={"learner": section})
        """The recorded one, but for the ranks."""
        here = build_manifest(copy.config, copy.run_id, source_tree())
        _check_objective(copy, here.get("methods", {}).get("objective"))
        self._work = Path(tempfile.mkdtemp(prefix="antiphon-replay-"))
        self._own_base = self._work / "model"
        """Where version 0 lies as a model, if that is what the replay starts from."""
        self._batches = ArtifactStore(self._work / "batches")
        self._followers: Followers | None = None
        self._base: str | None = None
        self._trainer: Trainer | None = None
        self._scorer: RolloutScorer | None = None
        self._thread = ThreadPoolExecutor(1, "replay", pin_numerics, (self._threads,))
        changes = environment_differences(copy.manifest, here)
        if self._threads != recorded:
            changes = (f"learner.threads was {recorded} and is {self._threads}", *changes)
        if section.ranks != recorded_ranks:
            changes = (f"learner.ranks was {recorded_ranks} and is {section.ranks}", *changes)
        exact = copy.config.model.dtype == "float32"
        self.summary = ReplaySummary(
            copy.run_id,
            0,
            changes,
            compares_logprobs=exact,
            recorded_ranks=recorded_ranks,
            ranks=section.ranks,
            device=device_name(),
        )
        """What was found so far."""
        self.held: TrainedStep | None = None
        """The version that was restored or made last."""

    def start(self, first: int) -> int:
        """Restore the newest version up to `first` that can be had, and return it.

        Raises:
            ConfigError: when the base model cannot be loaded, or a checkpoint belongs to another
                configuration.
            IntegrityError: when what was restored is not the recorded version.
            UnavailableError: when the other ranks do not come.
        """
        return self._timed("seconds", self._start, first)

    def step(self, step: int) -> StepCheck:
        """Execute the next step again and compare it with its record.

        Raises:
            IntegrityError: when the batch is missing or altered, or the step is not the next one.
        """
        return self._timed("seconds", self._step, step)

    def score(self, step: int) -> LogprobCheck:
        """Score the trajectories that a step trained on again and compare.

        Raises:
            IntegrityError: when the batch or the weights of a version are missing or altered.
        """
        return self._timed("score_seconds", self._score, step)

    def close(self) -> None:
        try:
            if self._trainer is not None:
                self._thread.submit(self._trainer.stop).result()
        finally:
            if self._followers is not None:
                self._followers.close()
            self._thread.shutdown()
            shutil.rmtree(self._work, ignore_errors=True)

    def _timed(self, clock: str, work: Callable[[int], _T], number: int) -> _T:
        begun = time.perf_counter()
        try:
            return self._thread.submit(work, number).result()
        finally:
            setattr(self.summary, clock, getattr(self.summary, clock) + time.perf_counter() - begun)

    def _start(self, first: int) -> int:
        if self._remade:
            first = max(0, first - self._copy.config.loop.max_staleness)
        version, checkpoints = self._nearest(first)
        # Another place of the model or number of threads must not look like another configuration:
        # checkpoints are compared with the recorded one, and only the engine sees the change.
        moved = self._moved(self._config)
        if self._config.learner.ranks > 1:
            self._followers = Followers(self._config, checkpoints.root, self._batches.root, moved)
        # What a client loaded lies beside the run, where that is.
        saved = None if self._own is None else SavedFolder(self._own.parent)
        earlier = EarlierPolicies(moved, lambda at: load_version(self._copy, at, self._made.get(at)))
        self._trainer = Trainer(
            self._config, checkpoints, lambda config: DeepSpeedEngine(moved), saved, earlier
        )
        try:
            join(self._config)
        except RuntimeError as error:  # torch's word for ranks that did not come
            said = " ".join(str(error).split())[:200]
            raise UnavailableError(f"the ranks of the learner did not meet: {said}") from error
        try:
            held = self._trainer.start(version)
        except RuntimeError as error:  # torch's word for tensors of other shapes
            raise IntegrityError(
                f"{self._source(version)} does not fit the model of {self._copy.run_id}: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
        wanted, found = self._copy.weights_digest(held.version), held.weights.digest()
        if found != wanted:
            advice = (
                "remove its folder, and the replay starts earlier"
                if held.version
                else "give the folder of the model the run began with, with --model"
            )
            raise IntegrityError(
                f"{self._source(held.version)} has weights {found[:12]}, but version "
                f"{held.version} of {self._copy.run_id} was recorded with {wanted[:12]}; "
                f"{advice}"
            )
        self.summary.started_from = held.version
        self._hold(held)
        return held.version

    def _loaded(self, trainer: Trainer, step: int) -> TrainedStep | None:
        """Hold what a client's step loaded, from the run's own checkpoint of it; None where that is gone.

        What was saved may be of another run, was replaced since, or is no part of a copy.
        """
        version, checkpoints = self._nearest(step + 1)
        if version != step + 1:
            return None
        held = trainer.begin(version, checkpoints)
        return replace(held, metrics={metric.name: 0.0 for metric in LEARNER_METRICS})

    def _nearest(self, first: int) -> tuple[int, CheckpointStore]:
        """Return the newest usable checkpoint up to `first`, or 0 and a store without any."""
        stores = [(CheckpointStore(folder, 1), False) for folder in self._copy.checkpoints]
        if self._own is not None:
            stores.append((CheckpointStore(self._own, 1), True))
        best = (0, CheckpointStore(self._work / "no-checkpoints", 1))
        for checkpoints, trusted in stores:
            version = checkpoints.newest_sound(first)
            while version is not None and not self._usable(checkpoints.folder(version), version, trusted):
                version = checkpoints.newest_sound(version - 1)
            if version is not None and version > best[0]:
                best = (version, checkpoints)
        return best

    def _usable(self, folder: Path, version: int, trusted: bool) -> bool:
        """Return whether a checkpoint may be opened: DeepSpeed would run whatever its pickles say.

        Nor one behind versions that its steps score tokens with, where the copy does not keep them all.

        Raises:
            ConfigError: when it belongs to another configuration.
        """
        if self._config.scores_earlier and not self._remade.isdisjoint(
            range(version - self._config.loop.max_staleness, version)
        ):
            return False
        try:
            ranks = checkpoint_ranks(folder)
        except IntegrityError as error:
            _log.warning("checkpoint.refused", version=version, reason=str(error))
            return False
        if ranks != self._config.learner.ranks:
            return False  # each rank has the optimizer's state of its own part
        wanted = config_digest(self._copy.config)
        for path in sorted(folder.rglob("*.pt")):
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
                if trusted:
                    continue
                _log.warning("checkpoint.refused", version=version, reason=str(error).split("\n")[0][:200])
                return False
            if "config_digest" in state and state["config_digest"] != wanted:
                raise ConfigError(
                    f"the checkpoint of version {version} in {folder.parent} belongs to another model, "
                    f"algorithm or learner configuration than {self._copy.run_id}; remove its folder, and "
                    "the replay starts earlier"
                )
        return True

    def _moved(self, config: RunConfig) -> RunConfig:
        path, lora = self._model(), config.learner.lora
        model = config.model.model_copy(update={"path": path})
        if path == str(self._own_base):  # version 0 has the adapter that the run started from
            lora = lora.model_copy(update={"start": None})
        learner = config.learner.model_copy(update={"threads": self._threads, "lora": lora})
        return config.model_copy(update={"model": model, "learner": learner})

    def _model(self) -> str:
        if self._base is None:
            self._base = base_model(self._copy, self._own_base, self._given)
        return self._base

    def _step(self, step: int) -> StepCheck:
        trainer = self._trainer
        if trainer is None:
            raise IntegrityError("the replay has not begun; call start first")
        begun = time.perf_counter()
        recorded = self._copy.steps[step]
        self.held = None  # the memory of its weights is needed for the next ones
        payload = self._copy.batch(step)
        if self._followers is not None:
            self._batches.put(payload)  # where other ranks look for it
        trained = self._loaded(trainer, step) if loads_weights(payload) else None
        trained = trained or trainer.train(step, payload)
        self._hold(trained)
        metrics = {name: value for name, value in trained.metrics.items() if not is_timing(name)}
        found = trained.weights.digest()
        differs = found != recorded.weights_digest
        other = self.summary.ranks != self.summary.recorded_ranks
        apart = self._distance(trained) if other else None
        check = StepCheck(
            step=step,
            version=trained.version,
            recorded_digest=recorded.weights_digest,
            found_digest=found,
            metrics=compare_metrics(recorded.metrics, metrics),
            tensor=self._compare_tensors(trained) if differs else "",
            seconds=time.perf_counter() - begun,
            near=other and is_near(recorded.metrics, metrics, apart),
            compared=not other or apart is not None,
        )
        self.summary.steps.append(check)
        return check

    def _hold(self, held: TrainedStep) -> None:
        self.held = held
        if held.version in self._remade:
            self._made[held.version] = self._work / f"v{held.version:06d}.safetensors"
            save_file(held.weights.copies(), self._made[held.version])
        if self._config.scores_earlier:  # only the steps that follow read them
            for version in self._made.keys() & range(held.version - self._config.loop.max_staleness):
                self._made.pop(version).unlink()

    def _compare_tensors(self, trained: TrainedStep) -> str:
        if self._copy.weights(trained.version) is None:
            return ""  # versions that were not published, or not kept, are recorded by digest alone
        return first_tensor_difference(load_version(self._copy, trained.version), trained.weights.copies())

    def _distance(self, trained: TrainedStep) -> float | None:
        """Return the relative distance (L2) of weights from the recorded ones; None where these are gone."""
        if self._copy.weights(trained.version) is None:
            return None
        recorded, found = load_version(self._copy, trained.version), trained.weights.copies()
        gap = sum(float((recorded[name].double() - found[name].double()).square().sum()) for name in found)
        norm = sum(float(recorded[name].double().square().sum()) for name in found)
        return math.sqrt(gap / norm)

    def _score(self, step: int) -> LogprobCheck:
        if self._scorer is None:
            self._scorer = RolloutScorer(self._copy, self._model(), self._made)
        check = self._scorer.check(step)
        self.summary.logprobs.append(check)
        return check

    def _source(self, version: int) -> str:
        return f"the checkpoint of version {version}" if version else f"the base model in {self._model()}"


def _check_objective(copy: ReplayCopy, here: Mapping[str, str] | None) -> None:
    """Check that an objective of the user's own has the source on record.

    Raises:
        ConfigError: when it has another one, or is not here.
    """
    recorded = copy.manifest.get("methods", {}).get("objective", {}).get("digest")
    if recorded is not None and recorded != (here or {}).get("digest"):
        now = "is not here" if not here else f"has {here['digest'][:12]}"
        raise ConfigError(
            f"{copy.run_id} was trained with algorithm.objective={copy.config.algorithm.objective} of source "
            f"{recorded[:12]}, but the one here {now}; put that source in PYTHONPATH"
        )


def first_tensor_difference(recorded: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """Say how the first tensor, in the model's order, differs, and how many others do; "" for equal ones.

    >>> first_tensor_difference({"w": torch.tensor([1.5, 0.0])}, {"w": torch.tensor([1.5, 0.25])})
    'tensor w differs in 1 of 2 elements by at most 0.25 (largest value 1.5)'
    """
    names = [*found, *(name for name in recorded if name not in found)]
    unequal = [name for name in names if not _equal(recorded.get(name), found.get(name))]
    if not unequal:
        return ""
    name = unequal[0]
    old, new = recorded.get(name), found.get(name)
    if old is None or new is None or old.shape != new.shape:
        return f"tensor {name} is missing or has another shape"
    gap, more = (old.double() - new.double()).abs().max(), len(unequal) - 1
    return (
        f"tensor {name} differs in {int((old != new).sum())} of {old.numel()} elements by at most {gap:.3g} "
        f"(largest value {old.double().abs().max():.3g}){f', {more} more differ' if more else ''}"
    )


def _equal(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    return old is not None and new is not None and old.dtype == new.dtype and torch.equal(old, new)


def replay_run(
    replayer: Replayer,
    steps: Sequence[int],
    rollouts: bool,
    tell: Callable[[str], Any] = lambda _: None,
) -> ReplaySummary:
    """Execute steps again, from the nearest version that can be restored, and compare them all.

    The steps are consecutive; those between the restored version and the first are executed too. With
    `rollouts` their trajectories are scored as well. `tell` gets one sentence for each step.

    Raises:
        AntiphonError: for artifacts that cannot be used; differences are in the summary instead.
    """
    begun = replayer.start(steps[0])
    for step in range(begun, steps[-1] + 1):
        tell(replayer.step(step).words())
    for step in steps if rollouts else ():
        tell(replayer.score(step).words())
    return replayer.summary


@contextmanager
def weights_of(
    copy: ReplayCopy, version: int, own_checkpoints: Path | None, tell: Callable[[str], None]
) -> Iterator[Path]:
    """Yield the safetensors file of a recorded version; one that is not kept is there until the end.

    A version with an adapter is merged from that. Of any other `tell` hears how many steps have to be
    repeated, how long that takes, and how far it is; the rest as for `Replayer`.

    Raises:
        AntiphonError: when the replay cannot begin.
        IntegrityError: when its weights come out different from the recorded ones.
    """
    if (kept := copy.weights(version)) is not None:
        yield kept
        return
    tell(f"version {version} of {copy.run_id} is recorded by its digest alone; making it again")
    adapter, base = copy.adapter(version), copy.weights(0)
    with tempfile.TemporaryDirectory(prefix="antiphon-version-") as folder:
        path = Path(folder) / f"v{version:06d}.safetensors"
        if adapter is not None and base is not None:
            write_merged(base, adapter, version, copy.weights_digest(version), path)
            yield path
            return
        replayer = Replayer(copy, own_checkpoints=own_checkpoints)
        try:
            begun = replayer.start(version)
            source = f"the checkpoint of version {begun}" if begun else "the base model"
            steps = "1 step" if version - begun == 1 else f"{version - begun} steps"
            tell(f"{steps} to repeat from {source}")
            for step in range(begun, version):
                check = replayer.step(step)
                if check.found_digest != check.recorded_digest:
                    raise IntegrityError(replayer.summary.first_difference() or check.words())
                left = version - step - 1
                more = f"; the other {left} take about {left * check.seconds:.0f} s" if left else ""
                tell(f"step {step} repeated in {check.seconds:.1f} s{more}")
            assert replayer.held is not None
            store = PayloadStore(Path(folder))
            manifest = write_snapshot(store, copy.run_id, version, replayer.held.weights)
            os.replace(store.path(manifest.payloads[0].digest), path)
        finally:
            replayer.close()
        yield path
