"""Step: a recorded batch takes the policy from version t to t + 1, and always to the same bits.

A `Trainer` owns the engine and lives on one thread. What it does depends on the base weights,
the configuration and the batch files alone, so that repeating recorded steps after a crash, or
in a replay, leads to the digests that were committed.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch

from antiphon.core.client_checks import check_adam
from antiphon.core.client_records import CLIENT, CallResult, LoadOrder, TrainingCall
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, IntegrityError
from antiphon.core.learning_rate import rate_share
from antiphon.core.metrics import LEARNER_METRICS, staleness_metric
from antiphon.core.ranks.plan import PLAN_VERSION
from antiphon.core.reference_config import WHO_SCORES
from antiphon.core.reporting.replay_checks import CPU, exact_on
from antiphon.core.seeds import derive_seed
from antiphon.core.trust.audit import SampleStatistics
from antiphon.lineage.client_steps import decode_call, decode_step, encode_call, is_client_step
from antiphon.lineage.rollout_table import LeftOut, is_recomputed, read_batch
from antiphon.services.learner.accumulation import Accumulation, Sums
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
from antiphon.services.learner.earlier_policies import EarlierPolicies
from antiphon.services.learner.figures import REFERRED, Figures, gather_figures
from antiphon.services.learner.objective import LOG_RATIO_LIMIT, NOTHING, TokenMetrics, UpdateTotals
from antiphon.services.learner.own_objective import own_objective
from antiphon.services.learner.packing import MicroBatch, Packing, deal_groups, with_behaviour
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.ranks.group import ALONE, Order, join
from antiphon.services.learner.saved import SavedFolder
from antiphon.services.learner.training import TrainedStep, Training

Floats = npt.NDArray[np.float64]
_WORLD = "world.json"
"""Says in a checkpoint's folder how many ranks made it."""
_log = structlog.get_logger(__name__)


class Trainer(Training):
    """The engine and the version it holds; every method runs on the training thread."""

    def __init__(
        self,
        config: RunConfig,
        checkpoints: CheckpointStore,
        make_engine: Callable[[RunConfig], DeepSpeedEngine] = DeepSpeedEngine,
        saved: SavedFolder | None = None,
        earlier: EarlierPolicies | None = None,
    ) -> None:
        """Prepare; the engine is made by `start`. Checkpoints of another configuration are refused.

        `saved` has what clients saved in this home; without it no step of a client can load weights.
        `earlier` scores tokens of earlier versions where engines did not; without it a batch may have none.
        """
        self._config = config
        self._checkpoints = checkpoints
        self._make_engine = make_engine
        self._saved, self._earlier = saved, earlier
        self._engine: DeepSpeedEngine | None = None
        self._calls: Accumulation | None = None
        self._updates = config.algorithm.updates_per_step
        self._share = rate_share(config.learner, config.run.steps, self._updates)
        self.ranks = ALONE
        self.version = -1
        self.progress = ProgressCounter()
        checkpoints.checked = self.progress.add

    def newest_checkpoint(self, at_most: int) -> int | None:
        return self._checkpoints.newest_sound(at_most)

    def start(self, at_most: int) -> TrainedStep:
        self.ranks = join(self._config)
        found = self.newest_checkpoint(at_most)
        return self.begin(found)

    def begin(self, version: int | None, checkpoints: CheckpointStore | None = None) -> TrainedStep:
        """Begin again from a checkpoint that was checked, or from the base weights, on every rank.

        The checkpoint is of the run where no other `checkpoints` are given.
        """
        folder = None if version is None else (checkpoints or self._checkpoints).folder(version)
        self.ranks.order(Order.START, -1 if version is None else version)
        with self.ranks.running():
            return self._begin_again(version, folder)

    def _begin_again(self, version: int | None, folder: Path | None = None) -> TrainedStep:
        self._drop()
        if version is not None:
            folder = self._everywhere(folder)
            with self.ranks.together():
                self._check_world(version, folder)
        engine = self._make()
        self.version = 0
        if version is not None and folder is not None:
            self._load(version, folder)
        return TrainedStep(self.version, engine.weights(), {})

    def _everywhere(self, folder: Path | None) -> Path:
        """Return rank 0's folder on all ranks; another host may have the folder of checkpoints elsewhere."""
        root = self._checkpoints.root
        told = self.ranks.share(b"" if folder is None else os.path.relpath(folder, root).encode())
        return folder or Path(os.path.normpath(root / told.decode()))

    def stop(self) -> None:
        self._drop()
        self.ranks.order(Order.STOP)
        self.ranks.close()
        self.ranks = ALONE

    def _make(self) -> DeepSpeedEngine:
        self._engine = engine = self._make_engine(self._config)
        if self._config.environment.name == CLIENT:
            self._calls = Accumulation(self._config, engine, self.progress, self.ranks)
        return engine

    def _drop(self) -> None:
        self._calls = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def held_calls(self) -> Sequence[str]:
        """Return the digests of the calls of a client whose gradients are summed, in order."""
        return self._accumulation().digests

    def forget_calls(self) -> None:
        """Drop the gradients of the calls that are held."""
        calls = self._accumulation()
        self.ranks.order(Order.DROP)
        calls.drop()

    def call(self, call: TrainingCall, digest: str) -> CallResult:
        """Add the gradients of a client's call, unless it is `forward_only`, and return its result.

        Raises:
            ContractError: when it cannot be trained on; nothing was added then.
            IntegrityError: when its loss is no number; then no call is held any more.
        """
        self._accumulation()
        payload = encode_call(call) if self.ranks.world > 1 else b""
        self.ranks.order(Order.CALL, self.version, digest)
        with self.ranks.running():
            self.ranks.share(payload)
            return self._call(call, digest)

    def _call(self, call: TrainingCall, digest: str) -> CallResult:
        calls = self._accumulation()
        return calls.forward(call) if call.forward_only else calls.add(call, digest)

    def _accumulation(self) -> Accumulation:
        self._held()
        if self._calls is None:
            raise ContractError(
                f"this run has the environment {self._config.environment.name}; only runs of "
                f"environment.name={CLIENT} train on a client's calls"
            )
        return self._calls

    def _train_client(self, step: int, payload: bytes) -> TrainedStep:
        """Train on a client's step file: the calls that are held already are not computed again."""
        begun, ranks = time.perf_counter(), self.ranks
        with ranks.together():
            said, calls, engine = decode_step(payload), self._accumulation(), self._held()
            if step != self.version:
                raise IntegrityError(f"step {step} cannot train on version {self.version}; restore first")
            if not isinstance(said.order, LoadOrder):
                check_adam(said.order)
        metrics = {metric.name: 0.0 for metric in LEARNER_METRICS}
        if isinstance(said.order, LoadOrder):
            self.version = -1
            engine = self._load_saved(said.order, step + 1)
        else:
            if calls.digests != list(said.digests[: len(calls.digests)]):
                calls.drop()
            held = len(calls.digests)
            for call, digest in zip(said.calls[held:], said.digests[held:], strict=True):
                calls.add(call, digest, answer=False)
            # Until the update is done the engine stands between two versions.
            self.version = -1
            try:
                sums = calls.close()
                metrics |= _client_metrics(sums, engine.step_with(said.order))
            except RuntimeError as error:  # torch's word for numbers beyond float32, and for no memory
                if ranks.world > 1:  # perhaps on this one alone, and the others wait for it
                    raise
                words = " ".join(str(error).split())[:200]
                raise IntegrityError(f"{said.order} cannot be applied: {words}") from error
            metrics["learning_rate"] = said.order.learning_rate
        self.version = step + 1
        metrics["train_s"] = time.perf_counter() - begun
        exactness = exact_on(device_name(), ranks.world)
        exactness = "" if exactness == exact_on(CPU, 1) else exactness
        loaded = isinstance(said.order, LoadOrder)
        return TrainedStep(self.version, engine.weights(), metrics, {}, exactness, loaded)

    def _load_saved(self, order: LoadOrder, version: int) -> DeepSpeedEngine:
        """Hold saved weights in a new engine, whose optimizer has no moments but the saved ones.

        Raises:
            IntegrityError: when they are not there, or of other ranks or another model.
        """
        ranks, optimizer = self.ranks, order.optimizer
        folder: Path | None = None
        with ranks.together():
            if ranks.rank == 0:  # which has the key that they were signed with
                folder, optimizer = self._find_saved(order, version)
                if (made := checkpoint_ranks(folder)) != ranks.world:
                    raise IntegrityError(
                        f"the weights {order.source.path} were saved by {made} ranks, but learner.ranks is "
                        f"{ranks.world}; load them with learner.ranks={made}"
                    )
        folder, optimizer = self._everywhere(folder), ranks.share(bytes([optimizer])) == b"\1"
        with ranks.together():  # inside of its load DeepSpeed would wait for a rank that lacks the files
            if checkpoint_ranks(folder) != ranks.world:
                raise IntegrityError(
                    f"rank {ranks.rank} does not have the weights {order.source.path} in {folder}; bring the "
                    "run's folder to all hosts, or share it"
                )
        self._drop()
        engine = self._make()
        with ranks.together():
            try:
                engine.load(folder, optimizer)
            except RuntimeError as error:  # torch's word for tensors of other shapes, on all ranks alike
                if ranks.world > 1 and isinstance(error, torch.OutOfMemoryError):
                    raise
                words = " ".join(str(error).split())[:200]
                raise IntegrityError(
                    f"the weights {order.source.path} are of another model: {words}"
                ) from error
        return engine

    def _find_saved(self, order: LoadOrder, version: int) -> tuple[Path, bool]:
        """Return the checkpoint to load, and whether with its optimizer.

        Where that was given up since, the run's own checkpoint of the version that it made has both.
        """
        if self._saved is None:
            raise IntegrityError(
                f"the weights {order.source.path} are not here; bring the folder of that run"
            )
        try:
            return self._saved.weights_of(order.source), order.optimizer
        except IntegrityError:
            if self._checkpoints.newest_sound(version) != version:
                raise
            return self._checkpoints.folder(version), True

    def _check_loaded(self, trained: TrainedStep, order: LoadOrder) -> None:
        """Check that what was loaded is what was saved, on rank 0: the others follow its reading."""
        found = trained.weights.digest()
        if found != order.digest:
            self.version = -1
            raise IntegrityError(
                f"the weights {order.source.path} are {found[:12]}, but {order.digest[:12]} were to be "
                "loaded; they were saved again since, or are of another model"
            )

    def train(self, step: int, payload: bytes) -> TrainedStep:
        self.ranks.order(Order.TRAIN, step, digest_bytes(payload))
        try:
            with self.ranks.running():
                trained = self._train_on(step, lambda: payload)
        except ContractError as error:
            if not is_client_step(payload):
                raise
            raise IntegrityError(f"the step file of step {step} cannot be trained on: {error}") from error
        if trained.loaded and isinstance(order := decode_step(payload).order, LoadOrder):
            self._check_loaded(trained, order)
        return trained

    def follow(self, batch: Callable[[str], bytes]) -> None:
        """Do what rank 0 orders, until it orders to stop; `batch` returns the bytes of a digest."""
        while True:
            given = self.ranks.ordered()
            order, number = given.order, given.number
            try:
                with self.ranks.running():
                    if order is Order.START:
                        self._begin_again(number if number >= 0 else None)
                    elif order is Order.TRAIN:
                        self._train_on(number, partial(batch, given.digest))
                    elif order is Order.CALL:
                        self._call(decode_call(self.ranks.share()), given.digest)
                    elif order is Order.DROP:
                        self._accumulation().drop()
                    elif order is Order.READ:
                        self._held().gather()
                    elif order is Order.SCORE:
                        self._mean_logprob(partial(batch, given.digest))
                    elif order is Order.SAVE:
                        self._save()
                    else:
                        self._drop()
                        self.ranks.close()
                        return
            except AntiphonError as error:
                _log.warning("order.refused", order=order.name, reason=str(error))  # by all ranks

    def _train_on(self, step: int, read: Callable[[], bytes]) -> TrainedStep:
        with self.ranks.together():
            payload = read()
        if is_client_step(payload):
            return self._train_client(step, payload)
        if self._calls is not None:
            self._calls.drop()  # a step that was skipped has a batch without rows
        return self._train(step, payload)

    def _train(self, step: int, payload: bytes) -> TrainedStep:
        algorithm, ranks, progress = self._config.algorithm, self.ranks, self.progress
        begun = time.perf_counter()
        with ranks.together():
            engine = self._held()
            if step != self.version:
                raise IntegrityError(f"step {step} cannot train on version {self.version}; restore first")
            (rows, left_out), recomputed = read_batch(payload), is_recomputed(payload)
            trained = [row for row in rows if not row.failure]
            if algorithm.truncated_completions != "train":
                cut_off = [row for row in trained if row.finish_reason.cut_off]
                trained = [row for row in trained if not row.finish_reason.cut_off]
                if algorithm.truncated_completions == "mask_loss":
                    left_out += [LeftOut(row.group_id, 1, row.sampled_tokens) for row in cut_off]
            if self._config.reference.used and any(row.reference_logprobs is None for row in trained):
                raise IntegrityError(
                    f"the batch of step {step} has no reference_logprobs, which reference.kl and "
                    "reference.distillation need; train it with the configuration that it was sealed with"
                )
            versions, earlier = {span.version for row in trained for span in row.spans}, self._earlier
            older = sorted(version for version in versions if recomputed and version < step)
            if older and (earlier is None or ranks.world > 1):
                raise IntegrityError(
                    f"step {step} has tokens of version {older[0]} without log-probabilities, which one "
                    "rank alone can compute, of stored versions; set learner.ranks=1 or loop.max_staleness=0"
                )
            # In a file of an earlier version groups left out have no names, and so no part in the dealing.
            ids = {row.group_id for row in trained}
            if all(group.group_id for group in left_out):
                ids |= {row.group_id for row in rows} | {group.group_id for group in left_out}
            # An update that gets nothing to train on is not made.
            groups = [
                (place, dealt)
                for place, dealt in enumerate(deal_groups(ids, self._updates))
                if any(row.group_id in dealt for row in trained)
            ]
            budget = self._config.learner.micro_batch_tokens
            updates = [
                Packing([row for row in trained if row.group_id in dealt], step, budget, ranks.world)
                for _, dealt in groups
            ]
        torch.manual_seed(derive_seed("learner", self._config.run.seed, step) % 2**63)
        # Until the update is done the engine stands between two versions.
        self.version = -1
        # The last turn of a trajectory ends it only where its task has one turn.
        limits, of_turn = self._config.turn_limits, self._config.sampling.max_tokens
        turns = any(not row.finish_reason.ends_turn for row in rows)
        longest = min(limits.turns * of_turn, limits.tokens) if turns else None
        # Later updates clip against the weights the step began with; the first one holds them, and the user's
        # own objective is given none.
        proximal: list[list[torch.Tensor] | None] = [None] * (len(updates) if algorithm.own_objective else 1)
        # Where engines gave none, what the step began with is what sampled, but for what is stale.
        first, begun_with = 0 if recomputed else len(proximal), []
        for packing in updates[first:]:
            old = []
            for batch in packing.of_rank(ranks.rank):
                old.append(engine.logprobs(batch))
                progress.add()
            begun_with.append(old)
        proximal += begun_with[len(proximal) - first :]
        sampled_with = begun_with
        if earlier is not None and older:
            sampled_with = earlier.sampled_with(older, step, updates, begun_with, progress.add)
        figures: list[list[Figures]] = []
        norms = []
        for packing, before, (place, dealt) in zip(updates, proximal, groups, strict=False):
            share = self._share(step * self._updates + place)
            besides = NOTHING if algorithm.divisor == "trained" else _totals(left_out, dealt, len(groups))
            totals = UpdateTotals(
                packing.trajectories + besides.trajectories,
                packing.completion_tokens + besides.tokens,
                longest,
            )
            own: list[Figures] = []

            def keep(batch: MicroBatch, loss: float, found: TokenMetrics, own: list[Figures] = own) -> None:
                progress.add()
                if batch.rows:
                    own.append(Figures.of(batch, loss, found))

            batches = packing.of_rank(ranks.rank)
            if recomputed:
                batches = with_behaviour(batches, sampled_with[len(figures)])
            norms.append(engine.update(batches, totals, before, share, keep))
            figures.append(gather_figures(ranks, packing, own))
        seen = any(figures)  # rank 0 has those of all ranks; another one may have had dummies alone
        metrics = _metrics(figures, norms) if seen else {metric.name: 0.0 for metric in LEARNER_METRICS}
        self.version = step + 1
        metrics["learning_rate"] = engine.learning_rate * self._share(self.version * self._updates - 1)
        metrics["train_s"] = time.perf_counter() - begun
        # Only the first update sees the weights that the step began with.
        apart = drifts(figures[0]) if seen else {}
        said = exact_on(device_name(), ranks.world)
        exactness = "" if said == exact_on(CPU, 1) else said
        return TrainedStep(self.version, engine.weights(), metrics, apart, exactness)

    def mean_logprob(self, payload: bytes) -> float:
        """Return the mean logprob, nats, of what a batch file has as sampled, under the version held."""
        self.ranks.order(Order.SCORE, self.version, digest_bytes(payload))
        with self.ranks.running():
            return self._mean_logprob(lambda: payload)

    def _mean_logprob(self, read: Callable[[], bytes]) -> float:
        with self.ranks.together():
            engine, (rows, _) = self._held(), read_batch(read())
            budget = self._config.learner.micro_batch_tokens
            packing = Packing(rows, self.version, budget, self.ranks.world)
        own = 0.0
        for batch in packing.of_rank(self.ranks.rank):
            found = float((engine.logprobs(batch).double() * batch.mask).sum())
            own += found if batch.rows else 0.0  # a dummy is of no row
        every = self.ranks.collect(np.array([own]), [1] * self.ranks.world)
        return sum(float(one[0]) for one in every) / packing.completion_tokens

    def save(self) -> int:
        return self.save_to(self._checkpoints)

    def save_to(self, checkpoints: CheckpointStore) -> int:
        """Save as `save`, elsewhere."""

        def save(folder: Path) -> dict[str, str]:
            self.progress.counting("byte", lambda: _bytes_in(folder))
            (folder / _WORLD).write_text(json.dumps({"ranks": self.ranks.world, "plan": PLAN_VERSION}))
            self.ranks.order(Order.SAVE, self.version)
            with self.ranks.running():
                return self._save(folder)

        self._held()
        checkpoints.write(self.version, save)
        return self.version

    def _save(self, folder: Path | None = None) -> dict[str, str]:
        folder = self._everywhere(folder)
        state = {
            "version": self.version,
            "config_digest": config_digest(self._config),
            "torch_rng": torch.get_rng_state(),
        }
        return self._held().save(folder, state, self.progress.add)

    def _check_world(self, version: int, folder: Path) -> None:
        """Check that a checkpoint is of as many ranks: each has the optimizer's state of its own part."""
        ranks = checkpoint_ranks(folder)
        if ranks != self.ranks.world:
            raise ConfigError(
                f"the checkpoint of version {version} was made by {ranks} ranks, but learner.ranks is "
                f"{self.ranks.world}; continue with learner.ranks={ranks}, or start a new run"
            )

    def _load(self, version: int, folder: Path) -> None:
        engine = self._held()
        state = engine.load(folder)
        wanted = config_digest(self._config)
        with self.ranks.together():
            if state["config_digest"] != wanted:
                raise ConfigError(
                    f"the checkpoint of version {version} was made with other model, algorithm or learner "
                    "settings, or another source of algorithm.objective; continue with those of that run, or "
                    "start a new run"
                )
            if state["version"] != version:
                raise IntegrityError(f"the checkpoint of version {version} holds version {state['version']}")
        torch.set_rng_state(state["torch_rng"])
        self.version = version

    def _held(self) -> DeepSpeedEngine:
        if self._engine is None or self.version < 0:
            raise IntegrityError("the learner holds no version; call restore first")
        return self._engine


def device_name() -> str:
    """Return the kind of device that ranks train on here."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else CPU


def checkpoint_ranks(folder: Path) -> int:
    """Return how many ranks made a checkpoint; those of earlier releases were made by one."""
    world = folder / _WORLD
    if not world.is_file():
        return 1
    try:
        return int(json.loads(world.read_text())["ranks"])
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{world} does not say how many ranks made the checkpoint; remove it") from error


def config_digest(config: RunConfig) -> str:
    """Return the digest of the settings that decide what the weights become.

    Raises:
        ConfigError: when an objective of the user's own is not there, or is no loss.
    """
    beside = {"advantage", "deviation"}  # a batch has the advantages
    later = ("entropy_bonus", "sequence_filter", "sequence_filter_low", "sequence_filter_high")
    beside |= {key for key in later if not getattr(config.algorithm, key)}  # unknown to earlier releases
    left_out = {"checkpoint_interval", "checkpoints_kept", "ranks"}
    # Which earlier releases did not know.
    left_out |= set() if config.learner.lora.rank else {"lora"}
    left_out |= {"devices"} | (set() if config.learner.freeze else {"freeze"})
    text = "\n".join(
        [
            config.model.model_dump_json(exclude={"head"} if config.model.head == "model" else set()),
            config.algorithm.model_dump_json(exclude=beside),
            config.learner.model_dump_json(exclude=left_out),
            *(
                [config.reference.model_dump_json(exclude=set(WHO_SCORES))]
                if config.reference.in_loss
                else []
            ),
            f"{config.run.seed} {config.run.steps}",
            f"{config.sampling.temperature} {config.sampling.max_tokens}",
            *([own_objective(config.algorithm.objective)[1]] if config.algorithm.own_objective else []),
        ]
    )
    return digest_bytes(text.encode())


def _bytes_in(folder: Path) -> int:
    """Return how much of a checkpoint is written; it gets another name when it is whole."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*"))
    except OSError:
        return 0


def _client_metrics(sums: Sums, norm: float) -> dict[str, float]:
    loss, tokens, ratio, clipped, apart = sums.figures.tolist()
    return {
        "loss": loss,
        "gradient_norm": norm,
        "completion_tokens": tokens,
        "trajectories": float(sums.data),
        "micro_batches": float(sums.micro_batches),
        "ratio_mean": ratio / tokens if tokens else 0.0,
        "clip_share": clipped / tokens if tokens else 0.0,
        "kl_k1": apart / tokens if tokens else 0.0,
    }


def _totals(left_out: Sequence[LeftOut], dealt: Collection[str], updates: int) -> UpdateTotals:
    """Return what one of a step's updates divides by besides its own rows; unnamed groups count in each."""
    shared = [(group, 1) for group in left_out if group.group_id in dealt]
    shared += [(group, updates) for group in left_out if not group.group_id]
    return UpdateTotals(
        sum(group.trajectories / by for group, by in shared), sum(group.tokens / by for group, by in shared)
    )


def _metrics(updates: Sequence[Sequence[Figures]], norms: Sequence[float]) -> dict[str, float]:
    figures = [one for own in updates for one in own]

    def column(name: str) -> npt.NDArray[Any]:
        return np.concatenate([one.column(name) for one in figures])

    learner, behaviour = (column(f"{who}_logprobs").astype(np.float64) for who in ("learner", "behaviour"))
    referred = len(figures[0].tokens) == len(REFERRED)
    slots, real_slots = (sum(int(one.sums[place]) for one in figures) for place in (1, 2))
    return {
        "loss": sum(sum(float(one.sums[0]) for one in own) for own in updates) / len(updates),
        "gradient_norm": sum(norms) / len(norms),
        "completion_tokens": float(len(learner)),
        "trajectories": float(len({row for one in figures for row in one.rows})),
        "padding_share": 1.0 - real_slots / slots,
        "micro_batches": float(len(figures)),
        **(describe_reference(learner, column("reference_logprobs").astype(np.float64)) if referred else {}),
        **describe_tokens(
            learner - behaviour,
            learner,
            column("altered") > 0,
            column("clipped") > 0,
            column("applied").astype(np.float64),
            column("staleness").astype(np.int64),
        ),
    }


def describe_reference(learner: Floats, reference: Floats) -> dict[str, float]:
    """Return REFERENCE_METRICS from the logprobs [K], nats, of learner and reference."""
    apart = np.clip(reference - learner, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {"reference_kl_k1": _k1(apart), "reference_kl_k3": _k3(apart)}


def drifts(figures: Sequence[Figures]) -> dict[str, tuple[SampleStatistics, ...]]:
    """Return how far each trajectory's logprobs are from the learner's, by group.

    Only trajectories that the present weights sampled are in it: others differ because the policy
    moved on. Nothing is computed for this; the loss needs these logprobs anyway.
    """
    found: dict[str, list[SampleStatistics]] = {}
    for one in figures:
        apart = np.abs(one.column("learner_logprobs") - one.column("behaviour_logprobs"))
        ends = np.cumsum(one.counts)[:-1]
        parts = zip(one.rows, np.split(apart, ends), np.split(one.column("staleness"), ends), strict=True)
        for (group_id, sample), own, staleness in parts:
            if not staleness.any():
                drift = float(own.astype(np.float64).mean())
                found.setdefault(group_id, []).append(SampleStatistics(sample, own.size, 0, 0, drift))
    return {group_id: tuple(samples) for group_id, samples in found.items()}


def describe_tokens(
    log_ratio: Floats,
    learner_logprobs: Floats,
    altered: npt.NDArray[np.bool_],
    clipped: npt.NDArray[np.bool_],
    applied: Floats,
    staleness: npt.NDArray[np.int64],
) -> dict[str, float]:
    """Return the token metrics of `core.metrics` from one entry per completion token of a step, [K] each.

    Args:
        log_ratio: learner minus behaviour logprob, nats.
        learner_logprobs: nats.
        altered: as in `TokenMetrics`, like the next two.
        clipped: at least one token is needed.
        applied: the weight of each token.
        staleness: versions.
    """
    bounded = np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, squares = np.exp(bounded), float((applied**2).sum())
    metrics = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_share": clipped.mean(),
        "truncated_share": altered.mean(),
        "kl_k1": _k1(bounded),
        "kl_k3": _k3(bounded),
        # (sum w)^2 / sum w^2 / K (Kish 1965); 0 where no weight is left.
        "effective_sample_share": float(applied.sum()) ** 2 / squares / applied.size if squares else 0.0,
        "entropy_estimate": -learner_logprobs.mean(),
    }
    for age in np.unique(staleness):
        chosen = bounded[staleness == age]
        metrics[staleness_metric("kl_k1", int(age))] = _k1(chosen)
        metrics[staleness_metric("kl_k3", int(age))] = _k3(chosen)
        metrics[staleness_metric("tokens", int(age))] = float(chosen.size)
    return {name: float(value) for name, value in metrics.items()}


def _k1(log_ratio: Floats) -> float:
    return float(-log_ratio.mean())


def _k3(log_ratio: Floats) -> float:
    # expm1 keeps the tiny values of an almost on-policy batch, where exp(x) - 1 is all rounding.
    return float((np.expm1(log_ratio) - log_ratio).mean())
